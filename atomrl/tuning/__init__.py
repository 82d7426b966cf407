"""Tuning: a study whose trials are ordinary runs, and its best once more on fresh seeds."""

from atomrl.tuning.study import Settings, tune

__all__ = ["Settings", "tune"]
