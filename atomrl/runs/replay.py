"""A recorded step under another objective: the same tokens and log-probs, other losses and gradients."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from atomrl.batches import RowBatch, select_rows
from atomrl.data.rows import to_training_batches, with_advantages
from atomrl.objective import PolicyObjective
from atomrl.protocols import ModelOutputs
from atomrl.reading.tokens import TokenTable

OUTPUTS = {"logprobs", "entropy", "values"}
"""What an objective may want of the forward pass. Of a critic's values there is no record: its loss is left out."""


@dataclass(frozen=True)
class Replayed:
    """What an objective makes of the recorded tokens; [N] each, in the record's order."""

    loss: Tensor
    """The token's part of the loss."""
    gradient: Tensor
    """Of the loss in the token's log-prob."""
    log_ratio: Tensor
    clipped: Tensor
    advantages: Tensor
    mask: Tensor

    def summary(self) -> dict[str, float]:
        """Sums over the tokens that are trained on."""
        gradient = self.gradient[self.mask]
        return {
            "loss": float(self.loss.sum()),
            "norm of the gradient": float(gradient.norm()),
            "mean |advantage|": float(self.advantages[self.mask].abs().mean()) if self.mask.any() else 0.0,
            "clipped tokens": float(self.clipped.sum()),
            "tokens without gradient": float((gradient == 0).sum()),
        }


def replay(table: TokenTable, algorithm: PolicyObjective) -> Replayed:
    """Advantages, loss and gradient of the recorded rows as if they were the whole step.

    Each row is in the update that the record is of, with the log-probs that it had there. An adaptive KL coefficient
    is that of the end of the step. The gradient is that through the log-probs, without an entropy bonus's own.

    Args:
        table: of a step.
        algorithm: resolved.

    Raises:
        ValueError: the objective reads what the run did not compute.
    """
    rows, outputs = rows_of(table)
    _check(algorithm, rows, outputs)
    batch = replace(with_advantages(algorithm, rows, table.state), state=dict(table.state))
    updates = torch.as_tensor(table.rows["update"])
    found = {name: torch.zeros(rows.tokens.shape) for name in ("loss", "gradient", "log_ratio", "clipped")}
    for update in updates.unique():
        index = (updates == update).nonzero()[:, 0]
        (part,) = to_training_batches(select_rows(batch, index), algorithm, updates=1, epochs=1, seed=0, step=0)
        width = part.tokens.shape[1]
        given: dict[str, Any] = {name: values[index, :width].requires_grad_() for name, values in outputs.items()}
        part = replace(part, loss_weights=part.loss_weights.requires_grad_())
        forward = ModelOutputs(**given)
        algorithm.loss(forward, part).loss.backward()
        weights, logprobs = part.loss_weights, given["logprobs"]
        by_token = dict(algorithm.by_token(forward, part))
        by_token["loss"] = weights.detach() * (0.0 if weights.grad is None else weights.grad)
        by_token["gradient"] = torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad
        for name, whole in found.items():
            whole[index, :width] = by_token[name].detach().float()
    inside = _inside(rows)
    return Replayed(
        **{name: whole[inside] if name != "clipped" else whole[inside] > 0 for name, whole in found.items()},
        advantages=batch.advantages[inside],
        mask=batch.loss_mask[inside],
    )


def rows_of(table: TokenTable) -> tuple[RowBatch, dict[str, Tensor]]:
    """The rows as the algorithm got them, and what the forward pass of their update gave.

    Raises:
        ValueError: the update gave nothing: the algorithm made it itself.
    """
    if "logprobs" not in table.tokens:
        raise ValueError(f"the record of step {table.step} has no log-probs of the update, and cannot be replayed")
    longest = int(table.rows["lengths"].max())
    found: dict[str, Any] = {}
    for field in fields(RowBatch):
        if field.name in table.rows:
            found[field.name] = _widened(torch.as_tensor(table.rows[field.name]))
        elif field.name in table.tokens:
            found[field.name] = _padded(table, field.name, longest)
    tokens = found["tokens"]
    for row, prompt in enumerate(table.rows["prompt"]):
        tokens[row, : len(table.prompts[prompt])] = torch.as_tensor(table.prompts[prompt])
    outputs: dict[str, Tensor] = {
        name: _padded(table, name, longest) for name in ("logprobs", "entropy") if name in table.tokens
    }
    # Where a step has one update, the policy at its start is the one of the update.
    found.setdefault("old_logprobs", outputs["logprobs"].clone())
    return RowBatch(**found), outputs


def _padded(table: TokenTable, name: str, longest: int) -> Tensor:
    """A column of tokens as [R, T]; what stands before the completion is 0 (of turns and states: none)."""
    column = _widened(torch.as_tensor(table.tokens[name]))
    whole = torch.full((len(table), longest), -1 if name in ("turn_ids", "state_ids") else 0, dtype=column.dtype)
    for row in range(len(table)):
        own = column[table.span(row)]
        start = int(table.rows["prompt_lengths"][row])
        whole[row, start : start + len(own)] = own
    return whole


def _widened(column: Tensor) -> Tensor:
    return column.long() if column.dtype == torch.int32 else column.clone()


def _inside(rows: RowBatch) -> Tensor:
    columns = torch.arange(rows.tokens.shape[1])
    return (columns >= rows.prompt_lengths[:, None]) & (columns < rows.lengths[:, None])


def _check(algorithm: PolicyObjective, rows: RowBatch, outputs: dict[str, Tensor]) -> None:
    wanted = set(algorithm.needs) | (set(algorithm.outputs) & {"entropy"})
    missing = sorted(name for name in wanted if getattr(rows, name, None) is None and name not in outputs)
    missing += sorted(set(algorithm.outputs) - OUTPUTS)
    if missing:
        raise ValueError(
            f"this objective reads {', '.join(missing)}, which the run did not compute: there is no record of it"
        )
