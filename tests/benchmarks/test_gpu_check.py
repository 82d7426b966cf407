"""The check of a machine with a GPU, tried on the CPU."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_check"]


@pytest.mark.slow
def test_every_part_that_needs_nothing_else_at_tiny_shapes(gpu_check, tmp_path):
    """In this process: each has one of its own, and imports take longer than the work."""
    results = {}
    for part in ("native", "update", "transfer", "step-native", "transformers"):
        bench = gpu_check.Bench(part, tmp_path, cpu=True)
        gpu_check.PARTS[part][0](bench)
        written = [gpu_check.Figure(**figure) for figure in json.loads(bench.file.read_text())]
        assert written == bench.figures and all(figure.verdict == "" for figure in written)
        results |= {figure.what: figure.value for figure in written}
    for what in (
        "native, 4 rows of 24 tokens", "native with adapters, decode step", "native, adapters by those without",
        "update of 16 rows, packed", "update of 16 rows, padded, checkpointing", "old log-probs of 32 rows",
        "weights to the native engine, adapters", "GRPO step, native", "GRPO step, native: gen",
        "transformers, 4 rows of 6 tokens",
    ):  # fmt: skip
        assert results[what] > 0, what


def test_seconds_are_shared_out_and_what_is_left_is_the_next_ones(gpu_check):
    parts = list(gpu_check.PARTS)
    first = gpu_check.limits(parts, gpu_check.SECONDS)
    assert sum(first.values()) == pytest.approx(gpu_check.SECONDS) and gpu_check.SECONDS < 8 * 60
    assert gpu_check.limits(parts[1:], gpu_check.SECONDS)[parts[1]] > first[parts[1]]


def test_a_part_that_hangs_or_fails_says_so_and_keeps_what_it_has_noted(gpu_check, tmp_path):
    figure = gpu_check.Figure("decoding", 7.0, "ms", 6.5)
    (tmp_path / "step-native.json").write_text(json.dumps([vars(figure)]))
    assert gpu_check.run_part("step-native", tmp_path, True, 0.1) == ([figure], "ended after its 0 s")
    assert figure.cells() == ("decoding", "7 ms", "<= 6.5", "missed")


def test_missing_packages_are_reported_and_are_no_failure(gpu_check, tmp_path, monkeypatch, capsys):
    there = gpu_check.installed
    monkeypatch.setattr(gpu_check, "installed", lambda name: name not in ("vllm", "trl") and there(name))
    out = tmp_path / "results"
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--cpu", "--parts", "vllm", "trl", "--out", str(out)])
    assert gpu_check.main() == 0
    table = capsys.readouterr().out
    assert "CPU, tiny shapes" in table and "| vllm | vllm: not installed |" in table and "| trl | trl" in table
    assert out.with_suffix(".md").read_text() == table.removesuffix("\n")
    assert [part["absent"][0] for part in json.loads(out.with_suffix(".json").read_text())["parts"]] == ["vllm", "trl"]


def test_without_pydantic_and_without_wheels(gpu_check, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "installed", lambda name: name not in ("pydantic", "pytest"))
    monkeypatch.setattr(gpu_check, "WHEELS", tmp_path / "absent")
    with pytest.raises(SystemExit, match=r"pydantic, pytest.*make wheels"):
        gpu_check.install_missing()
