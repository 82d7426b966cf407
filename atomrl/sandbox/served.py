"""Tests of a solution's functions: they run beyond its reach, in a box of their own, and call it in its box."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from atomrl.sandbox import inside
from atomrl.sandbox.box import Box, Limits, Sandbox, adopt, readable, start
from atomrl.sandbox.running import SandboxError, check

_MAX_VERDICTS_BYTES = 1 << 20


class Verdict(NamedTuple):
    """What came of a test."""

    kind: Literal["passed", "failed", "timeout", "unserved"]
    """unserved: the test gives the solution what is no plain value (a function, an object of a class), which cannot be
    done from another process, and says nothing of the solution."""
    message: str = ""


def judge(
    solution: str,
    tests: Sequence[str],
    *,
    entries: Sequence[str] = (),
    limits: Limits | None = None,
    total_s: float = 60.0,
    sandbox: Sandbox = "bubblewrap",
) -> list[Verdict]:
    """Run tests, each a Python source, of a solution, another one; a test passes if it ends without an exception.

    A name that a test uses and does not have is the solution's, called in the solution's process. Names of Python
    itself and of its modules are Python's, whatever the solution calls so, unless they are in `entries`. What a call
    returns or raises reaches the test as a plain value: None, numbers, strings, bytes, and lists, tuples, sets, dicts
    and ranges of them (objects of subclasses become ones of these). Other objects stay where they are and can only be
    called, asked for attributes and gone through: `Solution().solve(3)` works, and an object that says that it equals 3
    does not.

    A test that the solution does not survive is over, and the next ones get a fresh solution.

    Args:
        entries: names that are the solution's although Python has them (`sum`).
        limits: of the solution's process; `wall_s` is for each test, all others for as many as it survives.
        total_s: for all tests.

    Returns:
        A verdict for each, in their order; fewer where the time for all was over.

    Raises:
        SandboxError: as `run`.
    """
    check(sandbox)
    adopt()
    limits, end = limits or Limits(), time.monotonic() + total_s
    verdicts: list[Verdict] = []
    while len(verdicts) < len(tests) and time.monotonic() < end:
        began = time.monotonic()
        with ExitStack() as stack:
            solver, tester = _start(solution, tests[len(verdicts) :], entries, limits, sandbox, stack)
            found = _hear(tester, len(tests) - len(verdicts), limits, end)
            if not found and end - began < limits.wall_s / 2 and time.monotonic() >= end:
                break  # for want of time for all
            if not found:
                _require_ran(tester, solver)
                found = [Verdict("timeout", f"it was not over after {limits.wall_s:g} s, or memory was")]
            verdicts += found
    return verdicts


def _start(
    solution: str, tests: Sequence[str], entries: Sequence[str], limits: Limits, sandbox: Sandbox, stack: ExitStack
) -> tuple[Box, Box]:
    harness = Path(inside.__file__).read_text(encoding="utf-8")
    plan = json.dumps({"tests": [*tests], "entries": [*entries]})
    asked, ask = os.pipe()
    answered, answer = os.pipe()
    try:
        files = {"main.py": harness, "solution.py": solution}
        solver = start(files, limits, sandbox, asked, answer, subprocess.DEVNULL)
        stack.callback(solver.end)
        tester = start({"main.py": harness, "tests.json": plan}, limits, sandbox, answered, ask, subprocess.PIPE)
        stack.callback(tester.end)
    finally:
        for descriptor in (asked, ask, answered, answer):
            os.close(descriptor)
    return solver, tester


def _hear(tester: Box, most: int, limits: Limits, end: float) -> list[Verdict]:
    """The verdicts on tests one after the other, up to the first for which there is none in its time."""
    stream, text, found = tester.process.stderr, b"", list[Verdict]()
    assert stream is not None
    while len(found) < most and len(text) < _MAX_VERDICTS_BYTES:
        by = min(end, time.monotonic() + limits.wall_s)
        while b"\n" not in text and (left := by - time.monotonic()) > 0:
            if not readable(stream, left):
                continue
            data = os.read(stream.fileno(), 1 << 16)
            if not data:
                return found
            text += data
        line, newline, text = text.partition(b"\n")
        if not newline:
            return found
        found.append(Verdict(*json.loads(line)))
    return found


def _require_ran(*boxes: Box) -> None:
    """
    Raises:
        SandboxError: a program that has ended never ran.
    """
    for box in boxes:
        with suppress(subprocess.TimeoutExpired):
            box.process.wait(1.0)
            if box.exit_code() is None:
                raise SandboxError("bubblewrap could not run a program beside its tests")
