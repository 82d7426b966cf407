"""From ragged completions to tensor rows, and from rows to the batches of single optimizer steps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from atomrl.protocols import Algorithm
from atomrl.stages import AdvantageBatch, Completion, RewardBatch, RowBatch, TrainingBatch, select_rows


def trained_completions(rewarded: RewardBatch, max_row_tokens: int | None = None) -> list[tuple[int, int]]:
    """(prompt, completion) of each row that `to_rows` makes, in its order."""
    return [
        (group, index)
        for group, prompt in enumerate(rewarded.prompt_token_ids)
        for index, completion in enumerate(rewarded.completions[group])
        if rewarded.rewards[group][index] is not None
        and completion.token_ids
        and (max_row_tokens is None or len(prompt) < max_row_tokens)
    ]


def to_rows(rewarded: RewardBatch, max_row_tokens: int | None = None) -> RowBatch:
    """Flatten and pad, once. A completion without a reward or without a token becomes no row.

    Args:
        rewarded: P prompts with G completions each.
        max_row_tokens: rows are cut to this many tokens; a row of which nothing is left to train is dropped.

    Returns:
        B <= P*G rows, right-padded with token 0 (a causal model never looks at it).
    """
    rows = []
    for group, index in trained_completions(rewarded, max_row_tokens):
        prompt, completion = rewarded.prompt_token_ids[group], rewarded.completions[group][index]
        tokens = (*prompt, *completion.token_ids)[:max_row_tokens]
        rows.append((group, len(prompt), tokens, completion, rewarded.rewards[group][index]))
    longest = max((len(tokens) for _, _, tokens, _, _ in rows), default=0)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    loss_mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    has_logprobs = all(completion.logprobs is not None for _, _, _, completion, _ in rows)
    rollout_logprobs = torch.zeros(len(rows), longest) if has_logprobs else None
    for index, (_, start, row_tokens, completion, _) in enumerate(rows):
        end = len(row_tokens)
        tokens[index, :end] = torch.tensor(row_tokens)
        loss_mask[index, start:end] = torch.tensor(completion.loss_mask[: end - start])
        if rollout_logprobs is not None and completion.logprobs is not None:
            rollout_logprobs[index, start:end] = torch.tensor(completion.logprobs[: end - start])
    loss_mask[:, :1] = False  # nothing predicts the first token
    return RowBatch(
        tokens=tokens,
        loss_mask=loss_mask,
        lengths=torch.tensor([len(row[2]) for row in rows], dtype=torch.long),
        prompt_lengths=torch.tensor([row[1] for row in rows], dtype=torch.long),
        group_ids=torch.tensor([row[0] for row in rows], dtype=torch.long),
        rewards=torch.tensor([row[4] for row in rows], dtype=torch.float32),
        truncated=torch.tensor([row[3].finish_reason == "length" for row in rows], dtype=torch.bool),
        rollout_logprobs=rollout_logprobs,
        kept_ids=_kept_ids([(row[1], len(row[2]), row[3]) for row in rows], longest),
        reward_parts=_reward_parts(rewarded, max_row_tokens),
        baseline_rewards=None
        if rewarded.baseline_rewards is None
        else torch.tensor([_or_nan(rewarded.baseline_rewards[row[0]]) for row in rows], dtype=torch.float32),
    )


def _kept_ids(rows: list[tuple[int, int, Completion]], longest: int) -> Tensor | None:
    """[B, T, K] what each token was drawn from, of rows of (start, end, completion); None where one does not tell."""
    if not rows or any(completion.kept_ids is None for _, _, completion in rows):
        return None
    parts = [(completion.kept_ids or ())[: end - start] for start, end, completion in rows]
    widest = max((len(ids) for part in parts for ids in part), default=0) or 1
    kept = torch.full((len(rows), longest, widest), -1, dtype=torch.int32)
    for index, ((start, end, _), part) in enumerate(zip(rows, parts, strict=True)):
        padded = [[*ids, *(-1,) * (widest - len(ids))] for ids in part]
        kept[index, start:end] = torch.tensor(padded, dtype=torch.int32).view(len(part), widest)
    return kept


def _reward_parts(rewarded: RewardBatch, max_row_tokens: int | None) -> Tensor | None:
    """[B, K, 2] value and weight of each part that enters the sum."""
    names = [name for name in rewarded.part_weights if rewarded.part_weights[name] and name in rewarded.reward_parts]
    if not names:
        return None
    parts = [
        [(_or_nan(rewarded.reward_parts[name][group][index]), rewarded.part_weights[name]) for name in names]
        for group, index in trained_completions(rewarded, max_row_tokens)
    ]
    return torch.tensor(parts, dtype=torch.float32).view(len(parts), len(names), 2)


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
        for index in _split(credited, algorithm.row_unit, updates, f"{seed}/{step}/{epoch}"):
            part = select_rows(credited, index)
            by_group = (part.group_ids,) if algorithm.row_unit == "group" else ()
            yield TrainingBatch(**vars(part), loss_weights=algorithm.weights(part.loss_mask, *by_group))


def _split(rows: RowBatch, unit: str, parts: int, key: str) -> list[Tensor]:
    if parts == 1:
        return [torch.arange(rows.rows)]
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest()))
    if unit == "row":
        shuffled = torch.randperm(rows.rows, generator=generator)
        return [part for part in shuffled.tensor_split(parts) if len(part)]
    units = rows.group_ids.unique()
    shuffled = units[torch.randperm(len(units), generator=generator)]
    chosen = [torch.isin(rows.group_ids, part).nonzero()[:, 0] for part in shuffled.tensor_split(parts)]
    return [part for part in chosen if len(part)]
