"""The first page of a run: how it went, what the model writes now, and one prompt before and after."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from atomrl.tools.ui.catalog import number, spent
from atomrl.tools.ui.rollouts import BadQuestion, episode_of, prompt_text
from atomrl.tracking.reading import Run
from atomrl.tracking.reading.rollouts import SPLITS, Ints, RolloutIndex

GLIMPSE = 3
"""Newest and worst completions that are shown, each of another prompt."""
PROMPT, COMPLETION = 600, 1500
"""Characters that are shown of a prompt (its end) and of a completion (its start)."""
MEMBERS = 4
"""Completions of a prompt that are shown of each of two steps."""
CHANGES = ("better", "worse", "same")


def outcome(run: Run) -> dict[str, Any]:
    """Time and tokens of a run, and its checkpoints."""
    seconds, tokens = spent(run)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "throughput": run.metrics.last("perf/throughput"),
        "best": checkpoint(run, "best"),
        "newest": checkpoint(run, "model"),
    }


def checkpoint(run: Run, link: str) -> dict[str, Any] | None:
    """Where a link of the run's folder leads, and of which step that is."""
    path = run.path / link
    try:
        target = str(path.readlink()) if path.is_symlink() else None
    except OSError:
        target = None
    if target is None:
        return None
    step = re.search(r"step_(\d{1,15})", target)
    return {"path": str(path), "step": int(step[1]) if step else None}


def glimpse(index: RolloutIndex) -> dict[str, Any]:
    """Of the newest step with training completions a few of them, and those that earned least, each of another
    prompt. Where all earned the same, none is worse."""
    train = np.flatnonzero(index.splits == SPLITS.index("train"))
    if not len(train):
        return {"step": None, "newest": [], "worst": []}
    step = index.steps[train].max()
    numbers = train[index.steps[train] == step]
    firsts = numbers[np.unique(index.groups[numbers], return_index=True)[1]]
    reward, advantage = index.numbers["reward"][numbers], index.numbers["advantage"][numbers]
    low_first = numbers[np.lexsort((advantage, reward))]  # of equal rewards, that whose group did better
    low_first = low_first[np.sort(np.unique(index.groups[low_first], return_index=True)[1])]
    given = reward[~np.isnan(reward)]
    worst = [number for number in low_first if index.numbers["reward"][number] < given.max()] if len(given) else []
    return {
        "step": int(step),
        "mean": float(given.mean()) if len(given) else None,
        "completions": len(numbers),
        "newest": _shown(index, firsts[:GLIMPSE]),
        "worst": _shown(index, np.array(worst[:GLIMPSE], np.int64)),
    }


def _shown(index: RolloutIndex, numbers: Ints) -> list[dict[str, Any]]:
    found = []
    for place, row in zip(numbers.tolist(), index.rows(numbers), strict=True):
        step, split, line = index.place(place)
        prompt, completion = prompt_text(row.get("prompt")), str(row.get("completion", ""))
        found.append(
            {
                "step": step, "split": split, "place": line, "prompt": prompt[-PROMPT:],
                "completion": completion[:COMPLETION], "cut_short": len(completion) > COMPLETION,
                "ground_truth": row.get("ground_truth"), "reward": number(index.numbers["reward"][place]),
                "advantage": number(index.numbers["advantage"][place]),
                "tokens": number(index.numbers["completion_tokens"][place]), "finish": row.get("finish_reason"),
                "turns": len((episode_of(row) or {}).get("turns") or []),
            }
        )  # fmt: skip
    return found


def before_after(index: RolloutIndex, query: Mapping[str, str]) -> dict[str, Any]:
    """One prompt at the first and at the newest step that had it, and how many prompts earn more, less or the same.

    Args:
        query: `split` (an evaluation's prompts before those of training), `change` (one of `CHANGES`), and `prompt`,
            the hash of the one that is shown; without it, or where it is not among those asked for, the first.

    Raises:
        BadQuestion: there is no such split or change.
    """
    if query.get("split", SPLITS[0]) not in SPLITS or query.get("change", CHANGES[0]) not in CHANGES:
        raise BadQuestion(f"split is one of {', '.join(SPLITS)}, change one of {', '.join(CHANGES)}")
    tables = {split: found for split in reversed(SPLITS) if len((found := _twice(index, split))["prompt"])}
    split = query.get("split") or next(iter(tables), None)
    if split not in tables:
        return {"splits": list(tables), "split": split, "counts": dict.fromkeys(("all", *CHANGES), 0), "prompt": None}
    found = tables[split]
    change = found["after"] - found["before"]
    of = {"better": change > 0, "worse": change < 0, "same": change == 0}
    asked = np.flatnonzero(of[query["change"]]) if query.get("change") else np.arange(len(change))
    names = [index.prompt_of(int(number)) for number in found["number"][asked]]
    at = names.index(query["prompt"]) if query.get("prompt") in names else 0
    shown = None
    if len(asked):
        place = int(asked[at])
        both = [_members(index, found, place, title) for title in ("first", "last")]
        row = index[int(found["number"][place])]
        shown = {
            "prompt": prompt_text(row.get("prompt"))[-PROMPT:], "ground_truth": row.get("ground_truth"),
            "hash": names[at], "before": both[0], "after": both[1],
        }  # fmt: skip
    return {
        "splits": list(tables),
        "split": split,
        "counts": {"all": len(change)} | {name: int(there.sum()) for name, there in of.items()},
        "shown": len(asked),
        "at": at,
        "previous": names[at - 1] if at > 0 else None,
        "next": names[at + 1] if at + 1 < len(names) else None,
        "prompt": shown,
    }


def _twice(index: RolloutIndex, split: str) -> dict[str, Any]:
    """The prompts that at least two steps have, in the order in which they were first seen: `first` and `last` step,
    the mean reward `before` and `after` (NaN where there is none), and the `number` of one of the rollouts."""
    numbers = np.flatnonzero(index.splits == SPLITS.index(split))
    steps, step = np.unique(index.steps[numbers], return_inverse=True)
    width = max(1, len(steps))
    keys, places = np.unique(index.prompts[numbers] * width + step, return_inverse=True)
    reward = index.numbers["reward"][numbers]
    there = ~np.isnan(reward)
    count = np.bincount(places[there], minlength=len(keys))
    total = np.bincount(places[there], weights=reward[there], minlength=len(keys))
    mean = np.divide(total, count, out=np.full(len(keys), np.nan), where=count > 0)
    prompts, first, times = np.unique(keys // width, return_index=True, return_counts=True)
    first, last = first[times > 1], (first + times - 1)[times > 1]
    representative = np.zeros(len(keys), np.int64)
    representative[places] = numbers
    return {
        "prompt": prompts[times > 1], "first": steps[keys[first] % width], "last": steps[keys[last] % width],
        "before": mean[first], "after": mean[last], "number": representative[last],
    }  # fmt: skip


def _members(index: RolloutIndex, found: Mapping[str, Any], place: int, title: str) -> dict[str, Any]:
    step = found[title][place]
    split = index.splits[found["number"][place]]
    same = (index.prompts == found["prompt"][place]) & (index.steps == step) & (index.splits == split)
    members = np.flatnonzero(same)
    mean = found["before" if title == "first" else "after"][place]
    rows = _shown(index, members[:MEMBERS])
    return {"step": int(step), "mean": number(mean), "of": len(members), "members": rows}
