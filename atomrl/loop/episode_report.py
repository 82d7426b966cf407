"""Metrics of episodes: what an environment said, how long it took, and how episodes ended."""

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from atomrl.batches import RowBatch
from atomrl.episodes import Ended
from atomrl.metrics import spread
from atomrl.types import Trajectory


def episode_metrics(trajectories: Sequence[Trajectory], batch: RowBatch) -> dict[str, float]:
    """`environment/...` of all that a step drew, and `train/reply_tokens`, which must be 0; nothing where no trajectory
    is an episode.

    Args:
        trajectories: also those that are not trained on.
        batch: the rows that were made of them.

    Example:
        >>> from tests.pool.made import group, rich_episode
        >>> from dataclasses import replace
        >>> from atomrl.data.rows import to_rows
        >>> one, other = group(1)
        >>> found = episode_metrics([replace(one, episode=rich_episode()), other], to_rows([other]))
        >>> found["environment/turns/mean"], found["environment/replies/search"], found["environment/ended/failed"]
        (2.0, 1.0, 1.0)
    """
    episodes = [(item, item.episode) for item in trajectories if item.episode is not None]
    if not episodes:
        return {}
    count = len(episodes)
    turns = [turn for _, episode in episodes for turn in episode.turns]
    metrics = spread("environment/turns", (len(episode.turns) for _, episode in episodes))
    labels = [label for turn in turns for label in turn.labels]
    metrics["environment/replies"] = len(labels) / count
    for label, number in sorted(Counter(filter(None, labels)).items()):
        metrics[f"environment/replies/{label}"] = number / count
    seconds = [turn.seconds for turn in turns] or [0.0]
    metrics["environment/seconds/mean"] = sum(seconds) / len(seconds)
    metrics["environment/seconds/max"] = max(seconds)
    metrics["environment/turn_rewards"] = sum(turn.reward or 0.0 for turn in turns) / count
    dropped = (episode.turns[-1].sees_from for _, episode in episodes if episode.turns)
    metrics["environment/dropped_turns"] = sum(dropped) / count
    written = sum(item.response_tokens for item, _ in episodes)
    said = sum(len(part.token_ids) for item, _ in episodes for part in item.segments if part.origin == "environment")
    metrics["environment/token_share"] = said / max(1, written)
    ends = Counter(episode.ended for _, episode in episodes)
    metrics |= {f"environment/ended/{kind}": ends[kind] / count for kind in get_args(Ended)}
    if batch.turn_ids is not None:
        metrics["train/reply_tokens"] = float((batch.loss_mask & (batch.turn_ids < 0)).sum())
    return metrics
