"""Whole runs with a curriculum: what they train on, and that a resumed one continues exactly."""

import json
from collections import Counter

import pytest

from atomrl.cli.main import main
from atomrl.tracking.reading.lines import read_metrics
from atomrl.tracking.recorder import Recorder
from tests.loop.test_recovery import PROBLEMS, fails, folder, stop_after

assert folder  # a fixture
SOLVED = "curriculum.gates=[{type: solved, groups: 1}]"
EVEN = "reward={functions: [tests.light_rewards.even_truths]}"
OWN = '''
from atomrl.data.curriculum import Gate

class Thirds(Gate):
    """Rejects the groups of each third prompt, counted as they come."""

    count = 0

    def accepts(self, group):
        return self.count % 3 != 1

    def observe(self, group):
        self.count += 1

    def state(self):
        return {"count": self.count}

    def load(self, state):
        self.count = state["count"]
'''
GATE = "curriculum.gates=[{type: custom, function: ./mine.py:Thirds}]"


def rollouts(run):
    """Prompt ids of a run's groups by step, in the order of the record."""
    steps = {}
    for path in sorted(run.glob("rollouts/*/train.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        steps[path.parent.name] = list(dict.fromkeys(row["prompt_id"] for row in rows))
    return steps


def of_numbers(run):
    """Metrics without those of time."""
    timed = ("timing_s/", "perf/")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in read_metrics(run / "metrics.jsonl")]


def run_with_stops(monkeypatch, steps, *arguments):
    """Run a config, which is stopped and resumed after each of these steps."""
    log = Recorder.log
    for number, step in enumerate(steps):
        stop_after(monkeypatch, step)
        assert main(["train", "c.yaml", *arguments, *(["--resume"] if number else [])]) == 130
        monkeypatch.setattr(Recorder, "log", log)
    assert main(["train", "c.yaml", *arguments, "--resume"]) == 0


@pytest.mark.parametrize("more", [[SOLVED, EVEN], [GATE, "asynchronous={max_staleness: 0}"]])
def test_a_resumed_run_is_the_one_that_was_not_stopped(folder, monkeypatch, more):
    (folder / "mine.py").write_text(OWN)
    arguments = [*more, "train.steps=8"]
    assert main(["train", "c.yaml", "run_name=whole", *arguments]) == 0
    run_with_stops(monkeypatch, (1, 4, 7), *arguments)
    whole, run = folder / "runs" / "whole", folder / "runs" / "run"
    assert rollouts(run) == rollouts(whole) and of_numbers(run) == of_numbers(whole)
    if SOLVED in more:
        counts = Counter(name.partition(":")[2] for names in rollouts(run).values() for name in names)
        assert sum(counts.values()) == 24 and sorted(counts.values()) == [1] * 12 + [2] * 6
        assert of_numbers(run)[-1]["curriculum/solved"] == PROBLEMS / 2
    else:
        assert [row["rollout/groups_drawn"] for row in of_numbers(run)] == [4, 5, 4, 5, 4, 5, 4, 5]


def test_an_asynchronous_run_learns_from_each_group_once(folder, monkeypatch):
    run_with_stops(monkeypatch, (1, 3, 6), SOLVED, EVEN, "asynchronous={max_staleness: 2}", "train.steps=8")
    run = folder / "runs" / "run"
    progress = json.loads((run / "checkpoints" / "step_000008" / "progress.json").read_text())
    trained = [name.partition(":")[2] for names in rollouts(run).values() for name in names]
    solved = {name: count for name, count in Counter(trained).items() if int(name.rpartition(":")[2]) % 2 == 0}
    assert progress["curriculum"]["solved"]["in_a_row"] == solved and len(trained) == 24


def test_producers_of_a_pool_share_a_curriculum_and_its_trainer_resumes(folder, monkeypatch, capsys):
    (folder / "mine.py").write_text(OWN)
    for groups in (9, 11):  # two producers, one after the other
        assert main(["pool", "fill", "c.yaml", SOLVED, EVEN, "--groups", str(groups)]) == 0
    pools = folder / "runs" / "pools"
    (pools / "whole.sqlite").write_bytes((pools / "run.sqlite").read_bytes())
    arguments = [EVEN, GATE, "rollout.source=pool", "pool.timeout_s=60", "pool.max_staleness=9", "train.steps=4"]
    assert main(["train", "c.yaml", "run_name=whole", *arguments]) == 0
    run_with_stops(monkeypatch, (1, 3), *arguments)
    whole, run = folder / "runs" / "whole", folder / "runs" / "run"
    assert rollouts(run) == rollouts(whole) and of_numbers(run) == of_numbers(whole)
    capsys.readouterr()
    assert main(["pool", "fill", "c.yaml", SOLVED, EVEN, "--groups", "30"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["drawn"] == 30
    drawn = [name.partition(":")[2] for names in rollouts(whole).values() for name in names]
    assert len(drawn) == 18, "of 20, in the order in which they were written"
    assert all(int(name.rpartition(":")[2]) % 2 for name, count in Counter(drawn).items() if count > 1)


def test_a_run_ends_well_once_all_is_solved(folder, caplog):
    assert main(["train", "c.yaml", "curriculum.gates=[{type: solved, groups: 1, reward: 0}]"]) == 0
    rows = of_numbers(folder / "runs" / "run")
    assert len(rows) == PROBLEMS // 3 + 3 and rows[-1]["curriculum/solved"] == PROBLEMS
    assert "the curriculum has no prompt left" in caplog.text and "no prompt is left" in caplog.text


def test_wrong_curricula_are_refused_before_a_run(folder, capsys):
    (folder / "mine.py").write_text(OWN.replace("return self.count % 3 != 1", "return self.count"))
    for wrong, expected in {
        "pool.mixed_only=true": "pool.mixed_only is gone: algorithm.group_filter=mixed_outcomes",
        "curriculum.sampler={type: difficulty, field: level}": "curriculum.sampler.field=level: 18 rows have no number",
        "curriculum.sampler={type: hard}": "curriculum.sampler.type: 'hard' is not one of 'difficulty', 'custom'",
        "curriculum.gates=[{type: solved, group: 1}]": "did you mean 'curriculum.gates.0.groups'",
        "curriculum.gates=[solved, solved]": "curriculum.gates: solved is given twice",
        GATE: "curriculum.gates.0 (./mine.py:Thirds): accepts must return True or False, but returned 0",
    }.items():
        assert expected in fails(capsys, wrong), wrong
    assert not (folder / "runs").exists()
