"""Ranks that share the rows of a micro-batch make the steps of one process."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

from atomrl.config import CriticConfig, LoraConfig
from tests.training.equality import all_cases, case, drawn, few, locally, make_models, masked, pairs, run_ranks, tensors
from tests.training.test_fsdp import compare
from tests.training.test_packing import shared

pytestmark = pytest.mark.slow
CRITIC = CriticConfig(path="base", learning_rate=1e-3)
TWO = {"fsdp": {"sequence": 2}}


def late(seed):
    """One row of which only the last tokens are trained on: the first rank has none of them."""
    rows = few(seed)
    rows.loss_mask[:, : int(rows.lengths[0]) - 1] = False
    return rows


def long(seed):
    """Prompts so long that attention is SDPA's."""
    rows = shared(seed)
    front = torch.randint(3, 90, (1, 270), generator=torch.Generator().manual_seed(seed)).expand(rows.rows, -1)
    changes = {"lengths": rows.lengths + 270, "prompt_lengths": rows.prompt_lengths + 270}
    for name, value in tensors(rows).items():
        if value.shape == rows.tokens.shape:
            before = front if name == "tokens" else torch.zeros(front.shape, dtype=value.dtype)
            changes[name] = torch.cat([before, value], dim=1)
    return replace(rows, **changes)


CASES = {
    "grpo": case("grpo", shared, **TWO),
    "critic": case("ppo", shared, **TWO),
    "teacher": case("gkd", drawn, **TWO),
    "reward model": case("reward_model", pairs, **TWO),
    "masked": case("gspo", masked, **TWO),
    "one row": case("grpo", late, **TWO),
    "adapters": case("grpo", shared, lora=LoraConfig(rank=4), axes={"kl": {"coefficient": 0.1}}, **TWO),
    "checkpointed": case("grpo", shared, checkpointed=True, **TWO),
    "long rows": case("grpo", long, train={"tokens_per_micro_batch": 2000}, **TWO),
    "many micro-batches": case("ppo", train={"rows_per_micro_batch": 1}, **TWO),
    "transformers": case("grpo", shared, model="mistral", **TWO),
    "transformers, checkpointed": case("grpo", shared, model="mistral", checkpointed=True, **TWO),
    "transformers and a critic": case(
        "ppo", model="mistral", critic=CriticConfig(path="base", learning_rate=1e-3), **TWO
    ),
}
ON_FOUR = ("grpo", "critic", "one row", "transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_models(tmp_path_factory.mktemp("models"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = MistralConfig(
            vocab_size=102, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=48, initializer_range=0.3,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "mistral")
    return folder


@pytest.fixture(scope="module")
def two(folder, tmp_path_factory):
    return run_ranks(partial(all_cases, CASES, folder), 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(folder, tmp_path_factory):
    cases = {name: CASES[name] for name in ON_FOUR}
    return run_ranks(partial(all_cases, cases, folder), 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_that_share_rows_make_the_steps_of_one_process(folder, two, name):
    compare([rank[name] for rank in two], locally(CASES[name], folder))


@pytest.mark.parametrize("name", ON_FOUR)
def test_two_pairs_of_ranks_make_the_steps_of_one_process(folder, four, name):
    compare([rank[name] for rank in four], locally(CASES[name], folder))
