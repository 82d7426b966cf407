"""A user's own advantage, loss, correction or token filter is called once before the run: mistakes are refused with
their place, and what only looks like a mistake is not."""

import logging
import re

import pytest
import torch

from atomrl.config import ConfigError, load_config
from atomrl.objectives.advantage import AdvantagesAndReturns
from atomrl.trainer.own_functions.trial import check_own_functions

TREE = {
    "run_name": "a",
    "model": {"path": "m"},
    "data": {"train": "t.jsonl"},
    "rollout": {"prompts_per_step": 3, "completions_per_prompt": 4, "max_completion_tokens": 16},
}


def check(axis, function, device="cpu", config=(), **more):
    """Try a function of this module on an axis."""
    given = {"type": "custom", "function": f"{__name__}:{function.__name__}"} | more
    config = load_config(TREE | dict(config) | {"algorithm": {"name": "grpo", axis: given}})
    check_own_functions(config.algorithm.resolved(max_completion_tokens=16), config, device)


def line_of(function, offset):
    return f"test_trial.py, line {function.__code__.co_firstlineno + offset}"


# ---- Mistakes ----


def misspelt(inputs):
    return inputs.reward - inputs.rewards.mean()


def not_asked_for(inputs):
    return inputs.rewards[:, None] + inputs.old_entropy


def another_shape(inputs):
    return inputs.rewards + torch.ones(3)


def undefined(inputs):
    return meen(inputs.rewards)


def always_nan(inputs):
    return inputs.rewards / 0


def by_truth(inputs):
    return inputs.rewards > 0.5


def returns_unasked(inputs):
    return AdvantagesAndReturns(torch.zeros_like(inputs.mask.float()), torch.zeros_like(inputs.mask.float()))


def detached(inputs):
    return -inputs.log_ratio.detach().exp() * inputs.advantages + 1


def a_number_for_each_row(inputs):
    return (inputs.log_ratio * inputs.advantages).sum(1)


def clipped_as_numbers(inputs):
    return inputs.log_ratio, inputs.log_ratio


def three(inputs):
    return inputs.log_ratio, inputs.mask, 1.0


def nothing(inputs):
    inputs.log_ratio.exp()


def root(inputs):
    return -inputs.log_ratio.abs().sqrt() * inputs.advantages


def infinite(inputs):
    return inputs.logprobs / inputs.log_ratio


def numbers(inputs):
    return inputs.mask.float()


@pytest.mark.parametrize(
    ("axis", "function", "said"),
    [
        ("advantage", misspelt, [r"algorithm\.advantage\.function", "no 'reward'; did you mean 'rewards'", 1]),
        (
            "advantage",
            not_asked_for,
            [r"old_entropy is None in this run; add algorithm\.advantage\.reads=\[old_entropy\]", 1],
        ),
        ("advantage", another_shape, ["RuntimeError", r"rewards \[12\] float32", 1]),
        ("advantage", undefined, ["NameError", "meen", 1]),
        ("advantage", always_nan, ["non-finite", 0]),
        ("advantage", by_truth, ["dtype torch.float32, but its dtype is torch.bool", 0]),
        ("advantage", returns_unasked, ["reads no values", 0]),
        ("clip", misspelt, ["PolicyInputs has no 'reward'", 1]),
        ("clip", detached, ["without a gradient", 0]),
        ("clip", a_number_for_each_row, [r"must return a tensor \[12, \d+\], but returned \[12\]", 0]),
        ("clip", clipped_as_numbers, ["clipped tokens", "torch.bool", 0]),
        ("clip", three, ["3 values", 0]),
        ("clip", nothing, ["NoneType", 0]),
        ("clip", root, ["gradient of the loss is not finite where log_ratio is 0", 0]),
        ("clip", infinite, ["the loss is -?inf|the loss is nan", 0]),
        ("rollout_is", always_nan, ["RolloutInputs has no 'rewards'", 1]),
        ("rollout_is", a_number_for_each_row, [r"but returned \[12\]", 0]),
        ("token_filter", numbers, ["torch.bool", 0]),
        ("token_filter", not_asked_for, ["FilterInputs has no 'rewards'", 1]),
    ],
)
def test_a_mistake_is_refused_with_its_place(axis, function, said):
    *words, offset = said
    with pytest.raises(ConfigError) as refusal:
        check(axis, function)
    for word in [*words, line_of(function, offset)]:
        assert re.search(word, str(refusal.value)), str(refusal.value)


def on_the_cpu(inputs):
    return -inputs.log_ratio.exp() * inputs.advantages * torch.ones(inputs.mask.shape)


def test_a_tensor_on_the_cpu_is_refused_where_the_loss_is_on_a_gpu():
    check("clip", on_the_cpu)
    with pytest.raises(ConfigError, match=r"cuda.*device=inputs.mask.device"):
        check("clip", on_the_cpu, device="cuda")


@pytest.mark.parametrize("axis", ["advantage", "clip", "rollout_is", "token_filter"])
def test_reads_names_a_field_of_the_inputs(axis):
    with pytest.raises(ValueError, match=rf"{axis}\.reads.*no scores"):
        check(axis, misspelt, reads=["scores"])


# ---- No mistakes ----


def zero(inputs):
    return torch.zeros_like(inputs.advantages)


def plain(inputs):
    return -inputs.log_ratio.exp() * inputs.advantages, (inputs.log_ratio.exp() - 1).abs() > 0.2


def everything_dropped(inputs):
    return -inputs.log_ratio.exp() * inputs.advantages * 0.0


def own_parameters(inputs, power, shift=0.0):
    return -(inputs.log_ratio * power + shift).exp() * inputs.advantages


def with_reference(inputs):
    return -inputs.log_ratio.exp() * inputs.advantages + (inputs.logprobs - inputs.ref_logprobs) ** 2 * inputs.mask


def own_window(inputs):
    return -inputs.log_ratio.unfold(1, 8, 1).mean(-1).sum() * inputs.advantages


def looks_at_values(inputs):
    steps = torch.arange(inputs.mask.shape[1], device=inputs.mask.device)
    if inputs.logprobs.detach().max().item() > 1e9:
        raise ValueError
    return -inputs.log_ratio.exp() * inputs.advantages + 0 * steps


def groups_of_four(inputs):
    rewards = inputs.rewards.view(-1, 4)
    return (rewards - rewards.mean(1, keepdim=True)).flatten()


def of_right_and_wrong(inputs):
    assert ((inputs.rewards == 0) | (inputs.rewards == 1)).all()
    return inputs.rewards - 0.5


def of_penalties(inputs):
    return (-inputs.rewards).log()


def all_alike(inputs):
    return torch.zeros_like(inputs.rewards)


def of_turns(inputs):
    return inputs.rewards + inputs.token_rewards.sum(1) + inputs.turn_ids.max(1).values


def optional(inputs):
    rewards = inputs.rewards if inputs.token_rewards is None else inputs.rewards + inputs.token_rewards.sum(1)
    return rewards if inputs.turn_ids is None else rewards + inputs.turn_ids.max(1).values


def critics(inputs):
    returns = inputs.by_token.flip(1).cumsum(1).flip(1)
    return AdvantagesAndReturns(returns - inputs.values, returns)


def of_parts(inputs):
    return inputs.parts[:, 1, 0] - inputs.parts[:, 0, 0]


def half(inputs):
    return inputs.old_entropy > inputs.old_entropy[inputs.mask].median()


def within(inputs):
    return inputs.log_ratio.abs() < 1


TWO = {"reward": {"functions": ["strict_math", "gsm8k"]}}


@pytest.mark.parametrize(
    ("axis", "function", "more", "config"),
    [
        ("clip", zero, {}, {}),
        ("clip", plain, {}, {}),
        ("clip", plain, {}, {"train": {"epochs_per_step": 2}}),
        ("clip", everything_dropped, {}, {}),
        ("clip", own_parameters, {"args": {"power": 2.0}}, {}),
        ("clip", with_reference, {"reads": ["ref_logprobs"]}, {}),
        ("clip", own_window, {}, {}),
        ("clip", looks_at_values, {}, {}),
        ("advantage", all_alike, {}, {}),
        ("advantage", groups_of_four, {}, {}),
        ("advantage", of_right_and_wrong, {}, {}),
        ("advantage", of_penalties, {}, {}),
        ("advantage", optional, {}, {}),
        ("advantage", critics, {"reads": ["values"]}, {}),
        ("advantage", of_parts, {}, TWO),
        ("token_filter", half, {"reads": ["old_entropy"]}, {}),
        ("rollout_is", within, {}, {}),
    ],
)
def test_valid_functions_are_accepted(axis, function, more, config):
    for device in ("cpu", "cuda"):
        check(axis, function, device, config, **more)


def test_inputs_of_episodes_have_turns():
    config = {"environment": {"function": "tests.environments.games:guess"}}
    with pytest.raises(ConfigError, match="token_rewards is None"):
        check("advantage", of_turns)
    check("advantage", of_turns, config=config)


def on_a_gpu(inputs):
    raise RuntimeError("Pointer argument cannot be accessed from Triton (cpu tensor?)")


def test_checks_that_depend_on_the_machine_are_left_to_the_run():
    check("clip", on_a_gpu, device="cuda")
    with pytest.raises(ConfigError, match="Triton"):
        check("clip", on_a_gpu)


def own_zscore(inputs):
    rewards = inputs.rewards.view(-1, 4)
    return ((rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)).flatten()


def test_an_advantage_that_divides_by_the_spread_of_equal_rewards_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        check("advantage", own_zscore)
    assert "own_zscore fails if all rewards of a group are equal" in caplog.text


def noisy(inputs):
    return inputs.rewards + torch.rand(len(inputs.rewards))


def test_the_numbers_that_follow_are_those_that_would_have_followed():
    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    check("advantage", noisy)
    assert torch.rand(1) == wanted
