"""Agreement of a model's scores with held-out preferences."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atomrl.batches import RowBatch
from atomrl.data.tokenized import TokenizedSamples
from atomrl.objectives.choice import not_none

EVAL_PAIRS = 256
"""Held-out prompts per forward pass."""


def evaluate_preferences(
    held_out: TokenizedSamples, scores: Callable[[RowBatch], dict[str, Tensor]]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Measure how often, and by what margin, scores agree with preferences.

    Args:
        held_out: the held-out preferences.
        scores: rows -> name -> scores [B]; `reward` is the score that is trained.

    Returns:
        Metrics, and a row for each problem. The metrics are `eval/preference_accuracy` and `eval/preference_margin` of
        `reward`, `eval/NAME_accuracy` and `eval/NAME_margin` of other scores, and `eval/preferences`, the number of
        pairs. A tie counts as half an agreement.
    """
    scores_by_name: dict[str, list[Tensor]] = {}
    labels: list[Tensor] = []
    groups: list[Tensor] = []
    problems = held_out.problems
    for number, rows in enumerate(held_out.batches(EVAL_PAIRS)):
        for name, values in scores(rows).items():
            scores_by_name.setdefault(name, []).append(values.double())
        labels.append(not_none(rows.preference.labels))
        groups.append(rows.group_ids + number * EVAL_PAIRS)  # unique over batches
    group_ids = torch.cat(groups)
    better, worse = preference_pairs(torch.cat(labels), group_ids)
    metrics = {"eval/preferences": float(len(better))}
    lines: list[dict[str, Any]] = [{"problem_id": problem.problem_id, "rewards": []} for problem in problems]
    for name, parts in scores_by_name.items():
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


def preference_pairs(labels: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices [N] of the better and of the worse row of every pair.

    Pairs are two rows of a group with different labels. If no group has such rows (unpaired preferences), they are all
    pairs of a good and a bad row.

    Args:
        labels: [B], 1 for good and -1 for bad rows.
        group_ids: [B].

    Example:
        >>> preference_pairs(torch.tensor([1, -1, 1, -1]), torch.tensor([0, 0, 1, 1]))
        (tensor([0, 2]), tensor([1, 3]))
    """
    differs = labels[:, None] > labels[None]
    within = differs & (group_ids[:, None] == group_ids[None])
    better, worse = (within if within.any() else differs).nonzero(as_tuple=True)
    return better, worse
