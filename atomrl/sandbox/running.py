"""A program from its start to its end: what it wrote, and how it ended."""

from __future__ import annotations

import json
import logging
import math
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, get_args

from atomrl.common.errors import did_you_mean
from atomrl.sandbox import inside
from atomrl.sandbox.box import Box, Limits, Sandbox, adopt, readable, sealed, start

log = logging.getLogger(__name__)

Ended = Literal["exit", "timeout", "output"]
"""By itself; since its time was over, of the clock or of the processor; since it wrote too much."""
_CPU_TIME_OVER = 128 + 24  # SIGXCPU
_KILLED = 128 + 9
AT_ONCE = max(4, os.cpu_count() or 1)
"""Programs that run at the same time in a process; others wait, and their time begins when they are started."""
_places = threading.BoundedSemaphore(AT_ONCE)
_found_working: set[str] = set()


class SandboxError(RuntimeError):
    """There is no sandbox, or it failed, which says nothing of the program."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a program.

    All of it is of the program's own choice, its exit code included: what it has to show is what it writes, compared
    with something that it cannot see.
    """

    stdout: str
    stderr: str
    code: int | None
    """It exited with; 128 and more: by a signal. None where it was killed before."""
    ended: Ended
    seconds: float

    @property
    def ok(self) -> bool:
        return self.code == 0


def run(source: str, *, stdin: str = "", limits: Limits | None = None, sandbox: Sandbox = "bubblewrap") -> Result:
    """Run a Python program; it is killed, with all that it started, at a limit.

    At most `AT_ONCE` run at the same time in a process. A program has no network, sees no file but Python's own
    and those that it writes in `/tmp`, where it starts, and no variable of this process's environment.

    Args:
        source: of the program.
        stdin: what it reads.
        limits: what it may use.
        sandbox: `none`: an ordinary process, which may do whatever you may.

    Raises:
        SandboxError: as `check`, or the sandbox itself failed.
    """
    check(sandbox)
    adopt()
    with _places, sealed(stdin.encode(errors="replace")) as given:
        return _run({"main.py": source}, given, limits or Limits(), sandbox)


def _run(files: dict[str, str], stdin: IO[bytes], limits: Limits, sandbox: Sandbox) -> Result:
    box = start(files, limits, sandbox, stdin)
    try:
        return collect(box, limits)
    finally:
        box.end()


def collect(box: Box, limits: Limits) -> Result:
    """What a program writes until it ends, or has to.

    Raises:
        SandboxError: it never ran.
    """
    began = time.monotonic()
    streams = {stream: bytearray() for stream in (box.process.stdout, box.process.stderr) if stream is not None}
    ended: Ended = "exit"
    with selectors.DefaultSelector() as selector:
        for stream, found in [*streams.items(), *([(box.status, box.said)] if box.status is not None else [])]:
            selector.register(stream, selectors.EVENT_READ, found)
        while selector.get_map() and ended == "exit":
            left = began + limits.wall_s - time.monotonic()
            ready = selector.select(left) if left > 0 else []
            if not ready:
                ended = "timeout"
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                key.data.extend(data)
                if len(key.data) > limits.output_bytes and key.fileobj is not box.status:
                    ended = "output"
    if ended == "exit":
        try:
            box.process.wait(max(0.01, began + limits.wall_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            ended = "timeout"
    texts = [bytes(found[: limits.output_bytes]).decode(errors="replace") for found in streams.values()]
    stdout, stderr = (*texts, "", "")[:2]
    code = box.exit_code() if ended == "exit" else None
    if ended == "exit" and code is None:
        raise SandboxError(f"bubblewrap could not run a program: {stderr.strip()[-500:]}")
    if code in (_CPU_TIME_OVER, _KILLED):
        ended = "timeout"
    return Result(stdout=stdout, stderr=stderr, code=code, ended=ended, seconds=time.monotonic() - began)


def check(sandbox: Any) -> None:
    """See that programs can be run in a sandbox; the first time in a process, by running one.

    Args:
        sandbox: `bubblewrap`, or `none`, which is said in the log.

    Raises:
        SandboxError: it is unknown, something is not installed, or the system does not allow it.
    """
    if sandbox not in get_args(Sandbox):
        raise SandboxError(f"unknown sandbox {sandbox!r}; {did_you_mean(str(sandbox), get_args(Sandbox), 'there are')}")
    if sandbox in _found_working:
        return
    if (reason := _hindrance(sandbox)) is not None:
        raise SandboxError(
            f"what a model writes cannot be run safely here: {reason}. To run it without any safety, write `sandbox: "
            "none` (docs/guides/sandbox.md)"
        )
    _found_working.add(sandbox)


def _hindrance(sandbox: Sandbox) -> str | None:
    """What keeps it from working."""
    if sandbox == "none":
        log.warning("sandbox: none: what the model writes runs as you, with your files, your keys and your network")
        return None
    try:
        result = _run({"main.py": "print(6 * 7)"}, sealed(b""), Limits(), sandbox)
    except ImportError:
        return "pyseccomp is not installed (`pip install 'atomrl[sandbox]'`)"
    except (OSError, RuntimeError) as error:
        return str(error)
    if result.stdout.strip() == "42":
        return None
    return f"a program that prints 42 printed {result.stdout!r}, and said: {result.stderr.strip()[-500:]}"


# --------------------------------------------------------------------------------------------------------------------
# Tests of a solution's functions: they run beyond its reach, in a box of their own, and call it in its box.

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


# --------------------------------------------------------------------------------------------------------------------
# Python as a tool of a model.

MOST_CHARACTERS = 2000


def python(code: str, sandbox: Sandbox = "bubblewrap", timeout_s: float = 5.0, memory_mb: int = 512) -> str:
    """Run a Python program in a sandbox and return what it prints. It has no network and keeps nothing between calls.

    Args:
        code: the program; it has to print what is to be seen.
        sandbox: `none` runs programs as you, with no safety at all. No model can give this or what follows.
        timeout_s: seconds of the processor for a program; by the clock it may take twice as long.
        memory_mb: of a program.

    Raises:
        SandboxError: there is no sandbox here, or it failed.
    """
    limits = limits_of(timeout_s, memory_mb)
    return shown(run(code, limits=limits, sandbox=sandbox), limits, MOST_CHARACTERS)


def limits_of(timeout_s: float, memory_mb: int) -> Limits:
    """What a program may use that has so many seconds of the processor; by the clock it may take twice as long, since
    others run beside it.

    Raises:
        ValueError: one is no number above 0.

    Example:
        >>> limits_of(5.0, 512) == Limits()
        True
    """
    for name, value, kind in (("timeout_s", timeout_s, (int, float)), ("memory_mb", memory_mb, int)):
        if not isinstance(value, kind) or not 0 < value < math.inf:
            raise ValueError(f"{name} is a {'whole ' if kind is int else ''}number above 0, not {value!r}")
    return Limits(cpu_s=math.ceil(timeout_s), wall_s=2 * timeout_s, memory_mb=memory_mb)


def shown(result: Result, limits: Limits, most: int) -> str:
    """What came of a program, as a model reads it: what it printed, then the error that ended it.

    Args:
        most: characters; of what is longer the middle is left out.

    Example:
        >>> shown(Result(stdout="4\\n", stderr="", code=0, ended="exit", seconds=0.1), Limits(), 100)
        '4'
    """
    error = {
        "timeout": f"Stopped: it took over {limits.cpu_s} s.",
        "output": "Stopped: it printed too much.",
        "exit": "" if result.ok else result.stderr.strip() or f"It exited with code {result.code}.",
    }[result.ended]
    text = "\n".join(part for part in (result.stdout.strip("\n"), error) if part)
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}\n...\n{text[-half:]}"
