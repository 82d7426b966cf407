"""The built-in environments: the registry, and those of this package (`places`, `python`, `search_r1`)."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from contextlib import suppress
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.error import HTTPError

from atomrl.common.outages import ServiceFault, is_temporary
from atomrl.data.tasks.search import find
from atomrl.sandbox import Sandbox, check, run
from atomrl.sandbox.running import format_result, limits_of
from atomrl.types import Problem, Reply

# --------------------------------------------------------------------------------------------------------------------
# The registry.


class BuiltIn(NamedTuple):
    """Describes an environment without importing it."""

    path: str
    """Dotted path of the function; imported in a worker, or when a config is checked."""
    package: str = ""
    """Package to install, for an environment that needs one; its module has the environment's name."""
    check: str = ""
    """Dotted path of a function that validates the `args` of a config. It raises a RuntimeError if the environment
    cannot be played on this machine, and a ValueError if the `args` are invalid."""
    begins: bool = False
    """The environment has an opening before the model's first turn."""
    scored_by: str = ""
    """Reward that scores the answer, for an environment without an outcome."""
    shows_tools: bool = False
    """Its argument `schemas` are the tools that are shown in the prompt."""
    complete: str = ""
    """Dotted path of a function that returns the `args` of an episode, made from those of a config, the tokenizer and
    the variables of its chat template. It raises a ValueError."""
    roles: str = ""
    """Dotted path of a function that returns the roles of the replies with these `args`, for an environment without a
    parameter `role`."""
    check_row: str = ""
    """Dotted path of a function of a problem and the `args`. It raises a ValueError if an episode cannot begin."""


_ADAPTERS, _OPENRLHF, _VERL = (f"atomrl.environments.{name}" for name in ("adapters", "openrlhf", "verl"))
ENVIRONMENTS = {
    "python": BuiltIn(
        "atomrl.environments.builtin.python", check="atomrl.environments.builtin.check_python", scored_by="exact_match"
    ),
    "places": BuiltIn("atomrl.environments.builtin.places"),
    "search_r1": BuiltIn("atomrl.environments.builtin.search_r1", scored_by="search_r1_em"),
    "tools": BuiltIn("atomrl.environments.tools.call_tools", shows_tools=True),
    "verl": BuiltIn(
        f"{_VERL}.verl",
        check=f"{_VERL}.check",
        scored_by="gsm8k",
        shows_tools=True,
        complete=f"{_VERL}.complete",
        roles=f"{_VERL}.roles",
        check_row=f"{_VERL}.check_row",
    ),
    "gymnasium": BuiltIn(f"{_ADAPTERS}.gymnasium", "gymnasium", f"{_ADAPTERS}.check_gymnasium", begins=True),
    "textarena": BuiltIn(f"{_ADAPTERS}.textarena", "textarena", begins=True),
    "textworld": BuiltIn(f"{_ADAPTERS}.textworld", "textworld", begins=True),
    "skyrl_gym": BuiltIn(f"{_ADAPTERS}.skyrl_gym", "skyrl-gym"),
    "openrlhf_agent": BuiltIn(f"{_OPENRLHF}.openrlhf_agent", check=f"{_OPENRLHF}.check_openrlhf_agent"),
    "openenv": BuiltIn(f"{_ADAPTERS}.openenv", "openenv-core", begins=True),
    "reasoning_gym": BuiltIn(f"{_ADAPTERS}.reasoning_gym_retries", "reasoning-gym"),
}

# --------------------------------------------------------------------------------------------------------------------
# Actions between tags.


def first_block(text: str, tags: Iterable[str]) -> tuple[str, str]:
    """Return the first closed block of one of these tags, as (tag, content); ("", "") if there is none.

    Example:
        >>> first_block("<b>1 <a>2</a> <c>3</c>", ("a", "b", "c"))
        ('a', '2')
    """
    blocks = []
    for tag in tags:  # with `find`, as a regular expression could scan to the end of the text for each opening tag
        start = text.find(f"<{tag}>")
        begin = start + len(tag) + 2
        if start >= 0 and (end := text.find(f"</{tag}>", begin)) >= 0:
            blocks.append((start, tag, text[begin:end]))
    return min(blocks)[1:] if blocks else ("", "")


# --------------------------------------------------------------------------------------------------------------------
# The task `places`: search for places by name.


def places(problem: Problem, *, cost: float = 0.05, empty: bool = False) -> Generator[Reply | None, str, float]:
    """Answer `<search>` with the document of the place of exactly that name.

    The outcome is 1 less the cost of the searches if the first `<answer>` is the ground truth, otherwise 0; a turn
    with neither tag ends the episode with 0.

        outcome = correct * (1 - cost * searches)

    Args:
        problem: one of the task `places`.
        cost: of each search, as a share of the reward.
        empty: return no documents, to measure what the model knows without them.
    """
    searches, text = 0, (yield None)
    while (action := action_of(text))[0] == "search":
        searches += 1
        text = yield Reply(text=find("" if empty else action[1]), label="search")
    kind, answer = action
    correct = kind == "answer" and answer == problem.ground_truth
    return float(correct) * (1.0 - cost * searches)


# --------------------------------------------------------------------------------------------------------------------
# Python programs between tags.

INVALID_CODE = (
    "\nThis is not an action. To run a program, write it between <{code}> and </{code}>; what it prints comes back. To "
    "answer, write the answer between <answer> and </answer>.\n"
)


def python(
    problem: Problem,
    *,
    tag: str = "python",
    output_tag: str = "output",
    max_calls: int = 4,
    max_characters: int = 1000,
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    sandbox: Sandbox = "bubblewrap",
) -> Generator[Reply | None, str, None]:
    """Run the program in `<python>` and answer with its output in `<output>`. `<answer>` ends the episode; other turns
    are answered with instructions.

    Each program runs in a fresh sandbox, without state from earlier ones. If it fails or is stopped, the reply contains
    the error. The outcome is None: a reward scores the answer.

    Args:
        problem: its prompt explains how to run a program.
        tag, output_tag: tags of programs and of their output.
        max_calls: turns without an answer after which the last turn follows, in which no program is run.
        max_characters: of a reply; the middle of a longer one is left out.
        timeout_s: CPU seconds of a program; its wall-clock limit is twice as long.
        memory_mb: memory limit of a program.
        sandbox: `none` runs programs with your own rights and no protection at all.
    """
    limits = limits_of(timeout_s, memory_mb)
    text = yield None
    for _ in range(max_calls):
        kind, content = first_block(text, (tag, "answer"))
        if not kind:
            text = yield Reply(text=INVALID_CODE.format(code=tag), label="invalid")
        elif kind == "answer":
            return None
        else:
            result = run(content.strip("\n"), limits=limits, sandbox=sandbox)
            label = "timeout" if result.ended == "timeout" else "python" if result.ok else "error"
            output = format_result(result, limits, max_characters)
            text = yield Reply(text=f"\n<{output_tag}>\n{output}\n</{output_tag}>\n", label=label)
    return None


def check_python(sandbox: Sandbox = "bubblewrap", timeout_s: float = 5.0, memory_mb: int = 512, **_: object) -> None:
    """Check the `args` of `python` against this machine.

    Raises:
        SandboxError: the sandbox cannot be used here.
        ValueError: a limit is invalid.
    """
    limits_of(timeout_s, memory_mb)
    check(sandbox)


# --------------------------------------------------------------------------------------------------------------------
# Search-R1: search with tags in a retrieval service. Jin et al., arXiv:2503.09516. The prompt, tags,
# limits and texts of the replies are those of its code.

MAX_ANSWER_BYTES = 1 << 25
URL = "http://127.0.0.1:8000/retrieve"
STOP = ("</search>", "</answer>")
INVALID_SEARCH = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. You can search as "
    "many times as your want. If you find no further external knowledge needed, you can directly provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. "
    "Question: {question}\n"
)


def search_r1(
    problem: Problem, *, url: str = URL, topk: int = 3, max_searches: int = 4, timeout_s: float = 20.0
) -> Generator[Reply | None, str, None]:
    """Answer `<search>` with documents, and turns without `<search>` or `<answer>` with instructions.

    The outcome is None: a reward scores the answer (`search_r1_em`).

    Args:
        problem: its prompt explains how to search (`PROMPT`).
        url: of a service with Search-R1's `/retrieve` endpoint (`atomrl data serve`).
        topk: documents per search.
        max_searches: turns without an answer after which the last turn follows, without a search.
        timeout_s: time limit of a search.
    """
    text = yield None
    for _ in range(max_searches):
        kind, content = action_of(text)
        if kind == "answer":
            return None
        if kind == "search":
            text = yield Reply(text=information(retrieve(url, content, topk, timeout_s)), label="search")
        else:
            text = yield Reply(text=INVALID_SEARCH, label="invalid")
    return None


def action_of(text: str) -> tuple[str, str]:
    """Return ("search" or "answer", content of the tag); ("", "") if there is neither.

    Example:
        >>> action_of("<think>hm</think><search> who? </search>")
        ('search', 'who?')
    """
    kind, content = first_block(text, ("search", "answer"))
    return kind, content.strip()


def retrieve(url: str, query: str, topk: int, timeout_s: float) -> list[str]:
    """Query a retrieval service. Return the contents of the best documents, best first.

    Raises:
        OSError, http.client.HTTPException: the service does not answer, or not in JSON (such as a proxy's error page);
            it may recover (`outages.is_away`).
        ServiceFault: it refuses the request, or its answer has no documents.
    """
    body = json.dumps({"queries": [query], "topk": topk, "return_scores": True}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    exchange = _Exchange(timeout_s)
    threading.Thread(target=exchange.run, args=(request,), name="retrieve", daemon=True).start()
    try:
        content = exchange.answer.result(timeout_s)
    except TimeoutError:
        exchange.give_up()
        raise ConnectionError(f"{url} has not answered within {timeout_s:g} s") from None
    except HTTPError as error:
        if is_temporary(error.code):
            error.msg = f"{url}: {error.msg}"
            raise
        raise ServiceFault(f"{url}: HTTP {error.code}: {error.msg}") from None
    except OSError as error:
        raise ConnectionError(f"{url}: {getattr(error, 'reason', error)}") from error
    try:
        reply = json.loads(content)
    except (ValueError, RecursionError):
        start = bytes(content[:200]).decode(errors="replace")
        raise ConnectionError(f"{url}: the answer is not JSON: {start!r}") from None
    try:
        if not isinstance(documents := reply["result"][0], list):
            raise TypeError("no list")
        return [contents_of(item) for item in documents]
    except (LookupError, TypeError):
        message = f"{url} answered {json.dumps(reply)[:200]}, not a list of documents with a text as `contents`"
        raise ServiceFault(message) from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: they would drop the queries, and another host was not configured and must not get them."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: str) -> Any:
        raise ServiceFault(f"{req.full_url} redirects to {newurl}: set `url` to it if it is yours")


class _Exchange(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """A request and its answer, which can be given up at any time.

    The timeout of `urlopen` is per read: a server that sends a byte now and then, of a header or an error's body say,
    would never reach it.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self.answer: Future[bytes] = Future()
        """The content, or the error; the message of an `HTTPError` is the beginning of its body."""
        self._timeout_s, self._given_up = timeout_s, False
        self._sockets: list[socket.socket] = []

    def run(self, request: urllib.request.Request) -> None:
        """Send the request and set `answer`."""
        url, content = request.full_url, bytearray()
        try:
            with urllib.request.build_opener(_NoRedirect, self).open(request, timeout=self._timeout_s) as answer:
                while part := answer.read1(1 << 16):
                    content += part
                    if len(content) > MAX_ANSWER_BYTES:
                        raise ServiceFault(f"{url}: the answer is longer than {MAX_ANSWER_BYTES} bytes")
            self.answer.set_result(bytes(content))
        except HTTPError as error:
            if not is_temporary(error.code):
                with suppress(OSError, HTTPException):
                    error.msg = error.read(200).decode(errors="replace")
            self.answer.set_exception(error)
        except BaseException as error:  # the caller raises it
            self.answer.set_exception(error)
        finally:
            for connected in self._sockets:
                connected.close()

    def give_up(self) -> None:
        """End the exchange: `run` returns soon."""
        self._given_up = True
        for connected in [*self._sockets]:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def do_open(self, http_class: Any, req: Any, **settings: Any) -> Any:
        """Open a connection whose socket `give_up` can shut down."""

        def connection(host: str, **named: Any) -> Any:
            made = http_class(host, **named)
            made._create_connection = self._connect
            return made

        return super().do_open(connection, req, **settings)

    def _connect(self, *address: Any) -> socket.socket:
        made = socket.create_connection(*address)
        self._sockets.append(made.dup())  # TLS and the answer take `made` over
        if self._given_up:
            self.give_up()
        return made


def contents_of(item: Any) -> str:
    """Return the text of a document, which may be wrapped with a score.

    Raises:
        LookupError, TypeError: it has no text.
    """
    document = item["document"] if isinstance(item, dict) and "document" in item else item
    if not isinstance(contents := document["contents"], str):
        raise TypeError(f"{contents!r} is not text")
    return contents


def information(documents: list[str]) -> str:
    """Format documents for the model; the first line of each is its title.

    Example:
        >>> information(['"Paris"\\nCapital of France.'])
        '\\n\\n<information>Doc 1(Title: "Paris") Capital of France.</information>\\n\\n'
    """
    lines = ""
    for number, contents in enumerate(documents, 1):
        title, _, text = contents.partition("\n")
        lines += f"Doc {number}(Title: {title}) {text}\n"
    return f"\n\n<information>{lines.strip()}</information>\n\n"
