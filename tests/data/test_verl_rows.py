"""Rows and a reward made for verl, unchanged, through a whole run."""

import json

import pytest
import yaml

from atomrl.cli.main import main
from atomrl.tracking.reading import load_run
from atomrl.tracking.reading.rollouts import RolloutFilter
from tests.tiny import make_tiny_model

COMPUTE_SCORE = """
import json


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open("asked.jsonl", "a") as file:
        asked = [data_source, solution_str, ground_truth, extra_info]
        file.write(json.dumps(asked) + "\\n")
    return {"score": 1.0 if extra_info["index"] % 2 else 0.25, "acc": float(str(ground_truth) in solution_str)}
"""


def verl_rows(split: str) -> list[dict]:
    """As verl's `examples/data_preprocess` writes them."""
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {k} + {k}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * k)},
            "extra_info": {"split": split, "index": k, "answer": f"{k} + {k} = {2 * k}", "question": f"{k} + {k}?"},
        }
        for k in range(6)
    ]


def test_verl_s_parquet_rows_and_compute_score(tmp_path, monkeypatch):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "model")
    for name in ("train", "test"):
        pd.DataFrame(verl_rows(name)).to_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "my_score.py").write_text(COMPUTE_SCORE)
    config = {
        "run_name": "verl",
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.parquet", "eval": "test.parquet", "answer_field": "reward_model.ground_truth"},
        "rollout": {"prompts_per_step": 3, "completions_per_prompt": 2, "max_completion_tokens": 5},
        "reward": {"functions": [{"function": "./my_score.py:compute_score"}]},
        "train": {"steps": 2},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", "c.yaml"]) == 0
    run = load_run("runs/verl")
    assert run.state.status == "finished"
    rows = run.rollouts.rows(run.rollouts.select(RolloutFilter(split="train")))
    assert len(rows) == 12 and {row["data_source"] for row in rows} == {"openai/gsm8k"}
    asked = [json.loads(line) for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
    assert [source for source, *_ in asked] == ["openai/gsm8k"] * len(asked) and len(asked) >= 12 + 2 * 6
    for row in rows:
        [prompt] = row["prompt"]
        k = int(prompt["content"].split()[2])
        assert row["ground_truth"] == str(2 * k)
        assert row["reward"] == (1.0 if k % 2 else 0.25)
        told = next(extra for _, text, truth, extra in asked if extra["index"] == k and text == row["completion"])
        assert told["question"] == f"{k} + {k}?" and told["answer"] == f"{k} + {k} = {2 * k}"
    assert "reward/compute_score/acc/mean" in run.metrics
    assert "val-core/openai/gsm8k/reward/mean@1" in run.evaluations  # 0.25 says no right or wrong
