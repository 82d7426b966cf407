"""Workers that are stopped, killed, crowded or misused: the trainer never waits for one."""

import os
import signal
import time
from contextlib import closing

import pytest

from atomrl.config import EnvironmentConfig
from atomrl.environments.playing import EpisodeError
from atomrl.environments.pool import EnvironmentPool
from atomrl.types import Sample


def sample(name="s0", **columns):
    return Sample(sample_id=name, prompt=name, ground_truth=None, columns=columns)


def make_pool(function, **settings):
    settings = {"workers": 1, **settings}
    return closing(EnvironmentPool(EnvironmentConfig(function=f"tests.environments.hard.{function}", **settings)))


def heard(pool, count, limit_s=20.0):
    """The next answers of as many episodes."""
    found, end = {}, time.monotonic() + limit_s
    while len(found) < count and time.monotonic() < end:
        found |= dict(pool.answers(0.2))
    assert len(found) >= count
    return found


def test_a_worker_that_is_stopped_keeps_nobody_waiting():
    with make_pool("patient", timeout_s=2.0) as pool:
        keys = [pool.start(sample(), 0) for _ in range(20)]
        heard(pool, 20)
        os.kill(pool.workers[0].process.pid, signal.SIGSTOP)
        began = time.monotonic()
        for key in keys:
            pool.say(key, "x" * 100_000)
        assert time.monotonic() - began < 1
        found = heard(pool, 20)
        assert {answer.reply.text for answer in found.values()} == {"100000"}, "played again by another worker"
