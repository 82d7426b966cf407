"""Options that are named by a string: a misspelt one must not pass for another."""

from __future__ import annotations

from typing import Any, get_args


def _check_option(name: str, value: str, options: Any) -> None:
    """`options` is the `Literal` of the signature."""
    if value not in get_args(options):
        raise ValueError(f"{name}={value!r} is not one of {', '.join(get_args(options))}")
