"""One process: what is written, claimed, finished, given back, left out and thrown away."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from filelock import FileLock

from atomrl.pool import store as sql
from atomrl.pool import store as store
from atomrl.pool.errors import LeaseLost, PoolError
from atomrl.pool.store import RolloutPool
from tests.pool.made import Clock, follow_connections, group, settings


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make(tmp_path, clock):
    opened = []

    def make(**changes):
        opened.append(RolloutPool(tmp_path / "pools" / "p.sqlite", settings(**changes), clock))
        return opened[-1]

    yield make
    for pool in opened:
        pool.close()


def numbers(held):
    return [int(item.group[0].problem.problem_id) for item in held]


def test_groups_are_claimed_once_and_gone_when_finished(make):
    pool, other = make(), make()
    assert pool.put([group(n) for n in range(5)]) == 5
    first, second = pool.claim("a", 1, 3, version=0), other.claim("b", 1, 3, version=0)
    assert numbers(first) == [0, 1, 2] and numbers(second) == [3, 4] and not pool.claim("a", 1, 1, version=0)
    assert [item.group for item in first] == [group(n) for n in range(3)]
    assert pool.finish("a", 1) == 3 and pool.finish("a", 1) == 0
    assert other.stats()["groups"] == other.stats()["held"] == 2 and other.stats()["finished"] == 3


def test_a_reader_that_starts_again_finds_its_groups_in_their_steps(make):
    pool = make()
    pool.put([group(n) for n in range(6)])
    for step in (1, 2, 3):
        pool.claim("a", step, 2, version=0)
    pool.finish("a", 1)
    again = make()
    assert [numbers(again.held("a", step)) for step in (1, 2, 3, 4)] == [[], [2, 3], [4, 5], []]


def test_further_claims_of_a_step_come_after_those_it_has(make):
    pool = make()
    pool.put([group(n) for n in range(4)])
    pool.claim("a", 1, 1, version=0)
    pool.claim("a", 1, 2, version=0)
    assert numbers(pool.held("a", 1)) == [0, 1, 2]


def test_a_lease_gives_the_groups_of_a_dead_reader_to_another(make, clock):
    pool = make(lease_s=10)
    pool.put([group(n) for n in range(2)])
    pool.claim("a", 1, 2, version=0)
    clock.now += 9.9
    assert not pool.claim("b", 1, 2, version=0)
    clock.now += 0.2
    assert numbers(pool.claim("b", 1, 1, version=0)) == [0]
    assert numbers(pool.held("a", 1)) == [1], "what nobody wanted is still the first one's"
    with pytest.raises(LeaseLost, match="1 of the 2 groups"):
        pool.finish("a", 1, expected=2)
    assert pool.stats()["returned"] == 1 and pool.finish("b", 1, expected=1) == 1 and pool.stats()["groups"] == 0


def test_a_reader_that_is_heard_of_keeps_its_groups(make, clock):
    pool = make(lease_s=10)
    pool.put([group(n) for n in range(2)])
    pool.claim("a", 1, 1, version=0)
    for step in range(2, 5):
        clock.now += 8
        pool.claim("a", step, 0, version=0)
        assert len(pool.claim("b", step, 5, version=0)) == (step == 2)
    assert pool.finish("a", 1, expected=1) == 1


def test_equal_groups_are_left_out_while_the_first_is_there(make):
    pool = make()
    assert pool.put([group(1), group(1, version=3), group(2)]) == 2
    assert pool.put([group(1)]) == 0 and pool.stats()["duplicates"] == 2
    pool.claim("a", 1, 9, version=0)
    assert pool.put([group(1)]) == 0, "a group that is held is there"
    pool.finish("a", 1)
    assert pool.put([group(1)]) == 1, "drawn again after it was trained on"


def test_groups_live_for_their_time(make, clock):
    pool = make(ttl_s=100, lease_s=50)
    pool.put([group(1)])
    clock.now += 60
    pool.put([group(2)])
    pool.claim("a", 1, 1, version=0)
    clock.now += 45
    pool.put([group(3)])
    assert pool.stats()["groups"] == 3, "what is held does not expire"
    clock.now += 6
    assert numbers(pool.claim("b", 1, 9, version=0)) == [2, 3] and pool.stats()["expired"] == 1


def test_the_oldest_version_goes_first_when_there_is_no_room(make):
    pool = make(capacity=3)
    pool.put([group(1, version=2), group(2, version=1), group(3, version=1)])
    pool.claim("a", 1, 1, version=5)  # group 2
    pool.put([group(4, version=3), group(5, version=4)])
    assert pool.stats()["groups"] == 4 and pool.stats()["evicted"] == 1, "what readers hold stays, and does not count"
    assert numbers(pool.claim("b", 1, 9, version=5)) == [1, 4, 5]
    assert pool.put([group(n, version=5) for n in range(6, 10)]) == 4
    assert numbers(pool.claim("c", 1, 9, version=5)) == [7, 8, 9] and pool.stats()["evicted"] == 2


def test_filters_of_readers(make):
    made = [group(1, tokens=2), group(2, rewards=(1.0, 1.0)), group(3, rewards=(1.0, None)), group(4)]
    make().put(made)
    short = make(min_response_tokens=3)
    assert short.why_not("a", 1, 0) == {"with a completion under pool.min_response_tokens": 1}
    assert numbers(short.claim("a", 1, 9, version=0)) == [2, 3, 4]
    assert numbers(make().claim("b", 1, 9, version=0)) == [1]


def test_versions_bound_what_is_taken(make):
    pool = make(max_staleness=2)
    run = pool.start_run("r", resumed=False)
    pool.put([group(n, version=n) for n in range(1, 8)], run)
    assert numbers(pool.claim(run, 6, 9, version=5)) == [3, 4, 5]
    assert pool.stats()["stale"] == 2, "what this run will never take again is gone"
    assert pool.why_not(run, 6, 5) == {"of newer weights": 2, "held or used up": 3}
    assert numbers(pool.claim(run, 7, 9, version=6)) == [6]


def test_the_oldest_token_counts_and_the_newest(make):
    pool = make(max_staleness=1)
    one = group(1, version=3)[0]
    parts = (*one.segments, replace(one.segments[1], policy_version=5))
    pool.put([[replace(one, segments=parts)]])
    taken = [len(pool.claim("a", version, 1, version)) for version in (3, 4, 5, 6)]
    assert taken == [0, 0, 0, 0], "version 4 lacks the newest token, version 5 is two ahead of the oldest"
    assert len(make(max_staleness=2).claim("a", 9, 1, version=5)) == 1


def test_a_group_is_trained_as_often_as_is_allowed(make):
    pool = make(max_uses=2)
    pool.put([group(1), group(2)])
    assert numbers(pool.claim("a", 1, 1, 0)) == [1]
    assert numbers(pool.claim("a", 1, 9, 0)) == [2], "no group twice in a step"
    pool.finish("a", 1)
    again = pool.claim("b", 1, 9, 0)
    assert numbers(again) == [1, 2] and [item.uses for item in again] == [1, 1]
    assert not pool.claim("a", 2, 9, 0)
    pool.finish("b", 1)
    assert pool.stats()["groups"] == 0 and pool.stats()["finished"] == 4


def test_two_open_steps_count_as_two_uses(make):
    pool = make(max_uses=2)
    pool.put([group(1)])
    assert [len(pool.claim("a", step, 1, 0)) for step in (1, 2, 3)] == [1, 1, 0]
    assert pool.finish("a", 2) == 2 and pool.stats()["groups"] == 0


def test_a_run_that_starts_over_has_nothing_of_its_predecessor(make):
    pool = make()
    first = pool.start_run("r", resumed=False)
    pool.put([group(1)])
    pool.put([group(2, version=1)], first)
    pool.claim(first, 1, 1, version=1)
    assert pool.start_run("r", resumed=True) == first
    second = pool.start_run("r", resumed=False)
    assert second != first and not pool.held(first, 1)
    assert numbers(pool.claim(second, 1, 9, version=9)) == [1], "of the model that both start from"
    pool.put([group(3, version=1)], first)  # by a producer that has not heard of it
    assert not pool.claim(second, 2, 9, version=9)
    assert pool.why_not(second, 2, 9)["of another run's weights"] == 1


def test_runs_do_not_take_what_others_drew(make):
    pool = make()
    one, other = pool.start_run("one", resumed=False), pool.start_run("other", resumed=False)
    pool.put([group(1, version=1)], one)
    assert not pool.claim(other, 1, 9, version=5) and len(pool.claim(one, 1, 9, version=5)) == 1


def test_producers_draw_different_prompts(make):
    pool, other = make(), make()
    for user, count in ((pool, 3), (other, 2), (pool, 1)):
        with user.shared_state() as state:
            state["taken"] = [*state.get("taken", []), count]
    with other.shared_state() as state:
        assert state == {"taken": [3, 2, 1]}


@pytest.mark.parametrize("anew", ["run", "identity"])
def test_what_producers_learned_is_kept_by_a_resumed_run_and_not_by_a_new_one(make, anew):
    pool = make()
    for resumed in (False, True):
        pool.check_identity({"model": "a"})
        pool.start_run("r", resumed)
        with pool.shared_state() as state:
            state["seen"] = state.get("seen", 0) + 1
    if anew == "run":
        pool.start_run("r", resumed=False)
    else:
        pool.check_identity({"model": "b"}, adopt=False)
        with pool.shared_state() as state:
            assert state == {"seen": 2}
        pool.check_identity({"model": "b"})
    with make().shared_state() as state:
        assert state == {}


def test_a_pool_of_another_tokenizer_is_refused(make):
    mine = {"tokenizer": "a", "reward": "x"}
    pool = make()
    pool.check_identity(mine)
    pool.put([group(1)])
    make().check_identity(mine)
    for adopt in (True, False):
        with pytest.raises(PoolError, match="atomrl pool clear"):
            make().check_identity({**mine, "tokenizer": "b"}, adopt)
    pool.clear()
    other = make()
    other.check_identity({**mine, "tokenizer": "b"})
    assert other.identity()["tokenizer"] == "b"
    with pytest.raises(PoolError, match="another config"):
        pool.put([group(2)])


def test_groups_for_export_and_clear(make):
    pool = make()
    pool.put([group(n) for n in range(130)])
    pool.claim("a", 1, 1, version=0)
    groups = list(pool.groups())
    assert [made for _, made in groups] == [group(n) for n in range(130)] and groups[0][0]["uses"] == 0
    assert pool.clear() == 129 and pool.stats()["held"] == 1 and pool.stats()["cleared"] == 129


def test_a_failure_in_the_middle_leaves_nothing(make, monkeypatch):
    connections = follow_connections(monkeypatch)
    pool, inserted = make(), []

    def fail_after_the_first(statement):
        if statement.startswith("INSERT INTO groups"):
            inserted.append(statement)
            if len(inserted) == 2:
                raise ZeroDivisionError

    connections[0].before = fail_after_the_first
    with pytest.raises(ZeroDivisionError):
        pool.put([group(1), group(2)])
    assert pool.stats()["groups"] == 0 and pool.stats()["written"] == 0
    assert pool.put([group(1)]) == 1


def test_files_that_are_no_pool_are_named(tmp_path, make):
    (tmp_path / "text.sqlite").write_text("x" * 5000)
    with pytest.raises(PoolError, match=r"text\.sqlite.*corrupted"):
        RolloutPool(tmp_path / "text.sqlite", settings())
    with sqlite3.connect(tmp_path / "other.sqlite") as db:
        db.execute("CREATE TABLE groups (x)")
    with pytest.raises(PoolError, match=r"other\.sqlite.*not a rollout pool"):
        RolloutPool(tmp_path / "other.sqlite", settings())
    make()
    with sqlite3.connect(tmp_path / "pools" / "p.sqlite") as db:
        db.execute(f"PRAGMA user_version = {sql.SCHEMA_VERSION + 1}")
    with pytest.raises(PoolError, match=f"format {sql.SCHEMA_VERSION + 1}"):
        make()
    with pytest.raises(PoolError, match="folder"):
        RolloutPool(tmp_path / "text.sqlite" / "p.sqlite", settings())


def test_bytes_that_the_disk_has_changed_are_found(make, tmp_path):
    pool = make()
    pool.put([group(1)])
    with sqlite3.connect(tmp_path / "pools" / "p.sqlite") as db:
        (payload,) = db.execute("SELECT payload FROM groups").fetchone()
        db.execute("UPDATE groups SET payload = ?", (payload[:-1] + bytes([payload[-1] ^ 1]),))
    with pytest.raises(PoolError, match="group 1 "):
        pool.claim("a", 1, 1, version=0)


def test_a_full_disk_says_so_and_leaves_what_was_there(make, monkeypatch):
    """SQLite's own limit on pages stands for the disk."""
    connections = follow_connections(monkeypatch)
    pool = make()
    pool.put([group(1)])
    (pages,) = connections[0].execute("PRAGMA page_count").fetchone()
    connections[0].execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(PoolError, match="full: free space"):
        pool.put([group(n, tokens=500) for n in range(2, 50)])
    assert pool.stats()["groups"] == 1 and pool.stats()["written"] == 1
    connections[0].execute("PRAGMA max_page_count = 100000")
    assert pool.put([group(2)]) == 1


def test_a_lock_that_is_never_released_is_named(make, monkeypatch):
    monkeypatch.setattr(store, "BUSY_S", 0.1)
    pool = make()
    with FileLock(f"{pool.path}.lock"), pytest.raises(PoolError, match="locked by another process"):
        pool.put([group(1)])
    assert pool.put([group(1)]) == 1
    with closing(sqlite3.connect(pool.path, isolation_level=None)) as tool:  # it knows no lock but SQLite's
        tool.execute("BEGIN IMMEDIATE")
        with pytest.raises(PoolError, match="locked by another process"):
            pool.put([group(2)])
    assert pool.put([group(2)]) == 1


def test_statistics_count_groups_tokens_versions_and_ages(make, clock):
    pool = make()
    pool.put([group(1, version=2), group(2, rewards=(1.0, 1.0))])
    clock.now += 5
    stats = json.loads(json.dumps(pool.stats()))
    assert stats["trajectories"] == 4 and stats["tokens"] == 22 and stats["mixed"] == 1 and stats["reward"] == 0.75
    assert stats["oldest_version"] == 0 and stats["newest_version"] == 2 and stats["oldest_age_s"] == 5
    assert stats["groups_by_version"] == {"0": 1, "2": 1} and stats["written"] == 2
