"""Whole commands: fill a pool, train from it, both at once, resume, list, export, import, clear."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from atomrl.cli.main import main
from atomrl.config import load_config
from atomrl.objectives.token_weights import TokenTIS
from atomrl.tracking.reading.lines import read_metrics
from atomrl.trainer.pool_source import PoolSource
from atomrl.trainer.rl import RLRun
from tests.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]
CONFIG = {
    "run_name": "first",
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 32},
    "rollout": {"prompts_per_step": 3, "completions_per_prompt": 4, "max_completion_tokens": 6},
    "reward": {"functions": [{"function": "tests.light_rewards.letter_reward"}]},
    "train": {"steps": 4, "learning_rate": 1e-3},
    "pool": {"timeout_s": 60, "max_staleness": 10},
}
FROM_POOL = "rollout.source=pool"


@pytest.fixture
def folder(working_directory):
    rows = [{"prompt": f"{k}+1=", "ground_truth": str(k + 1), "data_source": "sums"} for k in range(30)]
    return working_directory(CONFIG, train=rows)


def fails(capsys, *arguments, code=2):
    capsys.readouterr()
    assert main(list(arguments)) == code
    return capsys.readouterr().err


def weights(folder, run="first", name="model/model.safetensors"):
    return load_file(folder / "runs" / run / name)


def equal(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def stats(capsys, name="first"):
    capsys.readouterr()
    assert main(["pool", "stats", f"runs/pools/{name}.sqlite"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_first_step_from_a_pool_is_that_of_an_engine(folder, capsys):
    """The same prompts, seeds and rewards, bit for bit; the importance weights are all 1 there, but for rounding."""
    plain = ["train.steps=1", "algorithm.rollout_is=none"]
    assert main(["train", "c.yaml", "run_name=engine", *plain]) == 0
    assert main(["pool", "fill", "c.yaml", "--groups", "3"]) == 0
    assert main(["train", "c.yaml", FROM_POOL, *plain]) == 0
    assert equal(weights(folder, "engine"), weights(folder)) and not equal(
        weights(folder), load_file("model/model.safetensors")
    )
    rows = [read_metrics(folder / "runs" / run / "metrics.jsonl")[0] for run in ("engine", "first")]
    same = [name for name in rows[0] if not name.startswith(("timing_s", "perf/"))]
    assert [rows[0][name] for name in same] == [rows[1][name] for name in same] and len(same) > 30


def test_several_steps_off_policy_are_corrected_by_default(folder, capsys):
    assert main(["pool", "fill", "c.yaml", "--groups=12"]) == 0
    filled = json.loads(capsys.readouterr().out)
    assert filled["drawn"] == filled["new"] == 12 and filled["version"] == 0
    assert main(["train", "c.yaml", FROM_POOL]) == 0
    rows = read_metrics(folder / "runs" / "first" / "metrics.jsonl")
    assert [row["pool/staleness_mean"] for row in rows] == [0, 1, 2, 3]
    by_change = {"seed=0": (TokenTIS(),), "algorithm.rollout_is=none": (), "rollout.source=engine": ()}
    for change, correction in by_change.items():
        assert RLRun(load_config("c.yaml", [FROM_POOL, change])).algorithm.rollout_is == correction
    gap = "training/rollout_probs_diff_mean"
    assert rows[0][f"{gap}/staleness_0"] == rows[0][gap] < 1e-5 < rows[3][gap] == rows[3][f"{gap}/staleness_3"]
    assert [sum(name.startswith(f"{gap}/") for name in row) for row in rows] == [1, 1, 1, 1]
    assert not (folder / "runs" / "first" / "findings.jsonl").exists(), "staleness is no fault of the engine"
    assert stats(capsys)["groups"] == 0 and stats(capsys)["finished"] == 12
    assert main(["pool", "fill", "c.yaml", "--groups", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 4, "with the weights that the run has published"


@pytest.mark.parametrize(
    "killed_in", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_trainer_that_was_killed_continues_exactly(folder, capsys, monkeypatch, killed_in):
    assert main(["pool", "fill", "c.yaml", "--groups", "14"]) == 0
    (folder / "runs" / "pools" / "second.sqlite").write_bytes((folder / "runs" / "pools" / "first.sqlite").read_bytes())
    given = ["train", "c.yaml", FROM_POOL, "checkpoint.every_steps=2"]
    assert main([*given, "run_name=second"]) == 0
    program = (
        "import os, signal, sys; from atomrl.cli.main import main; from atomrl.trainer import loop\n"
        f"def update(*a):\n  if a[4] == {killed_in}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "  return before(*a)\n"
        "before, loop.update_policy = loop.update_policy, update\nmain(sys.argv[1:])"
    )
    # Sums of other numbers of threads need not be equal to the last bit.
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}"}
    died = subprocess.run([sys.executable, "-c", program, *given], env=environment, capture_output=True)
    assert died.returncode == -9, died.stderr
    assert main([*given, "--resume"]) == 0
    assert equal(weights(folder), weights(folder, "second"))
    assert stats(capsys)["groups"] == stats(capsys, "second")["groups"] == 2, "nothing was taken twice, nothing lost"


@pytest.mark.slow
def test_trainer_and_producer_at_once(folder, capsys):
    """Two processes, which hand each other groups and weights through files."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "atomrl.cli.main", "pool", "fill", "c.yaml", "pool.capacity=30"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as producer:
        try:
            assert main(["train", "c.yaml", FROM_POOL, "train.steps=25", "pool.max_staleness=3"]) == 0
            time.sleep(0.3)
        finally:
            producer.terminate()
            out, errors = producer.communicate(timeout=600)
    assert producer.returncode == 0, errors
    rows = read_metrics(folder / "runs" / "first" / "metrics.jsonl")
    assert len(rows) == 25 and all(row["pool/staleness_max"] <= 3 for row in rows)
    newest = [
        json.loads(line) for line in (folder / "runs/first/rollouts/step_000025/train.jsonl").read_text().splitlines()
    ]
    assert min(row["policy_version"] for row in newest) >= 21, "the producer has followed"
    assert json.loads(out)["version"] > 20


def test_a_run_that_starts_over_needs_no_cleaning_up(folder, capsys):
    import shutil

    assert main(["pool", "fill", "c.yaml", "--groups", "4"]) == 0
    assert main(["train", "c.yaml", FROM_POOL, "train.steps=1"]) == 0
    assert main(["pool", "fill", "c.yaml", "--groups", "5"]) == 0
    shutil.rmtree(folder / "runs" / "first")
    assert main(["pool", "fill", "c.yaml", "--groups", "2"]) == 0
    assert main(["train", "c.yaml", FROM_POOL, "train.steps=1"]) == 0
    assert stats(capsys)["groups"] == 0, "five of version 1 went, and three of version 0 were trained on"


def test_a_pool_of_another_config_is_refused_before_the_run(folder, capsys):
    assert main(["pool", "fill", "c.yaml", "--groups", "1"]) == 0
    for change, name in (
        ("rollout.temperature=0.5", r"rollout.temperature"), ("data.system_prompt=x", "prompts"),
        ("reward.functions=[exact_match]", "reward"),
    ):  # fmt: skip
        for more in ([FROM_POOL], [FROM_POOL, "--dry-run"]):
            error = fails(capsys, "train", "c.yaml", change, *more)
            assert f"1 groups with another {name}" in error and "pool clear" in error
        assert "with another" in fails(capsys, "pool", "fill", "c.yaml", change)
    make_tiny_model(folder / "other", seed=1)
    assert "another model (model.path)" in fails(capsys, "train", "c.yaml", FROM_POOL, "model.path=other")
    assert not (folder / "runs" / "first").exists()
    assert main(["train", "c.yaml", FROM_POOL, "--dry-run"]) == 0


def test_an_empty_pool_ends_with_a_message_and_continues(folder, capsys):
    assert main(["pool", "fill", "c.yaml", "--groups", "4"]) == 0
    error = fails(capsys, "train", "c.yaml", FROM_POOL, "train.steps=2", "pool.timeout_s=0.5")
    assert "step 2 waited for pool.timeout_s=0.5 seconds" in error and "Traceback" not in error
    assert main(["pool", "fill", "c.yaml", "--groups", "2"]) == 0
    assert main(["train", "c.yaml", FROM_POOL, "train.steps=2", "--resume"]) == 0
    assert stats(capsys)["finished"] == 6 and stats(capsys)["groups"] == 0


def test_mistakes_of_pools_are_named(folder, capsys):
    assert "--groups must be at least 1" in fails(capsys, "pool", "fill", "c.yaml", "--groups", "0")
    assert "no config file" in fails(capsys, "pool", "fill")
    assert "for sft, which samples no rollouts" in fails(capsys, "pool", "fill", "c.yaml", "sft={}")
    assert "rollout pool absent.sqlite does not exist" in fails(capsys, "pool", "stats", "absent.sqlite")
    (folder / "text.sqlite").write_text("no database at all" * 100)
    assert "not a rollout pool" in fails(capsys, "pool", "stats", "text.sqlite")
    assert main(["pool", "fill", "c.yaml", "--groups", "1"]) == 0
    assert "must end in .jsonl" in fails(capsys, "pool", "export", "runs/pools/first.sqlite", "x.txt")
    (folder / "bad.jsonl").write_text('{"group": 1}\n')
    assert "bad.jsonl:1: not a row of" in fails(capsys, "pool", "import", "new.sqlite", "bad.jsonl")
    (folder / "bad.jsonl").write_text("{\n")
    assert "bad.jsonl:1 is not JSON" in fails(capsys, "pool", "import", "new.sqlite", "bad.jsonl")


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_export_and_import(folder, capsys, form):
    """Imported groups are trained on as if they had never been exported."""
    assert main(["pool", "list", "runs/pools"]) == 0 and "no rollout pools" in capsys.readouterr().out
    assert main(["pool", "fill", "c.yaml", "--groups", "6"]) == 0
    file = f"groups.{form}"
    assert main(["pool", "export", "runs/pools/first.sqlite", file]) == 0
    assert "24 completions" in capsys.readouterr().out
    assert main(["pool", "import", "runs/pools/second.sqlite", file]) == 0
    assert "6 new groups of 6" in capsys.readouterr().out
    assert main(["pool", "import", "runs/pools/second.sqlite", file]) == 0
    assert "0 new groups of 6" in capsys.readouterr().out
    for run in ("first", "second"):
        assert main(["train", "c.yaml", FROM_POOL, "train.steps=2", f"run_name={run}"]) == 0
    assert equal(weights(folder), weights(folder, "second"))
    assert main(["pool", "clear", "runs/pools/second.sqlite"]) == 0 and main(["pool", "list"]) == 0
    shown = capsys.readouterr().out
    assert "runs/pools/first.sqlite  0 groups" in shown
    if form == "jsonl":
        row = json.loads((folder / file).read_text().splitlines()[0])
        assert row["text"] and row["problem"]["prompt"].endswith("+1=") and row["reward"] is not None
        assert row["segments"][1]["logprobs"] and row["segments"][1]["policy_version"] == 0
        assert main(["pool", "fill", "c.yaml", "run_name=third", "--groups", "1", "rollout.temperature=0.7"]) == 0
        assert "another rollout.temperature" in fails(capsys, "pool", "import", "runs/pools/third.sqlite", file)


def test_a_source_is_closed_with_its_run(folder, monkeypatch):
    closed = []
    close = PoolSource.close
    monkeypatch.setattr(PoolSource, "close", lambda self: closed.append(1) or close(self))
    assert main(["pool", "fill", "c.yaml", "--groups", "3"]) == 0
    assert main(["train", "c.yaml", FROM_POOL, "train.steps=1"]) == 0 and closed == [1]
