"""Reading run folders: of any age, also while they are written. It imports neither torch nor the config's schema."""

from atomrl.tracking.reading.metrics import MetricTable
from atomrl.tracking.reading.rollouts import RolloutIndex
from atomrl.tracking.reading.run import Run, RunState, find_runs, is_run, load_run

__all__ = ["MetricTable", "RolloutIndex", "Run", "RunState", "find_runs", "is_run", "load_run"]
