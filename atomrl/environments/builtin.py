"""Search-R1's environment: the model searches with tags and answers with one.

Jin et al., arXiv:2503.09516: the prompt, tags, limits, and the words of the observations are those of its code.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple
from urllib.error import HTTPError

from atomrl.common.errors import ServiceFault, may_pass
from atomrl.data.places import find
from atomrl.sandbox import Sandbox, check, run
from atomrl.sandbox.running import limits_of, shown
from atomrl.types import Reply, Sample

# --------------------------------------------------------------------------------------------------------------------
# What stands between tags in a text that a model wrote.


def first_block(text: str, tags: Iterable[str]) -> tuple[str, str]:
    """The first of these tags that is closed, and what stands in it; two empty texts where none is.

    Example:
        >>> first_block("<b>1 <a>2</a> <c>3</c>", ("a", "b", "c"))
        ('a', '2')
    """
    blocks = []
    for tag in tags:  # by find: a pattern would look for each tag's end up to the end of the text
        start = text.find(f"<{tag}>")
        begin = start + len(tag) + 2
        if start >= 0 and (end := text.find(f"</{tag}>", begin)) >= 0:
            blocks.append((start, tag, text[begin:end]))
    return min(blocks)[1:] if blocks else ("", "")


# --------------------------------------------------------------------------------------------------------------------
# The environment of the task `places`: a search by name, in this package's own table.


def places(sample: Sample, *, cost: float = 0.05, empty: bool = False) -> Generator[Reply | None, str, float]:
    """An episode: `<search>` is answered with the document of the place, if there is one of that very name.

    Its outcome is 0 where the first `<answer>` is not the ground truth, or where the model writes neither, and
    otherwise 1 less what the searches cost.

        outcome = right * (1 - cost * searches)

    Args:
        sample: a problem of the task.
        cost: of a search, as a share of the reward.
        empty: find nothing, which shows what is known without searching.
    """
    searches, text = 0, (yield None)
    while (action := action_of(text))[0] == "search":
        searches += 1
        text = yield Reply(text=find("" if empty else action[1]), label="search")
    kind, answer = action
    right = kind == "answer" and answer == sample.ground_truth
    return float(right) * (1.0 - cost * searches)


# --------------------------------------------------------------------------------------------------------------------
# An environment in which the model runs Python: programs between tags, answered with what they print.

INVALID_CODE = (
    "\nThis is no action. To run a program, write it between <{code}> and </{code}>; what it prints comes back. To "
    "answer, write the answer between <answer> and </answer>.\n"
)


def python(
    sample: Sample,
    *,
    tag: str = "python",
    output_tag: str = "output",
    max_calls: int = 4,
    max_characters: int = 1000,
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    sandbox: Sandbox = "bubblewrap",
) -> Generator[Reply | None, str, None]:
    """An episode: `<python>` is answered with what the program prints, in `<output>`; `<answer>` ends it; anything else
    is told how it is done.

    Each program runs in a fresh sandbox; nothing is kept between two. A program that raises, or has to be stopped, is
    answered with the error. The outcome is None: the answer is judged by a reward.

    Args:
        sample: the problem, whose prompt says how to run a program.
        tag, output_tag: of a program, and of what it prints.
        max_calls: after so many turns that were no answer comes a last one, in which nothing is run.
        max_characters: of a reply; the middle of a longer one is left out.
        timeout_s: seconds of the processor for a program; by the clock it may take twice as long.
        memory_mb: of a program.
        sandbox: `none` runs programs as you, with no safety at all.
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
            output = shown(result, limits, max_characters)
            text = yield Reply(text=f"\n<{output_tag}>\n{output}\n</{output_tag}>\n", label=label)
    return None


def refuse(sandbox: Sandbox = "bubblewrap", timeout_s: float = 5.0, memory_mb: int = 512, **_: object) -> None:
    """
    Raises:
        SandboxError: programs cannot be run in a sandbox here, and the args do not say that they need none.
        ValueError: the limits are none.
    """
    limits_of(timeout_s, memory_mb)
    check(sandbox)


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
    sample: Sample, *, url: str = URL, topk: int = 3, max_searches: int = 4, timeout_s: float = 20.0
) -> Generator[Reply | None, str, None]:
    """An episode: `<search>` is answered with documents, what is neither it nor `<answer>` with how it is done.

    Its outcome is None: the answer is judged by a reward (`search_r1_em`).

    Args:
        sample: the problem, whose prompt says how to search (`PROMPT`).
        url: of a service that answers `/retrieve` as Search-R1's does (`atomrl data serve`).
        topk: documents of a search.
        max_searches: after so many turns that were no answer comes a last one without a search.
        timeout_s: of a search.
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
    """`search` or `answer` and what stands between its tags; two empty texts where there is neither.

    Example:
        >>> action_of("<think>hm</think><search> who? </search>")
        ('search', 'who?')
    """
    kind, content = first_block(text, ("search", "answer"))
    return kind, content.strip()


def retrieve(url: str, query: str, topk: int, timeout_s: float) -> list[str]:
    """The contents of the documents that are nearest to a query, the best first.

    Raises:
        OSError, http.client.HTTPException: the service does not answer, or with what is no JSON, as a proxy in front of
            it does: it may later (`outages.is_away`).
        ServiceFault: it refuses, or answers something else than documents.
    """
    body = json.dumps({"queries": [query], "topk": topk, "return_scores": True}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    content, end = bytearray(), time.monotonic() + timeout_s
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            while part := answer.read1(1 << 16):
                content += part
                if len(content) > MAX_ANSWER_BYTES:
                    raise ServiceFault(f"{url}: the answer is longer than {MAX_ANSWER_BYTES} bytes")
                if time.monotonic() > end:
                    raise ConnectionError(f"{url} has not answered within {timeout_s:g} s")
    except HTTPError as error:
        if may_pass(error.code):
            error.msg = f"{url}: {error.msg}"
            raise
        raise ServiceFault(f"{url}: HTTP {error.code}: {error.read(200).decode(errors='replace')}") from None
    except OSError as error:
        raise ConnectionError(f"{url}: {getattr(error, 'reason', error)}") from error
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        shown = bytes(content[:200]).decode(errors="replace")
        raise ConnectionError(f"{url}: the answer is no JSON: {shown!r}") from None
    try:
        if not isinstance(documents := found["result"][0], list):
            raise TypeError("no list")
        return [contents_of(item) for item in documents]
    except (LookupError, TypeError):
        message = f"{url} answered {json.dumps(found)[:200]}, and no list of documents with a text as `contents`"
        raise ServiceFault(message) from None


def contents_of(item: Any) -> str:
    """The text of a document, with or without a score beside it.

    Raises:
        LookupError, TypeError: it has none.
    """
    document = item["document"] if isinstance(item, dict) and "document" in item else item
    if not isinstance(contents := document["contents"], str):
        raise TypeError(f"{contents!r} is no text")
    return contents


def information(documents: list[str]) -> str:
    """Documents as the model sees them; the first line of each is its title.

    Example:
        >>> information(['"Paris"\\nCapital of France.'])
        '\\n\\n<information>Doc 1(Title: "Paris") Capital of France.</information>\\n\\n'
    """
    shown = ""
    for number, contents in enumerate(documents, 1):
        title, _, text = contents.partition("\n")
        shown += f"Doc {number}(Title: {title}) {text}\n"
    return f"\n\n<information>{shown.strip()}</information>\n\n"


# --------------------------------------------------------------------------------------------------------------------
# The built-in environments by name.


class BuiltIn(NamedTuple):
    """What is known of an environment before it is imported."""

    path: str
    """Dotted; imported in a worker, or when a config is checked."""
    package: str = ""
    """What to install, of one that needs another package; that one's module has the environment's name."""
    check: str = ""
    """A function that is called with the `args` when a config is checked: it raises a RuntimeError where the
    environment cannot be played on this machine, a ValueError where the `args` are wrong."""
    begins: bool = False
    """It speaks before the model does."""
    scored_by: str = ""
    """Of one without an outcome: a reward that judges the answer."""


_ADAPTERS = "atomrl.environments.adapters"
ENVIRONMENTS = {
    "python": BuiltIn(
        "atomrl.environments.builtin.python", check="atomrl.environments.builtin.refuse", scored_by="exact_match"
    ),
    "places": BuiltIn("atomrl.environments.builtin.places"),
    "search_r1": BuiltIn("atomrl.environments.builtin.search_r1", scored_by="search_r1_em"),
    "tools": BuiltIn("atomrl.environments.tools.call_tools"),
    "gymnasium": BuiltIn(f"{_ADAPTERS}.gymnasium", "gymnasium", f"{_ADAPTERS}.refuse_gymnasium", begins=True),
    "textarena": BuiltIn(f"{_ADAPTERS}.textarena", "textarena", begins=True),
    "textworld": BuiltIn(f"{_ADAPTERS}.textworld", "textworld", begins=True),
    "skyrl_gym": BuiltIn(f"{_ADAPTERS}.skyrl_gym", "skyrl-gym"),
    "openenv": BuiltIn(f"{_ADAPTERS}.openenv", "openenv-core", begins=True),
    "reasoning_gym": BuiltIn(f"{_ADAPTERS}.reasoning_gym_retries", "reasoning-gym"),
}
