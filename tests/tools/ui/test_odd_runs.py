"""Answers of the server for malformed runs and malformed requests."""

from __future__ import annotations

import json

import pytest

from tests.tools.ui.made import make_run, serving

for package in ("starlette", "orjson", "uvicorn"):
    pytest.importorskip(package, reason="the extra `ui` is not installed")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    make_run(folder / "good")
    for name, key in (("long", "seed"), ("odd", "other")):
        (make_run(folder / name) / "config.yaml").write_text(f"{key}: 0x{'f' * 6000}")  # Python writes no digits of it
    (make_run(folder / "nest") / "config.yaml").write_text(f"a: {'[' * 20_000}{']' * 20_000}")
    deep = make_run(folder / "deep", steps=1) / "rollouts" / "step_000001" / "train.jsonl"
    nested = "[" * 400 + "]" * 400
    deep.write_text(deep.read_text().replace('"ground_truth": "0"', f'"ground_truth": {nested}'))
    with serving(folder, "--allow-launch") as (client, _):
        yield client


def test_a_run_whose_card_fails_hides_no_other(served):
    deep, good, long, nest, odd = served.get("/api/runs").json["runs"]
    assert (deep["step"], good["step"], odd["status"]) == (1, 6, "failed") and long["seed"].startswith("0xff")
    assert "cannot be read" in odd["error"] and odd.keys() == good.keys()
    assert nest["name"] == "nest"


def test_the_page_of_a_run_that_cannot_be_read_says_why(served):
    answer = served.get(f"/api/runs/{served.id_of('odd')}")
    assert answer.status == 500 and "cannot be read: ValueError" in answer.json["detail"]


def test_a_config_that_is_nested_too_deep_is_answered_and_so_is_the_next(served):
    deep, good = (served.post("/api/check", {"yaml": text}).json for text in ("[" * 50_000, "seed: 1"))
    assert deep.get("errors") or deep.get("failed")
    assert {"key": "run_name", "message": "is required"} in good["problems"]
    deep, good = (served.post("/api/draft", {"yaml": text}).json for text in ("[" * 50_000, "seed: 1"))
    assert "nested too deep" in deep["errors"][0] and good["given"] == {"seed": 1}


def test_values_nested_too_deep_are_left_out(served):
    answer = served.get(f"/api/runs/{served.id_of('deep')}/rollouts/1/train/0")
    assert answer.status == 200 and "\\u2026" in json.dumps(answer.json["ground_truth"])


@pytest.mark.parametrize("path", ["9" * 5000 + "/train/0", "1/train/" + "9" * 5000, "x/train/0", "1/train/-1"])
def test_a_rollout_that_cannot_be_is_not_there(served, path):
    for what in ("", "/tokens", "/tokens/0", "/advantages"):
        assert served.get(f"/api/runs/{served.id_of('good')}/rollouts/{path}{what}").status == 404


def test_a_page_of_rollouts_has_no_more_than_its_size(served):
    path = f"/api/runs/{served.id_of('good')}/rollouts"
    assert served.get(f"{path}?limit=-1").json["rows"] == [] and len(served.get(f"{path}?limit=3").json["rows"]) == 3


def test_the_checked_config_is_the_one_that_starts(served):
    text = json.dumps({"run_name": 7})
    for given in ({"set": {"seed": "1"}}, {"yaml": text, "set": {"run_name": "x", "data.train": "chain"}}):
        answer = served.post("/api/launches", given)
        assert answer.status == 400
