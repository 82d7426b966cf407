"""The source of the user's functions, saved in the run's folder. A config has only their names."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from atomrl.common.functions import find_function
from atomrl.config import RunConfig

MAX_CHARACTERS = 100_000


def function_sources(config: RunConfig, local: Mapping[str, Any]) -> dict[str, str]:
    """Return the source of each of the user's functions in a config: name -> source.

    Args:
        local: functions that exist only in this process, by their name in the config.
    """
    sources = {}
    for name in dict.fromkeys(_function_names(config.to_tree())):
        function = local.get(name)
        if function is None and not ("." in name or ":" in name):
            continue  # a built-in
        try:
            function = inspect.unwrap(function or find_function(name))
            if not str(getattr(function, "__module__", "")).startswith("atomrl."):
                sources[name] = inspect.getsource(function)[:MAX_CHARACTERS]
        except (OSError, TypeError, ValueError):  # an object without source, or a command line
            continue
    return sources


def _function_names(tree: Any) -> Iterator[str]:
    """Yield the values of all keys `function` in a tree."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key == "function" and isinstance(value, str):
                yield value
            else:
                yield from _function_names(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _function_names(value)
