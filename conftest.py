"""For all tests: what the CPU is said to have, the names that doctests use, and one thread in each process: tiny models
gain nothing from more, and on some CPUs the last bits depend on it."""

import os
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

if "ATOMRL_TEST_BFLOAT16" in os.environ:  # 0 or 1: as on a CPU without and with bfloat16 instructions
    folder = Path(__file__).parent / "tests" / "cpu"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    runpy.run_path(str(folder / "sitecustomize.py"))  # this process has started already

os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start, too

import torch  # after that

torch.set_num_threads(1)
if find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # No time limit for an example, since machines may be busy. The same examples in each run: a new failure is then
    # due to the change. `make test-all` tries others each time.
    anywhere = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("same", derandomize=True, **anywhere)
    settings.register_profile("others", **anywhere)
    settings.load_profile("same")
if find_spec("triton") is None:  # their doctests cannot be looked for
    collect_ignore_glob = ["atomrl/engines/native/triton_*.py", "atomrl/models/nf4_kernels.py"]
if not torch.cuda.is_available():  # before anything imports Triton, whose kernels can then be run
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict) -> None:
    doctest_namespace["torch"] = torch


def pytest_report_header() -> str:
    bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return f"cpu: {torch.backends.cpu.get_cpu_capability()}, bfloat16 {'present' if bf16 else 'absent'}"
