"""Tests that call a solution's functions. Tests and solution run in separate boxes (see `inside`)."""

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
from atomrl.sandbox.box import Box, Limits, Sandbox, become_subreaper, readable, start
from atomrl.sandbox.running import SandboxError, check, ending, exceeded_cpu

_MAX_VERDICTS_BYTES = 1 << 20


class Verdict(NamedTuple):
    """The result of a test."""

    kind: Literal["passed", "failed", "timeout", "unserved"]
    """`unserved`: the test passes the solution an argument that cannot be sent to another process (a function, an
    object of a class), so it says nothing about the solution."""
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
    """Run tests against a solution. A test passes if it ends without an exception.

    Undefined names in a test are looked up in the solution and called in its process. Python's built-ins and modules
    are always Python's own, even if the solution redefines them, except those in `entries`. Results and exceptions
    reach the test as plain values: None, numbers, strings, bytes, and lists, tuples, sets, dicts and ranges of them;
    instances of subclasses become instances of these types. Other objects are proxies that support calls, attributes
    and iteration only: `Solution().solve(3)` works, an object with a custom `__eq__` fails.

    After a test that kills the solution, the next tests get a fresh solution.

    Args:
        solution: source of the solution.
        tests: source of each test.
        entries: names to take from the solution even if Python has them (`sum`).
        limits: resource limits of the solution. `wall_s` applies to each test, the others to the solution's process.
        total_s: time limit for all tests together.
        sandbox: as for `run`.

    Returns:
        One verdict per test, in order. Fewer than tests if `total_s` was exceeded.

    Raises:
        SandboxError: as `run`.
    """
    check(sandbox)
    become_subreaper()
    limits, end = limits or Limits(), time.monotonic() + total_s
    verdicts: list[Verdict] = []
    while len(verdicts) < len(tests) and time.monotonic() < end:
        began = time.monotonic()
        with ExitStack() as stack:
            solver, tester = _start_boxes(solution, tests[len(verdicts) :], entries, limits, sandbox, stack)
            results = _read_verdicts(tester, len(tests) - len(verdicts), limits, end)
            if not results and end - began < limits.wall_s / 2 and time.monotonic() >= end:
                break  # `total_s` is exceeded, and this test had too little time to be called slow
            if not results:
                _require_ran(tester, solver)
                results = [_without_verdict(tester, time.monotonic() - began, limits)]
            verdicts += results
    return verdicts


def _start_boxes(
    solution: str, tests: Sequence[str], entries: Sequence[str], limits: Limits, sandbox: Sandbox, stack: ExitStack
) -> tuple[Box, Box]:
    """Start the solution's and the tests' boxes, connected by a pipe in each direction."""
    harness = Path(inside.__file__).read_text(encoding="utf-8")
    plan = json.dumps({"tests": [*tests], "entries": [*entries]})
    request_reader, request_writer = os.pipe()
    reply_reader, reply_writer = os.pipe()
    try:
        files = {"main.py": harness, "solution.py": solution}
        solver = start(files, limits, sandbox, request_reader, reply_writer, subprocess.DEVNULL)
        stack.callback(solver.end)
        files = {"main.py": harness, "tests.json": plan}
        tester = start(files, limits, sandbox, reply_reader, request_writer, subprocess.PIPE)
        stack.callback(tester.end)
    finally:
        for descriptor in (request_reader, request_writer, reply_reader, reply_writer):
            os.close(descriptor)
    return solver, tester


def _read_verdicts(tester: Box, most: int, limits: Limits, end: float) -> list[Verdict]:
    """Read up to `most` verdicts; stop at the first test that exceeds its time limit."""
    stream, text, verdicts = tester.process.stderr, b"", list[Verdict]()
    assert stream is not None
    while len(verdicts) < most and len(text) < _MAX_VERDICTS_BYTES:
        deadline = min(end, time.monotonic() + limits.wall_s)
        while b"\n" not in text and (left := deadline - time.monotonic()) > 0:
            if not readable(stream, left):
                continue
            data = os.read(stream.fileno(), 1 << 16)
            if not data:
                return verdicts
            text += data
        line, newline, text = text.partition(b"\n")
        if not newline:
            return verdicts
        verdicts.append(Verdict(*json.loads(line)))
    return verdicts


def _require_ran(*boxes: Box) -> None:
    """Check that boxes that have ended did run their program.

    Raises:
        SandboxError: one did not.
    """
    for box in boxes:
        with suppress(subprocess.TimeoutExpired):
            box.process.wait(1.0)
            if box.exit_code() is None:
                raise SandboxError("bubblewrap could not run a program together with its tests")


def _without_verdict(tester: Box, seconds: float, limits: Limits) -> Verdict:
    """Return the verdict on a test that gave none: its process ended, or a limit of time was reached."""
    code = tester.exit_code() if tester.process.poll() is not None else None
    if code is None or exceeded_cpu(code, seconds, limits):
        return Verdict("timeout", f"it did not end within {limits.wall_s:g} s")
    return Verdict("failed", f"the process of the test {ending(code)}")
