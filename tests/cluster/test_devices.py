"""A dry run lists each device: its roles, their memory, and whether that fits."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from atomrl.algorithms import objective_of
from atomrl.cluster.placement import Node, places, wanted
from atomrl.cluster.ray_cluster import planned
from atomrl.config import load_config
from atomrl.trainer import cluster_report as module
from atomrl.trainer.cluster_report import describe_devices
from atomrl.trainer.memory import memory_estimate
from tests.tiny import make_tiny_model

GIB, MIB = 2**30, 2**20
PPO = objective_of({"name": "ppo"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def describe(monkeypatch, folder):
    """The lines of a config on a machine with some GPUs, of `gpu_bytes` each."""

    def make(cluster, roles, gpus=2, gpu_bytes=80 * GIB, nodes=None, **rollout):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr("os.cpu_count", lambda: 64)
        monkeypatch.setattr(module, "available_memory", lambda: 24 * GIB)
        monkeypatch.setattr(module, "device_name", lambda device: "cuda:0" if gpus else "cpu")
        card = SimpleNamespace(total_memory=gpu_bytes)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: card)
        config = load_config(
            {
                "run_name": "run",
                "model": {"path": str(folder), "dtype": "float32", "device": "cuda" if gpus else "cpu"},
                "data": {"train": "-", "max_prompt_tokens": 16},
                "rollout": {"max_completion_tokens": 16} | rollout,
                "cluster": cluster,
            }
        )
        if nodes is None:
            plan = planned(config.cluster, roles, config.model.device)
        else:
            asked = wanted(config.cluster, roles, gpus=True)
            plan = {each.role: each for each in asked}, places(asked, nodes)
        parts = memory_estimate(config, PPO, 1)
        return list(describe_devices(config, PPO, *plan)), parts

    return make


def mib(size):
    return f"{size / MIB:.1f} MiB"


def test_each_gpu_has_its_own_line(describe):
    """The critic's parts are the critic's, and no longer the trainer's."""
    lines, parts = describe({"placement": "split"}, ["trainer", "rollout", "critic"], gpus=3)
    drawing = mib(parts["engine weights"] + parts["key-value cache"])
    critic = mib(parts["critic"] + parts["critic activations"])
    gone = ("engine weights", "key-value cache", "critic", "critic activations")
    trainer = mib(parts["total"] - sum(parts[name] for name in gone))
    assert len(lines) == 3 and {line.partition(":")[0] for line in lines} == {
        f"this machine, GPU {index}" for index in range(3)
    }
    for role, size in {"rollout": drawing, "critic": critic, "trainer": trainer}.items():
        assert any(line.endswith(f": {role} {size}: {size}, of 80.00 GiB: fits") for line in lines), (role, lines)


def test_what_does_not_fit_is_said(describe):
    lines, _ = describe({"placement": "split"}, ["trainer", "rollout"], gpu_bytes=1000)
    assert len(lines) == 2 and all(line.endswith("DOES NOT FIT") for line in lines)


def test_roles_that_take_turns_are_not_added_up(describe):
    """The engine's cache and what the trainer takes for a moment are never there at the same time."""
    (line,), parts = describe({"placement": "colocated"}, ["trainer", "rollout"], gpus=1)
    trainer = parts["total"] - parts["engine weights"] - parts["key-value cache"]
    assert line.endswith(f": {mib(trainer + parts['engine weights'])} in turns, of 80.00 GiB: fits"), line


def test_an_engine_that_takes_a_share_of_a_gpu_takes_it(describe):
    lines, _ = describe({"placement": "split"}, ["trainer", "rollout"], engine="vllm", gpu_memory_utilization=0.5)
    assert any(line.endswith("rollout 40.00 GiB: 40.00 GiB, of 80.00 GiB: fits") for line in lines), lines


def test_without_gpus_it_is_the_machines_memory_with_this_process(describe):
    (line,), parts = describe({"replicas": 2}, ["rollout"], gpus=0)
    each = parts["engine weights"] + parts["key-value cache"]
    total = mib(parts["total"] + each)
    said = rf"this machine, memory: 2 x rollout {mib(each)}, trainer .*: {total}, of 24.00 GiB: fits"
    assert re.fullmatch(said, line), line


def test_the_memory_of_other_machines_is_unknown(describe):
    here = Node("a", "10.0.0.1", 8, [1.0], here=True)
    nodes = [here, replace(here, name="b", address="10.0.0.2", here=False)]
    lines, _ = describe({"placement": "split"}, ["trainer", "rollout"], nodes=nodes)
    first, second = sorted(lines)
    assert first.startswith("10.0.0.1, GPU 0: ") and first.endswith("fits")
    assert second.startswith("10.0.0.2, GPU 0: ") and second.endswith("of unknown size")
