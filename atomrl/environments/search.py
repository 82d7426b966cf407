"""Search-R1's environment: the model searches with tags and answers with one.

Jin et al., arXiv:2503.09516: the prompt, tags, limits, and the words of the observations are those of its code.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Generator
from typing import Any
from urllib.error import HTTPError

from atomrl.environments.tags import first_block
from atomrl.episodes import Reply
from atomrl.outages import ServiceFault, may_pass
from atomrl.types import Sample

MAX_ANSWER_BYTES = 1 << 25
URL = "http://127.0.0.1:8000/retrieve"
STOP = ("</search>", "</answer>")
INVALID = (
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
            text = yield Reply(text=INVALID, label="invalid")
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
