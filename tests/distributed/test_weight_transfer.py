"""Weights on their way to engines in other processes, by each way: whole, exact, verified, and again after a death."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from atomrl.cluster.ray_cluster import RayCluster
from atomrl.config import ClusterConfig
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.replicas import ReplicatedEngine
from atomrl.engines.requests import EngineOptions
from atomrl.protocols import Adapter, WeightUpdate
from atomrl.weight_sync import InProcessTransfer, WeightMismatch, tensor_hash
from tests.tiny import make_tiny_model

pytest.importorskip("ray", reason="Ray is not installed; `make distributed` has it")


DTYPES = {"shared_memory": torch.float32, "files": torch.bfloat16, "collective": torch.bfloat16}


class Faulty(NativeEngine):
    """Does what a file says, once: flips a bit of what it got, or kills or stops its process in the middle."""

    flag: Path

    def update_weights(self, update: WeightUpdate) -> None:
        try:  # of two replicas at the same time one has it
            fault = self.flag.rename(self.flag.with_name(f"taken-{os.getpid()}")).read_text()
        except FileNotFoundError:
            fault = ""
        signals = {"dies": signal.SIGKILL, "freezes": signal.SIGSTOP}

        def some() -> Iterator[tuple[str, torch.Tensor]]:
            for index, part in enumerate(update.tensors):
                if index == 3 and fault in signals:
                    os.kill(os.getpid(), signals[fault])
                yield part

        super().update_weights(WeightUpdate(update.version, some(), update.adapters))
        if fault == "damages":
            norm = self.model.vectors["model.norm.weight"]
            norm.view(torch.int32 if norm.dtype == torch.float32 else torch.int16)[3] ^= 1


def build(path: str, flag: Path, dtype: torch.dtype) -> NativeEngine:
    options = EngineOptions(dtype, "cpu", max_concurrent_completions=4)
    engine = Faulty.from_pretrained(path, AutoTokenizer.from_pretrained(path), options, use_kernel=False)
    engine.flag = flag
    return engine


class Trainer:
    def __init__(self, shapes, adapters=()):
        self.generator = torch.Generator().manual_seed(0)
        self.shapes, self.on, self.base = shapes, adapters, []

    def weight_update(self, version, adapters_alone=False):
        draw = partial(torch.randn, generator=self.generator)
        tensors = () if adapters_alone else [(name, draw(shape)) for name, shape in self.shapes.items()]
        adapters = {
            name: Adapter(draw(2, self.shapes[name][1]), draw(self.shapes[name][0], 2), 0.5) for name in self.on
        }
        self.base = tensors or self.base
        self.sent = WeightUpdate(version, tensors, adapters)
        return self.sent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), scale=0.2)


@pytest.fixture(scope="module", params=DTYPES)
def way(request):
    return request.param


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def started(way, folder, place):
    """Two replicas; each way's are started once, since that takes seconds."""
    config = ClusterConfig(
        replicas=2,
        resources={"rollout": {"num_cpus": 0.1}},
        timeout_s=60,
        weight_transfer=way,
        weight_folder=str(place / "weights"),
    )
    with closing(RayCluster(config, ["rollout"])) as cluster:
        engine = ReplicatedEngine(partial(build, str(folder), place / "flag", DTYPES[way]), cluster)
        yield engine
        engine.close()


@pytest.fixture
def engine(started, place):
    started.cluster.config, started.restarts = started.cluster.config.model_copy(update={"timeout_s": 60.0}), 0
    yield started
    (place / "flag").unlink(missing_ok=True)
    for replica in started.replicas:
        replica.restarts = 0


def held_by(engine: ReplicatedEngine) -> dict[str, dict[str, int]]:
    sizes: dict[str, dict[str, int]] = {}
    for name, _, value, holder in engine.weight_hashes():
        sizes.setdefault(holder, {})[name] = value
    return sizes


def whole(trainer: Trainer, dtype: torch.dtype) -> list[dict[str, int]]:
    """Return the hashes that both replicas must hold."""
    held = {name: tensor_hash(tensor, dtype) for name, tensor in trainer.base}
    held |= {name: tensor_hash(part, torch.float32) for name, part in trainer.sent.parts() if ".lora_" in name}
    return [held, held]


@pytest.mark.short
def test_every_replica_holds_the_sent_weights(engine, way):
    trainer = Trainer(engine.weight_shapes())
    transfer = InProcessTransfer(trainer, engine)
    for version in range(1, 4):
        transfer(version)
        assert list(held_by(engine).values()) == whole(trainer, DTYPES[way])


def test_adapters_travel_alone_and_return_with_their_base(engine, way):
    layers = [name for name in engine.weight_shapes() if "q_proj" in name or "down_proj" in name]
    trainer = Trainer(engine.weight_shapes(), layers)
    transfer = InProcessTransfer(trainer, engine)
    for version in (1, 2, 3):
        transfer(version)
    assert trainer.sent.tensors == ()
    assert list(held_by(engine).values()) == whole(trainer, DTYPES[way])
    os.kill(engine.replicas[1].actor.pid, signal.SIGKILL)
    assert list(held_by(engine).values()) == whole(trainer, DTYPES[way])
    assert engine.restarts == 1
    transfer(4)


def test_a_damaged_weight_is_found_and_named(engine, place):
    transfer = InProcessTransfer(Trainer(engine.weight_shapes()), engine)
    transfer(1)
    (place / "flag").write_text("damages")
    message = r"rollout \d \(pid \d+ on 127.0.0.1\) does not have the weights of version 2: model.norm.weight differs"
    with pytest.raises(WeightMismatch, match=message):
        transfer(2)


def test_a_replica_that_returns_with_other_weights_is_found(engine, place):
    InProcessTransfer(Trainer(engine.weight_shapes()), engine)(1)
    (place / "flag").write_text("damages")
    os.kill(engine.replicas[1].actor.pid, signal.SIGKILL)
    with pytest.raises(WeightMismatch, match=r"rollout 1.*1: model.norm.weight differs"):
        engine.pause()
    engine.resume()


def test_a_replica_that_dies_during_an_update_holds_up_no_other(engine, way, place):
    trainer = Trainer(engine.weight_shapes())
    transfer = InProcessTransfer(trainer, engine)
    transfer(1)
    (place / "flag").write_text("dies")
    transfer(2)
    assert engine.restarts == 1
    assert list(held_by(engine).values()) == whole(trainer, DTYPES[way])
    transfer(3)


def test_files_are_whole_and_old_ones_go(engine, way, place):
    transfer = InProcessTransfer(Trainer(engine.weight_shapes()), engine)
    for version in (1, 2, 3):
        transfer(version)
        if way == "files":
            assert [path.name.split("-")[1] for path in (place / "weights").iterdir()] == [str(version)]


def test_a_frozen_replica_is_named(engine, place):
    """The last test of each engine: a run ends there."""
    transfer = InProcessTransfer(Trainer(engine.weight_shapes()), engine)
    transfer(1)
    (place / "flag").write_text("freezes")
    engine.cluster.config = engine.cluster.config.model_copy(update={"timeout_s": 5.0})
    with pytest.raises(TimeoutError, match=r"rollout [01].*answered for 5") as caught:
        transfer(2)
    os.kill(int(re.findall(r"pid (\d+)", str(caught.value))[0]), signal.SIGKILL)
