"""Another reward on recorded completions: how the rankings within groups change, and what hacks would earn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, pstdev
from typing import Any

Row = Mapping[str, Any]
MAX_PROMPTS = 200
"""Maximum number of prompts on which hacks are tried."""


@dataclass(frozen=True)
class Rankings:
    """Changes of the order of completions within groups, from one reward to another."""

    groups: int
    pairs: int
    """Pairs of completions of a group that have both rewards."""
    turned: int
    """Pairs whose order is reversed."""
    parted: int
    """Pairs that were equal and no longer are."""
    joined: int
    """Pairs that were different and now are equal."""
    gained: int
    """Groups that had no signal (equal rewards) and now have one."""
    lost: int
    """Groups that had a signal and no longer do."""
    other_best: int
    """Groups whose best completions have changed completely."""


def rankings(rows: Sequence[Row], before: Sequence[float | None], after: Sequence[float | None]) -> Rankings:
    """Count the changes of rankings from one reward to another. Rows have `step` and `prompt_id`.

    Example:
        >>> rows = [{"step": 1, "prompt_id": "a"}] * 2
        >>> rankings(rows, [1.0, 0.0], [0.0, 1.0]).turned
        1
    """
    counts: Counter[str] = Counter()
    for places in groups_of(rows):
        pairs = [(a, b) for place in places if (a := before[place]) is not None and (b := after[place]) is not None]
        if len(pairs) < 2:
            continue
        counts["groups"] += 1
        for (a, b), (c, d) in combinations(pairs, 2):
            counts["pairs"] += 1
            counts["turned"] += (a - c) * (b - d) < 0
            counts["parted"] += a == c and b != d
            counts["joined"] += a != c and b == d
        old, new = zip(*pairs, strict=True)
        mixed, mixed_now = len(set(old)) > 1, len(set(new)) > 1
        counts["gained"] += mixed_now and not mixed
        counts["lost"] += mixed and not mixed_now
        counts["other_best"] += not any(a == max(old) and b == max(new) for a, b in pairs)
    names = ("groups", "pairs", "turned", "parted", "joined", "gained", "lost", "other_best")
    return Rankings(**{name: counts[name] for name in names})


def groups_of(rows: Sequence[Row]) -> list[list[int]]:
    """Return the indices of the completions of each group."""
    groups: dict[tuple[Any, Any], list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault((row.get("step"), row.get("prompt_id")), []).append(place)
    return list(groups.values())


def disagreements(rows: Sequence[Row], before: Sequence[float | None], after: Sequence[float | None]) -> list[int]:
    """Return the indices of completions on which two rewards disagree, largest disagreement first: the change of the
    completion's reward minus the group's mean, in standard deviations over all completions."""
    changes: dict[int, float] = {}
    pairs = {
        p: (a, b) for p, (a, b) in enumerate(zip(before, after, strict=True))
        if a is not None and b is not None and math.isfinite(a - b)
    }  # fmt: skip
    scales = [pstdev(side) or math.inf for side in zip(*pairs.values(), strict=True)]  # equal rewards: no change
    for places in groups_of(rows):
        both = [p for p in places if p in pairs]
        centred = [[value - fmean(side) for value in side] for side in zip(*(pairs[p] for p in both), strict=True)]
        scaled = [[value / scale for value in side] for side, scale in zip(centred, scales, strict=False)]
        changes |= {p: abs(new - old) for p, old, new in zip(both, *scaled, strict=True)} if both else {}
    return [p for p in sorted(changes, key=lambda p: -changes[p]) if changes[p] > 1e-9]


def degenerate_completions(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """Make completions that solve nothing, for the first `MAX_PROMPTS` distinct prompts of some rollouts: name of the
    hack -> a row per prompt."""
    prompts: dict[str, Row] = {}
    for row in rows:
        prompts.setdefault(repr(row.get("prompt")), row)
    chosen = list(prompts.values())[:MAX_PROMPTS]
    common = Counter(str(row.get("completion", "")) for row in rows).most_common(1)[0][0] if rows else ""
    best = max(
        rows, key=lambda row: (float(row.get("reward") or 0.0), len(str(row.get("completion", "")))), default=None
    )
    answers = Counter(str(row.get("ground_truth")) for row in chosen).most_common(1)
    guess = answers[0][0] if answers else ""
    texts: dict[str, Callable[[Row], str]] = {
        "nothing": lambda row: "",
        "the prompt repeated": lambda row: _text(row.get("prompt")),
        "the most common completion": lambda row: common,
        "the highest-scoring completion, for all": lambda row: str(best.get("completion", "")) if best else "",
        "only the most common answer": lambda row: guess,
        "the most common answer, boxed": lambda row: f"\\boxed{{{guess}}}",
        "every number from 0 to 99": lambda row: " ".join(map(str, range(100))),
    }
    return {name: [dict(row, completion=text(row)) for row in chosen] for name, text in texts.items()}


def perturbed_completions(rows: Sequence[Row]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (name, rows): the recorded completions, changed so that a reward should not increase."""
    changes: dict[str, Callable[[str], str]] = {
        "said twice": lambda text: f"{text}\n{text}",
        "padded to three times its length": lambda text: text + " so" * (len(text) * 2 // 3 + 1),
        "cut in half": lambda text: text[: len(text) // 2],
    }
    for name, change in changes.items():
        yield name, [dict(row, completion=change(str(row.get("completion", "")))) for row in rows]


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(turn.get("content", "")) for turn in prompt or [] if isinstance(turn, Mapping))
