"""Read run folders of any version, also while they are written. Imports neither torch nor the config schema."""

from atomrl.tracking.reading.metrics import MetricTable
from atomrl.tracking.reading.rollouts import RolloutIndex
from atomrl.tracking.reading.run import Run, find_runs, is_run, load_run
from atomrl.tracking.reading.state import RunState

__all__ = ["MetricTable", "RolloutIndex", "Run", "RunState", "find_runs", "is_run", "load_run"]
