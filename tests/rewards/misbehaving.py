"""Rewards that do what the completion says, to be run in worker processes. Nothing here is slow to import."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import time

DEEDS = {
    "raise": lambda: 1 / 0,
    "hang": lambda: time.sleep(600),
    "spin": lambda: 3 ** (10**9),  # one C call: no signal handler runs until it is over
    "exit": lambda: os._exit(3),
    "sysexit": lambda: sys.exit("no"),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminated": lambda: [os.kill(os.getpid(), number) for number in (signal.SIGTERM, signal.SIGINT)] and 1.0,
    "nan": lambda: float("nan"),
    "inf": lambda: -float("inf"),
    "string": lambda: "1.0",
    "none": lambda: None,
    "recursion": lambda: DEEDS["recursion"](),
    "print": lambda: print("from a reward") or 1.0,
    "torch": lambda: float("torch" in sys.modules),
    "random": random.random,
    "pid": lambda: float(os.getpid()),
    "scribble": lambda: scribble(b"\0\0\0\2{}"),
    "garble": lambda: scribble(b"\xff" * 8),
    "no_words": lambda: raise_without_words(),
    "child": lambda: [subprocess.Popen(["sleep", "600"]), time.sleep(600)],
}


def scribble(data):
    """Write to the connection of the worker, as a bug with file descriptors would."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.write(int(name), data)
        except OSError:
            continue
    return 1.0


def raise_without_words():
    class Unprintable(Exception):
        def __str__(self):
            raise ValueError

    raise Unprintable


def one(text):
    if text.startswith("/"):  # waits for this file
        while not os.path.exists(text):
            time.sleep(0.02)
        return 1.0
    return DEEDS[text]() if text in DEEDS else float(text)


def obey(prompts, completions, **columns):
    """Called with all completions of a batch."""
    return [one(text) for text in completions]


def obey_score(data_source, solution_str, ground_truth, extra_info=None):
    """Called with one completion at a time."""
    return one(solution_str)


def forgets(prompts, completions, **columns):
    return [1.0] * (len(completions) - 1)


class Obedient:
    def __call__(self, trajectories):
        return [one(item.text) for item in trajectories]


def asks(prompts, completions, *, folder, how, times, **columns):
    """Asks a service that is away in the first calls of each completion."""
    at = os.path.join(folder, f"{how}-{completions[0]}")
    with open(at, "a+") as calls:
        calls.write("x")
        calls.seek(0)
        made = len(calls.read())
    if made <= times:
        _fail(how)
    return [float(len(text)) for text in completions]


def _fail(how):
    import io
    import socket
    import urllib.error

    if how == "refused":
        raise ConnectionRefusedError("nobody there")
    if how == "wrapped":
        raise RuntimeError("the judge failed") from ConnectionResetError()
    if how == "503":
        raise urllib.error.HTTPError("http://h", 503, "busy", {}, io.BytesIO())
    if how == "slow":
        ours, _theirs = socket.socketpair()
        ours.settimeout(0.01)
        ours.makefile("rb").read(1)
    if how == "alarm":
        raise TimeoutError("of its own clock")
    if how == "pipe":
        raise BrokenPipeError("of a program that has ended")
    raise ValueError("no number")
