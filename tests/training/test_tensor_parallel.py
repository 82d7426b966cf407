"""Ranks that share each layer's matrices make the step of one process, alone and with shards of everything."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

from tests.training.equality import all_cases, case, compared, locally, make_models, pairs, run_ranks
from tests.training.test_fsdp import compare

pytestmark = pytest.mark.slow
TENSOR = {"fsdp": {"tensor": 2}}
CASES = {
    "grpo": case("grpo", **TENSOR),
    "ppo": case("ppo", **TENSOR),
    "dpo": case("dpo", compared, **TENSOR),
    "reward model": case("reward_model", pairs, **TENSOR),
    "transformers": case("grpo", model="mistral", **TENSOR),
    "checkpointed": case("grpo", checkpointed=True, **TENSOR),
    "clipped": case("ppo", train={"max_grad_norm": 0.05}, **TENSOR),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_models(tmp_path_factory.mktemp("models"))
    shape = MistralConfig(
        vocab_size=102, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, max_position_embeddings=64,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(shape).save_pretrained(folder / "mistral")
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_make_the_steps_of_one_process(folder, ranks, tmp_path):
    found = run_ranks(partial(all_cases, CASES, folder), ranks, tmp_path)
    for name, given in CASES.items():
        compare([rank[name] for rank in found], locally(given, folder))
