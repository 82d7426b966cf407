"""ReplicatedEngine: distribution of requests and repair, with actors that are objects of this process."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing, nullcontext
from types import SimpleNamespace

import pytest
import torch

from atomrl.cluster.ray_cluster import Actor, ActorDied
from atomrl.config import ClusterConfig
from atomrl.engines.fake import FakeEngine
from atomrl.engines.replicas import ReplicatedEngine
from atomrl.protocols import WeightUpdate
from atomrl.types import GenerationRequest, SamplingParams
from atomrl.weight_sync.channels import open_channel


class Words:
    def batch_decode(self, rows, **options):
        return [" ".join(map(str, row)) for row in rows]


class Died(Exception):
    pass


class LocalCluster:
    """The part of a `RayCluster` that replicas call. An actor does what is asked of it when somebody waits for that,
    and after a moment, so that others have their turn."""

    died = (Died,)

    def __init__(self, folder, replicas):
        self.config = ClusterConfig(weight_transfer="files", weight_folder=str(folder), timeout_s=100.0)
        self.wanted = {"rollout": SimpleNamespace(count=replicas, gpus=0)}
        self.watch = SimpleNamespace(inside=lambda patience=0.0: nullcontext())
        self.ray = SimpleNamespace(wait=lambda refs, num_returns=1, timeout=0: (refs[:num_returns], []))
        self.dies: set[tuple[int, str]] = set()
        """(number of the replica, method): the next such call finds the process gone."""
        self.called: list[tuple[int, str]] = []

    def start(self, role, index, build):
        return Actor(role, index, build(), SimpleNamespace(address="here"), None)

    def know(self, actor):
        actor.pid = 1

    def submit(self, actor, method, *args):
        return actor, method, args

    async def answer(self, actor, asked):
        await asyncio.sleep(0.001)
        actor, method, args = asked
        if (actor.index, method) in self.dies:
            self.dies.remove((actor.index, method))
            actor.handle = None
        if actor.handle is None:
            raise Died(f"{actor} is gone")
        self.called.append((actor.index, method))
        return getattr(actor.handle, method)(*args)

    def end(self, actor):
        actor.handle = None


def engine():
    made = FakeEngine(lambda prompt, index: [*prompt, index], Words(), at_once=1)
    made.shapes = {"w": (2,)}
    return made


@pytest.fixture
def cluster(tmp_path):
    return LocalCluster(tmp_path, replicas=2)


@pytest.fixture
def replicas(cluster):
    with closing(ReplicatedEngine(engine, cluster)) as made:
        yield made


def request(name, tokens=4, **options):
    sampling = SamplingParams(max_completion_tokens=tokens)
    group = name.partition("/")[0]
    return GenerationRequest(
        request_id=name, group_id=group, prompt_token_ids=(7,), sampling=sampling, seed=0, **options
    )


def holders(replicas):
    return [sorted(replica.held) for replica in replicas.replicas]


def drain(replicas):
    drained = []
    while outputs := replicas.poll():
        drained += outputs
    return sorted(output.request_id for output in drained)


def engines(replicas):
    return [replica.actor.handle.engine for replica in replicas.replicas]


def test_a_group_is_drawn_by_one_replica_and_the_next_by_the_other(replicas):
    replicas.submit([request("a/0"), request("a/1"), request("b/0"), request("b/1")])
    assert holders(replicas) == [["a/0", "a/1"], ["b/0", "b/1"]]
    assert drain(replicas) == ["a/0", "a/1", "b/0", "b/1"]


def test_the_next_turn_goes_home_however_busy_that_is(replicas):
    replicas.submit([request("a/0", keep_cache=True), request("b/0")])
    assert drain(replicas) == ["a/0", "b/0"]
    replicas.submit([request("c/0", tokens=100), request("d/0", tokens=1)])
    assert holders(replicas) == [["c/0"], ["d/0"]]
    replicas.submit([request("e/0", continues="a/0")])
    assert holders(replicas)[0] == ["c/0", "e/0"]
    assert replicas.replicas[0].retained == set()  # a turn is continued once


def test_a_home_that_died_is_no_home(replicas, cluster):
    replicas.submit([request("a/0", keep_cache=True)])
    assert drain(replicas) == ["a/0"]
    replicas.submit([request("c/0", tokens=100)])
    cluster.dies.add((0, "poll"))
    assert drain(replicas) == ["c/0"] and replicas.restarts == 1
    replicas.submit([request("c/1", tokens=100), request("e/0", continues="a/0")])
    assert holders(replicas)[1] == ["e/0"]  # its cache is gone, so the less busy one draws it


@pytest.mark.parametrize("dies_at", ["submit", "set_state", "update_weights"])
def test_a_replica_that_dies_while_paused_returns_paused(replicas, cluster, dies_at):
    replicas.submit([request("a/0"), request("b/0")])
    replicas.pause()
    cluster.dies.add((1, dies_at))
    replicas.submit([request("b/1")])
    replicas.update_weights(WeightUpdate(1, [("w", torch.ones(2))]))
    if dies_at == "set_state":
        replicas.resume()
        replicas.pause()
    assert replicas.restarts == 1 and replicas.poll() == []
    assert [each.poll() for each in engines(replicas)] == [[], []]
    replicas.resume()
    assert [each.version for each in engines(replicas)] == [1, 1]
    assert drain(replicas) == ["a/0", "b/0", "b/1"]


def test_a_replica_that_dies_during_its_restart_is_restarted_again(replicas, cluster):
    replicas.submit([request("a/0"), request("b/0")])
    replicas.pause()
    cluster.dies |= {(0, "submit"), (0, "set_state")}
    replicas.submit([request("a/1")])
    assert replicas.restarts == 2
    assert [each.poll() for each in engines(replicas)] == [[], []]
    replicas.resume()
    assert drain(replicas) == ["a/0", "a/1", "b/0"]


def test_a_replica_that_keeps_dying_ends_the_run(replicas, cluster):
    cluster.start = lambda role, index, build: Actor(role, index, None, SimpleNamespace(address="here"), None)
    replicas.submit([request("a/0")])
    cluster.dies.add((0, "poll"))
    with pytest.raises(ActorDied, match=r"rollout 0 .*4 times.*is gone"):
        replicas.poll()


def test_a_replica_that_dies_at_start_is_started_again(cluster):
    know, tries = cluster.know, []

    def dies_first(actor):
        tries.append(actor.index)
        if actor.index == 0 and tries.count(0) < 3:
            raise Died("out of memory")
        know(actor)

    cluster.know = dies_first
    with closing(ReplicatedEngine(engine, cluster)) as replicas:
        replicas.submit([request("a/0"), request("b/0")])
        assert sorted(tries) == [0, 0, 0, 1] and drain(replicas) == ["a/0", "b/0"]


def test_no_replica_sleeps_while_one_holds_requests(replicas):
    replicas.submit([request("a/0")])
    with pytest.raises(RuntimeError, match="has 1 unfinished"):
        replicas.sleep()
    replicas.submit([request("b/0")])  # by the other one
    assert drain(replicas) == ["a/0", "b/0"]


def test_a_replica_that_dies_after_an_abort_is_started_again(replicas, cluster):
    replicas.submit([request("a/0"), request("a/1"), request("b/0")])
    cluster.dies.add((0, "abort"))
    aborted = replicas.abort(["a/0"])
    assert [output.request_id for output in aborted] == ["a/0"] and aborted[0].finish_reason == "abort"
    assert replicas.restarts == 1 and drain(replicas) == ["a/1", "b/0"]


def test_a_request_that_ended_in_an_answer_that_was_lost_is_given_up_all_the_same(replicas, cluster):
    replicas.submit([request("a/0"), request("a/1")])
    engines(replicas)[0].poll()  # finishes a/0, and nobody hears of it
    cluster.dies.add((0, "abort"))
    assert sorted(output.request_id for output in replicas.abort()) == ["a/0", "a/1"]
    assert holders(replicas) == [[], []] and drain(replicas) == []


def test_what_ended_before_it_is_given_up_is_returned_as_it_ended(replicas):
    replicas.submit([request("a/0"), request("b/0")])
    outputs, end = replicas.poll(0.0), time.monotonic() + 60  # which has the actors compute, also after it returns
    while len(outputs) + replicas.outputs.qsize() < 2 and time.monotonic() < end:
        time.sleep(0.01)
    outputs += replicas.abort()
    assert {(each.request_id, each.finish_reason) for each in outputs} == {("a/0", "stop"), ("b/0", "stop")}
    assert drain(replicas) == []


@pytest.mark.parametrize(("sees", "gpus", "backend"), [(True, 1, "nccl"), (False, 1, "gloo"), (True, 0.5, "gloo")])
def test_a_broadcast_is_by_nccl_where_the_sender_has_a_gpu_too(cluster, monkeypatch, sees, gpus, backend):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees)
    cluster.config = cluster.config.model_copy(update={"weight_transfer": "collective"})
    cluster.wanted["rollout"].gpus = gpus
    channel = open_channel(cluster)
    assert channel.backend == backend and channel.device.type == ("cuda" if backend == "nccl" else "cpu")
    channel.close()
