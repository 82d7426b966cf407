"""Python as a tool of a model."""

from __future__ import annotations

import math

from atomrl.sandbox.box import Limits, Sandbox
from atomrl.sandbox.running import Result, run

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
