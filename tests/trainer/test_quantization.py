"""A whole run on a quantised base, with the engine's weights those of the policy, and gone on with exactly."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atomrl.cli.main import main
from atomrl.models.lora import ADAPTER_FILE
from atomrl.tracking.reading.lines import read_metrics
from tests.cli.test_runs import CONFIG

pytest.importorskip("bitsandbytes", reason="the extra `quant` is not installed")


@pytest.fixture
def folder(working_directory):
    rows = [{"prompt": f"{k}+1=", "ground_truth": str(k + 1), "data_source": "sums"} for k in range(6)]
    config = CONFIG | {"reward": {"functions": [{"function": "tests.light_rewards.letter_reward"}]}}
    config |= {"model": CONFIG["model"] | {"lora": {"rank": 4}, "quantization": "nf4"}}
    return working_directory(config, train=rows, eval=rows[:3])


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_the_engine_draws_from_the_quantised_policy_from_the_first_step_on(folder, engine):
    assert main(["train", "c.yaml", f"rollout.engine={engine}"]) == 0
    gaps = [row.get("training/rollout_probs_diff_mean") for row in read_metrics(folder / "runs/first/metrics.jsonl")]
    gaps = [gap for gap in gaps if gap is not None]
    assert len(gaps) == 2 and max(gaps) < 1e-5


def test_a_run_continues_exactly_and_is_exported(folder, capsys):
    changes = ["train.steps=3", "checkpoint.every_steps=1", "checkpoint.keep=9"]
    assert main(["train", "c.yaml", "run_name=whole", *changes]) == 0
    assert main(["train", "c.yaml", "run_name=parts", *changes, "train.steps=2"]) == 0
    assert main(["train", "c.yaml", "run_name=parts", *changes, "--resume"]) == 0
    last = [Path("runs") / name / "checkpoints" / "step_000003" for name in ("whole", "parts")]
    for name in (ADAPTER_FILE, "training_state/optimizer.safetensors"):
        whole, parts = (load_file(folder / name) for folder in last)  # the order of a header's keys is by chance
        assert whole.keys() == parts.keys() and all(torch.equal(whole[key], parts[key]) for key in whole)
    assert any(tensor.any() for key, tensor in load_file(last[0] / ADAPTER_FILE).items() if "lora_B" in key)
    capsys.readouterr()
    assert main(["export", str(last[0]), "plain"]) == 0
    assert "error of the nf4 base" in capsys.readouterr().err
    assert json.loads((Path("plain") / "config.json").read_text())["dtype"] == "float32"


def test_a_dry_run_says_what_the_base_takes_and_refuses_what_cannot_be(folder, capsys):
    assert main(["train", "c.yaml", "--dry-run"]) == 0
    small = capsys.readouterr().out
    assert main(["train", "c.yaml", "--dry-run", "model.quantization=null"]) == 0
    assert small != capsys.readouterr().out
    assert main(["train", "c.yaml", "--dry-run", "train.optimizer=paged_adamw8bit", "model.device=cpu"]) == 2
    assert "use adamw8bit" in capsys.readouterr().err
