"""`atomrl doctor`: diagnose a run, this machine, or a rollout engine on it."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from atomrl.cli.main import Run
from atomrl.tools.engine_check import check_engine
from atomrl.tools.machine import chosen_defaults, hardware, installed

PROBLEMS = 1


def add_doctor(parser: argparse.ArgumentParser) -> Run:
    """Diagnose a run: outcome, problems, what to try. Without a run: what is installed and what will be used.

    Exit code 1 if there are findings.

    atomrl doctor runs/quickstart     # a run that is finished, under way, or was killed
    atomrl doctor                     # this machine
    atomrl doctor --engine sglang     # whether an engine works here; with a config, for its model too
    """
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="the folder of a run; none: this machine")
    parser.add_argument("--engine", metavar="NAME", help="check this rollout engine; RUN may be a config")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else on stdout")
    return run_doctor


def run_doctor(arguments: argparse.Namespace) -> int:
    """Diagnose a run, an engine, or this machine."""
    if arguments.engine is not None:
        return show([(arguments.engine, check_engine(arguments.engine, arguments.run))], arguments.json)
    if arguments.run is not None:
        return diagnose_run(arguments.run, arguments.json)
    # Environment variables are never printed: they may hold secrets.
    parts = (("installed", installed()), ("hardware", hardware()), ("will be used", chosen_defaults()))
    return show(parts, arguments.json)


def diagnose_run(folder: Path, as_json: bool = False) -> int:
    """Print the outcome of a run, the error that ended it, if any, and all findings, from its folder."""
    from atomrl.tracking.doctor import MOST_CHECKS, diagnose
    from atomrl.tracking.doctor.quotes import quote
    from atomrl.tracking.reading.lines import ReadError, metrics_of, read_mapping, read_metrics
    from atomrl.tracking.reading.run import Run as LoadedRun
    from atomrl.tracking.reading.run import find_runs, is_run, load_run
    from atomrl.tracking.reading.state import FAILURE
    from atomrl.tracking.reading.summary import completions_of, outcome

    if not is_run(folder) and any(True for _ in find_runs(folder)):
        load_run(folder)  # raises: it names the runs below the folder
    failure = read_mapping(folder / FAILURE, [])
    if failure and not as_json:
        print(f"an error ended the run: {failure.get('error')}\n(full traceback: {folder / FAILURE})")
    rows = read_metrics(folder / "metrics.jsonl") if failure else metrics_of(folder)
    checked = []
    for number, row in enumerate(rows, start=1):
        if (numbers := finite_row(row)) is None:
            raise ReadError(
                f"{folder}/metrics.jsonl, row {number}, is not a row of a run: it needs a step and numbers, not "
                f"{str(row)[:80]}"
            )
        checked.append(numbers)
    findings = diagnose(checked)
    run = LoadedRun(folder, rows)
    if len(rows) > MOST_CHECKS:  # not every step was checked here; the run itself did
        findings += [finding for finding in run.findings if finding.id not in {one.id for one in findings}]
    findings = [replace(each, quote=quote(each.id, completions_of(run, each.step))) for each in findings]
    found = PROBLEMS if findings or failure else 0
    if as_json:
        error = failure.get("error") if failure else None
        content = {"run": str(folder), "status": run.state.status, "outcome": [*outcome(run)], "error": error}
        print(json.dumps({**content, "findings": [{**asdict(each), "page": each.page} for each in findings]}))
        return found
    print(*outcome(run), sep="\n")
    print(*findings, sep="\n", end="\n" if findings else "")
    if not found:
        print("the doctor found no problems")
    return found


def finite_row(row: Any) -> dict[str, float | None] | None:
    """Return a row with None for numbers that are infinite, NaN or too large. None if it has no step, or a value that
    is neither a number nor null."""
    from atomrl.tracking.reading.metrics import as_float

    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    with suppress(TypeError, OverflowError):
        if math.isfinite(sum(row.values())):  # quicker than a look at each value; holds for ordinary rows
            return row
    if not all(value is None or isinstance(value, int | float) for value in row.values()):
        return None
    return {name: value if math.isfinite(as_float(value)) else None for name, value in row.items()}


def show(parts: Iterable[tuple[str, Iterable[tuple[str, str]]]], as_json: bool = False) -> int:
    """Print names and texts under their titles. Returns exit code 1 if a text begins with `broken`."""
    broken = 0
    if as_json:
        content = {title: dict(lines) for title, lines in parts}
        print(json.dumps(content))
        return PROBLEMS if any(text.startswith("broken") for each in content.values() for text in each.values()) else 0
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for title, lines in parts:
        for index, (name, text) in enumerate(lines):
            head = f"{title if index == 0 else '':<14}{name:<15} "
            wrapped = (
                textwrap.wrap(text, columns - len(head), break_long_words=False) if columns > 2 * len(head) else []
            )
            print(head + f"\n{' ' * len(head)}".join(wrapped or [text]))
            broken += text.startswith("broken")
    return PROBLEMS if broken else 0
