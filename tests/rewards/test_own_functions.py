"""Functions of the user's own: what they may change, raise, return and be called, and what their messages contain."""

from __future__ import annotations

import asyncio
import logging
import sys
from decimal import Decimal

import numpy
import pytest
import torch

from atomrl.common import outages
from atomrl.config import RewardConfig
from atomrl.rewards.compute import build_rewards, name_functions
from atomrl.rewards.errors import RewardStop
from atomrl.rewards.programs import code
from atomrl.types import Problem
from tests.rewards.batches import failures, rollouts, values


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(outages, "FIRST_S", 0.01)


def build(*functions, patience=None, **keys):
    names, local = name_functions(functions)
    return build_rewards(RewardConfig(functions=names, **keys), local, patience=patience)


def counted(extra_info):
    extra_info["tests"].append(1)
    return float(len(extra_info["tests"]))


class Counts:
    def __call__(self, trajectories):
        return [counted(item.problem.columns["extra_info"]) for item in trajectories]


def count_score(data_source, solution_str, ground_truth, extra_info=None):
    return counted(extra_info)


def count_columns(completions, extra_info, **columns):
    return [counted(info) for info in extra_info]


@pytest.mark.parametrize("function", [Counts, count_score, count_columns])
@pytest.mark.parametrize("in_process", [True, False])
def test_changes_to_columns_reach_neither_other_completions_nor_the_problem(function, in_process):
    problem = Problem(problem_id="a", prompt="p", ground_truth="", columns={"extra_info": {"tests": [0]}})
    path = f"{__name__}.{function.__name__}"
    config = RewardConfig(functions=[path], workers=2)
    rewards = build_rewards(config, {path: function} if in_process else None, patience=None)
    assert values(rewards(rollouts({"a": ["x"] * 5}, a=problem))) == ((2.0,) * 5,)
    rewards.close()
    assert problem.columns == {"extra_info": {"tests": [0]}}


def test_a_function_with_the_name_of_a_built_in_is_ones_own():
    def gsm8k(prompts, completions, **columns):
        return [float(len(text)) for text in completions]

    names, local = name_functions([gsm8k, "gsm8k"])
    assert names[0] != names[1] and [*local.values()] == [gsm8k]
    rewards = build_rewards(RewardConfig(functions=names), local)
    assert [part.name for part in rewards.parts] == ["gsm8k", "gsm8k_2"]
    assert [part.scorers[None].built_in for part in rewards.parts] == [None, "gsm8k"]
    batch = rewards(rollouts({"4": ["it is 4"]}))
    assert (values(batch, "gsm8k"), values(batch, "gsm8k_2")) == (((7.0,),), ((1.0,),))
    build(gsm8k).check_sources([Problem(problem_id="a", prompt="p", ground_truth=None)])


class WithCode(Exception):
    code = 500


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError("dead address"), ConnectionResetError(), WithCode(), SystemExit(500)]
)
@pytest.mark.parametrize("by_row", [True, False])
def test_an_error_of_one_completion_whose_service_answers_others_costs_that_one(error, by_row):
    def one(solution_str, data_source=None, ground_truth=None):
        if solution_str == "bad":
            raise error
        return 1.0

    def batch(completions, **columns):
        return [one(text) for text in completions]

    rewards = build(one if by_row else batch, wait_s=30)
    scored = rewards(rollouts({"a": ["x", "bad", "y"]}))
    assert values(scored) == ((1.0, None, 1.0),) and [kind for kind, _ in failures(scored)] == ["error"]
    # All completions of a later group fail, and the service still answers others.
    assert values(rewards(rollouts({"b": ["bad", "bad"]}))) == ((None, None),)


def test_a_busy_service_is_waited_for_even_if_it_answers_others():
    class TooMany(Exception):
        status_code = 429

    def one(solution_str, data_source=None, ground_truth=None):
        if solution_str == "bad":
            raise TooMany
        return 1.0

    with pytest.raises(RewardStop, match=r"unavailable.*reward.wait_s"):
        build(one, wait_s=0.05)(rollouts({"a": ["x", "bad"]}))


@pytest.mark.parametrize("pair", [(1e308, 1e308), (-1e308, -1e308), (9e17, 9e17), (3e38, 0.0)])
def test_rewards_whose_sum_is_too_large_are_no_value(pair):
    first, second = (lambda completions, value=value, **columns: [value] * len(completions) for value in pair)
    scored = build(first, second)(rollouts({"a": ["x"]}))
    assert values(scored) == ((None,),)
    [(kind, message)] = failures(scored)
    assert kind == "invalid" and "add up to" in message


@pytest.mark.parametrize(("value", "number"), [
    (Decimal("0.25"), 0.25), (Decimal("NaN"), None), (Decimal("1e400"), None), (numpy.str_("1.0"), None),
])  # fmt: skip
def test_decimals_are_numbers_and_texts_are_not(value, number):
    scored = build(lambda completions, **columns: [value])(rollouts({"a": ["x"]}))
    assert values(scored) == ((number,),)


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit, SystemExit, BaseException])
def test_any_exception_is_named_as_what_it_is(error):
    async def waits(completions, **columns):
        raise error("of its own")

    def raises(completions, **columns):
        raise error("of its own")

    for function in (waits, raises):
        [(kind, message)] = failures(build(function)(rollouts({"a": ["x"]})))
        assert kind == "error" and message.startswith(f"{error.__name__}: of its own")


@pytest.mark.parametrize("change", [
    lambda: torch.set_default_dtype(torch.float64),
    lambda: torch.set_grad_enabled(False),
    lambda: torch.set_default_device("meta"),
    lambda: torch.set_num_threads(torch.get_num_threads() + 1),
])  # fmt: skip
def test_torch_settings_are_restored_and_the_reward_is_named(change, caplog):
    def settings():
        return (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_default_device(), torch.get_num_threads())

    def setting(completions, **columns):
        change()
        return [1.0] * len(completions)

    before = settings()
    setting.__name__ = f"sets_{change.__code__.co_firstlineno}"  # a reward is named once for each setting
    with caplog.at_level(logging.WARNING):
        assert values(build(setting)(rollouts({"a": ["x"]}))) == ((1.0,),)
    assert settings() == before and f"reward '{setting.__name__}' has set torch's" in caplog.text
    elsewhere = torch.empty(1, device="meta")
    assert torch.as_tensor(elsewhere) is elsewhere  # under a default device, that of the CPU too, it is copied there


def test_secrets_in_messages_are_redacted_before_they_are_cut(monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_API_KEY", "abcd-1234-efgh")

    def raises(completions, **columns):
        raise ValueError("x" * 290 + " abcd-1234-efgh")

    def returns(completions, **columns):
        return ["x" * 90 + "abcd-1234-efgh"]

    scored = build(raises, returns)(rollouts({"a": ["x"]}), judge=False)
    for _, message in failures(scored):
        assert "abcd" not in message and "x" * 90 in message


@pytest.mark.skipif(sys.platform != "linux", reason="of the Linux kernel")
def test_a_worker_is_killed_for_memory_before_the_trainer():
    rewards = build_rewards(RewardConfig(functions=[f"{__name__}.count_columns"], workers=1), patience=None)
    problem = Problem(problem_id="a", prompt="p", ground_truth="", columns={"extra_info": {"tests": []}})
    rewards(rollouts({"a": ["x"]}, a=problem))
    [pid] = rewards.pool.pids
    with open(f"/proc/{pid}/oom_score_adj") as file:
        assert int(file.read()) == 1000
    rewards.close()


@pytest.mark.parametrize(("program", "tests", "score"), [
    ("def f(x):\n    raise StopIteration", ["assert all(map(lambda c: f(c) == c, [1, 2]))"], 0.0),
    ("def f(x):\n    next(iter([]))", "def test_a():\n    for got in map(f, [1]):\n        assert got == 2", 0.0),
    ("def f(x):\n    raise StopIteration", ["assert [*zip([1], map(f, [1]))] == []"], 0.0),
    ("def f(x):\n    yield from range(x)", ["assert [*f(3)] == [0, 1, 2]", "assert next(f(1)) == 0"], 1.0),
    ("def f(x):\n    return True", {"fn_name": "f", "inputs": [[1]], "outputs": [1]}, 0.0),
    ("def f(x):\n    return [1, 0]", {"fn_name": "f", "inputs": [[1]], "outputs": [[True, False]]}, 0.0),
    ("def f(x):\n    return {'a': True}", {"fn_name": "f", "inputs": [[1]], "outputs": [{"a": True}]}, 1.0),
    ("def f(x):\n    return [float('nan')]", {"fn_name": "f", "inputs": [[1]], "outputs": [[[float("nan")]]]}, 1.0),
])  # fmt: skip
def test_what_passes_the_tests_of_a_program(program, tests, score):
    assert code([""], [f"```python\n{program}\n```\n"], [tests], sandbox="none") == [score]
