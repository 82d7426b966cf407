"""A program from its start to its end: what it wrote, and how it ended."""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import IO, Any, Literal, get_args

from atomrl.hints import did_you_mean
from atomrl.sandbox.box import Box, Limits, Sandbox, adopt, sealed, start

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
