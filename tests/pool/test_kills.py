"""SIGKILL before every single statement of a producer and of a reader; and many processes at once."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from atomrl.pool.store import RolloutPool
from tests.pool.made import follow_connections, group, settings

ROOT = Path(__file__).parents[2]
GROUPS = [group(n, tokens=2) for n in range(2)]


def killed(path, number, work):
    """Return True if `work(pool)` was killed before its statement `number`, False if it has fewer statements."""
    child = os.fork()
    if not child:
        try:
            connections, left = follow_connections(pytest.MonkeyPatch()), [number]
            pool = RolloutPool(path, settings())

            def die_in_time(statement):
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

            connections[0].before = die_in_time
            work(pool)
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def whole(path):
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert not db.execute("PRAGMA foreign_key_check").fetchall()


def test_a_producer_that_is_killed_has_written_all_or_nothing(tmp_path):
    outcomes, number = set(), 0
    while killed(path := tmp_path / f"{number}.sqlite", number, lambda pool: pool.put(GROUPS)):
        whole(path)
        pool = RolloutPool(path, settings())
        there = pool.stats()["groups"]
        assert there in (0, 2) and pool.stats()["written"] == there
        outcomes.add(there)
        assert pool.put(GROUPS) == 2 - there, "it does its work again"
        assert [item.group for item in pool.claim("a", 1, 9, version=0)] == GROUPS
        pool.close()
        number += 1
    assert outcomes == {0} and number >= 7, "it is written at the very last statement"


@pytest.mark.slow
def test_a_reader_that_is_killed_and_started_again_trains_on_every_group_once(tmp_path):
    """It counts a step as trained when it has `saved` it, as a run with its checkpoint."""

    def read(pool, saved):
        done = int(saved.read_text()) if saved.exists() else 0
        pool.finish("a", done)
        for step in range(done + 1, 3):
            held = pool.held("a", step) or pool.claim("a", step, 1, version=0)
            text = json.dumps([item.group[0].prompt_id for item in held])
            with saved.with_suffix(".log").open("a") as file:
                file.write(f"{step} {text}\n")
            aside = saved.with_suffix(".aside")
            aside.write_text(str(step))
            aside.replace(saved)
            pool.finish("a", step, expected=len(held))

    number = 0
    while True:
        path, saved = tmp_path / f"{number}.sqlite", tmp_path / f"{number}.saved"
        pool = RolloutPool(path, settings())
        pool.put(GROUPS)
        pool.close()
        died = killed(path, number, lambda pool, saved=saved: read(pool, saved))
        whole(path)
        assert not killed(path, 10**9, lambda pool, saved=saved: read(pool, saved))
        lines = (line.split(" ", 1) for line in saved.with_suffix(".log").read_text().splitlines())
        by_step = {}
        for step, text in lines:
            assert by_step.setdefault(step, text) == text, "the same groups for the same step"
        assert sorted(json.loads(text)[0] for text in by_step.values()) == [f"0:{n}" for n in range(2)]
        pool = RolloutPool(path, settings())
        assert pool.stats()["groups"] == 0 and pool.stats()["finished"] == 2
        pool.close()
        if not died:
            break
        number += 1
    assert number > 20


def test_processes_that_make_the_file_at_once(tmp_path):
    children = []
    for writer in range(6):
        if not (child := os.fork()):
            try:
                pool = RolloutPool(tmp_path / "p.sqlite", settings())
                os._exit(pool.put([group(n, salt=writer) for n in range(5)]) != 5)
            except BaseException:
                os._exit(2)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
    pool = RolloutPool(tmp_path / "p.sqlite", settings())
    assert pool.stats()["groups"] == 30
    pool.close()


@pytest.mark.slow
def test_writers_and_readers_under_random_kills(tmp_path):
    """The short form of `benchmarks/pool.py`."""
    out = tmp_path / "results.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "pool.py"), "--seconds", "4", "--no-engine", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    stats = json.loads(out.read_text())["pool"]
    assert stats["lost"] == stats["doubled"] == stats["torn"] == stats["half_written"] == 0
    assert stats["kills"] > 3 and stats["read"] > 20
