"""The processes that rewards run in: one fork server, and the workers that it forks.

The trainer starts the fork server as a fresh interpreter (no fork of a process with threads). It imports what is slow
to import and forks a worker whenever it is asked to, in some milliseconds. So a worker that hangs costs
little to replace. Neither imports torch, unless a user's reward does.

What a worker gets is pickled by the trainer; what it answers is JSON, so that nothing that ran beside a model's
output is ever unpickled by the trainer.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from atomrl.rewards.calling import Scorer, call, find_scorer, instantiate
from atomrl.rewards.table import POOLED

PR_SET_PDEATHSIG = 1


def fork_server(control_fd: int, parent: int, preload: Sequence[str]) -> None:
    """Fork a worker for every socket that arrives on `control_fd`, and answer with its process id.

    Args:
        control_fd: a Unix socket to the trainer.
        parent: the trainer's process id.
        preload: built-in rewards whose packages are imported before the first fork.
    """
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the trainer decides when a worker ends
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # dead workers leave no zombies
    for name in preload:
        POOLED[name].warm_up()
    control = socket.socket(fileno=control_fd)
    me = os.getpid()
    while True:
        message, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        child = os.fork()
        if child == 0:
            control.close()
            os.setsid()  # a group of its own, which is killed with all that a reward started
            die_with(me)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.set_inheritable(sockets[0], False)
            try:
                serve(Connection(sockets[0]))
            finally:
                os._exit(0)
        os.close(sockets[0])
        control.sendall(child.to_bytes(8, "little"))


def die_with(parent: int) -> None:
    """Be killed when the process `parent` ends, however it does.

    On Linux the kernel sees to it; elsewhere a process that is idle notices that its socket is closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def serve(connection: Connection) -> None:
    """Answer each (name, args, payloads) with a line that the function is loaded, then one outcome per payload."""
    loaded: dict[str, Scorer] = {}
    while True:
        try:
            name, args, payloads = connection.recv()
            key = f"{name} {args!r}"
            if key not in loaded:
                loaded[key] = instantiate(find_scorer(name, args))
        except EOFError:
            return
        except (Exception, SystemExit) as error:
            _answer(connection, {"load_error": f"{type(error).__name__}: {error}"})
            continue
        _answer(connection, {"loaded": True})
        for payload in payloads:
            seed_everything(payload["seed"])
            _answer(connection, asdict(call(loaded[key], payload)))


def _answer(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def seed_everything(seed: int) -> None:
    """A reward that draws random numbers gives the same ones whichever worker runs it, and in whatever order."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
