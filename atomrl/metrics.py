"""Metrics that can be merged exactly.

A mean of means is wrong when the parts differ in size, so a metric travels as what is needed to merge it: a
weighted sum, or a maximum. Micro-batches, ranks and steps are merged with `merge`; `values` reads the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Mean:
    """A weighted mean under way: `total / weight`.

    Example:
        >>> (Mean(6.0, 2.0) + Mean(1.0, 1.0)).value
        2.3333333333333335
    """

    total: float
    weight: float = 1.0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else math.nan


@dataclass(frozen=True)
class Sum:
    """A count or another quantity that adds up."""

    total: float

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    @property
    def value(self) -> float:
        return self.total


@dataclass(frozen=True)
class Count:
    """How often something happened; it adds up over micro-batches and, unlike a `Sum`, over the updates of a step."""

    total: float = 1.0

    def __add__(self, other: Count) -> Count:
        return Count(self.total + other.total)

    @property
    def value(self) -> float:
        return self.total


@dataclass(frozen=True)
class Max:
    """The largest value seen."""

    largest: float

    def __add__(self, other: Max) -> Max:
        return Max(max(self.largest, other.largest))

    @property
    def value(self) -> float:
        return self.largest


Metric = Mean | Sum | Count | Max
Metrics = dict[str, Metric]


def merge(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Merge metrics by name.

    Example:
        >>> values(merge([{"a": Mean(1.0, 1.0)}, {"a": Mean(3.0, 1.0), "b": Max(2.0)}]))
        {'a': 2.0, 'b': 2.0}
    """
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name] + metric if name in merged else metric  # type: ignore[operator]
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The plain number of every metric."""
    return {name: metric.value for name, metric in metrics.items()}


def spread(name: str, numbers: Iterable[float]) -> dict[str, float]:
    """`name/mean`, `name/max` and `name/min` of plain numbers; nothing for an empty list.

    Example:
        >>> spread("response_length", [2, 4])
        {'response_length/mean': 3.0, 'response_length/max': 4.0, 'response_length/min': 2.0}
    """
    numbers = [float(number) for number in numbers]
    if not numbers:
        return {}
    return {f"{name}/mean": sum(numbers) / len(numbers), f"{name}/max": max(numbers), f"{name}/min": min(numbers)}
