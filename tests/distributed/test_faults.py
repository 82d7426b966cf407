"""Faults at random points: one of each kind of `benchmarks/faults.py`, which makes many."""

from __future__ import annotations

import random
import signal

import pytest

from benchmarks import faults

pytest.importorskip("ray", reason="Ray is not installed; `make distributed` has it")


@pytest.fixture
def folder(tmp_path):
    faults.prepare(tmp_path)
    return tmp_path


def test_a_rollout_actor_is_killed(folder):
    whole, seconds = faults.undisturbed(folder)
    report = faults.kill(folder, "kill", whole, seconds, random.Random())
    assert report["good"], report


@pytest.mark.parametrize("role", faults.FROZEN)
def test_one_is_frozen(folder, role):
    report = faults.freeze(folder, "freeze", role, random.Random())
    assert report["good"], report


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_run_is_stopped(folder, number):
    report = faults.stop(folder, "stop", number, random.Random())
    assert report["good"], report
