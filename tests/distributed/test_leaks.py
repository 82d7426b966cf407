"""A process that starts and ends one distributed run after another keeps nothing of them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from atomrl.cli.main import main
from tests.distributed.test_placement import APART, descendants
from tests.distributed.test_replicas import config
from tests.tiny import make_tiny_model

pytest.importorskip("ray", reason="Ray is not installed; `make distributed` has it")
CYCLES = int(os.environ.get("CYCLES", 4))


def held() -> dict[str, set[str]]:
    """What a run could leave behind."""
    own = f"atomrl-ray-{os.getpid()}-"
    return {
        "processes": {str(pid) for pid in descendants(os.getpid())},
        "threads": {thread.name for thread in threading.enumerate()},
        "sockets and files": {
            f"{number} {place}" for number in os.listdir("/proc/self/fd") if (place := target(number)) is not None
        },
        "folders": {path.name for path in Path("/tmp").glob(f"{own}*")},
        "shared memory": {
            line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line
        },
    }


def target(number: str) -> str | None:
    """What a descriptor is of; None where it is gone, as the one that lists them."""
    try:
        return os.readlink(f"/proc/self/fd/{number}").partition(":")[0]
    except FileNotFoundError:
        return None


def test_cycles_leave_nothing(tmp_path):
    model = make_tiny_model(tmp_path / "model", scale=0.2)
    counts = []
    for cycle in range(CYCLES):
        assert main(["train", *config(model, f"run{cycle}"), *APART, "train.steps=1"]) == 0
        found = held()
        assert not found["folders"] and not found["shared memory"], found
        assert found["processes"] == {str(os.getpid())}, found
        counts.append({name: len(things) for name, things in found.items()})
    # The first loads what stays loaded.
    assert counts[1] == counts[-1], (counts, found)
