"""The scripts that compare and simulate asynchronous runs, at small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from simulate_cluster import LARGE, SMALL, Machine, Policy, Simulation, compare, plan, scaling  # noqa: E402

EVEN = Machine(
    slots=16, learn_s=1.0, transfer_s=0.5, draw_s=lambda rng, busy: 2.0, reward_s=lambda rng: 3.0, groups=2, members=4
)


@pytest.mark.parametrize(
    "policy, expected",
    [
        (Policy(synchronous=True), 2 + 3 + 1 + 0.5),
        (Policy(max_staleness=0), 2 + 3 + 1 + 0.5),
        (Policy(max_staleness=1), (2 + 3 + 1 + 0.5) / 2),  # two steps are drawn while the trainer waits for one
        (Policy(max_staleness=8), 2.0 / 2),  # the slots are the limit: half of them draw a step's completions
    ],
)
def test_the_simulation_gives_what_arithmetic_gives(policy, expected):
    machine = EVEN if policy.max_staleness < 8 else Machine(**vars(EVEN) | {"learn_s": 0.1, "transfer_s": 0.0})
    found = Simulation(machine, policy, steps=200).run()
    assert 3600 / found["steps_per_hour"] == pytest.approx(expected, rel=0.06)
    assert found["dropped"] == 0 and found["staleness_mean"] <= policy.max_staleness


def test_more_gpus_make_more_steps_an_hour_and_the_plan_adds_up():
    lines = scaling(SMALL, 4, (2, 16)).splitlines()[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    pace = {(row[0], row[1]): float(row[3]) for row in rows}
    assert all(pace["16", staleness] > pace["2", staleness] for staleness in "014")
    assert pace["16", "4"] > pace["16", "0"]
    assert "65 GB / 50 GB/s = 1.3 s" in plan(LARGE, 64, 3)


def test_the_comparison_runs_and_calibrates_the_simulation(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "async_vs_sync.py"), "--short", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "results.json").read_text())
    assert [run["variant"] for run in report["runs"]] == ["synchronous", "staleness 0", "staleness 1"] * 2
    assert [run["staleness_max"] for run in report["runs"]] == [0, 0, 1] * 2
    assert all(run["steps"] == 5 for run in report["runs"])
    assert not any(run["dropped"] for run in report["runs"] if run["variant"] != "staleness 1")
    assert done.stdout.count("| staleness 1 |") == 2 and "median error" in compare(report)
