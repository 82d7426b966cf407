"""The C++ kernels: equal to PyTorch, built once, and optional."""

import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional as F

from atomrl.engines.native import cpu_kernels as kernel_module
from atomrl.engines.native.cpu_kernels import load_kernels
from atomrl.models.kernel_library import build


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The kernels, built from the sources here: a library in the user's cache may be of other files."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        loaded = load_kernels.__wrapped__()
    assert loaded is not None
    return loaded


@pytest.fixture
def fresh_load(monkeypatch, tmp_path):
    """`load_kernels` without what an earlier call found, in an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return kernel_module.load_kernels.__wrapped__


@pytest.mark.parametrize("rows,width", [(1, 8), (3, 20), (130, 256)])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_rms_norm_and_silu_mul(kernels, rows, width, dtype, tolerance):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, width).mul(3).to(dtype), torch.rand(width).to(dtype)
    expected = F.rms_norm(x.float(), (width,), weight.float(), 1e-5)
    assert torch.allclose(kernels.rms_norm(x, weight, 1e-5).float(), expected, rtol=tolerance, atol=tolerance)
    gate_up = (torch.randn(rows, 2 * width) * 20).to(dtype)  # far into both tails of the sigmoid
    gate, up = gate_up.float().chunk(2, dim=-1)
    assert torch.allclose(kernels.silu_mul(gate_up).float(), F.silu(gate) * up, rtol=tolerance, atol=tolerance)


def test_two_processes_may_build_at_once(kernels, tmp_path):
    source, cache = tmp_path / "a.cpp", tmp_path / "cache"
    source.write_text('#include <regex>\nextern "C" int f() { return std::regex("a+").flags(); }')  # takes a second
    code = "import sys; from pathlib import Path; from atomrl.models.kernel_library import build; "
    code += "print(build(Path(sys.argv[1]), 'g++', Path(sys.argv[2])))"
    command = [sys.executable, "-c", code, str(source), str(cache)]
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda _: subprocess.run(command, capture_output=True, text=True), range(2)))
    assert [run.returncode for run in runs] == [0, 0]
    assert len({run.stdout for run in runs}) == 1
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_other_source_other_library(kernels, tmp_path):
    source = tmp_path / "a.cpp"
    source.write_text('extern "C" int f() { return 1; }')
    first = build(source, "g++", tmp_path / "cache")
    made = first.stat().st_mtime_ns
    assert build(source, "g++", tmp_path / "cache").stat().st_mtime_ns == made  # not built again
    source.write_text('extern "C" int f() { return 2; }')
    assert build(source, "g++", tmp_path / "cache") != first


def test_without_a_compiler_a_log_line_says_so(fresh_load, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        assert fresh_load() is None
    assert "no C++ compiler" in caplog.text


def test_a_failing_build_is_reported_and_not_fatal(fresh_load, monkeypatch, caplog, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho no such instruction >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with caplog.at_level(logging.WARNING):
        assert fresh_load() is None
    assert "the C++ kernels failed" in caplog.text
