"""Studies of `atomrl tune`, read from their folder: trials, the deciding metric, importance of keys."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any

from atomrl.common.errors import reraise_as
from atomrl.tracking.reading.lines import ReadError, read_mapping

if TYPE_CHECKING:
    from optuna.study import Study


JOURNAL, STUDY_NAME, SETTINGS, RESULT = "study.journal", "tune", "study.yaml", "result.json"
SECONDS = "seconds"
"""User attribute of a trial with its duration."""
MIN_TRIALS = 4
"""Minimum number of complete trials for estimating importance."""


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """A trial of a study."""

    number: int
    state: str
    """`complete`, `pruned`, `fail`, `running` or `waiting`."""
    value: float | None
    """The metric at the end; the last reported value of a pruned trial."""
    reported: dict[int, float]
    """Intermediate values; 1: at half of the steps, 2: at three quarters."""
    params: dict[str, Any]
    """Config key -> value."""
    seconds: float | None

    @property
    def run(self) -> str:
        """Name of its run, in the study's folder `runs`."""
        return f"trial_{self.number:03d}"


@dataclass(frozen=True, kw_only=True)
class StudyTable:
    """A study, read from its folder."""

    metric: str
    window: int
    space: dict[str, Any]
    """Key -> its choices, or `low`, `high`, `log`."""
    trials: list[TrialRow]
    importance: dict[str, float]
    """Key -> importance (PED-ANOVA, sums to 1), largest first; empty with too few trials."""
    result: dict[str, Any]
    """`result.json`; empty until the finals have ended."""
    problems: list[str] = field(default_factory=list)


def is_study(folder: Path) -> bool:
    """Return whether a folder is a study's."""
    places = [folder / name for name in (JOURNAL, SETTINGS)]
    return all(os.path.isfile(place) and not os.path.islink(place) for place in places)


def load_study(folder: str | Path) -> StudyTable:
    """Read the study in a folder: finished, running or killed. Nothing is written.

    Raises:
        ReadError: it is not a study's folder, or one of its files is malformed.
        ImportError: optuna is not installed.
    """
    place = Path(folder)
    if not is_study(place):
        raise ReadError(f"{place} is not the folder of a study (no {JOURNAL} or {SETTINGS})")
    problems: list[str] = []
    search, result = (read_mapping(place / name, problems) for name in (SETTINGS, RESULT))
    with reraise_as(ImportError, "reading a study needs: pip install 'atomrl[tune]'", ImportError):
        import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    try:
        storage = JournalStorage(JournalFileBackend(str(place / JOURNAL)))
        study = optuna.load_study(study_name=STUDY_NAME, storage=storage)
        trials = [_row(trial) for trial in study.get_trials(deepcopy=False)]
        importance = _importance(study)
    except (LookupError, ValueError, TypeError, AttributeError, AssertionError, OSError) as error:
        raise ReadError(f"{place / JOURNAL} cannot be read: {error}") from None
    window, space = search.get("window") or 1, search.get("space") or {}
    if not isinstance(window, int) or not _is_mapping_of(space, dict | list):
        raise ReadError(
            f"{place / SETTINGS}: window is not an integer, or space is not a mapping of choices and ranges"
        )
    if not isinstance(result.get("seeds") or [], list) or not _is_mapping_of(result.get("finals") or {}, list):
        raise ReadError(f"{place / RESULT}: seeds is not a list, or finals is not a mapping of lists")
    return StudyTable(
        metric=str(search.get("metric", "")), window=window, space=space, trials=trials, importance=importance,
        result=result, problems=problems,
    )  # fmt: skip


def _is_mapping_of(value: Any, kind: type | UnionType) -> bool:
    return isinstance(value, dict) and all(isinstance(one, kind) for one in value.values())


def _row(trial: Any) -> TrialRow:
    reported = {int(place): float(value) for place, value in sorted(trial.intermediate_values.items())}
    value = trial.value
    if value is None and trial.state.name != "FAIL":  # what a failed or invalid one reported is no value
        value = next(reversed(reported.values()), None)
    return TrialRow(
        number=trial.number, state=trial.state.name.lower(), value=value, reported=reported,
        params={key: _plain(value, trial.distributions[key]) for key, value in trial.params.items()},
        seconds=trial.user_attrs.get(SECONDS),
    )  # fmt: skip


def _plain(value: Any, distribution: Any) -> Any:
    """Return a parameter's value; choices are stored as JSON (`Space.suggest`)."""
    return json.loads(value) if hasattr(distribution, "choices") else value


def _importance(study: Study) -> dict[str, float]:
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
    from optuna.trial import TrialState

    done = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    if len(done) < MIN_TRIALS or len({trial.value for trial in done}) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the evaluator is marked experimental
        shares = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    return {key: float(share) for key, share in shares.items()}
