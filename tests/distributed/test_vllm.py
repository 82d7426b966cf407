"""vLLM in the process of the trainer: what it must leave as it was, and rollouts while the trainer learns."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from transformers import AutoTokenizer

from atomrl.cli.main import main
from atomrl.reading.lines import read_metrics
from atomrl.rollout.generate import generate
from atomrl.rollout.requests import EngineOptions
from atomrl.rollout.vllm import VLLMEngine
from atomrl.types import SamplingParams
from tests.arithmetic import arithmetic_run
from tests.engines import logprobs_of, prompts_of, response
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.usefixtures("vllm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("vllm") / "model", scale=0.2, head_dim=32)


def test_the_number_of_threads_can_still_be_set(folder):
    """vLLM's own `torch.set_num_threads` does nothing; and what it draws does not depend on them."""
    options = EngineOptions(torch.float32, "cpu", max_concurrent_completions=8)
    sampling = SamplingParams(completions_per_prompt=3, max_completion_tokens=20, seed=4)
    before, drawn = torch.get_num_threads(), []
    with closing(VLLMEngine.from_pretrained(str(folder), AutoTokenizer.from_pretrained(folder), options)) as engine:
        try:
            for threads in (1, 2, 3, 1):
                torch.set_num_threads(threads)
                assert torch.get_num_threads() == threads
                drawn.append(generate(engine, prompts_of((5, 6, 7), (20, 21)), sampling))
        finally:
            torch.set_num_threads(before)
    for others in drawn[1:]:
        assert [response(one) for one in others] == [response(one) for one in drawn[0]]
        for one, other in zip(others, drawn[0], strict=True):
            assert logprobs_of(one) == pytest.approx(logprobs_of(other), abs=1e-5)


@pytest.mark.parametrize("policy", ["keep", "abort", "wait"])
def test_it_draws_while_the_trainer_learns(folder, policy):
    """On two threads in turns; each token as likely as the weights of its version say."""
    reward = "{function: tests.distributed.test_replicas.even_tokens}"
    mode = f"asynchronous={{max_staleness: 2, on_update: {policy}, timeout_s: 120}}"
    settings = ["rollout.engine=vllm", mode, "train.steps=8", "train.learning_rate=0.01", "model.dtype=float32"]
    assert main(["train", *arithmetic_run(folder, policy, reward), *settings]) == 0
    rows = list(read_metrics(folder.parent / "runs" / policy / "metrics.jsonl"))
    assert max(row["async/staleness_max"] for row in rows if "async/staleness_max" in row) > 0
    name = "training/rollout_probs_diff_mean/staleness_0"
    gaps = [row[name] for row in rows if name in row]
    assert gaps and max(gaps) < 1e-6


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_it_draws_from_a_quantised_base_beneath_adapters(folder, kind):
    """It has the weights that the codes stand for, and each step's adapters."""
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    reward = "{function: tests.distributed.test_replicas.even_tokens}"
    base = ["model.lora={rank: 4}", f"model.quantization={kind}", "model.dtype=float32"]
    settings = ["rollout.engine=vllm", "train.steps=4", "train.learning_rate=0.01", *base]
    assert main(["train", *arithmetic_run(folder, kind, reward), *settings]) == 0
    rows = list(read_metrics(folder.parent / "runs" / kind / "metrics.jsonl"))
    gaps = [row["training/rollout_probs_diff_mean"] for row in rows if "training/rollout_probs_diff_mean" in row]
    assert len(gaps) == 4 and max(gaps) < 1e-6
