"""The service: the published clients' requests, many clients at once, bad requests, and how it ends."""

import asyncio
import json
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from atomrl.environments.builtin import information, retrieve, search_r1
from atomrl.environments.retrieval.index import RetrievalError
from atomrl.environments.retrieval.server import Batcher, address_of
from atomrl.types import Problem
from tests.environments.retrieval.conftest import WORDS, address, get, post, rows, served, start, write

pytest.importorskip("bm25s")
pytest.importorskip("Stemmer")
pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Its address; document N has the word `unN` and no other has it."""
    documents = [{**row, "contents": f"{row['contents']} un{row['id']}"} for row in rows(300)]
    with served(str(write(tmp_path_factory.mktemp("service") / "corpus.jsonl", documents))) as url:
        yield url


def test_the_request_of_search_r1(service):
    """Its trainer posts the queries of a turn together, and reads title and text of `contents`."""
    status, reply = post(service, {"queries": ["un7 ban", "un8"], "topk": 3, "return_scores": True})
    assert status == 200 and set(reply) == {"result"} and len(reply["result"]) == 2
    for hits, number in zip(reply["result"], (7, 8), strict=True):
        assert all(set(hit) == {"document", "score"} for hit in hits) and len(hits) <= 3
        title, _, text = hits[0]["document"]["contents"].partition("\n")
        assert title == f'"T{number}"' and f"un{number}" in text.split()
        assert [hit["score"] for hit in hits] == sorted((hit["score"] for hit in hits), reverse=True)


def test_its_example_of_400_queries_for_5_documents(service):
    queries = ["What is the capital of ban?", "Explain bar dir."] * 200
    status, reply = post(service, {"queries": queries, "topk": 5, "return_scores": True})
    assert status == 200 and [len(hits) for hits in reply["result"]] == [5] * 400
    assert reply["result"][0] == reply["result"][398]


def test_documents_stand_by_themselves_without_scores(service):
    """As Search-R1's and SkyRL's servers answer where `return_scores` is false or not given."""
    for body in ({"queries": ["un9"]}, {"queries": ["un9"], "topk": None, "return_scores": False}):
        status, reply = post(service, body)
        assert status == 200 and reply["result"][0][0]["id"] == "9" and "contents" in reply["result"][0][0]


def test_the_request_of_verls_search_tool(service):
    """A list of queries with these headers; the documents of each are numbered, with title and text."""
    headers = {"Accept": "application/json"}
    status, reply = post(service, {"queries": ["un1", "un2 bar"], "topk": 3, "return_scores": True}, headers=headers)
    assert status == 200 and reply.get("result")
    for hits in reply["result"]:
        lines = [item["document"]["contents"].split("\n") for item in hits]
        assert all(len(parts) == 2 and parts[0].startswith('"T') for parts in lines)


def test_the_request_of_skyrls_search_tool(service):
    """One query in a list, or as `query`; it strips the contents."""
    headers = {"Accept": "application/json"}
    for body in ({"queries": ["un5"]}, {"query": "un5"}, {"query": ["un5"]}):
        status, reply = post(service, {**body, "topk": 3, "return_scores": True}, headers=headers)
        assert status == 200 and reply["result"][0][0]["document"]["contents"].strip().startswith('"T5"')


def test_skyrls_own_search_tool(service):
    tools = pytest.importorskip("skyrl_gym.tools.search")
    tool = tools.SearchToolGroup(search_url=f"{service}/retrieve", topk=2, timeout=120)
    assert json.loads(tool.search(" un5 "))["result"].startswith('Doc 1: "T5"\n')


def test_the_environment_searches_in_it(service):
    episode = search_r1(Problem(problem_id="a", prompt="?", ground_truth=None), url=f"{service}/retrieve", topk=2)
    assert next(episode) is None
    reply = episode.send("<think>hm</think><search> un11 ban </search>")
    documents = retrieve(f"{service}/retrieve", "un11 ban", 2, 5.0)
    assert reply.text == information(documents) and reply.text.startswith('\n\n<information>Doc 1(Title: "T11") ')
    assert reply.text.endswith("</information>\n\n") and "\nDoc 2(Title: " in reply.text
    assert episode.send("<search></search>").text == "\n\n<information></information>\n\n"
    with pytest.raises(StopIteration):
        episode.send("<answer>11</answer>")


def test_64_clients_at_once_get_their_own_answers(service):
    def ask(client: int) -> bool:
        for number in range(client, client + 8):
            one, two = f"un{number}", f"un{number + 100} {WORDS[client]}"
            topk = 1 + client % 3
            status, reply = post(service, {"queries": [one, two], "topk": topk, "return_scores": True})
            first, second = reply["result"]
            assert status == 200 and [len(first), len(second) <= topk] == [1, True]
            assert first[0]["document"]["id"] == str(number) and second[0]["document"]["id"] == str(number + 100)
        return True

    before = get(service, "/health")["queries"]
    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(ask, range(64)))
    assert get(service, "/health")["queries"] == before + 64 * 16


class SlowIndex:
    """Answers a query with its own documents; fails on `bad`."""

    kind = "dense"

    def __init__(self):
        self.batches = []

    def search(self, queries, topk):
        self.batches.append(len(queries))
        time.sleep(0.05)
        if "bad" in queries:
            raise ValueError("no such query")
        return [[({"contents": f"{query}{rank}"}, 0.0) for rank in range(topk)] for query in queries]


def test_queries_that_wait_are_searched_together_and_each_gets_its_own():
    index = SlowIndex()

    async def ask(number: int):
        queries = [f"{number}/{part}/" for part in range(number % 3)]
        return queries, 1 + number % 4, await batcher.search(queries, 1 + number % 4)

    async def all_at_once():
        nonlocal batcher
        batcher = Batcher(index)
        replies = await asyncio.gather(*(ask(number) for number in range(60)))
        with pytest.raises(ValueError, match="no such query"):
            await batcher.search(["bad"], 1)
        return replies, await ask(5)

    batcher = None
    replies, after = asyncio.run(all_at_once())
    for queries, topk, hits in [*replies, after]:
        assert [[hit["contents"] for hit, _ in each] for each in hits] == [
            [f"{query}{rank}" for rank in range(topk)] for query in queries
        ]
    assert len(index.batches) <= 5 and max(index.batches) <= 64 + 2


def test_health_says_kind_documents_and_memory(service):
    health = get(service, "/health")
    assert health["status"] == "ok" and health["kind"] == "bm25" and health["documents"] == 300
    assert 1 << 20 < health["memory_bytes"] < 1 << 30


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{oops", 400, "not JSON"),
        (b"\xff", 400, "not JSON"),
        ([], 422, "must be an object"),
        ({}, 422, "give `queries`"),
        ({"queries": ["a"], "query": "a"}, 422, "give `queries`"),
        ({"queries": "a"}, 422, "a list of texts"),
        ({"queries": [1]}, 422, "a list of texts"),
        ({"query": {"a": 1}}, 422, "a list of texts"),
        ({"queries": ["a"] * 5000}, 422, "5000 queries"),
        ({"queries": ["a"], "topk": -1}, 422, "`topk`"),
        ({"queries": ["a"], "topk": 2.5}, 422, "`topk`"),
        ({"queries": ["a"], "topk": True}, 422, "`topk`"),
        ({"queries": ["a"], "topk": 10**6}, 422, "`topk`"),
        ({"queries": ["a"], "return_scores": "yes"}, 422, "`return_scores`"),
        (b'"' + b"x" * (17 << 20), 413, "longer than"),
    ],
)  # fmt: skip
def test_bad_requests_get_a_reason(service, body, status, said):
    reply = post(service, body)
    assert reply[0] == status and said in reply[1]["detail"]
    assert post(service, {"queries": []}) == (200, {"result": []}), "the service goes on"


def test_other_addresses_and_methods_are_refused(service):
    assert post(service, {"queries": []}, "/search")[0] == 404
    assert post(service, {"queries": []}, "/health")[0] == 405
    with pytest.raises(urllib.error.HTTPError) as error:
        get(service, "/retrieve")
    assert error.value.code == 405
    error.value.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_told_and_answers_what_is_running(corpus, number):
    process = start(str(corpus), "--port", "0")
    url, replies = address(process), []
    busy = [threading.Thread(target=lambda: replies.append(post(url, {"queries": WORDS * 20}))) for _ in range(2)]
    for thread in busy:
        thread.start()
    while get(url, "/health")["queries"] == 0:
        pass
    process.send_signal(number)
    for thread in busy:
        thread.join(120)
    assert process.wait(120) == 0 and process.stdout.read() == ""
    process.stdout.close()
    assert len(replies) == 2 and all(status == 200 for status, _ in replies)
    with pytest.raises(OSError):
        post(url, {"queries": []})


def test_an_address_that_is_taken_is_said_before_an_index_is_made(corpus):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        process = start(str(corpus), "--port", str(other.getsockname()[1]))
        text, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and "cannot listen on 127.0.0.1" in text and "--port" in text
    assert not list(corpus.parent.glob("*.bm25"))


def test_a_corpus_that_changes_is_an_error_and_not_another_document(corpus):
    with served(str(corpus)) as url:
        assert post(url, {"queries": ["ban"]})[0] == 200
        corpus.write_text('{"contents": "ban"}\n' * 500)
        status, reply = post(url, {"queries": ["ban"]})
        assert status == 500 and "changed since the service started" in reply["detail"]


def test_a_port_that_is_none_is_refused():
    with pytest.raises(RetrievalError, match="0 to 65535"):
        address_of("127.0.0.1", 99999)
