"""Engines that are opened and closed again and again leave nothing behind."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tiny import make_tiny_model

TIMES = 4
RAYS = 2
"""Sockets that Ray leaves open in this process with each `ray.init` and `ray.shutdown`, also with nothing of ours."""
ROOT = Path(__file__).parents[2]
IN_ACTORS = ("replicas", "collective", "vllm-actor")
NEEDS = {"vllm": "vllm", "vllm-server": "vllm", "vllm-actor": "vllm", "sglang": "sglang"}
NEEDS |= {"replicas": "ray", "collective": "ray"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("leaks") / "model", scale=0.2, head_dim=32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["native", *NEEDS])
def test_closing_leaves_nothing_behind(kind, model, tmp_path, request):
    """No process, thread, open file, folder or shared memory: after each time as after the second, since the first
    loads what is loaded once."""
    if (needs := NEEDS.get(kind)) and find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    if needs == "vllm":
        request.getfixturevalue("vllm")
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.distributed.open_and_close", kind, str(model), str(TIMES)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    snapshots = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("THERE ")]
    assert len(snapshots) == TIMES
    once = {str(tmp_path / f"torchinductor_{getpass.getuser()}")}  # of torch.compile, for all later processes
    assert not snapshots[0]["processes"] and not {*snapshots[0]["folders"]} - once, snapshots[0]
    for times, later in enumerate(snapshots[2:], start=1):
        more = {what: Counter(now) - Counter(snapshots[1][what]) for what, now in later.items()}
        if kind in IN_ACTORS and more["files"]["socket"] <= RAYS * times:
            del more["files"]["socket"]
        assert {what: list(now) for what, now in more.items() if now} == {}
    assert not {*map(str, tmp_path.iterdir())} - once, "left when the process ended"
