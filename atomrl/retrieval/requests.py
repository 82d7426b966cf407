"""What is asked of the service and what it answers: the protocol of Search-R1's retriever.

    POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true}
                    {"result": [[{"document": {"contents": "..."}, "score": 7.1}]]}

Without `return_scores` the documents stand by themselves. `query`, one text or a list, is taken for `queries`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atomrl.retrieval.index import Hit

MAX_TOPK, MAX_QUERIES, MAX_BODY_BYTES = 1000, 4096, 16 << 20


class BadRequest(Exception):
    """A request that cannot be answered.

    Args:
        status: of HTTP.
        reason: what is wrong with it.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True, kw_only=True)
class RetrievalRequest:
    """What is asked."""

    queries: list[str]
    topk: int
    return_scores: bool


def parse_request(body: bytes, default_topk: int) -> RetrievalRequest:
    """A request from its body; keys that it does not know are passed over, as other services do.

    Args:
        default_topk: where the request has none, or 0.

    Raises:
        BadRequest: what is wrong with it.

    Example:
        >>> parse_request(b'{"query": "who?"}', 3)
        RetrievalRequest(queries=['who?'], topk=3, return_scores=False)
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, f"the body is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise BadRequest(422, 'the body must be an object: {"queries": ["..."], "topk": 3, "return_scores": true}')
    if ("queries" in given) == ("query" in given):
        raise BadRequest(422, "give `queries`, a list of texts, or `query`")
    queries = given.get("queries", given.get("query"))
    queries = [queries] if isinstance(queries, str) and "query" in given else queries
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise BadRequest(422, "`queries` must be a list of texts")
    if len(queries) > MAX_QUERIES:
        raise BadRequest(422, f"{len(queries)} queries; at most {MAX_QUERIES} in a request")
    topk = given.get("topk") or default_topk
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= MAX_TOPK:
        raise BadRequest(422, f"`topk` must be a whole number from 1 to {MAX_TOPK}")
    scores = given.get("return_scores", False)
    if not isinstance(scores, bool):
        raise BadRequest(422, "`return_scores` must be true or false")
    return RetrievalRequest(queries=queries, topk=topk, return_scores=scores)


def answer(request: RetrievalRequest, found: Sequence[Sequence[Hit]]) -> dict[str, Any]:
    """What a request is answered, of the hits of each query.

    Example:
        >>> asked = RetrievalRequest(queries=["who?"], topk=1, return_scores=True)
        >>> answer(asked, [[({"contents": "Nobody"}, 7.1)]])
        {'result': [[{'document': {'contents': 'Nobody'}, 'score': 7.1}]]}
    """
    if request.return_scores:
        return {"result": [[{"document": document, "score": score} for document, score in hits] for hits in found]}
    return {"result": [[document for document, _ in hits] for hits in found]}
