"""The check of a machine with a GPU, tried on the CPU."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"


@pytest.fixture
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_part_fits_into_nine_minutes(gpu_check):
    assert gpu_check.PARTS.keys() == gpu_check.LIMITS_S.keys() and sum(gpu_check.LIMITS_S.values()) < 9 * 60


@pytest.mark.slow
def test_engines_and_step_at_tiny_shapes(tmp_path):
    out = tmp_path / "gpu_check.md"
    parts = ["engine-0.5b", "native-adapters", "step"]
    command = [sys.executable, str(SCRIPT), "--cpu", "--parts", *parts, "--out", str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = out.read_text()
    for what in (
        "CPU, tiny shapes",
        "| native, 0.5b",
        "| transformers, 0.5b",
        "| native-adapters, 1.5b",
        "| GRPO step, peak memory |",
    ):
        assert what in table, table


def test_a_part_that_fails_says_so_and_leaves_the_others(gpu_check, tmp_path, monkeypatch):
    monkeypatch.setitem(gpu_check.LIMITS_S, "step", 0.1)
    arguments = type("Arguments", (), {"cpu": True, "limit_gb": 24.0})
    assert gpu_check.run_part("step", tmp_path, arguments) == ([("step", "**ended after its 0.1 s**")], False)


def test_without_pydantic_and_without_wheels(gpu_check, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_check, "WHEELS", tmp_path / "absent")
    with pytest.raises(SystemExit, match=r"pydantic, pytest: not installed, and no .*absent; run `make wheels`"):
        gpu_check.install_missing()
