"""How often a model agrees with the preferences that are held out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atomrl.batches import RowBatch
from atomrl.data.tokenized import TokenizedSamples
from atomrl.objective.advantage_inputs import given

EVAL_PAIRS = 256
"""Held-out prompts in a forward pass of their own."""


def evaluate_preferences(
    held_out: TokenizedSamples, scores: Callable[[RowBatch], dict[str, Tensor]]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """How often, and by how much, scores agree with preferences.

    Args:
        held_out: the same rows at every step.
        scores: rows -> scores by their name, each [B]; `reward` is the one that is trained.

    Returns:
        `eval/preference_accuracy` and `eval/preference_margin` of the reward, `eval/NAME_accuracy` of others, and
        `eval/preferences`, their number; and a line for each sample.
    """
    found: dict[str, list[Tensor]] = {}
    labels: list[Tensor] = []
    groups: list[Tensor] = []
    samples = held_out.samples
    for start, rows in enumerate(held_out.batches(EVAL_PAIRS)):
        for name, each in scores(rows).items():
            found.setdefault(name, []).append(each.double())
        labels.append(given(rows.labels))
        groups.append(rows.group_ids + start * EVAL_PAIRS)
    group_ids = torch.cat(groups)
    better, worse = compared(torch.cat(labels), group_ids)
    metrics = {"eval/preferences": float(len(better))}
    lines: list[dict[str, Any]] = [{"sample_id": sample.sample_id, "rewards": []} for sample in samples]
    for name, parts in found.items():
        values = torch.cat(parts)
        margin = values[better] - values[worse]
        agreed = (margin > 0).double() + (margin == 0).double() / 2
        short = "preference" if name == "reward" else name
        metrics[f"eval/{short}_accuracy"] = agreed.mean().item()
        metrics[f"eval/{short}_margin"] = margin.mean().item()
        if name == "reward":
            for group, value in zip(group_ids.tolist(), values.tolist(), strict=True):
                lines[group]["rewards"].append(value)
    return metrics, lines


def compared(labels: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Indices [N] of the better and of the worse rows that a preference sets against each other: all pairs within a
    group that differ; where no group has two rows, all pairs of a good and a bad one.

    Example:
        >>> compared(torch.tensor([1, -1, 1, -1]), torch.tensor([0, 0, 1, 1]))
        (tensor([0, 2]), tensor([1, 3]))
    """
    differs = labels[:, None] > labels[None]
    within = differs & (group_ids[:, None] == group_ids[None])
    better, worse = (within if within.any() else differs).nonzero(as_tuple=True)
    return better, worse
