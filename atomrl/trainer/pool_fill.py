"""`atomrl pool fill`: groups for a rollout pool, sampled as a run of the same config would sample them."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from atomrl.data.curriculum import Curriculum, CurriculumState
from atomrl.pool.codec import problem_json
from atomrl.pool.store import RolloutPool
from atomrl.pool.weights import PublishedWeights, WeightFollower
from atomrl.trainer import build
from atomrl.trainer.cluster import open_cluster
from atomrl.trainer.loop import stop_request
from atomrl.trainer.report.stopwatch import Stopwatch
from atomrl.trainer.rl import RLRun
from atomrl.trainer.sources import EngineSource


@contextmanager
def shared_by_producers(pool: RolloutPool, curriculum: Curriculum, initial: CurriculumState) -> Iterator[None]:
    """Context in which a curriculum has the state that the producers of a pool share, and may change it.

    Args:
        initial: its state if the pool has none, as after a new run began to train.
    """
    with pool.shared_state() as stored:
        curriculum.load(CurriculumState(**stored) if stored else initial)
        yield
        stored.update(curriculum.state(with_pending=False)._asdict())


def fill(run: RLRun, groups: int | None = None, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Sample groups into the pool of a config, with the newest weights that its run has published.

    Several processes may do so at once: the pool gives each other prompts.

    Args:
        run: checked; it is not executed.
        groups: number to sample; None: until Ctrl-C or SIGTERM, after which the current batch is written.
        report: called with a line after each batch.

    Returns:
        Number of sampled groups and of new ones among them, version of the newest weights, and seconds of
        sampling, rewards and writing.

    Raises:
        PoolError: the pool is of another config, or cannot be written.
        ValueError: a problem has a value that a pool cannot keep.
    """
    config = run.config
    for problem in run.train.problems:
        problem_json(problem)
    watch, drawn, new = Stopwatch(), 0, 0
    with ExitStack() as stack:
        stack.callback(run.rewards.close)
        pool = RolloutPool(config.pool_file, config.pool)
        stack.callback(pool.close)
        pool.check_identity(run.pool_identity)
        cluster = open_cluster(config, run.algorithm, stack, producer=True)
        if run.images is not None:
            run.images.write()
        engine = build.build_engine(config, run.chosen.path, run.tokenizer, cluster, images=run.image_reader)
        stack.callback(engine.close)
        source = EngineSource(**run.drawing(engine))
        follower = WeightFollower(engine, PublishedWeights(config.run_dir))
        stopped = stack.enter_context(stop_request())
        initial = run.curriculum.state()
        while not stopped() and (groups is None or drawn < groups):
            follower.update()
            count = config.rollout.prompts_per_step
            count = count if groups is None else min(count, groups - drawn)
            step = engine.version + 1
            with shared_by_producers(pool, run.curriculum, initial):
                draws = run.curriculum.take(count, step)
            if not draws:
                report("the curriculum has no prompt left")
                break
            made = source.sample(draws, step, watch)
            with watch("put"):
                new += pool.put(made, follower.run)
            with shared_by_producers(pool, run.curriculum, initial):
                for group in made:
                    run.curriculum.observe(group)
            drawn += len(draws)
            report(f"{drawn} groups sampled, {new} new; weights of version {engine.version}")
        seconds = {name: round(value, 2) for name, value in watch.phases.items()}
        elapsed = round(time.perf_counter() - watch.started, 2)
        return {
            "pool": str(pool.path), "drawn": drawn, "new": new, "version": engine.version, "seconds": seconds,
            "wall_s": elapsed,
        }  # fmt: skip
