"""The built-in rewards by name, and how any function is found."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import atomrl.rewards as built_in
from atomrl.rewards import boxes, tasks
from atomrl.rewards.errors import RewardError

AnyReward = Callable[..., Any]
"""A function or class of any of the kinds that `calling.Style` lists."""

REWARDS: dict[str, AnyReward] = {name: getattr(built_in, name) for name in built_in.__all__}

LOADING: dict[str, str] = {"reward_model": "atomrl.models.reward_model.RewardModel"}
"""Built-in rewards with weights of their own, by their dotted path: imported when a config names one. They compute in
this process, on the run's device, and are loaded once."""


@dataclass(frozen=True)
class Pooled:
    """A built-in reward that runs in worker processes: the package that it calls may hang or end its process."""

    package: str
    extra: str
    warm_up: Callable[[], None]
    """Imports the package."""


POOLED = {
    "boxed": Pooled("math_verify", "math", boxes.warm_up),
    "reasoning_gym": Pooled("reasoning_gym", "tasks", tasks.warm_up),
}
"""All other built-in rewards are string operations that are linear in the length of the text, and exact arithmetic on
numbers of at most 100 characters: they run in this process."""


def find_reward(name: str) -> AnyReward:
    """A built-in reward, any function by its dotted path (`my_rewards.brevity`), or by its file (`./mine.py:brevity`).

    What is not installed is looked for in the working directory and in the folders of `search_in`.

    Raises:
        RewardError: there is none; a built-in name is answered with the nearest.

    Example:
        >>> find_reward("atomrl.rewards.math.exact_match") is find_reward("exact_match")
        True
    """
    if name in REWARDS:
        return REWARDS[name]
    name = LOADING.get(name, name)
    in_file = ".py:" in name
    if "." not in name:
        known = [*REWARDS, *LOADING]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"built in are {', '.join(known)}"
        raise RewardError(f"unknown reward {name!r}; {hint} (your own is named my_module.f or ./my_file.py:f)")
    module_name, _, attribute = name.rpartition(":" if in_file else ".")
    search_in(os.getcwd())
    try:
        module = _load_file(module_name) if in_file else _load_module(module_name)
    except Exception as error:
        raise RewardError(f"reward {name!r}: module {module_name!r} cannot be imported: {error!r}") from error
    function: AnyReward | None = getattr(module, attribute, None)
    if function is None or not callable(function):
        raise RewardError(f"reward {name!r}: module {module_name!r} has no function {attribute!r}")
    return function


def search_in(folder: str | Path) -> None:
    """Look for users' modules and files in a folder too: last, so that nothing there hides an installed module."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _load_module(name: str) -> ModuleType:
    """A module by its dotted name. A user's file that is called like one of Python's own (`test.py`) is meant."""
    if name in (*sys.stdlib_module_names, "test"):
        own = _find_file(f"{name}.py")
        if own is not None:
            return _load_file(str(own))
    return importlib.import_module(name)


def _find_file(path: str) -> Path | None:
    """A user's file, from the working directory or any folder where modules are looked for but Python's own."""
    python = Path(sysconfig.get_path("stdlib"))
    folders = [Path(), *(Path(folder) for folder in sys.path if not Path(folder).is_relative_to(python))]
    return next((found for folder in folders if (found := folder / path).is_file()), None)


def _load_file(path: str) -> ModuleType:
    """The module of a file, under a name of its own, so that it hides no other."""
    file = _find_file(os.path.expanduser(path))
    if file is None:
        raise FileNotFoundError(f"there is no file {path}")
    name = f"_reward_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file.resolve())
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


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
    return f"{loaded.__file__}:{own}" if module.startswith("_reward_") else f"{module}.{own}"
