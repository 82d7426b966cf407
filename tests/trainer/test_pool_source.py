"""Steps out of a pool: replay after a restart, finished with the checkpoint, waiting, dynamic sampling."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace

import pytest

from atomrl.algorithms import objective_of
from atomrl.data.prompt_stream import PromptStream
from atomrl.pool.errors import LeaseLost, PoolEmpty
from atomrl.pool.store import RolloutPool
from atomrl.trainer.pool_source import PoolSource
from atomrl.trainer.report.stopwatch import Stopwatch
from atomrl.types import Segment
from tests.pool.made import Clock, group, settings
from tests.trainer.scripted import curriculum_of

GRPO = objective_of({"name": "grpo"}).resolved()
DAPO = objective_of({"name": "dapo"}).resolved(max_completion_tokens=12)


@pytest.fixture
def make(tmp_path):
    """A source of one run, as after a start (`done=0`) or a restart."""
    opened = []

    def make(done=0, algorithm=GRPO, clock=time.time, **changes):
        pool = RolloutPool(tmp_path / "p.sqlite", settings(**{"timeout_s": 0.2} | changes), clock)
        reader = pool.start_run("run", resumed=done is not None and bool(opened))
        curriculum = curriculum_of(PromptStream([group(0)[0].problem]), algorithm)
        opened.append(PoolSource(pool, reader, algorithm, curriculum, tmp_path / "checkpoints", done))
        return opened[-1]

    yield make
    for source in opened:
        source.pool.close()


def collect(source, step, count=2):
    accepted, refused = source.collect(count, step, Stopwatch())
    return [[item[0].prompt_id for item in some] for some in (accepted, refused)]


def save(tmp_path, step):
    (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)


def test_a_restart_gives_the_same_groups_to_the_same_steps(make, tmp_path):
    source = make()
    source.pool.put([group(n) for n in range(9)])
    first = [collect(source, step) for step in (1, 2, 3)]
    assert first == [[["0:0", "0:1"], []], [["0:2", "0:3"], []], [["0:4", "0:5"], []]]
    save(tmp_path, 1)
    again = make(done=1)
    assert again.pool.stats()["groups"] == 7, "what the checkpoint has is finished"
    assert [collect(again, step) for step in (2, 3)] == first[1:]
    assert collect(again, 4) == [["0:6", "0:7"], []]
    save(tmp_path, 4)
    again.close()
    pool = RolloutPool(tmp_path / "p.sqlite", settings())
    assert pool.stats()["groups"] == 1 and pool.stats()["finished"] == 8
    pool.close()


def test_trained_groups_leave_the_pool_with_the_checkpoint(make, tmp_path):
    source = make()
    source.pool.put([group(n) for n in range(6)])
    collect(source, 1)
    collect(source, 2)
    assert source.pool.stats()["finished"] == 0
    save(tmp_path, 1)
    collect(source, 3)
    assert source.pool.stats()["finished"] == 2 and source.pool.stats()["groups"] == 4


def test_an_empty_pool_ends_the_wait_with_what_is_in_it(make):
    source = make(max_staleness=1, min_response_tokens=5)
    source.pool.put([group(1), group(2, tokens=2)])
    watch = Stopwatch()
    with pytest.raises(PoolEmpty) as caught:
        source.collect(1, 9, watch)
    said = str(caught.value)
    assert "step 9 waited for pool.timeout_s=0.2 seconds" in said and "2 groups (2 more than pool.max_staleness" in said
    assert "1 with a completion under pool.min_response_tokens" in said and "atomrl pool fill" in said
    assert watch.phases["pool"] >= 0.2


def test_a_step_waits_for_what_comes_late(make, tmp_path):
    source = make(timeout_s=120)
    source.pool.put([group(1)])

    def later():
        time.sleep(0.2)
        pool = RolloutPool(tmp_path / "p.sqlite", settings())
        pool.put([group(2)])
        pool.close()

    thread = threading.Thread(target=later)
    thread.start()
    assert collect(source, 1) == [["0:1", "0:2"], []]
    thread.join()


def test_other_groups_are_taken_for_those_that_are_refused(make, monkeypatch):
    source = make(algorithm=DAPO)
    equal = (1.0, 1.0)
    source.pool.put([group(n, rewards=equal if n % 2 else (0.0, 1.0)) for n in range(8)])
    assert collect(source, 1) == [["0:0", "0:2"], ["0:1"]]
    again = make(done=0, algorithm=DAPO)
    assert collect(again, 1) == [["0:0", "0:2"], ["0:1"]], "also after a restart"
    monkeypatch.setattr("atomrl.trainer.sources.MAX_ROUNDS", 2)
    source.pool.put([group(n, rewards=equal) for n in range(20, 40)])
    accepted, refused = collect(again, 2, count=3)
    assert accepted == ["0:4", "0:6"] and len(refused) == 4, "it goes on with what was found"


def without_tokens(number, segments=1):
    """A group all of whose episodes failed before the model wrote anything."""
    empty = Segment(origin="model", token_ids=(), logprobs=(), policy_version=0)
    parts = (group(number)[0].segments[0], empty)[:segments]
    return [replace(one, segments=parts, text="", finish_reason="abort", reward=None) for one in group(number)]


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("algorithm", [GRPO.resolved(), DAPO])
def test_a_group_that_the_model_wrote_nothing_of_is_refused(make, algorithm, segments):
    source = make(algorithm=algorithm)
    half = [without_tokens(3)[0], *group(3, rewards=(1.0, 0.0, 1.0))[1:]]
    source.pool.put([without_tokens(0, segments), group(1), without_tokens(2, segments), half, group(4)])
    assert collect(source, 1) == [["0:1", "0:3"], ["0:0", "0:2"]]
    assert source.metrics()["pool/staleness_max"] == 0
    assert collect(make(done=0, algorithm=algorithm), 1) == [["0:1", "0:3"], ["0:0", "0:2"]], "also after a restart"


def test_groups_of_one_prompt_are_groups_of_their_own(make):
    source = make()
    source.pool.put([group(1), group(1, salt=1), group(1, salt=2)])
    accepted, _ = source.collect(3, 1, Stopwatch())
    ids = [{item.prompt_id for item in some} for some in accepted]
    assert ids == [{"0:1"}, {"0:1#2"}, {"0:1#3"}]


def test_metrics_count_what_became_of_groups(make):
    source = make(max_uses=2)
    run = source.reader
    source.pool.put([group(1)])
    source.pool.put([group(2, version=2), group(1)], run)
    collect(source, 4)
    assert source.metrics() == {
        "pool/groups": 2, "pool/duplicates": 1, "pool/evicted": 0, "pool/expired": 0, "pool/stale": 0,
        "pool/returned": 0, "pool/staleness_mean": 2, "pool/staleness_max": 3, "pool/reused": 0,
    }  # fmt: skip
    source.pool.finish(run, 4)
    collect(source, 5, count=1)
    assert source.metrics()["pool/reused"] == 1 and not math.isnan(source.metrics()["pool/staleness_mean"])


def test_groups_that_another_trainer_was_given_are_not_trained_on_unnoticed(make, tmp_path):
    clock = Clock()
    source = make(clock=clock, lease_s=10)
    source.pool.put([group(n) for n in range(4)])
    collect(source, 1)
    clock.now += 11
    assert len(source.pool.claim("other", 1, 4, version=0)) == 4
    save(tmp_path, 1)
    with pytest.raises(LeaseLost, match=r"pool\.lease_s=10"):
        source.collect(2, 2, Stopwatch())
