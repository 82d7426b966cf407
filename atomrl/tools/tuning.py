"""A study: trials one after the other, bad ones ended half way, the best ones again on fresh seeds.

Every trial is a run of its own process in STUDY/runs, as `atomrl train` makes it. Pruning starts at half of the steps:
earlier, late bloomers are lost. Values are means over the last steps: single ones are noise. A study that was killed
goes on where it was and makes the same trials: what a trial is depends on the seed, its number and the trials before.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Self

import yaml
from pydantic import ConfigDict, Field, RootModel, ValidationError, model_validator

from atomrl.common.errors import did_you_mean, said_as
from atomrl.common.files import write_text
from atomrl.common.processes import die_with, without_launcher
from atomrl.config import ConfigError, RunConfig, build_config, dump_config, merge_trees, read_yaml
from atomrl.config.files import nest
from atomrl.config.schema import Section
from atomrl.tracking.doctor.findings import EVALUATED
from atomrl.tracking.reading import Run, is_run, load_run
from atomrl.tracking.reading.comparison import half_width
from atomrl.tracking.reading.lines import ReadError, owner, read_mapping

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

__all__ = ["Settings", "tune"]


# --------------------------------------------------------------------------------------------------------------------
# What is searched: keys of a config with their ranges or choices, from a YAML file.

FORMS = "a range ({low: 1.0e-5, high: 1.0e-3, log: true}) or several choices ([0.0, 0.1])"
Value = bool | int | float | str | None


class Range(Section):
    """Numbers from `low` to `high`; whole ones where both are."""

    model_config = ConfigDict(strict=True)

    low: int | float
    high: int | float
    log: bool = False
    """Evenly by their logarithms, as for a learning rate."""
    step: int | None = Field(None, ge=1)
    """Of whole numbers."""

    @model_validator(mode="after")
    def _some_numbers(self) -> Self:
        if self.low >= self.high or (self.log and self.low <= 0):
            raise ValueError(f"low={self.low} must be below high={self.high}{' and above 0' if self.log else ''}")
        if self.step is not None and (self.log or not self.whole):
            raise ValueError("step is of whole numbers that are not taken by their logarithms")
        return self

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


class Space(RootModel[dict[str, Range | list[Value]]]):
    """Key with dots -> what it may be."""

    def suggest(self, trial: Trial) -> dict[str, Value]:
        """A value for each key; of a trial that has them already, those."""
        found: dict[str, Value] = {}
        for key, given in self.root.items():
            if isinstance(given, list):
                # Optuna's choices are of one kind of value; YAML's need not be.
                place = {json.dumps(value): value for value in given}
                found[key] = place[trial.suggest_categorical(key, list(place))]
            elif given.whole:
                found[key] = trial.suggest_int(
                    key, int(given.low), int(given.high), step=given.step or 1, log=given.log
                )
            else:
                found[key] = trial.suggest_float(key, given.low, given.high, log=given.log)
        return found

    def values_of(self, params: Mapping[str, Any]) -> dict[str, Value]:
        """What a finished trial had, as `suggest` gave it."""
        return {key: json.loads(v) if isinstance(self.root[key], list) else v for key, v in params.items()}

    def ends(self) -> list[dict[str, Value]]:
        """Each key's choices or ends, the other keys as they are in the config: what has to be valid."""
        pairs = [
            (key, given if isinstance(given, list) else (given.low, given.high)) for key, given in self.root.items()
        ]
        return [{key: value} for key, values in pairs for value in values]


def read_space(path: str | Path, config: RunConfig) -> Space:
    """The space of a file.

    Raises:
        ConfigError: what is wrong in it, or a key or value that the config does not take.
    """
    given = read_yaml(path)
    if not given:
        raise ConfigError(f"{path}: name keys, each with {FORMS}")
    space = Space({str(key): _checked(f"{path}: {key}", value) for key, value in given.items()})
    for values in space.ends():
        try:
            with_values(config, values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    return space


def _checked(where: str, given: Any) -> Range | list[Value]:
    values = given if isinstance(given, list) else []
    if len(values) > 1 and all(value is None or isinstance(value, bool | int | float | str) for value in values):
        return values
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}={given}: write {FORMS}")
    try:
        return Range.model_validate(given)
    except ValidationError as error:
        found = [(item["loc"], item["msg"].removeprefix("Value error, ")) for item in error.errors()]
        wrong = dict.fromkeys(str(place[0]) if place else message for place, message in found)
        raise ConfigError(f"{where}={given}: {', '.join(wrong)}: write {FORMS}") from None


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """A config with other values of some keys. Another type of a choice comes with its own defaults, not with the
    settings of the type before."""
    tree = config.to_tree(secrets=True)
    for key, value in sorted(values.items(), key=lambda pair: not pair[0].endswith(".type")):  # types first
        section, name = key.rpartition(".")[::2]
        if name == "type":
            before: Any = tree
            for part in section.split("."):
                before = before.get(part) if isinstance(before, Mapping) else None
            if isinstance(before, Mapping) and before.get("type") != value:
                tree = merge_trees(tree, nest(section, None))
        tree = merge_trees(tree, nest(key, value))
    return build_config(tree)


# --------------------------------------------------------------------------------------------------------------------
# Studies of `atomrl tune`, read: their trials, what decides, and what came of them.

JOURNAL, STUDY_NAME, SETTINGS, RESULT = "study.journal", "tune", "study.yaml", "result.json"
SECONDS = "seconds"
"""Of a trial that has ended: what it took."""
MIN_TRIALS = 4
"""Whole trials below which nothing is said about what decides."""


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """A trial."""

    number: int
    state: str
    """`complete`, `pruned`, `fail`, `running` or `waiting`."""
    value: float | None
    """Of the study's metric at its end; of one that was ended early, the last that it reported."""
    reported: dict[int, float]
    """1: at half of the steps, 2: at three quarters."""
    params: dict[str, Any]
    """Key of the config -> value."""
    seconds: float | None

    @property
    def run(self) -> str:
        """The name of its run, in the study's folder `runs`."""
        return f"trial_{self.number:03d}"


@dataclass(frozen=True, kw_only=True)
class StudyTable:
    """A study, as its folder has it."""

    metric: str
    window: int
    space: dict[str, Any]
    """Key -> its choices, or `low`, `high`, `log`."""
    trials: list[TrialRow]
    importance: dict[str, float]
    """Key -> its share in what moves the value, largest first; empty where trials are too few to say."""
    result: dict[str, Any]
    """`result.json`; empty until the finals are done."""
    problems: list[str] = field(default_factory=list)


def is_study(folder: Path) -> bool:
    """Whether a folder is a study's."""
    places = [folder / name for name in (JOURNAL, SETTINGS)]
    return all(os.path.isfile(place) and not os.path.islink(place) for place in places)


def load_study(folder: str | Path) -> StudyTable:
    """The study in a folder: finished, under way or killed. Nothing is written.

    Raises:
        ReadError: it is no study's folder, its journal cannot be read, or one of its files is of another form.
        ImportError: optuna is not installed.
    """
    place = Path(folder)
    if not is_study(place):
        raise ReadError(f"{place} is no folder of a study (it lacks {JOURNAL} or {SETTINGS})")
    problems: list[str] = []
    about, result = (read_mapping(place / name, problems) for name in (SETTINGS, RESULT))
    with said_as(ImportError, "reading a study needs: pip install 'atomrl[tune]'", ImportError):
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
    window, space = about.get("window") or 1, about.get("space") or {}
    if not isinstance(window, int) or not _is_mapping_of(space, dict | list):
        raise ReadError(f"{place / SETTINGS}: window is no whole number, or space no mapping of choices and ranges")
    if not isinstance(result.get("seeds") or [], list) or not _is_mapping_of(result.get("finals") or {}, list):
        raise ReadError(f"{place / RESULT}: seeds are no list, or finals no mapping of lists")
    return StudyTable(
        metric=str(about.get("metric", "")), window=window, space=space, trials=trials, importance=importance,
        result=result, problems=problems,
    )  # fmt: skip


def _is_mapping_of(value: Any, kind: type | UnionType) -> bool:
    return isinstance(value, dict) and all(isinstance(one, kind) for one in value.values())


def _row(trial: Any) -> TrialRow:
    reported = {int(place): float(value) for place, value in sorted(trial.intermediate_values.items())}
    value = trial.value if trial.value is not None else next(reversed(reported.values()), None)
    return TrialRow(
        number=trial.number, state=trial.state.name.lower(), value=value, reported=reported,
        params={key: _plain(given, trial.distributions[key]) for key, given in trial.params.items()},
        seconds=trial.user_attrs.get(SECONDS),
    )  # fmt: skip


def _plain(value: Any, distribution: Any) -> Any:
    """Choices are stored as JSON (`tuning.space`)."""
    return json.loads(value) if hasattr(distribution, "choices") else value


def _importance(study: Study) -> dict[str, float]:
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
    from optuna.trial import TrialState

    done = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    if len(done) < MIN_TRIALS or len({trial.value for trial in done}) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the evaluator is experimental
        shares = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    return {key: float(share) for key, share in shares.items()}


BEST = 3
"""Trials that are run again on fresh seeds."""
FRESH_SEEDS = 1000
"""Added to the config's seed for those."""
ROWS_TO_SEE = 3
"""Steps by which a metric of training is there."""
POLL_S = 0.2
ENDING_S = 60.0
"""How long a run's process of an earlier attempt may take to end."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a study is made."""

    folder: Path
    runs: int = 20
    seeds: int = 3
    budget_s: float = math.inf
    metric: str = "critic/score/mean"
    """Of `metrics.jsonl`, of training or of evaluations. The larger the better, or after a `-` the smaller."""
    window: int = 10
    """Steps, or evaluations, that a value is a mean of."""
    command: Sequence[str]
    """What makes a run, but for what a trial changes: `atomrl train CONFIG key=value ...`."""


@dataclass(frozen=True)
class TrialOutcome:
    """A run of a study."""

    value: float | None
    """None: it failed."""
    pruned: bool = False


Judge = Callable[[int, float], bool]
"""1 at half of the steps, 2 at three quarters, and the value so far -> whether the run is not worth its rest."""


def tune(config: RunConfig, space: Space, settings: Settings, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Search, and try the best and the config as it is on fresh seeds.

    Returns:
        What is in STUDY/result.json: `best` (values by key), `better` (by more than the interval), and all finals.

    Raises:
        ConfigError: optuna or scipy is not installed, no trial succeeded.
    """
    with said_as(ConfigError, "tuning needs: pip install 'atomrl[tune]'", ImportError):
        import scipy.stats  # noqa: F401 - of the finals, hours later
        from optuna.trial import TrialState
    settings.folder.mkdir(parents=True, exist_ok=True)
    _same_study(config, space, settings)
    study = _study(settings.folder)
    for trial in _trials(study, config, settings):
        values = space.suggest(trial)
        said = ", ".join(f"{key}={_short(value)}" for key, value in values.items())

        def judge(place: int, value: float, trial: Trial = trial) -> bool:
            if place not in study.get_trials(deepcopy=False)[trial.number].intermediate_values:
                trial.report(value, place)
            return is_worse_half(study, trial.number, place)

        name, began = f"trial_{trial.number:03d}", time.monotonic()
        earlier = _seconds_of_steps(settings.folder / "runs" / name)
        outcome = _run(config.train.steps, values, name, settings, judge)
        trial.set_user_attr(SECONDS, earlier + time.monotonic() - began)
        if outcome.pruned:
            study.tell(trial, state=TrialState.PRUNED)
        else:
            failed = outcome.value is None
            study.tell(trial, outcome.value, state=TrialState.FAIL if failed else None)
        end = "pruned" if outcome.pruned else "failed" if outcome.value is None else f"{outcome.value:.4f}"
        say(f"trial {trial.number}: {end}  {said}")
    done = study.get_trials(states=[TrialState.COMPLETE])
    if not done:
        raise ConfigError(f"no trial of {settings.folder} came to its end; look into its runs")
    done.sort(key=lambda trial: -(trial.value or 0.0))
    return _finals(config, space, settings, [(trial.number, trial) for trial in done[:BEST]], say)


def is_worse_half(study: Study, number: int, place: int) -> bool:
    """Successive halving: whether a trial, at one of the places that trials report from (1, 2), is not of the better
    half of those that came there before it. By what was reported alone, so a study that goes on decides the same."""
    trials = study.get_trials(deepcopy=False)[: number + 1]
    values = [float(trial.intermediate_values[place]) for trial in trials if place in trial.intermediate_values]
    return values[-1] < sorted(values)[-max(1, len(values) // 2)]


def _seconds_of_steps(folder: Path) -> float:
    """What a run has used that was under way when the study was killed."""
    return float(load_run(folder).metrics.points("timing_s/step")[1].sum()) if is_run(folder) else 0.0


def _study(folder: Path) -> Study:
    """The study in a folder, or a new one."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    return optuna.create_study(storage=storage, study_name=STUDY_NAME, direction="maximize", load_if_exists=True)


def _same_study(config: RunConfig, space: Space, settings: Settings) -> None:
    """That a study that is there was of the same config and space: its trials are compared with the new ones."""
    path = settings.folder / SETTINGS
    tree = {
        "config": config.to_tree(),
        "space": space.model_dump(),
        "metric": settings.metric,
        "window": settings.window,
    }
    text = yaml.safe_dump(tree, sort_keys=False)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise ConfigError(f"{settings.folder} is a study of another config, space or metric; name another --out")
    write_text(path, text)


def _trials(study: Study, config: RunConfig, settings: Settings) -> Any:
    """The trials that are still to be made; one that was under way when the study was killed comes first."""
    import optuna

    began = time.monotonic()
    earlier = sum(_seconds(study))

    def draw_as(number: int) -> None:
        """A sampler for each trial, so that one that follows a restart is the one that would have followed without."""
        study.sampler = optuna.samplers.TPESampler(seed=(config.seed * 100_003 + number) % 2**32, n_startup_trials=5)

    for frozen in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
        draw_as(frozen.number)
        yield optuna.trial.Trial(study, frozen._trial_id)
    while len(study.trials) < settings.runs:
        finished = _seconds(study)
        used = earlier + time.monotonic() - began
        finals = (BEST + 1) * settings.seeds * (max(finished) if finished else 0.0)
        if finished and used + finals + max(finished) > settings.budget_s:
            return
        draw_as(len(study.trials))
        yield study.ask()


def _seconds(study: Study) -> list[float]:
    """What each trial that has ended took, while the study ran: it may have lain killed in between."""
    return [
        float(trial.user_attrs[SECONDS]) for trial in study.get_trials(deepcopy=False) if SECONDS in trial.user_attrs
    ]


def _run(
    steps: int, values: Mapping[str, Any], name: str, settings: Settings, judge: Judge | None = None
) -> TrialOutcome:
    """One run, from wherever it is; `judge` is asked from half of the steps on, and what it says of a run that was too
    fast to be ended holds too: else the trials that follow would depend on the machine's speed."""
    folder, asked = settings.folder / "runs" / name, set[int]()
    ended = not _finished(folder) and _process(steps, values, folder, settings, judge, asked)
    if ended or (judge is not None and _to_be_ended(steps, folder, settings, judge, asked)):
        return TrialOutcome(None, pruned=True)
    if not _finished(folder):
        return TrialOutcome(None)
    run = load_run(folder)
    found = _points(run, settings.metric)[1]
    if not len(found):
        raise _no_metric(run, settings.metric)
    return TrialOutcome(float(found[-settings.window :].mean()))


def _points(run: Run, metric: str) -> tuple[Any, Any]:
    """Steps and values of a metric of training, or of evaluations; negative where the smaller is the better."""
    name = metric.removeprefix("-")
    steps, values = (run.metrics if name in run.metrics else run.evaluations).points(name)
    return steps, -values if metric.startswith("-") else values


def _no_metric(run: Run, metric: str) -> ConfigError:
    names = sorted([*run.metrics, *run.evaluations])
    return ConfigError(f"--metric {metric}: {run.path} has none; {did_you_mean(metric, names, 'it has')}")


def _finished(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.exists() and bool(json.loads(summary.read_text(encoding="utf-8")).get("finished"))


def _process(
    steps: int, values: Mapping[str, Any], folder: Path, settings: Settings, judge: Judge | None, asked: set[int]
) -> bool:
    """Make a run in a process of its own, which ends with this one; whether it was ended early. The doctor's errors end
    it as well.

    Raises:
        ConfigError: another process is writing it.
    """
    _wait_until_free(folder)
    where = {"run_name": folder.name, "output_dir": str(folder.parent)}
    command = [*settings.command, *(f"{key}={json.dumps(value)}" for key, value in {**values, **where}.items())]
    resumed = ["--resume"] if (folder / "config.yaml").exists() else []
    log = settings.folder / "logs" / f"{folder.name}.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("a") as output:
        together = partial(die_with, os.getpid())
        process = subprocess.Popen(
            [*command, *resumed], stdout=output, stderr=output, preexec_fn=together, env=without_launcher()
        )
        ended = False
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                if judge is not None and not ended and _to_be_ended(steps, folder, settings, judge, asked):
                    ended = True
                    process.send_signal(signal.SIGTERM)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    return ended


def _wait_until_free(folder: Path) -> None:
    """Wait for a process that is still ending: that of the run when the study was killed."""
    deadline = time.monotonic() + ENDING_S
    while (process := owner(folder)) is not None:
        if time.monotonic() > deadline:
            who = f"process {process}" if process else "a process of another container"
            raise ConfigError(f"{who} is writing the run {folder}: end it, or let it end, and begin again")
        time.sleep(POLL_S)


def _to_be_ended(last: int, folder: Path, settings: Settings, judge: Judge, asked: set[int]) -> bool:
    if not (folder / "metrics.jsonl").exists():
        return False
    run = load_run(folder)
    if any(finding.severity == "error" for finding in run.findings):
        return True
    steps, values = _points(run, settings.metric)
    each_step = not settings.metric.removeprefix("-").startswith(EVALUATED)
    if not len(steps) and each_step and len(run.metrics.steps) >= ROWS_TO_SEE:
        raise _no_metric(run, settings.metric)  # at once: a study takes hours
    for place, rung in enumerate((last // 2, 3 * last // 4), 1):
        before = values[steps <= rung]
        if rung not in asked and len(steps) and steps[-1] >= rung and len(before) and rung < last:
            asked.add(rung)
            if judge(place, float(before[-settings.window :].mean())):
                return True
    return False


def _finals(
    config: RunConfig, space: Space, settings: Settings, best: Sequence[tuple[int, Any]], say: Callable[[str], None]
) -> dict[str, Any]:
    """The config as it is and the best trials, each on the same fresh seeds."""
    seeds = [config.seed + FRESH_SEEDS + place for place in range(settings.seeds)]
    values = {f"trial_{number:03d}": space.values_of(trial.params) for number, trial in best}
    contenders: dict[str, dict[str, Any]] = {"as_it_is": {}, **values}
    found: dict[str, list[float | None]] = {}
    for name, changed in contenders.items():
        found[name] = [
            _run(config.train.steps, {**changed, "seed": seed}, f"final_{name}_seed_{seed}", settings).value
            for seed in seeds
        ]
        said = ", ".join("failed" if value is None else f"{value:.4f}" for value in found[name])
        say(f"final {name}: {said}")
    whole = {name: given for name, given in found.items() if None not in given and name != "as_it_is"}
    winner = max(whole, key=lambda name: statistics.fmean(v or 0.0 for v in whole[name]), default=None)
    result: dict[str, Any] = {"seeds": seeds, "finals": found, "metric": settings.metric, "winner": winner}
    base = found["as_it_is"]
    if winner is None or None in base:
        result |= {"better": False, "note": "not all runs of the finals came to their end"}
    else:
        gains = [(a or 0.0) - (b or 0.0) for a, b in zip(whole[winner], base, strict=True)]
        gain, half = statistics.fmean(gains), half_width(gains)
        result |= {"best": contenders[winner], "gain": gain, "interval": half, "better": gain > half}
        verdict = f"is {'' if gain > half else 'not clearly '}better than the config as it is"
        result["note"] = f"{winner} {verdict}: {gain:+.4f}, within {half:.4f} (95%), over {len(seeds)} fresh seeds"
        write_text(settings.folder / "best.yaml", dump_config(with_values(config, contenders[winner])))
    write_text(settings.folder / RESULT, json.dumps(result, indent=1) + "\n")
    say(str(result["note"]))
    return result


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
