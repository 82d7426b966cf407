"""Replay a recorded step of a run under another objective: loss and gradient of each token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atomrl.batches import RowBatch, rows_from_fields, select_rows
from atomrl.config import ConfigError, load_config, merge_trees, parse_overrides, read_tree
from atomrl.data.rows import to_training_batches, with_advantages
from atomrl.objectives import PolicyObjective
from atomrl.protocols import ModelOutputs
from atomrl.tracking.reading import load_run
from atomrl.tracking.reading.token_records import TokenTable, recorded_steps

OUTPUTS = {"logprobs", "entropy", "values"}
"""Outputs of the forward pass that an objective may use. A critic's values are not recorded: its loss is left out."""


@dataclass(frozen=True)
class Replayed:
    """Per-token results of an objective; [N] each, in the record's order."""

    loss: Tensor
    """Contribution of the token to the loss."""
    gradient: Tensor
    """Derivative of the loss with respect to the token's log-prob."""
    log_ratio: Tensor
    clipped: Tensor
    advantages: Tensor
    mask: Tensor

    def summary(self) -> dict[str, float]:
        """Return statistics over the trained tokens, by name."""
        gradient = self.gradient[self.mask]
        return {
            "loss": float(self.loss.sum()),
            "norm of the gradient": float(gradient.norm()),
            "mean |advantage|": float(self.advantages[self.mask].abs().mean()) if self.mask.any() else 0.0,
            "clipped tokens": float(self.clipped.sum()),
            "tokens without gradient": float((gradient == 0).sum()),
        }


def replay(table: TokenTable, algorithm: PolicyObjective) -> Replayed:
    """Compute advantages, loss and gradient of the recorded rows as if they were the whole step.

    Each row stays in its recorded update, with its log-probs there. An adaptive KL coefficient has its value at the end
    of the step. The gradient is the part through the log-probs, without that of an entropy bonus.

    Args:
        table: recorded tokens of a step.
        algorithm: the resolved objective.

    Raises:
        ValueError: the objective needs inputs that the run did not compute.
    """
    rows, outputs = rows_of(table)
    _check(algorithm, rows, outputs)
    batch = replace(with_advantages(algorithm, rows, table.state), state=dict(table.state))
    updates = torch.as_tensor(table.rows["update"])
    columns = {name: torch.zeros(rows.tokens.shape) for name in ("loss", "gradient", "log_ratio", "clipped")}
    for update in updates.unique():
        index = (updates == update).nonzero()[:, 0]
        (part,) = to_training_batches(select_rows(batch, index), algorithm, updates=1, epochs=1, seed=0, step=0)
        width = part.tokens.shape[1]
        leaves: dict[str, Any] = {name: values[index, :width].requires_grad_() for name, values in outputs.items()}
        part = replace(part, loss_weights=part.loss_weights.requires_grad_())
        forward = ModelOutputs(**leaves)
        result = algorithm.loss(forward, part)
        result.loss.backward()
        weights, logprobs = part.loss_weights, leaves["logprobs"]
        records = dict(result.token_records)
        # The loss is linear in its weights, so a token's contribution is its weight times the derivative by it.
        records["loss"] = weights.detach() * (0.0 if weights.grad is None else weights.grad)
        records["gradient"] = torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad
        for name, column in columns.items():
            column[index, :width] = records[name].detach().float()
    positions = torch.arange(rows.tokens.shape[1])
    inside = (positions >= rows.prompt_lengths[:, None]) & (positions < rows.lengths[:, None])
    return Replayed(
        **{name: column[inside] if name != "clipped" else column[inside] > 0 for name, column in columns.items()},
        advantages=batch.advantages[inside],
        mask=batch.loss_mask[inside],
    )


def rows_of(table: TokenTable) -> tuple[RowBatch, dict[str, Tensor]]:
    """Rebuild the algorithm's rows and the outputs of the forward pass of their update.

    Raises:
        ValueError: no outputs were recorded, because the algorithm has an update of its own.
    """
    if "logprobs" not in table.tokens:
        raise ValueError(f"the record of step {table.step} has no log-probs of the update and cannot be replayed")
    longest = int(table.rows["lengths"].max())
    columns = {name: _widened(torch.as_tensor(column)) for name, column in table.rows.items()}
    columns |= {name: _padded(table, name, longest) for name in table.tokens}
    tokens = columns["tokens"]
    for row, prompt in enumerate(table.rows["prompt"]):
        tokens[row, : len(table.prompts[prompt])] = torch.as_tensor(table.prompts[prompt])
    outputs: dict[str, Tensor] = {name: columns[name] for name in ("logprobs", "entropy") if name in columns}
    # With one update per step the policy is the old policy.
    columns.setdefault("old_logprobs", outputs["logprobs"].clone())
    return rows_from_fields(columns), outputs


def _padded(table: TokenTable, name: str, longest: int) -> Tensor:
    """Pad a token column to [R, T]. Prompt and padding are 0 (-1 in `turn_ids` and `state_ids`)."""
    column = _widened(torch.as_tensor(table.tokens[name]))
    padded = torch.full((len(table), longest), -1 if name in ("turn_ids", "state_ids") else 0, dtype=column.dtype)
    for row in range(len(table)):
        own = column[table.span(row)]
        start = int(table.rows["prompt_lengths"][row])
        padded[row, start : start + len(own)] = own
    return padded


def _widened(column: Tensor) -> Tensor:
    return column.long() if column.dtype == torch.int32 else column.clone()


def _check(algorithm: PolicyObjective, rows: RowBatch, outputs: dict[str, Tensor]) -> None:
    inputs = set(algorithm.needs) | (set(algorithm.outputs) & {"entropy"})
    missing = sorted(name for name in inputs if getattr(rows, name, None) is None and name not in outputs)
    missing += sorted(set(algorithm.outputs) - OUTPUTS)
    if missing:
        raise ValueError(f"this objective reads {', '.join(missing)}, which the run did not record")


def objectives(folder: Path, overrides: list[str]) -> tuple[PolicyObjective, PolicyObjective]:
    """Return the run's objective, and the changed one.

    Raises:
        ConfigError: a change is not of `algorithm`, or the objective is not a policy objective.
    """
    changes = parse_overrides(overrides)
    if set(changes) - {"algorithm"}:
        wrong = ", ".join(sorted(set(changes) - {"algorithm"}))
        raise ConfigError(
            f"{wrong}: a replay can only change keys of `algorithm`; other keys would change the rollouts"
        )
    path, resolved = folder / "config.yaml", []
    tree = {key: value for key, value in read_tree(path, {}).items() if key != "tracking"}  # of no use for a replay
    axes = changes.get("algorithm", {})
    # With another name start from its own axes: the run's config lists all of its axes, which would override them.
    changed = {**tree, "algorithm": axes} if "name" in axes else merge_trees(tree, changes)
    for config_tree in (tree, changed):
        config = load_config(config_tree, name=str(path))
        if not isinstance(config.algorithm, PolicyObjective):
            raise ConfigError(f"{config.algorithm.name} has no per-token loss; only policy gradients can be replayed")
        resolved.append(config.algorithm.resolved(max_completion_tokens=config.rollout.max_completion_tokens))
    before, after = resolved
    if before.shaping.mask_truncated and not after.shaping.mask_truncated:
        raise ConfigError("algorithm.shaping.mask_truncated: the run masked those tokens and has no log-probs for them")
    return before, after


def recorded(folder: Path, step: int | None) -> TokenTable:
    """Read the recorded tokens of a step; None: of the newest step with recorded tokens.

    Raises:
        ValueError: the run, or the step, has no recorded tokens.
    """
    steps = list(recorded_steps(folder / "rollouts"))
    if not steps:
        raise ValueError(f"{folder} has no recorded tokens: train with tracking.tokens of at least 1")
    table = load_run(folder).tokens(steps[-1] if step is None else step)
    if table is None:
        recorded = ", ".join(map(str, steps[:5])) + (f", ..., {steps[-1]}" if len(steps) > 5 else "")
        raise ValueError(f"step {step} has no recorded tokens; steps that have: {recorded}")
    return table


def by_token(table: TokenTable, one: Replayed, other: Replayed) -> list[dict[str, Any]]:
    """Return one row per token with its recorded values and those under both objectives."""
    columns: dict[str, Any] = {
        "token_id": table.tokens["tokens"], "trained": one.mask, "logprob": table.tokens["logprobs"],
        "log_ratio": one.log_ratio, "advantage": one.advantages, "loss": one.loss, "gradient": one.gradient,
        "clipped": one.clipped, "changed_log_ratio": other.log_ratio, "changed_advantage": other.advantages,
        "changed_loss": other.loss, "changed_gradient": other.gradient, "changed_clipped": other.clipped,
    }  # fmt: skip
    lists = {name: values.tolist() for name, values in columns.items()}
    rows = []
    for row, completion in enumerate(table.rows["trajectory_index"].tolist()):
        span = table.span(row)
        for index in range(span.start, span.stop):
            position = {"step": table.step, "completion": completion, "token": index - span.start}
            rows.append(position | {name: values[index] for name, values in lists.items()})
    return rows
