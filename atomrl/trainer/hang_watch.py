"""Watchdog of a run's own process."""

from atomrl.common.hangs import HangWatch
from atomrl.config import RunConfig
from atomrl.trainer.build import ENGINES


def hang_watch(config: RunConfig) -> HangWatch:
    """Return a watchdog that ends the process after `train.timeout_s` without progress.

    If a part of the run has a longer time-out of its own, the longest one counts: that part then raises an error which
    names what it waited for.
    """
    engine = f"the engine ({config.rollout.engine})"
    names = {
        "gen": engine,
        "wait": f"{engine} or a reward",
        "reward": "a reward",
        "sync_weights": f"weight sync to {engine}",
        "pool": "the rollout pool",
        "eval": f"evaluation, by {engine} or a reward," if config.kind == "rl" else "evaluation",
    }
    limits = {"train.timeout_s": config.train.timeout_s}
    for section in ("cluster", "backend", "asynchronous", "environment"):
        if (settings := getattr(config, section)) is not None:
            limits[f"{section}.timeout_s"] = settings.timeout_s
    if config.rollout.source == "pool":
        limits["pool.timeout_s"] = config.pool.timeout_s
    if (kind := ENGINES.get(config.rollout.engine)) is not None and kind.server:
        limits["rollout.server_timeout_s"] = config.rollout.server_timeout_s
    for use in [*config.reward.functions, *config.reward.by_data_source.values()]:
        limits[f"timeout_s of the reward {use.function}"] = use.timeout_s
    longest = max(limits, key=lambda name: limits[name])
    return HangWatch(limits[longest], names, longest)
