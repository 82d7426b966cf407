"""Whether Ray's own processes answer; its calls wait for ever for one that stands still."""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

# How HTTP/2, and so Ray, is greeted (RFC 9113), and the kind of frame that is the answer.
_HELLO, _SETTINGS_FRAME = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), b"\x04"
_EVERY_S = 2.0
_MISSES = 3
_GRACE_S = 5.0


class RayHangs(OSError):
    """A process of Ray's own does not answer."""


def speaks_http2(address: str, patience_s: float) -> bool:
    """Whether what listens at `HOST:PORT` answers as Ray does; with Ray's TLS any end of the greeting is an answer.

    Raises:
        OSError: nothing listens, or it does not answer in time.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), patience_s) as connection:
        connection.sendall(_HELLO)
        return connection.recv(4)[3:] == _SETTINGS_FRAME or os.environ.get("RAY_USE_TLS", "0") != "0"


class Watch:
    """Asks processes every two seconds, on a thread, so that a run does not wait for ever for a silent one.

    `check` raises for it, where a run looks at its actors. A run that is inside of Ray cannot look: where such a call
    does not come to an end, this process is ended, and leaves the checkpoints that a killed run leaves.

    Args:
        addresses: `HOST:PORT` of each process, by its name; without the first there is nothing to watch any more.
        timeout_s: how long one may be silent.
        give_up: called before this process is ended.
    """

    def __init__(self, addresses: Mapping[str, str], timeout_s: float, give_up: Callable[[], None]) -> None:
        self.addresses, self.timeout_s, self.give_up = addresses, timeout_s, give_up
        self.silent_s, self.misses = dict.fromkeys(addresses, 0.0), dict.fromkeys(addresses, 0)
        self._limits: dict[object, float] = {}
        """When each call of Ray that is under way should have come back."""
        self._closed = threading.Event()
        if addresses:
            threading.Thread(target=self._work, name="watch over Ray", daemon=True).start()

    @contextmanager
    def inside(self, patience_s: float = 0.0) -> Iterator[None]:
        """Around a call of Ray that may take so long by itself."""
        key = object()
        self._limits[key] = time.monotonic() + patience_s
        try:
            yield
        finally:
            del self._limits[key]

    def check(self, share: float = 1.0) -> None:
        """Raise `RayHangs` where a process has been silent for a share of `timeout_s`."""
        if message := self._silence(share * self.timeout_s):
            raise RayHangs(message)

    def close(self) -> None:
        """Ask no more, and do not end this process."""
        self._closed.set()

    def _silence(self, limit_s: float) -> str:
        names = [n for n, seconds in self.silent_s.items() if seconds > limit_s and self.misses[n] >= _MISSES]
        if not names:
            return ""
        places = ", ".join(f"{name} ({self.addresses[name]})" for name in names)
        return f"{places} has not answered for {max(self.silent_s[name] for name in names):.0f} s (cluster.timeout_s)"

    def _work(self) -> None:
        longest_s = _EVERY_S * (1 + len(self.addresses))  # more: this process itself stood still
        began = time.monotonic()
        while not self._closed.wait(_EVERY_S):
            try:
                answers = {name: self._answers(address) for name, address in self.addresses.items()}
            except ConnectionRefusedError:
                return
            passed, began = min(time.monotonic() - began, longest_s), time.monotonic()
            for name, answered in answers.items():
                self.silent_s[name] = 0.0 if answered else self.silent_s[name] + passed
                self.misses[name] = 0 if answered else self.misses[name] + 1
            message = self._silence(self.timeout_s)
            if message and time.monotonic() > min(list(self._limits.values()), default=math.inf) + _GRACE_S:
                self._end(message)

    def _end(self, message: str) -> None:
        try:
            with suppress(Exception):  # whoever reads it may be gone
                print(f"error: {message}", file=sys.stderr, flush=True)
            self.give_up()
        finally:
            os._exit(1)

    def _answers(self, address: str) -> bool:
        try:
            return speaks_http2(address, _EVERY_S)
        except TimeoutError:
            return False
        except ConnectionRefusedError:
            if address == next(iter(self.addresses.values())):
                raise
            return True
        except OSError:  # what else there is Ray itself notices
            return True
