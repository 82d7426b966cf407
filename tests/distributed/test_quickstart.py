"""The quickstart's task with vLLM in a Ray actor, for a few steps; and when it counts as not to be run here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atomrl.cli.main import main
from atomrl.tracking.reading.lines import read_metrics
from tests.distributed.conftest import why_vllm_cannot_run
from tests.tiny import make_tiny_model

pytest.importorskip("ray", reason="Ray is not installed; `make distributed` has it")
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.short
def test_vllm_in_an_actor_trains(vllm, tmp_path):
    """Each step with the weights of the one before: what it draws is as likely as the trainer says."""
    model = make_tiny_model(tmp_path / "model", scale=0.2, head_dim=32)
    small = [f"model.path={model}", f"output_dir={tmp_path}", "data.train_size=64", "data.eval=null"]
    small += ["rollout.prompts_per_step=4", "train.steps=4", "train.learning_rate=0.05", "train.warmup_ratio=0"]
    reward = "reward.functions=[{function: tests.distributed.test_replicas.even_tokens}]"
    apart = ["rollout.engine=vllm", "cluster.replicas=1", "cluster.timeout_s=600"]
    assert main(["train", str(QUICKSTART), *small, reward, *apart]) == 0
    run = tmp_path / "quickstart"
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "training/rollout_probs_diff_mean" in row]
    assert len(rows) == 4
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < 1e-4
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert json.loads((run / "summary.json").read_text())["finished"]
    assert (run / "model" / "model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()


def test_only_an_instruction_that_the_cpu_lacks_is_a_reason_to_skip():
    assert "IS NOT TESTED" in (why_vllm_cannot_run("import os; os.kill(os.getpid(), 4)") or "")
    assert why_vllm_cannot_run("pass") is None
    with pytest.raises(AssertionError, match="no such thing"):
        why_vllm_cannot_run("raise RuntimeError('no such thing')")
