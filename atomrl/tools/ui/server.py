"""The web server: access control (`Guard`) and `WebServer`, which serves the runs of a folder."""

from __future__ import annotations

import ipaddress
import logging
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from atomrl.common.errors import said_as
from atomrl.tools.ui.catalog import Catalog
from atomrl.tools.ui.events import Questions
from atomrl.tools.ui.launches import Launcher

# --------------------------------------------------------------------------------------------------------------------
# Access control: only pages of this server itself are served, opened with its token.

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

POST_HEADER = "x-atomrl"
"""A header that a form on another site cannot send."""
MAX_BODY_BYTES = 2**20
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}


class Guard:
    """ASGI middleware that authenticates requests and sets security headers.

    - The Host header must name this machine (against DNS rebinding), else 400.
    - Cross-site requests are refused with 403; following a link to the address with the token is allowed.
    - The token must be in an HttpOnly cookie, else 401; `/?token=...` sets it.
    - Requests that change something must be JSON with the header `x-atomrl`, else 403.

    Args:
        application: the application behind it.
        token: the secret of this server.
        host: the address that the server listens on; beyond loopback, the machine's names are valid hosts too.
        cookie: name of the cookie; servers on several ports of a machine share cookies.
    """

    def __init__(self, application: Application, token: str, host: str, cookie: str = "atomrl_ui") -> None:
        self.application, self.token, self.cookie = application, token, cookie
        self.names = {"localhost"} if is_loopback(host) else {"localhost", host, *machine_names()}
        self.loopback = is_loopback(host)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.application(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        token = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        opening = scope["path"] == "/" and scope["method"] == "GET" and bool(token)
        refused = self._refusal(scope, headers, opening)
        if refused is None and opening:
            if not secrets.compare_digest(token.encode(), self.token.encode()):
                refused = 401, "the token is not this server's"
            else:
                cookie = f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"
                await _answer(send, 303, "", {"location": "/", "set-cookie": cookie})
                return
        if refused is None and not self._has_token(headers):
            refused = 401, "open the address that `atomrl ui` printed: it has the token of this server"
        if refused is not None:
            await _answer(send, refused[0], refused[1] + "\n")
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *_encoded(HEADERS)]}
            await send(message)

        await self.application(scope, receive, send_with_headers)

    def _refusal(self, scope: Message, headers: dict[str, str], opening: bool) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if not self._is_own_host(host):
            return 400, "this host is not the server's: open it by localhost or its address"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return 403, "another site may not ask"
        site = headers.get("sec-fetch-site", "none")
        is_link = (
            opening and headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        )
        if site not in ("same-origin", "none") and not is_link:
            return 403, "another site may not ask"
        if scope["method"] not in ("GET", "HEAD"):
            if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
                return 403, "takes application/json"
            if POST_HEADER not in headers:
                return 403, f"takes the header {POST_HEADER}"
            length = headers.get("content-length", "")
            if not (length.isascii() and length.isdigit()) or int(length) > MAX_BODY_BYTES:
                return 413, f"takes at most {MAX_BODY_BYTES} bytes, and their number"
        return None

    def _is_own_host(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        if name in self.names:
            return True
        try:  # an IP address cannot be rebound
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback if self.loopback else True

    def _has_token(self, headers: dict[str, str]) -> bool:
        # Not by `SimpleCookie`, which drops all cookies if one (of another server on this machine) is malformed.
        pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        values = (value for name, _, value in pairs if name == self.cookie)
        return any(secrets.compare_digest(value.encode(), self.token.encode()) for value in values)


def is_loopback(host: str) -> bool:
    """Return whether an address is a loopback address.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
        (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def machine_names() -> set[str]:
    """Return the host names of this machine."""
    return {socket.gethostname().lower(), socket.getfqdn().lower()}


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


async def _answer(send: Send, status: int, text: str, more: dict[str, str] | None = None) -> None:
    body = text.encode()
    headers = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), **(more or {})}
    headers |= {"cache-control": "no-store"}
    await send({"type": "http.response.start", "status": status, "headers": _encoded(headers | HEADERS)})
    await send({"type": "http.response.body", "body": body})


GRACE_S = 1
"""Seconds for running requests at shutdown; the event streams of open pages never end by themselves."""
NEEDED = "the web interface needs: pip install 'atomrl[ui]'"


class WebServer:
    """The web interface for the runs of a folder.

    Args:
        root: the folder.
        listener: a listening socket.
        host: the address that it listens on.
        allow_launch: allow pages to start, stop and resume runs, which executes code.
        token: the secret of this server; None generates one.

    Raises:
        ImportError: the extra `ui` is not installed.
    """

    def __init__(
        self, root: Path, listener: socket.socket, host: str, allow_launch: bool = False, token: str | None = None
    ) -> None:
        with said_as(ImportError, NEEDED, ImportError):
            import uvicorn

            from atomrl.tools.ui.routes import Routes
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
        """Serve until Ctrl-C or SIGTERM.

        Args:
            ready: called with the URL to open.
        """

        def ended(*_: Any) -> None:
            """Ignore the signal: uvicorn handles it while it runs, and raises it again when it has ended."""

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, ended)
        self._routes.watcher.ending = lambda: self._server.should_exit
        # A request that is cancelled by the shutdown is no error, and its traceback should not be printed.
        logging.getLogger("uvicorn.error").addFilter(lambda _: not self._server.should_exit)
        ready(self.address)
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self._questions.close()


def listener_at(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        ValueError: the address cannot be used.
    """
    with said_as(ValueError, f"cannot listen at {host}:{port} (--host, --port)", OSError):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
