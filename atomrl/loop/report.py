"""Metrics of a step under verl's names, so that existing dashboards carry over."""

import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from atomrl.batches import AdvantageBatch
from atomrl.loop.episode_report import episode_metrics
from atomrl.loop.text_report import text_metrics
from atomrl.metrics import Count, Max, Mean, Metrics, fetched, merge, spread, values
from atomrl.models.memory import memory_metrics
from atomrl.progress import phase as under_way
from atomrl.rewards.compute import failure_counts, first_values
from atomrl.rewards.table import says_right
from atomrl.types import Trajectory, by_group

ANSWER = re.compile(r"</answer>|\\boxed\{[^{}]{0,200}+\}|####\s{0,9}+\S{1,99}+\s")
"""A closed answer. Bounded and possessive, so that a text of a million characters takes linear time."""


class Stopwatch:
    """Seconds by phase: `with watch("gen"): ...` adds to `timing_s/gen`. A phase that hangs is named by it."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with under_way(phase):
                yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - started

    def metrics(self, tokens: int) -> dict[str, float]:
        """`timing_s/*`, the step's tokens (prompts and responses) per second of the whole step, and this process's
        memory."""
        total = time.perf_counter() - self.started
        phases = {f"timing_s/{phase}": seconds for phase, seconds in self.phases.items()}
        speed = {
            "timing_s/step": total,
            "perf/total_num_tokens": float(tokens),
            "perf/throughput": tokens / total,
        }
        return phases | speed | values(memory_metrics())


def rollout_metrics(
    trajectories: Sequence[Trajectory], batch: AdvantageBatch, stops: Collection[int] = ()
) -> dict[str, float]:
    """Rewards, groups and lengths of all that a step drew, and the advantages of what it trains on.

    Args:
        trajectories: also those of groups that the algorithm refused.
        batch: the rows that were made of them.
        stops: the tokens that end a completion.
    """
    drawn = list(by_group(trajectories).values())
    groups = [given for group in drawn if (given := [t.earned for t in group if t.earned is not None])]
    scores = [reward for group in groups for reward in group]
    metrics = spread("critic/score", scores) | _part_metrics(trajectories)
    if any(len(group) > 1 for group in groups):
        equal = [group[0] for group in groups if min(group) == max(group)]
        metrics["by_group/frac_mixed"] = 1 - len(equal) / len(groups)
        metrics["by_group/frac_all_good"] = sum(reward > 0 for reward in equal) / len(groups)
        metrics["by_group/frac_all_bad"] = sum(reward <= 0 for reward in equal) / len(groups)
        several = [group for group in drawn if len(group) > 1]
        metrics["by_group/frac_identical"] = sum(len({t.text for t in g}) == 1 for g in several) / len(several)
    total = max(1, len(trajectories))
    metrics |= failure_counts(trajectories) | length_correlation(trajectories) | episode_metrics(trajectories, batch)
    metrics |= text_metrics(trajectories)
    metrics["reward/missing"] = float(len(trajectories) - len(scores))
    metrics["reward/missing_ratio"] = 1 - len(scores) / total
    metrics |= spread("response_length", (item.response_tokens for item in trajectories))
    metrics["response_length/clip_ratio"] = sum(item.finish_reason == "length" for item in trajectories) / total
    metrics["response_length/ran_on_ratio"] = sum(runs_on(item, stops) for item in trajectories) / total
    metrics |= spread("prompt_length", (group[0].prompt_tokens for group in drawn))
    metrics["train/rows"] = float(batch.rows)
    metrics["train/cut_rows"] = 0.0 if batch.cut is None else float(batch.cut.sum())
    if batch.loss_mask.any():
        metrics |= spread("critic/advantages", batch.advantages[batch.loss_mask].tolist())
        metrics |= critic_metrics(batch)
    return metrics


def _part_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of every part of the reward; accuracy is the share of the first that is at least 1, where that says
    what is right (`rewards.table.says_right`)."""
    parts: dict[str, list[float]] = defaultdict(list)
    for item in trajectories:
        for name, value in item.reward_parts.items():
            parts[name] += [] if value is None else [value]
    metrics = {f"reward/{name}/mean": sum(given) / len(given) for name, given in parts.items() if given}
    first = first_values(trajectories)
    values = [value for given in first.values() for value in given]
    if not values or not says_right(first):
        return metrics
    return metrics | {"train/accuracy": sum(value >= 1.0 for value in values) / len(values)}


def critic_metrics(batch: AdvantageBatch) -> dict[str, float]:
    """What a critic expected at the start of the step, what came, and how much of its variance was expected."""
    if batch.returns is None or batch.values is None:
        return {}
    expected, came = (item[batch.loss_mask].double() for item in (batch.values, batch.returns))
    metrics = spread("critic/values", expected.tolist()) | spread("critic/returns", came.tolist())
    variance = came.var(correction=0).item()
    if variance > 1e-8:  # returns that are all the same, but for rounding, leave nothing to explain
        metrics["critic/vf_explained_var"] = 1 - (came - expected).var(correction=0).item() / variance
    return metrics


def runs_on(trajectory: Trajectory, stops: Collection[int]) -> bool:
    """Whether a completion was cut at the limit although it had come to an end before: one of the tokens that end
    completions inside it, or an answer that is closed with eight characters or more behind it."""
    segments = trajectory.segments
    if trajectory.finish_reason != "length" or any(segment.origin == "environment" for segment in segments):
        return False
    tokens = [token for segment in segments if segment.origin == "model" for token in segment.token_ids]
    if any(token in stops for token in tokens[:-1]):
        return True
    end = answer_end(trajectory.text)
    return end is not None and len(trajectory.text) - end >= 8


def answer_end(text: str) -> int | None:
    """Where the first answer is closed: `</answer>`, `\\boxed{}` or `#### 18`.

    Example:
        >>> answer_end("so #### 18 and on"), answer_end("####" * 1000)
        (11, None)
    """
    match = ANSWER.search(text)
    return match.end() if match else None


def length_correlation(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Correlation of reward and length within groups, and the same among completions of a group that are equally
    correct (the first part judges), where a reward that is fair to length has none. Nothing where all earn the same.

    Rewards may count tokens or characters: of the two correlations the one further from 0 counts.
    """
    groups: dict[Any, list[tuple[float, float, float]]] = defaultdict(list)
    alike: dict[Any, list[tuple[float, float, float]]] = defaultdict(list)
    for item in trajectories:
        part = next(iter(item.reward_parts.values()), None)
        if item.earned is not None and part is not None:
            numbers = float(item.response_tokens), float(len(item.text)), item.earned
            groups[item.prompt_id].append(numbers)
            alike[item.prompt_id, part >= 1.0].append(numbers)
    found = {}
    for name, chosen in (("", groups), ("_equally_correct", alike)):
        measured = ([[(n[at], n[2]) for n in group] for group in chosen.values()] for at in (0, 1))
        if known := [value for pairs in measured if (value := correlation_within(pairs)) is not None]:
            found[f"reward/length_correlation{name}"] = max(known, key=abs)
    return found


def correlation_within(groups: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """Of x and y, each from its group's mean; None where one of them does not vary.

    Example:
        >>> correlation_within([[(1.0, 0.0), (2.0, 1.0)], [(7.0, 5.0), (9.0, 7.0)]])
        1.0
    """
    pairs = [torch.tensor(group, dtype=torch.float64) for group in groups]
    centred = torch.cat([torch.zeros(0, 2, dtype=torch.float64), *(pair - pair.mean(0) for pair in pairs)])
    (xx, xy), (_, yy) = (centred.T @ centred).tolist()
    return xy / (xx * yy) ** 0.5 if xx * yy > 1e-12 else None


def update_metrics(results: Sequence[Metrics]) -> dict[str, float]:
    """The mean over the updates of a step; for a maximum, the maximum, and for a count, the sum. A mean of nothing (an
    update without a token) does not count.

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
        for result in fetched(results)
    )
    return values(merged) | {"training/updates": float(len(results))}
