"""Completions for the pages: lists, groups with their arithmetic, and a prompt through the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast, get_args

import numpy as np

from atomrl.tools.ui.catalog import number
from atomrl.tracking.reading import Run
from atomrl.tracking.reading.lines import ReadError
from atomrl.tracking.reading.rollouts import SPLITS, Ints, Order, RolloutFilter, RolloutIndex, TokenTable, token_texts

# --------------------------------------------------------------------------------------------------------------------
# The recorded numbers of a completion's tokens, for the pages.

MAX_RECORDED = 8
"""Groups that a page names as having recorded tokens."""
COLUMNS = {
    "advantage": "advantages", "entropy": "entropy", "gap": "gap", "logprob": "logprobs", "old_logprob": "old_logprobs",
    "rollout_logprob": "rollout_logprobs", "ref_logprob": "ref_logprobs", "value": "values", "gradient": "gradient",
    "loss": "loss",
}  # fmt: skip
"""What a page calls a recorded number of a token."""
STRONG = 0.95
SAME = 1e-4
"""Numbers of a row that differ by less, by their share, are the same: nothing is told apart by them."""


def tokens(run: Run, step: int, split: str, place: int) -> dict[str, Any]:
    """The tokens of a completion as texts, where the run has a checkpoint with its tokenizer; where they were recorded
    the numbers of each, and the prompt's tokens; and a completion of each group of its step that was recorded.

    Raises:
        LookupError: there is no such rollout.
    """
    row = run.rollouts[run.rollouts.number_at(step, split, place)]
    ids, recorded = row.get("token_ids"), list[int]()
    if not isinstance(ids, list) or not all(isinstance(token, int) and token >= 0 for token in ids):
        nothing = {"ids": [], "texts": None, "numbers": None, "prompt": None, "recorded": recorded}
        return nothing | {"why": "no token ids were recorded"}
    (texts, why), numbers, prompt = token_texts(run.path, ids), None, None
    try:
        table = run.tokens(step) if split == "train" else None
    except ReadError as error:
        table, why = None, str(error)
    if table is not None:
        _, firsts = np.unique(table.rows["group_ids"], return_index=True)
        recorded = table.rows["trajectory_index"][np.sort(firsts)][:MAX_RECORDED].tolist()
    if table is not None and (numbers := token_numbers(table, place, ids, row.get("episode"))) is not None:
        own = table.prompts[table.rows["prompt"][table.rows_of(place)[0]]].tolist()
        prompt = {"ids": own, "texts": token_texts(run.path, own)[0]}
    return {
        "ids": ids, "texts": texts, "why": why, "numbers": numbers, "prompt": prompt, "recorded": recorded
    }  # fmt: skip


def token_numbers(
    table: TokenTable, place: int, ids: Sequence[int], episode: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """The recorded numbers of a completion's tokens; None where they are not recorded, or are of other tokens. Where it
    was several rows, as turns were dropped, a token's numbers are of the row that trained it.

    Returns:
        `columns`: by name, a number for each token, None where its row was cut; `scales`: how far the numbers of the
        group are from nothing (`ratio`: from 1), but for a few that are further; `same`: the value of each column that
        is the same for all trained tokens of the completion; `masked` and `clipped`: which tokens are.
    """
    given, own = table.tokens, places_in(table, place, ids, episode)
    if own is None:
        return None
    rows = table.rows_of(place)
    columns: dict[str, Any] = {name: given[key] for name, key in COLUMNS.items() if key in given}
    if "log_ratio" in given:
        columns["ratio"] = np.exp(given["log_ratio"])
    if (reference := table.ref_gap()) is not None:
        columns["reference"] = reference
    group = np.flatnonzero(table.rows["group_ids"] == table.rows["group_ids"][rows[0]])
    inside = np.concatenate([np.arange(*table.span(int(row)).indices(len(given["tokens"]))) for row in group])
    if "loss" in given:
        columns["share"] = np.abs(given["loss"]) / max(float(np.abs(given["loss"][inside]).sum()), 1e-30)
    shown = inside[given["loss_mask"][inside]]
    nothing = {name: float(name == "ratio") for name in columns}
    away = {name: np.abs(values[shown] - nothing[name]) for name, values in columns.items()}
    there = own >= 0
    trained = own[there & given["loss_mask"][own]]
    flags = {"masked": ~given["loss_mask"][own], "clipped": given.get("clipped", given["loss_mask"] & False)[own]}
    flags = {name: flag & there for name, flag in flags.items()}
    return {
        "columns": {
            name: [None if value != value else value for value in np.where(there, values[own], np.nan).tolist()]
            for name, values in columns.items()
        },
        "scales": {name: _strong(values) for name, values in away.items()},
        "same": {name: float(values[trained[0]]) for name, values in columns.items() if _all_alike(values[trained])},
        **{name: np.flatnonzero(flag).tolist() for name, flag in flags.items()},
    }


def _strong(values: Any) -> float:
    """What most of some distances are below; the largest where most are 0. One token far out hides no other."""
    values = values[~np.isnan(values)]
    return float(np.quantile(values, STRONG) or values.max()) if len(values) else 0.0


def _all_alike(values: Any) -> bool:
    """Whether no token is told from another by these numbers; there is one at least."""
    return len(values) > 0 and bool(np.ptp(values) <= SAME * np.abs(values).max())


def token_row(run: Run, step: int, split: str, place: int, at: int) -> dict[str, Any]:
    """What the loss of a token was made of.

    Args:
        at: which of the completion's tokens, from 0.

    Returns:
        `columns`: the numbers of the row that trained it, by name; `at`: its place in them; `reward` of the row and
        `rewards` of its group; `state` of the algorithm.

    Raises:
        LookupError: there is no such token, or its numbers are not recorded.
        ReadError: the record is damaged.
    """
    row = run.rollouts[run.rollouts.number_at(step, split, place)]
    ids, table = row.get("token_ids"), run.tokens(step) if split == "train" else None
    own = places_in(table, place, ids, row.get("episode")) if table is not None and isinstance(ids, list) else None
    if table is None or own is None or not 0 <= at < len(own) or own[at] < 0:
        raise LookupError("the numbers of this token are not recorded")
    rows = [(row, table.span(row)) for row in table.rows_of(place)]
    number, span = next((row, span) for row, span in rows if span.start <= own[at] < span.stop)
    group = table.rows["group_ids"] == table.rows["group_ids"][number]
    return {
        "columns": {name: values[span].tolist() for name, values in table.tokens.items() if values.ndim == 1},
        "at": int(own[at]) - span.start,
        "reward": float(table.rows["rewards"][number]) if "rewards" in table.rows else None,
        "rewards": table.rows["rewards"][group].tolist() if "rewards" in table.rows else [],
        "state": table.state,
    }


def places_in(table: TokenTable, place: int, ids: Sequence[int], episode: Mapping[str, Any] | None) -> Ints | None:
    """Of each token of a completion its place in the table, -1 where its row was cut; None where they are not
    recorded, or are of other tokens."""
    rows = table.rows_of(place)
    try:
        return _recorded_at(table, rows, np.array(ids), token_places(episode, len(ids)))
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError, MemoryError):
        return _recorded_at(table, rows, np.array(ids), token_places(None, len(ids)))  # an odd episode is none


def token_places(episode: Mapping[str, Any] | None, count: int) -> list[Ints]:
    """The tokens of each row that a completion may have become, by their places in it (`data.rows.to_rows`): what the
    model still saw, then the row's own.

    Args:
        episode: as it is in a rollout.
        count: of the completion's tokens.

    Example:
        >>> turns = [{"model_tokens": 2, "reply_tokens": 1}, {"model_tokens": 1}, {"model_tokens": 1, "sees_from": 1}]
        >>> [places.tolist() for places in token_places({"opening_tokens": 1, "turns": turns}, 6)]
        [[0, 1, 2, 3, 4], [0, 4, 5]]
    """
    turns = (episode or {}).get("turns") or []
    seen = [int(turn.get("sees_from") or 0) for turn in turns]
    if not any(seen):
        return [np.arange(count)]
    begin = int((episode or {}).get("opening_tokens") or 0)
    sizes = [int(turn.get("model_tokens") or 0) + int(turn.get("reply_tokens") or 0) for turn in turns]
    starts = [begin, *(begin + np.cumsum(sizes)).tolist()]
    firsts = [n for n in range(len(turns)) if n == 0 or seen[n] != seen[n - 1]]
    found = []
    for first, past in zip(firsts, [*firsts[1:], len(turns)], strict=True):
        end = starts[past - 1] + int(turns[past - 1].get("model_tokens") or 0)
        own = np.arange(starts[seen[first]] if first else begin, end)
        found.append(np.concatenate([np.arange(begin), own]))
    return found


def _recorded_at(table: TokenTable, rows: Sequence[int], ids: Ints, places: Sequence[Ints]) -> Ints | None:
    """Of each token of a completion its place in the table, -1 where it has none; None where no row is of these
    tokens. A row of which nothing was left to train is not in the table."""
    found, left = np.full(len(ids), -1), list(places)
    for row in rows:
        own = np.arange(*table.span(row).indices(len(table.tokens["tokens"])))
        recorded = table.tokens["tokens"][own]
        while left and not (len(left[0]) >= len(own) and np.array_equal(ids[left[0][: len(own)]], recorded)):
            left.pop(0)
        if not left:
            return None
        at = left.pop(0)[: len(own)]
        better = (found[at] < 0) | table.tokens["loss_mask"][own]
        found[at[better]] = own[better]
    return found if rows else None


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
