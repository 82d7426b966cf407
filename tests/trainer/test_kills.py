"""A few of the kills of `benchmarks/kills.py`, which has them all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = ["save:rename"]
OTHERS = ["rollout", "save:remove:3", "first", "metrics:4", "reopen:1"]


@pytest.mark.parametrize("points", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["quick", "others"])
def test_a_killed_run_ends_like_one_that_was_not(points, tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "kills.py"), "--only", *points, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [result["point"] for result in results] == points and all(result["same"] for result in results)
