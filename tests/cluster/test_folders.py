"""The folders of Ray's sessions."""

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from atomrl.cluster import ray_cluster
from atomrl.cluster.ray_cluster import RayCluster


def made(monkeypatch, parent):
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(parent))
    cluster = RayCluster.__new__(RayCluster)
    cluster.lock = ExitStack()
    return cluster, Path(cluster._make_folder())


def test_what_killed_runs_have_left_is_removed_and_nothing_else(monkeypatch, tmp_path):
    left, new, other = (tmp_path / name for name in (f"{ray_cluster._FOLDER}1-a", f"{ray_cluster._FOLDER}2-b", "other"))
    for folder in (left, new, other):
        (folder / "session").mkdir(parents=True)
    running, folder = made(monkeypatch, tmp_path)
    long_ago = time.time() - 600
    for path in (left, folder, other):
        os.utime(path, (long_ago, long_ago))
    again, second = made(monkeypatch, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([new, folder, other, second])
    running.lock.close()
    made(monkeypatch, tmp_path)
    assert not folder.exists() and second.exists()
    again.lock.close()
