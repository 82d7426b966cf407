"""Two runs of one machine at the same time, each with a Ray of its own, or both in one that is there."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from atomrl.cli.main import main
from benchmarks.faults import TrainingRun, prepare

pytest.importorskip("ray", reason="Ray is not installed; `make distributed` has it")

from tests.distributed.test_placement import descendants, listening

STEPS = "train.steps=100"
ACTORS = 4
"""Processes of a run: two engines, trainer and reference."""


@pytest.fixture
def address():
    """A cluster that is there."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


def alone(folder: Path) -> bytes:
    """The weights of the run in one process."""
    config = yaml.safe_load((folder / "c.yaml").read_text()) | {"cluster": None}
    (folder / "alone.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", str(folder / "alone.yaml"), f"output_dir={folder / 'alone'}", STEPS]) == 0
    return (folder / "alone" / "run" / "model" / "model.safetensors").read_bytes()


def actors(root: int) -> set[int]:
    """Processes beneath one that are actors of ours."""
    names = {pid: Path(f"/proc/{pid}/cmdline") for pid in descendants(root)}
    return {pid for pid, name in names.items() if name.exists() and name.read_text().startswith(("ray::r", "ray::t"))}


def killed_beside_another(first: TrainingRun, second: TrainingRun, root: int) -> None:
    """Kill the first in the middle: its actors go at once, and the other goes on to its end."""
    both = actors(root)
    assert len(both) == 2 * ACTORS
    before = second.steps
    os.kill(first.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while len(actors(root)) > ACTORS and time.monotonic() < deadline:
        time.sleep(0.05)
    left = actors(root)
    assert len(left) == ACTORS and left < both
    assert second.process.wait(600) == 0, second.log.read_text()[-2000:]
    assert second.steps > before + 1, "it was over before the other was killed"
    assert "died" not in second.log.read_text()


def test_each_with_a_ray_of_its_own(tmp_path):
    prepare(tmp_path)
    first = TrainingRun(tmp_path, "first", "train.steps=100000")  # it is killed; until then it must not be over
    second = TrainingRun(tmp_path, "second", STEPS)
    try:
        first.until_step(2)
        second.until_step(2)
        own = [set(run.processes()) for run in (first, second)]
        ports = [set(listening(pids)) for pids in own]
        folders = [list(Path("/tmp").glob(f"atomrl-run-{run.process.pid}-*")) for run in (first, second)]
        assert not own[0] & own[1] and not ports[0] & ports[1]
        assert all(len(own) > 4 for own in ports) and [len(own) for own in folders] == [1, 1]
        killed_beside_another(first, second, os.getpid())
        assert not folders[1][0].exists()
        assert second.weights() == alone(tmp_path)
    finally:
        first.end()
        second.end()


def test_both_in_one_that_is_there(tmp_path, address):
    """The actors of one that is killed make room for a third run."""
    prepare(tmp_path)
    given = [f"cluster.address={address}", STEPS, "cluster.resources.trainer.num_cpus=0.7"]
    first, second = (TrainingRun(tmp_path, name, *given) for name in ("first", "second"))
    try:
        first.until_step(2)
        second.until_step(2)
        killed_beside_another(first, second, os.getpid())
        assert second.weights() == alone(tmp_path)
        assert not actors(os.getpid())
        third = TrainingRun(tmp_path, "first", *given, "--resume")
        assert third.process.wait(600) == 0, third.log.read_text()[-2000:]
        assert third.weights() == second.weights()
    finally:
        first.end()
        second.end()
