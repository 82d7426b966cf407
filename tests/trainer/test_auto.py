"""Settings that are `auto`: what a plan chooses on a GPU, that it fits, and that nothing faster would have."""

from functools import cache

import pytest

from atomrl.config import load_config, merge_trees
from atomrl.models.known_shapes import planning_shape
from atomrl.models.memory import MOST_TOKENS
from atomrl.planner.gpus import gpu_of
from atomrl.planner.plan import plan_on
from atomrl.planner.step_time import step_seconds
from atomrl.trainer.auto import LEAST_TOKENS, halves
from atomrl.trainer.memory import LEAST_CONCURRENT

SIZES = ("8GiB", "12GiB", "16GiB", "24GiB", "40GiB", "48GiB", "80GiB", "141GiB")
MODELS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "meta-llama/Llama-3.2-3B", "Qwen/Qwen2.5-7B")
ROW = 256 + 512
AT_ONCE = halves(256, LEAST_CONCURRENT)
"""Completions at once, the best first."""
BUDGETS = halves(MOST_TOKENS, ROW)
UPDATES = [
    *((False, tokens) for tokens in BUDGETS if tokens >= LEAST_TOKENS),
    *((True, tokens) for tokens in BUDGETS),
    *((False, tokens) for tokens in BUDGETS if tokens < LEAST_TOKENS),
]
"""Gradient checkpointing, and tokens of a micro-batch: the best first."""


def config(name, lora, **changes):
    tree = {
        "model": {"path": name, "lora": {"rank": 16} if lora else None},
        "data": {"train": "rows.jsonl", "max_prompt_tokens": 256},
        "rollout": {"prompts_per_step": 32, "completions_per_prompt": 8, "max_completion_tokens": 512},
    }
    return load_config({"run_name": "auto", **merge_trees(tree, changes)})


def settings(chosen):
    rollout, train = chosen.rollout.max_concurrent_completions, chosen.train.tokens_per_micro_batch
    return rollout, train, chosen.model.gradient_checkpointing


@cache
def fixed(model, lora, at_once, checkpointing, tokens):
    """The plan of a config in which nothing is `auto`; its memory is the same on each card."""
    changes = {"rollout": {"max_concurrent_completions": at_once}, "train": {"tokens_per_micro_batch": tokens},
               "model": {"gradient_checkpointing": checkpointing}}  # fmt: skip
    return plan_on(config(model, lora, **changes), gpu_of("141GiB"))


def taken(plan, *phases):
    return plan.memory.resident + max(plan.memory.phases[phase] for phase in phases)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "whole"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", SIZES)
def test_auto_takes_the_first_setting_that_fits_and_it_is_close_to_the_fastest(size, model, lora):
    gpu, shape = gpu_of(size), planning_shape(model, False)
    plan = plan_on(config(model, lora), gpu)
    at_once, tokens, checkpointing = settings(plan.chosen)
    same = fixed(model, lora, at_once, checkpointing is True, tokens)
    assert same.memory == plan.memory, "the plan is of the numbers that it names"

    fitting = [n for n in AT_ONCE if taken(fixed(model, lora, n, True, ROW), "rollout") <= gpu.usable_bytes]
    assert at_once == [*fitting, LEAST_CONCURRENT][0]

    updates = [fixed(model, lora, at_once, *pair) for pair in UPDATES]
    able = [other for other in updates if taken(other, "log-probs", "update") <= gpu.usable_bytes]
    if not able:
        assert (checkpointing, tokens) == (True, ROW) and not plan.fits
        return
    assert same.memory == able[0].memory
    seconds = [step_seconds(other.chosen, shape, gpu, 2)["update"] for other in able]
    assert seconds[0] < 1.1 * min(seconds), "by the estimate of time"


@pytest.mark.parametrize("backend", [{"type": "fsdp"}, {"type": "megatron", "tensor": 2}], ids=lambda b: b["type"])
def test_ranks_choose_for_their_share_of_memory_and_rows(backend):
    """Eight cards hold a part each of 7 billion weights; 256 rows are 32 per rank, or 64 per pair of ranks."""
    alone = plan_on(config(MODELS[3], False), gpu_of("80GiB"))
    eight = plan_on(config(MODELS[3], False, backend=backend), gpu_of("8x80GiB"))
    assert not alone.fits and eight.fits
    few = plan_on(config(MODELS[0], True, backend=backend, train={"rows_per_update": 32}), gpu_of("8x80GiB"))
    rows = 32 // 8 * backend.get("tensor", 1)
    assert settings(few.chosen)[1:] == (rows * ROW, "auto")


def test_auto_keeps_given_values():
    given = config(
        MODELS[3], True, model={"gradient_checkpointing": False},
        rollout={"max_concurrent_completions": 100}, train={"tokens_per_micro_batch": 1000},
    )  # fmt: skip
    assert settings(plan_on(given, gpu_of("8GiB")).chosen) == (100, 1000, False)
    part = config(MODELS[3], True, train={"tokens_per_micro_batch": 1000})
    assert settings(plan_on(part, gpu_of("18GiB")).chosen)[1:] == (1000, True)


def test_null_of_an_older_config_is_auto():
    assert config(MODELS[0], True, train={"tokens_per_micro_batch": None}).train.tokens_per_micro_batch == "auto"
