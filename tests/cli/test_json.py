"""Output for programs: --json prints one JSON object and nothing else on stdout; a quiet run prints its summary."""

from __future__ import annotations

import json

import pytest

from atomrl.cli.main import main

CONFIG = {
    "run_name": "first",
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 32},
    "rollout": {"prompts_per_step": 2, "completions_per_prompt": 2, "max_completion_tokens": 6},
    "reward": {"functions": ["exact_match"]},
    "train": {"steps": 2, "learning_rate": 1e-3},
}


@pytest.fixture
def folder(working_directory):
    rows = [{"prompt": f"{k}+1=", "ground_truth": str(k + 1)} for k in range(6)]
    return working_directory(CONFIG, train=rows, eval=rows[:3])


def printed(capsys, line, code=0):
    capsys.readouterr()
    assert main([*line.split(), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_commands_print_one_json_object(folder, capsys):
    assert main(["train", "c.yaml", "--quiet"]) == 0
    quiet = capsys.readouterr()
    assert json.loads(quiet.out)["steps"] == 2
    assert "step 1/2" not in quiet.err and "completions of step" not in quiet.err and "rl:" not in quiet.err
    assert "step 1/2" in (folder / "runs" / "first" / "log.txt").read_text()

    plan = printed(capsys, "plan c.yaml")
    assert plan["fits"] is True and plan["memory_bytes"]["peak"] < plan["memory_bytes"]["budget"]
    assert printed(capsys, "plan c.yaml --memory 1MiB", code=1)["fits"] is False

    scored = printed(capsys, "eval runs/first/model --data eval.jsonl --max-tokens 4 --reward exact_match")
    assert scored["prompts"] == 3 and 0 <= scored["overall"]["accuracy"]["mean"] <= 1
    assert json.loads((folder / scored["result"]).read_text())["overall"] == scored["overall"]

    assert main(["train", "c.yaml", "--quiet", "run_name=second", "seed=1"]) == 0
    compared = printed(capsys, "compare runs/first runs/second")
    assert [run["name"] for run in compared["runs"]] == ["first", "second"]
    assert compared["seeds"][0]["runs"] == ["first", "second"] and "seed" in compared["config"]
    assert printed(capsys, "compare runs/first runs/second --diff", code=1)["same"] is False

    said = printed(capsys, "doctor runs/first", code=main(["doctor", "runs/first"]))
    assert said["status"] == "finished" and isinstance(said["findings"], list)


def test_a_run_is_exported_by_its_folder(folder, capsys):
    run = folder / "runs" / "first"
    assert main(["train", "c.yaml", "--quiet", "checkpoint.every_steps=1"]) == 0
    capsys.readouterr()
    assert main(["export", "runs/first"]) == 0
    assert capsys.readouterr().out.strip() == "runs/first/exported"
    weights = (run / "model" / "model.safetensors").read_bytes()
    assert (run / "exported" / "model.safetensors").read_bytes() == weights
    for command in (
        ["eval", "runs/first", "--data", "eval.jsonl", "--max-tokens", "4"],
        ["generate", "runs/first", "--prompt", "1+1="],
    ):
        said = []
        for model in ([command[1]], [f"{command[1]}/model", "--config", f"{command[1]}/config.yaml"]):
            assert main([command[0], *model, *command[2:]]) == 0
            said.append(capsys.readouterr().out.partition("result ")[0])
        assert said[0] == said[1] != ""
    (run / "model").rename(run / "gone")  # as before the end of a run
    assert main(["export", "runs/first", "newest"]) == 0
    newest = run / "checkpoints" / "step_000002" / "model.safetensors"
    assert (folder / "newest" / "model.safetensors").read_bytes() == newest.read_bytes()
    assert main(["export", "runs/first/checkpoints/step_000001"]) == 2
    assert "give OUT" in capsys.readouterr().err
