"""Hyperparameter search with Optuna (`atomrl tune`): study, pruning, and finals on fresh seeds."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from atomrl.common.errors import did_you_mean, reraise_as
from atomrl.common.files import write_text
from atomrl.common.launchers import without_launcher
from atomrl.common.workers import die_with_parent
from atomrl.config import ConfigError, RunConfig, dump_config
from atomrl.tools.search_space import Space, with_values
from atomrl.tracking.doctor.findings import EVALUATED
from atomrl.tracking.reading import Run, is_run, load_run
from atomrl.tracking.reading.comparison import half_width
from atomrl.tracking.reading.lines import read_mapping
from atomrl.tracking.reading.lock import Locked, acquire_lock, lock_owner, release_lock
from atomrl.tracking.reading.run import read_findings
from atomrl.tracking.reading.studies import JOURNAL, RESULT, SECONDS, SETTINGS, STUDY_NAME

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

__all__ = ["Settings", "tune"]


BEST = 3
"""Number of trials that are repeated on fresh seeds."""
FRESH_SEEDS = 1000
"""Offset of the fresh seeds to the config's seed."""
ROWS_TO_SEE = 3
"""Steps after which a training metric must have appeared."""
POLL_S = 0.2
ENDING_S = 60.0
"""Seconds that a run's process of an earlier attempt may take to exit."""
Judge = Callable[[int, float], bool]
"""(1 at half of the steps or 2 at three quarters, value so far) -> whether to prune the run."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a study."""

    folder: Path
    runs: int = 20
    seeds: int = 3
    budget_s: float = math.inf
    metric: str = "critic/score/mean"
    """Metric of training or evaluations to maximize; with a `-` in front to minimize."""
    window: int = 10
    """Number of last steps, or evaluations, that a value is averaged over."""
    command: Sequence[str]
    """The command of a run without the changes of a trial: `atomrl train CONFIG key=value ...`."""


@dataclass(frozen=True)
class TrialOutcome:
    """Result of a run of a study."""

    value: float | None
    """None if it failed, was pruned, or is invalid."""
    pruned: str = ""
    """Why it was pruned; "" if it was not."""
    invalid: str = ""
    """Error that the doctor found (reward hacking, stale weights); its metric means nothing, however high it is."""

    @property
    def text(self) -> str:
        """The value, or why there is none."""
        return f"{self.value:.4f}" if self.value is not None else self.invalid or self.pruned or "failed"


def tune(config: RunConfig, space: Space, settings: Settings, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Run the search, then the best trials and the unchanged config on fresh seeds.

    Returns:
        The content of STUDY/result.json: `best` (values by key), `better` (True if the gain exceeds its 95% interval),
        and all finals.

    Raises:
        ConfigError: optuna or scipy is not installed, another process runs the study, or no trial succeeded.
    """
    with reraise_as(ConfigError, "tuning needs: pip install 'atomrl[tune]'", ImportError):
        import optuna  # noqa: F401
        import scipy.stats  # noqa: F401  # needed for the finals, hours later
    settings.folder.mkdir(parents=True, exist_ok=True)
    try:
        acquire_lock(settings.folder)
    except Locked as other:
        raise ConfigError(
            f"another process ({other}) runs the study {settings.folder}: wait for it, stop it, or use another --out"
        ) from None
    try:
        return _search(config, space, settings, log)
    finally:
        release_lock(settings.folder)


def _search(config: RunConfig, space: Space, settings: Settings, log: Callable[[str], None]) -> dict[str, Any]:
    """Run the search and the finals of a study that this process has locked."""
    from optuna.trial import TrialState

    _same_study(config, space, settings)
    study, ends = open_study(settings.folder), Counter[str]()
    for trial in _trials(study, config, settings):
        values = space.suggest(trial)
        text = ", ".join(f"{key}={_short(value)}" for key, value in values.items())

        def judge(place: int, value: float, trial: Trial = trial) -> bool:
            if place not in study.get_trials(deepcopy=False)[trial.number].intermediate_values:
                trial.report(value, place)
            return is_worse_half(study, trial.number, place)

        name, began = f"trial_{trial.number:03d}", time.monotonic()
        folder = settings.folder / "runs" / name
        # the training time of a run that was interrupted when the study was killed
        earlier = float(load_run(folder).metrics.points("timing_s/step")[1].sum()) if is_run(folder) else 0.0
        outcome = run_trial(config.train.steps, values, name, settings, judge)
        trial.set_user_attr(SECONDS, earlier + time.monotonic() - began)
        if outcome.pruned:
            study.tell(trial, state=TrialState.PRUNED)
        else:  # the sampler and later prunings leave out failed trials, with what they reported
            failed = outcome.value is None
            study.tell(trial, outcome.value, state=TrialState.FAIL if failed else None)
        if outcome.value is None:
            ends[outcome.text] += 1
        log(f"trial {trial.number}: {outcome.text}  {text}")
    done = study.get_trials(states=[TrialState.COMPLETE])
    if not done:
        counts = ", ".join(f"{count} {end}" for end, count in ends.most_common()) or "no new one was started"
        raise ConfigError(f"no trial of {settings.folder} finished ({counts}); see the logs of its runs")
    done.sort(key=lambda trial: -(trial.value or 0.0))
    return _finals(config, space, settings, [(trial.number, trial) for trial in done[:BEST]], log)


def is_worse_half(study: Study, number: int, place: int) -> bool:
    """Return whether a trial is in the worse half of itself and earlier trials at a report (successive halving).

    Reports are 1 and 2 (`Judge`). Failed and invalid trials are left out. Depends on the study only, so a resumed one
    decides the same.
    """
    from optuna.trial import TrialState

    trials = [trial for trial in study.get_trials(deepcopy=False)[: number + 1] if trial.state != TrialState.FAIL]
    values = [float(trial.intermediate_values[place]) for trial in trials if place in trial.intermediate_values]
    return values[-1] < sorted(values)[-max(1, len(values) // 2)]


def open_study(folder: Path) -> Study:
    """Open the study in a folder, or create it."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    return optuna.create_study(storage=storage, study_name=STUDY_NAME, direction="maximize", load_if_exists=True)


def _same_study(config: RunConfig, space: Space, settings: Settings) -> None:
    """Write the study's settings; refuse to continue a study of another config, space or metric, since its trials would
    not be comparable."""
    path = settings.folder / SETTINGS
    tree = {
        "config": config.to_tree(),
        "space": space.model_dump(),
        "metric": settings.metric,
        "window": settings.window,
    }
    text = yaml.safe_dump(tree, sort_keys=False)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise ConfigError(f"{settings.folder} is a study with another config, space or metric; use another --out")
    write_text(path, text)


def _trials(study: Study, config: RunConfig, settings: Settings) -> Any:
    """Yield the remaining trials; one that was interrupted when the study was killed comes first."""
    import optuna

    began = time.monotonic()
    earlier = sum(_seconds(study))

    def set_sampler(number: int) -> None:
        """Seed the sampler by the trial's number, so that a restart does not change the trials."""
        study.sampler = optuna.samplers.TPESampler(seed=(config.seed * 100_003 + number) % 2**32, n_startup_trials=5)

    for frozen in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
        set_sampler(frozen.number)
        yield optuna.trial.Trial(study, frozen._trial_id)
    while len(study.trials) < settings.runs:
        finished = _seconds(study)
        used = earlier + time.monotonic() - began
        finals = (BEST + 1) * settings.seeds * (max(finished) if finished else 0.0)
        if finished and used + finals + max(finished) > settings.budget_s:
            return
        set_sampler(len(study.trials))
        yield study.ask()


def _seconds(study: Study) -> list[float]:
    """Return the duration of each ended trial, without the time in which the study did not run."""
    return [
        float(trial.user_attrs[SECONDS]) for trial in study.get_trials(deepcopy=False) if SECONDS in trial.user_attrs
    ]


def run_trial(
    steps: int, values: Mapping[str, Any], name: str, settings: Settings, judge: Judge | None = None
) -> TrialOutcome:
    """Start or resume a run. `judge` may prune it from half of the steps on. It also applies to a run that finished
    before it could be stopped: else later trials would depend on the machine's speed."""
    folder, judged = settings.folder / "runs" / name, set[int]()
    pruned = "" if _finished(folder) else _process(steps, values, folder, settings, judge, judged)
    pruned = pruned or why_pruned(steps, folder, settings, judge, judged)
    if invalid := why_invalid(folder):
        return TrialOutcome(None, invalid=invalid)
    if pruned:
        return TrialOutcome(None, pruned=pruned)
    if not _finished(folder):
        return TrialOutcome(None)
    run = load_run(folder)
    points = _points(run, settings.metric)[1]
    if not len(points):
        raise _no_metric(run, settings.metric)
    return TrialOutcome(float(points[-settings.window :].mean()))


def _points(run: Run, metric: str) -> tuple[Any, Any]:
    """Return steps and values of a training or evaluation metric; negated if it is to be minimized."""
    name = metric.removeprefix("-")
    steps, values = (run.metrics if name in run.metrics else run.evaluations).points(name)
    return steps, -values if metric.startswith("-") else values


def _no_metric(run: Run, metric: str) -> ConfigError:
    names = sorted([*run.metrics, *run.evaluations])
    return ConfigError(f"--metric {metric}: {run.path} has none; {did_you_mean(metric, names, 'it has:')}")


def _finished(folder: Path) -> bool:
    return bool(read_mapping(folder / "summary.json", []).get("finished"))


def _process(
    steps: int, values: Mapping[str, Any], folder: Path, settings: Settings, judge: Judge | None, judged: set[int]
) -> str:
    """Run a trial in a child process that dies with this one, and stop it if it is invalid or pruned. Returns why it
    was pruned; "" if it was not.

    Raises:
        ConfigError: another process is writing it.
    """
    wait_until_free(folder)
    where = {"run_name": folder.name, "output_dir": str(folder.parent)}
    command = [*settings.command, *(f"{key}={json.dumps(value)}" for key, value in {**values, **where}.items())]
    resumed = ["--resume"] if (folder / "config.yaml").exists() else []
    log = settings.folder / "logs" / f"{folder.name}.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("a") as output:
        together = partial(die_with_parent, os.getpid())
        process = subprocess.Popen(
            [*command, *resumed], stdout=output, stderr=output, preexec_fn=together, env=without_launcher()
        )
        pruned, stopped = "", False
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                if stopped:
                    continue
                # A final has no judge: it is not stopped, since its other seeds run to the end too.
                invalid = judge is not None and why_invalid(folder)
                pruned = "" if invalid else why_pruned(steps, folder, settings, judge, judged)
                if stopped := bool(invalid or pruned):
                    process.send_signal(signal.SIGTERM)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    return pruned


def wait_until_free(folder: Path) -> None:
    """Wait for the run's process of a killed study to exit.

    Raises:
        ConfigError: it is still there after a while.
    """
    deadline = time.monotonic() + ENDING_S
    while (process := lock_owner(folder)) is not None:
        if time.monotonic() > deadline:
            who = f"process {process}" if process else "a process of another container"
            raise ConfigError(f"{who} is writing the run {folder}: stop it, or wait for it, and start again")
        time.sleep(POLL_S)


def why_invalid(folder: Path) -> str:
    """Return the error that the doctor found in a run, with which its metric means nothing; "" if there is none."""
    errors = [finding.id for finding in read_findings(folder / "findings.jsonl") if finding.severity == "error"]
    return f"ended by the doctor ({errors[0]})" if errors else ""


def why_pruned(last: int, folder: Path, settings: Settings, judge: Judge | None, judged: set[int]) -> str:
    """Return why a running trial is to be ended, because `judge` prunes it at a rung; else "".

    Args:
        last: number of steps of the trial.
        judge: None for a run that is never pruned.
        judged: rungs at which `judge` was asked already; extended here.

    Raises:
        ConfigError: the run has no such metric.
    """
    if judge is None or not (folder / "metrics.jsonl").exists():
        return ""
    run = load_run(folder)
    steps, values = _points(run, settings.metric)
    each_step = not settings.metric.removeprefix("-").startswith(EVALUATED)
    if not len(steps) and each_step and len(run.metrics.steps) >= ROWS_TO_SEE:
        raise _no_metric(run, settings.metric)  # early: a study takes hours
    for place, rung in enumerate((last // 2, 3 * last // 4), 1):
        before = values[steps <= rung]
        if rung not in judged and len(steps) and steps[-1] >= rung and len(before) and rung < last:
            judged.add(rung)
            if judge(place, float(before[-settings.window :].mean())):
                return f"pruned at step {rung}"
    return ""


def _finals(
    config: RunConfig, space: Space, settings: Settings, best: Sequence[tuple[int, Any]], log: Callable[[str], None]
) -> dict[str, Any]:
    """Run the unchanged config and the best trials on the same fresh seeds, and write the result."""
    seeds = [config.seed + FRESH_SEEDS + place for place in range(settings.seeds)]
    values = {f"trial_{number:03d}": space.values_of(trial.params) for number, trial in best}
    contenders: dict[str, dict[str, Any]] = {"as_it_is": {}, **values}
    finals: dict[str, list[float | None]] = {}
    for name, changes in contenders.items():
        ends = [
            run_trial(config.train.steps, {**changes, "seed": seed}, f"final_{name}_seed_{seed}", settings)
            for seed in seeds
        ]
        finals[name] = [end.value for end in ends]
        log(f"final {name}: {', '.join(end.text for end in ends)}")
    # The winner has the highest mean; it is better only if the interval of the paired differences excludes 0.
    complete = {name: scores for name, scores in finals.items() if None not in scores and name != "as_it_is"}
    winner = max(complete, key=lambda name: statistics.fmean(v or 0.0 for v in complete[name]), default=None)
    result: dict[str, Any] = {"seeds": seeds, "finals": finals, "metric": settings.metric, "winner": winner}
    base = finals["as_it_is"]
    if winner is None or None in base:
        result |= {"better": False, "note": "not all runs of the finals finished without an error of the doctor"}
    else:
        gains = [(a or 0.0) - (b or 0.0) for a, b in zip(complete[winner], base, strict=True)]
        gain, half = statistics.fmean(gains), half_width(gains)
        result |= {"best": contenders[winner], "gain": gain, "interval": half, "better": gain > half}
        verdict = f"is {'' if gain > half else 'not clearly '}better than the original config"
        result["note"] = f"{winner} {verdict}: {gain:+.4f} ± {half:.4f} (95%), over {len(seeds)} fresh seeds"
        write_text(settings.folder / "best.yaml", dump_config(with_values(config, contenders[winner])))
    write_text(settings.folder / RESULT, json.dumps(result, indent=1) + "\n")
    log(str(result["note"]))
    return result


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
