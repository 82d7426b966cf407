"""Variables of a launcher are not passed on to processes that a rank starts."""

import json
import os
import sys

import pytest

from atomrl.common.launchers import launched, launcher_hidden, unmet_request, without_launcher
from atomrl.common.workers import WorkerProcess
from atomrl.engines.server_process import ServerProcess

TORCHRUN = {
    "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "ROLE_RANK": "0",
    "ROLE_NAME": "default", "GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_ERROR_FILE": "/tmp/error.json",
}  # fmt: skip
ACCELERATE = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "no", "FSDP_VERSION": "2"}
KEPT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN", "HF_HOME": "/x"}


@pytest.fixture
def under_launcher(monkeypatch):
    for name, value in (TORCHRUN | ACCELERATE | KEPT).items():
        monkeypatch.setenv(name, value)


def check(environment):
    assert not environment.keys() & (TORCHRUN | ACCELERATE).keys()
    assert environment.items() >= KEPT.items()


def test_a_server_is_started_without_it(under_launcher):
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    server = ServerProcess(lambda port: ([sys.executable, "-c", code], {}))
    try:
        assert server.process.wait(300) == 0
        check(json.loads(server.output.read_text()))
    finally:
        server.end()
    assert launched() == (0, 2, 0, 2), "this process still is the launcher's"


def test_a_worker_is_started_without_it(under_launcher):
    worker = WorkerProcess.start("tests.common.light_worker")
    try:
        check(worker.answer())
    finally:
        worker.kill()


def test_launcher_variables_are_hidden_while_building_and_restored(under_launcher):
    before = dict(os.environ)
    with pytest.raises(RuntimeError), launcher_hidden():
        check(dict(os.environ))
        assert launched() is None and without_launcher() == dict(os.environ)
        raise RuntimeError
    assert dict(os.environ) == before


SIMPLE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True"}
SEVERAL = SIMPLE | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("given", "ranks", "said"),
    [
        ({}, 1, None),
        (SIMPLE, 1, None),
        (SEVERAL, 1, "num_processes) but started one, so this run has 1 rank"),
        (SEVERAL, 2, None),  # backend.ranks=2: this run starts the other
        (TORCHRUN, 2, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 1, "started 4 processes (OMPI_COMM_WORLD_SIZE)"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, 8, "a separate run, and this run has 8 ranks"),
        (TORCHRUN | {"SLURM_STEP_NUM_TASKS": "1"}, 2, None),  # srun starts a torchrun on each machine
        ({"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1"}, 1, None),
    ],
)
def test_a_request_for_other_ranks_than_there_are_is_said(monkeypatch, given, ranks, said):
    for name in [*SEVERAL, *TORCHRUN, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    message = unmet_request(ranks)
    assert message is None if said is None else said in message
