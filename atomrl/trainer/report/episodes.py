"""Metrics of episodes: the environment's replies, their time, and how episodes ended."""

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from atomrl.batches import RowBatch
from atomrl.common.metrics import mean_max_min
from atomrl.types import Ended, Trajectory


def episode_metrics(trajectories: Sequence[Trajectory], batch: RowBatch) -> dict[str, float]:
    """Compute `environment/...` of a step's episodes; empty if there are none.

    `train/reply_tokens` counts tokens of the environment in the loss mask. It must be 0.

    Args:
        trajectories: all of the step, including those that are not trained on.
        batch: the rows that are trained on.

    Example:
        >>> from atomrl.data.rows import to_rows
        >>> from atomrl.types import Episode, Problem, Segment, Trajectory, Turn
        >>> turns = (Turn(model_tokens=2, reply_tokens=1, labels=("search",)), Turn(model_tokens=1))
        >>> parts = [("prompt", (1,)), ("model", (2, 3)), ("environment", (4,)), ("model", (5,))]
        >>> item = Trajectory(
        ...     prompt_id="0:a", index=0, problem=Problem(problem_id="a", prompt="Who?", ground_truth="me"), text="",
        ...     segments=tuple(Segment(origin=origin, token_ids=ids) for origin, ids in parts),
        ...     finish_reason="stop", reward=1.0, episode=Episode(turns=turns, ended="stop"),
        ... )
        >>> metrics = episode_metrics([item], to_rows([item]))
        >>> [metrics[f"environment/{name}"] for name in ("turns/mean", "replies/search", "token_share")]
        [2.0, 1.0, 0.25]
    """
    episodes = [(item, item.episode) for item in trajectories if item.episode is not None]
    if not episodes:
        return {}
    count = len(episodes)
    turns = [turn for _, episode in episodes for turn in episode.turns]
    metrics = mean_max_min("environment/turns", (len(episode.turns) for _, episode in episodes))
    labels = [label for turn in turns for label in turn.labels]
    metrics["environment/replies"] = len(labels) / count
    for label, number in sorted(Counter(filter(None, labels)).items()):
        metrics[f"environment/replies/{label}"] = number / count
    seconds = [turn.seconds for turn in turns] or [0.0]
    metrics["perf/environment_seconds/mean"] = sum(seconds) / len(seconds)
    metrics["perf/environment_seconds/max"] = max(seconds)
    metrics["environment/turn_rewards"] = sum(turn.reward or 0.0 for turn in turns) / count
    dropped = (episode.turns[-1].sees_from for _, episode in episodes if episode.turns)
    metrics["environment/dropped_turns"] = sum(dropped) / count
    tokens = sum(item.response_tokens for item, _ in episodes)
    replies = sum(len(part.token_ids) for item, _ in episodes for part in item.segments if part.origin == "environment")
    metrics["environment/token_share"] = replies / max(1, tokens)
    ends = Counter(episode.ended for _, episode in episodes)
    metrics |= {f"environment/ended/{kind}": ends[kind] / count for kind in get_args(Ended)}
    if batch.rollout.turn_ids is not None:
        metrics["train/reply_tokens"] = float((batch.loss_mask & (batch.rollout.turn_ids < 0)).sum())
    return metrics
