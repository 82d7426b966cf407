"""Placement on GPUs, on plans of machines that are not here: refusals, and trainers that need no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atomrl.cluster.placement import Node, PlacementError, places, wanted
from atomrl.cluster.ray_cluster import planned
from atomrl.config import ConfigError, load_config
from atomrl.trainer import cluster as module
from atomrl.trainer.build import ENGINES as ENGINE_CLASSES
from atomrl.trainer.checks.engine import check_engine
from atomrl.trainer.cluster import check_gpus, open_cluster

TRAINER = {"trainer": {"num_gpus": 1}}
ENGINES = {"rollout": {"num_gpus": 1}}
HALVES = {"trainer": {"num_gpus": 0.5}, "rollout": {"num_gpus": 0.5}}


@pytest.fixture
def gpus(monkeypatch):
    """Makes this machine one with some GPUs and many CPUs."""

    def make(count):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr("os.cpu_count", lambda: 64)

    return make


def config_of(cluster, **sections):
    return load_config(
        {"run_name": "run", "model": {"path": "-"}, "data": {"train": "-"}, "cluster": cluster} | sections
    )


def check(cluster, producer=False, **sections):
    """As of a run, whose trainer is in an actor where the config has it there."""
    config = config_of(cluster, **sections)
    roles = ["rollout"]
    if not producer and (config.cluster.placement or "trainer" in config.cluster.resources):
        roles.insert(0, "trainer")
    check_gpus(config, *planned(config.cluster, roles, config.model.device), producer=producer)


def test_engines_without_gpus_are_refused_where_there_are_some(gpus):
    gpus(0)
    check({"replicas": 2})
    gpus(4)
    with pytest.raises(ConfigError, match=r"cluster.placement=split"):
        check({"replicas": 2})
    with pytest.raises(ConfigError, match="no GPU"):
        check({"replicas": 2, "resources": TRAINER})
    for said in ({"placement": "split"}, {"placement": "colocated"}, {"resources": TRAINER | ENGINES}):
        check({"replicas": 2} | said, rollout={"gpu_memory_utilization": 0.4})
    check({"replicas": 2, "resources": {"rollout": {"num_gpus": 0}}})
    check({"replicas": 2}, model={"path": "-", "device": "cpu"})
    check({}, rollout={"engine": "sglang", "server": "http://a:1"})
    check({"resources": TRAINER}, rollout={"source": "pool"})  # without an evaluation no engine is started


def test_engines_without_gpus_are_refused_where_other_machines_have_some():
    """The machine of the run has none, and there `auto` is the CPU."""
    config = config_of({"replicas": 1})
    (asked,) = wanted(config.cluster, ["rollout"], gpus=True)
    placement = places([asked], [Node("other", "10.0.0.2", 8, [1.0])])
    with pytest.raises(ConfigError, match="no GPU"):
        check_gpus(config, {"rollout": asked}, placement)


def test_the_gpu_of_a_trainer_in_this_process_goes_to_no_actor(gpus):
    gpus(2)
    with pytest.raises(ConfigError, match=r"resources.trainer"):
        check({"resources": ENGINES})
    with pytest.raises(ConfigError, match="GPU 0"):
        check({"replicas": 2, "resources": ENGINES}, model={"path": "-", "device": "cuda:0"})
    check({"resources": ENGINES}, model={"path": "-", "device": "cuda:1"})  # which Ray hands out last
    check({"resources": ENGINES}, model={"path": "-", "device": "cpu"})
    check({"resources": ENGINES | TRAINER})
    check({"resources": {"rollout": {"num_gpus": 0.5}}})  # a share may be beside it
    check({"resources": ENGINES}, producer=True)  # which trains nothing


def test_the_ranks_of_this_process_keep_their_gpus(gpus):
    gpus(4)
    ranked = {"backend": {"type": "fsdp", "ranks": 2}, "model": {"path": "-", "device": "cuda"}}
    with pytest.raises(ConfigError, match="GPU 0"):
        check({"resources": ENGINES}, **ranked)


@pytest.mark.parametrize("engine", ["vllm", "vllm-server", "sglang"])
def test_engines_that_share_a_gpu_do_not_ask_for_more_than_there_is(gpus, engine):
    gpus(1)
    shared = {"placement": "colocated", "replicas": 2}
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization.*0.5"):
        check(shared, rollout={"engine": engine, "gpu_memory_utilization": 0.9})
    with pytest.raises(ConfigError, match=r"at most 0\.33"):
        check(shared | {"replicas": 3}, rollout={"engine": engine, "gpu_memory_utilization": 0.34})
    check(shared, rollout={"engine": engine, "gpu_memory_utilization": 0.5})
    check(shared | {"replicas": 1}, rollout={"engine": engine})
    check(shared)  # the native engine takes what its rows need
    gpus(3)
    check({"placement": "split", "replicas": 2}, rollout={"engine": engine})
    check({"replicas": 2, "resources": HALVES | {"trainer": {"num_gpus": 0.6}}}, rollout={"engine": "native"})
    check({"replicas": 1, "resources": HALVES}, rollout={"engine": engine})
    with pytest.raises(ConfigError, match="2 engines"):
        check({"replicas": 3, "resources": HALVES}, rollout={"engine": engine, "gpu_memory_utilization": 0.9})
    check({"replicas": 3, "resources": HALVES}, rollout={"engine": engine})  # `auto`: each has half of that


def test_an_engine_has_as_many_gpus_as_it_cuts_the_model_over(gpus):
    four = {"resources": {"rollout": {"num_gpus": 4}}}
    with pytest.raises(ConfigError, match=r"resources.rollout.num_gpus=4: .*tensor_parallel=1 .*cluster.replicas"):
        config_of(four)
    config_of(four, rollout={"engine": "vllm", "tensor_parallel": 4})
    for cluster in ({"placement": "colocated"}, {"resources": {"rollout": {"num_gpus": 1}}}):
        with pytest.raises(ConfigError, match=r"rollout.tensor_parallel=2: .*cluster.placement=split"):
            config_of(cluster, rollout={"engine": "vllm", "tensor_parallel": 2})


def test_placement_counts_the_gpus_of_engines_that_are_cut(gpus):
    """Trainer and two engines of two GPUs each."""
    config = config_of({"placement": "split", "replicas": 2}, rollout={"engine": "vllm", "tensor_parallel": 2})
    cluster = module.with_engine_gpus(config)
    gpus(5)
    wanted, places = planned(cluster, ["trainer", "rollout"], "cuda")
    assert (wanted["rollout"].gpus, wanted["trainer"].gpus, len(places)) == (2, 1, 3)
    gpus(4)
    with pytest.raises(PlacementError, match=r"rollout x2.*2 GPUs"):
        planned(cluster, ["trainer", "rollout"], "cuda")


def test_a_role_with_a_custom_resource_goes_where_that_is():
    big = {"resources": {"trainer": {"custom": {"big_memory": 1}}}}
    asked = wanted(config_of(big).cluster, ["rollout", "trainer"], gpus=False)
    here, other = Node("a", "10.0.0.1", 8), Node("b", "10.0.0.2", 8, custom={"big_memory": 1.0})
    placement = places(asked, [here, other])
    assert placement["trainer", 0].name == "b" and placement["rollout", 0].name == "a"
    assert other.custom == {"big_memory": 1.0}, "a plan takes nothing"
    message = r"only 0 of 1 trainer actors \(1 CPUs, 0 GPUs, big_memory 1 each\).*10.0.0.1 with 8 CPUs and 0 GPUs;"
    with pytest.raises(PlacementError, match=message):
        places(asked, [here])
    two = [replace(each, count=2) for each in asked if each.role == "trainer"]
    with pytest.raises(PlacementError, match=r"10.0.0.2 with 8.*big_memory 1"):
        places(two, [other])


def test_a_custom_resource_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="built-in resource of Ray; use num_cpus"):
        config_of({"resources": {"trainer": {"custom": {"GPU": 1}}}})
    with pytest.raises(ConfigError, match=r"custom\.big_memory"):
        config_of({"resources": {"trainer": {"custom": {"big_memory": 0}}}})
    with pytest.raises(PlacementError, match=r"0 of 1 rollout.*big_memory 1"):
        planned(config_of({"resources": {"rollout": {"custom": {"big_memory": 1}}}}).cluster, ["rollout"], "cpu")


class Started:
    """In the place of a `RayCluster`: keeps what was asked for."""

    def __init__(self, config, roles, device, ranks):
        self.roles, self.closed = roles, False
        self.wanted, self.places = planned(config, roles, device, ranks)

    def close(self):
        self.closed = True


def test_a_producer_needs_no_room_for_who_trains(monkeypatch):
    from contextlib import ExitStack

    from atomrl.algorithms import objective_of

    monkeypatch.setattr(module, "RayCluster", Started)
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    config = config_of({"resources": {"trainer": {"num_cpus": 10**6}, "rollout": {"num_cpus": 0.5}}})
    algorithm = objective_of({"name": "grpo"}).resolved()
    with ExitStack() as stack:
        cluster = open_cluster(config, algorithm, stack, producer=True)
        assert cluster.roles == ["rollout"]
    assert cluster.closed
    with ExitStack() as stack, pytest.raises(ConfigError, match="1 trainer actors"):
        open_cluster(config, algorithm, stack)


def test_a_share_of_memory_that_no_engine_reads_is_said(monkeypatch, caplog):
    for engine, said in (("native", True), ("sglang", False)):
        monkeypatch.setattr(
            "atomrl.trainer.checks.engine.engine_class", lambda *given, name=engine: (ENGINE_CLASSES[name], None)
        )
        monkeypatch.setattr("atomrl.trainer.checks.engine.find_spec", lambda name: name)
        caplog.clear()
        for share in ("auto", 0.4):
            check_engine(config_of({}, rollout={"engine": engine, "gpu_memory_utilization": share}), "-")
        shown = "rollout.gpu_memory_utilization=0.4 has no effect on rollout.engine=native" in caplog.text
        assert shown == said and "=auto" not in caplog.text
