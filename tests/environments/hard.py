"""Environments that are hard on their worker."""

from contextlib import suppress


def patient(problem, *, turns=2):
    """Says how long the text was."""
    text = yield None
    for _ in range(turns):
        text = yield str(len(text))
    return 1.0


class Unsendable:
    """A value of a column that cannot be pickled."""

    def __reduce__(self):
        raise RuntimeError("not for sending")


class Unreadable:
    """One that cannot be unpickled."""

    def __reduce__(self):
        return (_broken, ())


def _broken():
    raise RuntimeError("not to be read")


def deaf(problem):
    """Goes on when there is no further turn."""
    while True:
        with suppress(Exception):
            yield "a"


async def deaf_and_waiting(problem, say):
    """Goes on as well, and says something shorter."""
    said = "long" * 40
    while True:
        try:
            await say(said)
        except Exception:
            said = "s"


async def cancelled(problem, say):
    """Ends with what is no Exception."""
    import asyncio

    await say()
    raise asyncio.CancelledError("a task was cancelled")


def closing_badly(problem):
    """Does not let itself be closed."""
    text = yield None
    while True:
        with suppress(BaseException):
            text = yield text


class NoStart:
    """Its `__init__` raises."""

    def __init__(self):
        raise OSError("no such game")

    def reset(self, problem):
        """Never called."""

    def step(self, text):
        """Never called."""


def odd_label(problem):
    """Its label is a list."""
    from atomrl.environments import Reply

    yield None
    yield Reply(text="a", label=["b"])


def early_reward(problem):
    """Rewards a turn before there is one."""
    from atomrl.environments import Reply

    yield Reply(text="a", reward=1.0)


def surrogate(problem):
    """Says half a character, as what read a broken file name or JSON may."""
    yield None
    yield "a\ud800b"
    return 1.0


async def sleepy(problem, say):
    """Waits a little."""
    import asyncio

    await say()
    await asyncio.sleep(0.5)
    await say("b")
    return 1.0


def forking(problem):
    """Forks a child that goes on by mistake, starts threads and processes, changes the folder, prints."""
    import multiprocessing
    import os
    import subprocess
    import sys
    import threading

    yield None
    print("printed")
    sys.stdout.flush()
    os.chdir("/")
    threading.Thread(target=lambda: None).start()
    subprocess.run(["true"], check=True)
    process = multiprocessing.get_context("fork").Process(target=print, args=("forked",))
    process.start()
    process.join()
    if os.fork() == 0:
        raise RuntimeError("in the child")
    yield "a"
    return 1.0


def leaves(problem, *, name, ends=False):
    """Starts what leaves its session: plainly, behind a parent that has ended, and without a known variable."""
    import os
    import subprocess
    import sys

    text = yield None
    forget = f"import time; {name!r}; time.sleep(600)"
    daemon = f"import os, time; {name!r}; os.setsid(); os.fork() and os._exit(0); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", forget], start_new_session=True)
    subprocess.Popen([sys.executable, "-c", daemon]).wait()
    if not ends:
        subprocess.Popen([sys.executable, "-c", forget], start_new_session=True, env={})
    yield text
    os._exit(3)


def closes(problem):
    """Closes what is not its own."""
    import os

    yield None
    if problem.problem_id.startswith("bad"):
        os.closerange(3, 100_000)
    yield "a"
    return 1.0


async def two_at_once(problem, say, *, refused):
    """Does not wait for the model; makes the file `refused` when it is told so."""
    import asyncio
    from pathlib import Path

    async def says(text):
        try:
            await say(text)
        except Exception:
            Path(refused).touch()
            raise

    await asyncio.gather(says("a"), says("b"))


def forks(problem):
    """Leaves a fork that never ends, ends a program, and then keeps the interpreter busy."""
    import os
    import subprocess
    import time

    if (child := os.fork()) == 0:
        time.sleep(600)
    program = subprocess.Popen(["sleep", "600"])
    program.terminate()
    yield f"{os.getpid()} {child} {program.wait(10)}"
    while True:
        sum(range(1_000_000))
