"""What a step says about itself: verl's metric names, so that existing dashboards carry over."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from atomrl.metrics import Count, Max, Mean, Metrics, merge, spread, values
from atomrl.rewards.compute import failure_counts
from atomrl.stages import AdvantageBatch, Completion, RewardBatch

# An answer that is closed, with more behind it than white space and a full stop.
_CLOSED = re.compile(r"(</answer>|\\boxed\{[^{}]*\}|####\s*\S+\s).{8,}", re.DOTALL)


class Stopwatch:
    """Seconds by phase: `with watch("gen"): ...` adds to `timing_s/gen`."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - started

    def metrics(self, rewarded: RewardBatch) -> dict[str, float]:
        """`timing_s/*`, and tokens of prompts and completions per second of the whole step."""
        total = time.perf_counter() - self.started
        tokens = sum(
            len(completion.token_ids) + len(prompt)
            for prompt, group in zip(rewarded.prompt_token_ids, rewarded.completions, strict=True)
            for completion in group
        )
        phases = {f"timing_s/{phase}": seconds for phase, seconds in self.phases.items()}
        return phases | {
            "timing_s/step": total,
            "perf/total_num_tokens": float(tokens),
            "perf/throughput": tokens / total,
        }


def rollout_metrics(
    rewarded: RewardBatch, credited: AdvantageBatch, special_ids: Collection[int] = ()
) -> dict[str, float]:
    """Rewards, groups, lengths and advantages of a step's rollouts.

    Args:
        special_ids: the tokenizer's special tokens, one of which ends a completion.
    """
    completions = [completion for group in rewarded.completions for completion in group]
    groups = [[reward for reward in group if reward is not None] for group in rewarded.rewards]
    groups = [group for group in groups if group]
    scores = [reward for group in groups for reward in group]
    metrics = spread("critic/score", scores)
    for name, part in rewarded.reward_parts.items():
        given = [reward for group in part for reward in group if reward is not None]
        metrics |= {f"reward/{name}/mean": sum(given) / len(given)} if given else {}
    if rewarded.reward_parts:
        first = next(iter(rewarded.reward_parts.values()))
        judged = [reward >= 1.0 for group in first for reward in group if reward is not None]
        metrics |= {"train/accuracy": sum(judged) / len(judged)} if judged else {}
    if any(len(group) > 1 for group in groups):
        equal = [group[0] for group in groups if min(group) == max(group)]
        metrics["by_group/frac_mixed"] = 1 - len(equal) / len(groups)
        metrics["by_group/frac_all_good"] = sum(reward > 0 for reward in equal) / len(groups)
        metrics["by_group/frac_all_bad"] = sum(reward <= 0 for reward in equal) / len(groups)
    metrics |= failure_counts(rewarded)
    metrics["reward/missing"] = float(len(completions) - len(scores))
    metrics["reward/missing_ratio"] = 1 - len(scores) / max(1, len(completions))
    metrics |= length_correlation(rewarded)
    metrics |= spread("response_length", (len(completion.token_ids) for completion in completions))
    truncated = sum(completion.finish_reason == "length" for completion in completions)
    metrics["response_length/clip_ratio"] = truncated / max(1, len(completions))
    ran_on = sum(goes_on(completion, special_ids) for completion in completions)
    metrics["response_length/ran_on_ratio"] = ran_on / max(1, len(completions))
    metrics |= spread("prompt_length", (len(prompt) for prompt in rewarded.prompt_token_ids))
    if credited.loss_mask.any():
        metrics |= spread("critic/advantages", credited.advantages[credited.loss_mask].tolist())
        metrics |= critic_metrics(credited)
    return metrics


def critic_metrics(credited: AdvantageBatch) -> dict[str, float]:
    """What a critic expected at the start of the step, what came, and how much of its variance was expected."""
    if credited.returns is None or credited.values is None:
        return {}
    expected, came = (item[credited.loss_mask].double() for item in (credited.values, credited.returns))
    metrics = spread("critic/values", expected.tolist()) | spread("critic/returns", came.tolist())
    variance = came.var(correction=0).item()
    if variance > 1e-8:  # returns that are all the same, but for rounding, leave nothing to explain
        metrics["critic/vf_explained_var"] = 1 - (came - expected).var(correction=0).item() / variance
    return metrics


def goes_on(completion: Completion, special_ids: Collection[int]) -> bool:
    """Whether a completion was cut at the limit although it had come to an end before.

    Example:
        >>> end = {2}
        >>> goes_on(Completion(token_ids=(5, 2, 5, 5), text="4 4 4", logprobs=None, finish_reason="length"), end)
        True
    """
    if completion.finish_reason != "length" or not all(completion.loss_mask):
        return False
    return any(token in special_ids for token in completion.token_ids[:-1]) or bool(_CLOSED.search(completion.text))


def length_correlation(rewarded: RewardBatch) -> dict[str, float]:
    """Correlation of reward and length within groups, and the same among completions of a group that are equally
    correct (the first part judges), where a reward that is fair to length has none. Nothing where all earn the same."""
    if not rewarded.reward_parts:
        return {}
    first = next(iter(rewarded.reward_parts.values()))
    groups: dict[object, list[tuple[float, float]]] = {}
    alike: dict[object, list[tuple[float, float]]] = {}
    for p, group in enumerate(rewarded.rewards):
        for g, reward in enumerate(group):
            part = first[p][g]
            if reward is not None and part is not None:
                pair = float(len(rewarded.completions[p][g].token_ids)), reward
                groups.setdefault(p, []).append(pair)
                alike.setdefault((p, part >= 1.0), []).append(pair)
    name = "reward/length_correlation"
    found = {name: correlation_within(groups.values()), f"{name}_equally_correct": correlation_within(alike.values())}
    return {name: value for name, value in found.items() if value is not None}


def correlation_within(groups: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """Of x and y, each from its group's mean; None where one of them does not vary.

    Example:
        >>> correlation_within([[(1.0, 0.0), (2.0, 1.0)], [(7.0, 5.0), (9.0, 7.0)]])
        1.0
    """
    xx = xy = yy = 0.0
    for pairs in groups:
        mean_x, mean_y = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
        for x, y in pairs:
            xx += (x - mean_x) ** 2
            xy += (x - mean_x) * (y - mean_y)
            yy += (y - mean_y) ** 2
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
        for result in results
    )
    return values(merged) | {"training/updates": float(len(results))}
