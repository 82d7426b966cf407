"""From ragged trajectories to tensor rows, and from rows to the batches of single optimizer steps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atomrl.protocols import Algorithm
from atomrl.types import (
    AdvantageBatch,
    RaggedIds,
    RowBatch,
    Segment,
    TrainingBatch,
    Trajectory,
    by_group,
    select_rows,
    unit_ids,
)


@dataclass(frozen=True)
class _Row:
    """A trajectory that is trained on."""

    index: int
    """Among the step's trajectories."""
    trajectory: Trajectory
    reward: float
    group: int
    segments: tuple[tuple[int, Segment, int], ...]
    """(place in the row, segment, how many of its tokens the row has)."""
    sampled: int
    """Tokens of the whole trajectory."""

    @property
    def length(self) -> int:
        start, _, size = self.segments[-1]
        return start + size

    @property
    def model_segments(self) -> list[tuple[int, Segment, int]]:
        return [part for part in self.segments if part[1].origin == "model"]


def to_rows(trajectories: Sequence[Trajectory], max_row_tokens: int | None = None) -> RowBatch:
    """Flatten and pad, once. A trajectory without a reward, or without a token of the model, becomes no row.

    Trained are the tokens that the model wrote; those of the prompt and of an environment are masked. The batch says
    which trajectory each row is (`trajectory_index`).

    Args:
        trajectories: of a step; those with one `prompt_id` are a group, wherever they stand.
        max_row_tokens: rows are cut to this many tokens, and are then `truncated`; a row of which nothing is left to
            train is dropped. What an environment gave beyond the cut stands at the last token.

    Returns:
        B rows, right-padded with token 0 (a causal model never looks at it).
    """
    groups = {prompt_id: number for number, prompt_id in enumerate(by_group(trajectories))}
    made = (_row(index, item, groups[item.prompt_id], max_row_tokens) for index, item in enumerate(trajectories))
    rows = [row for row in made if row is not None]
    longest = max((row.length for row in rows), default=0)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    versions = torch.full((len(rows), longest), -1, dtype=torch.int32)
    logprobs = torch.zeros(len(rows), longest)
    for number, row in enumerate(rows):
        for start, segment, size in row.segments:
            place = slice(start, start + size)
            tokens[number, place] = torch.tensor(segment.token_ids[:size])
            if segment.origin == "model":
                versions[number, place] = segment.policy_version or 0
                logprobs[number, place] = torch.tensor((segment.logprobs or (0.0,) * size)[:size])
    loss_mask = versions >= 0
    loss_mask[:, :1] = False  # nothing predicts the first token
    written = [segment for row in rows for _, segment, _ in row.model_segments]
    unfinished = [row.trajectory.finish_reason in ("length", "abort") or row.length < row.sampled for row in rows]
    return RowBatch(
        tokens=tokens,
        loss_mask=loss_mask,
        lengths=_integers(row.length for row in rows),
        prompt_lengths=_integers(row.trajectory.prompt_tokens for row in rows),
        group_ids=_integers(row.group for row in rows),
        rewards=torch.tensor([row.reward for row in rows], dtype=torch.float32),
        truncated=torch.tensor(unfinished, dtype=torch.bool),
        response_lengths=_integers(row.trajectory.response_tokens for row in rows),
        trajectory_index=_integers(row.index for row in rows),
        policy_versions=versions,
        token_rewards=_token_rewards(rows, longest),
        rollout_logprobs=None if any(segment.logprobs is None for segment in written) else logprobs,
        candidates=_candidates(rows, longest),
        reward_parts=_reward_parts(rows),
        baseline_rewards=_baseline_rewards(rows),
    )


def _row(index: int, trajectory: Trajectory, group: int, limit: int | None) -> _Row | None:
    """A trajectory as a row; None where it has no reward, or nothing of it is left to train."""
    if trajectory.reward is None:
        return None
    segments, start = [], 0
    for segment in trajectory.segments:
        size = len(segment.token_ids) if limit is None else min(len(segment.token_ids), limit - start)
        if size > 0:
            segments.append((start, segment, size))
        start += len(segment.token_ids)
    if not any(segment.origin == "model" for _, segment, _ in segments):
        return None
    return _Row(index, trajectory, trajectory.reward, group, tuple(segments), start)


def _integers(numbers: Iterator[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.long)


def _candidates(rows: Sequence[_Row], longest: int) -> RaggedIds | None:
    """Of [B, T], what each token was drawn from; None where the engine did not tell it of every token."""
    if not rows or any(segment.candidates is None for row in rows for _, segment, _ in row.model_segments):
        return None
    counts = torch.zeros(len(rows), longest, dtype=torch.int32)
    ids = []
    for number, row in enumerate(rows):
        for start, segment, size in row.model_segments:
            if segment.candidates is not None:
                part = segment.candidates.counts[:size]
                counts[number, start : start + size] = part
                ids.append(segment.candidates.ids[: int(part.sum())])
    return RaggedIds(counts=counts, ids=torch.cat(ids))


def _token_rewards(rows: Sequence[_Row], longest: int) -> Tensor | None:
    """[B, T] of environments; None where they gave nothing."""
    if not any(row.trajectory.token_rewards for row in rows):
        return None
    rewards = torch.zeros(len(rows), longest)
    for number, row in enumerate(rows):
        for place, reward in row.trajectory.token_rewards:
            rewards[number, min(place, row.length - 1)] += reward
    return rewards


def _reward_parts(rows: Sequence[_Row]) -> Tensor | None:
    """[B, K, 2] value and weight of each part that enters the sum."""
    items = [row.trajectory for row in rows]
    names = dict.fromkeys(name for item in items for name, weight in item.part_weights.items() if weight)
    if not names:
        return None
    parts = [[(_or_nan(item.reward_parts.get(n)), item.part_weights.get(n, 0.0)) for n in names] for item in items]
    return torch.tensor(parts, dtype=torch.float32)


def _baseline_rewards(rows: Sequence[_Row]) -> Tensor | None:
    """[B] of extra rollouts; None where there were none."""
    found = [row.trajectory.baseline_reward for row in rows]
    if all(reward is None for reward in found):
        return None
    return torch.tensor([_or_nan(reward) for reward in found], dtype=torch.float32)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def to_training_batches(
    credited: AdvantageBatch, algorithm: Algorithm, *, updates: int, epochs: int, seed: int, step: int
) -> Iterator[TrainingBatch]:
    """The optimizer steps of one step of the loop: `epochs` passes over the rows, each in `updates` parts.

    The parts are as even as can be; what the algorithm's `row_unit` names stays together. With one part the order is
    left alone, else it is shuffled by (seed, step, epoch).
    """
    if credited.rows == 0:
        return
    for epoch in range(epochs):
        for index in _split(credited.rows, unit_ids(credited, algorithm.row_unit), updates, f"{seed}/{step}/{epoch}"):
            part = select_rows(credited, index)
            yield TrainingBatch(**vars(part), loss_weights=algorithm.loss_weights(part.loss_mask, part.group_ids))


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
