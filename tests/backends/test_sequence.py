"""Ranks that share the rows of a micro-batch make the steps of one process."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

from atomrl.backends.local import LocalBackend
from atomrl.config import CriticConfig, LoraConfig
from atomrl.data.rows import to_training_batches
from tests.algorithms.batches import changed
from tests.backends.comparison import RELATIVE, compare
from tests.backends.equality import (
    all_cases,
    case,
    compared,
    drawn,
    few,
    locally,
    make_models,
    masked,
    pairs,
    run_ranks,
    settings_of,
    tensors,
    with_ranks,
)
from tests.backends.test_packing import shared

pytestmark = pytest.mark.slow
CRITIC = CriticConfig(path="base", learning_rate=1e-3)
TWO = {"fsdp": {"sequence": 2}}
LOOSER = {"long rows": 2e-4}
"""A gradient of 6,000, whose norm in one process with other micro-batches is off by 8e-5."""


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
    return changed(rows, **changes)


CASES = {
    "grpo": case("grpo", shared, **TWO),
    "critic": case("ppo", shared, **TWO),
    "dapo": case("dapo", shared, **TWO),
    "dpo": case("dpo", compared, **TWO),
    "kto": case("kto", compared, **TWO),
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
    compare([rank[name] for rank in two], locally(CASES[name], folder), LOOSER.get(name, RELATIVE))


@pytest.mark.parametrize("name", ON_FOUR)
def test_two_pairs_of_ranks_make_the_steps_of_one_process(folder, four, name):
    compare([rank[name] for rank in four], locally(CASES[name], folder), LOOSER.get(name, RELATIVE))


def recorded_tokens(given, backend, algorithm):
    """Return the recorded token values of two updates, of three rows of a step."""
    made = backend.forward_only(given["rows"](0), algorithm.needs)
    made = replace(made, recorded=torch.where(torch.arange(made.rows) % 4 == 1, torch.arange(made.rows) // 4, -1))
    recorded = []
    for part in to_training_batches(algorithm.advantages(made, {}), algorithm, updates=2, epochs=1, seed=0, step=0):
        backend.train_step(part, algorithm)
        recorded.append(backend.token_numbers())
    return recorded


def record(cases, folder, ranks):
    return {name: recorded_tokens(cases[name], *with_ranks(cases[name], folder, ranks)) for name in cases}


RECORDED = {
    "shared prompts": case("grpo", shared, train={"tokens_per_micro_batch": 40}, **TWO),
    "a critic": case("ppo", drawn, axes={"entropy": {"coefficient": 0.01}}, critic=CRITIC, **TWO),
    "transformers": case("grpo", shared, model="mistral", **TWO),
    "not sharing": case("grpo", shared, train={"tokens_per_micro_batch": 40}),
}


def test_records_of_tokens_are_those_of_one_process(folder, tmp_path):
    both = run_ranks(partial(record, RECORDED, folder), 2, tmp_path)
    for name, given in RECORDED.items():
        settings = settings_of(given, folder)
        alone = recorded_tokens(given, LocalBackend(**settings), settings["algorithm"])
        for key in ("logprobs", "gradient", "loss"):
            assert any(theirs[key].any() for theirs in alone), (name, key)
        for rank in both:
            for mine, theirs in zip(rank[name], alone, strict=True):
                assert mine.keys() == theirs.keys(), name
                for key, tensor in theirs.items():
                    torch.testing.assert_close(mine[key].float(), tensor.float(), atol=1e-5, rtol=1e-4)
