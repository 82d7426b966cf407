"""An environment in which the model runs Python: programs between tags, answered with what they print."""

from __future__ import annotations

from collections.abc import Generator

from atomrl.environments.tags import first_block
from atomrl.episodes import Reply
from atomrl.sandbox import Sandbox, check, run
from atomrl.sandbox.tools import limits_of, shown
from atomrl.types import Sample

INVALID = (
    "\nThis is no action. To run a program, write it between <{code}> and </{code}>; what it prints comes back. To "
    "answer, write the answer between <answer> and </answer>.\n"
)


def python(
    sample: Sample,
    *,
    tag: str = "python",
    output_tag: str = "output",
    max_calls: int = 4,
    max_characters: int = 1000,
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    sandbox: Sandbox = "bubblewrap",
) -> Generator[Reply | None, str, None]:
    """An episode: `<python>` is answered with what the program prints, in `<output>`; `<answer>` ends it; anything else
    is told how it is done.

    Each program runs in a fresh sandbox; nothing is kept between two. A program that raises, or has to be stopped, is
    answered with the error. The outcome is None: the answer is judged by a reward.

    Args:
        sample: the problem, whose prompt says how to run a program.
        tag, output_tag: of a program, and of what it prints.
        max_calls: after so many turns that were no answer comes a last one, in which nothing is run.
        max_characters: of a reply; the middle of a longer one is left out.
        timeout_s: seconds of the processor for a program; by the clock it may take twice as long.
        memory_mb: of a program.
        sandbox: `none` runs programs as you, with no safety at all.
    """
    limits = limits_of(timeout_s, memory_mb)
    text = yield None
    for _ in range(max_calls):
        kind, content = first_block(text, (tag, "answer"))
        if not kind:
            text = yield Reply(text=INVALID.format(code=tag), label="invalid")
        elif kind == "answer":
            return None
        else:
            result = run(content.strip("\n"), limits=limits, sandbox=sandbox)
            label = "timeout" if result.ended == "timeout" else "python" if result.ok else "error"
            output = shown(result, limits, max_characters)
            text = yield Reply(text=f"\n<{output_tag}>\n{output}\n</{output_tag}>\n", label=label)
    return None


def refuse(sandbox: Sandbox = "bubblewrap", timeout_s: float = 5.0, memory_mb: int = 512, **_: object) -> None:
    """
    Raises:
        SandboxError: programs cannot be run in a sandbox here, and the args do not say that they need none.
        ValueError: the limits are none.
    """
    limits_of(timeout_s, memory_mb)
    check(sandbox)
