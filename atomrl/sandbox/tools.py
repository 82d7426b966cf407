"""Python as a tool of a model."""

from __future__ import annotations

from atomrl.sandbox.box import Limits
from atomrl.sandbox.running import Result, run

MOST_CHARACTERS = 2000


def python(code: str) -> str:
    """Run a Python program in a sandbox and return what it prints. It has no network and keeps nothing between calls.

    Args:
        code: the program; it has to print what is to be seen.

    Raises:
        SandboxError: there is no sandbox here, or it failed.
    """
    limits = Limits()
    return shown(run(code, limits=limits), limits, MOST_CHARACTERS)


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
