"""Search-R1's environment: the model searches with tags and answers with one.

Jin et al., arXiv:2503.09516: the prompt, tags, limits, and the words of the observations are those of its code.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Generator, Mapping
from typing import Any

from atomrl.environments.tags import first_block
from atomrl.episodes import Reply
from atomrl.types import Sample

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
        url: of a service that answers `/retrieve` as Search-R1's does (`atomrl retriever`).
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
        OSError: the service does not answer, or not as it should.
    """
    body = json.dumps({"queries": [query], "topk": topk, "return_scores": True}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        found = json.loads(answer.read())
    try:
        return [contents_of(item) for item in found["result"][0]]
    except (LookupError, TypeError) as error:
        raise OSError(f"{url} answered {json.dumps(found)[:200]}, and no list of documents") from error


def contents_of(item: Mapping[str, Any]) -> str:
    """The text of a document, with or without a score beside it."""
    return str(item.get("document", item)["contents"])


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
