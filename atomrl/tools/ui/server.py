"""The web server: access control (`Guard`) and `WebServer`, which serves the runs of a folder."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from atomrl.common.errors import reraise_as
from atomrl.tools.ui.catalog import Catalog, Stamp
from atomrl.tools.ui.new_run import Launcher

# --------------------------------------------------------------------------------------------------------------------
# Server-sent events that notify open pages of changed runs, and the client of the process that knows configs.

POLL_S = 0.25
ENDED_S = 2.0
"""Polling interval of ended runs, which can only be resumed or removed."""
SILENT_S = 60.0
"""A run without a summary that was written to within this time is polled as a running one, even without a lock: it may
be on another machine, or of a version without locks."""
HEARTBEAT_S = 10.0
MAX_STREAMS = 64


def written(stamp: Stamp) -> float:
    """Return when a run's files were last written, by its stamp: seconds since 1970."""
    return max((file[-1] for file in stamp[:-1] if file), default=0) / 1e9


class Watcher:
    """Polls the runs while pages are open, once for all of them.

    Args:
        catalog: the runs.

    Attributes:
        streams: number of open streams.
        ending: returns True when the server shuts down, which ends the streams.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog, self.streams = catalog, 0
        self.ending: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()
        self._stamps: dict[str, Stamp] = {}
        self._polled = self._polled_all = -ENDED_S

    def stamps(self) -> dict[str, Stamp]:
        """Return the stamp of each run by id; refreshed at most four times a second."""
        with self._lock:
            now = time.monotonic()
            if now - self._polled < 0.8 * POLL_S:
                return self._stamps
            everything = now - self._polled_all >= ENDED_S
            stamps = {}
            for entry in self.catalog.entries():
                old = self._stamps.get(entry.id)
                running = old is None or old[-1] or (old[1] is None and time.time() - written(old) < SILENT_S)
                stamps[entry.id] = entry.current_stamp() if everything or old is None or running else old
            self._stamps, self._polled = stamps, now
            if everything:
                self._polled_all = now
            return stamps

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the events `changed` and `gone` with ids of runs; regular comments keep the connection open."""
        self.streams += 1
        try:
            seen = await asyncio.to_thread(self.stamps)
            yield b"retry: 1000\nevent: ready\ndata: []\n\n"
            silent = time.monotonic()
            while not self.ending():
                await asyncio.sleep(POLL_S)
                now = await asyncio.to_thread(self.stamps)
                if now is seen:
                    continue
                changed = [run for run, stamp in now.items() if seen.get(run) != stamp]
                removed = [run for run in seen if run not in now]
                seen = now
                for name, runs in (("changed", changed), ("gone", removed)):
                    if runs:
                        yield f"event: {name}\ndata: {json.dumps(runs)}\n\n".encode()
                        silent = time.monotonic()
                if time.monotonic() - silent > HEARTBEAT_S:
                    yield b": nothing new\n\n"
                    silent = time.monotonic()
        finally:
            self.streams -= 1


# --------------------------------------------------------------------------------------------------------------------
# Questions that need the config schema, and with it torch: another process answers them, and ends when it is idle.

IDLE_S = 120.0
CACHED = 64


class Questions:
    """Client of the process `answers.py`, which is started on demand."""

    def __init__(self) -> None:
        self._command = [sys.executable, "-P", "-m", "atomrl.tools.ui.answers"]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._timer: threading.Timer | None = None
        self._cache: dict[str, dict[str, Any]] = {}

    def describe(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Describe a config (`answers.describe`): `kind`, `changed` (key -> default and value), `equation`, ...; only
        `errors` if this version does not accept it."""
        question = json.dumps({"config": config}, default=str)
        if question not in self._cache:
            answer = self._ask(question)
            if "failed" in answer:
                return answer
            if len(self._cache) >= CACHED:
                self._cache.clear()
            self._cache[question] = answer
        return self._cache[question]

    def check(self, text: str) -> dict[str, Any]:
        """Describe a config's YAML text; `errors` has a line for each mistake. `own` is the config in AtomRL's layout,
        if the text has the six-section layout."""
        return self._ask(json.dumps({"yaml": text}))

    def advantages(self, config: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
        """Recompute advantages (`answers.advantages`); only `errors` if this version does not accept the config."""
        return self._ask(json.dumps({"config": config, "step": step}, default=str))

    def token(self, config: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
        """Explain a token's loss (`answers.token`); only `errors` if this version does not accept the config."""
        return self._ask(json.dumps({"config": config, "token": row}, default=str))

    def close(self) -> None:
        """End the process; pending questions get the answer `failed`."""
        if self._process is not None:
            self._process.kill()
        with self._lock:
            self._end()

    def _ask(self, question: str) -> dict[str, Any]:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            try:
                if self._process is None:
                    self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                assert self._process.stdin is not None and self._process.stdout is not None
                self._process.stdin.write(question.encode() + b"\n")
                self._process.stdin.flush()
                answer: dict[str, Any] = json.loads(self._process.stdout.readline())
            except (OSError, ValueError) as error:
                self._end()
                return {"failed": f"the config process has ended: {error}"}
            self._timer = threading.Timer(IDLE_S, self.close)
            self._timer.daemon = True
            self._timer.start()
            return answer

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


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
                refused = 401, "the token is not valid for this server"
            else:
                cookie = f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"
                await _answer(send, 303, "", {"location": "/", "set-cookie": cookie})
                return
        if refused is None and not self._has_token(headers):
            refused = 401, "open the URL that `atomrl ui` printed: it contains the token of this server"
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
            return 400, "wrong host name: use localhost or the server's IP address"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return 403, "requests from other sites are not allowed"
        site = headers.get("sec-fetch-site", "none")
        is_link = (
            opening and headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        )
        if site not in ("same-origin", "none") and not is_link:
            return 403, "requests from other sites are not allowed"
        if scope["method"] not in ("GET", "HEAD"):
            if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
                return 403, "the content type must be application/json"
            if POST_HEADER not in headers:
                return 403, f"the header {POST_HEADER} is required"
            length = headers.get("content-length", "")
            if not (length.isascii() and length.isdigit()) or int(length) > MAX_BODY_BYTES:
                return 413, f"the body may have at most {MAX_BODY_BYTES} bytes, with a Content-Length"
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
        with reraise_as(ImportError, NEEDED, ImportError):
            import uvicorn

            from atomrl.tools.ui.routes import Routes
        self.token = token or secrets.token_urlsafe(24)
        self._listener, self._questions = listener, Questions()
        port = listener.getsockname()[1]
        routes = Routes(Catalog(root), self._questions, Launcher(root) if allow_launch else None)
        guard: Any = Guard(routes.application(), self.token, host, cookie=f"atomrl_ui_{port}")
        name = "localhost" if is_loopback(host) else socket.getfqdn() if host in ("0.0.0.0", "::") else host
        self.address = f"http://{f'[{name}]' if ':' in name else name}:{port}/?token={self.token}"
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
        # A request that is cancelled by the shutdown is not an error, and its traceback should not be printed.
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
    with reraise_as(ValueError, f"cannot listen on {host}:{port} (--host, --port)", OSError):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
