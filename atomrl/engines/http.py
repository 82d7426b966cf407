"""`Client`: speaks to rollout servers by HTTP; and what there is to say of such a server."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from atomrl.common.errors import Outage, may_pass
from atomrl.common.files import TemporaryFolder
from atomrl.common.processes import EventLoopThread, without_launcher
from atomrl.engines.requests import DIVERGED, RequestState
from atomrl.types import FinishReason
from atomrl.weight_sync.channels import ServerGroup

_RETRY_S = 0.25
_POOLS = 32


@dataclass(frozen=True)
class HttpAnswer:
    """What a server drew for a request."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[Mapping[str, Any]]
    """`version`, `start`, `end`: which tokens were drawn by the weights of which version, as `label` says it."""
    reason: str
    """`stop`, `length` or `abort`."""
    candidates: Sequence[Sequence[int]] = ()
    """Of each token, what it was drawn from, the likeliest first."""


class ServerGone(Exception):
    """A server could not be reached, or failed; it may come back.

    Args:
        away: it does not answer; otherwise it has done something else than it was asked for.
    """

    def __init__(self, message: str, away: bool = False) -> None:
        super().__init__(message)
        self.away = away


@dataclass(eq=False)
class Server:
    """A server, and what it has to do.

    Args:
        kind: of the engine, for messages.
        slots: how many requests it is sent at once.
        wait_s: how long it is waited for, where it was not started here and is away.
        process: where it was.
    """

    kind: str
    url: str
    slots: asyncio.Semaphore
    wait_s: float = 600.0
    process: ServerProcess | None = None
    adapters: str | None = None
    """What the adapters that it has are called there."""
    held: dict[str, RequestState] = field(default_factory=dict)
    wire_ids: dict[str, str] = field(default_factory=dict)
    """What its requests are called there: each attempt has a name of its own."""
    kept: set[str] = field(default_factory=set)
    """Ids of finished requests whose cache it may have kept."""
    outage: Outage = field(init=False)
    """Of one that was not started here."""
    restarts: int = 0
    """Of one that was, since it last finished a request."""
    seeded: bool = True
    """As far as is known, its completions depend on their seeds."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What it says of itself."""
    group: ServerGroup | None = None
    """In which it is sent weights."""
    life: int = 0
    """How often it has been found well again."""
    under_way: int = 0
    """Requests that it has not answered."""
    change: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its weights change or it is repaired: no request may reach it with half of them."""

    def __post_init__(self) -> None:
        self.outage = Outage(self.name, self.wait_s, "rollout.server_timeout_s")

    @property
    def last_words(self) -> str:
        """The end of what a server that was started here has written; nothing of others."""
        return f"; its last words:\n{self.process.tail()}" if self.process else ""

    @property
    def name(self) -> str:
        """For messages."""
        started = f"started at {self.url} (pid {self.process.pid})" if self.process else f"at {self.url}"
        return f"{self.kind} {started}"

    @property
    def load(self) -> int:
        """Tokens that it may have to draw."""
        return sum(state.request.sampling.max_completion_tokens for state in self.held.values())

    def holds(self, state: RequestState) -> bool:
        """Whether it is to draw this, which has not been given up."""
        return self.held.get(state.request.request_id) is state

    def forget(self, state: RequestState, finished: bool = False) -> None:
        """It has drawn this, if it is one of its own, or need not any more."""
        if self.holds(state):
            name = state.request.request_id
            del self.held[name]
            self.wire_ids.pop(name, None)
            if finished and state.request.keep_cache:
                self.kept.add(name)


class Client:
    """Speaks to servers, in a thread of its own with an event loop.

    Args:
        timeout_s: within which a server must answer.
    """

    def __init__(self, timeout_s: float) -> None:
        import httpx

        self.timeout_s, self.errors = timeout_s, httpx
        verify = httpx.create_ssl_context(trust_env=False)
        # A pool looks through all its connections at each request: several pools, so that thousands at once cost little
        self.pools = [
            httpx.AsyncClient(
                timeout=httpx.Timeout(timeout_s, pool=None),
                limits=httpx.Limits(max_connections=None),
                trust_env=False,  # a proxy has no place between a trainer and its engine
                verify=verify,
            )
            for _ in range(_POOLS)
        ]
        self.turns = cycle(self.pools)
        self.loop = EventLoopThread("rollout servers")

    def start(self, task: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Have a task done."""
        return self.loop.start(task)

    def run(self, task: Coroutine[Any, Any, Any]) -> Any:
        """What a task gives, once it is done."""
        return self.start(task).result()

    async def healthy(self, server: Server, path: str) -> bool:
        """Whether a server says that it is well."""
        try:
            found = await next(self.turns).get(server.url + path, timeout=min(10.0, self.timeout_s))
        except self.errors.HTTPError:
            return False
        return found.status_code == 200

    async def until_up(self, server: Server, path: str, limit_s: float) -> None:
        """Wait until a server says that it is well.

        Raises:
            RuntimeError: it was started here, and has ended.
            TimeoutError: it is not, in time.
        """
        end = time.monotonic() + limit_s
        while not await self.healthy(server, path):
            if server.process is not None and (code := server.process.ended()) is not None:
                raise RuntimeError(f"{server.name} ended with status {code}{server.last_words}")
            if time.monotonic() > end:
                raise TimeoutError(f"{server.name} was not up within {limit_s:g} s")
            await asyncio.sleep(_RETRY_S)

    async def post(self, server: Server, path: str, body: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """A server's answer to a request, from JSON.

        Raises:
            TimeoutError: it did not answer in time.
            RuntimeError: it refuses.
            ServerGone: it cannot be reached, or has failed.
        """
        return await self._ask(server, "POST", path, json=body, **options)

    async def get(self, server: Server, path: str, **options: Any) -> Any:
        """What a server says of itself; raises as `post`."""
        return await self._ask(server, "GET", path, **options)

    async def _ask(self, server: Server, method: str, path: str, **options: Any) -> Any:
        try:
            found = await next(self.turns).request(method, server.url + path, **options)
        except self.errors.TimeoutException:
            raise TimeoutError(f"{server.name} has not answered {path} within {self.timeout_s:g} s") from None
        except self.errors.TransportError as error:
            raise ServerGone(f"{path}: {type(error).__name__} {error}", away=True) from None
        if may_pass(found.status_code):
            raise ServerGone(f"{path}: status {found.status_code}, {found.text[:300]}", away=True)
        if found.status_code != 200:
            raise RuntimeError(f"{server.name} refused {path} with status {found.status_code}: {found.text[:500]}")
        try:
            return found.json()
        except ValueError:  # some say no more than that it is done
            if "<html" in found.text[:1000].lower():  # of a proxy in front of it
                raise ServerGone(f"{path}: the answer is a page: {found.text[:200]!r}", away=True) from None
            return None

    def close(self) -> None:
        """Give up what is under way, and end the thread."""
        self.loop.close(self._close_pools())

    async def _close_pools(self) -> None:
        for pool in self.pools:
            await pool.aclose()


def logprob_of(sent: float | None) -> float:
    """A log-prob as servers send it: JSON has no NaN, for which SGLang sends nothing and vLLM -9999."""
    return math.nan if sent is None or sent <= -9999.0 else float(sent)


def checked(answer: HttpAnswer, server: Server, mark: str) -> HttpAnswer:
    """The answer, unless it cannot be trained on.

    Args:
        mark: of the weights that this engine has given the server.

    Raises:
        ServerGone: the server has started again since it was given weights: the label of their version is gone.
        RuntimeError: somebody else gives it weights, it does not say which weights drew which token, or the completion
            ended in no known way.
    """
    for label in {str(span["version"]) for span in answer.spans}:
        _, others, found = label.partition("@")
        if others and found != mark:
            raise RuntimeError(
                f"{server.name} drew with weights that another run has given it meanwhile (version {label}): each run "
                "needs servers of its own"
            )
        if not others:
            raise ServerGone(f"it drew with weights of version {label}, which it starts with")
    ends = [0, *(span["end"] for span in answer.spans)]
    if [span["start"] for span in answer.spans] != ends[:-1] or ends[-1] != len(answer.token_ids):
        raise RuntimeError(f"{server.name} does not say which weights drew each of {len(answer.token_ids)} tokens")
    if answer.reason not in ("stop", "length", "abort"):
        raise RuntimeError(f"{server.name} ended a completion with {answer.reason!r}")
    return answer


def take_answer(state: RequestState, answer: HttpAnswer | Exception) -> FinishReason:
    """Keep what a server drew for a request, or raise what went wrong; how the completion ended."""
    if isinstance(answer, Exception):
        raise answer
    state.token_ids, state.logprobs = list(answer.token_ids), list(answer.logprobs)
    state.versions = [
        (span["start"], int(span["version"].partition("@")[0])) for span in answer.spans if span["end"] > span["start"]
    ]
    for candidates in answer.candidates:
        state.candidate_counts.append(len(candidates))
        state.candidate_ids.extend(candidates)
    if state.diverged():
        raise ValueError(DIVERGED)
    wanted = state.request.sampling.max_completion_tokens
    if answer.reason == "length" and len(state.token_ids) < wanted:
        raise RuntimeError(
            f"a completion was cut at {len(state.token_ids)} of {wanted} tokens: the "
            "server's context is shorter than the model's, or its cache has no room"
        )
    return "length" if answer.reason == "length" else "stop"


# --------------------------------------------------------------------------------------------------------------------
# `ServerProcess`: a server that is started here, on 127.0.0.1, and ends with this process.

_GRACE_S = 10.0
_TAIL_LINES = 15
# Stands between us and the server, which may not listen while it starts, nor its own children ever. Linux tells it when
# the process that asked for it has gone, also when that was killed; then all of the group go, with the shared memory
# that they have mapped: what is killed cannot remove its name.
_LAUNCH = """
import contextlib, ctypes, os, signal, subprocess, sys, time
def shared():
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.getpgid(int(pid)) == os.getpgrp():
                with open(f"/proc/{pid}/maps") as maps:
                    found |= {line.split()[-1] for line in maps if " /dev/shm/" in line and "(deleted)" not in line}
    return found
def end(*_):
    names = shared() if sys.platform == "linux" else ()
    server.terminate()
    deadline = time.monotonic() + 2
    with contextlib.suppress(ChildProcessError):  # not server.wait, in the middle of which this is called
        while time.monotonic() < deadline and not os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            time.sleep(0.02)
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name)
    os.killpg(0, signal.SIGKILL)
server = subprocess.Popen(sys.argv[2:])
signal.signal(signal.SIGTERM, end)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    end()
sys.exit(server.wait() % 256)
"""


class ServerProcess:
    """A server in a process group of its own; what it says goes into a file.

    It is started by the thread that calls, and ends with that thread.

    Args:
        command: of a port: what to run, and its environment beside ours.
    """

    def __init__(self, command: Callable[[int], tuple[Sequence[str], Mapping[str, str]]]) -> None:
        port, self._port = reserved_port()
        self.url = f"http://127.0.0.1:{port}"
        words, environment = command(port)
        self.folder = TemporaryFolder("serving", short=True)  # for what it leaves behind, too
        self.output = self.folder.path / "output.txt"
        launcher = [sys.executable, "-c", _LAUNCH, str(os.getpid()), *words]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                launcher,
                env=without_launcher() | {"TMPDIR": str(self.folder.path)} | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the run, which ends it
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def ended(self) -> int | None:
        """Its exit status; None while it runs."""
        return self.process.poll()

    def tail(self) -> str:
        """The last lines that it has written."""
        lines = self.output.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(line[:500] for line in lines[-_TAIL_LINES:])

    def end(self) -> None:
        """End it and all that it has started."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._port.close()
        self.folder.close()


def reserved_port() -> tuple[int, socket.socket]:
    """A port of this machine that nothing listens on, and what keeps it: on Linux nobody else gets it until that is
    closed, but who asks for it by number and for reuse, as servers do. (A server binds its own seconds later, when
    another run's may have found it free.)"""
    keeper = socket.socket()
    keeper.bind(("127.0.0.1", 0))
    port = int(keeper.getsockname()[1])
    if sys.platform == "linux":
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    else:
        keeper.close()
    return port, keeper
