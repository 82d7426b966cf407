"""The processes that rewards run in.

The trainer starts each as a fresh interpreter (no fork of a process with threads), so one that hangs costs a fraction
of a second to replace. It does not import torch, unless a user's reward does.

What a worker gets is pickled by the trainer; what it answers is JSON, so that nothing that ran beside a model's
output is ever unpickled by the trainer.
"""

import ctypes
import json
import os
import random
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from atomrl.rewards.calling import Scorer, call, find_scorer, instantiate
from atomrl.rewards.table import POOLED

PR_SET_PDEATHSIG = 1


def serve(descriptor: int, parent: int) -> None:
    """Answer each (name, args, payloads) with what went wrong when the reward was loaded, None if nothing did, and then
    with the outcome of each payload.

    Args:
        descriptor: of a socket to the trainer.
        parent: the trainer's process id.
    """
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the trainer decides when a worker ends
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    loaded: dict[str, Scorer] = {}
    while True:
        try:
            name, args, payloads = connection.recv()
            key = f"{name} {args!r}"
            if key not in loaded:
                loaded[key] = _loaded(name, args)
        except EOFError:
            return
        except (Exception, SystemExit) as error:
            _answer(connection, f"{type(error).__name__}: {error}")
            continue
        _answer(connection, None)
        for payload in payloads:
            seed_everything(payload["seed"])
            _answer(connection, call(loaded[key], payload))


def _loaded(name: str, args: dict[str, Any]) -> Scorer:
    scorer = find_scorer(name, args)
    if scorer.name in POOLED:
        POOLED[scorer.name].warm_up()
    return instantiate(scorer)


def die_with(parent: int) -> None:
    """Be killed when the process `parent` ends, however it does.

    On Linux the kernel sees to it; elsewhere a process that is idle notices that its socket is closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _answer(connection: Connection, message: Any) -> None:
    connection.send_bytes(json.dumps(message).encode())


def seed_everything(seed: int) -> None:
    """A reward that draws random numbers gives the same ones whichever worker runs it, and in whatever order."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
