"""Files of runs and studies of a form that nobody meant: each is noted, and takes nothing else with it."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from atomrl.tracking.reading import MetricTable, find_runs
from atomrl.tracking.reading.lines import ReadError, read_mapping
from atomrl.tracking.reading.rollouts import RolloutIndex
from atomrl.tracking.reading.studies import is_study, load_study
from tests.tracking.reading.folders import write_run


def test_a_folder_that_may_not_be_entered_hides_no_other(tmp_path, monkeypatch):
    run, locked, asked = write_run(tmp_path / "one"), tmp_path / "locked", os.stat
    locked.mkdir()

    def stat(path, **more):
        if not isinstance(path, int) and os.fspath(path).startswith(f"{locked}/"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return asked(path, **more)

    monkeypatch.setattr(os, "stat", stat)  # whoever runs this test may be let in everywhere
    assert list(find_runs(tmp_path)) == [run] and not is_study(locked)


def doubling(line: str) -> str:
    return "a0: &a0 {x: 1}\n" + "".join(line.replace("N", str(n)).replace("M", str(n - 1)) for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x: !!bool maybe", "cannot be read: 'maybe'"),
        ("x: !!int ''", "cannot be read: string index out of range"),
        ("x: !!timestamp foo", "cannot be read"),
        ("x: " + "[" * 100_000, "is nested too deep"),
        ("x: &x [*x]", "is nested too deep"),
        (doubling("aN: &aN [*aM, *aM]\n"), "cannot be read: it has more than 100,000 values"),
        (doubling("aN: &aN {<<: [*aM, *aM]}\n"), "cannot be read: it has more than 100,000 values"),
    ],
)
def test_a_config_that_cannot_be_a_mapping_is_noted(tmp_path, text, problem):
    path, problems = tmp_path / "config.yaml", []
    path.write_text(text)
    assert read_mapping(path, problems) == {} and problem in problems[0]


def test_deep_json_is_noted(tmp_path):
    path, problems = tmp_path / "env.json", []
    path.write_text('{"a": ' + "[" * 200 + "]" * 200 + "}")
    assert read_mapping(path, problems) == {} and problems == ["env.json is nested too deep"]


def test_a_bad_value_leaves_the_numbers_beside_it():
    table = MetricTable()
    table.extend([{"step": n, "a": value} for n, value in enumerate((3, "x", 10**400, 0.5, [1]))])
    assert table["a"].tolist() == pytest.approx([3.0, np.nan, np.nan, 0.5, np.nan], nan_ok=True)


def test_a_reward_that_is_too_large_is_none(tmp_path):
    path = tmp_path / "step_000001" / "train.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"step": 1, "reward": reward}) + "\n" for reward in (10**400, 1)))
    rewards = RolloutIndex(tmp_path).numbers["reward"]
    assert np.isnan(rewards[0]) and rewards[1] == 1.0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("study.yaml", {"window": [1]}, "window is not an integer"),
        ("study.yaml", {"space": [1]}, "space is not a mapping"),
        ("study.yaml", {"space": {"seed": None}}, "space is not a mapping"),
        ("result.json", {"seeds": 7}, "seeds is not a list"),
        ("result.json", {"finals": {"as_it_is": 0.5}}, "finals is not a mapping of lists"),
    ],
)
def test_a_study_of_another_form_is_refused(tmp_path, name, content, message):
    pytest.importorskip("optuna", reason="the extra `tune` is not installed")
    from tests.tools.ui.made import make_study

    folder = make_study(tmp_path / "study", trials=1)
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(ReadError, match=f"{name}.*{message}"):
        load_study(folder)


def test_a_journal_of_another_form_is_refused(tmp_path):
    pytest.importorskip("optuna", reason="the extra `tune` is not installed")
    (tmp_path / "study.yaml").write_text("{}")
    (tmp_path / "study.journal").write_text("[1]\n")
    with pytest.raises(ReadError, match=r"study\.journal"):
        load_study(tmp_path)
