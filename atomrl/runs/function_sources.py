"""The source of a run's own functions, kept with it: what a config only names."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from atomrl.config import RunConfig
from atomrl.functions import find_function

MAX_CHARACTERS = 100_000


def function_sources(config: RunConfig, local: Mapping[str, Any]) -> dict[str, str]:
    """The source of each function of the user's that a config names, by the name that it has there.

    Args:
        local: functions that exist in this process alone, by that name.
    """
    found = {}
    for name in dict.fromkeys(_named(config.to_tree())):
        function = local.get(name)
        if function is None and not ("." in name or ":" in name):
            continue  # a built-in
        try:
            function = inspect.unwrap(function or find_function(name))
            if not str(getattr(function, "__module__", "")).startswith("atomrl."):
                found[name] = inspect.getsource(function)[:MAX_CHARACTERS]
        except (OSError, TypeError, ValueError):  # an object without source, or a command line
            continue
    return found


def _named(tree: Any) -> Iterator[str]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key == "function" and isinstance(value, str):
                yield value
            else:
                yield from _named(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _named(value)
