"""The trainer's end of the connection to a worker: it never waits for the worker."""

from __future__ import annotations

import socket
import struct
from multiprocessing.connection import Connection

_AT_ONCE, _READS = 1 << 16, 64


class Channel:
    """Messages to and from a worker, framed as its `multiprocessing.connection.Connection` frames them.

    What a worker does not take is kept until it does, and what it says is there once it is whole: one that is stopped,
    or stuck in the middle of a message, keeps nobody waiting.

    Args:
        connection: to the worker; nobody else may use it.
    """

    def __init__(self, connection: Connection) -> None:
        self._socket = socket.socket(fileno=connection.fileno())
        self._out, self._in = bytearray(), bytearray()
        self.ended = False
        """The worker has closed its end, or died."""

    @property
    def pending(self) -> bool:
        """Whether the worker has not taken all that was sent."""
        return bool(self._out)

    def send(self, message: bytes) -> None:
        """Send, now or once the worker takes it."""
        self._out += struct.pack("!i", len(message)) + message
        self.flush()

    def flush(self) -> None:
        """Send what was kept, as far as the worker takes it."""
        try:
            while self._out:
                del self._out[: self._socket.send(self._out, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            return
        except OSError:  # heard as its end
            self._out.clear()

    def receive(self) -> list[bytes]:
        """All whole messages that have come.

        Raises:
            ValueError: it is no message.
        """
        try:
            for _ in range(_READS):
                part = self._socket.recv(_AT_ONCE, socket.MSG_DONTWAIT)
                self._in += part
                if not part:
                    self.ended = True
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        found = []
        while len(self._in) >= 4:
            (size,) = struct.unpack_from("!i", self._in)
            if size < 0:
                raise ValueError("no message of a worker")
            if len(self._in) < 4 + size:
                break
            found.append(bytes(self._in[4 : 4 + size]))
            del self._in[: 4 + size]
        return found

    def detach(self) -> None:
        """Leave the connection to be closed by who opened it."""
        self._socket.detach()
