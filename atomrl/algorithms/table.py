"""Algorithms by name. To add one: its file, and a line here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from atomrl.algorithms.grpo import GRPO
from atomrl.objective import Objective, compose, override
from atomrl.protocols import Algorithm

ALGORITHMS: dict[str, Objective] = {
    "grpo": GRPO,
}


def build_algorithm(name: str, axes: Mapping[str, Any], *, report_entropy: bool = False) -> Algorithm:
    """The algorithm of a config.

    Args:
        name: a key of `ALGORITHMS`.
        axes: what the config overrides, by axis.
        report_entropy: log the policy's entropy.

    Raises:
        ValueError: an unknown name, axis, parameter or type, with the nearest valid one.

    Example:
        >>> sorted(build_algorithm("grpo", {"kl": {"coefficient": 0.01}}).needs)
        ['old_logprobs', 'ref_logprobs']
    """
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(name, ALGORITHMS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(ALGORITHMS)}"
        raise ValueError(f"algorithm.name: unknown algorithm {name!r}; {hint}")
    return compose(name, override(ALGORITHMS[name], axes), report_entropy=report_entropy)
