"""From ragged trajectories to tensor rows, and from rows to the batches of single optimizer steps."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from atomrl.batches import AdvantageBatch, RowBatch, TrainingBatch, end_to_end, select_rows, taken_apart
from atomrl.protocols import NOTHING, Algorithm
from atomrl.types import RaggedIds, Segment, Trajectory, by_group


@dataclass(frozen=True)
class _Row:
    """A row that is trained on, as far as the limit goes; lists are of its tokens."""

    index: int
    """Among the step's trajectories."""
    trajectory: Trajectory
    tokens: Sequence[int]
    own: slice
    """The tokens of the trajectory that are the row's own."""
    shown: int
    """How many stand before them, which an earlier row has, too."""
    cut: bool
    """Not all of them have room."""
    versions: list[int]
    """Of the weights that wrote each token; -1 where the model did not, or where it is not the row's own."""
    logprobs: list[float]
    """From the engine; 0 where there is none."""
    turns: list[int]
    """-1 likewise."""

    def place(self, place: int) -> int:
        """Where a token of the trajectory is; beyond the end the last one."""
        begin: int = self.own.start
        return min(max(0, place - begin) + self.shown, len(self.tokens) - 1)


def to_rows(
    trajectories: Sequence[Trajectory], max_row_tokens: int | None = None, version: int | None = None
) -> RowBatch:
    """Flatten and pad, once. A trajectory without a reward, or without a token of the model, becomes no row.

    Trained are the tokens that the model wrote; those of the prompt and of an environment are masked. The batch says
    which trajectory each row is (`trajectory_index`). Where the model no longer saw all that had come before
    (`Turn.sees_from`) a new row begins with what it saw, of which only what no earlier row has is trained.

    Args:
        trajectories: of a step; those with one `prompt_id` are a group, wherever they stand.
        max_row_tokens: rows are cut to this many tokens, and are then `truncated`; a row of which nothing is left to
            train is dropped. What an environment gave beyond the cut stands at the last token.
        version: of the trainer's weights, which says how stale each token is.

    Returns:
        B rows, right-padded with token 0 (a causal model never looks at it).
    """
    groups = {prompt_id: number for number, prompt_id in enumerate(by_group(trajectories))}
    rows = [row for index, item in enumerate(trajectories) for row in _rows(index, item, max_row_tokens)]
    items, lengths = [row.trajectory for row in rows], [len(row.tokens) for row in rows]
    longest = max(lengths, default=0)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    versions = torch.full((len(rows), longest), -1, dtype=torch.int32)
    logprobs = torch.zeros(len(rows), longest)
    for number, row in enumerate(rows):
        tokens[number, : lengths[number]] = torch.tensor(row.tokens)
        versions[number, : lengths[number]] = torch.tensor(row.versions)
        logprobs[number, : lengths[number]] = torch.tensor(row.logprobs)
    turn_ids, state_ids = _turns(rows, groups, longest)
    loss_mask = versions >= 0
    loss_mask[:, :1] = False  # nothing predicts the first token
    short = {row.index for row in rows if row.cut}
    unfinished = [row.index in short or row.trajectory.finish_reason in ("length", "abort") for row in rows]
    return RowBatch(
        tokens=tokens,
        loss_mask=loss_mask,
        lengths=torch.tensor(lengths, dtype=torch.long),
        prompt_lengths=_integers(item.prompt_tokens for item in items),
        group_ids=_integers(groups[item.prompt_id] for item in items),
        rewards=torch.tensor([item.reward for item in items], dtype=torch.float32),
        truncated=torch.tensor(unfinished, dtype=torch.bool),
        cut=torch.tensor([row.cut for row in rows], dtype=torch.bool) if short else None,
        response_lengths=_integers(item.response_tokens for item in items),
        trajectory_index=_integers(row.index for row in rows),
        staleness=None if version is None else (version - versions).masked_fill(versions < 0, 0),
        token_rewards=_token_rewards(rows, longest),
        turn_ids=turn_ids,
        state_ids=state_ids,
        rollout_logprobs=None if any(part.logprobs is None for item in items for part in _written(item)) else logprobs,
        candidates=_candidates(rows, longest),
        reward_parts=_reward_parts(items),
        baseline_rewards=_baseline_rewards(items),
    )


def _written(trajectory: Trajectory) -> list[Segment]:
    """What the model wrote."""
    return [part for part in trajectory.segments if part.origin == "model" and part.token_ids]


def _rows(index: int, trajectory: Trajectory, limit: int | None) -> list[_Row]:
    """A trajectory as rows; none where it has no reward, or nothing of it is left to train."""
    found: list[_Row] = []
    if trajectory.reward is None:
        return found
    tokens, turns = trajectory.token_ids, turn_numbers(trajectory)
    versions: list[int] = []
    logprobs: list[float] = []
    for segment in trajectory.segments:
        size, written = len(segment.token_ids), segment.origin == "model"
        versions += [segment.policy_version or 0 if written else -1] * size
        logprobs += segment.logprobs if written and segment.logprobs is not None else [0.0] * size
    for shown, own in _contexts(trajectory):
        before = [token for part in shown for token in tokens[part]]
        hidden = [-1] * len(before)
        row = _Row(
            index,
            trajectory,
            tokens=(*before, *tokens[own])[:limit],
            own=own,
            shown=len(before),
            cut=limit is not None and len(before) + own.stop - own.start > limit,
            versions=[*hidden, *versions[own]][:limit],
            logprobs=[*([0.0] * len(before)), *logprobs[own]][:limit],
            turns=[*hidden, *turns[own]][:limit],
        )
        if max(row.versions, default=-1) >= 0:
            found.append(row)
        elif row.cut and found:  # a row of which nothing is left
            found[-1] = replace(found[-1], cut=True)
    return found


def _contexts(trajectory: Trajectory) -> list[tuple[tuple[slice, ...], slice]]:
    """For each row of a trajectory the tokens that the model saw before, and the row's own, until turns were dropped.
    What was answered then is in the next row, where it was seen."""
    episode, total = trajectory.episode, sum(len(segment.token_ids) for segment in trajectory.segments)
    if episode is None or not any(turn.sees_from for turn in episode.turns):
        return [((), slice(0, total))]
    begin = trajectory.prompt_tokens + episode.opening_tokens
    starts = list(accumulate((turn.model_tokens + turn.reply_tokens for turn in episode.turns), initial=begin))
    firsts = [0, *(n for n, (one, two) in enumerate(pairwise(episode.turns), 1) if one.sees_from != two.sees_from)]
    found: list[tuple[tuple[slice, ...], slice]] = []
    for first, past in pairwise([*firsts, len(episode.turns)]):
        end = starts[past - 1] + episode.turns[past - 1].model_tokens
        seen = slice(starts[episode.turns[first].sees_from], starts[first])
        shown = (slice(0, begin), seen) if first else ()
        found.append((shown, slice(starts[first] if first else 0, end)))
    return found


def turn_numbers(trajectory: Trajectory) -> list[int]:
    """The turn of each token, from 0; -1 where the model did not write it.

    An episode says how long its turns are; without one, what the model wrote at one go is a turn.

    Example:
        >>> from atomrl.types import Sample
        >>> parts = [("prompt", 1), ("model", 2), ("environment", 1), ("model", 1)]
        >>> segments = tuple(Segment(origin=origin, token_ids=(5,) * size) for origin, size in parts)
        >>> sample = Sample(sample_id="a", prompt="", ground_truth="")
        >>> turn_numbers(Trajectory(prompt_id="0:a", index=0, sample=sample, segments=segments, text="",
        ...     finish_reason="stop"))
        [-1, 0, 0, -1, 1]
    """
    numbers = [-1] * len(trajectory.segments[0].token_ids)
    if trajectory.episode is not None:
        numbers += [-1] * trajectory.episode.opening_tokens
        for number, turn in enumerate(trajectory.episode.turns):
            numbers += [number] * turn.model_tokens + [-1] * turn.reply_tokens
        return numbers
    now = 0
    for segment in trajectory.segments[1:]:
        if segment.origin != "model":
            now = max(numbers, default=-1) + 1
        numbers += [now if segment.origin == "model" else -1] * len(segment.token_ids)
    return numbers


def _turns(rows: Sequence[_Row], groups: Mapping[str, int], longest: int) -> tuple[Tensor | None, Tensor | None]:
    """[B, T] the turn of each token, and the state in which its turn began: what the environment had shown last, before
    that the prompt. None where no row has a second turn."""
    if not any(max(row.turns) > 0 for row in rows):
        return None, None
    turn_ids, state_ids = torch.full((2, len(rows), longest), -1, dtype=torch.long)
    states: dict[tuple[int, tuple[int, ...]], int] = {}
    for number, row in enumerate(rows):
        if not number or rows[number - 1].index != row.index:
            group, shown = groups[row.trajectory.prompt_id], _shown(row.trajectory)
            ids = [states.setdefault((group, tokens), len(states)) for tokens in shown]
        turns = torch.tensor(row.turns)
        turn_ids[number, : len(turns)] = turns
        state_ids[number, : len(turns)][turns >= 0] = torch.tensor(ids)[turns[turns >= 0]]
    return turn_ids, state_ids


def _shown(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """What the environment had shown last when each turn began; nothing before it shows something."""
    tokens, start = trajectory.token_ids, len(trajectory.segments[0].token_ids)
    found: list[tuple[int, ...]] = []
    for place, turn in enumerate(turn_numbers(trajectory)):
        if turn >= 0:
            while len(found) <= turn:
                found.append(tokens[start:place] or (found[-1] if found else ()))
            start = place + 1
    return found


def _integers(numbers: Iterator[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.long)


def _candidates(rows: Sequence[_Row], longest: int) -> RaggedIds | None:
    """Of [B, T], what each token was drawn from; None where the engine did not tell it of every token."""
    counts = torch.zeros(len(rows), longest, dtype=torch.int32)
    ids = []
    for number, row in enumerate(rows):
        written = _written(row.trajectory)
        found = [part.candidates for part in written if part.candidates is not None]
        if len(found) < len(written):
            return None
        own = torch.tensor(row.versions) >= 0
        before = sum(turn >= 0 for turn in turn_numbers(row.trajectory)[: row.own.start])
        every = torch.cat([each.counts for each in found])
        counts[number, : len(own)][own] = every[before : before + int(own.sum())]
        start = int(every[:before].sum())
        ids.append(torch.cat([each.ids for each in found])[start : start + int(counts[number].sum())])
    return RaggedIds(counts=counts, ids=torch.cat(ids)) if ids else None


def _token_rewards(rows: Sequence[_Row], longest: int) -> Tensor | None:
    """[B, T] of environments; None where they gave nothing."""
    if not any(row.trajectory.token_rewards for row in rows):
        return None
    rewards = torch.zeros(len(rows), longest)
    for number, row in enumerate(rows):
        begins = number == 0 or rows[number - 1].index != row.index
        ends = number == len(rows) - 1 or rows[number + 1].index != row.index
        for place, reward in row.trajectory.token_rewards:
            if (begins or place >= row.own.start) and (ends or place < rows[number + 1].own.start):
                rewards[number, row.place(place)] += reward
    return rewards


def _reward_parts(items: Sequence[Trajectory]) -> Tensor | None:
    """[B, K, 2] value and weight of each part that enters the sum."""
    names = dict.fromkeys(name for item in items for name, weight in item.part_weights.items() if weight)
    if not names:
        return None
    parts = [[(_or_nan(item.reward_parts.get(n)), item.part_weights.get(n, 0.0)) for n in names] for item in items]
    return torch.tensor(parts, dtype=torch.float32)


def _baseline_rewards(items: Sequence[Trajectory]) -> Tensor | None:
    """[B] of extra rollouts; None where there were none."""
    if all(item.baseline_reward is None for item in items):
        return None
    return torch.tensor([_or_nan(item.baseline_reward) for item in items], dtype=torch.float32)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def with_advantages(algorithm: Algorithm, rows: RowBatch, state: Mapping[str, float] = NOTHING) -> AdvantageBatch:
    """Rows with their advantages, which are those of whole trajectories also where these have several rows.

    Args:
        algorithm: whose `advantages` they are.
        rows: with what its `advantage_inputs` name.
        state: what it keeps from step to step.
    """
    whole = end_to_end(rows)
    found = algorithm.advantages(whole, state)
    if whole is rows:
        return found
    names = {field.name for field in fields(AdvantageBatch)} - {field.name for field in fields(RowBatch)}
    tensors = {name: getattr(found, name) for name in (*names, "loss_mask")}
    apart = {name: taken_apart(value, rows) for name, value in tensors.items() if isinstance(value, Tensor)}
    return AdvantageBatch(**(vars(rows) | apart), state=found.state)


def to_training_batches(
    batch: AdvantageBatch, algorithm: Algorithm, *, updates: int, epochs: int, seed: int, step: int
) -> Iterator[TrainingBatch]:
    """The optimizer steps of one step of the loop: `epochs` passes over the rows, each in `updates` parts.

    The parts are as even as can be; what the algorithm's `row_unit` names stays together, and so do the rows of a
    trajectory. With one part the order is left alone, else it is shuffled by (seed, step, epoch).
    """
    if batch.rows == 0:
        return
    ids = batch.unit_ids(algorithm.row_unit)
    if ids is None and end_to_end(batch) is not batch:
        ids = batch.trajectory_index
    for epoch in range(epochs):
        for index in _split(batch.rows, ids, updates, f"{seed}/{step}/{epoch}"):
            part = select_rows(batch, index)
            whole = end_to_end(part)
            weights = taken_apart(algorithm.loss_weights(whole.loss_mask, whole.group_ids), part)
            yield TrainingBatch(**vars(part), loss_weights=weights)


def _split(rows: int, ids: Tensor | None, parts: int, key: str) -> list[Tensor]:
    if parts == 1:
        return [torch.arange(rows)]
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest()))
    if ids is None:
        shuffled = torch.randperm(rows, generator=generator)
        return [part for part in shuffled.tensor_split(parts) if len(part)]
    units = torch.unique(ids)
    shuffled = units[torch.randperm(len(units), generator=generator)]
    chosen = [torch.isin(ids, part).nonzero()[:, 0] for part in shuffled.tensor_split(parts)]
    return [part for part in chosen if len(part)]
