"""Answers of the server for complete, growing, torn, resumed and deleted runs; it changes none of them."""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import shutil
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atomrl.common.files import write_text
from atomrl.config import parse_overrides
from atomrl.tools.ui.catalog import Catalog, details, downsample, group, id_of
from atomrl.tools.ui.compare import band, combine, run_data
from atomrl.tools.ui.new_run import FOLDER, Launcher, LaunchError
from atomrl.tools.ui.server import Watcher
from atomrl.tracking.reading import MetricTable, Run
from atomrl.tracking.reading.state import LOG, Home
from tests.tiny_vision import make_tiny_vision_model
from tests.tools.ui.made import log_step, make_run, serving

for package in ("starlette", "orjson", "uvicorn"):
    pytest.importorskip(package, reason="the extra `ui` is not installed")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    make_run(folder / "group" / "one", seed=1)
    make_run(folder / "group" / "two", seed=2)
    with serving(folder) as (client, process):
        yield folder, client, process


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def curves(body: bytes) -> tuple[int, dict[str, tuple[list[int], list[float]]], dict[str, dict[str, list[float]]]]:
    """The newest step; of each metric the steps and its values; and of each table its axis, and `per`."""
    length = struct.unpack("<I", body[:4])[0]
    header, numbers = json.loads(body[4 : 4 + length]), iter(np.frombuffer(body, "<f4", offset=4 + length).tolist())
    series, axes = {}, {}
    for table in ("train", "eval"):
        count, per = header[table]["count"], header[table]["per"]
        columns = [[next(numbers) for _ in range(count)] for _ in header[table]["axis"]]
        axes[table] = dict(zip(header[table]["axis"], columns, strict=True)) | {"per": per}
        for name in header[table]["names"]:
            values = [[next(numbers) for _ in range(count)] for _ in range(3 if per > 1 else 1)]
            series[name] = (axes[table]["last"], values[0] if per == 1 else values)
    assert not list(numbers)
    return header["step"], series, axes


def test_runs_are_listed_with_what_one_asks_first(served):
    folder, client, _ = served
    about = client.get("/api/runs").json
    one, two = about["runs"]
    assert about["folder"] == str(folder) and [one["name"], two["name"]] == ["group/one", "group/two"]
    assert one["group"] == two["group"] and (one["seed"], two["seed"]) == (1, 2)
    assert (one["status"], one["step"], one["steps"], one["algorithm"]) == ("failed", 6, 10, "grpo")
    reward, (held_out,) = one["reward"], one["held_out"]
    assert (reward["name"], reward["first"], reward["last"]) == ("critic/score/mean", [1, 0.1], [6, 0.6])
    assert reward["spark"] == [[1, 2, 3, 4, 5, 6], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]]
    assert one["loss"] is None and one["seconds"] == 12.0 and one["silent_s"] is None
    assert (held_out["kind"], held_out["source"], held_out["last"]) == ("accuracy", "sums", [0, 0.25])
    assert about["runs"] == client.get("/api/runs").json["runs"]


def test_curves_come_as_numbers(served):
    _, client, _ = served
    run = client.id_of("group/one")
    asked = "keys=critic/score/mean%0Aval-core/sums/acc/mean@1%0Ano"
    step, series, axes = curves(client.get(f"/api/runs/{run}/metrics?{asked}").body)
    assert step == 6 and series["val-core/sums/acc/mean@1"] == ([0.0], [0.25])
    assert series["critic/score/mean"] == ([1, 2, 3, 4, 5, 6], pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]))
    assert axes["train"]["time"] == [2, 4, 6, 8, 10, 12] and axes["eval"]["time"] == [0] and "no" not in series
    _, part, _ = curves(client.get(f"/api/runs/{run}/metrics?keys=critic/score/mean&from=3&to=4").body)
    assert part["critic/score/mean"][0] == [2, 3, 4, 5]  # one more on either side, for the lines to the edges


def test_points_of_a_long_curve_have_mean_and_range_of_their_steps(served):
    _, client, _ = served
    run = client.id_of("group/one")
    _, series, axes = curves(client.get(f"/api/runs/{run}/metrics?keys=critic/score/mean&points=2").body)
    mean, low, high = series["critic/score/mean"][1]
    assert axes["train"]["per"] == 3 and axes["train"]["first"] == [1, 4] and axes["train"]["last"] == [3, 6]
    assert mean == pytest.approx([0.2, 0.5]) and low == pytest.approx([0.1, 0.4]) and high == pytest.approx([0.3, 0.6])


def test_every_value_comes_as_csv(served):
    _, client, _ = served
    runs = f"{client.id_of('group/one')},{client.id_of('group/two')}"
    answer = client.get(f"/api/compare/curves.csv?runs={runs}&keys=critic/score/mean%0Aval-core/sums/acc/mean@1")
    head, *rows = answer.body.decode().splitlines()
    assert head == "run,step,time_s,tokens,critic/score/mean,val-core/sums/acc/mean@1"
    assert rows[:2] == ["group/one,0,0.0,,,0.25", "group/one,1,2.0,,0.1,"] and rows[-1] == "group/two,6,12.0,,0.6,"
    assert len(rows) == 14 and "attachment" in answer.headers["content-disposition"]


def test_metrics_that_are_the_same_and_that_never_change_are_said(tmp_path):
    folder = make_run(tmp_path / "one")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        row |= {"reward/sum/mean": row["critic/score/mean"], "nowhere": None}
    write_text(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    shown = details(Run(folder), "1", "one")
    assert shown["alike"] == [["critic/score/mean", "reward/sum/mean"]] and "nowhere" not in shown["metrics"]
    assert shown["constant"]["response_length/mean"] == 5.0 and "critic/score/mean" not in shown["constant"]


def test_too_many_runs_are_cut_and_counted(served):
    _, client, _ = served
    for count, left_out in ((2, 0), (18, 2)):
        compared = client.get(f"/api/compare?runs={','.join([client.id_of('group/one')] * count)}").json
        assert (len(compared["runs"]), compared["left_out"]) == (count - left_out, left_out)


def test_a_comparison_names_its_unfinished_runs_and_may_have_no_runs(tmp_path):
    """Both counts reach the page: runs that are no seeds, and runs that are not shown."""
    make_run(tmp_path / "one", seed=1), make_run(tmp_path / "two", seed=2)
    with serving(tmp_path) as (client, _):
        ids = ",".join(client.id_of(name) for name in ("one", "two"))
        compared = client.get(f"/api/compare?runs={ids}").json
        assert compared["unfinished"] == [0, 1] and compared["left_out"] == 0
        nothing = client.get("/api/compare?runs=").json
        assert nothing["runs"] == [] and nothing["unfinished"] == []


def test_the_server_writes_nothing_and_needs_no_torch(served):
    folder, client, process = served
    before, run = listing(folder), client.id_of("group/two")
    for path in (
        "",
        "/config",
        "/rollouts?text=is",
        "/rollouts/1/train/0",
        "/rollouts/1/train/0/tokens",
        "/tail?after=0",
    ):
        assert client.get(f"/api/runs/{run}{path}").status == 200
    assert listing(folder) == before
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()


def test_later_steps_are_requested_alone(served):
    folder, client, _ = served
    live = make_run(folder / "live", steps=2)
    try:
        assert client.get("/api/runs").status == 200
        time.sleep(2.1)
        run = client.id_of("live")
        log_step(live, 3)
        with (live / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "critic/sco')
        tail = client.get(f"/api/runs/{run}/tail?after=2").json
        assert tail["steps"] == [3] and tail["columns"]["critic/score/mean"] == [0.3] and not tail["rewritten"]
        assert tail["evaluations"] == 1
        assert not client.get(f"/api/runs/{run}/tail?after=2&resumed=0").json["rewritten"]
        (live / "env.json").write_text(json.dumps({"resumed": [{"first_step": 1}]}))  # and has passed step 2 again
        assert client.get(f"/api/runs/{run}/tail?after=2&resumed=0").json["rewritten"]
        assert not client.get(f"/api/runs/{run}/tail?after=2&resumed=1").json["rewritten"]
        lines = (live / "metrics.jsonl").read_text().splitlines(keepends=True)
        (live / "metrics.jsonl").write_text("".join(lines[:2]))
        assert client.get(f"/api/runs/{run}/tail?after=3").json["rewritten"]
    finally:
        shutil.rmtree(live)
    assert client.get(f"/api/runs/{run}").status == 404
    time.sleep(2.1)
    assert [one["name"] for one in client.get("/api/runs").json["runs"]] == ["group/one", "group/two"]


def test_changes_are_told(served):
    folder, client, _ = served
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=300)
    connection.request("GET", "/api/events", headers={"Host": f"localhost:{client.port}", "Cookie": client.cookie})
    answer = connection.getresponse()
    assert answer.headers["content-type"].startswith("text/event-stream")

    def event():
        told = {}
        while not told:  # a comment, after ten seconds without an event, is none
            lines = iter(lambda: answer.readline().decode().strip(), "")
            told = dict(line.split(": ", 1) for line in lines if not line.startswith(":"))
        return told

    try:
        assert event()["event"] == "ready"
        run = client.id_of("group/one")
        for _ in range(3):
            with (folder / "group" / "one" / "findings.jsonl").open("a") as file:
                file.write("{}\n")
            told = event()
            assert told == {"event": "changed", "data": json.dumps([run])}
    finally:
        connection.close()


def test_unreadable_runs_are_shown_with_what_is_wrong(tmp_path):
    folder = make_run(tmp_path / "torn")
    (folder / "config.yaml").write_text("a: [1")
    (folder / "env.json").write_text("[]")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'no json\n["\xff"]\n{"step": 7, "critic/score/mean": NaN, "x": "text"}\n')
    path = folder / "rollouts" / "step_000002" / "train.jsonl"
    path.write_text(path.read_text()[:-40] + '\n{"completion": "\\ud800"}\n')
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.yaml").write_text("")
    with serving(tmp_path) as (client, _):
        cards = {card["name"]: card for card in client.get("/api/runs").json["runs"]}
        assert cards["torn"]["step"] == 7 and cards["torn"]["problems"] == 4 and cards["bare"]["step"] == 0
        for card in cards.values():
            for path in ("", "/config", "/rollouts", "/tail?after=0", "/metrics?keys=critic/score/mean"):
                assert client.get(f"/api/runs/{card['id']}{path}").status == 200
        problems = client.get(f"/api/runs/{cards['torn']['id']}").json["problems"]
        assert any("config.yaml" in line for line in problems) and any("metrics.jsonl:8" in line for line in problems)
        rows = client.get(f"/api/runs/{cards['torn']['id']}/rollouts?first_step=2&last_step=2").json
        assert rows["total"] == 8 and rows["rows"][-1]["completion"] == "?"


def test_many_that_ask_at_once_have_a_run_read_once(tmp_path, monkeypatch):
    make_run(tmp_path / "one")
    read = []
    monkeypatch.setattr("atomrl.tools.ui.catalog.Run", lambda path: (read.append(path), time.sleep(0.1), Run(path))[2])
    catalog = Catalog(tmp_path)
    [entry] = catalog.entries()
    threads = [threading.Thread(target=catalog.card, args=(entry,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 1


def test_few_runs_are_kept_in_memory(tmp_path):
    for number in range(12):
        make_run(tmp_path / f"run-{number}", steps=1)
    catalog = Catalog(tmp_path)
    for entry in catalog.entries():
        catalog.card(entry)
    assert sum(entry.run is not None for entry in catalog.entries()) <= 7


def test_a_run_elsewhere_that_falls_silent_is_seen(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "one")
    (folder / ".lock").write_text("process 7 on elsewhere\n")
    catalog, now = Catalog(tmp_path), time.time()
    [entry] = catalog.entries()
    assert catalog.card(entry)["status"] == "running"
    before = entry.current_stamp()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert entry.current_stamp() != before and catalog.card(entry)["status"] == "failed"
    assert catalog.card(entry) is catalog.card(entry)  # and is then left alone


def test_no_spike_is_lost_when_there_are_more_points_than_pixels():
    values = np.zeros(10_000)
    values[[1234, 8000]] = 7.0, -3.0
    steps, shown = downsample(np.arange(10_000), values, 600)
    assert len(steps) <= 600 and shown.max() == 7.0 and shown.min() == -3.0
    assert steps[0] == 0 and steps[-1] == 9_999 and (np.diff(steps) > 0).all()


def test_a_table_of_nothing_has_no_points():
    assert downsample(*MetricTable().points("a"), 10)[0].tolist() == []


def test_runs_of_one_group_differ_in_seed_and_name_alone():
    one = {"seed": 1, "run_name": "a", "output_dir": "x", "train": {"steps": 3}}
    assert group(one) == group({**one, "seed": 2, "run_name": "b"}) != group({**one, "train": {"steps": 4}})


def test_a_key_that_a_run_s_version_lacks_is_no_difference():
    def run_data(config):
        card = {"group": str(config), "name": "a", "status": "finished"}
        return {"card": card, "config": config, "curves": {}, "judged": {}, "evaluations": [], "clocks": {}}

    merged = combine([run_data({"a": 1, "b": None}), run_data({"a": 2, "b": None, "c": 0, "run_name": "x"})])
    assert merged["config"] == {"a": [1, 2]} and merged["partial"] == {"c": [None, 0]}


def test_runs_that_differ_in_their_seeds_are_judged_together(tmp_path):
    parts = []
    for place, rate in enumerate((1e-3, 1e-2, 1e-3)):
        folder = make_run(tmp_path / f"run-{place}", steps=2 + place, seed=place, train={"learning_rate": rate})
        with (folder / "metrics.jsonl").open("a") as file:
            row = {"step": 2 + place, "val-core/sums/acc/mean@1": 0.5 + place / 10}
            file.write(json.dumps(row) + "\n")
        (folder / "summary.json").write_text('{"finished": true}')
        parts.append(run_data(Run(folder), str(place), folder.name))
    merged = combine(parts)
    assert merged["groups"] == [[0, 2], [1]]
    columns = {one["title"]: one for one in merged["columns"]}
    assert columns["accuracy"]["values"] == (0.5, 0.6, 0.7) and columns["accuracy"]["over"][0] == (0.6, 0.5, 0.7)
    assert [pytest.approx(one) for one in columns["reward"]["over"]] == [(0.2, 0.15, 0.25), (0.2, 0.2, 0.2)]
    shared, alone = merged["bands"]["critic/score/mean"]
    assert (shared["steps"], shared["mean"], shared["count"]) == ([1, 2], [0.1, 0.2], [2, 2]) and alone is None
    assert set(merged["config"]) == {"seed", "train.learning_rate"}


def test_a_band_has_every_step_that_two_runs_have_and_no_spike_is_lost():
    steps = np.arange(1, 10_001)
    given = [(steps[: 10_000 - 1000 * seed], np.full(10_000 - 1000 * seed, float(seed))) for seed in range(3)]
    given[1][1][4321] = 50.0
    bands = band(given, 300)
    assert len(bands["steps"]) == 300 and bands["steps"][0] == 1 and max(bands["high"]) == 50.0
    assert bands["low"][0] == 0.0 and bands["high"][0] == 2.0 and bands["mean"][0] == pytest.approx(1.0)
    assert bands["count"][0] == 3 and bands["count"][-1] == 2 and bands["mean"][-1] == pytest.approx(0.5)
    assert bands["steps"][-1] <= 9000 and band(given[:1], 300) is None and band([], 300) is None


def test_a_run_that_was_just_written_is_looked_at_as_often_as_one_that_runs(tmp_path, monkeypatch):
    one, other = (make_run(tmp_path / name, steps=1) for name in ("one", "other"))  # of neither a lock is held
    os.utime(other / "metrics.jsonl", (1e9, 1e9))
    os.utime(other / "config.yaml", (1e9, 1e9))
    watcher, now = Watcher(Catalog(tmp_path)), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    before = watcher.stamps()
    for folder in (one, other):
        log_step(folder, 2)
    now += 0.3
    after = watcher.stamps()
    assert [name for name in before if before[name] != after[name]] == [id_of("one")]
    now += 2.0
    assert watcher.stamps()[id_of("other")] != before[id_of("other")]


def test_nothing_is_launched_elsewhere_or_over_a_run(tmp_path):
    launcher = Launcher(tmp_path / "runs")
    for place in ("/etc/x", str(tmp_path / "runs" / ".." / "x"), str(tmp_path / "runs")):
        with pytest.raises(LaunchError, match="is not in"):
            launcher.start("{}", place, Home())
    folder = make_run(tmp_path / "runs" / "one")
    with pytest.raises(LaunchError, match="already exists"):
        launcher.start("{}", str(folder), Home())
    assert not (tmp_path / "runs" / ".launches").exists()


def test_a_run_that_is_just_ending_is_waited_for(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "one")
    owners, spawned = iter([7, 7, None]), []
    monkeypatch.setattr("atomrl.tools.ui.new_run.lock_owner", lambda _: next(owners))
    monkeypatch.setattr(Launcher, "spawn", lambda _, arguments, *rest: spawned.append(arguments))
    with pytest.raises(LaunchError, match="still running"):
        Launcher(tmp_path).resume(folder)
    (folder / "summary.json").write_text('{"finished": false}')
    Launcher(tmp_path).resume(folder)
    [arguments] = spawned
    assert arguments[:2] == ["train", str(folder / "config.yaml")] and arguments[-1] == "--resume"


@pytest.mark.parametrize("name", ["7", "1e3", "null", "a: b"])
def test_a_run_of_any_name_is_resumed(tmp_path, monkeypatch, name):
    folder, spawned = make_run(tmp_path / name), []
    monkeypatch.setattr(Launcher, "spawn", lambda _, arguments, *rest: spawned.append(arguments))
    Launcher(tmp_path).resume(folder)
    given = parse_overrides([word for word in spawned[0] if word.startswith(("output_dir", "run_name"))])
    assert given == {"output_dir": str(tmp_path), "run_name": name}


def test_two_that_start_at_once_have_a_config_each(tmp_path, monkeypatch):
    monkeypatch.setattr(Launcher, "spawn", lambda _, arguments, *rest: {"config": arguments[1]})
    launcher = Launcher(tmp_path)
    made = [launcher.start(text, str(tmp_path / text / "same"), Home())["config"] for text in ("a", "b")]
    assert [Path(path).read_text() for path in made] == ["a", "b"]


def test_only_a_process_that_writes_the_run_is_stopped(tmp_path):
    folder = make_run(tmp_path / "one")
    (folder / ".lock").write_text(f"process {os.getppid()} on {os.uname().nodename}\n")  # it wrote it once
    with pytest.raises(LaunchError, match="no process"):
        Launcher(tmp_path).stop(folder)


def test_a_run_is_resumed_where_it_was_started(tmp_path, monkeypatch):
    """Relative paths of its config are relative to that folder: data, models, files of rewards."""
    made = tmp_path / "elsewhere"
    made.mkdir()
    (made / "rewards.py").write_text("def mine(completions, **_):\n    return [1.0] * len(completions)\n")
    reward = {"functions": [{"function": "./rewards.py:mine"}]}
    folder = make_run(tmp_path / "runs" / "one", reward=reward)
    environment = {"folder": str(made), "functions_in": [str(made)]}
    (folder / "env.json").write_text(json.dumps(environment))
    launcher = Launcher(tmp_path / "runs")
    monkeypatch.setattr("atomrl.tools.ui.new_run.RUN", "import os, sys; print(os.getcwd(), sys.argv[1:])")
    record = launcher.resume(folder)
    log = launcher.log_of(folder)
    end = time.monotonic() + 120
    while not log.read_text() and time.monotonic() < end:
        time.sleep(0.05)
    assert log.read_text().startswith(f"{made} ['[\"{made}\"]', 'train', '{folder / 'config.yaml'}'")
    assert record["command"][:2] == ["atomrl", "train"]


def test_a_step_s_advantages_are_computed_again(served):
    _, client, _ = served
    path = f"/api/runs/{client.id_of('group/one')}/rollouts/3/train"
    told = client.get(f"{path}/0/advantages").json
    assert "A_i = (r_i - mean_group r)" in told["equation"]
    assert "differ from the recorded" in told["why"], "which are 1 and -1"
    assert client.get(f"{path}/99/advantages").status == 404


def test_the_log_is_that_of_the_start_on_the_page_until_the_run_continues_elsewhere(tmp_path):
    folder = make_run(tmp_path / "one")
    with serving(tmp_path, "--allow-launch") as (client, _):
        path = f"/api/runs/{client.id_of('one')}/log"
        assert client.get(path).json["text"] is None
        write_text(folder / LOG, "first\n")
        assert client.get(path).json == {"text": "first\n", "start": 0, "end": 6, "own": True}
        launches = tmp_path / FOLDER
        launches.mkdir()
        (launches / "one.log").write_text("all that it printed")
        (launches / "one.json").write_text(json.dumps({"run": str(folder)}))
        assert client.get(path).json["text"] == "all that it printed"
        later = time.time() + 60
        os.utime(folder / LOG, (later, later))
        assert client.get(f"{path}?after=3").json == {"text": "st\n", "start": 3, "end": 6, "own": True}


def test_a_variant_finds_the_functions_of_its_parent(tmp_path):
    made = tmp_path / "elsewhere"
    made.mkdir()
    (made / "own.py").write_text("def clip(inputs): ...\n")
    algorithm = {"name": "grpo", "clip": {"type": "custom", "function": "./own.py:clip"}}
    folder = make_run(tmp_path / "runs" / "one", algorithm=algorithm)
    (folder / "env.json").write_text(json.dumps({"folder": str(made), "functions_in": [str(made)]}))
    where = {"run_name": "x", "output_dir": str(tmp_path / "runs")}
    text = json.dumps({**where, "model": {"path": "m"}, "data": {"train": "chain"}, "algorithm": algorithm})
    with serving(tmp_path / "runs", "--allow-launch") as (client, _):
        refused = client.post("/api/launches", {"yaml": text})
        assert refused.status == 409 and "no file ./own.py" in refused.json["detail"]
        response = client.post("/api/launches", {"yaml": text, "from": client.id_of("one")})
        assert response.status == 409 and "data.train_size" in response.json["detail"], "the function was found"


@pytest.mark.slow
def test_a_plan_shows_the_first_rows_with_their_pictures_made_small_and_drawn_anew(tmp_path):
    make_tiny_vision_model(tmp_path / "model")
    Image.new("RGB", (300, 150), "red").save(tmp_path / "red.jpg", comment=b"hunter2")
    row = {"prompt": "<image>how many?", "images": ["red.jpg"], "ground_truth": "1"}
    (tmp_path / "train.jsonl").write_text((json.dumps(row) + "\n") * 8)
    config = {"model": {"path": str(tmp_path / "model")}, "data": {"train": str(tmp_path / "train.jsonl")}}
    config |= {"rollout": {"engine": "hf"}, "reward": {"functions": ["exact_match"]}, "run_name": "sees"}
    plan = Launcher(tmp_path).plan(json.dumps(config), Home())
    assert plan["fits"], plan["text"]
    assert len(plan["rows"]) == 3
    [image] = plan["rows"][0]["images"]
    assert (image["source"], image["width"], image["height"]) == (str(tmp_path / "red.jpg"), 300, 150)
    content = base64.b64decode(image["thumbnail"])
    small = Image.open(io.BytesIO(content))
    assert (small.format, small.size) == ("PNG", (96, 48)) and b"hunter2" not in content
