"""`Run`: a run read from its folder, with its metrics, evaluations, rollouts, findings and config."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from atomrl.common.files import open_file
from atomrl.tracking.doctor.findings import Finding, is_evaluation
from atomrl.tracking.reading.lines import GrowingFile, ReadError, flat_tree, loads, read_mapping
from atomrl.tracking.reading.metrics import MetricTable
from atomrl.tracking.reading.rollouts import RolloutIndex, row_of
from atomrl.tracking.reading.state import FAILURE, RunState, state_of
from atomrl.tracking.reading.token_records import TOKENS, TokenTable, read_tokens

MARKS = ("metrics.jsonl", "config.yaml")
"""A folder with one of these files is a run's folder."""
MAPPINGS = ("config.yaml", "env.json", "summary.json", FAILURE)
WHERE = frozenset({"run_name", "output_dir"})
"""Config keys that name a run's folder; they do not change what the run computes."""
FUNCTIONS = "functions"
"""Subfolder with the source of the user's functions, one file each."""
INSIDE = {"rollouts", "checkpoints", "model", "inputs", "tensorboard", "wandb", "mlflow", "pools", FUNCTIONS}
"""Subfolders in which no runs are searched."""
MAX_DEPTH = 4
MAX_PROBLEMS = 20


class Run:
    """A run, read from its folder; `refresh` reads what was written since. Create it with `load_run`.

    Nothing is written, and no file stays open. What belongs to a missing or unreadable file is empty; `problems` has
    the reason.

    Args:
        path: the folder.
        rows: the rows of its `metrics.jsonl`, if they have been read already.

    Attributes:
        path: the folder.
        metrics: metrics of the training steps, by name.
        evaluations: metrics of the evaluations, by name.
        problems: files and lines that could not be read, with the reason.
    """

    def __init__(self, path: str | Path, rows: Sequence[Mapping[str, Any]] | None = None) -> None:
        self.path = Path(path)
        self.metrics, self.evaluations = MetricTable(), MetricTable()
        self._problems: list[str] = []
        self._file, self._line = GrowingFile(self.path / "metrics.jsonl"), 0
        self._files: dict[str, tuple[tuple[int, ...], dict[str, Any], list[str]]] = {}
        if rows is None:
            self.refresh()
        else:
            self._add(row for row in rows if has_step(row))

    def __repr__(self) -> str:
        state = self.state
        return f"Run({str(self.path)!r}: {state.status}, step {state.step} of {state.steps or '?'})"

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def config(self) -> dict[str, Any]:
        """`config.yaml` as written, of any version."""
        return self._mapping("config.yaml")

    @property
    def environment(self) -> dict[str, Any]:
        """`env.json`: versions, hardware, commit and command of the start, and of each resumption."""
        return self._mapping("env.json")

    @property
    def summary(self) -> dict[str, Any]:
        """`summary.json`; empty until the run ends."""
        return self._mapping("summary.json")

    @property
    def failure(self) -> dict[str, Any]:
        """`failure.json`: the error that ended the run; empty if there was none, or if it was killed."""
        return self._mapping(FAILURE)

    @property
    def state(self) -> RunState:
        """The current state."""
        state = state_of(self.path, self.config, self.summary, self.failure, self.metrics)
        fault = self.config_fault
        return replace(state, why=f"{state.why}; {fault}") if fault and state.status in ("failed", "stopped") else state

    @property
    def config_fault(self) -> str:
        """Why the run cannot be resumed: its config is missing or cannot be read; "" if it can."""
        config = self.config
        lines = self._files["config.yaml"][2] if self._files["config.yaml"][0] else ["config.yaml is missing"]
        return "" if config and not lines else f"{(lines or ['config.yaml is empty'])[0]}, so the run cannot be resumed"

    @property
    def findings(self) -> list[Finding]:
        """The doctor's findings during the run, oldest first."""
        return read_findings(self.path / "findings.jsonl")

    @property
    def functions(self) -> dict[str, str]:
        """Source of the user's functions, by file name; it is never executed."""
        folder = self.path / FUNCTIONS
        files = sorted(folder.glob("*.py")) if folder.is_dir() else []
        return {
            file.stem: file.read_text(encoding="utf-8", errors="replace") for file in files if not file.is_symlink()
        }

    @cached_property
    def rollouts(self) -> RolloutIndex:
        """The index of the completions, of training and evaluation."""
        return RolloutIndex(self.path / "rollouts")

    def tokens(self, step: int) -> TokenTable | None:
        """Read the recorded tokens of a step; None if there are none (`tracking.tokens`).

        Raises:
            ReadError: the file is damaged.
        """
        return read_tokens(self.path / "rollouts" / f"step_{step:06d}" / TOKENS)

    @property
    def problems(self) -> list[str]:
        """Files and lines that could not be read, with the reason."""
        for name in MAPPINGS:
            self._mapping(name)
        noted = [line for _, _, lines in self._files.values() for line in lines]
        rollouts = self.rollouts.problems if "rollouts" in self.__dict__ else []
        return [*noted, *self._problems, *rollouts]

    def refresh(self) -> bool:
        """Read what was written since. Returns whether there were new metrics. A rewritten `metrics.jsonl` is read from
        its start."""
        changed = False
        while True:
            restarted, lines = self._file.read()
            if restarted:
                self.metrics, self.evaluations, self._line, self._problems = MetricTable(), MetricTable(), 0, []
            changed |= restarted or bool(lines)
            if not lines:
                break
            self._add(self._parsed(lines))
        if "rollouts" in self.__dict__:
            self.rollouts.refresh()
        return changed

    def plot(self, out: str | Path | None = None) -> Path:
        """Plot the curves, as `atomrl compare --plot` does; returns the path of the image.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from atomrl.tracking.reading.plots import draw_curves  # it imports this module

        return draw_curves(self, Path(out) if out is not None else None)

    def _parsed(self, lines: list[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines:
            self._line += 1
            row = row_of(line)
            if row is not None and has_step(row):
                yield row
            elif len(self._problems) < MAX_PROBLEMS:
                self._problems.append(f"metrics.jsonl:{self._line} is not a row of metrics; skipped")

    def _add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        trained, evaluated = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
        for row in rows:
            (evaluated if is_evaluation(row) else trained).append(row)
        self.metrics.extend(trained)
        self.evaluations.extend(evaluated)

    def _mapping(self, name: str) -> dict[str, Any]:
        """Read a file with one mapping; again only if it has changed."""
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


def has_step(row: Mapping[str, Any]) -> bool:
    """Return whether a row of metrics has a step that a table can hold."""
    step = row.get("step")
    return isinstance(step, int) and 0 <= step < 2**53


def read_findings(path: Path) -> list[Finding]:
    """Read the findings in a file; empty if it does not exist. A line of another format is skipped."""
    try:
        with open_file(path) as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    findings = []
    for line in lines:
        try:
            row = loads(line)
            fields = {name: row[name] for name in ("id", "severity", "step", "what", "advice")}
            fields["quote"] = row.get("quote", "")
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(fields["step"], int):
            findings.append(Finding(**fields | {name: str(fields[name]) for name in fields if name != "step"}))
    return findings


def load_run(path: str | Path) -> Run:
    """Read the run in a folder: finished, running or killed, of this or another version.

    Example:
        >>> run = load_run("runs/quickstart")  # doctest: +SKIP
        >>> run.state.status, run.metrics["critic/score/mean"][-1]  # doctest: +SKIP
        ('finished', 0.9921875)

    Raises:
        ReadError: it is not a run's folder; the message names runs below it.
    """
    folder = Path(path)
    if not is_run(folder):
        below = [str(run) for run in find_runs(folder)][:5]
        hint = f"; runs in it: {', '.join(below)}" if below else ""
        what = "is not the folder of a run (it has neither metrics.jsonl nor config.yaml)"
        raise ReadError(f"{folder} {what if folder.exists() else 'does not exist'}{hint}")
    return Run(folder)


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's."""
    return any(os.path.isfile(folder / name) for name in MARKS)  # also False without permission to enter the folder


def find_runs(root: str | Path) -> Iterator[Path]:
    """Yield the folders of runs in `root`, or `root` itself if it is one; sorted by name. Symbolic links are not
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
    """Return the dotted keys in which two configs differ, with both values; None for a key that one of them lacks.

    Example:
        >>> config_differences({"train": {"steps": 1}, "seed": 0}, {"train": {"steps": 2}, "seed": 0})
        {'train.steps': (1, 2)}
    """
    old, new = flat_tree(one), flat_tree(other)
    keys = dict.fromkeys([*old, *new])
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}
