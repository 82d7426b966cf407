"""How many threads compute: chosen by simulated load and times, and the same numbers with any number of them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

from atomrl.common import threads
from atomrl.common.threads import UPDATE_S, Chooser, Load, adaptive_threads, single_thread, unit
from atomrl.models.kernels import RMSNormFunction

SMALL = {True: {1: 0.0136, 2: 0.038}, False: {1: 0.0125, 2: 0.01}}
"""Seconds of a unit beside others or alone, by threads: of many small regions."""
LARGE = {True: {1: 1.0, 2: 0.8}, False: {1: 1.0, 2: 0.55}}


def simulated(seconds, others_at, until, chooser=None):
    """Units done and the threads of each, of a machine of two cores."""
    chooser, now, looked, counts = chooser or Chooser(2, 2), 0.0, -UPDATE_S, []
    while now < until:
        if now - looked >= UPDATE_S:
            looked = now
            chooser.update(others_at(now), now)
        counts.append(chooser.count())
        took = seconds(others_at(now), counts[-1])
        now += took
        chooser.done(1.0, took, now)
    return counts


@pytest.mark.parametrize("others", [0.0, 0.1, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("kind", [SMALL, LARGE])
def test_a_steady_machine_costs_at_most_five_percent(kind, others):
    done = len(simulated(lambda load, count: kind[load > 0.25][count], lambda now: others, 120.0))
    assert done * min(kind[others > 0.25].values()) > 0.95 * 120.0


@pytest.mark.parametrize("kind", [SMALL, LARGE])
def test_load_that_comes_and_goes(kind):
    def others(now):
        return 1.0 if 60 <= now < 120 else 0.05

    counts = simulated(lambda load, count: kind[load > 0.25][count], others, 180.0)
    best = 120 / min(kind[False].values()) + 60 / min(kind[True].values())
    assert len(counts) > 0.95 * best
    assert counts[:20] == [2] * 20 and counts[-20:] == [2] * 20


def test_load_that_flaps_costs_no_more_than_the_better_number():
    def others(now):
        return 1.0 if now % 2 < 1 else 0.0

    def seconds(load, count):
        return SMALL[load > 0.25][count]

    done = len(simulated(seconds, others, 120.0))
    assert done > 0.95 * max(60 / SMALL[False][count] + 60 / SMALL[True][count] for count in (1, 2))


def test_expensive_trials_are_rare():
    counts = simulated(lambda load, count: {1: 1.0, 2: 30.0}[count], lambda now: 1.0 + (now // 40) % 2, 4000.0)
    assert counts.count(2) <= 4


def test_a_trial_forgives_work_that_grows_dearer():
    """Decoding with ever fewer rows: what a row takes grows while the trial goes on."""
    chooser = Chooser(2, 2)
    chooser.update(1.0, 0.0)
    now = 0.0
    for step in range(60):
        took = (1 + step / 20) * {1: 0.1, 2: 0.08}[chooser.count()]
        now += took
        chooser.done(1.0, took, now)
    assert chooser.count() == 2


def test_many_cores_leave_as_many_as_others_take():
    chooser = Chooser(16, 16)
    chooser.update(5.1, 0.0)
    assert chooser.count() == 11
    chooser = Chooser(4, 16)  # more cores than threads: others take none of ours
    chooser.update(5.1, 0.0)
    assert chooser.count() == 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/stat")
def test_a_busy_process_is_seen():
    load = Load()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        end = time.monotonic() + 60
        time.sleep(0.4)
        while load.others() <= 0.25:  # it has not begun yet
            assert time.monotonic() < end
            time.sleep(0.4)
    finally:
        busy.kill()
        busy.wait()


@pytest.fixture
def two_threads(monkeypatch):
    for name in threads.FIXED_BY:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Others:
    """A load that is said."""

    cpus = frozenset({0, 1})

    def others(self):
        return 1.5


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/stat")
def test_units_follow_the_load_and_all_threads_return(two_threads, monkeypatch):
    monkeypatch.setattr(threads, "Load", Others)
    monkeypatch.setattr(threads, "UPDATE_S", 0.0)
    with adaptive_threads():
        with unit("learning", 1.0):
            assert torch.get_num_threads() == 1
        counts = []
        other = threading.Thread(target=lambda: [counts.append(threads.max_threads()), _unit(counts)])
        other.start()
        other.join()
        assert counts == [2, 1]  # a thread that is new has what torch was set to, and keeps it
    assert torch.get_num_threads() == 2


def _unit(counts):
    with unit("drawing", 1.0):
        counts.append(torch.get_num_threads())


@pytest.mark.parametrize("name", threads.FIXED_BY)
def test_thread_numbers_of_the_user_stay(two_threads, monkeypatch, name):
    monkeypatch.setattr(threads, "Load", Others)
    monkeypatch.setattr(threads, "UPDATE_S", 0.0)
    monkeypatch.setenv(name, "2")
    with adaptive_threads(), unit("learning", 1.0):
        assert torch.get_num_threads() == 2


def norm_gradients():
    torch.manual_seed(0)
    x, weight = torch.randn(300, 256, requires_grad=True), torch.randn(256, requires_grad=True)
    y = RMSNormFunction.apply(x, weight, 1e-6)
    return torch.autograd.grad(y, (x, weight), torch.randn(300, 256))


def products():
    """Matrices of shapes for which MKL would split sums over threads."""
    torch.manual_seed(0)
    pairs = [(1, 1024, 128), (16, 256, 100), (512, 768, 256), (64, 1536, 512), (100, 2048, 97)]
    return [torch.randn(m, k) @ torch.randn(k, n) for m, k, n in pairs]


def advantages():
    with single_thread():
        torch.manual_seed(0)
        return [torch.randn(512, 100).sum()]


@pytest.mark.parametrize("compute", [norm_gradients, products, advantages])
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="another library multiplies")
def test_the_numbers_do_not_depend_on_the_number_of_threads(compute):
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(compute())
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))
