"""What a step says about itself: verl's metric names, so that existing dashboards carry over."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from atomrl.metrics import Max, Mean, Metrics, merge, spread, values
from atomrl.stages import AdvantageBatch, RewardBatch


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


def rollout_metrics(rewarded: RewardBatch, credited: AdvantageBatch) -> dict[str, float]:
    """Rewards, groups, lengths and advantages of a step's rollouts."""
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
    if groups:
        equal = [group[0] for group in groups if min(group) == max(group)]
        metrics["by_group/frac_mixed"] = 1 - len(equal) / len(groups)
        metrics["by_group/frac_all_good"] = sum(reward > 0 for reward in equal) / len(groups)
        metrics["by_group/frac_all_bad"] = sum(reward <= 0 for reward in equal) / len(groups)
    metrics["reward/missing"] = float(len(completions) - len(scores))
    metrics |= spread("response_length", (len(completion.token_ids) for completion in completions))
    truncated = sum(completion.finish_reason == "length" for completion in completions)
    metrics["response_length/clip_ratio"] = truncated / max(1, len(completions))
    metrics |= spread("prompt_length", (len(prompt) for prompt in rewarded.prompt_token_ids))
    if credited.loss_mask.any():
        metrics |= spread("critic/advantages", credited.advantages[credited.loss_mask].tolist())
    return metrics


def update_metrics(results: Sequence[Metrics]) -> dict[str, float]:
    """The mean over the updates of a step (the maximum, for a maximum)."""
    merged = merge(
        {name: metric if isinstance(metric, Max) else Mean(metric.value) for name, metric in result.items()}
        for result in results
    )
    return values(merged) | {"training/updates": float(len(results))}
