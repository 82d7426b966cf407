"""Environments and tools of somebody who means ill, or does not mean anything."""

import asyncio
import sys

from atomrl.environments import Reply


def nan_reward(problem):
    yield None
    yield Reply(text="a", reward=float("nan"))


def odd_outcome(problem, *, kind="nan"):
    yield None
    return {
        "nan": float("nan"), "inf": float("-inf"), "text": "1.0", "list": [1.0], "huge": 10**400, "true": True,
        "complex": 1j, "reply": Reply(text="x"),
    }[kind]  # fmt: skip


def long_message(problem):
    yield None
    raise RuntimeError("\ud800é\x1b[2J" * 1_000_000)


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no words")


def no_words(problem):
    yield None
    raise Unprintable


def empty(problem):
    """Says nothing, in words."""
    text = yield None
    for _ in range(3):
        text = yield ""
    return float(len(text))


def empty_message(problem, *, role="tool"):
    yield None
    yield Reply(text="", role=role)
    return 1.0


def nothing_at_all(problem):
    yield None
    yield []


def mixed(problem):
    yield None
    yield [Reply(text="a", role="tool"), "b"]


def deep(problem):
    yield None
    return (lambda f: f(f))(lambda f: f(f))


def leaves_at_once(problem):
    return 1.0
    yield


async def never_says(problem, say):
    return 0.5


async def task_left(problem, say):
    """Leaves a task that raises later."""

    async def later():
        await asyncio.sleep(0.01)
        raise RuntimeError("later")

    task = asyncio.create_task(later())
    await say()
    await asyncio.sleep(0.05)
    return 1.0 if task.done() else 0.0


def exits(problem):
    yield None
    sys.exit(0)


def interrupts(problem):
    yield None
    raise KeyboardInterrupt


def many_words(problem):
    """A thousand messages at once."""
    yield None
    yield [Reply(text="x" * 50, role="tool", label=f"l{n}") for n in range(1000)]
    return 1.0


def mutates(problem):
    """Changes what it was given."""
    problem.columns["seen"] = True
    object.__setattr__(problem, "prompt", "other")
    yield None
    return 1.0
