"""A recorded step under another objective: the same tokens and log-probs, other losses and gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from atomrl.batches import RowBatch, select_rows
from atomrl.data.rows import to_training_batches, with_advantages
from atomrl.objectives import PolicyObjective
from atomrl.protocols import ModelOutputs
from atomrl.tracking.reading.rollouts import TokenTable

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


# --------------------------------------------------------------------------------------------------------------------
# Recorded completions under other rewards: what would have been taught instead, and what a hack would earn.

Row = Mapping[str, Any]
MAX_PROMPTS = 200
"""Prompts on which hacks are tried."""


@dataclass(frozen=True)
class Rankings:
    """How one reward orders completions within their groups, against another."""

    groups: int
    pairs: int
    """Of completions of one group, both with both rewards."""
    turned: int
    """Pairs that the two order the other way round."""
    parted: int
    """Pairs that are equal before, and not after."""
    joined: int
    """The other way round."""
    gained: int
    """Groups that had no signal (all rewards the same) and now have one."""
    lost: int
    other_best: int
    """Groups of which none of the best completions is still among the best."""


def rankings(rows: Sequence[Row], before: Sequence[float | None], after: Sequence[float | None]) -> Rankings:
    """Of completions with `step` and `prompt_id`, what changes from one reward to another.

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
    """The places of the completions of each group."""
    found: dict[tuple[Any, Any], list[int]] = {}
    for place, row in enumerate(rows):
        found.setdefault((row.get("step"), row.get("prompt_id")), []).append(place)
    return list(found.values())


def disagreements(rows: Sequence[Row], before: Sequence[float | None], after: Sequence[float | None]) -> list[int]:
    """The places of completions, those on which two rewards disagree most first: by how far the completion's standing
    in its group (reward less the group's mean, in deviations over all) moves."""
    moved: dict[int, float] = {}
    known = [(before[p], after[p]) for p in range(len(rows)) if before[p] is not None and after[p] is not None]
    scales = [_deviation([float(value) for value in side if value is not None]) for side in zip(*known, strict=True)]
    for places in groups_of(rows):
        given = [p for p in places if before[p] is not None and after[p] is not None]
        standings = [
            _standings([float(side[p] or 0.0) for p in given], scale)
            for side, scale in zip((before, after), scales, strict=False)
        ]
        moved |= {p: abs(new - old) for p, old, new in zip(given, *standings, strict=True)} if given else {}
    return [p for p in sorted(moved, key=lambda p: -moved[p]) if moved[p] > 1e-9]


def _standings(values: Sequence[float], scale: float) -> list[float]:
    mean = sum(values) / max(1, len(values))
    return [(value - mean) / scale if scale else 0.0 for value in values]


def _deviation(values: Sequence[float]) -> float:
    mean = sum(values) / max(1, len(values))
    return float((sum((value - mean) ** 2 for value in values) / max(1, len(values))) ** 0.5)


def hacks(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """Completions that solve nothing, for the first `MAX_PROMPTS` different prompts of some rollouts: by the name of
    the trick, a row for each prompt."""
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
        "the prompt again": lambda row: _text(row.get("prompt")),
        "the commonest completion": lambda row: common,
        "one completion that earned most, for all": lambda row: str(best.get("completion", "")) if best else "",
        "the commonest answer alone": lambda row: guess,
        "the commonest answer, boxed": lambda row: f"\\boxed{{{guess}}}",
        "every number from 0 to 99": lambda row: " ".join(map(str, range(100))),
    }
    return {name: [dict(row, completion=text(row)) for row in chosen] for name, text in texts.items()}


def on_its_completions(rows: Sequence[Row]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The recorded completions, spoiled: what a reward should not give more for."""
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
