"""Metrics of a step under verl's names.

`rollout_metrics` covers rewards, groups and lengths, with `episode_metrics` and `text_metrics`; `update_metrics` merges
those of the updates.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from atomrl.batches import AdvantageBatch, concat_turns
from atomrl.common.metrics import Count, Max, Mean, Metrics, fetch, mean_max_min, merge, values
from atomrl.data.rows import by_group
from atomrl.objectives.choice import not_none
from atomrl.rewards.compute import failure_counts
from atomrl.trainer.report.episodes import episode_metrics
from atomrl.trainer.report.texts import text_metrics
from atomrl.types import Trajectory

ANSWER = re.compile(r"</answer>|\\boxed\{[^{}]{0,200}+\}|####\s{0,9}+\S{1,99}+\s")
"""Matches the end of an answer. Bounded and possessive, so that a text of a million characters takes linear time."""


def rollout_metrics(
    trajectories: Sequence[Trajectory], batch: AdvantageBatch, stops: Collection[int] = (), says_right: bool = True
) -> dict[str, float]:
    """Compute metrics of rewards, groups and lengths of a step's rollouts, and of the advantages that are trained on.

    Args:
        trajectories: all of the step, including groups that the algorithm filtered out.
        batch: the rows that are trained on.
        stops: ids of the tokens that end a completion.
        says_right: the first reward grades answers as right or wrong (`Rewards.says_right`).
    """
    sampled = list(by_group(trajectories).values())
    groups = [
        rewards for group in sampled if (rewards := [t.total_reward for t in group if t.total_reward is not None])
    ]
    scores = [reward for group in groups for reward in group]
    metrics = mean_max_min("critic/score", scores) | _part_metrics(trajectories, says_right)
    if any(len(group) > 1 for group in groups):
        equal = [group[0] for group in groups if min(group) == max(group)]
        metrics["by_group/frac_mixed"] = 1 - len(equal) / len(groups)
        metrics["by_group/frac_all_good"] = sum(reward > 0 for reward in equal) / len(groups)
        metrics["by_group/frac_all_bad"] = sum(reward <= 0 for reward in equal) / len(groups)
        several = [group for group in sampled if len(group) > 1]
        metrics["by_group/frac_identical"] = sum(len({t.text for t in g}) == 1 for g in several) / len(several)
    total = max(1, len(trajectories))
    metrics |= failure_counts(trajectories) | length_correlation(trajectories) | episode_metrics(trajectories, batch)
    metrics |= text_metrics(trajectories)
    metrics["reward/missing"] = float(len(trajectories) - len(scores))
    metrics["reward/missing_ratio"] = 1 - len(scores) / total
    metrics |= mean_max_min("response_length", (item.response_tokens for item in trajectories))
    metrics["response_length/clip_ratio"] = sum(item.finish_reason == "length" for item in trajectories) / total
    metrics["response_length/ran_on_ratio"] = sum(runs_on(item, stops) for item in trajectories) / total
    metrics |= mean_max_min("prompt_length", (group[0].prompt_tokens for group in sampled))
    metrics["train/rows"] = float(batch.rows)
    metrics["train/cut_rows"] = 0.0 if batch.cut is None else float(batch.cut.sum())
    if batch.loss_mask.any():
        metrics |= mean_max_min("critic/advantages", batch.advantages[batch.loss_mask].tolist())
        metrics |= critic_metrics(batch)
    return metrics


def _part_metrics(trajectories: Sequence[Trajectory], says_right: bool) -> dict[str, float]:
    """Compute the mean of each part of the reward, and `train/accuracy`: the share of values of the first part that are
    1.0 or more, if these grade answers as right or wrong."""
    parts: dict[str, list[float]] = defaultdict(list)
    for item in trajectories:
        for name, value in item.reward_parts.items():
            parts[name] += [] if value is None else [value]
    metrics = {f"reward/{name}/mean": sum(numbers) / len(numbers) for name, numbers in parts.items() if numbers}
    if says_right and (first := next(iter(parts.values()), [])):
        metrics["train/accuracy"] = sum(value >= 1.0 for value in first) / len(first)
    return metrics


def critic_metrics(batch: AdvantageBatch) -> dict[str, float]:
    """Compute metrics of the critic's values and returns, and the explained variance; empty without a critic."""
    if batch.returns is None or batch.values is None:
        return {}
    predicted, returns = (item[batch.loss_mask].double() for item in (batch.values, batch.returns))
    metrics = mean_max_min("critic/values", predicted.tolist()) | mean_max_min("critic/returns", returns.tolist())
    variance = returns.var(correction=0).item()
    if variance > 1e-8:  # with equal returns, up to rounding, the variance is 0
        metrics["critic/vf_explained_var"] = 1 - (returns - predicted).var(correction=0).item() / variance
    return metrics


def runs_on(trajectory: Trajectory, stops: Collection[int]) -> bool:
    """Return whether a completion was cut at the length limit although it had already ended.

    It has an inner stop token, or eight or more characters after the end of its first answer (`answer_end`).
    """
    segments = trajectory.segments
    if trajectory.finish_reason != "length" or any(segment.origin == "environment" for segment in segments):
        return False
    tokens = [token for segment in segments if segment.origin == "model" for token in segment.token_ids]
    if any(token in stops for token in tokens[:-1]):
        return True
    end = answer_end(trajectory.text)
    return end is not None and len(trajectory.text) - end >= 8


def answer_end(text: str) -> int | None:
    """Return the offset of the end of the first answer: `</answer>`, `\\boxed{}` or `#### 18`; None if there is none.

    Example:
        >>> answer_end("so #### 18 and on"), answer_end("####" * 1000)
        (11, None)
    """
    match = ANSWER.search(text)
    return match.end() if match else None


def length_correlation(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the correlation of reward and length within groups.

    `reward/length_correlation_equally_correct` is the same among completions of a group that the first part of the
    reward grades alike; it is 0 for a reward that does not depend on length. Metrics are left out if rewards or lengths
    do not vary.

    A reward may count tokens or characters: the metric is the correlation with the larger absolute value.
    """
    groups: dict[Any, list[tuple[float, float, float]]] = defaultdict(list)
    equally_correct: dict[Any, list[tuple[float, float, float]]] = defaultdict(list)
    for item in trajectories:
        part = next(iter(item.reward_parts.values()), None)
        if item.total_reward is not None and part is not None:
            numbers = float(item.response_tokens), float(len(item.text)), item.total_reward
            groups[item.prompt_id].append(numbers)
            equally_correct[item.prompt_id, part >= 1.0].append(numbers)
    metrics = {}
    for name, members in (("", groups), ("_equally_correct", equally_correct)):
        by_unit = ([[(n[unit], n[2]) for n in group] for group in members.values()] for unit in (0, 1))
        if correlations := [value for pairs in by_unit if (value := correlation_within(pairs)) is not None]:
            metrics[f"reward/length_correlation{name}"] = max(correlations, key=abs)
    return metrics


def correlation_within(groups: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """Compute the correlation of x and y after subtracting the mean of each group; None if x or y does not vary.

    Example:
        >>> correlation_within([[(1.0, 0.0), (2.0, 1.0)], [(7.0, 5.0), (9.0, 7.0)]])
        1.0
    """
    pairs = [torch.tensor(group, dtype=torch.float64) for group in groups]
    centred = torch.cat([torch.zeros(0, 2, dtype=torch.float64), *(pair - pair.mean(0) for pair in pairs)])
    (xx, xy), (_, yy) = (centred.T @ centred).tolist()
    return xy / (xx * yy) ** 0.5 if xx * yy > 1e-12 else None


def update_metrics(results: Sequence[Metrics]) -> dict[str, float]:
    """Merge the metrics of a step's updates: the mean, the maximum of a `Max`, and the sum of a `Count`.

    Means of weight 0 (an update without tokens) are left out.

    Example:
        >>> update_metrics([{"lr": Mean(0.1), "actor/skipped_updates": Count()}, {"lr": Mean(0.3)}])
        {'lr': 0.2, 'actor/skipped_updates': 1.0, 'training/updates': 2.0}
    """
    merged = merge(
        {
            name: metric if isinstance(metric, Max | Count) else Mean(metric.value)
            for name, metric in result.items()
            if not (isinstance(metric, Mean) and metric.weight == 0)
        }
        for result in fetch(results)
    )
    return values(merged) | {"training/updates": float(len(results))}


def why_no_update(rows: Iterable[Mapping[str, Any]]) -> str:
    """Count the reasons for which the steps of a run without an update made none.

    Args:
        rows: the run's `metrics.jsonl`.

    Example:
        >>> why_no_update([{"training/updates": 2.0, "actor/empty_updates": 2.0}, {"training/updates": 0.0}])
        '2 updates had a gradient of 0, 1 step had no rows to train on'
    """
    rows = list(rows)
    reasons = {
        "update{} had a gradient of 0": sum(row.get("actor/empty_updates") or 0 for row in rows),
        "update{} had a non-finite gradient": sum(row.get("actor/skipped_updates") or 0 for row in rows),
        "step{} had no rows to train on": sum(not row.get("training/updates") for row in rows),
    }
    return ", ".join(f"{count:.0f} {text.format('s' * (count != 1))}" for text, count in reasons.items() if count)


def mean_advantages(batch: AdvantageBatch) -> dict[int, float]:
    """Return the mean advantage over the trained tokens of each trajectory, by its index."""
    batch = concat_turns(batch)
    tokens = batch.loss_mask.sum(1).clamp(min=1)
    means: list[float] = ((batch.advantages * batch.loss_mask).sum(1) / tokens).tolist()
    return dict(zip(not_none(batch.trajectory_index).tolist(), means, strict=True))
