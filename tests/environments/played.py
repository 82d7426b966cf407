"""Environments of the tests, as a user would write them."""

import asyncio
import os
import random
import time

from atomrl.environments import Reply


def echo(problem, *, turns=3, seed=0):
    """Answers with digits made of what was written and of the seed, as often as said; the outcome is their number."""
    count, text = 0, (yield None)
    for _ in range(turns):
        rng = random.Random(f"{seed}/{text}/{count}")
        count += 1
        text = yield Reply(text="".join(rng.choices("abcdefgh", k=rng.randint(1, 9))), reward=0.5, label="echo")
    return float(count)


def opening(problem):
    """Begins with words of its own."""
    text = yield Reply(text="go!")
    return float(len(text))


def opening_echo(problem):
    """Begins with words of its own, and goes on for long."""
    text = yield Reply(text="begin here")
    for count in range(14):
        text = yield Reply(text=f"{count} {text[:3]}", reward=0.25)
    return 1.0


def silent(problem):
    """Answers without a word."""
    yield None
    for _ in range(3):
        yield ""
    return 1.0


async def waiting(problem, say, *, seconds=0.01):
    """An asynchronous one."""
    text = await say()
    await asyncio.sleep(seconds)
    text = await say(Reply(text="b"))
    return 1.0 if text is not None else 0.0


class Steps:
    """A class."""

    def __init__(self, most=2):
        self.left = most

    def reset(self, problem):
        return None

    def step(self, text):
        self.left -= 1
        return "c" if self.left else 0.25


def faulty(problem, *, how="", folder=""):
    """Fails for the problems whose id says so; each other one is answered twice."""
    yield None
    kind = how if problem.problem_id.startswith("bad") else ""
    if kind == "hang":
        time.sleep(3600)
    if kind == "spin":
        "x".join(str(number) for number in range(10**9))
    if kind == "stuck":
        sum(range(10**12))  # a C loop that holds the interpreter's lock
    if kind == "raise":
        raise RuntimeError("no such luck")
    if kind == "exit":
        os._exit(3)
    if kind == "huge":
        yield Reply(text="z" * 10_000_000)
    if kind == "nan":
        return float("nan")
    if kind == "none":
        yield None
    if kind == "number":
        yield 3
    for _ in range(2):
        time.sleep(0.02)
        yield Reply(text="d")
    return 1.0


def misplaced(problem):
    """Speaks as a role; each other one in the model's own turn."""
    yield None
    yield Reply(text="a", role="tool" if problem.problem_id.startswith("bad") else "")
    return 1.0


def fickle(problem, *, folder):
    """Answers other than before when it is played again; the bad one ends the process once."""
    text = yield None
    if problem.problem_id.startswith("bad"):
        time.sleep(0.3)
        os._exit(3)
    yield Reply(text=f"{time.time_ns()}")
    time.sleep(0.5)
    yield Reply(text=text)


def changing(problem, *, folder):
    """A bad one finds its service away once, in its second turn, and another state of it when it is played again."""
    at = os.path.join(folder, problem.problem_id)
    yield Reply(text=f"{os.path.exists(at)}")
    if problem.problem_id.startswith("bad") and not os.path.exists(at):
        open(at, "w").close()
        raise ConnectionRefusedError("nobody there")
    yield Reply(text="b")
    return 1.0


def cut_short(problem):
    """Knows when there is no further turn."""
    from atomrl.environments.worker import Cut

    try:
        while True:
            yield Reply(text="e")
    except Cut:
        return 0.75


def chatting(problem, *, role="user"):
    """Speaks as a role of the chat template."""
    text = yield None
    for _ in range(3):
        text = yield Reply(text="Go on, please.", role=role)
    return float(len(text) > 0)


def vowels(problem, *, turns=2, seconds=0.0):
    """Its outcome is the share of vowels in what was written; a turn with one earns 0.1."""
    text, written = (yield None), ""
    for _ in range(turns):
        written += text
        time.sleep(seconds)
        text = yield Reply(text=str(len(text)), reward=0.1 * any(letter in "aeiou" for letter in text))
    written += text
    return sum(letter in "aeiou" for letter in written) / max(1, len(written))


def odd(problem):
    """Says half of a surrogate pair, and fails with one."""
    yield None
    if problem.problem_id.startswith("bad"):
        raise RuntimeError("\ud800")
    yield Reply(text="a\ud800b", label="\udfff")
    return 1.0
