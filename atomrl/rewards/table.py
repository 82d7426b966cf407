"""The built-in rewards by name, and how any function is found."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from atomrl.rewards import boxes, tasks
from atomrl.rewards.boxes import boxed
from atomrl.rewards.errors import RewardError
from atomrl.rewards.math import exact_match, gsm8k, strict_format, strict_math
from atomrl.rewards.penalties import length_penalty, repetition_penalty
from atomrl.rewards.tasks import countdown, reasoning_gym
from atomrl.rewards.tutorial import correctness_reward, digit_reward, hard_format_reward, mark_reward

RewardFunction = Callable[..., Any]

REWARDS: dict[str, RewardFunction] = {
    "boxed": boxed,
    "correctness_reward": correctness_reward,
    "countdown": countdown,
    "digit_reward": digit_reward,
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "hard_format_reward": hard_format_reward,
    "length_penalty": length_penalty,
    "mark_reward": mark_reward,
    "reasoning_gym": reasoning_gym,
    "repetition_penalty": repetition_penalty,
    "strict_format": strict_format,
    "strict_math": strict_math,
}

LOADING: dict[str, str] = {"reward_model": "atomrl.models.reward_model.RewardModel"}
"""Built-in rewards with weights of their own, by their dotted path: imported when a config names one. They compute in
this process, on the run's device, and are loaded once."""

POOLED: dict[str, Callable[[], None]] = {"boxed": boxes.warm_up, "reasoning_gym": tasks.warm_up}
"""Built-in rewards that run in worker processes, because the package that they call may hang or end its process; and
what imports that package. All others are string operations that are linear in the length of the text, and exact
arithmetic on numbers of at most 100 characters: they run in this process."""


def find_reward(name: str) -> RewardFunction:
    """A built-in reward, or any function by its dotted path (`my_rewards.brevity`).

    A module that is not installed is looked for in the working directory.

    Raises:
        RewardError: there is none; a built-in name is answered with the nearest.

    Example:
        >>> find_reward("atomrl.rewards.math.exact_match") is find_reward("exact_match")
        True
    """
    if name in REWARDS:
        return REWARDS[name]
    name = LOADING.get(name, name)
    if "." not in name:
        known = [*REWARDS, *LOADING]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"built in are {', '.join(known)}"
        raise RewardError(f"unknown reward {name!r}; {hint} (your own is named by a dotted path: my_module.f)")
    module_name, _, attribute = name.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that nothing there hides an installed module
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise RewardError(f"reward {name!r}: module {module_name!r} cannot be imported: {error!r}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise RewardError(f"reward {name!r}: module {module_name!r} has no function {attribute!r}")
    return function


def importable_name(function: RewardFunction) -> str | None:
    """The name by which `find_reward` finds a function in any process, or None.

    Example:
        >>> importable_name(exact_match), importable_name(lambda: 0)
        ('exact_match', None)
    """
    for name, built_in in REWARDS.items():
        if built_in is function:
            return name
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    found = getattr(sys.modules.get(module or ""), name or "", None)
    return None if found is not function or module == "__main__" else f"{module}.{name}"
