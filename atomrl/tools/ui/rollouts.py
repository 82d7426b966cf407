"""Completions for the pages: lists, groups, recorded tokens, a prompt's history, and those of a run's overview."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast, get_args

import numpy as np

from atomrl.tools.ui.catalog import number
from atomrl.tracking.reading import Run
from atomrl.tracking.reading.lines import ReadError
from atomrl.tracking.reading.rollouts import SPLITS, Ints, Order, RolloutFilter, RolloutIndex
from atomrl.tracking.reading.token_records import TokenTable
from atomrl.tracking.reading.token_texts import token_texts

# --------------------------------------------------------------------------------------------------------------------
# Recorded tokens of a completion.

MAX_RECORDED = 8
"""Maximum number of recorded groups that a page links to."""
COLUMNS = {
    "advantage": "advantages", "entropy": "entropy", "gap": "gap", "logprob": "logprobs", "old_logprob": "old_logprobs",
    "rollout_logprob": "rollout_logprobs", "ref_logprob": "ref_logprobs", "value": "values", "gradient": "gradient",
    "loss": "loss",
}  # fmt: skip
"""Name of a per-token number on the page -> column of the record."""
STRONG = 0.95
"""Quantile of the absolute values that gets the full colour."""
SAME = 1e-4
"""Relative tolerance within which all tokens of a row count as equal, so that a column is not coloured."""


def tokens(run: Run, step: int, split: str, place: int) -> dict[str, Any]:
    """Return the tokens of a completion for the page.

    Returns:
        `ids`; `texts`, None (with the reason in `why`) without a checkpoint that has a tokenizer; `numbers` (see
        `token_numbers`) and `prompt`, None if the step's tokens were not recorded; `recorded`: the line of a completion
        of each recorded group of the step.

    Raises:
        LookupError: no such rollout.
    """
    row = run.rollouts[run.rollouts.number_at(step, split, place)]
    ids, recorded = row.get("token_ids"), list[int]()
    if not isinstance(ids, list) or not all(isinstance(token, int) and token >= 0 for token in ids):
        missing = {"texts": None, "numbers": None, "prompt": None, "why": "No token ids were recorded."}
        return missing | {"ids": [], "recorded": recorded}
    (texts, why), numbers, prompt = token_texts(run.path, ids), None, None
    try:
        table = run.tokens(step) if split == "train" else None
    except ReadError as error:
        table, why = None, str(error)
    if table is not None:
        _, firsts = np.unique(table.rows["group_ids"], return_index=True)
        recorded = table.rows["trajectory_index"][np.sort(firsts)][:MAX_RECORDED].tolist()
    if table is not None and (numbers := token_numbers(table, place, ids, row.get("episode"))) is not None:
        prompt_ids = table.prompts[table.rows["prompt"][table.rows_of(place)[0]]].tolist()
        prompt = {"ids": prompt_ids, "texts": token_texts(run.path, prompt_ids)[0]}
    return {
        "ids": ids, "texts": texts, "why": why, "numbers": numbers, "prompt": prompt, "recorded": recorded
    }  # fmt: skip


def token_numbers(
    table: TokenTable, place: int, ids: Sequence[int], episode: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the recorded numbers of a completion's tokens; None if they were not recorded, or are of other tokens. If
    turns were dropped and the completion became several rows, a token's numbers come from the row that trained it.

    Returns:
        `columns`: name -> a number per token, None where the row was truncated; `scales`: name -> the 95% quantile of
        the absolute values in the group (of `ratio`: of the distance from 1); `same`: name -> value, for columns that
        are equal for all trained tokens of the completion; `masked` and `clipped`: indices of such tokens.
    """
    recorded, own = table.tokens, places_in(table, place, ids, episode)
    if own is None:
        return None
    rows = table.rows_of(place)
    columns: dict[str, Any] = {name: recorded[key] for name, key in COLUMNS.items() if key in recorded}
    if "log_ratio" in recorded:
        columns["ratio"] = np.exp(recorded["log_ratio"])
    if (reference := table.ref_gap()) is not None:
        columns["reference"] = reference
    # The scales are those of the whole group, so that its completions have comparable colours.
    group = np.flatnonzero(table.rows["group_ids"] == table.rows["group_ids"][rows[0]])
    inside = np.concatenate([np.arange(*table.span(int(row)).indices(len(recorded["tokens"]))) for row in group])
    if "loss" in recorded:
        columns["share"] = np.abs(recorded["loss"]) / max(float(np.abs(recorded["loss"][inside]).sum()), 1e-30)
    trained_on = inside[recorded["loss_mask"][inside]]
    neutral = {name: float(name == "ratio") for name in columns}
    distances = {name: np.abs(values[trained_on] - neutral[name]) for name, values in columns.items()}
    present = own >= 0
    trained = own[present & recorded["loss_mask"][own]]
    clipped = recorded.get("clipped", recorded["loss_mask"] & False)
    flags = {"masked": ~recorded["loss_mask"][own] & present, "clipped": clipped[own] & present}
    return {
        "columns": {
            name: [None if value != value else value for value in np.where(present, values[own], np.nan).tolist()]
            for name, values in columns.items()
        },
        "scales": {name: _scale(values) for name, values in distances.items()},
        "same": {name: float(values[trained[0]]) for name, values in columns.items() if _are_equal(values[trained])},
        **{name: np.flatnonzero(flag).tolist() for name, flag in flags.items()},
    }


def _scale(values: Any) -> float:
    """Return the quantile `STRONG` of absolute values, so that an outlier does not fade all others; the maximum if the
    quantile is 0."""
    values = values[~np.isnan(values)]
    return float(np.quantile(values, STRONG) or values.max()) if len(values) else 0.0


def _are_equal(values: Any) -> bool:
    """Return whether the values are equal within `SAME`, and not empty."""
    return len(values) > 0 and bool(np.ptp(values) <= SAME * np.abs(values).max())


def token_row(run: Run, step: int, split: str, place: int, at: int) -> dict[str, Any]:
    """Return the inputs of a token's loss.

    Args:
        at: index of the token in the completion.

    Returns:
        `columns`: name -> the numbers of the row that trained it; `at`: the token's index in them; `reward` of the row
        and `rewards` of its group; `state` of the algorithm.

    Raises:
        LookupError: there is no such token, or its numbers were not recorded.
        ReadError: the record is damaged.
    """
    row = run.rollouts[run.rollouts.number_at(step, split, place)]
    ids, table = row.get("token_ids"), run.tokens(step) if split == "train" else None
    own = places_in(table, place, ids, row.get("episode")) if table is not None and isinstance(ids, list) else None
    if table is None or own is None or not 0 <= at < len(own) or own[at] < 0:
        raise LookupError("the values of this token were not recorded")
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
    """Return the index in the table of each token of a completion, -1 where its row was truncated; None if they were
    not recorded, or the record is of other tokens."""
    rows = table.rows_of(place)
    try:
        return _recorded_at(table, rows, np.array(ids), token_places(episode, len(ids)))
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError, MemoryError):
        return _recorded_at(table, rows, np.array(ids), token_places(None, len(ids)))  # ignore a malformed episode


def token_places(episode: Mapping[str, Any] | None, count: int) -> list[Ints]:
    """Return, for each training row of a completion (`data.rows.to_rows`), the indices of its tokens in the completion:
    the context that the model still saw, then the row's own tokens.

    Args:
        episode: the `episode` of the rollout; None without an environment.
        count: number of tokens of the completion.

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
    rows = []
    for first, past in zip(firsts, [*firsts[1:], len(turns)], strict=True):
        end = starts[past - 1] + int(turns[past - 1].get("model_tokens") or 0)
        own = np.arange(starts[seen[first]] if first else begin, end)
        rows.append(np.concatenate([np.arange(begin), own]))
    return rows


def _recorded_at(table: TokenTable, rows: Sequence[int], ids: Ints, places: Sequence[Ints]) -> Ints | None:
    """Match the rows of the table with the expected rows `places`, by their token ids. Returns the index in the table
    of each token, -1 without one; None if a row matches nothing. Expected rows without a trained token are not in the
    table."""
    indices, candidates = np.full(len(ids), -1), list(places)
    for row in rows:
        own = np.arange(*table.span(row).indices(len(table.tokens["tokens"])))
        recorded = table.tokens["tokens"][own]
        # Both lists are in the order of the completion, so expected rows that do not match were never trained on. A
        # recorded row may be shorter, because `train.max_row_tokens` truncates rows.
        while candidates and not (
            len(candidates[0]) >= len(own) and np.array_equal(ids[candidates[0][: len(own)]], recorded)
        ):
            candidates.pop(0)
        if not candidates:
            return None
        at = candidates.pop(0)[: len(own)]
        better = (indices[at] < 0) | table.tokens["loss_mask"][own]  # prefer the row that trained the token
        indices[at[better]] = own[better]
    return indices if rows else None


# --------------------------------------------------------------------------------------------------------------------
# Lists of rollouts, groups, and the history of a prompt.

MAX_ROWS = 200
PICTURE = re.compile(r"[0-9a-f]{64}\.(png|jpg|webp|gif|bmp)", re.ASCII)
PREVIEW = 400
"""Characters of a prompt (its end) and of a completion (its start) in a list."""
MAX_PROMPT_ROWS = 2000
MAX_TOKENS = 2**21
"""Maximum number of tokens of a step whose advantages are recomputed."""
TRAINED = (
    "prompt_id", "completion_index", "prompt_tokens", "token_ids", "reward", "reward_parts", "finish_reason",
    "advantage", "baseline_reward",
)  # fmt: skip
"""Columns of a rollout from which advantages are computed."""
BINS = 24
NUMBER_KINDS: dict[str, type] = {
    field.name: int if str(field.type).startswith("int") else float
    for field in fields(RolloutFilter)
    if str(field.type).startswith(("int", "float"))
}


class BadQuestion(ValueError):
    """A parameter of a request is invalid."""


def parse_filter(query: Mapping[str, str]) -> tuple[RolloutFilter, Order, bool]:
    """Parse filter, order and direction from the parameters of a request.

    Raises:
        BadQuestion: a value has the wrong type.
    """
    conditions: dict[str, Any] = {}
    for field in fields(RolloutFilter):
        text = query.get(field.name)
        if text is None or text == "":
            continue
        try:
            kind = NUMBER_KINDS.get(field.name)
            conditions[field.name] = kind(text) if kind else text == "true" if field.name == "mixed" else text
        except ValueError:
            raise BadQuestion(f"{field.name}={text!r} is not a number") from None
    order = query.get("sort") or "step"
    if order not in get_args(Order):
        raise BadQuestion(f"sort={order!r} is not one of {', '.join(get_args(Order))}")
    return RolloutFilter(**conditions), cast(Order, order), query.get("descending") == "true"


def page(index: RolloutIndex, query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of the rollouts that pass a filter, with histograms of rewards and lengths.

    Args:
        query: parameters of `parse_filter`, `offset` and `limit`; `newest=true` selects the newest step.
    """
    try:
        offset, limit = (max(0, int(query.get(name) or usual)) for name, usual in (("offset", 0), ("limit", 50)))
    except ValueError:
        raise BadQuestion("offset and limit must be numbers") from None
    conditions, order, descending = parse_filter(query)
    steps = np.unique(index.steps)
    if query.get("newest") == "true" and len(steps):
        conditions = replace(conditions, first_step=int(steps[-1]), last_step=int(steps[-1]))
    numbers = index.select(conditions, order, descending)
    listed = numbers[offset : offset + min(MAX_ROWS, limit)]
    return {
        "total": len(numbers),
        "of": len(index),
        "first_step": conditions.first_step,
        "last_step": conditions.last_step,
        "around": _around(steps, conditions),
        "splits": [split for place, split in enumerate(SPLITS) if (index.splits == place).any()],
        "sources": index.values("data_source"),
        "finish_reasons": index.values("finish_reason"),
        "rewards": histogram(index.numbers["reward"][numbers]),
        "lengths": histogram(index.numbers["completion_tokens"][numbers]),
        "rows": [_line(index, place, row) for place, row in zip(listed.tolist(), index.rows(listed), strict=True)],
    }


def _around(steps: Ints, conditions: RolloutFilter) -> dict[str, int | None]:
    """Return the `first` and the `newest` step, and the steps before (`previous`) and after (`next`) those of the
    filter, which need not exist."""
    low = int(np.searchsorted(steps, conditions.first_step or 0)) - 1
    high = len(steps) if conditions.last_step is None else int(np.searchsorted(steps, conditions.last_step, "right"))
    places = {"first": 0, "previous": low, "next": high, "newest": len(steps) - 1}
    return {name: int(steps[place]) if 0 <= place < len(steps) else None for name, place in places.items()}


def histogram(values: Any) -> dict[str, Any]:
    """Return counts in `BINS` equal bins, with the lowest and the highest edge."""
    values = values[~np.isnan(values)]
    if not len(values):
        return {"counts": [], "low": 0.0, "high": 0.0}
    counts, edges = np.histogram(values, BINS)
    return {"counts": counts.tolist(), "low": float(edges[0]), "high": float(edges[-1])}


def _line(index: RolloutIndex, place: int, row: Mapping[str, Any]) -> dict[str, Any]:
    step, split, line = index.place(place)
    prompt = prompt_text(row.get("prompt"))
    return {
        "step": step, "split": split, "place": line, "prompt": prompt[-PREVIEW:],
        "completion": str(row.get("completion", ""))[:PREVIEW],
        "reward": number(index.numbers["reward"][place]), "advantage": number(index.numbers["advantage"][place]),
        "tokens": number(index.numbers["completion_tokens"][place]), "finish": row.get("finish_reason"),
        "mixed": bool(index.mixed[place]), "prompt_hash": index.prompt_of(place),
    }  # fmt: skip


def prompt_text(prompt: Any) -> str:
    """Return a prompt as text: messages with their roles; anything else as Python prints it."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(turn, dict) for turn in prompt):
        return "".join(f"{turn.get('role', '')}: {turn.get('content', '')}\n" for turn in prompt)
    return "" if prompt is None else str(prompt)


def group(index: RolloutIndex, step: int, split: str, place: int) -> dict[str, Any]:
    """Return the completions of a prompt in a step, with the formula of their advantages.

    Raises:
        LookupError: no such rollout.
    """
    rollout = index.number_at(step, split, place)
    members = index.group(rollout)
    rows = index.rows(members)
    rewards = [number(value) for value in index.numbers["reward"][members]]
    advantages = [number(value) for value in index.numbers["advantage"][members]]
    first = next((row for row in rows if row), {})
    return {
        "step": step, "split": split, "prompt": prompt_text(first.get("prompt")), "images": images_of(first),
        "prompt_hash": index.prompt_of(rollout), "ground_truth": first.get("ground_truth"),
        "data_source": first.get("data_source"), "prompt_id": first.get("prompt_id"),
        "arithmetic": arithmetic(rewards, advantages),
        "steps_of_prompt": _steps_of_prompt(index, rollout),
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


def images_of(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the pictures of a row's prompt, or of a turn's reply."""
    images = row.get("images")
    return [name for name in images if is_picture(name)] if isinstance(images, list) else []


def is_picture(name: Any) -> bool:
    """Return True for a name of a file in a run's folder of pictures: a SHA-256 and a suffix that browsers show."""
    return isinstance(name, str) and PICTURE.fullmatch(name) is not None


def episode_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a row's episode, with the names of pictures alone (`images_of`); None if it has none, or a malformed
    one."""
    episode = row.get("episode")
    if not isinstance(episode, dict):
        return None
    turns = episode.get("turns") or []
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return None
    opening = images_of({"images": episode.get("opening_images")})
    return {**episode, "turns": [turn | {"images": images_of(turn)} for turn in turns], "opening_images": opening}


def trained_on(index: RolloutIndex, step: int, split: str, place: int) -> dict[str, Any]:
    """Return the inputs of a step's advantages: `rows` that were trained on, and `group`, the indices of a prompt's
    completions in them.

    Raises:
        LookupError: no such rollout.
        BadQuestion: the step has too many tokens.
    """
    members = index.group(index.number_at(step, split, place)).tolist()
    numbers = index.select(RolloutFilter(first_step=step, last_step=step, split=split))
    numbers = np.sort(numbers[~np.isnan(index.numbers["advantage"][numbers])])
    if index.numbers["completion_tokens"][numbers].sum() > MAX_TOKENS:
        raise BadQuestion(f"the step has more than {MAX_TOKENS:,} tokens")
    rows = [
        {name: row[name] for name in TRAINED if name in row} | {"episode": episode_of(row)}
        for row in index.rows(numbers)
    ]
    places = {number: place for place, number in enumerate(numbers.tolist())}
    return {"rows": rows, "group": [places[member] for member in members if member in places]}


def place_at(params: Mapping[str, str]) -> tuple[int, str, int]:
    """Parse step, split and line from the URL of a rollout.

    Raises:
        LookupError: they are not numbers.
    """
    step, place = params["step"], params["place"]
    if not all(text.isascii() and text.isdigit() and len(text) <= 16 for text in (step, place)):
        raise LookupError("no such completion")
    return int(step), params["split"], int(place)


def arithmetic(rewards: Sequence[float | None], advantages: Sequence[float | None]) -> dict[str, Any]:
    """Return mean and standard deviation of a group's rewards, and the formula that gives the recorded advantages.

    Returns:
        `mean`, `std`, and `formula`: `z` (GRPO), `centred` (mean subtracted), `others` (mean of the others subtracted,
        RLOO) or `reward`, if it matches all advantages within 0.1%; None if none does, for example because the
        algorithm shapes or normalizes them further.

    Example:
        >>> arithmetic([1.0, 0.0], [0.7071, -0.7071])["formula"]
        'z'
    """
    scored = [reward for reward in rewards if reward is not None]
    if not scored:
        return {"mean": None, "std": None, "formula": None}
    count, same = len(scored), max(scored) == min(scored)
    mean = scored[0] if same else float(np.mean(scored))  # exact if all are equal, and so is the deviation
    std = 0.0 if same else float(np.std(scored, ddof=1))
    formulas = {
        "z": [(reward - mean) / (std + 1e-6) for reward in scored],
        "centred": [reward - mean for reward in scored],
        "others": [(reward - mean) * count / (count - 1) for reward in scored] if count > 1 else [],
        "reward": scored,
    }
    recorded = [a for reward, a in zip(rewards, advantages, strict=True) if reward is not None and a is not None]
    formula = None
    if len(recorded) == count:
        matching = (name for name, values in formulas.items() if len(values) == count and _close(values, recorded))
        formula = next(matching, None)
    return {"mean": mean, "std": std, "formula": formula}


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    return bool(np.allclose(one, other, rtol=1e-3, atol=max(1e-6, 1e-3 * max(map(abs, other)))))


def _steps_of_prompt(index: RolloutIndex, rollout: int) -> list[list[int]]:
    """Return [step, line of its first completion] for each step that had the prompt."""
    split = SPLITS[index.splits[rollout]]
    numbers = index.select(RolloutFilter(prompt=index.prompt_of(rollout), split=split))
    _, first = np.unique(index.steps[numbers], return_index=True)
    return [[step, place] for step, _, place in map(index.place, numbers[first].tolist())]


def prompt_history(index: RolloutIndex, prompt: str, split: str | None) -> dict[str, Any]:
    """Return the completions of a prompt by step.

    Raises:
        LookupError: no rollout has the prompt.
    """
    numbers = index.select(RolloutFilter(prompt=prompt, split=split or None))[:MAX_PROMPT_ROWS]
    if not len(numbers):
        raise LookupError("no completion of this prompt")
    rows = index.rows(numbers)
    steps: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for place, row in zip(numbers.tolist(), rows, strict=True):
        step, of, line = index.place(place)
        reward = number(index.numbers["reward"][place])
        member = {"place": line, "completion": str(row.get("completion", "")), "reward": reward}
        steps.setdefault((step, of), []).append(member)
    first = next((row for row in rows if row), {})
    return {
        "prompt": prompt_text(first.get("prompt")),
        "images": images_of(first),
        "ground_truth": first.get("ground_truth"),
        "steps": [{"step": step, "split": of, "members": members} for (step, of), members in sorted(steps.items())],
    }


# --------------------------------------------------------------------------------------------------------------------
# The overview of a run: recent completions, and a prompt before and after training.

GLIMPSE = 3
"""Number of newest and of worst completions shown, each of another prompt."""
PROMPT, COMPLETION = 600, 1500
"""Characters shown of a prompt (its end) and of a completion (its start)."""
MEMBERS = 4
"""Completions of a prompt shown per step."""
CHANGES = ("better", "worse", "same")


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
        "newest": _previews(index, firsts[:GLIMPSE]),
        "worst": _previews(index, np.array(worst[:GLIMPSE], np.int64)),
    }


def _previews(index: RolloutIndex, numbers: Ints) -> list[dict[str, Any]]:
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
        raise BadQuestion(f"split must be one of {', '.join(SPLITS)}, change one of {', '.join(CHANGES)}")
    # Prompts that occur in two or more steps, per split; the evaluation first.
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
    # The prompt that is shown, with its completions at both steps.
    page = None
    if len(selected):
        place = int(selected[at])
        both = [_members(index, table, place, title) for title in ("first", "last")]
        row = index[int(table["number"][place])]
        page = {
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
        "prompt": page,
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
    rows = _previews(index, members[:MEMBERS])
    return {"step": int(step), "mean": number(mean), "of": len(members), "members": rows}
