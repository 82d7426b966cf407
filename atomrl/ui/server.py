"""The server."""

from __future__ import annotations

import logging
import secrets
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atomrl.hints import said_as
from atomrl.ui.catalog import Catalog
from atomrl.ui.launches import Launcher
from atomrl.ui.questions import Questions
from atomrl.ui.security import Guard, is_loopback

GRACE_S = 1
"""For requests under way when the server is told to end; the streams of open pages never end by themselves."""
NEEDED = "the web interface needs: pip install 'atomrl[ui]'"


class WebServer:
    """The web interface on the runs of a folder.

    Args:
        root: the folder.
        listener: a socket that listens.
        host: the address that was asked for.
        allow_launch: whether runs may be started, stopped and resumed, which is to run code.
        token: opens the pages; None makes one.

    Raises:
        ImportError: the extra `ui` is not installed.
    """

    def __init__(
        self, root: Path, listener: socket.socket, host: str, allow_launch: bool = False, token: str | None = None
    ) -> None:
        with said_as(ImportError, NEEDED, ImportError):
            import uvicorn

            from atomrl.ui.routes import Routes
        self.token = token or secrets.token_urlsafe(24)
        self._listener, self._questions = listener, Questions()
        port = listener.getsockname()[1]
        routes = Routes(Catalog(root), self._questions, Launcher(root) if allow_launch else None)
        guard: Any = Guard(routes.application(), self.token, host, cookie=f"atomrl_ui_{port}")
        shown = "localhost" if is_loopback(host) else socket.getfqdn() if host in ("0.0.0.0", "::") else host
        self.address = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/?token={self.token}"
        config = uvicorn.Config(
            guard, lifespan="off", log_level="warning", access_log=False, server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )  # fmt: skip
        self._routes, self._server = routes, uvicorn.Server(config)

    def run(self, ready: Callable[[str], None]) -> None:
        """Answer until the process is told to end (Ctrl-C, SIGTERM).

        Args:
            ready: is called with the address to open.
        """

        def ended(*_: Any) -> None:
            """uvicorn handles signals while it runs, and sends them once more when it has ended."""

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, ended)
        self._routes.watcher.ending = lambda: self._server.should_exit
        # A request that is cut off at the end is no error: its traceback would be the last thing on the terminal.
        logging.getLogger("uvicorn.error").addFilter(lambda _: not self._server.should_exit)
        ready(self.address)
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self._questions.close()


def listener_at(host: str, port: int) -> socket.socket:
    """A socket that listens at an address.

    Raises:
        ValueError: the address is not to be had.
    """
    with said_as(ValueError, f"cannot listen at {host}:{port} (--host, --port)", OSError):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
