"""Watch over Ray's own processes: Ray's calls wait forever for one that hangs."""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

# The HTTP/2 connection preface (RFC 9113), and the type of the frame that a server replies with.
_HTTP2_PREFACE, _SETTINGS_FRAME = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), b"\x04"
CHECK_EVERY_S = 2.0
"""Seconds between two health checks."""
_MISSES = 3
CALL_GRACE_S = 5.0
"""Seconds after the deadline of a Ray call at which a `Watch` ends this process, if Ray does not answer."""


class RayHangs(OSError):
    """One of Ray's own processes does not answer."""


def speaks_http2(address: str, patience_s: float) -> bool:
    """Return True if the server at `HOST:PORT` speaks HTTP/2, as Ray does. With Ray's TLS any reply counts.

    Raises:
        OSError: nothing listens there, or it does not reply in time.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), patience_s) as connection:
        connection.sendall(_HTTP2_PREFACE)
        return connection.recv(4)[3:] == _SETTINGS_FRAME or os.environ.get("RAY_USE_TLS", "0") != "0"


class Watch:
    """Health checks of Ray's processes on a thread, every two seconds, so that a run never waits forever for them.

    `check` raises if a process does not answer; the run calls it before and after requests. A thread that is blocked in
    a Ray call cannot be interrupted. If such a call exceeds its time limit while a process does not answer, this
    process exits, with the checkpoints that any killed run has.

    Args:
        addresses: name -> `HOST:PORT`. If the first one refuses connections, the cluster has ended and so do checks.
        timeout_s: seconds without an answer after which a process counts as hanging.
        give_up: called before this process exits.
    """

    def __init__(self, addresses: Mapping[str, str], timeout_s: float, give_up: Callable[[], None]) -> None:
        self.addresses, self.timeout_s, self.give_up = addresses, timeout_s, give_up
        self.silent_s, self.misses = dict.fromkeys(addresses, 0.0), dict.fromkeys(addresses, 0)
        """Seconds without an answer, and consecutive failed checks, of each process."""
        self._limits: dict[object, float] = {}
        """Deadline of each Ray call in progress."""
        self._closed = threading.Event()
        if addresses:
            threading.Thread(target=self._work, name="watch over Ray", daemon=True).start()

    @contextmanager
    def inside(self, patience_s: float = 0.0) -> Iterator[None]:
        """Enclose a Ray call that may take up to `patience_s` even if Ray is healthy."""
        key = object()
        self._limits[key] = time.monotonic() + patience_s
        try:
            yield
        finally:
            del self._limits[key]

    def check(self, share: float = 1.0) -> None:
        """Raise RayHangs if a process has not answered for this share of `timeout_s`."""
        if message := self._silent_message(share * self.timeout_s):
            raise RayHangs(message)

    def close(self) -> None:
        """Stop the checks."""
        self._closed.set()

    def _silent_message(self, limit_s: float) -> str:
        """Return an error message if processes have not answered for `limit_s`, else ""."""
        names = [n for n, seconds in self.silent_s.items() if seconds > limit_s and self.misses[n] >= _MISSES]
        if not names:
            return ""
        places = ", ".join(f"{name} ({self.addresses[name]})" for name in names)
        return f"{places} has not answered for {max(self.silent_s[name] for name in names):.0f} s (cluster.timeout_s)"

    def _work(self) -> None:
        longest_s = CHECK_EVERY_S * (1 + len(self.addresses))  # a longer gap means that this process was stopped
        began = time.monotonic()
        while not self._closed.wait(CHECK_EVERY_S):
            try:
                answers = {name: self._answers(address) for name, address in self.addresses.items()}
            except ConnectionRefusedError:
                return
            passed, began = min(time.monotonic() - began, longest_s), time.monotonic()
            for name, answered in answers.items():
                self.silent_s[name] = 0.0 if answered else self.silent_s[name] + passed
                self.misses[name] = 0 if answered else self.misses[name] + 1
            message = self._silent_message(self.timeout_s)
            if message and time.monotonic() > min(list(self._limits.values()), default=math.inf) + CALL_GRACE_S:
                self._end(message)

    def _end(self, message: str) -> None:
        try:
            with suppress(Exception):  # stderr may be closed
                print(f"error: {message}", file=sys.stderr, flush=True)
            self.give_up()
        finally:
            os._exit(1)

    def _answers(self, address: str) -> bool:
        try:
            return speaks_http2(address, CHECK_EVERY_S)
        except TimeoutError:
            return False
        except ConnectionRefusedError:
            if address == next(iter(self.addresses.values())):
                raise
            return True
        except OSError:  # Ray itself detects other failures
            return True
