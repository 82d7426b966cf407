"""Training on preferences: completions with given scores in the place of rollouts with rewards, and how often a model
agrees with the preferences that are held out."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from atomrl.data.processor import DataProcessor
from atomrl.data.rows import to_rows
from atomrl.loop.sft import demonstration_tokens
from atomrl.stages import Completion, RewardBatch, RowBatch, Sample

log = logging.getLogger(__name__)
Draw = Callable[[Sequence[tuple[str, Sample]]], RewardBatch]
EVAL_PAIRS = 256
"""Held-out prompts in a forward pass of their own."""


def preference_drawer(
    processor: DataProcessor,
    completions: Callable[[Sample, random.Random], tuple[tuple[str, float], ...]],
    seed: int,
) -> Draw:
    """The function that makes a batch of (prompt id, sample): their completions as if they had been sampled, each
    ended by the end-of-sequence token, with their scores as rewards.

    Args:
        processor: tokenizes the prompts.
        completions: of a sample, with scores (`data.pairs.scored_completions`).
        seed: with the prompt's id, of what chance decides.
    """

    def draw(items: Sequence[tuple[str, Sample]]) -> RewardBatch:
        scored = [completions(sample, random.Random(f"{seed}/{prompt_id}")) for prompt_id, sample in items]
        tokens = iter(demonstration_tokens([text for group in scored for text, _ in group], processor.tokenizer))
        groups = tuple(
            tuple(Completion(token_ids=next(tokens), text=text, logprobs=None, finish_reason="stop") for text, _ in row)
            for row in scored
        )
        rewards = tuple(tuple(score for _, score in group) for group in scored)
        prompts = processor.to_prompt_batch(items)
        return RewardBatch(**vars(prompts), completions=groups, policy_version=0, rewards=rewards, reward_parts={})

    return draw


def mismatched(batch: RewardBatch) -> RewardBatch:
    """The batch, and after it each prompt once more with the completions of the next prompt and rewards of 0: what
    KTO estimates its reference point from.

    Raises:
        ValueError: there is no next prompt.
    """
    if len(batch.samples) < 2:
        raise ValueError("completions of other prompts are needed: train.rows_per_update must be at least 2")
    turned = (*batch.completions[1:], batch.completions[0])
    singles = [(place, (item,)) for place, group in enumerate(turned) for item in group]
    places = [place for place, _ in singles]
    return RewardBatch(
        samples=batch.samples + tuple(batch.samples[place] for place in places),
        prompt_ids=batch.prompt_ids + tuple(f"{batch.prompt_ids[place]}:mismatched" for place in places),
        prompt_token_ids=batch.prompt_token_ids + tuple(batch.prompt_token_ids[place] for place in places),
        completions=batch.completions + tuple(group for _, group in singles),
        policy_version=batch.policy_version,
        rewards=batch.rewards + ((0.0,),) * len(singles),
        reward_parts={},
    )


def evaluate_preferences(
    samples: Sequence[Sample], draw: Draw, scores: Callable[[RowBatch], dict[str, Tensor]], max_row_tokens: int | None
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """How often, and by how much, scores agree with preferences.

    Args:
        samples: held out.
        draw: makes rows of them, the same ones at every step.
        scores: rows -> scores by their name, each [B]; `reward` is the one that is trained.
        max_row_tokens: rows are cut to this many tokens, as in training.

    Returns:
        `eval/preference_accuracy` and `eval/preference_margin` of the reward, `eval/NAME_accuracy` of others, and
        `eval/preferences`, their number; and a line for each sample.
    """
    found: dict[str, list[Tensor]] = {}
    labels: list[Tensor] = []
    groups: list[Tensor] = []
    for start in range(0, len(samples), EVAL_PAIRS):
        part = samples[start : start + EVAL_PAIRS]
        rows = to_rows(draw([(f"eval:{sample.sample_id}", sample) for sample in part]), max_row_tokens)
        for name, values in scores(rows).items():
            found.setdefault(name, []).append(values.double())
        labels.append(rows.rewards)
        groups.append(rows.group_ids + start)
    rewards, group_ids = torch.cat(labels), torch.cat(groups)
    better, worse = compared(rewards, group_ids)
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


def compared(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Indices [N] of the better and of the worse rows that a preference sets against each other: all pairs within a
    group that differ; where no group has two rows, all pairs of a good and a bad one.

    Example:
        >>> compared(torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1]))
        (tensor([0, 2]), tensor([1, 3]))
    """
    differs = rewards[:, None] > rewards[None]
    within = differs & (group_ids[:, None] == group_ids[None])
    return (within if within.any() else differs).nonzero(as_tuple=True)
