"""An SGLang server that is killed or stops in the middle of a broadcast of weights: the fake one in a process of its
own, and the real one where it is installed (`make test-sglang`)."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from atomrl.engines.generation import generate, requests_of
from atomrl.engines.http import Client
from atomrl.engines.requests import EngineOptions
from atomrl.engines.server_process import ServerProcess
from atomrl.engines.sglang import SGLangEngine
from atomrl.models.loading import read_weights
from atomrl.protocols import WeightUpdate
from atomrl.types import SamplingParams
from atomrl.weight_sync import InProcessTransfer, tensor_hash
from atomrl.weight_sync.broadcast import ServerGroup
from tests.prompts import prompts_of
from tests.tiny import make_tiny_model

FAKE = """
import sys, threading
from tests.engines.fake_sglang import FakeSGLang
FakeSGLang(sys.argv[1], port=int(sys.argv[2]))
threading.Event().wait()
"""
PATHS = ["/init_weights_update_group", "/begin_weight_update", "/end_weight_update", "/weights_checker"]
SAMPLING = SamplingParams(completions_per_prompt=2, max_completion_tokens=8)
LONG = SamplingParams(completions_per_prompt=2, max_completion_tokens=400, ignore_eos=True)
PROMPTS = prompts_of((5, 6, 7), (20, 21))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama", seed=3, scale=0.2, head_dim=32)


@pytest.fixture
def fake(folder, monkeypatch) -> Callable[[int], tuple[list[str], dict[str, str]]]:
    """Return the command that starts the fake server in place of SGLang."""

    def command(port: int) -> tuple[list[str], dict[str, str]]:
        root = str(Path(__file__).parents[2])
        return [sys.executable, "-c", FAKE, str(folder), str(port)], {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}

    monkeypatch.setattr(SGLangEngine, "server_command", lambda self, port: command(port))
    return command


@pytest.fixture(params=["fake", "sglang"])
def either(request):
    """The fake server, or SGLang's own."""
    if request.param == "fake":
        request.getfixturevalue("fake")
    elif find_spec("sglang") is None:
        pytest.skip("sglang is not installed; `make test-sglang` has it")


@pytest.fixture
def connect(folder, monkeypatch):
    monkeypatch.setattr("atomrl.engines.sglang.BROADCAST_BYTES", 60_000)
    made: list[SGLangEngine] = []

    def make(timeout_s: float = 60.0, server: tuple[str, ...] = ()) -> SGLangEngine:
        options = EngineOptions(
            torch.float32, "cpu", 8, server=server, server_timeout_s=timeout_s, server_weights="collective"
        )
        made.append(SGLangEngine.from_pretrained(str(folder), AutoTokenizer.from_pretrained(folder), options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


class Trainer:
    """Gives other weights at each version."""

    def __init__(self, folder: Path) -> None:
        self.state = dict(read_weights(folder))

    def weights(self, version: int) -> dict[str, Tensor]:
        return {name: tensor * (1 + 0.1 * version) for name, tensor in self.state.items()}

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        return WeightUpdate(version, list(self.weights(version).items()))


def in_the_middle(monkeypatch, act: Callable[[], None]) -> None:
    """Do something once, when two tensors of a part of a broadcast have been sent, and the third has not."""
    send, done = ServerGroup.send, []

    def faulty(self: ServerGroup, tensors: Iterable[Tensor]):
        def some() -> Iterator[Tensor]:
            for index, tensor in enumerate(tensors):
                if index == 2 and not done:
                    done.append(act())
                yield tensor

        return send(self, some())

    monkeypatch.setattr(ServerGroup, "send", faulty)


def check_goes_on(engine: SGLangEngine, trainer: Trainer, version: int) -> None:
    """It holds the weights of a version, to the last bit, draws with them, and takes the next."""
    expected = {name: tensor_hash(t, torch.float32) for name, t in trainer.weights(version).items()}
    assert {held.name: held.value for held in engine.weight_hashes()} == expected
    assert {t.segments[1].policy_version for t in generate(engine, PROMPTS, SAMPLING)} == {version}
    InProcessTransfer(trainer, engine)(version + 1)


def test_a_server_killed_during_a_broadcast_returns_with_the_weights(either, connect, folder, monkeypatch):
    engine, trainer = connect(), Trainer(folder)
    transfer = InProcessTransfer(trainer, engine)
    transfer(1)
    (server,) = engine.replicas
    pid = server.process.pid
    in_the_middle(monkeypatch, lambda: os.killpg(pid, signal.SIGKILL))
    transfer(2)  # which compares what the server then holds with what was sent
    assert server.restarts == 1 and server.process.pid != pid
    check_goes_on(engine, trainer, 2)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_server_killed_before_or_after_a_broadcast_returns_with_the_weights(fake, connect, folder, monkeypatch, path):
    engine, trainer = connect(), Trainer(folder)
    transfer = InProcessTransfer(trainer, engine)
    transfer(1)
    (server,) = engine.replicas
    server.group = None  # so that it joins a group again
    post, done = Client.post, []

    async def faulty(self, asked, at, *args, **options):
        if at == path and not done:
            done.append(os.killpg(server.process.pid, signal.SIGKILL))
        return await post(self, asked, at, *args, **options)

    monkeypatch.setattr(Client, "post", faulty)
    transfer(2)
    assert done and server.restarts == 1
    check_goes_on(engine, trainer, 2)


@pytest.mark.slow
def test_a_server_that_stops_during_a_broadcast_is_named_within_its_time(either, connect, folder, monkeypatch):
    engine, trainer = connect(timeout_s=5.0), Trainer(folder)
    transfer = InProcessTransfer(trainer, engine)
    transfer(1)
    pid = engine.replicas[0].process.pid
    in_the_middle(monkeypatch, lambda: os.killpg(pid, signal.SIGSTOP))
    began = time.monotonic()
    message = rf"SGLangEngine started at .* \(pid {pid}\) has not answered /update_weights_from_distributed within 5 s"
    with pytest.raises(TimeoutError, match=message):
        transfer(2)
    assert time.monotonic() - began < 5 + 15
    os.killpg(pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_foreign_server_that_stays_unavailable_is_named_within_its_time(fake, connect, folder, monkeypatch):
    process = ServerProcess(fake)
    try:
        end = time.monotonic() + 60
        while not up(process.url) and time.monotonic() < end:
            time.sleep(0.1)
        engine, trainer = connect(timeout_s=5.0, server=(process.url,)), Trainer(folder)
        transfer = InProcessTransfer(trainer, engine)
        transfer(1)
        in_the_middle(monkeypatch, lambda: os.killpg(process.pid, signal.SIGKILL))
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=f"{process.url}.*unavailable for 5 s"):
            transfer(2)
        assert time.monotonic() - began < 5 + 15
    finally:
        process.end()


def up(url: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.slow
def test_a_server_killed_again_during_its_restart_returns(fake, connect, folder, monkeypatch):
    engine, trainer = connect(), Trainer(folder)
    transfer = InProcessTransfer(trainer, engine)
    transfer(1)
    post, killed = Client.post, []

    async def faulty(self, server, path, *args, **options):
        if path == "/begin_weight_update" and len(killed) < 2:
            killed.append(os.killpg(server.process.pid, signal.SIGKILL))
        return await post(self, server, path, *args, **options)

    monkeypatch.setattr(Client, "post", faulty)
    transfer(2)
    assert engine.replicas[0].restarts == 2
    check_goes_on(engine, trainer, 2)
    assert engine.replicas[0].restarts == 0


@pytest.mark.slow
def test_a_server_closed_with_requests_is_not_restarted(fake, connect, monkeypatch, caplog):
    engine = connect()
    engine.submit([request for prompt in PROMPTS for request in requests_of(prompt, LONG)])
    while not engine.replicas[0].in_flight:
        time.sleep(0.01)
    started, make = [], ServerProcess.__init__
    monkeypatch.setattr(ServerProcess, "__init__", lambda self, command: (started.append(self), make(self, command))[0])
    engine.close()
    monkeypatch.setattr(engine, "close", lambda: None)
    assert not started and "failed" not in caplog.text


@pytest.mark.slow
def test_requests_to_a_restarting_server_can_be_aborted_at_once(fake, connect, monkeypatch):
    engine = connect(timeout_s=2.0)
    (server,) = engine.replicas
    held = threading.Event()
    make = ServerProcess.__init__
    monkeypatch.setattr(ServerProcess, "__init__", lambda self, command: (held.wait(60), make(self, command))[1])
    engine.submit([request for prompt in PROMPTS for request in requests_of(prompt, LONG)])
    while not server.in_flight:
        time.sleep(0.01)
    os.killpg(server.process.pid, signal.SIGKILL)
    while not server.restarts:
        time.sleep(0.01)
    assert not server.generation
    try:
        outputs = engine.abort()
        assert len(outputs) == 4 and {output.finish_reason for output in outputs} == {"abort"}
    finally:
        held.set()
    assert len(generate(engine, PROMPTS, SAMPLING)) == 4
