"""Reading run folders: of any age, also while they are written. It imports neither torch nor the config's schema."""

from atomrl.reading.metrics import MetricTable
from atomrl.reading.rollouts import RolloutIndex
from atomrl.reading.run import Run, find_runs, is_run, load_run
from atomrl.reading.state import RunState

__all__ = ["MetricTable", "RolloutIndex", "Run", "RunState", "find_runs", "is_run", "load_run"]
