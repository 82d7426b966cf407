"""Where two runs begin to differ: config, environment, data, then step by step what was drawn, earned and learned."""

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
"""What a step is compared by, in the order in which it comes about."""
ENVIRONMENT = ("python", "platform", "packages", "cpus", "threads", "cpu", "gpus", "git")
"""Of `env.json` what may move numbers."""
OF_THE_CLOCK = ("timing_s/", "perf/", "memory/", "async/", "environment/seconds")
"""Metrics that differ between any two runs."""
CONTEXT = 60
"""Characters shown before and behind the place where two texts part."""
Key = tuple[str, int]
"""Of a completion in its step: prompt and index."""
Rows = Mapping[Key, Mapping[str, Any]]


@dataclass(frozen=True)
class Difference:
    """One difference between two runs, A and B."""

    part: Part
    what: str
    """For people: where, and what A and B have there."""
    step: int | None = None
    split: str | None = None
    rollout: Key | None = None
    token: int | None = None
    """Place in the completion."""


@dataclass
class Comparison:
    """All that `diff_runs` found."""

    steps: int = 0
    """Steps that both have."""
    compared: dict[Part, int] = field(default_factory=dict)
    """Of each part of a step, the steps in which both have it."""
    named: list[Difference] = field(default_factory=list)
    """Of config, environment and data."""
    first: dict[Part, Difference] = field(default_factory=dict)
    """Of each part of a step, the first difference."""
    counts: dict[Part, int] = field(default_factory=dict)
    """Of each part, the steps in which it differs."""
    notes: list[str] = field(default_factory=list)

    @property
    def earliest(self) -> Difference | None:
        """The first difference in a step; within a step in the order in which it comes about."""
        order = {part: place for place, part in enumerate((*BY_STEP, "steps"))}
        return min(self.first.values(), key=lambda found: (found.step, order[found.part]), default=None)

    @property
    def same(self) -> bool:
        """Whether config, data and all that both recorded of the steps are the same. Another environment may well
        compute the same."""
        return not self.first and all(found.part == "environment" for found in self.named)

    def lines(self) -> list[str]:
        """For people."""
        parts: list[tuple[Part, str]] = [
            ("config", "config"),
            ("environment", "environment"),
            ("data", "data and model"),
        ]
        lines = []
        for part, title in parts:
            found = [difference.what for difference in self.named if difference.part == part]
            lines += [f"{title}: {'differs' if found else 'the same'}", *(f"  {what}" for what in found)]
        for name in (*BY_STEP, "steps"):
            if name in self.first:
                where = f"first at step {self.first[name].step}"
                more = f" (in {self.counts[name]} of {self.compared[name]} steps)" if name in self.counts else ""
                lines += [f"{name}: {where}{more}", *(f"  {line}" for line in self.first[name].what.splitlines())]
            elif name in self.compared:
                lines.append(f"{name}: the same in {self.compared[name]} steps")
            elif name != "steps":
                lines.append(f"{name}: no step has them in both")
        earliest = self.earliest
        if earliest is not None:
            lines.append(f"the first difference: {earliest.part} at step {earliest.step}")
        return [*lines, *self.notes]


def diff_runs(a: Run, b: Run, tolerance: float = 0.0) -> Comparison:
    """Compare two runs by what their folders say.

    Args:
        tolerance: by which share numbers may differ; 0: they are the same to the last bit.

    Example:
        >>> from atomrl import load_run
        >>> found = diff_runs(load_run("runs/a"), load_run("runs/b"))  # doctest: +SKIP
        >>> found.earliest.step, found.earliest.part  # doctest: +SKIP
        (3, 'tokens')
    """
    found = Comparison(named=[*_config(a, b), *_environment(a, b), *_data(a, b)])
    steps = [_steps(run) for run in (a, b)]
    shared = sorted(steps[0] & steps[1])
    found.steps = len(shared)
    for step in shared:
        differences, parts = _step(a, b, step, tolerance)
        for part in parts:
            found.compared[part] = found.compared.get(part, 0) + 1
        for difference in differences:
            found.first.setdefault(difference.part, difference)
            found.counts[difference.part] = found.counts.get(difference.part, 0) + 1
    if not found.first and steps[0] != steps[1]:
        lone = min(steps[0] ^ steps[1])
        has, lacks = ("A", "B") if lone in steps[0] else ("B", "A")
        found.first["steps"] = Difference("steps", f"{has} has step {lone}, {lacks} has not", lone)
    for name, run in (("A", a), ("B", b)):
        if not len(run.rollouts):
            found.notes.append(
                f"{name} kept no rollouts (tracking.save_rollouts), so its steps are compared by metrics"
            )
        found.notes += [f"{name}: {problem}" for problem in run.problems]
    return found


def _steps(run: Run) -> set[int]:
    """Those of metrics, and of rollouts."""
    tables = (run.metrics.steps, run.evaluations.steps, run.rollouts.steps)
    return {int(step) for steps in tables for step in np.unique(steps)}


def _config(a: Run, b: Run) -> Iterator[Difference]:
    for key, (one, other) in config_differences(a.config, b.config).items():
        if key not in WHERE:
            yield Difference("config", f"{key}: {_said(one)} | {_said(other)}")


def _environment(a: Run, b: Run) -> Iterator[Difference]:
    trees = [{key: run.environment.get(key) for key in ENVIRONMENT} for run in (a, b)]
    for key, (one, other) in config_differences(*trees).items():
        yield Difference("environment", f"{key}: {_said(one)} | {_said(other)}")


def _data(a: Run, b: Run) -> Iterator[Difference]:
    """By the hashes of what the config only names, which a run records as it starts."""
    one, other = (flat_tree(run.environment.get("identity") or {}) for run in (a, b))
    for key in dict.fromkeys([*one, *other]):
        if one.get(key) != other.get(key):
            lacking = [name for name, has in (("A", one), ("B", other)) if key not in has]
            what = f"was not recorded by {lacking[0]}" if lacking else "has other content"
            yield Difference("data", f"{key} {what}")


def _said(value: Any) -> str:
    return "(absent)" if value is None else str(value)


def _step(a: Run, b: Run, step: int, tolerance: float) -> tuple[list[Difference], set[Part]]:
    """At most one difference of each part, and the parts that both have."""
    found: list[Difference] = []
    compared: set[Part] = set()
    for split in SPLITS:
        one, other = (_rows(run, step, split) for run in (a, b))
        if one and other:
            compared |= set(OF_ROLLOUTS)
            found += _rollouts(one, other, step, split, tolerance)
        elif (one or other) and len(a.rollouts) and len(b.rollouts):  # else it is a note
            compared.add("prompts")
            found.append(_lone("prompts", f"rollouts of {split}", bool(one), step))
    for name, tables in zip(("metrics", "an evaluation"), _tables(a, b), strict=True):
        has = [step in table.steps for table in tables]
        if any(has):
            compared.add("metrics")
        if has[0] != has[1]:
            found.append(_lone("metrics", name, has[0], step))
    if "metrics" in compared:
        found += _metrics(a, b, step, tolerance)
    return list({difference.part: difference for difference in reversed(found)}.values()), compared


def _lone(part: Part, what: str, of_a: bool, step: int) -> Difference:
    """What only one of the two has of a step that both have."""
    has, lacks = ("A", "B") if of_a else ("B", "A")
    return Difference(part, f"{has} has {what} at step {step}, {lacks} has not", step)


def _tables(a: Run, b: Run) -> tuple[tuple[MetricTable, MetricTable], ...]:
    return (a.metrics, b.metrics), (a.evaluations, b.evaluations)


def _rows(run: Run, step: int, split: str) -> Rows:
    wanted = RolloutFilter(first_step=step, last_step=step, split=split)
    rows = run.rollouts.rows(run.rollouts.select(wanted))
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
    """Prompts that only one of the two has, that read otherwise, or have another answer."""
    for name, has, lacks in (("A", one, other), ("B", other, one)):
        alone = [key for key in has if key not in lacks]
        if alone:
            text = str(has[alone[0]].get("prompt"))[: 2 * CONTEXT]
            return f"{len(alone)} completions of {name} alone; the first is of {alone[0][0]}: {text!r}", alone[0]
    for key, row in one.items():
        for name in ("prompt", "ground_truth"):
            if row.get(name) != other[key].get(name):
                parting = _parting(str(row.get(name)), str(other[key].get(name)))
                return (parting if name == "prompt" else f"{name} of {key[0]}:\n{parting}"), key
    return None


Found = tuple[str, int | None] | None


def _tokens(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float) -> Found:
    left, right = (row.get("token_ids") or [] for row in (one, other))
    if left == right and one.get("completion") == other.get("completion"):
        return None
    texts = _parting(str(one.get("completion")), str(other.get("completion")))
    if left == right:
        return f"the text{' of the same ids' if left else ''}\n{texts}", None
    place = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))
    ids = " | ".join(str(ids[place]) if place < len(ids) else "(ended)" for ids in (left, right))
    return f"id {ids}\n{texts}", place


def _rewards(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float) -> Found:
    for name in ("reward", "reward_parts"):
        left, right = (flat_tree({name: row.get(name)}) for row in (one, other))
        for key in dict.fromkeys([*left, *right]):
            if not _close(left.get(key), right.get(key), tolerance):
                return _numbers(key, left.get(key), right.get(key)), None
    return None


def _advantages(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float) -> Found:
    left, right = one.get("advantage"), other.get("advantage")
    return None if _close(left, right, tolerance) else (_numbers("advantage", left, right), None)


def _metrics(a: Run, b: Run, step: int, tolerance: float) -> list[Difference]:
    """The metric of the step that comes first in the file, with how many more differ."""
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
    text = f"{name}: {_said(left)} | {_said(right)}"
    if not (isinstance(left, int | float) and isinstance(right, int | float)) or not math.isfinite(left - right):
        return text
    largest = max(abs(left), abs(right))
    return f"{text} (by {abs(left - right):.3g}{f', {abs(left - right) / largest:.2g} of it' if largest else ''})"


def _parting(left: str, right: str) -> str:
    """Two texts from shortly before they part."""
    place = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))
    start = max(0, place - CONTEXT)
    shown: Sequence[str] = [repr(("..." if start else "") + text[start : place + CONTEXT]) for text in (left, right)]
    return f"A {shown[0]}\nB {shown[1]}"
