"""Run programs in the sandbox: `run` one and collect its output, `python` as a tool that models call."""

from __future__ import annotations

import logging
import math
import os
import selectors
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Literal, get_args

from atomrl.common.errors import did_you_mean
from atomrl.sandbox.box import Box, Limits, Sandbox, become_subreaper, sealed, start

log = logging.getLogger(__name__)

Ended = Literal["exit", "timeout", "output"]
"""Reason for the end: the program exited, a limit of wall-clock or CPU time, or a limit of output."""
_CPU_TIME_OVER = 128 + 24  # SIGXCPU
_KILLED = 128 + 9
AT_ONCE = max(4, os.cpu_count() or 1)
"""Maximum number of programs that run concurrently per process. Others wait; waiting does not count as their time."""
_slots = threading.BoundedSemaphore(AT_ONCE)
WORKING: set[str] = set()
"""Sandboxes that `check` has found to work in this process."""
MOST_CHARACTERS = 2000


class SandboxError(RuntimeError):
    """The sandbox is unavailable, or failed. The program is not the cause."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The output and the end of a program.

    The program controls all of it, including the exit code. To test it, compare its output with an expected one that it
    cannot see.
    """

    stdout: str
    stderr: str
    code: int | None
    """Exit code; 128 + n if killed by signal n; None if it was killed at a limit."""
    ended: Ended
    seconds: float

    @property
    def ok(self) -> bool:
        return self.code == 0


def run(source: str, *, stdin: str = "", limits: Limits | None = None, sandbox: Sandbox = "bubblewrap") -> Result:
    """Run a Python program. At a limit it is killed with all its processes.

    The program has no network, sees no files except Python's and its own in `/tmp` (its working directory), and none of
    this process's environment variables. At most `AT_ONCE` programs run concurrently per process.

    Args:
        source: source of the program.
        stdin: its input.
        limits: resource limits.
        sandbox: `none` runs an ordinary process with all your permissions.

    Raises:
        SandboxError: as `check`, or the sandbox itself failed.
    """
    check(sandbox)
    become_subreaper()
    with _slots, sealed(stdin.encode(errors="replace")) as input_file:
        return _run({"main.py": source}, input_file, limits or Limits(), sandbox)


def _run(files: dict[str, str], stdin: IO[bytes], limits: Limits, sandbox: Sandbox) -> Result:
    box = start(files, limits, sandbox, stdin)
    try:
        return collect(box, limits)
    finally:
        box.end()


def collect(box: Box, limits: Limits) -> Result:
    """Read a program's output until it ends or reaches a limit.

    Raises:
        SandboxError: bubblewrap could not start the program.
    """
    began = time.monotonic()
    streams = {stream: bytearray() for stream in (box.process.stdout, box.process.stderr) if stream is not None}
    ended: Ended = "exit"
    # Read both streams as they come, so that a full pipe never blocks the program, until all are closed.
    with selectors.DefaultSelector() as selector:
        for stream, buffer in streams.items():
            selector.register(stream, selectors.EVENT_READ, buffer)
        if box.status is not None:
            selector.register(box.status, selectors.EVENT_READ, box.status_output)
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
    # Closed streams do not mean that the program has ended: it may run on without output.
    if ended == "exit":
        try:
            box.process.wait(max(0.01, began + limits.wall_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            ended = "timeout"
    texts = [bytes(buffer[: limits.output_bytes]).decode(errors="replace") for buffer in streams.values()]
    stdout, stderr = (*texts, "", "")[:2]
    code = box.exit_code() if ended == "exit" else None
    if ended == "exit" and code is None:
        raise SandboxError(f"bubblewrap could not run a program: {stderr.strip()[-500:]}")
    seconds = time.monotonic() - began
    if exceeded_cpu(code, seconds, limits):
        ended = "timeout"
    return Result(stdout=stdout, stderr=stderr, code=code, ended=ended, seconds=seconds)


def exceeded_cpu(code: int | None, seconds: float, limits: Limits) -> bool:
    """Return True if an exit code is that of the limit of CPU time: SIGXCPU, or SIGKILL a second later. An earlier
    SIGKILL has another cause, such as a lack of memory, or the program itself."""
    return code == _CPU_TIME_OVER or (code == _KILLED and seconds >= limits.cpu_s)


def check(sandbox: Any) -> None:
    """Check that the sandbox works. The first call in a process runs a program.

    Args:
        sandbox: `bubblewrap`, or `none`, which logs a warning.

    Raises:
        SandboxError: the name is unknown, a package is missing, or the system does not allow it.
    """
    if sandbox not in get_args(Sandbox):
        raise SandboxError(f"unknown sandbox {sandbox!r}; {did_you_mean(str(sandbox), get_args(Sandbox), 'valid:')}")
    if sandbox in WORKING:
        return
    if (reason := _failure(sandbox)) is not None:
        raise SandboxError(
            f"code from a model cannot be run safely here: {reason}. To run it without a sandbox, set `sandbox: none` "
            "(docs/guides/sandbox.md)"
        )
    WORKING.add(sandbox)


def _failure(sandbox: Sandbox) -> str | None:
    """Return the reason why the sandbox does not work, or None if it does."""
    if sandbox == "none":
        log.warning("sandbox: none: the model's code runs as you, with access to your files, keys and network")
        return None
    try:
        result = _run({"main.py": "print(6 * 7)"}, sealed(b""), Limits(), sandbox)
    except ImportError:
        return "pyseccomp is not installed (`pip install 'atomrl[sandbox]'`)"
    except (OSError, RuntimeError) as error:
        return str(error)
    if result.stdout.strip() == "42":
        return None
    return f"a program that prints 42 printed {result.stdout!r}; stderr: {result.stderr.strip()[-500:]}"


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
    return format_result(run(code, limits=limits, sandbox=sandbox), limits, MOST_CHARACTERS)


def limits_of(timeout_s: float, memory_mb: int) -> Limits:
    """Build the `Limits` for a CPU time limit. The wall-clock limit is twice as long, since other programs run too.

    Raises:
        ValueError: an argument is not a number above 0.

    Example:
        >>> limits_of(5.0, 512) == Limits()
        True
    """
    for name, value, kind in (("timeout_s", timeout_s, (int, float)), ("memory_mb", memory_mb, int)):
        if not isinstance(value, kind) or not 0 < value < math.inf:
            raise ValueError(f"{name} is a {'whole ' if kind is int else ''}number above 0, not {value!r}")
    return Limits(cpu_s=math.ceil(timeout_s), wall_s=2 * timeout_s, memory_mb=memory_mb)


def format_result(result: Result, limits: Limits, most: int) -> str:
    """Format a result for the model: the program's output, then its error.

    Args:
        result: of the program.
        limits: its resource limits, for the message.
        most: maximum number of characters; the middle of a longer text is omitted.

    Example:
        >>> format_result(Result(stdout="4\\n", stderr="", code=0, ended="exit", seconds=0.1), Limits(), 100)
        '4'
    """
    error = {
        "timeout": f"Stopped: it took over {limits.cpu_s} s.",
        "output": "Stopped: it printed too much.",
        "exit": "" if result.ok else result.stderr.strip() or f"It {ending(result.code or 0)}.",
    }[result.ended]
    text = "\n".join(part for part in (result.stdout.strip("\n"), error) if part)
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}\n...\n{text[-half:]}"


def ending(code: int) -> str:
    """Describe the end of a program by its exit code.

    Example:
        >>> ending(3), ending(137)
        ('exited with code 3', 'was killed by SIGKILL')
    """
    with suppress(ValueError):
        return f"was killed by {signal.Signals(code - 128).name}"
    return f"exited with code {code}"
