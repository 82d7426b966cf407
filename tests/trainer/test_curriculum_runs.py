"""Whole runs with a curriculum: what they train on, and that a resumed one continues exactly."""

import json
from collections import Counter

import pytest

from atomrl.cli.main import main
from atomrl.tracking.reading.lines import read_metrics
from atomrl.tracking.recorder import Recorder
from tests.trainer.test_recovery import PROBLEMS, fails, folder, stop_after

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
    """Metrics without those of time, and of the pool, which counts what checkpoints have finished."""
    left_out = ("timing_s/", "perf/", "async/", "pool/")
    return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in read_metrics(run / "metrics.jsonl")]


def run_with_stop(monkeypatch, step, *arguments):
    """Run a config, which is stopped after a step and resumed."""
    log = stop_after(monkeypatch, step)
    assert main(["train", "c.yaml", *arguments]) == 130
    monkeypatch.setattr(Recorder, "log", log)
    assert main(["train", "c.yaml", *arguments, "--resume"]) == 0


@pytest.mark.parametrize(
    "more", [[GATE], pytest.param([SOLVED, EVEN, "asynchronous={max_staleness: 0}"], marks=pytest.mark.slow)]
)
def test_a_resumed_run_is_the_one_that_was_not_stopped(folder, monkeypatch, more):
    (folder / "mine.py").write_text(OWN)
    arguments = [*more, "train.steps=5", "data.train_size=6"]
    assert main(["train", "c.yaml", "run_name=whole", *arguments]) == 0
    run_with_stop(monkeypatch, 2, *arguments)
    whole, run = folder / "runs" / "whole", folder / "runs" / "run"
    assert rollouts(run) == rollouts(whole) and of_numbers(run) == of_numbers(whole)
    if SOLVED in more:
        counts = Counter(name.partition(":")[2] for names in rollouts(run).values() for name in names)
        assert sorted(counts.values()) == [1] * 3 + [4] * 3
        assert of_numbers(run)[-1]["curriculum/solved"] == 3
    else:
        assert [row["rollout/groups_drawn"] for row in of_numbers(run)] == [4, 5, 4, 5, 4]


def test_an_asynchronous_run_learns_from_each_group_once(folder, monkeypatch):
    arguments = [SOLVED, EVEN, "asynchronous={max_staleness: 2}", "train.steps=5", "data.train_size=6"]
    run_with_stop(monkeypatch, 2, *arguments)
    run = folder / "runs" / "run"
    progress = json.loads((run / "checkpoints" / "step_000005" / "progress.json").read_text())
    trained = [name.partition(":")[2] for names in rollouts(run).values() for name in names]
    solved = {name: count for name, count in Counter(trained).items() if not int(name.rpartition(":")[2]) % 2}
    assert progress["curriculum"]["solved"]["in_a_row"] == solved and len(trained) == 15


def test_producers_of_a_pool_share_a_curriculum_and_its_trainer_resumes(folder, monkeypatch, capsys):
    (folder / "mine.py").write_text(OWN)
    size = "data.train_size=6"
    for groups in (4, 14):  # two producers, one after the other
        assert main(["pool", "fill", "c.yaml", SOLVED, EVEN, size, "--groups", str(groups)]) == 0
    pools = folder / "runs" / "pools"
    (pools / "whole.sqlite").write_bytes((pools / "run.sqlite").read_bytes())
    arguments = [EVEN, GATE, size, "rollout.source=pool", "pool.max_staleness=9", "train.steps=4"]
    assert main(["train", "c.yaml", "run_name=whole", *arguments]) == 0
    run_with_stop(monkeypatch, 2, *arguments)
    whole, run = folder / "runs" / "whole", folder / "runs" / "run"
    assert rollouts(run) == rollouts(whole) and of_numbers(run) == of_numbers(whole)
    positions = [name.partition("#")[0].split(":") for names in rollouts(whole).values() for name in names]
    assert len(positions) == 18
    counts = Counter(int(line) for _, _, line in positions)
    assert counts == {line: 5 if line % 2 else 1 for line in range(1, 7)}, "even lines have even truths"


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
