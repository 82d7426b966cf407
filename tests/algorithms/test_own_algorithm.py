"""An algorithm whose class has methods of its own, as docs/guides/add_an_algorithm.md has one."""

import json

from atomrl import algorithms
from atomrl.cli.main import main
from tests.documented import ROOT, python_snippets

CONFIG = {
    "run_name": "own",
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 32},
    "rollout": {"prompts_per_step": 2, "completions_per_prompt": 2, "max_completion_tokens": 6},
    "reward": {"functions": [{"function": "tests.light_rewards.letter_reward"}]},
    "algorithm": {"name": "damped", "clip": {"high": 0.3}},
    "train": {"steps": 2, "learning_rate": 1e-3},
    "checkpoint": {"every_steps": 1},
}


def test_a_class_of_its_own_runs_and_resumes(working_directory, monkeypatch, capsys):
    page = ROOT / "docs" / "guides" / "add_an_algorithm.md"
    code = next(code for _, code in python_snippets(page) if "DAMPED" in code)
    namespace = {}
    exec(code, namespace)
    called = []
    weights = namespace["Damped"].loss_weights
    monkeypatch.setattr(namespace["Damped"], "loss_weights", lambda *given: called.append(1) or weights(*given))
    monkeypatch.setitem(algorithms.ALGORITHMS, "damped", namespace["DAMPED"])  # as of a file in atomrl/algorithms/
    folder = working_directory(CONFIG, train=[{"prompt": f"{k}+1=", "ground_truth": str(k + 1)} for k in range(6)])
    assert main(["train", "c.yaml", "--dry-run"]) == 0 and main(["explain", "c.yaml"]) == 0
    assert main(["train", "c.yaml", "train.steps=1"]) == 0
    assert len(called) == 1
    assert main(["train", "c.yaml", "--resume", "--allow-changes"]) == 0
    assert len(called) == 2
    assert json.loads((folder / "runs" / "own" / "summary.json").read_text())["steps"] == 2
