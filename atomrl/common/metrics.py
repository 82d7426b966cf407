"""Metrics that can be merged exactly.

A mean of means is wrong when the parts differ in size, so a metric travels as what is needed to merge it: a
weighted sum, or a maximum. Micro-batches, ranks and steps are merged with `merge`; `values` reads the result. A part
may be a tensor without dimensions, so that a loss waits for no device: `values` fetches all of them at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Mean:
    """A weighted mean under way: `total / weight`.

    Example:
        >>> (Mean(6.0, 2.0) + Mean(1.0, 1.0)).value
        2.3333333333333335
    """

    total: float | Tensor
    weight: float | Tensor = 1.0

    def __add__(self, other: Mean) -> Mean:
        return Mean(_sum(self.total, other.total), _sum(self.weight, other.weight))

    @property
    def value(self) -> float:
        return float(self.total) / float(self.weight) if self.weight else math.nan


@dataclass(frozen=True)
class Sum:
    """A count or another quantity that adds up."""

    total: float | Tensor

    def __add__(self, other: Self) -> Self:
        return type(self)(_sum(self.total, other.total))

    @property
    def value(self) -> float:
        return float(self.total)


@dataclass(frozen=True)
class Count(Sum):
    """How often something happened; it adds up over micro-batches and, unlike a `Sum`, over the updates of a step."""

    total: float | Tensor = 1.0


@dataclass(frozen=True)
class Max:
    """The largest value seen."""

    largest: float | Tensor

    def __add__(self, other: Max) -> Max:
        if isinstance(self.largest, int | float) and isinstance(other.largest, int | float):
            return Max(max(self.largest, other.largest))
        import torch

        return Max(torch.maximum(*(torch.as_tensor(item).double() for item in (self.largest, other.largest))))

    @property
    def value(self) -> float:
        return float(self.largest)


Metric = Mean | Sum | Max
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
    """The plain number of every metric; what is on a device comes in one transfer.

    Example:
        >>> import torch
        >>> values({"a": Mean(torch.tensor(3), torch.tensor(2)), "b": Sum(1.0)})
        {'a': 1.5, 'b': 1.0}
    """
    return {name: metric.value for name, metric in fetched([metrics])[0].items()}


def fetched(parts: Sequence[Mapping[str, Metric]]) -> list[Metrics]:
    """Metrics as plain numbers, those of all parts fetched from their device in one transfer.

    Example:
        >>> import torch
        >>> fetched([{"a": Mean(torch.tensor(3), 2.0)}, {"b": Sum(torch.tensor(1.5))}])
        [{'a': Mean(total=3.0, weight=2.0)}, {'b': Sum(total=1.5)}]
    """
    metrics = [metric for part in parts for metric in part.values()]
    waiting = [number for metric in metrics for number in vars(metric).values() if not isinstance(number, int | float)]
    if not waiting:
        return [dict(part) for part in parts]
    import torch

    device = next((number.device for number in waiting if number.device.type != "cpu"), waiting[0].device)
    numbers = iter(torch.stack([number.to(device).double() for number in waiting]).tolist())

    def plain(metric: Metric) -> Metric:
        return type(metric)(*(n if isinstance(n, int | float) else next(numbers) for n in vars(metric).values()))

    return [{name: plain(metric) for name, metric in part.items()} for part in parts]


def _sum(one: float | Tensor, other: float | Tensor) -> float | Tensor:
    """In float64, as plain numbers add."""
    one, other = (part if isinstance(part, int | float) else part.double() for part in (one, other))
    return one + other


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
