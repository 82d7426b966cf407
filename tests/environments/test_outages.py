"""Services that an environment asks and that are away for a while: no episode fails for it, and no run ends."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing

import pytest

from atomrl.common import hangs as progress
from atomrl.common import outages
from atomrl.common.outages import Outage, ServiceGone, is_away
from atomrl.config import EnvironmentConfig
from atomrl.environments.builtin import retrieve
from atomrl.environments.pool import EnvironmentPool
from atomrl.environments.worker import EpisodeError
from atomrl.types import Problem
from tests.episodes import SAMPLING, make_prompts
from tests.rewards.services import Service, answer, drip, drop, half, send, slow

SAMPLE = Problem(problem_id="s", prompt="p", ground_truth=None)
SEARCH = "<search>who?</search>"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(outages, "FIRST_S", 0.05)
    monkeypatch.setattr(outages, "LOG_EVERY_S", 0.0)


def documents(handler, body):
    """One, with the query in it."""
    answer({"result": [[{"document": {"contents": f"T\n{body['queries'][0]}"}, "score": 1.0}]]})(handler, body)


@pytest.fixture
def retriever():
    service = Service(documents)
    yield service
    service.close()


def searching(url, timeout_s=0.5, **settings):
    args = {"url": url, "timeout_s": timeout_s}
    return closing(EnvironmentPool(EnvironmentConfig(function="search_r1", args=args, workers=1, **settings)))


def said(pool, key, text=None, limit_s=120.0):
    """Return the reply to a text, or the opening."""
    if text is not None:
        pool.say(key, text)
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        for other, reply in pool.answers(0.5):
            assert other == key
            return reply
    raise AssertionError("no answer")


def slow_headers(handler, body):
    """A byte of a header now and then."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        handler.wfile.write(b"a")
        handler.wfile.flush()
        time.sleep(0.05)


def slow_error(handler, body):
    """An error whose body comes a byte now and then."""
    handler.send_response(404)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    while True:
        handler.wfile.write(b"n")
        handler.wfile.flush()
        time.sleep(0.05)


@pytest.mark.parametrize("deed", [
    slow_headers, slow_error,
    drop, half, drip, slow(5, documents), send(b"", 500), send(b"<html>Bad gateway", 502), send(b"", 503),
    send(b"", 504), send(b"", 429, Retry_After="1"),
    send(b"<html>Down for maintenance"), send(b"\xff\x00garbage"), send(b""),
])  # fmt: skip
def test_a_search_waits_until_its_service_answers(retriever, deed, caplog):
    with searching(retriever.url) as pool:
        key = pool.start(SAMPLE, 0)
        said(pool, key)
        first = said(pool, key, SEARCH)
        retriever.deeds = [deed, documents, deed]  # it is played again from its beginning
        second = said(pool, key, SEARCH.replace("who", "where"))
        assert "who?" in first.reply.text and "where?" in second.reply.text and second.failure is None
        assert len(pool.workers) == 1
        assert said(pool, key, "<answer>me</answer>").failure is None
    assert "is unavailable (" in caplog.text and "environment.wait_s=600" in caplog.text
    assert "is available again after" in caplog.text


@pytest.mark.parametrize("deed", [slow_headers, slow_error, drip])
def test_a_request_that_is_given_up_ends(retriever, deed):
    retriever.usual = deed
    with pytest.raises(ConnectionError, match=r"has not answered within 0\.2 s"):
        retrieve(retriever.url, "who?", 1, 0.2)
    for thread in threading.enumerate():
        if thread.name == "retrieve":
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_service_away_for_too_long_ends_the_run(host):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://{host}:{free.getsockname()[1]}/retrieve"
        with searching(url, wait_s=0.5) as pool:
            key, other = pool.start(SAMPLE, 0), pool.start(SAMPLE, 0)
            errors = {}
            while len(errors) < 2:
                errors |= dict(pool.answers(0.5))
            assert said(pool, other, "hm").reply.label == "invalid"
            with pytest.raises(EpisodeError, match=r"environment.wait_s=0.5\).*--resume"):
                said(pool, key, SEARCH)


def test_a_service_returns_after_an_outage():
    """Nothing listens at first; then it does, on the same port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    service = None
    with searching(f"http://127.0.0.1:{port}/retrieve") as pool:
        key = pool.start(SAMPLE, 0)
        said(pool, key)

        def begin():
            nonlocal service
            service = Service(documents, port)

        threading.Timer(1.0, begin).start()
        assert said(pool, key, SEARCH).reply.label == "search"
    service.close()


@pytest.mark.parametrize(("deed", "words"), [
    (answer({"result": [[{"contents": None}]]}), "not a list of documents"), (answer(5), "not a list of documents"),
    (send(b"no such route", 404), "HTTP 404: no such route"), (send(b"who?", 401), "HTTP 401: who"),
    (send(b"bad", 422), "HTTP 422: bad"),
    (send(b"", 302, Location="http://127.0.0.1:9/retrieve"), "redirects to http://127.0.0.1:9"),
    (send(b"", 308, Location="/retrieve/"), "redirects to http://.*/retrieve/"),
])  # fmt: skip
def test_a_service_with_invalid_replies_ends_the_run_at_once(retriever, deed, words):
    retriever.usual = deed
    with searching(retriever.url) as pool:
        key = pool.start(SAMPLE, 0)
        said(pool, key)
        with pytest.raises(EpisodeError, match=f"'search_r1' cannot be used: {retriever.url}.*{words}"):
            said(pool, key, SEARCH)


def test_an_episode_whose_service_returns_in_another_state_begins_anew(played, tokenizer, tmp_path):
    """Its first answer is then another one, after which the model writes something else."""
    trajectories = played(
        "changing", prompts=make_prompts(tokenizer, bad=2), sampling=SAMPLING, args={"folder": str(tmp_path)}
    )
    assert {item.episode.failure for item in trajectories} == {None} and {
        item.episode.outcome for item in trajectories
    } == {1.0}
    bad = [item.episode.opening for item in trajectories if item.problem.problem_id.startswith("bad")]
    assert "True" in bad and all(len(item.episode.turns) == 2 for item in trajectories)


def test_messages_about_an_outage(caplog):
    now = [0.0]
    outage = Outage("http://h", 60.0, "environment.wait_s", lambda: now[0])
    for _ in range(2):
        with pytest.raises(ServiceGone, match="wait for 61"):
            outage.pause_s("HTTP 429", 61.0)
    assert outage.pause_s("HTTP 503", 7.0) == 7.0 and progress.waits_for_service(), "which is no hang"
    now[0] = 60.0
    with pytest.raises(ServiceGone, match=r"\(environment.wait_s=60\): HTTP 503.*--resume"):
        outage.pause_s("HTTP 503")
    outage.answered()
    assert outage.pause_s("HTTP 503") < 1 and "is available again after 60 s" in caplog.text


def raised(function):
    try:
        function()
    except Exception as error:
        return error


def fetched(client, url):
    if client == "httpx":
        return __import__("httpx").get(url, timeout=0.3).raise_for_status()
    if client == "requests":
        return pytest.importorskip("requests").get(url, timeout=0.3).raise_for_status()
    return __import__("urllib.request").request.urlopen(url, timeout=0.3).read()


@pytest.mark.parametrize("client", ["httpx", "requests", "urllib"])
def test_errors_of_http_clients_count_as_outages(client):
    for status, away in ((503, True), (429, True), (404, False)):
        service = Service(send(b"", status))
        assert is_away(raised(lambda url=service.url: fetched(client, url))) is away
        service.close()
    for deed in (drop, slow(2, send(b""))):
        service = Service(deed)
        assert is_away(raised(lambda url=service.url: fetched(client, url)))
        service.close()
    assert is_away(raised(lambda: fetched(client, "http://no-such-host.invalid/")))
    assert is_away(raised(lambda url=service.url: fetched(client, url))), "it is closed"


def test_errors_that_are_not_outages():
    def wrapped():
        raise RuntimeError("the search failed") from ConnectionResetError()

    def late():
        raise TimeoutError("of an alarm clock")

    def mute():
        raise BrokenPipeError("of a game that has ended")

    assert is_away(raised(wrapped)) and not is_away(raised(late)) and not is_away(raised(mute))
