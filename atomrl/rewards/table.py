"""The built-in rewards by name, and how any function is found."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from atomrl.rewards.errors import RewardError
from atomrl.rewards.math import exact_match, gsm8k, strict_format, strict_math
from atomrl.rewards.tasks import countdown, reasoning_gym

RewardFunction = Callable[..., Any]

REWARDS: dict[str, RewardFunction] = {
    "countdown": countdown,
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "reasoning_gym": reasoning_gym,
    "strict_format": strict_format,
    "strict_math": strict_math,
}


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
    if "." not in name:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"built in are {', '.join(REWARDS)}"
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
