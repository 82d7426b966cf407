"""Find where two runs diverge: config, environment, data; then per step prompts, tokens, rewards, advantages and
metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from atomrl.tracking.reading.lines import flat_tree
from atomrl.tracking.reading.metrics import MetricTable
from atomrl.tracking.reading.rollouts import SPLITS, RolloutFilter
from atomrl.tracking.reading.run import WHERE, Run, config_differences

Part = Literal["config", "environment", "data", "prompts", "tokens", "rewards", "advantages", "metrics", "steps"]
OF_ROLLOUTS: tuple[Part, ...] = ("prompts", "tokens", "rewards", "advantages")
BY_STEP: tuple[Part, ...] = (*OF_ROLLOUTS, "metrics")
"""Parts of a step that are compared, in causal order."""
ENVIRONMENT = ("python", "platform", "packages", "cpus", "threads", "cpu", "gpus", "git")
"""Entries of `env.json` that may affect results."""
OF_THE_CLOCK = ("timing_s/", "perf/", "memory/", "async/")
"""Metrics that differ between any two runs."""
CONTEXT = 60
"""Characters shown before and after the first difference of two texts."""
Key = tuple[str, int]
"""(prompt id, index) of a completion in its step."""
Rows = Mapping[Key, Mapping[str, Any]]
RowDifference = tuple[str, int | None] | None
"""(description, index of the token) of a difference between two completions; None if they are equal."""


@dataclass(frozen=True)
class Difference:
    """A difference between two runs, A and B."""

    part: Part
    what: str
    """Description: where it is, and the values of A and B."""
    step: int | None = None
    split: str | None = None
    rollout: Key | None = None
    token: int | None = None
    """Index in the completion."""


@dataclass
class Comparison:
    """Result of `diff_runs`."""

    steps: int = 0
    """Number of steps that both runs have."""
    compared: dict[Part, int] = field(default_factory=dict)
    """Part of a step -> number of steps in which both runs have it."""
    named: list[Difference] = field(default_factory=list)
    """Differences of config, environment and data."""
    first: dict[Part, Difference] = field(default_factory=dict)
    """Part of a step -> its first difference."""
    counts: dict[Part, int] = field(default_factory=dict)
    """Part of a step -> number of steps in which it differs."""
    notes: list[str] = field(default_factory=list)

    @property
    def earliest(self) -> Difference | None:
        """The difference of the earliest step, and within it of the earliest part in causal order."""
        order = {part: place for place, part in enumerate((*BY_STEP, "steps"))}
        return min(self.first.values(), key=lambda one: (one.step, order[one.part]), default=None)

    @property
    def same(self) -> bool:
        """True if config, data and all recorded steps are equal; a different environment alone does not count."""
        return not self.first and all(difference.part == "environment" for difference in self.named)

    def lines(self) -> list[str]:
        """Format the comparison as lines of text."""
        parts: list[tuple[Part, str]] = [
            ("config", "config"),
            ("environment", "environment"),
            ("data", "data and model"),
        ]
        lines = []
        for part, title in parts:
            texts = [difference.what for difference in self.named if difference.part == part]
            lines += [f"{title}: {'differs' if texts else 'the same'}", *(f"  {text}" for text in texts)]
        for name in (*BY_STEP, "steps"):
            if name in self.first:
                where = f"first at step {self.first[name].step}"
                more = f" (in {self.counts[name]} of {self.compared[name]} steps)" if name in self.counts else ""
                lines += [f"{name}: {where}{more}", *(f"  {line}" for line in self.first[name].what.splitlines())]
            elif name in self.compared:
                lines.append(f"{name}: the same in {self.compared[name]} steps")
            elif name != "steps":
                lines.append(f"{name}: in no common step")
        earliest = self.earliest
        if earliest is not None:
            lines.append(f"the first difference: {earliest.part} at step {earliest.step}")
        return [*lines, *self.notes]


def diff_runs(a: Run, b: Run, tolerance: float = 0.0) -> Comparison:
    """Compare two runs by their folders.

    Args:
        tolerance: relative tolerance of numbers; 0 compares them exactly.

    Example:
        >>> from atomrl import load_run
        >>> comparison = diff_runs(load_run("runs/a"), load_run("runs/b"))  # doctest: +SKIP
        >>> comparison.earliest.step, comparison.earliest.part  # doctest: +SKIP
        (3, 'tokens')
    """
    comparison = Comparison(named=[*_config(a, b), *_environment(a, b), *_data(a, b)])
    steps = [_steps(run) for run in (a, b)]
    shared = sorted(steps[0] & steps[1])
    comparison.steps = len(shared)
    for step in shared:
        differences, parts = _step(a, b, step, tolerance)
        for part in parts:
            comparison.compared[part] = comparison.compared.get(part, 0) + 1
        for difference in differences:
            comparison.first.setdefault(difference.part, difference)
            comparison.counts[difference.part] = comparison.counts.get(difference.part, 0) + 1
    if not comparison.first and steps[0] != steps[1]:
        lone = min(steps[0] ^ steps[1])
        has, lacks = ("A", "B") if lone in steps[0] else ("B", "A")
        comparison.first["steps"] = Difference("steps", f"{has} has step {lone}, {lacks} does not", lone)
    for name, run in (("A", a), ("B", b)):
        if not len(run.rollouts):
            comparison.notes.append(
                f"{name} has no rollouts (tracking.save_rollouts), so steps are compared by metrics"
            )
        comparison.notes += [f"{name}: {problem}" for problem in run.problems]
    return comparison


def _steps(run: Run) -> set[int]:
    """Return the steps with metrics or rollouts."""
    tables = (run.metrics.steps, run.evaluations.steps, run.rollouts.steps)
    return {int(step) for steps in tables for step in np.unique(steps)}


def _config(a: Run, b: Run) -> Iterator[Difference]:
    for key, (one, other) in config_differences(a.config, b.config).items():
        if key not in WHERE:
            yield Difference("config", f"{key}: {_text(one)} | {_text(other)}")


def _environment(a: Run, b: Run) -> Iterator[Difference]:
    trees = [{key: run.environment.get(key) for key in ENVIRONMENT} for run in (a, b)]
    for key, (one, other) in config_differences(*trees).items():
        yield Difference("environment", f"{key}: {_text(one)} | {_text(other)}")


def _data(a: Run, b: Run) -> Iterator[Difference]:
    """Compare the hashes of data, tokenizer and model, which a run records at its start."""
    one, other = (flat_tree(run.environment.get("identity") or {}) for run in (a, b))
    for key in dict.fromkeys([*one, *other]):
        if one.get(key) != other.get(key):
            lacking = [name for name, has in (("A", one), ("B", other)) if key not in has]
            what = f"is not recorded in {lacking[0]}" if lacking else "has different content"
            yield Difference("data", f"{key} {what}")


def _text(value: Any) -> str:
    return "(absent)" if value is None else str(value)


def _step(a: Run, b: Run, step: int, tolerance: float) -> tuple[list[Difference], set[Part]]:
    """Compare a step. Returns at most one difference per part, and the parts that both runs have."""
    differences: list[Difference] = []
    compared: set[Part] = set()
    for split in SPLITS:
        one, other = (_rows(run, step, split) for run in (a, b))
        if one and other:
            compared |= set(OF_ROLLOUTS)
            differences += _rollouts(one, other, step, split, tolerance)
        elif (one or other) and len(a.rollouts) and len(b.rollouts):  # a run without any rollouts gets a note instead
            compared.add("prompts")
            differences.append(_lone("prompts", f"rollouts of {split}", bool(one), step))
    for name, tables in zip(("metrics", "an evaluation"), _tables(a, b), strict=True):
        has = [step in table.steps for table in tables]
        if any(has):
            compared.add("metrics")
        if has[0] != has[1]:
            differences.append(_lone("metrics", name, has[0], step))
    if "metrics" in compared:
        differences += _metrics(a, b, step, tolerance)
    return list({difference.part: difference for difference in reversed(differences)}.values()), compared


def _lone(part: Part, what: str, of_a: bool, step: int) -> Difference:
    """Describe what only one run has of a step that both have."""
    has, lacks = ("A", "B") if of_a else ("B", "A")
    return Difference(part, f"{has} has {what} at step {step}, {lacks} does not", step)


def _tables(a: Run, b: Run) -> tuple[tuple[MetricTable, MetricTable], ...]:
    return (a.metrics, b.metrics), (a.evaluations, b.evaluations)


def _rows(run: Run, step: int, split: str) -> Rows:
    numbers = run.rollouts.select(RolloutFilter(first_step=step, last_step=step, split=split))
    rows = run.rollouts.rows(numbers)
    return {(str(row.get("prompt_id")), int(row.get("completion_index", 0))): row for row in rows if row}


def _rollouts(one: Rows, other: Rows, step: int, split: str, tolerance: float) -> Iterator[Difference]:
    prompts = _prompts(one, other)
    if prompts is not None:
        yield Difference("prompts", prompts[0], step, split, prompts[1])
    keys = [key for key in one if key in other]
    for part, compare in (("tokens", _tokens), ("rewards", _rewards), ("advantages", _advantages)):
        differing = ((key, what) for key in keys if (what := compare(one[key], other[key], tolerance)) is not None)
        first = next(differing, None)
        if first is not None:
            key, (text, token) = first
            more = sum(1 for _ in differing)
            place = f"prompt {key[0]}, completion {key[1]}{f', token {token}' if token is not None else ''}"
            others = f"\nand in {more} more completions of the step" if more else ""
            yield Difference(part, f"{split}, {place}:\n{text}{others}", step, split, key, token)  # type: ignore[arg-type]


def _prompts(one: Rows, other: Rows) -> tuple[str, Key] | None:
    """Return the first prompt that only one run has, or that differs in text or ground truth; with its key."""
    for name, has, lacks in (("A", one, other), ("B", other, one)):
        alone = [key for key in has if key not in lacks]
        if alone:
            text = str(has[alone[0]].get("prompt"))[: 2 * CONTEXT]
            return f"{len(alone)} completions only in {name}; the first is of {alone[0][0]}: {text!r}", alone[0]
    for key, row in one.items():
        for name in ("prompt", "ground_truth"):
            if row.get(name) != other[key].get(name):
                texts = _divergence(str(row.get(name)), str(other[key].get(name)))
                return (texts if name == "prompt" else f"{name} of {key[0]}:\n{texts}"), key
    return None


def _tokens(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float) -> RowDifference:
    left, right = (row.get("token_ids") or [] for row in (one, other))
    if left == right and one.get("completion") == other.get("completion"):
        return None
    texts = _divergence(str(one.get("completion")), str(other.get("completion")))
    if left == right:
        return f"the text{' of the same ids' if left else ''}\n{texts}", None
    place = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))
    ids = " | ".join(str(ids[place]) if place < len(ids) else "(ended)" for ids in (left, right))
    return f"id {ids}\n{texts}", place


def _rewards(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float) -> RowDifference:
    for name in ("reward", "reward_parts"):
        left, right = (flat_tree({name: row.get(name)}) for row in (one, other))
        for key in dict.fromkeys([*left, *right]):
            if not _close(left.get(key), right.get(key), tolerance):
                return _numbers(key, left.get(key), right.get(key)), None
    return None


def _advantages(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float) -> RowDifference:
    left, right = one.get("advantage"), other.get("advantage")
    return None if _close(left, right, tolerance) else (_numbers("advantage", left, right), None)


def _metrics(a: Run, b: Run, step: int, tolerance: float) -> list[Difference]:
    """Return the first differing metric of the step, in file order, with the number of others."""
    differing: list[str] = []
    for tables in _tables(a, b):
        places = [np.flatnonzero(table.steps == step) for table in tables]
        if not all(len(place) for place in places):
            continue
        for name in dict.fromkeys([*tables[0], *tables[1]]):
            if name.startswith(OF_THE_CLOCK):
                continue
            left, right = (
                float(table[name][place[0]]) if name in table else math.nan
                for table, place in zip(tables, places, strict=True)
            )
            if not _close(left, right, tolerance):
                differing.append(_numbers(name, left, right))
    more = f"\nand {len(differing) - 1} more metrics of the step" if len(differing) > 1 else ""
    return [Difference("metrics", differing[0] + more, step)] if differing else []


def _close(left: Any, right: Any, tolerance: float) -> bool:
    if isinstance(left, int | float) and isinstance(right, int | float):
        if math.isnan(left) or math.isnan(right):
            return math.isnan(left) and math.isnan(right)
        return left == right or abs(left - right) <= tolerance * max(abs(left), abs(right))
    return bool(left == right)


def _numbers(name: str, left: Any, right: Any) -> str:
    text = f"{name}: {_text(left)} | {_text(right)}"
    if not (isinstance(left, int | float) and isinstance(right, int | float)) or not math.isfinite(left - right):
        return text
    largest = max(abs(left), abs(right))
    return f"{text} (by {abs(left - right):.3g}{f', {abs(left - right) / largest:.2g} of it' if largest else ''})"


def _divergence(left: str, right: str) -> str:
    """Quote two texts around their first difference."""
    place = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))
    start = max(0, place - CONTEXT)
    quotes: Sequence[str] = [repr(("..." if start else "") + text[start : place + CONTEXT]) for text in (left, right)]
    return f"A {quotes[0]}\nB {quotes[1]}"
