"""Who is answered, with what, and what the server can be made to do: nothing else."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from atomrl.cli.ui import add_ui
from atomrl.tools.ui.server import CSP, Guard, is_loopback
from atomrl.tracking.reading.state import LOG
from tests.tools.ui.made import Client, make_run, serving

for package in ("starlette", "orjson", "uvicorn"):
    pytest.importorskip(package, reason="the extra `ui` is not installed")


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    make_run(folder / "runs" / "one")
    (folder / "secret.txt").write_text("hunter2")
    (folder / "runs" / "secret.txt").write_text("hunter2")
    make_run(folder / "outside")
    (folder / "runs" / "linked").symlink_to(folder / "outside")
    with serving(folder / "runs") as (made, _):
        yield made


API = ["/", "/api/runs", "/static/app.js", "/api/events", "/api/compare?runs=x"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "192.168.0.7", "[", "a@b"]
)
def test_a_foreign_host_is_refused(client, host):
    assert client.get("/api/runs", Host=host).status == 400


@pytest.mark.parametrize("host", ["localhost", "localhost:9", "127.0.0.1:1234", "[::1]:80", "LOCALHOST"])
def test_the_own_host_is_answered(client, host):
    assert client.get("/api/runs", Host=host).status == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:1", "https://localhost", "http://"]
)
def test_a_foreign_origin_is_refused(client, origin):
    assert client.get("/api/runs", Origin=origin).status == 403
    assert client.post("/api/check", {}, Origin=origin).status == 403


def test_an_origin_or_a_length_that_is_none_is_refused(client):
    assert client.get("/api/runs", Origin="http://[").status == 403
    headers = {"Cookie": client.cookie, "Content_Type": "application/json", "X_Atomrl": "1"}
    assert client.ask("POST", "/api/check", **headers).status == 413


def test_the_own_origin_is_answered(client):
    assert client.get("/api/runs", Origin=client.base, Sec_Fetch_Site="same-origin").status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize("path", API)
def test_requests_from_another_site_are_refused(client, site, path):
    assert client.get(path, Sec_Fetch_Site=site).status == 403


def test_a_link_elsewhere_opens_the_page_but_nothing_else(client):
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    token = client.address.partition("token=")[2]
    assert client.ask("GET", f"/?token={token}", **link).status == 303
    assert client.ask("GET", f"/api/runs?token={token}", **link).status == 403
    assert client.ask("GET", f"/?token={token}", **link | {"Sec_Fetch_Dest": "iframe"}).status == 403


@pytest.mark.parametrize("path", [*API, "/nothing", "/?token=", "/?token=guess"])
def test_without_the_token_nothing_is_answered(client, path):
    assert client.ask("GET", path).status == 401
    wrong = re.sub("=.*", "=guess", client.cookie)
    assert client.ask("GET", path, Cookie=wrong).status == 401
    assert client.ask("GET", path, Cookie="; ;=;").status == 401
    assert b"hunter2" not in client.ask("GET", path).body


@pytest.mark.parametrize("other", ['theme={"mode":"dark"}', "a b=c", "=", "odd", "x=é"])
def test_an_odd_cookie_of_another_server_locks_nobody_out(client, other):
    for cookies in (f"{other}; {client.cookie}", f"{client.cookie};{other}"):
        assert client.ask("GET", "/api/runs", Cookie=cookies).status == 200


def test_the_token_is_not_in_what_is_answered_and_its_cookie_is_hidden_from_scripts(client):
    token = client.address.partition("token=")[2]
    opened = client.ask("GET", f"/?token={token}")
    assert opened.headers["location"] == "/" and {"HttpOnly", "SameSite=Strict"} <= set(
        opened.headers["set-cookie"].split("; ")
    )
    assert token.encode() not in client.get("/").body + client.get("/api/runs").body


def test_every_answer_has_the_headers(client):
    answers = [client.get(path) for path in ("/", "/api/runs", "/static/app.js", "/nothing")]
    answers += [client.ask("GET", "/"), client.get("/", Host="evil.example"), client.post("/api/launches", {})]
    for answer in answers:
        assert answer.headers["content-security-policy"] == CSP
        assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert "unsafe" not in CSP and "http" not in CSP and "default-src 'none'" in CSP
    assert "access-control-allow-origin" not in client.get("/api/runs").headers


TRAVERSALS = [
    "../secret.txt", "..%2fsecret.txt", "%2e%2e/secret.txt", "....//secret.txt", "/etc/passwd", "%2fetc%2fpasswd",
    "..\\secret.txt", "%00", "app.js%00.txt", "vendor/../../security.py", "a" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("path", TRAVERSALS)
def test_no_path_leads_out(client, path):
    run = client.id_of("one")
    parts = ("", f"/{run}", f"/{run}/prompts", f"/{run}/images")
    for place in (f"/static/{path}", *(f"/api/runs{part}/{path}" for part in parts)):
        answer = client.get(place)
        assert answer.status == 404 and b"hunter2" not in answer.body and b"root:" not in answer.body
    assert client.get(f"/api/runs/{run}/rollouts/1/{path}/0").status == 404


def test_links_are_not_followed(client):
    assert [run["name"] for run in client.get("/api/runs").json["runs"]] == ["one"]


def test_a_linked_file_of_a_run_is_not_read(tmp_path):
    folder = make_run(tmp_path / "runs" / "one")
    (tmp_path / "secret").write_text('{"step": 1, "reward": "hunter2", "command": "hunter2"}\n')
    for name in ("env.json", "metrics.jsonl", "findings.jsonl"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / "secret")
    (folder / LOG).symlink_to(tmp_path / "secret")
    rollouts = folder / "rollouts" / "step_000001" / "train.jsonl"
    rollouts.unlink()
    rollouts.symlink_to(tmp_path / "secret")
    with serving(tmp_path / "runs") as (client, _):
        run = client.id_of("one")
        for path in ("", "/rollouts", "/config", "/tail?after=0", "/rollouts/1/train/0", "/log"):
            assert b"hunter2" not in client.get(f"/api/runs/{run}{path}").body


def test_a_picture_of_a_run_is_read_by_its_name_alone(tmp_path):
    folder, name = make_run(tmp_path / "runs" / "one"), "0a" * 32 + ".png"
    images = folder / "inputs" / "images"
    images.mkdir(parents=True)
    (images / name).write_bytes(b"picture")
    (tmp_path / "secret").write_bytes(b"hunter2")
    (images / ("0b" * 32 + ".png")).symlink_to(tmp_path / "secret")
    for other in ("index.json", "0a" * 32 + ".svg", "0A" * 32 + ".png", "0a" * 31 + ".png", "0a" * 32 + ".png.html"):
        (images / other).write_bytes(b"hunter2")
    with serving(tmp_path / "runs") as (client, _):
        place = f"/api/runs/{client.id_of('one')}/images"
        answer = client.get(f"{place}/{name}")
        assert (answer.status, answer.body, answer.headers["content-type"]) == (200, b"picture", "image/png")
        for other in ({each.name for each in images.iterdir()} - {name}) | {"0c" * 32 + ".png"}:
            assert client.get(f"{place}/{other}").status == 404
        images.rename(tmp_path / "elsewhere")
        images.symlink_to(tmp_path / "elsewhere")
        assert client.get(f"{place}/{name}").status == 404


@pytest.mark.parametrize("path", ["/api/check", "/api/plan", "/api/launches", "/api/runs/x/stop", "/api/runs/x/resume"])
def test_requests_that_change_something_need_json_and_a_header(client, path):
    cookie = {"Cookie": client.cookie}
    plain = {"Content_Type": "text/plain", "X_Atomrl": "1"}
    form = {"Content_Type": "application/x-www-form-urlencoded", "X_Atomrl": "1"}
    for headers in (plain, form, {"Content_Type": "application/json"}, {}):
        assert client.ask("POST", path, b"{}", **cookie, **headers).status == 403
    assert client.ask("POST", path, b"{}", Content_Type="application/json", X_Atomrl="1").status == 401
    assert client.ask("GET", path, **cookie).status in (404, 405)


def test_a_large_body_is_refused(client):
    assert client.post("/api/check", {"yaml": "x" * 2**21}).status == 413


def test_launching_is_off_unless_it_is_allowed(client, tmp_path):
    run = client.id_of("one")
    assert client.get("/api/runs").json["launch"] is False
    config = {"yaml": "run_name: x"}
    for path in ("/api/plan", "/api/launches", f"/api/runs/{run}/stop", f"/api/runs/{run}/resume"):
        answer = client.post(path, config)
        assert answer.status == 403 and "--allow-launch" in answer.json["detail"]


AXES = ("advantage", "clip", "token_filter", "rollout_is")
SHADOWED = ("orjson", "optuna", "matplotlib", "pyarrow", "tokenizers", "vllm", "cupy", "sitecustomize", "own")


def make_hostile_run(folder, mark):
    """A run whose config names functions, in whose folder modules lie, and whose `env.json` says to search there: all
    of them leave a mark when they are run."""
    code = f"open({str(mark)!r}, 'a').write(__name__ + ' ')\ndef f(inputs): ...\ndef reward(*a, **k): return 0\n"
    own = {"type": "custom", "function": "./own.py:f"}
    algorithm = {"name": "grpo", **{axis: [own] if axis == "rollout_is" else own for axis in AXES}}
    more = {"reward": {"functions": ["./own.py:reward"]}, "environment": {"function": "./own.py:f"}}
    make_run(folder, algorithm=algorithm, **more)
    (folder / "env.json").write_text(json.dumps({"folder": str(folder), "functions_in": [str(folder)]}))
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(code)
    return {"model": {"path": "m"}, "data": {"train": "chain"}, "algorithm": algorithm} | more


def test_a_run_that_is_looked_at_runs_no_code(tmp_path):
    """On every page, and where runs may be launched too: what launches them is asked for by name."""
    mark, folder = tmp_path / "ran", tmp_path / "runs" / "one"
    config = json.dumps({"run_name": "x", "output_dir": str(tmp_path / "runs")} | make_hostile_run(folder, mark))
    make_run(tmp_path / "runs" / "two")
    for options in ((), ("--allow-launch",)):
        with serving(tmp_path / "runs", *options) as (client, _):
            one, two = client.id_of("one"), client.id_of("two")
            looked = client.get(f"/api/runs/{one}/about").json
            assert looked["errors"] == [] and "./own.py:f(...)" in looked["equation"]
            checked = client.post("/api/check", {"yaml": config, "from": one}).json
            assert checked["errors"] == [] and checked["kind"] == "rl"
            draft = client.post("/api/draft", {"yaml": config, "from": one, "set": {"train.steps": "3"}})
            assert draft.json["yaml"] if options else draft.status == 403
            told = client.get(f"/api/runs/{one}/rollouts/3/train/0/advantages")
            assert told.status == 404 or "not imported" in told.json["why"]
            for path in (
                "",
                *["/card", "/config", "/metrics", "/tail", "/log", "/rollouts", "/rollouts/3/train/0/tokens"],
            ):
                client.get(f"/api/runs/{one}{path}")
            for path in ("", "/difference", "/answers"):
                client.get(f"/api/compare{path}?runs={one},{two}")
        assert not mark.exists(), mark.read_text()


@pytest.mark.parametrize(
    "command",
    [["doctor"], ["compare"], ["rollouts"], ["explain"], ["compare", "--diff"], ["doctor", "--engine", "native"]],
    ids=" ".join,
)
def test_commands_that_look_at_a_run_run_no_code_of_it(tmp_path, command):
    """In the folder itself too, which `python -m` would look for modules in."""
    mark, folder = tmp_path / "ran", tmp_path / "runs" / "one"
    make_hostile_run(folder, mark)
    run = [str(folder / "config.yaml" if "--engine" in command else folder)] * (1 + ("--diff" in command))
    done = subprocess.run(
        [sys.executable, "-m", "atomrl", *command, *run], cwd=folder, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    assert not mark.exists(), mark.read_text()
    assert "Traceback" not in done.stderr, done.stderr


def test_it_listens_on_this_machine_alone():
    parser = argparse.ArgumentParser()
    add_ui(parser)
    assert parser.parse_args([]).host == "127.0.0.1" and not parser.parse_args([]).allow_launch
    assert is_loopback("127.0.0.1") and not is_loopback("0.0.0.0") and not is_loopback("example.org")


def test_beyond_loopback_the_token_is_needed_too(tmp_path):
    make_run(tmp_path / "one")
    with serving(tmp_path, "--host", "0.0.0.0") as (client, _):
        assert client.ask("GET", "/api/runs").status == 401 and client.get("/api/runs").status == 200
        assert client.get("/api/runs", Host="evil.example").status == 400
        assert client.get("/api/runs", Host="192.168.0.7:80").status == 200


def test_the_guard_lets_no_other_protocol_through():
    called = []

    async def application(scope, receive, send):
        called.append(scope["type"])

    with pytest.raises(StopIteration):  # it ends without having waited for anything
        Guard(application, "t", "127.0.0.1")({"type": "websocket"}, None, None).send(None)
    assert called == []


def test_texts_come_as_json_and_never_as_pages(client):
    run = client.id_of("one")
    for path in (
        "/api/runs",
        f"/api/runs/{run}",
        f"/api/runs/{run}/rollouts",
        "/api/nothing",
        "/api/runs/%3Cscript%3E",
    ):
        assert client.get(path).headers["content-type"] == "application/json"


def test_the_pages_name_nothing_elsewhere():
    """No address of another machine is asked for, and no markup is made of texts."""
    static = Path(__file__).parents[3] / "atomrl" / "tools" / "ui" / "static"
    for path in [*static.glob("*.js"), *static.glob("*.css"), *static.glob("*.html")]:
        text = path.read_text()
        assert not re.search(r"(?:https?:)?//[a-z]", re.sub(r"(?m)//.*$|/\*[\s\S]*?\*/", "", text)), path
        for forbidden in ("innerHTML", "insertAdjacent", "document.write", "eval(", "new Function", "dangerously"):
            assert forbidden not in text, (path, forbidden)


def test_vendored_files_are_what_they_were():
    import hashlib

    vendor = Path(__file__).parents[3] / "atomrl" / "tools" / "ui" / "static" / "vendor"
    stated = dict(re.findall(r"^- `([^`]+)` sha256 ([0-9a-f]{64})", (vendor / "VENDORED.md").read_text(), re.M))
    assert stated == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in vendor.iterdir()
        if path.name != "VENDORED.md" and not path.name.endswith(".d.ts")  # their types are ours
    }


def test_clients_are_told_what_is_wrong(client):
    run = client.id_of("one")
    for path in (
        "rollouts?min_reward=x",
        "rollouts?sort=name",
        "rollouts?offset=x",
        "tail?after=-1",
        "metrics?points=1e9",
    ):
        answer = client.get(f"/api/runs/{run}/{path}")
        assert answer.status == 400 and json.loads(answer.body)["detail"]
    assert client.post("/api/check", [1]).status == 400
    assert isinstance(client, Client)
