"""Corpora, and the service as a user starts it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WORDS = [f"{start}{middle}{end}" for start in "bdfgklm" for middle in "aeiou" for end in "nrtx"]


def rows(count: int, seed: int = 0) -> list[dict]:
    """Documents of few words, so that most share some."""
    rng = random.Random(seed)
    return [
        {"id": str(number), "contents": f'"T{number}"\n{" ".join(rng.choices(WORDS, k=rng.randint(1, 30)))}'}
        for number in range(count)
    ]


def write(path: Path, documents: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in documents), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path) -> Path:
    return write(tmp_path / "corpus.jsonl", rows(500))


def start(*arguments: str) -> subprocess.Popen:
    """`atomrl data serve`, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "atomrl.cli.main", "data", "serve", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def address(process: subprocess.Popen) -> str:
    """Where it listens, once it says so."""
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if match := re.search(r"listening at (http://\S+)/retrieve", line):
            return match[1]
    raise AssertionError("".join(said))


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """The address of a service."""
    process = start(*arguments, "--port", "0")
    try:
        yield address(process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.stdout.close()


def post(url: str, body, path: str = "/retrieve", headers=()) -> tuple[int, dict]:
    """Status and answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json", **dict(headers)})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def get(url: str, path: str) -> dict:
    with urllib.request.urlopen(url + path, timeout=120) as response:
        return json.loads(response.read())


def until(condition, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
