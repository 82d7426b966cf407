"""Studies for the pages: trials, what decides, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atomrl.reading.studies import load_study
from atomrl.ui.catalog import Catalog, Entry, id_of


def listed(catalog: Catalog) -> list[dict[str, str]]:
    """The studies there are."""
    return [{"id": id_of(name), "name": name} for name in catalog.studies()]


def study_page(catalog: Catalog, study_id: str) -> dict[str, Any]:
    """A study.

    Raises:
        LookupError: there is none with this id.
        ReadError: its journal cannot be read.
        ImportError: optuna is not installed.
    """
    found = next(((name, *both) for name, both in catalog.studies().items() if id_of(name) == study_id), None)
    if found is None:
        raise LookupError("there is no such study")
    return {"name": found[0]} | _page(found[1], found[2])


def _page(folder: Path, entries: Sequence[Entry]) -> dict[str, Any]:
    study, runs = load_study(folder), {entry.path.name: entry.id for entry in entries}
    seeds = study.result.get("seeds") or []
    whole = [trial.value for trial in study.trials if trial.state == "complete" and trial.value is not None]
    return {
        "metric": study.metric, "window": study.window, "space": study.space, "importance": study.importance,
        "best": max(whole, default=None), "problems": study.problems,
        "trials": [
            {
                "number": trial.number, "state": trial.state, "value": trial.value, "reported": trial.reported,
                "params": trial.params, "seconds": trial.seconds, "run": runs.get(trial.run),
            }
            for trial in study.trials
        ],
        "note": study.result.get("note"), "better": study.result.get("better"), "winner": study.result.get("winner"),
        "seeds": seeds,
        "finals": [
            {"name": name, "values": values, "runs": [runs.get(f"final_{name}_seed_{seed}") for seed in seeds]}
            for name, values in (study.result.get("finals") or {}).items()
        ],
    }  # fmt: skip
