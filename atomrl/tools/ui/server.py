"""The server."""

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
# Who is answered: only pages of this server itself, opened with its token.

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

POST_HEADER = "x-atomrl"
"""A header that a form of another site cannot send."""
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
    """An ASGI application that lets through to another what may ask, and sets headers on what is answered.

    - The host must be this machine's (a page whose name was made to point here is refused): 400.
    - A request that another site makes is refused: 403. (Opening the address with the token from a link is not.)
    - Without the token, in a cookie that scripts cannot read: 401. `/?token=...` sets it.
    - What changes something is JSON with the header `x-atomrl`: 403.

    Args:
        application: is asked in turn.
        token: opens the pages.
        host: the address that the server listens on; beyond loopback, the names of this machine are hosts too.
        cookie: the cookie's name; servers on several ports of a machine share cookies.
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
        try:  # an address cannot be made to point elsewhere
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback if self.loopback else True

    def _has_token(self, headers: dict[str, str]) -> bool:
        """By hand: `SimpleCookie` drops all cookies for an odd one of another server of this machine."""
        pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        given = (value for name, _, value in pairs if name == self.cookie)
        return any(secrets.compare_digest(value.encode(), self.token.encode()) for value in given)


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
        (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def machine_names() -> set[str]:
    """What this machine calls itself."""
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
