"""The recorded numbers of a completion's tokens, for the pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atomrl.reading import Run
from atomrl.reading.lines import ReadError
from atomrl.reading.rollouts import Ints
from atomrl.reading.token_texts import token_texts
from atomrl.reading.tokens import TokenTable

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
