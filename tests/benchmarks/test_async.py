"""The scripts that compare, simulate and plan asynchronous runs, at small."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from atomrl.config import AsynchronousConfig

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from plan_cluster import H100, PLANS, QWEN_1_5B, Plan, changed, table  # noqa: E402
from simulate_cluster import compare, divided, fitted, limits, points, scaling, simulated  # noqa: E402
from simulated_parts import Machine  # noqa: E402
from simulation import Simulation  # noqa: E402

EVEN = Machine(
    engines=1, slots=16, token_s=lambda rows: 1.0, length=lambda rng: 2.0, learn_s=1.0, transfer_s=0.5,
    reward_s=lambda rng: 3.0, groups=2, members=4,
)  # fmt: skip
SMALL = Plan(QWEN_1_5B, H100, gpus=8, trainers=4, tensor_parallel=1, groups=8, median=300, longest=1000)


@pytest.mark.parametrize(
    "staleness, machine, expected",
    [
        (None, EVEN, 2 + 3 + 1 + 0.5),
        (0, EVEN, 2 + 3 + 1 + 0.5),
        (8, EVEN, 1 + 0.5),
        (4, replace(EVEN, slots=1000, learn_s=50.0), 50.5),  # the trainer is the limit
        (None, replace(EVEN, output_s=1.0), 2 + 8 * 1 + 3 + 1 + 0.5),  # the driver takes one after the other
        (None, replace(EVEN, slots=4), 2 * 2 + 3 + 1 + 0.5),
        (None, replace(EVEN, engines=2, slots=4), 2 + 3 + 1 + 0.5),
        (None, replace(EVEN, token_s=lambda rows: rows), 8 * 2 + 3 + 1 + 0.5),
    ],
)
def test_the_simulation_gives_what_arithmetic_gives(staleness, machine, expected):
    settings = None if staleness is None else AsynchronousConfig(max_staleness=staleness)
    result = Simulation(machine, settings, steps=220, skip=10, tail=10).run()
    assert 3600 / result["steps_per_hour"] == pytest.approx(expected, rel=0.03)
    assert result["staleness_max"] <= (staleness or 0)


def test_trainer_and_engine_that_share_cores_slow_each_other():
    alone = replace(EVEN, slots=8, learn_s=2.0, reward_s=lambda rng: 0.0, transfer_s=0.0)
    rates = [
        3600 / Simulation(replace(alone, shared=shared), AsynchronousConfig(), 200).run()["steps_per_hour"]
        for shared in (1.0, 0.5)
    ]
    assert rates == [pytest.approx(2.0, rel=0.05), pytest.approx(4.0, rel=0.05)]


def test_more_gpus_make_more_steps_an_hour_and_what_holds_them_back_is_named():
    results = points(SMALL, (2, 8), 3)
    assert [each.plan.gpus for each in results] == [2, 8] and scaling(results).count("\n") == 3
    for loop in ("synchronous", "staleness 1"):
        few, many = (each.by_loop[loop][1]["steps_per_hour"] for each in results)
        assert many > few
    plan, best = divided(SMALL, "staleness 1", 3)
    for trainers in (plan.trainers - 1, plan.trainers + 1):
        assert (
            best["steps_per_hour"] >= simulated(replace(SMALL, trainers=trainers), "staleness 1", 3)["steps_per_hour"]
        )
    slow = replace(SMALL, link=SMALL.link / 1000)
    assert limits(slow, "synchronous", 3).startswith("transfer ")
    assert limits(replace(SMALL, output=2.0), "synchronous", 3).startswith("driver ")
    assert limits(replace(SMALL, reward=500.0), "synchronous", 3).startswith("rewards ")


def test_the_plan_in_the_docs_is_what_the_script_prints():
    text = (ROOT / "docs" / "development" / "scaling.md").read_text(encoding="utf-8")
    assert table(PLANS) in text, "put what `python benchmarks/plan_cluster.py` prints into docs/development/scaling.md"
    assert all(plan.fits for plan in PLANS)


def test_a_plan_by_hand():
    """32B on 64 H100s, once more without the script's own functions."""
    plan = Plan(trainers=32)
    state, weights = 16 * 32.5e9 / 32, 2 * 32.5e9
    assert plan.trainer_memory["weights, gradients, moments"] == state and plan.weight_bytes == weights
    assert plan.kv_bytes == 2 * 64 * (2 * 8 * 128) == 262144
    assert plan.cache_tokens == pytest.approx((0.9 * 4 * 80e9 - weights) / 262144)
    assert plan.engines == 8 and plan.transfers["collective"] == pytest.approx(65e9 / 50e9)
    tokens = 1024 * (512 + plan.lengths[0])
    assert plan.compute_s == pytest.approx(8 * 32.5e9 * tokens / (32 * 989e12 * 0.4), rel=0.1), "attention is the rest"
    mean, so_far = Plan(median=1000, sigma=0.01, longest=10**6).lengths
    assert mean == pytest.approx(1000, rel=0.01) and so_far == pytest.approx(500, rel=0.01)


def test_numbers_of_a_plan_can_be_changed_and_wrong_ones_are_refused():
    assert changed(Plan(), ["trainers=24", "model.layers=80"]).kv_bytes == 2 * 80 * 2048
    for wrong in ("trainer=24", "trainers", "gpu.cores=3", "trainers=many", "x.y=1"):
        with pytest.raises(SystemExit, match=r"KEY=VALUE|no number"):
            changed(Plan(), [wrong])
    assert not Plan(trainers=60, tensor_parallel=8).fits and not Plan(trainers=4).fits


@pytest.mark.slow
def test_the_comparison_runs_in_pieces_and_the_simulation_is_calibrated(tmp_path):
    def run(script, *options):
        command = [sys.executable, str(ROOT / "benchmarks" / script), "--short", "--out", *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done

    first = run("async_vs_sync.py", str(tmp_path / "a"), "--minutes", "0.0001", "--variants", "synchronous")
    assert "0 of 2 cells" in first.stdout
    run("async_vs_sync.py", str(tmp_path / "a"), "--waiting", "reward")
    cells = {path: path.stat().st_mtime_ns for path in (tmp_path / "a" / "cells").iterdir()}
    assert len(cells) == 4
    done = run("async_vs_sync.py", str(tmp_path / "a"))
    assert all(path.stat().st_mtime_ns == before for path, before in cells.items()), "these were not run again"
    report = json.loads((tmp_path / "a" / "results.json").read_text())
    assert [run["variant"] for run in report["runs"]] == ["synchronous", "staleness 0", "staleness 1"] * 2
    assert [run["staleness_max"] for run in report["runs"]] == [0, 0, 1] * 2
    assert all(run["steps"] == 5 for run in report["runs"])
    assert not any(run["dropped"] for run in report["runs"] if run["variant"] != "staleness 1")
    assert done.stdout.count("| staleness 1 |") == 2

    done = run("simulate_cluster.py", str(tmp_path / "c.json"), "--calibrate")
    assert "median error" in done.stdout and "fitted to 4 runs" in done.stdout
    assert "median error" in compare(json.loads((tmp_path / "c.json").read_text()), report["runs"])


def test_the_fit_finds_what_runs_were_made_with():
    """Runs that the simulation itself makes, of a machine that is known."""
    truth = {
        "alone": {"gen_s": 1.0, "learn_s": 2.2, "sync_s": 0.2, "tokens": 10, "prompts": 16},
        "completions": 8, "token_s": (0.02, 0.0005), "thread_s": 0.002, "shared": 0.7,
    }  # fmt: skip
    from simulate_cluster import pace

    def run(variant, prompts):
        about = {"variant": variant, "prompts": prompts, "steps": 30, "reward_s": 0.0, "tail": 0.0}
        seconds = 10 * (0.02 + 0.0005 * prompts * 8)
        gen = {"gen_s": seconds, "learn_s": 2.2 * prompts / 16, "sync_s": 0.2, "tokens": 10}
        return about | gen | {"steps_per_hour": pace(truth, about)["steps_per_hour"]}

    runs = {"many": run("synchronous", 16), "few": run("synchronous", 4)}
    runs |= {"thread": run("staleness 0", 16), "beside": run("staleness 1", 16)}
    fit = fitted(runs, 8)
    assert fit["token_s"] == pytest.approx((0.02, 0.0005))
    assert fit["thread_s"] == pytest.approx(0.002, rel=0.05) and fit["shared"] == pytest.approx(0.7, abs=0.02)
