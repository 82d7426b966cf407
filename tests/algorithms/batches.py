"""Rows in float64 with everything an algorithm may read, and what a loss says of them."""

from __future__ import annotations

import torch
from torch import Tensor

from atomrl.batches import RowBatch, TrainingBatch, flat_fields, rows_from_fields, select_rows
from atomrl.data.rows import to_training_batches
from atomrl.protocols import Algorithm, Distributions, ModelOutputs

GROUP, LIMIT = 4, 8


def flat_rows(**fields) -> RowBatch:
    """Return rows from fields by their flat names (`flat_fields`)."""
    rows = rows_from_fields(fields)
    assert flat_fields(rows).keys() >= fields.keys(), "a field has another name"
    return rows


def changed(rows: RowBatch, **fields) -> RowBatch:
    """Replace fields by their flat names (`flat_fields`)."""
    return flat_rows(**(flat_fields(rows) | fields))


def make_rows(groups: int = 3, tokens: int = 11, seed: int = 0, rewards: Tensor | None = None) -> RowBatch:
    """`groups` prompts with four completions each; the last row of all has no trained token."""
    generator = torch.Generator().manual_seed(seed)
    count = groups * GROUP

    def numbers() -> Tensor:
        return torch.rand(count, tokens, generator=generator, dtype=torch.float64)

    prompts = torch.randint(1, 4, (groups,), generator=generator).repeat_interleave(GROUP)
    lengths = prompts + torch.randint(2, LIMIT + 1, (count,), generator=generator)
    position = torch.arange(tokens)[None]
    mask = (position >= prompts[:, None]) & (position < lengths[:, None])
    mask[-1] = False
    old = -2 * numbers()
    if rewards is None:
        rewards = torch.rand(count, generator=generator, dtype=torch.float64).round(decimals=2)
    parts = torch.stack([torch.rand(count, 2, generator=generator), torch.tensor([[1.0, 0.5]]).expand(count, 2)], -1)
    return flat_rows(
        tokens=torch.randint(0, 50, (count, tokens), generator=generator),
        loss_mask=mask,
        lengths=lengths,
        prompt_lengths=prompts,
        group_ids=torch.arange(groups).repeat_interleave(GROUP),
        rewards=rewards,
        truncated=lengths - prompts == LIMIT,
        rollout_logprobs=old + 0.2 * (numbers() - 0.5),
        old_logprobs=old,
        ref_logprobs=-2 * numbers(),
        old_entropy=2 * numbers(),
        old_squared_probs=old.exp() ** 2 + (1 - old.exp()) ** 2,
        reward_parts=parts,
        baseline_rewards=torch.rand(groups, generator=generator, dtype=torch.float64).repeat_interleave(GROUP),
        values=numbers(),
        teacher_logprobs=-2 * numbers(),
    )


def with_turns(rows: RowBatch, seed: int = 2) -> RowBatch:
    """The same as episodes of up to three turns: a reply of a token or two after the first and the second, which the
    model did not write; rewards of turns at their last tokens; two states that turns may begin in."""
    generator = torch.Generator().manual_seed(seed)
    mask, turn_ids = rows.loss_mask.clone(), torch.full(rows.tokens.shape, -1)
    state_ids, rewards = turn_ids.clone(), torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(rows.rows):
        places = mask[row].nonzero()[:, 0].tolist()
        cuts = [cut for cut in (2, 5) if cut < len(places) - 1]
        reply = {places[cut] for cut in cuts} | {places[cuts[-1] + 1] for _ in cuts[-1:] if cuts[-1] + 2 < len(places)}
        turn, own = 0, 0
        for place in places:
            if place in reply:
                mask[row, place] = False
                turn, own = turn + (own > 0), 0
                continue
            turn_ids[row, place], own = turn, own + 1
            draw = int(torch.randint(2, (1,), generator=generator)) if own == 1 else draw
            state_ids[row, place] = 10 * int(rows.group_ids[row]) + (1 + draw if turn else 0)
            later = [p for p in places if p > place and p not in reply and p == place + 1]
            if not later:
                rewards[row, place] = torch.rand(1, generator=generator, dtype=torch.float64)
    return changed(rows, loss_mask=mask, turn_ids=turn_ids, state_ids=state_ids, token_rewards=rewards)


def moved_logprobs(rows: RowBatch, seed: int = 1) -> Tensor:
    """Log-probs of a policy that has moved, by up to 0.6 nats a token: some ratios are out of every bound."""
    assert rows.old_logprobs is not None
    generator = torch.Generator().manual_seed(seed)
    return rows.old_logprobs + 1.2 * (torch.rand(rows.tokens.shape, generator=generator, dtype=torch.float64) - 0.5)


def training_batch(algorithm: Algorithm, rows: RowBatch) -> TrainingBatch:
    """All rows in one optimizer step."""
    credited = algorithm.advantages(rows)
    (batch,) = to_training_batches(credited, algorithm, updates=1, epochs=1, seed=0, step=1)
    return batch


def three_values(logprobs: Tensor, mask: Tensor) -> Distributions:
    """Distributions over three tokens made of a number each, of those [B, T] that are masked."""
    logprobs, places = logprobs[mask], mask.flatten().nonzero()[:, 0]
    states = torch.stack([logprobs, -logprobs, torch.zeros_like(logprobs)], -1)
    return Distributions(states, torch.eye(3, dtype=states.dtype), places)


def loss_gradient(
    algorithm: Algorithm, batch: TrainingBatch, logprobs: Tensor, parts: list[list[int]] | None = None
) -> tuple[float, Tensor]:
    """The loss and its gradient, when the batch goes through in parts.

    The gradient is that of the log-probs, [B, T]; where the loss is also made of values and entropies, [B, T, 3] of
    all. Values have moved by up to 0.5 from those of the start of the step: some are out of the clip.
    """
    given = {"logprobs": logprobs}
    if "values" in algorithm.outputs:
        given["values"] = batch.values + 0.5 * (40 * batch.values).sin()
    if "entropy" in algorithm.outputs:
        given["entropy"] = batch.old_entropy[:, : batch.tokens.shape[1]]
    if "teacher_distributions" in algorithm.outputs:
        given["distributions"] = logprobs
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    total = 0.0
    for part in parts or [list(range(batch.rows))]:
        index = torch.tensor(part)
        micro = select_rows(batch, index)
        width = micro.tokens.shape[1]
        parts = {name: leaf[index, :width] for name, leaf in leaves.items()}
        if "distributions" in parts:
            parts["distributions"] = three_values(parts["distributions"], micro.loss_mask)
            parts["teacher_distributions"] = three_values(micro.teacher_logprobs, micro.loss_mask)
        result = algorithm.loss(ModelOutputs(**parts), micro)
        result.loss.backward()
        total += result.loss.item()
    gradients = [leaf.grad for leaf in leaves.values()]
    assert all(gradient is not None for gradient in gradients)
    return total, gradients[0] if len(gradients) == 1 else torch.stack(gradients, -1)
