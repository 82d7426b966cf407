"""All rewards of a run together: RolloutBatch -> RewardBatch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any

from atomrl.rewards.errors import RewardError
from atomrl.rewards.table import RewardFunction, find_reward
from atomrl.stages import RewardBatch, RolloutBatch, Sample

if TYPE_CHECKING:
    from atomrl.config import RewardConfig, RewardItem

RewardComputer = Callable[[RolloutBatch], RewardBatch]


@dataclass(frozen=True)
class NamedReward:
    """One reward as a run uses it."""

    name: str
    """Unique in the run; the name it is logged under."""
    function: RewardFunction
    weight: float
    args: dict[str, Any]


@dataclass(frozen=True)
class _Rows:
    """The completions of a batch, flattened; all lists have one element per completion."""

    samples: list[Sample]
    prompts: list[Any]
    completions: list[str]
    columns: dict[str, list[Any]]

    def part(self, start: int, stop: int) -> _Rows:
        columns = {name: values[start:stop] for name, values in self.columns.items()}
        return _Rows(self.samples[start:stop], self.prompts[start:stop], self.completions[start:stop], columns)


def build_rewards(config: RewardConfig) -> RewardComputer:
    """The function that scores a batch with all rewards of a config.

    A completion's reward is the sum of weight times value over the functions that gave one; None where none did.

    Raises:
        RewardError: a function is unknown, does not take `**columns`, or does not take its `args`. The function that
            is returned raises it, naming reward and sample, for a wrong number of values, a value that is no finite
            number, and an exception.
    """
    rewards: list[NamedReward] = []
    for item in config.functions:
        base = item.function.rpartition(".")[2]
        uses = [reward.name for reward in rewards]
        name = next(n for n in [base, *(f"{base}_{k}" for k in range(2, len(uses) + 3))] if n not in uses)
        rewards.append(NamedReward(name, _checked(item), item.weight, dict(item.args)))

    def compute(rollouts: RolloutBatch) -> RewardBatch:
        rows = _flatten(rollouts)
        groups = [len(group) for group in rollouts.completions]
        parts = {reward.name: score(reward, rows) for reward in rewards}
        weights = [reward.weight for reward in rewards]
        totals = [_total(weights, values) for values in zip(*parts.values(), strict=True)]
        return RewardBatch(
            **{item.name: getattr(rollouts, item.name) for item in fields(RolloutBatch)},
            rewards=_grouped(totals, groups),
            reward_parts={name: _grouped(values, groups) for name, values in parts.items()},
        )

    return compute


def _checked(item: RewardItem) -> RewardFunction:
    function = find_reward(item.function)
    if not math.isfinite(item.weight):
        raise RewardError(f"reward {item.function!r}: weight must be a finite number, not {item.weight}")
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"reward {item.function!r} is async; write a plain function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-ins have none to check
        return function
    parameters = signature.parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise RewardError(
            f"reward {item.function!r} must take **columns: def f(prompts, completions, ground_truth, **columns), "
            f"not {signature}"
        )
    unknown = [name for name in item.args if name not in parameters]
    if unknown:
        raise RewardError(f"reward {item.function!r} has no argument {unknown[0]!r}: {signature}")
    return function


def _flatten(rollouts: RolloutBatch) -> _Rows:
    samples = [
        sample for sample, group in zip(rollouts.samples, rollouts.completions, strict=True) for _ in range(len(group))
    ]
    names = dict.fromkeys(name for sample in rollouts.samples for name in sample.columns)
    columns: dict[str, list[Any]] = {name: [sample.columns.get(name) for sample in samples] for name in names}
    columns["ground_truth"] = [sample.ground_truth for sample in samples]
    columns["data_source"] = [sample.data_source for sample in samples]
    prompts = [s.prompt if isinstance(s.prompt, str) else [dict(message) for message in s.prompt] for s in samples]
    texts = [completion.text for group in rollouts.completions for completion in group]
    return _Rows(samples, prompts, texts, columns)


def score(reward: NamedReward, rows: _Rows) -> list[float | None]:
    """The values of one reward, checked."""
    if not rows.samples:
        return []
    taken = sorted(set(reward.args) & set(rows.columns))
    if taken:
        raise RewardError(f"reward {reward.name!r}: argument {taken[0]!r} has the name of a column; rename one of them")
    try:
        result = _call(reward, rows)
    except Exception as error:
        place = _culprit(reward, rows)
        raise RewardError(
            f"reward {reward.name!r} failed on {place}: {type(error).__name__}: {error} "
            f"(columns: {', '.join(rows.columns)})"
        ) from error
    if hasattr(result, "tolist"):  # numpy, torch
        result = result.tolist()
    if isinstance(result, (str, bytes, dict)) or not isinstance(result, Sequence):
        raise RewardError(f"reward {reward.name!r} must return a list of numbers, not {type(result).__name__}")
    if len(result) != len(rows.samples):
        raise RewardError(
            f"reward {reward.name!r} returned {len(result)} values for {len(rows.samples)} completions "
            f"(from sample {rows.samples[0].sample_id!r} on)"
        )
    return [_number(value, reward, rows, row) for row, value in enumerate(result)]


def _call(reward: NamedReward, rows: _Rows) -> Any:
    # every function gets lists of its own, so that none can disturb another's
    columns = {name: list(values) for name, values in rows.columns.items()}
    return reward.function(prompts=list(rows.prompts), completions=list(rows.completions), **columns, **reward.args)


def _number(value: Any, reward: NamedReward, rows: _Rows, row: int) -> float | None:
    if value is None:
        return None
    try:
        number = float(value) if isinstance(value, Real) or hasattr(value, "item") else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(
            f"reward {reward.name!r} returned {value!r} for {_place(rows, row)}; "
            "return a finite number, or None for no value"
        )
    return number


def _culprit(reward: NamedReward, rows: _Rows) -> str:
    """The completion on which the function fails, found by halving; a failure of the whole batch is named as such."""
    start, stop = 0, len(rows.samples)
    while stop - start > 1:
        middle = (start + stop) // 2
        if _fails(reward, rows.part(start, middle)):
            stop = middle
        elif _fails(reward, rows.part(middle, stop)):
            start = middle
        else:
            return f"the batch of {stop - start} completions from {_place(rows, start)} on"
    return _place(rows, start)


def _fails(reward: NamedReward, rows: _Rows) -> bool:
    try:
        _call(reward, rows)
    except Exception:
        return True
    return False


def _place(rows: _Rows, row: int) -> str:
    sample = rows.samples[row]
    first = next(index for index, other in enumerate(rows.samples) if other is sample)
    return f"sample {sample.sample_id!r}, completion {row - first}: {rows.completions[row][:200]!r}"


def _total(weights: Sequence[float], values: Sequence[float | None]) -> float | None:
    given = [weight * value for weight, value in zip(weights, values, strict=True) if value is not None]
    return sum(given) if given else None


def _grouped(values: list[Any], groups: list[int]) -> tuple[tuple[Any, ...], ...]:
    rows = iter(values)
    return tuple(tuple(next(rows) for _ in range(size)) for size in groups)
