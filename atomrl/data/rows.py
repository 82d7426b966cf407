"""From ragged trajectories to tensor rows, and from rows to the batches of single optimizer steps."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atomrl.batches import AdvantageBatch, RowBatch, TrainingBatch, select_rows
from atomrl.protocols import Algorithm
from atomrl.types import RaggedIds, Segment, Trajectory, by_group


@dataclass(frozen=True)
class _Row:
    """A trajectory that is trained on, as far as the limit goes."""

    index: int
    """Among the step's trajectories."""
    trajectory: Trajectory
    versions: list[int]
    """Of the weights that wrote each token; -1 where the model did not."""
    logprobs: list[float]
    """From the engine; 0 where there is none."""
    turns: list[int]
    """Of each token; -1 where the model did not write it."""

    @property
    def written(self) -> list[Segment]:
        """What the model wrote."""
        return [part for part in self.trajectory.segments if part.origin == "model" and part.token_ids]


def to_rows(
    trajectories: Sequence[Trajectory], max_row_tokens: int | None = None, version: int | None = None
) -> RowBatch:
    """Flatten and pad, once. A trajectory without a reward, or without a token of the model, becomes no row.

    Trained are the tokens that the model wrote; those of the prompt and of an environment are masked. The batch says
    which trajectory each row is (`trajectory_index`).

    Args:
        trajectories: of a step; those with one `prompt_id` are a group, wherever they stand.
        max_row_tokens: rows are cut to this many tokens, and are then `truncated`; a row of which nothing is left to
            train is dropped. What an environment gave beyond the cut stands at the last token.
        version: of the trainer's weights, which says how stale each token is.

    Returns:
        B rows, right-padded with token 0 (a causal model never looks at it).
    """
    groups = {prompt_id: number for number, prompt_id in enumerate(by_group(trajectories))}
    made = (_row(index, item, max_row_tokens) for index, item in enumerate(trajectories))
    rows = [row for row in made if row is not None]
    items, lengths = [row.trajectory for row in rows], [len(row.versions) for row in rows]
    longest = max(lengths, default=0)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    versions = torch.full((len(rows), longest), -1, dtype=torch.int32)
    logprobs = torch.zeros(len(rows), longest)
    for number, row in enumerate(rows):
        tokens[number, : lengths[number]] = torch.tensor(row.trajectory.token_ids[: lengths[number]])
        versions[number, : lengths[number]] = torch.tensor(row.versions)
        logprobs[number, : lengths[number]] = torch.tensor(row.logprobs)
    turn_ids, state_ids = _turns(rows, groups, longest)
    loss_mask = versions >= 0
    loss_mask[:, :1] = False  # nothing predicts the first token
    unfinished = [
        item.finish_reason in ("length", "abort") or length < item.prompt_tokens + item.response_tokens
        for item, length in zip(items, lengths, strict=True)
    ]
    return RowBatch(
        tokens=tokens,
        loss_mask=loss_mask,
        lengths=torch.tensor(lengths, dtype=torch.long),
        prompt_lengths=_integers(item.prompt_tokens for item in items),
        group_ids=_integers(groups[item.prompt_id] for item in items),
        rewards=torch.tensor([item.reward for item in items], dtype=torch.float32),
        truncated=torch.tensor(unfinished, dtype=torch.bool),
        response_lengths=_integers(item.response_tokens for item in items),
        trajectory_index=_integers(row.index for row in rows),
        staleness=None if version is None else (version - versions).masked_fill(versions < 0, 0),
        token_rewards=_token_rewards(rows, longest),
        turn_ids=turn_ids,
        state_ids=state_ids,
        rollout_logprobs=None if any(part.logprobs is None for row in rows for part in row.written) else logprobs,
        candidates=_candidates(rows, longest),
        reward_parts=_reward_parts(items),
        baseline_rewards=_baseline_rewards(items),
    )


def _row(index: int, trajectory: Trajectory, limit: int | None) -> _Row | None:
    """A trajectory as a row; None where it has no reward, or nothing of it is left to train."""
    versions: list[int] = []
    logprobs: list[float] = []
    for segment in trajectory.segments:
        size, written = len(segment.token_ids), segment.origin == "model"
        versions += [segment.policy_version or 0 if written else -1] * size
        logprobs += segment.logprobs if written and segment.logprobs is not None else [0.0] * size
    if trajectory.reward is None or max(versions[:limit], default=-1) < 0:
        return None
    return _Row(index, trajectory, versions[:limit], logprobs[:limit], turn_numbers(trajectory)[:limit])


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
        turn_ids[number, : len(row.turns)] = torch.tensor(row.turns)
        tokens, group = row.trajectory.token_ids, groups[row.trajectory.prompt_id]
        shown, start = tuple[int, ...](), len(row.trajectory.segments[0].token_ids)
        for place, turn in enumerate(row.turns):
            if turn >= 0:
                shown = tokens[start:place] or shown
                start = place + 1
                state_ids[number, place] = states.setdefault((group, shown), len(states))
    return turn_ids, state_ids


def _integers(numbers: Iterator[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.long)


def _candidates(rows: Sequence[_Row], longest: int) -> RaggedIds | None:
    """Of [B, T], what each token was drawn from; None where the engine did not tell it of every token."""
    counts = torch.zeros(len(rows), longest, dtype=torch.int32)
    ids = []
    for number, row in enumerate(rows):
        found = [part.candidates for part in row.written if part.candidates is not None]
        if len(found) < len(row.written):
            return None
        own = torch.tensor(row.versions) >= 0
        counts[number, : len(own)][own] = torch.cat([each.counts for each in found])[: int(own.sum())]
        ids.append(torch.cat([each.ids for each in found])[: int(counts[number].sum())])
    return RaggedIds(counts=counts, ids=torch.cat(ids)) if ids else None


def _token_rewards(rows: Sequence[_Row], longest: int) -> Tensor | None:
    """[B, T] of environments; None where they gave nothing."""
    if not any(row.trajectory.token_rewards for row in rows):
        return None
    rewards = torch.zeros(len(rows), longest)
    for number, row in enumerate(rows):
        for place, reward in row.trajectory.token_rewards:
            rewards[number, min(place, len(row.versions) - 1)] += reward
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
        for index in _split(credited.rows, credited.unit_ids(algorithm.row_unit), updates, f"{seed}/{step}/{epoch}"):
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
