"""Completions for the pages: lists, groups with their arithmetic, and a prompt through the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast, get_args

import numpy as np

from atomrl.reading.rollouts import SPLITS, Ints, Order, RolloutFilter, RolloutIndex
from atomrl.ui.cards import number

MAX_ROWS = 200
SHOWN = 400
"""Characters of a prompt (its end) and of a completion (its start) in a list."""
MAX_PROMPT_ROWS = 2000
MAX_TOKENS = 2**21
"""Of a step, beyond which its advantages are not computed again."""
TRAINED = (
    "prompt_id", "completion_index", "prompt_tokens", "token_ids", "reward", "reward_parts", "finish_reason",
    "advantage", "baseline_reward",
)  # fmt: skip
"""What advantages are made of."""
BINS = 24
NUMBER_KINDS: dict[str, type] = {
    field.name: int if str(field.type).startswith("int") else float
    for field in fields(RolloutFilter)
    if str(field.type).startswith(("int", "float"))
}


class BadQuestion(ValueError):
    """A parameter of a request is none that can be answered."""


def wanted(query: Mapping[str, str]) -> tuple[RolloutFilter, Order, bool]:
    """A filter and an order from the parameters of a request.

    Raises:
        BadQuestion: a value is of another kind than its parameter.
    """
    given: dict[str, Any] = {}
    for field in fields(RolloutFilter):
        text = query.get(field.name)
        if text is None or text == "":
            continue
        try:
            kind = NUMBER_KINDS.get(field.name)
            given[field.name] = kind(text) if kind else text == "true" if field.name == "mixed" else text
        except ValueError:
            raise BadQuestion(f"{field.name}={text!r} is no number") from None
    order = query.get("sort") or "step"
    if order not in get_args(Order):
        raise BadQuestion(f"sort={order!r} is none of {', '.join(get_args(Order))}")
    return RolloutFilter(**given), cast(Order, order), query.get("descending") == "true"


def page(index: RolloutIndex, query: Mapping[str, str]) -> dict[str, Any]:
    """A page of the rollouts that pass a filter, with how their rewards and lengths are spread.

    Args:
        query: as `wanted` takes it, with `offset` and `limit`; `newest=true` asks for the newest step alone.
    """
    try:
        offset, limit = (max(0, int(query.get(name) or usual)) for name, usual in (("offset", 0), ("limit", 50)))
    except ValueError:
        raise BadQuestion("offset and limit are numbers") from None
    asked, order, descending = wanted(query)
    steps = np.unique(index.steps)
    if query.get("newest") == "true" and len(steps):
        asked = replace(asked, first_step=int(steps[-1]), last_step=int(steps[-1]))
    found = index.select(asked, order, descending)
    shown = found[offset : offset + min(MAX_ROWS, limit)]
    return {
        "total": len(found),
        "of": len(index),
        "first_step": asked.first_step,
        "last_step": asked.last_step,
        "around": _around(steps, asked),
        "splits": [split for place, split in enumerate(SPLITS) if (index.splits == place).any()],
        "sources": index.values("data_source"),
        "finish_reasons": index.values("finish_reason"),
        "rewards": histogram(index.numbers["reward"][found]),
        "lengths": histogram(index.numbers["completion_tokens"][found]),
        "rows": [_line(index, place, row) for place, row in zip(shown.tolist(), index.rows(shown), strict=True)],
    }


def _around(steps: Ints, asked: RolloutFilter) -> dict[str, int | None]:
    """The `first` and the `newest` step that there is, and those before (`previous`) and behind (`next`) what is asked
    for, which need not be there itself."""
    low = int(np.searchsorted(steps, asked.first_step or 0)) - 1
    high = len(steps) if asked.last_step is None else int(np.searchsorted(steps, asked.last_step, "right"))
    places = {"first": 0, "previous": low, "next": high, "newest": len(steps) - 1}
    return {name: int(steps[place]) if 0 <= place < len(steps) else None for name, place in places.items()}


def histogram(values: Any) -> dict[str, Any]:
    """Counts in equal bins, and their edges; of nothing, nothing."""
    values = values[~np.isnan(values)]
    if not len(values):
        return {"counts": [], "low": 0.0, "high": 0.0}
    counts, edges = np.histogram(values, BINS)
    return {"counts": counts.tolist(), "low": float(edges[0]), "high": float(edges[-1])}


def _line(index: RolloutIndex, place: int, row: Mapping[str, Any]) -> dict[str, Any]:
    step, split, line = index.place(place)
    prompt = prompt_text(row.get("prompt"))
    return {
        "step": step, "split": split, "place": line, "prompt": prompt[-SHOWN:],
        "completion": str(row.get("completion", ""))[:SHOWN],
        "reward": number(index.numbers["reward"][place]), "advantage": number(index.numbers["advantage"][place]),
        "tokens": number(index.numbers["completion_tokens"][place]), "finish": row.get("finish_reason"),
        "mixed": bool(index.mixed[place]), "prompt_hash": index.prompt_of(place),
    }  # fmt: skip


def prompt_text(prompt: Any) -> str:
    """A prompt as text: messages with their roles, and what a prompt of another form is written like."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(turn, dict) for turn in prompt):
        return "".join(f"{turn.get('role', '')}: {turn.get('content', '')}\n" for turn in prompt)
    return "" if prompt is None else str(prompt)


def group(index: RolloutIndex, step: int, split: str, place: int) -> dict[str, Any]:
    """The completions of a prompt in a step, with how their advantages follow from their rewards.

    Raises:
        LookupError: there is no such rollout.
    """
    asked = index.number_at(step, split, place)
    members = index.group(asked)
    rows = index.rows(members)
    rewards = [number(value) for value in index.numbers["reward"][members]]
    advantages = [number(value) for value in index.numbers["advantage"][members]]
    first = next((row for row in rows if row), {})
    return {
        "step": step, "split": split, "prompt": prompt_text(first.get("prompt")),
        "prompt_hash": index.prompt_of(asked), "ground_truth": first.get("ground_truth"),
        "data_source": first.get("data_source"), "prompt_id": first.get("prompt_id"),
        "arithmetic": arithmetic(rewards, advantages),
        "steps_of_prompt": _steps_of_prompt(index, asked),
        "members": [
            {
                "place": index.place(int(member))[2], "completion": row.get("completion", ""), "reward": reward,
                "advantage": advantage, "reward_parts": row.get("reward_parts") or {},
                "reward_failures": row.get("reward_failures") or {}, "tokens": row.get("completion_tokens"),
                "finish": row.get("finish_reason"), "versions": row.get("policy_versions") or [],
                "answer": row.get("answer"), "episode": episode_of(row),
            }
            for member, row, reward, advantage in zip(members, rows, rewards, advantages, strict=True)
        ],
    }  # fmt: skip


def episode_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A row's episode; None where it has none, or one of another form."""
    episode = row.get("episode")
    turns = (episode.get("turns") or []) if isinstance(episode, dict) else None
    return episode if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns) else None


def trained_on(index: RolloutIndex, step: int, split: str, place: int) -> dict[str, Any]:
    """What a step trained on: `rows` with what advantages are made of, and `group`, the places among them of the
    completions of a prompt.

    Raises:
        LookupError: there is no such rollout.
        BadQuestion: there are too many tokens to compute with.
    """
    members = index.group(index.number_at(step, split, place)).tolist()
    found = index.select(RolloutFilter(first_step=step, last_step=step, split=split))
    found = np.sort(found[~np.isnan(index.numbers["advantage"][found])])
    if index.numbers["completion_tokens"][found].sum() > MAX_TOKENS:
        raise BadQuestion(f"the step has more than {MAX_TOKENS:,} tokens")
    rows = [
        {name: row[name] for name in TRAINED if name in row} | {"episode": episode_of(row)} for row in index.rows(found)
    ]
    places = {number: place for place, number in enumerate(found.tolist())}
    return {"rows": rows, "group": [places[member] for member in members if member in places]}


def place_at(params: Mapping[str, str]) -> tuple[int, str, int]:
    """Step, split and place in the address of a rollout.

    Raises:
        LookupError: there can be none.
    """
    step, place = params["step"], params["place"]
    if not all(text.isascii() and text.isdigit() and len(text) <= 16 for text in (step, place)):
        raise LookupError("there is no such rollout")
    return int(step), params["split"], int(place)


def arithmetic(rewards: Sequence[float | None], advantages: Sequence[float | None]) -> dict[str, Any]:
    """Mean and deviation of a group's rewards, and which formula gives the advantages that were recorded.

    Returns:
        `formula`: the name of the one that gives all of them to one in a thousand; None where none does, as where
        an algorithm shapes or normalises them further.

    Example:
        >>> arithmetic([1.0, 0.0], [0.7071, -0.7071])["formula"]
        'z'
    """
    given = [reward for reward in rewards if reward is not None]
    if not given:
        return {"mean": None, "std": None, "formula": None}
    count, same = len(given), max(given) == min(given)
    mean = given[0] if same else float(np.mean(given))  # exactly, as is the deviation
    std = 0.0 if same else float(np.std(given, ddof=1))
    formulas = {
        "z": [(reward - mean) / (std + 1e-6) for reward in given],
        "centred": [reward - mean for reward in given],
        "others": [(reward - mean) * count / (count - 1) for reward in given] if count > 1 else [],
        "reward": given,
    }
    recorded = [a for reward, a in zip(rewards, advantages, strict=True) if reward is not None and a is not None]
    formula = None
    if len(recorded) == count:
        matching = (name for name, values in formulas.items() if len(values) == count and _close(values, recorded))
        formula = next(matching, None)
    return {"mean": mean, "std": std, "formula": formula}


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    return bool(np.allclose(one, other, rtol=1e-3, atol=max(1e-6, 1e-3 * max(map(abs, other)))))


def _steps_of_prompt(index: RolloutIndex, asked: int) -> list[list[int]]:
    """[step, place of its first completion] of each step that had the prompt."""
    split = SPLITS[index.splits[asked]]
    found = index.select(RolloutFilter(prompt=index.prompt_of(asked), split=split))
    _, first = np.unique(index.steps[found], return_index=True)
    return [[step, place] for step, _, place in map(index.place, found[first].tolist())]


def prompt_history(index: RolloutIndex, prompt: str, split: str | None) -> dict[str, Any]:
    """One prompt through the run: its completions of each step that had it.

    Raises:
        LookupError: no rollout has it.
    """
    found = index.select(RolloutFilter(prompt=prompt, split=split or None))[:MAX_PROMPT_ROWS]
    if not len(found):
        raise LookupError("no rollout has this prompt")
    rows = index.rows(found)
    steps: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for place, row in zip(found.tolist(), rows, strict=True):
        step, of, line = index.place(place)
        reward = number(index.numbers["reward"][place])
        shown = {"place": line, "completion": str(row.get("completion", "")), "reward": reward}
        steps.setdefault((step, of), []).append(shown)
    first = next((row for row in rows if row), {})
    return {
        "prompt": prompt_text(first.get("prompt")),
        "ground_truth": first.get("ground_truth"),
        "steps": [{"step": step, "split": of, "members": members} for (step, of), members in sorted(steps.items())],
    }
