"""Whether Ray's own processes answer; its calls wait for ever for one that stands still."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

# How HTTP/2, and so Ray, is greeted (RFC 9113), and the kind of frame that is the answer.
_HELLO, _SETTINGS_FRAME = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), b"\x04"
_EVERY_S = 2.0
_GRACE_S = 5.0


def speaks_http2(address: str, patience_s: float) -> bool:
    """Whether what listens at `HOST:PORT` answers as Ray does.

    Raises:
        OSError: nothing listens, or it does not answer in time.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), patience_s) as connection:
        connection.sendall(_HELLO)
        return connection.recv(4)[3:] == _SETTINGS_FRAME


class Watch:
    """Asks processes every two seconds, on a thread; where one is silent for too long the run ends.

    That begins with an error of `check`, which whoever waits for an actor calls. If this process then does not come to
    an end, since it waits inside of Ray, it is ended: its checkpoints are what a killed run leaves.

    Args:
        addresses: `HOST:PORT` of each process, by its name.
        timeout_s: how long one may be silent.
        give_up: called before the process is ended.
    """

    def __init__(self, addresses: Mapping[str, str], timeout_s: float, give_up: Callable[[], None]) -> None:
        self.addresses, self.timeout_s, self.give_up = addresses, timeout_s, give_up
        self.silent_s = dict.fromkeys(addresses, 0.0)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watch over Ray", daemon=True)
        self._thread.start()

    def check(self, limit_s: float | None = None) -> None:
        """Raise TimeoutError where a process has been silent for `limit_s` (None: `timeout_s`)."""
        if names := self._silent(self.timeout_s if limit_s is None else limit_s):
            raise TimeoutError(self._message(names))

    def close(self) -> None:
        """Ask no more, and do not end this process."""
        self._closed.set()

    def _silent(self, limit_s: float) -> list[str]:
        return [name for name, seconds in self.silent_s.items() if seconds > limit_s]

    def _message(self, names: list[str]) -> str:
        places = ", ".join(f"{name} ({self.addresses[name]})" for name in names)
        return f"{places} has not answered for {max(self.silent_s[name] for name in names):.0f} s (cluster.timeout_s)"

    def _work(self) -> None:
        while not self._silent(self.timeout_s):
            began = time.monotonic()
            if self._closed.wait(_EVERY_S):
                return
            answers = {name: self._answers(address) for name, address in self.addresses.items()}
            passed = min(time.monotonic() - began, 2 * _EVERY_S)  # more: this process itself stood still
            for name, answered in answers.items():
                self.silent_s[name] = 0.0 if answered else self.silent_s[name] + passed
        if self._closed.wait(_GRACE_S):
            return
        print(f"error: {self._message(self._silent(self.timeout_s))}", file=sys.stderr, flush=True)
        self.give_up()
        os._exit(1)

    @staticmethod
    def _answers(address: str) -> bool:
        try:
            return speaks_http2(address, _EVERY_S) or os.environ.get("RAY_USE_TLS", "0") != "0"
        except ConnectionRefusedError:  # it has ended, which Ray itself notices
            return True
        except OSError:
            return False
