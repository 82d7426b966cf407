"""vLLM in the process of the trainer: what it must leave as it was, and rollouts while the trainer learns."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from transformers import AutoTokenizer

from atomrl.cli.main import main
from atomrl.config import ConfigError
from atomrl.engines.generation import generate
from atomrl.engines.requests import EngineOptions
from atomrl.engines.vllm import VLLMEngine
from atomrl.tracking.reading.lines import read_metrics
from atomrl.types import SamplingParams
from tests.arithmetic import arithmetic_run
from tests.prompts import logprobs_of, prompts_of, response
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


def test_a_run_with_a_least_length_and_arguments_of_vllms_own(folder, monkeypatch):
    """Log-probs are the trainer's, over the whole vocabulary, although top-k and the least length cut what is drawn."""
    tokens, close = [], VLLMEngine.close

    def noted(engine):
        tokens.append(engine.llm.vllm_config.scheduler_config.max_num_batched_tokens)
        close(engine)

    monkeypatch.setattr(VLLMEngine, "close", noted)
    reward = "{function: tests.distributed.test_replicas.even_tokens}"
    drawn = ["rollout.min_completion_tokens=6", "rollout.top_k=40", "rollout.logprobs_over=vocabulary"]
    own = "rollout.engine_args={max_num_batched_tokens: 4321, enable_prefix_caching: false}"
    settings = ["rollout.engine=vllm", *drawn, own, "train.steps=3", "train.learning_rate=0.01", "model.dtype=float32"]
    assert main(["train", *arithmetic_run(folder, "least", reward), *settings]) == 0
    rows = list(read_metrics(folder.parent / "runs" / "least" / "metrics.jsonl"))
    gaps = [row["training/rollout_probs_diff_mean"] for row in rows if "training/rollout_probs_diff_mean" in row]
    assert len(gaps) == 3 and max(gaps) < 1e-6
    assert min(row["response_length/min"] for row in rows if "response_length/min" in row) >= 6
    assert tokens == [4321]
    assert "rollout.engine=vllm (set in the config)" in (folder.parent / "runs" / "least" / "log.txt").read_text()


def test_a_run_without_log_probs_of_the_engine(folder, caplog):
    """The trainer computes its own for a second update; a warning says that no gap is measured."""
    reward = "{function: tests.distributed.test_replicas.even_tokens}"
    settings = ["rollout.engine=vllm", "rollout.logprobs_over=none", "train.rows_per_update=8", "train.steps=2"]
    assert main(["train", *arithmetic_run(folder, "without", reward), *settings]) == 0
    assert "neither measured nor corrected" in caplog.text
    rows = list(read_metrics(folder.parent / "runs" / "without" / "metrics.jsonl"))
    assert sum("actor/pg_loss" in row for row in rows) == 2
    assert not any("training/rollout_probs_diff_mean" in row for row in rows)


def test_arguments_are_those_of_the_installed_vllm():
    VLLMEngine.check_arguments({"max_num_batched_tokens": 4096, "enforce_eager": True})
    with pytest.raises(ConfigError, match=r"engine_args\.swap_spice"):
        VLLMEngine.check_arguments({"swap_spice": 4})
    from vllm import EngineArgs

    assert VLLMEngine.own_arguments.keys() <= vars(EngineArgs)["__dataclass_fields__"].keys()
