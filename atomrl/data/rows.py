"""Trajectories to padded rows (`to_rows`), and rows to the batches of optimizer steps (`to_training_batches`)."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from atomrl.batches import (
    AdvantageBatch,
    RolloutFields,
    RowBatch,
    RowImages,
    TrainingBatch,
    concat_turns,
    select_rows,
    split_turns,
)
from atomrl.protocols import NOTHING, Algorithm
from atomrl.types import Episode, Image, RaggedIds, Segment, Trajectory


def by_group(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    """Group trajectories by prompt id, in order of first appearance."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.prompt_id, []).append(trajectory)
    return groups


@dataclass(frozen=True)
class _Row:
    """A training row: a trajectory, or one of its parts where the context was cut between turns. Lists are per token,
    cut at `max_row_tokens`."""

    index: int
    """Index of the trajectory in the step."""
    trajectory: Trajectory
    tokens: Sequence[int]
    own: slice
    """Tokens of the trajectory that this row trains; the context before them repeats earlier ones."""
    context: int
    """Number of context tokens."""
    cut: bool
    """The row was longer than `max_row_tokens`."""
    versions: list[int]
    """Weight version that sampled each token; -1 for tokens that are not trained."""
    logprobs: list[float]
    """From the engine; 0 where there is none."""
    turns: list[int]
    """Turn of each token; -1 for tokens that are not trained."""
    images: tuple[Image, ...] = ()
    """Pictures of its tokens, in order."""

    def position(self, place: int) -> int:
        """Return the position in this row of a token of the trajectory, at most the last one."""
        begin: int = self.own.start
        return min(max(0, place - begin) + self.context, len(self.tokens) - 1)


def to_rows(
    trajectories: Sequence[Trajectory], max_row_tokens: int | None = None, version: int | None = None
) -> RowBatch:
    """Convert trajectories to right-padded rows [B, T]. Trajectories without a reward or without a model token are
    dropped.

    Only the model's tokens are trained; those of the prompt and the environment are masked. `trajectory_index` maps
    each row to its trajectory. If the model no longer saw all earlier tokens (`Turn.sees_from`), a new row starts with
    the context that it saw, of which only tokens that no earlier row has are trained.

    Args:
        trajectories: of one step; those with the same `prompt_id` are a group, in any order.
        max_row_tokens: cuts longer rows and marks them `truncated`; rows that lose all trained tokens are dropped.
            Token rewards beyond the cut move to the last token.
        version: version of the trainer's weights, for the staleness of each token.

    Returns:
        B rows, right-padded with token 0, which a causal model never attends to.
    """
    prompt_ids = dict.fromkeys(item.prompt_id for item in trajectories)
    groups = {prompt_id: number for number, prompt_id in enumerate(prompt_ids)}
    rows = [
        row
        for index, item in enumerate(trajectories)
        if item.reward is not None
        for row in _rows_of(index, item, max_row_tokens)
    ]
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
    cut_trajectories = {row.index for row in rows if row.cut}
    truncated = [row.index in cut_trajectories or row.trajectory.finish_reason in ("length", "abort") for row in rows]
    return RowBatch(
        tokens=tokens,
        loss_mask=loss_mask,
        lengths=torch.tensor(lengths, dtype=torch.long),
        prompt_lengths=_integers(item.prompt_tokens for item in items),
        group_ids=_integers(groups[item.prompt_id] for item in items),
        rewards=torch.tensor([item.reward for item in items], dtype=torch.float32),
        truncated=torch.tensor(truncated, dtype=torch.bool),
        cut=torch.tensor([row.cut for row in rows], dtype=torch.bool) if cut_trajectories else None,
        trajectory_index=_integers(row.index for row in rows),
        images=RowImages.of(row.images for row in rows),
        rollout=RolloutFields(
            logprobs=None
            if any(part.logprobs is None for item in items for part in _model_segments(item))
            else logprobs,
            candidates=_candidates(rows, longest),
            response_lengths=_integers(item.response_tokens for item in items),
            staleness=None if version is None else (version - versions).masked_fill(versions < 0, 0),
            token_rewards=_token_rewards(rows, longest),
            turn_ids=turn_ids,
            state_ids=state_ids,
            reward_parts=_reward_parts(items),
            baseline_rewards=_baseline_rewards(items),
        ),
    )


def _rows_of(index: int, item: Trajectory, max_row_tokens: int | None) -> list[_Row]:
    """Return the rows of a trajectory that have a trained token, cut to `max_row_tokens`."""
    # Weight version and log-prob of each token; version -1 marks tokens that the model did not write.
    token_ids, turns, pictures = item.token_ids, turn_numbers(item), _pictures(item)
    policy_versions: list[int] = []
    rollout_logprobs: list[float] = []
    for segment in item.segments:
        size, by_model = len(segment.token_ids), segment.origin == "model"
        policy_versions += [segment.policy_version or 0 if by_model else -1] * size
        rollout_logprobs += segment.logprobs if by_model and segment.logprobs is not None else [0.0] * size
    # One row of all tokens, or several, each with a context that is not trained again.
    contexts: Iterable[tuple[tuple[slice, ...], slice]] = [((), slice(0, len(token_ids)))]
    if item.episode is not None and any(turn.sees_from for turn in item.episode.turns):
        contexts = _contexts(item.prompt_tokens + item.episode.opening_tokens, item.episode)
    rows: list[_Row] = []
    for context, own in contexts:
        before = [token for part in context for token in token_ids[part]]
        untrained = [-1] * len(before)
        versions = [*untrained, *policy_versions[own]][:max_row_tokens]
        cut = len(versions) < len(before) + own.stop - own.start
        if cut and item.images:  # not inside a picture; tokens behind the last trained one have no effect
            del versions[max((place + 1 for place, version in enumerate(versions) if version >= 0), default=0) :]
        size = len(versions)
        seen = [*context, slice(own.start, own.start + max(0, size - len(before)))]
        row = _Row(
            index,
            item,
            tokens=(*before, *token_ids[own])[:size],
            own=own,
            context=len(before),
            cut=cut,
            versions=versions,
            logprobs=[*([0.0] * len(before)), *rollout_logprobs[own]][:size],
            turns=[*untrained, *turns[own]][:size],
            images=tuple(image for part in seen for place, image in pictures if part.start <= place < part.stop),
        )
        if max(row.versions, default=-1) >= 0:
            rows.append(row)
        elif row.cut and rows:  # nothing of this row is left, so the trajectory is cut before it
            rows[-1] = replace(rows[-1], cut=True)
    return rows


def _pictures(item: Trajectory) -> list[tuple[int, Image]]:
    """Return the pictures of a trajectory, each with the place where its prompt or reply begins."""
    pictures = [(0, image) for image in item.problem.images]
    if item.episode is not None:
        place = item.prompt_tokens
        pictures += [(place, image) for image in item.episode.opening_images]
        place += item.episode.opening_tokens
        for turn in item.episode.turns:
            pictures += [(place + turn.model_tokens, image) for image in turn.images]
            place += turn.model_tokens + turn.reply_tokens
    return pictures


def _model_segments(trajectory: Trajectory) -> list[Segment]:
    """Return the segments that the model wrote."""
    return [part for part in trajectory.segments if part.origin == "model" and part.token_ids]


def _contexts(begin: int, episode: Episode) -> Iterator[tuple[tuple[slice, ...], slice]]:
    """Yield the context and the own tokens of each row of an episode whose model did not see all earlier turns.

    A row covers consecutive turns with the same `sees_from`: each turn extends the context of the one before. Where it
    changes, earlier turns were dropped from the context, and tokens must be predicted from another prefix.

    Args:
        begin: index of the first token of the first turn.

    Yields:
        Slices of the trajectory.
    """
    starts = list(accumulate((turn.model_tokens + turn.reply_tokens for turn in episode.turns), initial=begin))
    changes = (n for n, (one, two) in enumerate(pairwise(episode.turns), 1) if one.sees_from != two.sees_from)
    for first, past in pairwise([0, *changes, len(episode.turns)]):
        # The last reply of a row is part of the next row's context: the model saw it there.
        end = starts[past - 1] + episode.turns[past - 1].model_tokens
        visible = slice(starts[episode.turns[first].sees_from], starts[first])
        yield (slice(0, begin), visible) if first else (), slice(starts[first] if first else 0, end)


def turn_numbers(trajectory: Trajectory) -> list[int]:
    """Return the turn of each token, from 0; -1 for tokens that the model did not write.

    The episode records the length of its turns; without one, consecutive model segments are one turn.

    Example:
        >>> from atomrl.types import Problem
        >>> parts = [("prompt", 1), ("model", 2), ("environment", 1), ("model", 1)]
        >>> segments = tuple(Segment(origin=origin, token_ids=(5,) * size) for origin, size in parts)
        >>> problem = Problem(problem_id="a", prompt="", ground_truth="")
        >>> turn_numbers(Trajectory(prompt_id="0:a", index=0, problem=problem, segments=segments, text="",
        ...     finish_reason="stop"))
        [-1, 0, 0, -1, 1]
    """
    numbers = [-1] * len(trajectory.segments[0].token_ids)
    if trajectory.episode is not None:
        numbers += [-1] * trajectory.episode.opening_tokens
        for number, turn in enumerate(trajectory.episode.turns):
            numbers += [number] * turn.model_tokens + [-1] * turn.reply_tokens
        return numbers
    current = 0
    for segment in trajectory.segments[1:]:
        if segment.origin != "model":
            current = max(numbers, default=-1) + 1
        numbers += [current if segment.origin == "model" else -1] * len(segment.token_ids)
    return numbers


def _turns(rows: Sequence[_Row], groups: Mapping[str, int], longest: int) -> tuple[Tensor | None, Tensor | None]:
    """Return [B, T] the turn of each token, and [B, T] the state in which its turn began: the group, and the tokens and
    pictures of the environment's last reply (empty before the first). (None, None) if no row has a second turn."""
    if not any(max(row.turns) > 0 for row in rows):
        return None, None
    turn_ids, state_ids = torch.full((2, len(rows), longest), -1, dtype=torch.long)
    states: dict[tuple[int, _Reply], int] = {}
    for number, row in enumerate(rows):
        if not number or rows[number - 1].index != row.index:
            group, replies = groups[row.trajectory.prompt_id], _last_replies(row.trajectory)
            ids = [states.setdefault((group, reply), len(states)) for reply in replies]
        turns = torch.tensor(row.turns)
        turn_ids[number, : len(turns)] = turns
        state_ids[number, : len(turns)][turns >= 0] = torch.tensor(ids)[turns[turns >= 0]]
    return turn_ids, state_ids


_Reply = tuple[tuple[int, ...], tuple[str, ...]]
"""Tokens and names of the pictures of a reply."""


def _last_replies(trajectory: Trajectory) -> list[_Reply]:
    """Return the environment's last reply before each turn; empty before the first reply."""
    tokens, start = trajectory.token_ids, len(trajectory.segments[0].token_ids)
    pictures = _pictures(trajectory)
    replies: list[_Reply] = []
    for place, turn in enumerate(turn_numbers(trajectory)):
        if turn >= 0:
            while len(replies) <= turn:
                if start < place or not replies:
                    names = tuple(image.name for begin, image in pictures if start <= begin < place)
                    replies.append((tokens[start:place], names))
                else:
                    replies.append(replies[-1])
            start = place + 1
    return replies


def _integers(numbers: Iterator[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.long)


def _candidates(rows: Sequence[_Row], longest: int) -> RaggedIds | None:
    """Return the candidate ids that each of the [B, T] tokens was sampled from (top-k, top-p); None unless the engine
    recorded them for every token."""
    counts = torch.zeros(len(rows), longest, dtype=torch.int32)
    ids = []
    for number, row in enumerate(rows):
        segments = _model_segments(row.trajectory)
        recorded = [part.candidates for part in segments if part.candidates is not None]
        if len(recorded) < len(segments):
            return None
        own = torch.tensor(row.versions) >= 0
        # Candidates are stored per model token of the trajectory; this row's begin after those of earlier rows.
        before = sum(turn >= 0 for turn in turn_numbers(row.trajectory)[: row.own.start])
        sizes = torch.cat([each.counts for each in recorded])
        counts[number, : len(own)][own] = sizes[before : before + int(own.sum())]
        start = int(sizes[:before].sum())
        ids.append(torch.cat([each.ids for each in recorded])[start : start + int(counts[number].sum())])
    return RaggedIds(counts=counts, ids=torch.cat(ids)) if ids else None


def _token_rewards(rows: Sequence[_Row], longest: int) -> Tensor | None:
    """Return [B, T] the rewards that environments gave at tokens; None if there are none."""
    if not any(row.trajectory.token_rewards for row in rows):
        return None
    rewards = torch.zeros(len(rows), longest)
    for number, row in enumerate(rows):
        begins = number == 0 or rows[number - 1].index != row.index
        ends = number == len(rows) - 1 or rows[number + 1].index != row.index
        for place, reward in row.trajectory.token_rewards:
            if (begins or place >= row.own.start) and (ends or place < rows[number + 1].own.start):
                rewards[number, row.position(place)] += reward
    return rewards


def _reward_parts(items: Sequence[Trajectory]) -> Tensor | None:
    """Return [B, K, 2]: value and weight of each reward part with a weight; None if there are none."""
    names = dict.fromkeys(name for item in items for name, weight in item.part_weights.items() if weight)
    if not names:
        return None
    parts = [[(_or_nan(item.reward_parts.get(n)), item.part_weights.get(n, 0.0)) for n in names] for item in items]
    return torch.tensor(parts, dtype=torch.float32)


def _baseline_rewards(items: Sequence[Trajectory]) -> Tensor | None:
    """Return [B] the baseline rewards of extra rollouts; None if there are none."""
    if all(item.baseline_reward is None for item in items):
        return None
    return torch.tensor([_or_nan(item.baseline_reward) for item in items], dtype=torch.float32)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def with_advantages(algorithm: Algorithm, rows: RowBatch, state: Mapping[str, float] = NOTHING) -> AdvantageBatch:
    """Compute the advantages of rows. Trajectories with several rows are joined first, so that each has one advantage.

    Args:
        algorithm: its `advantages` are called.
        rows: with the fields that its `advantage_inputs` names.
        state: the algorithm's state from the step before.
    """
    joined = concat_turns(rows)
    computed = algorithm.advantages(joined, state)
    if joined is rows:
        return computed
    names = {field.name for field in fields(AdvantageBatch)} - {field.name for field in fields(RowBatch)}
    tensors = {name: getattr(computed, name) for name in (*names, "loss_mask")}
    by_row = {name: split_turns(value, rows) for name, value in tensors.items() if isinstance(value, Tensor)}
    return AdvantageBatch(**(vars(rows) | by_row), state=computed.state)


def to_training_batches(
    batch: AdvantageBatch, algorithm: Algorithm, *, updates: int, epochs: int, seed: int, step: int
) -> Iterator[TrainingBatch]:
    """Yield the batches of the optimizer steps of one training step: `epochs` passes over the rows, `updates` batches
    each.

    The batches are of nearly equal size. Rows of one `row_unit` of the algorithm stay together, and so do the rows of
    a trajectory. With one update the order is unchanged; otherwise rows are shuffled, seeded by (seed, step, epoch).
    """
    if batch.rows == 0:
        return
    ids = batch.unit_ids(algorithm.row_unit)
    if ids is None and concat_turns(batch) is not batch:
        ids = batch.trajectory_index
    parts: Sequence[Tensor] = [torch.arange(batch.rows)]
    for epoch in range(epochs):
        if updates > 1:
            key = hashlib.blake2b(f"{seed}/{step}/{epoch}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key))
            units = torch.arange(batch.rows) if ids is None else torch.unique(ids)
            shuffled = units[torch.randperm(len(units), generator=generator)].tensor_split(updates)
            parts = shuffled if ids is None else [torch.isin(ids, part).nonzero()[:, 0] for part in shuffled]
        for index in parts:
            if not len(index):
                continue
            part = select_rows(batch, index)
            joined = concat_turns(part)
            weights = split_turns(algorithm.loss_weights(joined.loss_mask, joined.group_ids), part)
            yield TrainingBatch(**vars(part), loss_weights=weights)
