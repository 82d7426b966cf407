"""All rewards of a run together: RolloutBatch -> RewardBatch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from atomrl.rewards.calling import Outcome, Scorer, call, find_scorer, instantiate, joined
from atomrl.rewards.errors import RewardError
from atomrl.rewards.pool import Task, WorkerPool
from atomrl.rewards.rows import Rows
from atomrl.rewards.table import LOADING, POOLED, RewardFunction
from atomrl.stages import RewardBatch, RewardFailure, RolloutBatch, Sample

if TYPE_CHECKING:
    from atomrl.config import RewardConfig, RewardRoute

log = logging.getLogger(__name__)
BY_SOURCE = "by_data_source"
"""The name of the part that the table of data sources gives."""
PATIENCE = 3
"""Batches in a row of which a reward may fail on everything."""
MIN_FAILURES = 8
"""A reward that never gave a value stops the run once it failed on this many completions."""
MAX_HANGS = 16
"""...or, within a batch, once this many calls hung or ended their process: each of them takes its time-out."""


@dataclass(frozen=True)
class _Use:
    """One reward as a run calls it."""

    scorer: Scorer
    timeout_s: float


@dataclass(frozen=True)
class _Part:
    """One named term of the reward."""

    name: str
    """Unique in the run; the name it is logged under."""
    weight: float
    uses: Mapping[str | None, _Use]
    """data source -> reward; None: every completion's."""


@dataclass(frozen=True)
class _Call:
    part: _Part
    use: _Use
    rows: Sequence[int]


@dataclass
class _Sheet:
    """What one part gave, by row."""

    values: list[float | None]
    failures: list[str | None]
    extra: dict[str, list[float | None]] = field(default_factory=dict)

    def fill(self, rows: Sequence[int], outcome: Outcome) -> None:
        for place, row in enumerate(rows):
            self.values[row], self.failures[row] = outcome.values[place], outcome.failures[place]
            for name, values in outcome.parts.items():
                self.extra.setdefault(name, [None] * len(self.values))[row] = values[place]


class Rewards:
    """Scores batches with all rewards of a config: see `build_rewards`. Close it to end its worker processes.

    Attributes:
        seconds: of the last batch, what each completion took in all rewards together, [P][G].
    """

    def __init__(self, parts: Sequence[_Part], workers: int, patience: int | None) -> None:
        self.parts = list(parts)
        self.patience = patience
        self.seconds: tuple[tuple[float, ...], ...] = ()
        names = [use.scorer.name for part in parts for use in part.uses.values()]
        self.pool = WorkerPool(workers, preload=sorted(set(names) & set(POOLED)))
        self._gave_values: set[str] = set()
        self._failures = dict.fromkeys((part.name for part in parts), 0)
        self._failed_batches = dict.fromkeys((part.name for part in parts), 0)
        self._warned: set[tuple[str, str]] = set()

    def close(self) -> None:
        """End the worker processes; another batch starts new ones."""
        self.pool.close()

    def check_sources(self, samples: Iterable[Sample]) -> None:
        """Whether every sample has a reward.

        Raises:
            RewardError: the table of data sources lacks one; it names the sample and the sources that it has.
        """
        for part in self.parts:
            for sample in samples if None not in part.uses else ():
                _use_for(part, sample)

    def __call__(self, rollouts: RolloutBatch) -> RewardBatch:
        """Score all completions.

        Raises:
            RewardError: a reward fails on everything, or cannot be called at all (see `build_rewards`).
        """
        rows = Rows.of(rollouts)
        size = len(rows.places)
        calls = [call for part in self.parts for call in self._calls(part, rows)]
        sheets = {part.name: _Sheet([None] * size, [None] * size) for part in self.parts}
        seconds = [0.0] * size
        for item, outcome in zip(calls, self._run(calls, rows), strict=True):
            sheets[item.part.name].fill(item.rows, outcome)
            for row in item.rows:
                seconds[row] += outcome.seconds / len(item.rows)
        for name, sheet in sheets.items():
            self._judge(name, sheet, rows)
        groups = [len(group) for group in rollouts.completions]
        self.seconds = _grouped(seconds, groups)
        parts = {name: sheet.values for name, sheet in sheets.items()}
        parts |= {f"{name}/{key}": values for name, sheet in sheets.items() for key, values in sheet.extra.items()}
        return RewardBatch(
            **{item.name: getattr(rollouts, item.name) for item in fields(RolloutBatch)},
            rewards=_grouped([self._total(sheets, row) for row in range(size)], groups),
            reward_parts={name: _grouped(values, groups) for name, values in parts.items()},
            reward_failures=tuple(_failure_records(sheets, rows)),
            part_weights={part.name: part.weight for part in self.parts},
        )

    def _calls(self, part: _Part, rows: Rows) -> list[_Call]:
        """The calls of one part: one with all completions, or one for each where they are scored by themselves."""
        by_use: dict[int, list[int]] = {}
        uses = {id(use): use for use in part.uses.values()}
        for row in range(len(rows.places)):
            use = part.uses[None] if None in part.uses else _use_for(part, rows.sample(row))
            by_use.setdefault(id(use), []).append(row)
        calls = []
        for key, members in by_use.items():
            use = uses[key]
            taken = sorted(set(use.scorer.args) & {*rows.columns, "prompts", "completions"})
            if taken and use.scorer.style == "columns":
                text = f"argument {taken[0]!r} has the name of a column; rename one of them"
                raise RewardError(f"reward {part.name!r}: {text}")
            alone = use.scorer.by_row and not use.scorer.in_process
            calls += [_Call(part, use, (row,)) for row in members] if alone else [_Call(part, use, members)]
        return calls

    def _run(self, calls: Sequence[_Call], rows: Rows) -> list[Outcome]:
        """Every call's outcome; a call that failed as a whole is done again, one completion at a time."""
        outcomes = self._run_once(calls, rows)
        again = [index for index, item in enumerate(calls) if outcomes[index].call_failed and len(item.rows) > 1]
        alone = [_Call(calls[index].part, calls[index].use, (row,)) for index in again for row in calls[index].rows]
        singles = iter(self._run_once(alone, rows))
        for index in again:
            outcomes[index] = joined([next(singles) for _ in calls[index].rows])
        return outcomes

    def _run_once(self, calls: Sequence[_Call], rows: Rows) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        pooled = [index for index, item in enumerate(calls) if not item.use.scorer.in_process]
        tasks = [_task(calls[index], rows) for index in pooled]
        hangs = dict.fromkeys(self._failures, 0)

        def watch(number: int, outcome: Outcome) -> None:
            name = calls[pooled[number]].part.name
            if any(value is not None for value in outcome.values):
                self._gave_values.add(name)
            hangs[name] += (outcome.failures[0] or "").startswith(("timeout", "crash"))
            if self.patience is not None and name not in self._gave_values and hangs[name] >= MAX_HANGS:
                raise RewardError(
                    f"reward {name!r}: the first {MAX_HANGS} calls all hung or ended their process, the last on "
                    f"{rows.name(calls[pooled[number]].rows[0])}: {outcome.failures[0]}"
                )

        if tasks:
            outcomes |= zip(pooled, self.pool.run(tasks, watch), strict=True)
        for index, item in enumerate(calls):
            if item.use.scorer.in_process:
                outcomes[index] = call(item.use.scorer, _task(item, rows).payload)
        return [outcomes[index] for index in range(len(calls))]

    def _judge(self, name: str, sheet: _Sheet, rows: Rows) -> None:
        """Warn of new kinds of failures, and stop where a reward fails on everything."""
        failures = [(row, failure) for row, failure in enumerate(sheet.failures) if failure]
        if any(value is not None for value in sheet.values):
            self._gave_values.add(name)
        for row, failure in failures:
            kind = _kind(failure)
            if (name, kind) not in self._warned:
                self._warned.add((name, kind))
                log.warning(
                    "reward %r has no value for %s: %s (further ones are counted in reward/%s/%s and marked in the "
                    "rollouts)", name, rows.name(row), failure, name, COUNTERS[kind]
                )  # fmt: skip
        asked = len(failures) + sum(value is not None for value in sheet.values)
        self._failures[name] += len(failures)
        if not failures or len(failures) < asked:
            self._failed_batches[name] = 0
            return
        self._failed_batches[name] += 1
        never = name not in self._gave_values and self._failures[name] >= MIN_FAILURES
        if self.patience is not None and (never or self._failed_batches[name] >= self.patience):
            row, failure = failures[0]
            often = "every completion so far" if never else f"every completion of {self.patience} batches in a row"
            raise RewardError(
                f"reward {name!r} failed on {often}, first on {rows.name(row)}: {failure} "
                f"(columns: {', '.join(rows.columns)})"
            )

    def _total(self, sheets: Mapping[str, _Sheet], row: int) -> float | None:
        """The weighted sum; none where a part that counts failed, since the others alone would pass for a low one."""
        given = []
        for part in self.parts:
            sheet = sheets[part.name]
            if sheet.failures[row] and part.weight:
                return None
            value = sheet.values[row]
            if value is not None:
                given.append(part.weight * value)
        return sum(given) if given else None


COUNTERS = {"timeout": "timeouts", "error": "errors", "crash": "crashes", "invalid": "invalid"}
"""kind of failure -> the metric that counts it, after `reward/NAME/`."""


def build_rewards(
    config: RewardConfig,
    local: Mapping[str, RewardFunction] | None = None,
    patience: int | None = PATIENCE,
    device: str = "cpu",
) -> Rewards:
    """What scores a batch with all rewards of a config.

    A completion's reward is the sum of weight times value over the functions that gave one; None where none did, and
    where one that counts (whose weight is not 0) failed. Every failure is in the batch's `reward_failures`.

    Args:
        config: the section `reward`.
        local: functions that exist in this process only, by the name that an item calls them. They run here:
            exceptions are caught, but there is no time limit.
        patience: how many batches in a row a reward may fail on everything; None: for ever.
        device: where reward models compute, unless their `args` say it.

    Raises:
        RewardError: a reward is unknown, does not take `**columns`, or does not take its `args`. What is returned
            raises it for a reward that fails on everything, from the start or `patience` batches in a row; whose
            arguments have the names of columns; or that a worker cannot load.
    """
    local = local or {}
    parts: list[_Part] = []
    if config.by_data_source:
        uses = {source: _use(route, local, device) for source, route in config.by_data_source.items()}
        parts.append(_Part(BY_SOURCE, 1.0, uses))
    for item in config.functions:
        if not math.isfinite(item.weight):
            raise RewardError(f"reward {item.function!r}: weight must be a finite number, not {item.weight}")
        base = item.function.rpartition(".")[2]
        taken = [part.name for part in parts]
        name = next(n for n in [base, *(f"{base}_{k}" for k in range(2, len(taken) + 3))] if n not in taken)
        parts.append(_Part(name, item.weight, {None: _use(item, local, device)}))
    return Rewards(parts, config.workers, patience)


def name_functions(functions: Iterable[RewardFunction | str]) -> tuple[list[str], dict[str, RewardFunction]]:
    """Names for functions, so that a config can hold them.

    Returns:
        A name for each (a built-in's own; the dotted path of a function of an imported module, which workers find
        too; else its plain name, numbered where two are equal), and by name those that exist in this process only:
        lambdas, functions of `__main__` and of other functions, and objects with `__call__`.

    Example:
        >>> from atomrl.rewards import gsm8k
        >>> names, local = name_functions([gsm8k, lambda prompts, completions, **columns: [0.0], "strict_math"])
        >>> names, list(local)
        (['gsm8k', 'reward', 'strict_math'], ['reward'])
    """
    from atomrl.rewards.table import importable_name

    names: list[str] = []
    local: dict[str, RewardFunction] = {}
    for function in functions:
        name = function if isinstance(function, str) else importable_name(function)
        if name is None:
            base = getattr(function, "__name__", type(function).__name__)
            base = base if base.isidentifier() else "reward"
            name = next(n for n in [base, *(f"{base}_{k}" for k in range(2, len(names) + 3))] if n not in names)
            local[name] = function
        names.append(name)
    return names, local


def failure_counts(rewarded: RewardBatch) -> dict[str, float]:
    """`reward/NAME/{timeouts,errors,crashes,invalid}` of every part: completions without a usable value."""
    reported = {name.partition("/")[0] for name in rewarded.reward_parts}
    counts = {f"reward/{name}/{counter}": 0.0 for name in sorted(reported) for counter in COUNTERS.values()}
    for failure in rewarded.reward_failures:
        counts[f"reward/{failure.reward}/{COUNTERS[failure.kind]}"] += 1
    return counts


def _use(route: RewardRoute, local: Mapping[str, RewardFunction], device: str) -> _Use:
    function = local.get(route.function)
    defaults = {"device": device} if function is None and route.function in LOADING else {}
    scorer = find_scorer(route.function, defaults | route.args, function)
    return _Use(instantiate(scorer) if scorer.in_process else scorer, route.timeout_s)


def _use_for(part: _Part, sample: Sample) -> _Use:
    if sample.data_source not in part.uses:
        known = ", ".join(repr(source) for source in part.uses)
        raise RewardError(
            f"sample {sample.sample_id!r}: its data_source {sample.data_source!r} has no reward in "
            f"reward.by_data_source, which has {known}"
        )
    return part.uses[sample.data_source]


def _task(item: _Call, rows: Rows) -> Task:
    scorer = item.use.scorer
    payload = rows.batch_payload(item.rows) if scorer.style == "batch" else rows.payload(item.rows)
    return Task(scorer, payload, len(item.rows), item.use.timeout_s)


def _kind(failure: str) -> Any:
    return failure.partition(":")[0]


def _failure_records(sheets: Mapping[str, _Sheet], rows: Rows) -> Iterable[RewardFailure]:
    for name, sheet in sheets.items():
        for row, failure in enumerate(sheet.failures):
            if failure:
                p, g = rows.places[row]
                yield RewardFailure(
                    reward=name,
                    kind=_kind(failure),
                    message=failure.partition(": ")[2],
                    prompt_id=rows.rollouts.prompt_ids[p],
                    completion_index=g,
                )


def _grouped(values: Sequence[Any], groups: list[int]) -> tuple[tuple[Any, ...], ...]:
    rows = iter(values)
    return tuple(tuple(next(rows) for _ in range(size)) for size in groups)


RewardComputer = Callable[[RolloutBatch], RewardBatch]
