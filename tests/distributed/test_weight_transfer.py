"""Weights on their way to engines in other processes, by each way: whole, exact, verified, and again after a death."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from atomrl.config import ClusterConfig
from atomrl.protocols import Adapter, WeightUpdate
from atomrl.rollout.native import NativeEngine
from atomrl.rollout.replicas import ReplicatedEngine, connect
from atomrl.weights import InProcessTransfer, WeightMismatch, tensor_hash
from tests.tiny import make_tiny_model

pytest.importorskip("ray", reason="Ray is not installed; `make distributed` has it")
WAYS = ("shared_memory", "files", "collective")


class Damaging(NativeEngine):
    """Flips a bit of what it got, where a file says so."""

    def update_weights(self, update: WeightUpdate) -> None:
        super().update_weights(update)
        if Path(os.environ["ATOMRL_TEST_DAMAGE"]).exists():
            self.model.vectors["model.norm.weight"].view(torch.int32)[3] ^= 1


class Dying(NativeEngine):
    """Kills its own process in the middle of an update, once."""

    def update_weights(self, update: WeightUpdate) -> None:
        flag = Path(os.environ["ATOMRL_TEST_DAMAGE"])

        def some(tensors):
            for index, part in enumerate(tensors):
                if index == 3 and flag.exists():
                    flag.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
                yield part

        super().update_weights(WeightUpdate(update.version, some(update.tensors), update.adapters))


class Freezing(NativeEngine):
    """Stops its own process in the middle of an update, once."""

    def update_weights(self, update: WeightUpdate) -> None:
        flag = Path(os.environ["ATOMRL_TEST_DAMAGE"])
        if flag.exists():
            flag.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        super().update_weights(update)


def build(kind: type[NativeEngine], path: str, flag: str, dtype: torch.dtype = torch.float32) -> NativeEngine:
    os.environ["ATOMRL_TEST_DAMAGE"] = flag
    options = {"dtype": dtype, "device": "cpu", "max_concurrent_completions": 4}
    return kind.from_pretrained(path, AutoTokenizer.from_pretrained(path), use_kernel=False, **options)


class Trainer:
    def __init__(self, shapes, adapters=()):
        self.generator = torch.Generator().manual_seed(0)
        self.shapes, self.on = shapes, adapters

    def weight_update(self, version, adapters_alone=False):
        draw = partial(torch.randn, generator=self.generator)
        tensors = () if adapters_alone else [(name, draw(shape)) for name, shape in self.shapes.items()]
        adapters = {
            name: Adapter(draw(2, self.shapes[name][1]), draw(self.shapes[name][0], 2), 0.5) for name in self.on
        }
        self.sent = WeightUpdate(version, tensors, adapters)
        return self.sent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), scale=0.2)


@pytest.fixture(scope="module")
def cluster_here():
    """Started once: it takes seconds."""
    ray, _ = connect(None)
    yield
    ray.shutdown()


@pytest.fixture
def opened(folder, tmp_path, cluster_here):
    engines = []

    def make(way, kind=NativeEngine, timeout_s=60.0, dtype=torch.float32) -> ReplicatedEngine:
        cluster = ClusterConfig(
            replicas=2, num_cpus=0.1, timeout_s=timeout_s, weight_transfer=way, weight_folder=str(tmp_path / "weights")
        )
        engine = ReplicatedEngine(partial(build, kind, str(folder), str(tmp_path / "flag"), dtype), cluster)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def held_by(engine: ReplicatedEngine) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for name, _, value, holder in engine.weight_hashes():
        found.setdefault(holder, {})[name] = value
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_sent_is_held_by_every_replica(opened, way, dtype):
    engine = opened(way, dtype=dtype)
    trainer = Trainer(engine.weight_shapes())
    transfer = InProcessTransfer(trainer, engine)
    for version in range(1, 4):
        transfer(version)
        expected = {name: tensor_hash(tensor, dtype) for name, tensor in trainer.sent.tensors}
        found = held_by(engine)
        assert len(found) == 2 and all(held == expected for held in found.values())


@pytest.mark.parametrize("way", WAYS)
def test_adapters_travel_alone_and_come_back_with_their_base(opened, way):
    engine = opened(way)
    layers = [name for name in engine.weight_shapes() if "q_proj" in name or "down_proj" in name]
    trainer = Trainer(engine.weight_shapes(), layers)
    transfer = InProcessTransfer(trainer, engine)
    transfer(1)
    base = dict(trainer.sent.tensors)
    for version in (2, 3):
        transfer(version)
        assert trainer.sent.tensors == ()
    expected = {name: tensor_hash(tensor, torch.float32) for name, tensor in base.items()}
    expected |= {name: tensor_hash(tensor, torch.float32) for name, tensor in trainer.sent.parts()}
    assert list(held_by(engine).values()) == [expected, expected]
    os.kill(engine.replicas[1].pid, signal.SIGKILL)
    assert list(held_by(engine).values()) == [expected, expected]
    transfer(4)


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_weight_is_found_and_named(opened, way, tmp_path):
    engine = opened(way, Damaging)
    transfer = InProcessTransfer(Trainer(engine.weight_shapes()), engine)
    transfer(1)
    (tmp_path / "flag").touch()
    pid = engine.replicas[0].pid
    message = rf"replica 0 \(pid {pid}\) has not the weights of version 2: model.norm.weight differs"
    with pytest.raises(WeightMismatch, match=message):
        transfer(2)


def test_one_that_comes_back_with_other_weights_is_found(opened, tmp_path):
    engine = opened("shared_memory", Damaging)
    InProcessTransfer(Trainer(engine.weight_shapes()), engine)(1)
    (tmp_path / "flag").touch()
    os.kill(engine.replicas[1].pid, signal.SIGKILL)
    with pytest.raises(WeightMismatch, match=r"replica 1 .* of version 1: model.norm.weight differs"):
        engine.pause()


@pytest.mark.parametrize("way", WAYS)
def test_one_that_dies_in_the_middle_holds_nobody_up(opened, way, tmp_path):
    engine = opened(way, Dying)
    trainer = Trainer(engine.weight_shapes())
    transfer = InProcessTransfer(trainer, engine)
    transfer(1)
    (tmp_path / "flag").touch()
    began = time.monotonic()
    transfer(2)
    assert engine.restarts == 1 and time.monotonic() - began < 45
    expected = {name: tensor_hash(tensor, torch.float32) for name, tensor in trainer.sent.tensors}
    assert list(held_by(engine).values()) == [expected, expected]
    transfer(3)


@pytest.mark.parametrize("way", WAYS)
def test_one_that_freezes_is_named(opened, way, tmp_path):
    engine = opened(way, Freezing)
    transfer = InProcessTransfer(Trainer(engine.weight_shapes()), engine)
    transfer(1)
    (tmp_path / "flag").touch()
    engine.timeout_s = 5.0
    with pytest.raises(TimeoutError, match=r"rollout replica [01] .* has not answered for 5 s"):
        transfer(2)


def test_files_are_whole_and_old_ones_go(opened, tmp_path):
    engine, weights = opened("files"), tmp_path / "weights"
    transfer = InProcessTransfer(Trainer(engine.weight_shapes()), engine)
    for version in (1, 2, 3):
        transfer(version)
        assert [found.name.split("-")[1] for found in weights.iterdir()] == [str(version)]
    (weights / ".weights-4-4.partial").mkdir()  # as a kill in the middle leaves it
    assert len(held_by(opened("files"))) == 2 and list(weights.iterdir()) == []


def test_a_broadcast_listens_on_this_machine_alone(opened):
    engine = opened("collective")
    InProcessTransfer(Trainer(engine.weight_shapes()), engine)(1)
    pids = {os.getpid(), *(replica.pid for replica in engine.replicas)}
    addresses = {address for pid in pids for address in listening(pid)}
    assert addresses == {"127.0.0.1"}, addresses


def listening(pid: int) -> list[str]:
    """The addresses on which a process accepts connections."""
    sockets = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                raw = bytes.fromhex(fields[1].split(":")[0])
                found.append(".".join(str(byte) for byte in raw[:4][::-1]) if table == "tcp" else raw.hex())
    return found
