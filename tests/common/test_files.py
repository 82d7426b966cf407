"""Folders that a process needs for a time, and those that killed processes leave."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from atomrl.common.files import TemporaryFolder

HOLDER = """
import time
from atomrl.common.files import TemporaryFolder
folder = TemporaryFolder("test")
print(folder.path, flush=True)
time.sleep(100)
"""


@pytest.fixture
def parent(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def of_long_ago(folder: Path) -> None:
    os.utime(folder, (time.time() - 600,) * 2)


def test_temporary_files_of_killed_processes_are_removed(parent):
    holders = [subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    left, just_left, used = (Path(holder.stdout.readline().strip()) for holder in holders)
    for holder in holders[:2]:
        holder.kill()
        holder.wait()
    other = parent / "atomrl-other-1-a"
    other.mkdir()
    (left / "within").mkdir()
    for folder in (left, used, other):
        of_long_ago(folder)
    os.utime(just_left)
    new = TemporaryFolder("test")
    assert sorted(parent.iterdir()) == sorted([just_left, used, other, new.path])
    holders[2].kill()
    holders[2].wait()
    os.utime(just_left)
    again = TemporaryFolder("test")
    assert sorted(parent.iterdir()) == sorted([just_left, other, new.path, again.path])
    new.close()
    again.close()
    assert sorted(parent.iterdir()) == sorted([just_left, other])


def test_it_can_be_closed_again_and_goes_with_its_process(parent):
    folder = TemporaryFolder("test")
    folder.close()
    folder.close()
    code = "from atomrl.common.files import TemporaryFolder; folder = TemporaryFolder('test')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not list(parent.iterdir())
