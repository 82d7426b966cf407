"""A run's folder, read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from atomrl.doctor.findings import Finding, is_evaluation
from atomrl.files import open_file
from atomrl.reading.lines import GrowingFile, ReadError, flat_tree, loads, read_mapping
from atomrl.reading.metrics import MetricTable
from atomrl.reading.rollouts import RolloutIndex
from atomrl.reading.state import FAILURE, RunState, state_of
from atomrl.reading.tokens import TOKENS, TokenTable, read_tokens

MARKS = ("metrics.jsonl", "config.yaml")
"""A folder with one of these is a run's."""
MAPPINGS = ("config.yaml", "env.json", "summary.json", FAILURE)
WHERE = frozenset({"run_name", "output_dir"})
"""Keys of the config that say where a run is, and not what it is."""
FUNCTIONS = "functions"
"""In a run's folder: the source of its own functions, a file each."""
INSIDE = {"rollouts", "checkpoints", "model", "inputs", "tensorboard", "wandb", "mlflow", "pools", FUNCTIONS}
"""Folders that hold no runs."""
MAX_DEPTH = 4
MAX_PROBLEMS = 20


class Run:
    """A run, as its folder has it when this is made; `refresh` reads on. Make it with `load_run`.

    Nothing is written, and no file is kept open. Files that are not there or cannot be read leave what is read of
    them empty, and what is wrong is in `problems`.

    Attributes:
        path: the folder.
        metrics: of the training steps, by name.
        evaluations: likewise of the evaluations.
        problems: what could not be read, a line each.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics, self.evaluations = MetricTable(), MetricTable()
        self._problems: list[str] = []
        self._file, self._line = GrowingFile(self.path / "metrics.jsonl"), 0
        self._files: dict[str, tuple[tuple[int, ...], dict[str, Any], list[str]]] = {}
        self.refresh()

    def __repr__(self) -> str:
        state = self.state
        return f"Run({str(self.path)!r}: {state.status}, step {state.step} of {state.steps or '?'})"

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def config(self) -> dict[str, Any]:
        """`config.yaml` as it was written, of whatever version."""
        return self._mapping("config.yaml")

    @property
    def environment(self) -> dict[str, Any]:
        """`env.json`: versions, hardware, commit, command, and those of each resumption."""
        return self._mapping("env.json")

    @property
    def summary(self) -> dict[str, Any]:
        """`summary.json`; empty until the run ends."""
        return self._mapping("summary.json")

    @property
    def failure(self) -> dict[str, Any]:
        """`failure.json`: the error that ended it; empty where none did, or where it was killed."""
        return self._mapping(FAILURE)

    @property
    def state(self) -> RunState:
        """How it is, at this moment."""
        return state_of(self.path, self.config, self.summary, self.failure, self.metrics)

    @property
    def findings(self) -> list[Finding]:
        """What the doctor found while the run ran, oldest first."""
        return read_findings(self.path / "findings.jsonl")

    @property
    def functions(self) -> dict[str, str]:
        """The source of its own functions, by the file's name; it is never run."""
        folder = self.path / FUNCTIONS
        files = sorted(folder.glob("*.py")) if folder.is_dir() else []
        return {
            file.stem: file.read_text(encoding="utf-8", errors="replace") for file in files if not file.is_symlink()
        }

    @cached_property
    def rollouts(self) -> RolloutIndex:
        """Its completions, of training and evaluation."""
        return RolloutIndex(self.path / "rollouts")

    def tokens(self, step: int) -> TokenTable | None:
        """The recorded tokens of a step; None where there are none (`tracking.tokens`).

        Raises:
            ReadError: their file is damaged.
        """
        return read_tokens(self.path / "rollouts" / f"step_{step:06d}" / TOKENS)

    @property
    def problems(self) -> list[str]:
        """What could not be read."""
        for name in MAPPINGS:
            self._mapping(name)
        noted = [line for _, _, lines in self._files.values() for line in lines]
        rollouts = self.rollouts.problems if "rollouts" in self.__dict__ else []
        return [*noted, *self._problems, *rollouts]

    def refresh(self) -> bool:
        """Read on; whether there were new metrics. A `metrics.jsonl` that was written anew is read anew."""
        changed = False
        while True:
            anew, lines = self._file.read()
            if anew:
                self.metrics, self.evaluations, self._line, self._problems = MetricTable(), MetricTable(), 0, []
            changed |= anew or bool(lines)
            if not lines:
                break
            self._take(lines)
        if "rollouts" in self.__dict__:
            self.rollouts.refresh()
        return changed

    def plot(self, out: str | Path | None = None) -> Path:
        """Draw its curves, as `atomrl compare --plot` does; returns where the picture is.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from atomrl.reading.curves import draw_curves  # which reads a run

        return draw_curves(self.path, Path(out) if out is not None else None)

    def _take(self, lines: list[bytes]) -> None:
        trained, evaluated = list[dict[str, Any]](), list[dict[str, Any]]()
        for line in lines:
            self._line += 1
            row = _row(line)
            if row is not None:
                (evaluated if is_evaluation(row) else trained).append(row)
            elif len(self._problems) < MAX_PROBLEMS:
                self._problems.append(f"metrics.jsonl:{self._line} is no row of metrics, and is passed over")
        self.metrics.extend(trained)
        self.evaluations.extend(evaluated)

    def _mapping(self, name: str) -> dict[str, Any]:
        """A file with one mapping, read again when it has changed."""
        path = self.path / name
        try:
            status = path.lstat()
            identity: tuple[int, ...] = (status.st_ino, status.st_size, status.st_mtime_ns)
        except OSError:
            identity = ()
        if name not in self._files or self._files[name][0] != identity:
            problems: list[str] = []
            value = read_mapping(path, problems) if identity else {}
            self._files[name] = identity, value, problems
        return self._files[name][1]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = loads(line)
    except ValueError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) and 0 <= step < 2**53 else None


def read_findings(path: Path) -> list[Finding]:
    """The findings in a file, none where it is not there; a line of another form is left out."""
    try:
        with open_file(path) as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            row = json.loads(line)
            given = {name: row[name] for name in ("id", "severity", "step", "what", "advice")}
            given["quote"] = row.get("quote", "")
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(given["step"], int):
            found.append(Finding(**given | {name: str(given[name]) for name in given if name != "step"}))
    return found


def load_run(path: str | Path) -> Run:
    """The run in a folder: finished, under way or killed, of this or another version.

    Example:
        >>> run = load_run("runs/quickstart")  # doctest: +SKIP
        >>> run.state.status, run.metrics["critic/score/mean"][-1]  # doctest: +SKIP
        ('finished', 0.9921875)

    Raises:
        ReadError: it is no run's folder; runs below it are named.
    """
    folder = Path(path)
    if not is_run(folder):
        below = [str(run) for run in find_runs(folder)][:5]
        hint = f"; there are runs in it: {', '.join(below)}" if below else ""
        what = "is no folder of a run (it has neither metrics.jsonl nor config.yaml)"
        raise ReadError(f"{folder} {what if folder.is_dir() else 'does not exist'}{hint}")
    return Run(folder)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's."""
    return any(os.path.isfile(folder / name) for name in MARKS)  # False in a folder that may not be entered, too


def find_runs(root: str | Path) -> Iterator[Path]:
    """All folders of runs in a folder, and that folder if it is one; in the order of their names. Links are not
    followed."""
    yield from _runs_below(Path(root), MAX_DEPTH)


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries if depth else ():
        if not entry.name.startswith(".") and entry.name not in INSIDE and entry.is_dir(follow_symlinks=False):
            yield from _runs_below(Path(entry.path), depth - 1)


def config_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys, with dots, in which two configs differ, each with both values; None where one of them lacks it.

    Example:
        >>> config_differences({"train": {"steps": 1}, "seed": 0}, {"train": {"steps": 2}, "seed": 0})
        {'train.steps': (1, 2)}
    """
    old, new = flat_tree(one), flat_tree(other)
    keys = dict.fromkeys([*old, *new])
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}
