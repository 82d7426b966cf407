"""Recompute a recorded step with another objective, and recorded completions with another reward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

from atomrl.batches import RowBatch, rows_from_fields, select_rows
from atomrl.data.rows import to_training_batches, with_advantages
from atomrl.objectives import PolicyObjective
from atomrl.protocols import ModelOutputs
from atomrl.tracking.reading.rollouts import TokenTable

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


# --------------------------------------------------------------------------------------------------------------------
# Another reward on recorded completions: how the rankings within groups change, and what hacks would earn.

Row = Mapping[str, Any]
MAX_PROMPTS = 200
"""Maximum number of prompts on which hacks are tried."""


@dataclass(frozen=True)
class Rankings:
    """Changes of the order of completions within groups, from one reward to another."""

    groups: int
    pairs: int
    """Pairs of completions of a group that have both rewards."""
    turned: int
    """Pairs whose order is reversed."""
    parted: int
    """Pairs that were equal and no longer are."""
    joined: int
    """Pairs that were different and now are equal."""
    gained: int
    """Groups that had no signal (equal rewards) and now have one."""
    lost: int
    """Groups that had a signal and no longer do."""
    other_best: int
    """Groups whose best completions have changed completely."""


def rankings(rows: Sequence[Row], before: Sequence[float | None], after: Sequence[float | None]) -> Rankings:
    """Count the changes of rankings from one reward to another. Rows have `step` and `prompt_id`.

    Example:
        >>> rows = [{"step": 1, "prompt_id": "a"}] * 2
        >>> rankings(rows, [1.0, 0.0], [0.0, 1.0]).turned
        1
    """
    counts: Counter[str] = Counter()
    for places in groups_of(rows):
        pairs = [(a, b) for place in places if (a := before[place]) is not None and (b := after[place]) is not None]
        if len(pairs) < 2:
            continue
        counts["groups"] += 1
        for (a, b), (c, d) in combinations(pairs, 2):
            counts["pairs"] += 1
            counts["turned"] += (a - c) * (b - d) < 0
            counts["parted"] += a == c and b != d
            counts["joined"] += a != c and b == d
        old, new = zip(*pairs, strict=True)
        mixed, mixed_now = len(set(old)) > 1, len(set(new)) > 1
        counts["gained"] += mixed_now and not mixed
        counts["lost"] += mixed and not mixed_now
        counts["other_best"] += not any(a == max(old) and b == max(new) for a, b in pairs)
    names = ("groups", "pairs", "turned", "parted", "joined", "gained", "lost", "other_best")
    return Rankings(**{name: counts[name] for name in names})


def groups_of(rows: Sequence[Row]) -> list[list[int]]:
    """Return the indices of the completions of each group."""
    groups: dict[tuple[Any, Any], list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault((row.get("step"), row.get("prompt_id")), []).append(place)
    return list(groups.values())


def disagreements(rows: Sequence[Row], before: Sequence[float | None], after: Sequence[float | None]) -> list[int]:
    """Return the indices of completions on which two rewards disagree, largest disagreement first: the change of the
    completion's reward minus the group's mean, in standard deviations over all completions."""
    changes: dict[int, float] = {}
    pairs = {
        p: (a, b) for p, (a, b) in enumerate(zip(before, after, strict=True))
        if a is not None and b is not None and math.isfinite(a - b)
    }  # fmt: skip
    scales = [pstdev(side) or math.inf for side in zip(*pairs.values(), strict=True)]  # equal rewards: no change
    for places in groups_of(rows):
        both = [p for p in places if p in pairs]
        centred = [[value - fmean(side) for value in side] for side in zip(*(pairs[p] for p in both), strict=True)]
        scaled = [[value / scale for value in side] for side, scale in zip(centred, scales, strict=False)]
        changes |= {p: abs(new - old) for p, old, new in zip(both, *scaled, strict=True)} if both else {}
    return [p for p in sorted(changes, key=lambda p: -changes[p]) if changes[p] > 1e-9]


def degenerate_completions(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """Make completions that solve nothing, for the first `MAX_PROMPTS` distinct prompts of some rollouts: name of the
    hack -> a row per prompt."""
    prompts: dict[str, Row] = {}
    for row in rows:
        prompts.setdefault(repr(row.get("prompt")), row)
    chosen = list(prompts.values())[:MAX_PROMPTS]
    common = Counter(str(row.get("completion", "")) for row in rows).most_common(1)[0][0] if rows else ""
    best = max(
        rows, key=lambda row: (float(row.get("reward") or 0.0), len(str(row.get("completion", "")))), default=None
    )
    answers = Counter(str(row.get("ground_truth")) for row in chosen).most_common(1)
    guess = answers[0][0] if answers else ""
    texts: dict[str, Callable[[Row], str]] = {
        "nothing": lambda row: "",
        "the prompt repeated": lambda row: _text(row.get("prompt")),
        "the most common completion": lambda row: common,
        "the highest-scoring completion, for all": lambda row: str(best.get("completion", "")) if best else "",
        "only the most common answer": lambda row: guess,
        "the most common answer, boxed": lambda row: f"\\boxed{{{guess}}}",
        "every number from 0 to 99": lambda row: " ".join(map(str, range(100))),
    }
    return {name: [dict(row, completion=text(row)) for row in chosen] for name, text in texts.items()}


def perturbed_completions(rows: Sequence[Row]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (name, rows): the recorded completions, changed so that a reward should not increase."""
    changes: dict[str, Callable[[str], str]] = {
        "said twice": lambda text: f"{text}\n{text}",
        "padded to three times its length": lambda text: text + " so" * (len(text) * 2 // 3 + 1),
        "cut in half": lambda text: text[: len(text) // 2],
    }
    for name, change in changes.items():
        yield name, [dict(row, completion=change(str(row.get("completion", "")))) for row in rows]


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(turn.get("content", "")) for turn in prompt or [] if isinstance(turn, Mapping))
