"""Metrics that can be merged exactly over micro-batches, ranks and steps.

A mean of means is wrong if the parts differ in size, so a metric is kept as a weighted sum, a sum or a maximum until
`values` computes the number. Parts may be scalar tensors, so that computing a loss needs no device sync: `values`
fetches all of them in one transfer.
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
    """Weighted mean: `total / weight`.

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
    """Quantity that is summed over micro-batches and ranks, such as a number of tokens."""

    total: float | Tensor

    def __add__(self, other: Self) -> Self:
        return type(self)(_sum(self.total, other.total))

    @property
    def value(self) -> float:
        return float(self.total)


@dataclass(frozen=True)
class Count(Sum):
    """Number of events; unlike a `Sum` it is also summed over the updates of a step."""

    total: float | Tensor = 1.0


@dataclass(frozen=True)
class Max:
    """Maximum."""

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
    """Compute the value of every metric, with one transfer from the device.

    Example:
        >>> import torch
        >>> values({"a": Mean(torch.tensor(3), torch.tensor(2)), "b": Sum(1.0)})
        {'a': 1.5, 'b': 1.0}
    """
    return {name: metric.value for name, metric in fetch([metrics])[0].items()}


def fetch(parts: Sequence[Mapping[str, Metric]]) -> list[Metrics]:
    """Replace tensors in metrics by plain numbers, with one transfer from the device for all parts.

    Example:
        >>> import torch
        >>> fetch([{"a": Mean(torch.tensor(3), 2.0)}, {"b": Sum(torch.tensor(1.5))}])
        [{'a': Mean(total=3.0, weight=2.0)}, {'b': Sum(total=1.5)}]
    """
    metrics = [metric for part in parts for metric in part.values()]
    tensors = [number for metric in metrics for number in vars(metric).values() if not isinstance(number, int | float)]
    if not tensors:
        return [dict(part) for part in parts]
    import torch

    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
    numbers = iter(torch.stack([tensor.to(device).double() for tensor in tensors]).tolist())

    def plain(metric: Metric) -> Metric:
        return type(metric)(*(n if isinstance(n, int | float) else next(numbers) for n in vars(metric).values()))

    return [{name: plain(metric) for name, metric in part.items()} for part in parts]


def _sum(one: float | Tensor, other: float | Tensor) -> float | Tensor:
    """Add in float64, as Python floats do."""
    one, other = (part if isinstance(part, int | float) else part.double() for part in (one, other))
    return one + other


def mean_max_min(name: str, numbers: Iterable[float]) -> dict[str, float]:
    """Compute `name/mean`, `name/max` and `name/min` of plain numbers; empty for an empty list.

    Example:
        >>> mean_max_min("response_length", [2, 4])
        {'response_length/mean': 3.0, 'response_length/max': 4.0, 'response_length/min': 2.0}
    """
    numbers = [float(number) for number in numbers]
    if not numbers:
        return {}
    return {f"{name}/mean": sum(numbers) / len(numbers), f"{name}/max": max(numbers), f"{name}/min": min(numbers)}
