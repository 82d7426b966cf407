"""Registry of the built-in rewards, and lookup of any reward by name."""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import atomrl.rewards as built_in
from atomrl.common.errors import did_you_mean
from atomrl.common.functions import OF_FILE, find_function, names_in
from atomrl.data.problems import USUAL
from atomrl.rewards import latex as boxes
from atomrl.rewards import programs, tasks
from atomrl.rewards.answers import require_truth, truth_text
from atomrl.rewards.errors import RewardError, require
from atomrl.rewards.program_tests import cases_of
from atomrl.rewards.search_r1 import right_answers
from atomrl.rewards.verifiable import number_truth, read_answer

AnyReward = Callable[..., Any]
"""A function or class of any of the kinds that `calling.Style` lists."""

REWARDS: dict[str, AnyReward] = dict(inspect.getmembers(built_in, inspect.isfunction))

LOADING: dict[str, str] = {"reward_model": "atomrl.models.reward_model.RewardModel"}
"""Built-in reward models: name -> dotted path, imported on first use. They run in this process, on the run's device."""

SERVICES: dict[str, str] = {
    "http": "atomrl.rewards.http_reward.HttpReward",
    "llm_judge": "atomrl.rewards.llm_judge.LLMJudge",
}
"""Built-in rewards that call an HTTP service: name -> dotted path. They run in this process, not in workers, because
outages, cache and budget are shared by the whole run."""

CLASSES = LOADING | SERVICES | {"environment": "atomrl.rewards.environment.EnvironmentOutcome"}
"""All built-in rewards that are classes: name -> dotted path."""
Row = Mapping[str, Any]
"""Columns of one problem, including `ground_truth`."""
TRUTHS: dict[str, Callable[[Row, Mapping[str, Any]], object]] = {
    "strict_math": lambda row, args: require_truth(row["ground_truth"]),
    "exact_match": lambda row, args: truth_text(row["ground_truth"]),
    "gsm8k": lambda row, args: number_truth(row["ground_truth"]),
    "boxed": lambda row, args: boxes.read_truth(row["ground_truth"]),
    "search_r1_em": lambda row, args: right_answers(row["ground_truth"]),
    "countdown": lambda row, args: tasks.read_target(row["ground_truth"], row.get("numbers")),
    "correctness_reward": lambda row, args: read_answer(row),
    "code": lambda row, args: cases_of(row[args.get("test_column", "ground_truth")], row),
}
"""Built-in reward -> function of (row, args) that raises TypeError, ValueError or KeyError if the reward cannot parse
the ground truth. Rewards that are not listed use no ground truth, or accept any."""
GRADERS = {*TRUTHS, "reasoning_gym", "environment"}
"""The built-in rewards whose values of 1.0 or more say that an answer is right."""
TRUTH_NAMES = {"ground_truth", "ground_truths", *(name.partition(".")[0] for name in USUAL["data.answer_field"])}
"""Names by which functions of the user's own read the ground truth."""


@dataclass(frozen=True)
class Pooled:
    """A built-in reward that runs in worker processes, because the libraries that it calls may hang or crash."""

    check: Callable[[Mapping[str, Any]], None]
    """Raises RewardError if the reward cannot run here with its args."""
    warm_up: Callable[[], None] = lambda: None
    """Imports slow modules when the worker starts."""


POOLED = {
    "boxed": Pooled(lambda args: require("boxed", "math_verify", "math"), boxes.warm_up),
    "code": Pooled(programs.check_sandbox),
    "reasoning_gym": Pooled(lambda args: require("reasoning_gym", "reasoning_gym", "tasks"), tasks.warm_up),
}
"""The other built-in functions run in this process: they are string operations in linear time, and exact arithmetic on
numbers of at most 100 characters."""


def says_right(built_in: str | None, function: AnyReward) -> bool:
    """Return True if a reward grades answers as right (1.0 or more) or wrong, so that its values have an accuracy.

    A built-in does if it is in `GRADERS`, a function of the user's own if its code names the ground truth.

    Args:
        built_in: name of a built-in reward; None for a function of the user's own.

    Example:
        >>> says_right("code", find_reward("code")), says_right("llm_judge", find_reward("llm_judge"))
        (True, False)
        >>> says_right(None, lambda completions, answer, **columns: [float(answer[0] in text) for text in completions])
        True
    """
    return built_in in GRADERS if built_in is not None else not TRUTH_NAMES.isdisjoint(names_in(function))


def truth_problem(name: str, row: Row, args: Mapping[str, Any] | None = None) -> str | None:
    """Return an error message if a built-in reward cannot parse the ground truth of a row, else None.

    Example:
        >>> truth_problem("gsm8k", {"ground_truth": "many"})
        "reward 'gsm8k' cannot read it: ground_truth is not a number: 'many'"
    """
    try:
        if name in TRUTHS:
            TRUTHS[name](row, args or {})
    except (TypeError, ValueError) as error:
        return f"reward {name!r} cannot read it: {error}"
    except KeyError as error:
        return f"reward {name!r} has no column {error} here"
    return None


def find_reward(name: str) -> AnyReward:
    """Look up a built-in reward, or import a function by its path (`my_rewards.brevity`, `./mine.py:brevity`).

    Raises:
        RewardError: there is no such reward; the message suggests the closest built-in name.

    Example:
        >>> find_reward("atomrl.rewards.verifiable.exact_match") is find_reward("exact_match")
        True
    """
    if name in REWARDS:
        return REWARDS[name]
    if "." not in name and ":" not in name and name not in CLASSES:
        hint = did_you_mean(name, [*REWARDS, *CLASSES], "built in:")
        raise RewardError(f"unknown reward {name!r}; {hint} (write your own as my_module.f or ./my_file.py:f)")
    try:
        return find_function(CLASSES.get(name, name))
    except ValueError as error:
        raise RewardError(f"reward {error}") from error


def importable_name(function: AnyReward) -> str | None:
    """Return the name by which `find_reward` finds a function in any process, or None if it cannot be imported.

    Example:
        >>> importable_name(find_reward("exact_match")), importable_name(lambda: 0)
        ('exact_match', None)
    """
    name = next((name for name, reward in REWARDS.items() if reward is function), None)
    if name is not None:
        return name
    module, own = str(getattr(function, "__module__", "")), str(getattr(function, "__qualname__", ""))
    loaded = sys.modules.get(module)
    if loaded is None or module == "__main__" or getattr(loaded, own, None) is not function:
        return None
    return f"{loaded.__file__}:{own}" if module.startswith(OF_FILE) else f"{module}.{own}"
