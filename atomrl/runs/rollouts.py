"""`atomrl pool fill`: groups for a pool, drawn as a run of the same config would draw them."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from atomrl.loop.groups import EngineSource
from atomrl.loop.report import Stopwatch
from atomrl.loop.sync import stop_request
from atomrl.pool.codec import sample_json
from atomrl.pool.store import RolloutPool
from atomrl.pool.weights import PublishedWeights, WeightFollower
from atomrl.runs import build
from atomrl.runs.cluster import open_cluster
from atomrl.runs.rl import RLRun
from atomrl.types import by_group

log = logging.getLogger(__name__)


def fill(run: RLRun, groups: int | None = None, said: Callable[[str], None] = print) -> dict[str, Any]:
    """Draw groups into the pool of a config, with the newest weights that its run has published.

    Several processes may do so at once: the pool gives each other prompts.

    Args:
        run: checked; it is not executed.
        groups: how many to draw; None goes on until Ctrl-C or SIGTERM, after which the batch under way is written.
        said: told a line after each batch.

    Returns:
        How many groups were drawn and how many of them were new, the version of the newest weights, and seconds of
        drawing, rewards and writing.

    Raises:
        PoolError: the pool is of another config, or cannot be written.
        ValueError: a problem has a value that a pool cannot keep.
    """
    config = run.config
    for sample in run.stream.samples:
        sample_json(sample)
    watch, drawn, new = Stopwatch(), 0, 0
    with ExitStack() as stack:
        stack.callback(run.rewards.close)
        pool = RolloutPool(config.pool_file, config.pool)
        stack.callback(pool.close)
        pool.check_identity(run.pool_identity)
        cluster = open_cluster(config, run.algorithm, stack, producer=True)
        engine = build.build_rollout(config, run.path, run.tokenizer, cluster)
        stack.callback(engine.close)
        source = EngineSource(**run.drawing(engine))
        follower = WeightFollower(engine, PublishedWeights(config.run_dir))
        stopped = stack.enter_context(stop_request())
        while not stopped() and (groups is None or drawn < groups):
            follower.update()
            count = config.rollout.prompts_per_step
            count = count if groups is None else min(count, groups - drawn)
            run.stream.position = pool.take_positions(count)
            made = by_group(source.draw(count, engine.version + 1, watch))
            with watch("put"):
                new += pool.put(list(made.values()), follower.run)
            drawn += count
            said(f"{drawn} groups drawn, {new} new; weights of version {engine.version}")
        seconds = {name: round(value, 2) for name, value in watch.phases.items()}
        elapsed = round(time.perf_counter() - watch.started, 2)
        return {
            "pool": str(pool.path), "drawn": drawn, "new": new, "version": engine.version, "seconds": seconds,
            "wall_s": elapsed,
        }  # fmt: skip
