"""The overview page of a run: outcome, recent completions, and a prompt before and after training."""

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
"""Number of newest and of worst completions shown, each of another prompt."""
PROMPT, COMPLETION = 600, 1500
"""Characters shown of a prompt (its end) and of a completion (its start)."""
MEMBERS = 4
"""Completions of a prompt shown per step."""
CHANGES = ("better", "worse", "same")


def outcome(run: Run) -> dict[str, Any]:
    """Return time, tokens, throughput and checkpoints of a run."""
    seconds, tokens = spent(run)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "throughput": run.metrics.last("perf/throughput"),
        "best": checkpoint(run, "best"),
        "newest": checkpoint(run, "model"),
    }


def checkpoint(run: Run, link: str) -> dict[str, Any] | None:
    """Return path and step of the checkpoint behind a link of the run's folder, or None."""
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
    """Return a few completions of the newest training step, and those with the lowest rewards, each of another prompt.
    If all rewards are equal there is no worst one."""
    train = np.flatnonzero(index.splits == SPLITS.index("train"))
    if not len(train):
        return {"step": None, "newest": [], "worst": []}
    step = index.steps[train].max()
    numbers = train[index.steps[train] == step]
    firsts = numbers[np.unique(index.groups[numbers], return_index=True)[1]]
    reward, advantage = index.numbers["reward"][numbers], index.numbers["advantage"][numbers]
    low_first = numbers[np.lexsort((advantage, reward))]  # of equal rewards first the one whose group did better
    low_first = low_first[np.sort(np.unique(index.groups[low_first], return_index=True)[1])]
    scored = reward[~np.isnan(reward)]
    worst = [number for number in low_first if index.numbers["reward"][number] < scored.max()] if len(scored) else []
    return {
        "step": int(step),
        "mean": float(scored.mean()) if len(scored) else None,
        "completions": len(numbers),
        "newest": _shown(index, firsts[:GLIMPSE]),
        "worst": _shown(index, np.array(worst[:GLIMPSE], np.int64)),
    }


def _shown(index: RolloutIndex, numbers: Ints) -> list[dict[str, Any]]:
    rows = []
    for place, row in zip(numbers.tolist(), index.rows(numbers), strict=True):
        step, split, line = index.place(place)
        prompt, completion = prompt_text(row.get("prompt")), str(row.get("completion", ""))
        rows.append(
            {
                "step": step, "split": split, "place": line, "prompt": prompt[-PROMPT:],
                "completion": completion[:COMPLETION], "cut_short": len(completion) > COMPLETION,
                "ground_truth": row.get("ground_truth"), "reward": number(index.numbers["reward"][place]),
                "advantage": number(index.numbers["advantage"][place]),
                "tokens": number(index.numbers["completion_tokens"][place]), "finish": row.get("finish_reason"),
                "turns": len((episode_of(row) or {}).get("turns") or []),
            }
        )  # fmt: skip
    return rows


def before_after(index: RolloutIndex, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the completions of a prompt at the first and the last step that had it, and the numbers of prompts whose
    reward rose, fell or stayed.

    Args:
        query: `split` (default: the evaluation, if there is one), `change` (one of `CHANGES`), and `prompt`, the hash
            of the prompt (default: the first that matches).

    Raises:
        BadQuestion: there is no such split or change.
    """
    if query.get("split", SPLITS[0]) not in SPLITS or query.get("change", CHANGES[0]) not in CHANGES:
        raise BadQuestion(f"split is one of {', '.join(SPLITS)}, change one of {', '.join(CHANGES)}")
    tables = {split: table for split in reversed(SPLITS) if len((table := _repeated(index, split))["prompt"])}
    split = query.get("split") or next(iter(tables), None)
    if split not in tables:
        return {"splits": list(tables), "split": split, "counts": dict.fromkeys(("all", *CHANGES), 0), "prompt": None}
    table = tables[split]
    change = table["after"] - table["before"]
    masks = {"better": change > 0, "worse": change < 0, "same": change == 0}
    selected = np.flatnonzero(masks[query["change"]]) if query.get("change") else np.arange(len(change))
    names = [index.prompt_of(int(number)) for number in table["number"][selected]]
    at = names.index(query["prompt"]) if query.get("prompt") in names else 0
    shown = None
    if len(selected):
        place = int(selected[at])
        both = [_members(index, table, place, title) for title in ("first", "last")]
        row = index[int(table["number"][place])]
        shown = {
            "prompt": prompt_text(row.get("prompt"))[-PROMPT:], "ground_truth": row.get("ground_truth"),
            "hash": names[at], "before": both[0], "after": both[1],
        }  # fmt: skip
    return {
        "splits": list(tables),
        "split": split,
        "counts": {"all": len(change)} | {name: int(mask.sum()) for name, mask in masks.items()},
        "shown": len(selected),
        "at": at,
        "previous": names[at - 1] if at > 0 else None,
        "next": names[at + 1] if at + 1 < len(names) else None,
        "prompt": shown,
    }


def _repeated(index: RolloutIndex, split: str) -> dict[str, Any]:
    """Return columns of the prompts that at least two steps have, in order of first appearance: `first` and `last`
    step, mean reward `before` and `after` (NaN without one), and the `number` of one of the rollouts."""
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


def _members(index: RolloutIndex, table: Mapping[str, Any], place: int, title: str) -> dict[str, Any]:
    step = table[title][place]
    split = index.splits[table["number"][place]]
    same = (index.prompts == table["prompt"][place]) & (index.steps == step) & (index.splits == split)
    members = np.flatnonzero(same)
    mean = table["before" if title == "first" else "after"][place]
    rows = _shown(index, members[:MEMBERS])
    return {"step": int(step), "mean": number(mean), "of": len(members), "members": rows}
