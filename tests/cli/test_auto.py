"""Settings that are `auto`: what a plan chooses on a GPU, that it fits, and that nothing faster would have."""

import pytest

from atomrl.config import build_config, merge_trees
from atomrl.runs.auto import LEAST_AT_ONCE, LEAST_TOKENS, MOST_TOKENS
from atomrl.runs.fitting import plan_on
from atomrl.runs.hardware import gpu_of

SIZES = ("8GiB", "12GiB", "16GiB", "24GiB", "40GiB", "48GiB", "80GiB", "141GiB")
MODELS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "meta-llama/Llama-3.2-3B", "Qwen/Qwen2.5-7B")
ROW = 256 + 512


def config(name, lora, **changes):
    tree = {
        "model": {"path": name, "lora": {"rank": 16} if lora else None},
        "data": {"train": "rows.jsonl", "max_prompt_tokens": 256},
        "rollout": {"prompts_per_step": 32, "completions_per_prompt": 8, "max_completion_tokens": 512},
    }
    return build_config({"run_name": "auto", **merge_trees(tree, changes)})


def settings(chosen):
    rollout, train = chosen.rollout.max_concurrent_completions, chosen.train.tokens_per_micro_batch
    return rollout, train, chosen.model.gradient_checkpointing


def fits(plan, *phases):
    return plan.memory.resident + max(plan.memory.phases[phase] for phase in phases) <= plan.budget


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "whole"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_chosen_fits_and_nothing_faster_does(size, model, lora):
    gpu = gpu_of(size)
    plan = plan_on(config(model, lora), gpu)
    at_once, tokens, checkpointing = settings(plan.chosen)

    def with_settings(at_once=at_once, tokens=tokens, checkpointing=checkpointing is True):
        return plan_on(
            config(
                model, lora, rollout={"max_concurrent_completions": at_once}, train={"tokens_per_micro_batch": tokens},
                model={"gradient_checkpointing": checkpointing},
            ),
            gpu,
        )  # fmt: skip

    update = ("log-probs", "update")
    assert (at_once == LEAST_AT_ONCE or fits(plan, "rollout")) and (tokens == ROW or fits(plan, *update))
    assert at_once == 256 or not fits(with_settings(at_once=2 * at_once), "rollout")
    assert tokens == MOST_TOKENS or not fits(with_settings(tokens=2 * tokens), *update)
    assert checkpointing == "auto" or not fits(with_settings(tokens=LEAST_TOKENS, checkpointing=False), *update)
    assert with_settings().memory == plan.memory, "the plan is of the numbers that it names"


def test_what_is_given_stays():
    given = config(
        MODELS[3], True, model={"gradient_checkpointing": False},
        rollout={"max_concurrent_completions": 100}, train={"tokens_per_micro_batch": 1000},
    )  # fmt: skip
    assert settings(plan_on(given, gpu_of("8GiB")).chosen) == (100, 1000, False)
    part = config(MODELS[3], True, train={"tokens_per_micro_batch": 1000})
    assert settings(plan_on(part, gpu_of("24GiB")).chosen)[1:] == (1000, True)


def test_null_of_an_older_config_is_auto():
    assert config(MODELS[0], True, train={"tokens_per_micro_batch": None}).train.tokens_per_micro_batch == "auto"
