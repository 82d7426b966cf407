"""The built-in rewards by name, and how any function is found."""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import atomrl.rewards as built_in
from atomrl.common.errors import did_you_mean
from atomrl.common.functions import OF_FILE, find_function
from atomrl.rewards import latex as boxes
from atomrl.rewards import programs
from atomrl.rewards import verifiable as tasks
from atomrl.rewards.answers import require_truth, truth_text
from atomrl.rewards.errors import RewardError, require
from atomrl.rewards.format import read_answer
from atomrl.rewards.programs import cases_of
from atomrl.rewards.verifiable import number_truth, right_answers

AnyReward = Callable[..., Any]
"""A function or class of any of the kinds that `calling.Style` lists."""

REWARDS: dict[str, AnyReward] = dict(inspect.getmembers(built_in, inspect.isfunction))

LOADING: dict[str, str] = {"reward_model": "atomrl.models.reward_model.RewardModel"}
"""Built-in rewards with weights of their own, by their dotted path: imported when a config names one. They compute in
this process, on the run's device, and are loaded once."""


SERVICES: dict[str, str] = {"http": "atomrl.rewards.service.HttpReward", "llm_judge": "atomrl.rewards.service.LLMJudge"}
"""Built-in rewards that ask a service, by their dotted path. They wait in a thread of this process and not in workers,
since what they wait for and their budget are one for the run."""

CLASSES = LOADING | SERVICES | {"environment": "atomrl.rewards.format.EnvironmentOutcome"}


@dataclass(frozen=True)
class Pooled:
    """A built-in reward that runs in worker processes: what it calls may hang or end its process."""

    check: Callable[[Mapping[str, Any]], None]
    """Raises a RewardError where it cannot be used here with its args."""
    warm_up: Callable[[], None] = lambda: None
    """Imports what takes long to import."""


POOLED = {
    "boxed": Pooled(lambda args: require("boxed", "math_verify", "math"), boxes.warm_up),
    "code": Pooled(programs.check_sandbox),
    "reasoning_gym": Pooled(lambda args: require("reasoning_gym", "reasoning_gym", "tasks"), tasks.warm_up),
}
"""All other built-in rewards are string operations that are linear in the length of the text, and exact arithmetic on
numbers of at most 100 characters: they run in this process."""


Row = Mapping[str, Any]
"""The columns of a sample, `ground_truth` among them."""
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
"""Built-in reward -> what raises a TypeError, ValueError or KeyError where it cannot read the truth of a row, given its
args. Rewards without one have no truth, or take any."""


def says_right(values: Mapping[str, Iterable[float]]) -> bool:
    """Whether first reward functions say what is right: their values are 0 and 1 alone, or they compare with a truth
    and give 1.0 or more for that. Of other values (a length, a score) a share of at least 1.0 is no accuracy.

    Args:
        values: by the name of the part.

    Example:
        >>> says_right({"mine": [0.0, 1.0]}), says_right({"mine": [0.4, 1.3]}), says_right({"code": [0.25, 1.0]})
        (True, False, True)
    """
    compared = {*TRUTHS, "reasoning_gym"}
    return all(
        re.sub(r"_\d+$", "", name) in compared or all(value in (0.0, 1.0) for value in given)
        for name, given in values.items()
    )


def truth_problem(name: str, row: Row, args: Mapping[str, Any] | None = None) -> str | None:
    """Why a built-in reward cannot read the truth of a row; None where it can.

    Example:
        >>> truth_problem("gsm8k", {"ground_truth": "many"})
        "reward 'gsm8k' cannot read it: ground_truth is no number: 'many'"
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
    """A built-in reward, or any function as `find_function` finds it (`my_rewards.brevity`, `./mine.py:brevity`).

    Raises:
        RewardError: there is none; a built-in name is answered with the nearest.

    Example:
        >>> find_reward("atomrl.rewards.verifiable.exact_match") is find_reward("exact_match")
        True
    """
    if name in REWARDS:
        return REWARDS[name]
    if "." not in name and ":" not in name and name not in CLASSES:
        hint = did_you_mean(name, [*REWARDS, *CLASSES], "built in are")
        raise RewardError(f"unknown reward {name!r}; {hint} (your own is named my_module.f or ./my_file.py:f)")
    try:
        return find_function(CLASSES.get(name, name))
    except ValueError as error:
        raise RewardError(f"reward {error}") from error


def importable_name(function: AnyReward) -> str | None:
    """The name by which `find_reward` finds a function in any process, or None.

    Example:
        >>> importable_name(find_reward("exact_match")), importable_name(lambda: 0)
        ('exact_match', None)
    """
    name = next((name for name, known in REWARDS.items() if known is function), None)
    if name is not None:
        return name
    module, own = str(getattr(function, "__module__", "")), str(getattr(function, "__qualname__", ""))
    loaded = sys.modules.get(module)
    if loaded is None or module == "__main__" or getattr(loaded, own, None) is not function:
        return None
    return f"{loaded.__file__}:{own}" if module.startswith(OF_FILE) else f"{module}.{own}"
