"""vLLM in the trainer's process on a GPU: chosen by itself, asleep while the trainer works."""

from importlib.util import find_spec

import pytest
import torch

from atomrl.cli.main import main
from atomrl.engines.vllm import VLLMEngine
from atomrl.tracking.reading.lines import read_metrics
from tests.arithmetic import arithmetic_run
from tests.tiny import make_tiny_model


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or find_spec("vllm") is None, reason="needs a GPU, and vLLM for GPUs")
@pytest.mark.parametrize("trained", [[], ["model.lora={rank: 4}"]], ids=["whole weights", "adapters"])
def test_a_run_draws_with_vllm_which_sleeps_while_the_trainer_works(tmp_path, monkeypatch, trained):
    """After waking it samples with the weights of the last update: log-probs equal the trainer's."""
    folder, asleep = make_tiny_model(tmp_path / "model", scale=0.2, head_dim=64), []
    sleep = VLLMEngine.sleep
    monkeypatch.setattr(VLLMEngine, "sleep", lambda engine: asleep.append(1) or sleep(engine))
    reward = "{function: tests.distributed.test_replicas.even_tokens}"
    settings = ["model.device=cuda", "model.dtype=bfloat16", "rollout.min_completion_tokens=4", "rollout.engine=auto"]
    assert main(["train", *arithmetic_run(folder, "gpu", reward), *settings, *trained]) == 0
    run = folder.parent / "runs" / "gpu"
    said = (run / "log.txt").read_text()
    assert "rollout.engine=vllm (auto" in said and "rollout.gpu_memory_utilization=0." in said
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "training/rollout_probs_diff_mean" in row]
    assert len(asleep) == len(rows) == 4
    assert max(row["training/rollout_probs_diff_mean"] for row in rows) < 0.01
