"""A reward gets completions as text, or as messages like in TRL."""

import pytest

from atomrl.config import RewardConfig
from atomrl.rewards.compute import build_rewards
from atomrl.types import Problem, Segment, Trajectory

CHAT = ({"role": "user", "content": "2+2="},)


def trajectory(prompt, text="4"):
    segments = (Segment(origin="prompt", token_ids=(1,)), Segment(origin="model", token_ids=(2,), policy_version=0))
    return Trajectory(
        prompt_id="a", index=0, problem=Problem(problem_id="a", prompt=prompt, ground_truth=""), segments=segments,
        text=text, finish_reason="stop",
    )  # fmt: skip


def plain(completions, **columns):
    return [float(completion == "4") for completion in completions]


def trl(completions, **columns):
    return [float(completion[0]["content"] == "4") for completion in completions]


def annotated(completions: list[list[dict[str, str]]], **columns) -> list[float]:
    return [float(completion[0]["content"] == "4") for completion in completions]


def score(function, prompt, **settings):
    config = RewardConfig(functions=[{"function": "f", **settings}])
    rewards = build_rewards(config, {"f": function}, patience=None)
    [scored] = rewards([trajectory(prompt)], judge=False)
    rewards.close()
    return scored


@pytest.mark.parametrize(
    ("function", "settings"),
    [(plain, {}), (plain, {"completions": "text"}), (trl, {"completions": "messages"}), (annotated, {})],
)  # fmt: skip
def test_messages_where_the_function_expects_them(function, settings):
    assert score(function, CHAT, **settings).reward == 1.0


def test_of_trl_itself():
    theirs = type(plain)(trl.__code__, {"__name__": "trl.rewards"}, "accuracy_reward")
    theirs.__module__ = "trl.rewards.accuracy_rewards"
    assert score(theirs, CHAT).reward == 1.0


def test_a_prompt_that_is_text_has_completions_that_are_text():
    assert score(plain, "2+2=", completions="messages").reward == 1.0


@pytest.mark.parametrize("function", [trl, lambda completions, **columns: [c.get("content") for c in completions]])
def test_a_text_taken_for_messages_is_answered_with_the_way_out(function):
    [failure] = score(function, CHAT).reward_failures
    assert "completions: messages" in failure.message and "completions are strings here" in failure.message
