"""The reward `http` against services that are slow, drop connections, fail and lie."""

from __future__ import annotations

import socket
import threading
import time
from itertools import pairwise

import pytest

from atomrl.config import RewardConfig
from atomrl.rewards import service as services
from atomrl.rewards.breaker import Breaker
from atomrl.rewards.compute import build_rewards
from atomrl.rewards.errors import RewardError
from atomrl.types import Sample
from tests.rewards.batches import failures, rollouts, values
from tests.rewards.services import Service, answer, drip, drop, half, lengths, send, slow

SECRET = "hush-4a7d1ed4"


@pytest.fixture
def service():
    service = Service()
    yield service
    service.close()


@pytest.fixture
def build(service, build_service):
    return lambda **given: build_service("http", **{"url": service.url, **given})


def test_what_is_sent_and_what_is_made_of_the_answer(build, service):
    chat = Sample(sample_id="b", prompt=({"role": "user", "content": "hi"},), ground_truth=[4], columns={"level": 2})
    scored = build(batch_size=2)(rollouts({"a": ["x", "xyz"], "b": ["", "ué"]}, b=chat))
    assert values(scored) == ((1.0, 3.0), (0.0, 2.0)) and not failures(scored)
    bodies = sorted((body for _, body, _ in service.requests), key=lambda body: str(body["prompts"]))
    assert bodies[1] == {
        "version": 1,
        "prompts": [[{"role": "user", "content": "hi"}]] * 2,
        "completions": ["", "ué"],
        "columns": {
            "level": [2, 2], "ground_truth": [[4], [4]], "data_source": ["default"] * 2, "completion_tokens": [1, 1]
        },
    }  # fmt: skip
    assert bodies[0]["prompts"] == ["p-a", "p-a"] and bodies[0]["columns"]["level"] == [None, None]


@pytest.mark.parametrize(
    "form",
    [
        {"scores": [1, 0.5]},
        {"version": 1, "scores": [1, 0.5]},
        {"rewards": [1, 0.5], "scores": [9, 9], "extra_logs": {"format": [1, 0]}},  # OpenRLHF
        [1, 0.5],
        [{"score": 1, "acc": True}, {"score": 0.5, "acc": False}],  # verl
    ],
)
def test_forms_of_an_answer(build, service, form):
    service.usual = answer(form)
    scored = build()(rollouts({"a": ["x", "y"]}))
    assert values(scored) == ((1.0, 0.5),)
    if isinstance(form, list) and isinstance(form[0], dict):
        assert scored[0].reward_parts["http/acc"] == 1.0


def test_null_is_no_value_and_no_failure(build, service):
    service.usual = answer({"scores": [None, 2]})
    scored = build()(rollouts({"a": ["x", "y"]}))
    assert values(scored) == ((None, 2.0),) and not failures(scored)


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        (answer({"scores": [1.0]}), "returned 1 scores for 2 completions"),
        (answer({"score": [1.0, 2.0]}), 'the answer must be {"scores": [...]}'),
        (answer({"scores": ["1", [2]]}), "it returned '1'; return a finite number"),
        (send(b'{"scores": [NaN, 1]}'), "NaN is no JSON"),
        (send(b"<html>hello"), "the answer is no JSON"),
        (send(b"[" * 100_000), "the answer is no JSON"),
        (send(b""), "the answer is no JSON"),
        (send(b"xx", Content_Encoding="gzip"), "cannot be decoded"),
    ],
)
def test_answers_that_are_none(build, service, deed, message):
    service.usual = deed
    scored = build()(rollouts({"a": ["x", "y"]}))
    assert values(scored) == ((None, None),)
    assert {kind for kind, _ in failures(scored)} == {"invalid"} and message in failures(scored)[0][1]
    assert len(service.requests) == 1  # it would say so again


def test_an_answer_is_not_read_without_end(build, service, monkeypatch):
    monkeypatch.setattr(services, "MAX_ANSWER_BYTES", 1000)
    service.usual = send(b"1" * 2000)
    assert "longer than 1000 bytes" in failures(build()(rollouts({"a": ["x"]})))[0][1]


@pytest.mark.parametrize("deed", [slow(30, lengths), drip])
def test_a_slow_answer_is_a_timeout_and_is_not_asked_for_again(build, service, deed):
    service.deeds = [deed]
    rewards, started = build(timeout_s=1.5), time.monotonic()
    scored = rewards(rollouts({"a": ["x", "y"]}))
    assert time.monotonic() - started < 15
    assert [kind for kind, _ in failures(scored)] == ["timeout"] * 2 and len(service.requests) == 1
    assert "has not answered within 1.5 s" in failures(scored)[0][1]
    assert values(rewards(rollouts({"a": ["x", "y"]}))) == ((1.0, 1.0),)


@pytest.mark.parametrize("deed", [drop, half, send(b"", 500), send(b"", 503), send(b"", 429, Retry_After="0")])
def test_what_may_be_asked_again_is(build, service, deed):
    service.deeds = [deed, deed]
    rewards = build()
    assert values(rewards(rollouts({"a": ["xx"]}))) == ((2.0,),)
    assert len(service.requests) == 3
    assert rewards.totals() == {"reward/http/requests": 3, "reward/http/retries": 2, "reward/http/breaker_opened": 0}


@pytest.mark.parametrize(
    ("deed", "sent", "message"),
    [
        (send(b"out of memory", 500), 3, "HTTP 500: out of memory (3 requests)"),
        (drop, 3, "the connection broke"),
        (send(b"no such route", 404), 1, "HTTP 404: no such route"),
        (send(b"bad", 400), 1, "HTTP 400: bad"),
        (send(b"", 302, Location="http://example.invalid/x"), 1, "HTTP 302:  to http://example.invalid/x"),
        (send(b"", 429, Retry_After="3600"), 1, "asks to wait for 3600 s"),
    ],
)
def test_retries_are_bounded_and_only_of_what_may_succeed(build, service, deed, sent, message):
    service.usual = deed
    scored = build(retries=2)(rollouts({"a": ["x"]}))
    assert failures(scored)[0][0] == "error" and message in failures(scored)[0][1]
    assert len(service.requests) == sent


def test_waits_double_and_are_what_the_service_asks_for(build, service, monkeypatch):
    monkeypatch.setattr(services, "FIRST_WAIT_S", 0.2)
    service.deeds = [send(b"", 500), send(b"", 500), send(b"", 429, Retry_After="1")]
    build()(rollouts({"a": ["x"]}))
    times = [when for _, _, when in service.requests]
    waits = [after - before for before, after in pairwise(times)]
    assert waits[0] >= 0.1 and waits[1] >= 0.2 and waits[2] >= 1.0


def test_retry_after_may_be_a_date():
    assert services._retry_after("Fri, 31 Dec 1999 23:59:59 GMT") == 0.0
    assert services._retry_after("Fri, 31 Dec 2100 23:59:59 GMT") > 1e9
    assert services._retry_after("2") == 2.0 and services._retry_after("soon") is None


def test_no_service_at_all(build, service):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    scored = build(url=url, retries=1)(rollouts({"a": ["x"]}))
    assert failures(scored)[0][0] == "error" and "no connection" in failures(scored)[0][1]


def test_a_batch_that_fails_costs_the_others_nothing(build, service):
    def picky(handler, body):
        (send(b"", 400) if "bad" in body["completions"] else lengths)(handler, body)

    service.usual = picky
    scored = build(batch_size=1)(rollouts({"a": ["x", "bad", "xyz"]}))
    assert values(scored) == ((1.0, None, 3.0),)


def test_no_more_requests_at_a_time_than_allowed(build, service):
    service.usual = slow(0.05, lengths)
    scored = build(batch_size=1, concurrency=3)(rollouts({"a": ["x"] * 12}))
    assert values(scored) == ((1.0,) * 12,) and service.most_busy == 3


def test_several_threads_share_one_breaker_and_one_limit(build, service):
    service.usual = slow(0.02, lengths)
    asked, found = build(batch_size=1, concurrency=2).services["http"], {}

    def score(n):
        found[n] = asked(rollouts({"a": ["x" * n] * 5}))

    threads = [threading.Thread(target=score, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [n] * 5 for n in range(4)} and service.most_busy == 2


def test_the_states_of_a_breaker():
    now = [0.0]
    breaker = Breaker(3, 10.0, lambda: now[0])
    for _ in range(5):  # not in a row
        breaker.failed("a"), breaker.failed("b"), breaker.succeeded()
    assert breaker.state == "closed" and breaker.opened == 0
    for reason in "abc":
        assert breaker.state == "closed"
        breaker.failed(reason)
    assert (breaker.state, breaker.open_for, breaker.reason, breaker.opened) == ("open", 10.0, "c", 1)
    now[0] = 9.0
    breaker.failed("one that was under way")
    assert breaker.open_for == 1.0 and breaker.opened == 1
    now[0] = 10.0
    assert breaker.state == "half-open"
    breaker.failed("the probe")
    assert (breaker.state, breaker.open_for, breaker.opened) == ("open", 10.0, 2)
    now[0] = 20.0
    breaker.succeeded()
    assert breaker.state == "closed"


def test_an_open_breaker_fails_at_once_and_one_probe_closes_it(build, service):
    service.usual = send(b"down", 503)
    rewards = build(retries=0, breaker_failures=3, batch_size=1, concurrency=1)
    now = [0.0]
    rewards.services["http"]._breaker.clock = lambda: now[0]
    scored = rewards(rollouts({"a": ["x"] * 6}))
    assert len(service.requests) == 3
    assert [("circuit breaker" in message) for _, message in failures(scored)] == [False] * 3 + [True] * 3
    assert "is open for another 30.0 s, after 3 failures in a row, the last: " in failures(scored)[-1][1]
    assert "HTTP 503: down" in failures(scored)[-1][1]
    now[0] = 29.0
    assert len(failures(rewards(rollouts({"a": ["x"] * 6})))) == 6 and len(service.requests) == 3
    now[0] = 30.0  # the probe fails
    assert len(failures(rewards(rollouts({"a": ["x"] * 6})))) == 6 and len(service.requests) == 4
    now[0], service.usual = 60.0, lengths
    assert values(rewards(rollouts({"a": ["x"] * 6}))) == ((1.0,) * 6,) and len(service.requests) == 10
    assert rewards.totals()["reward/http/breaker_opened"] == 2


def test_while_one_probes_the_others_wait_for_what_it_finds(build, service):
    service.deeds, service.usual = [send(b"", 503)], slow(0.2, lengths)
    rewards = build(retries=0, breaker_failures=1, batch_size=1, concurrency=6)
    now = [0.0]
    rewards.services["http"]._breaker.clock = lambda: now[0]
    rewards(rollouts({"a": ["x"]}))
    now[0] = 31.0
    assert values(rewards(rollouts({"a": ["x"] * 6}))) == ((1.0,) * 6,)
    arrived = sorted(when for _, _, when in service.requests[1:])
    assert arrived[1] - arrived[0] >= 0.2


def test_keys_come_from_the_environment_and_are_shown_nowhere(build, service, monkeypatch, caplog):
    monkeypatch.setenv("MY_KEY", SECRET)
    monkeypatch.setenv("MY_OTHER_KEY", SECRET[::-1])
    caplog.set_level("DEBUG")
    service.usual = send(f"the key {SECRET} is not allowed, nor is {SECRET[::-1]}".encode(), 401)
    rewards = build(api_key_env="MY_KEY", headers_env={"X-Key": "MY_OTHER_KEY"})
    scored = rewards(rollouts({"a": ["x"]}))
    headers = service.requests[0][0]
    assert headers["Authorization"] == f"Bearer {SECRET}" and headers["X-Key"] == SECRET[::-1]
    assert "the key *** is not allowed, nor is ***" in failures(scored)[0][1]
    shown = f"{scored} {caplog.text} {rewards.parts} {rewards.services} {rewards.totals()}"
    assert SECRET not in shown and SECRET[::-1] not in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"url": "localhost:80"}, r"args.url: must be the address of a service.*\(got 'localhost:80'\)"),
        ({"url": "http://me:pw@host/x"}, "args.url: must hold no password"),
        ({"retries": -1}, r"args.retries: .*greater than or equal to 0 \(got -1\)"),
        ({"batch": 3}, "has no argument 'batch'"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "the environment variable NOT_SET_ANYWHERE is not set"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(build, args, message):
    with pytest.raises(RewardError, match=message):
        build(**args)


def test_the_url_is_needed():
    with pytest.raises(RewardError, match=r"reward 'http' needs args: \{url: ...\}"):
        build_rewards(RewardConfig(functions=["http"]))


def test_a_column_that_is_no_json_is_named(build):
    sample = Sample(sample_id="a", prompt="p", ground_truth="", columns={"when": {1, 2}})
    with pytest.raises(RewardError, match="the column 'when' cannot be sent as JSON"):
        build()(rollouts({"a": ["x"]}, a=sample))


def test_a_service_that_never_answers_stops_the_run(build, service):
    service.usual = send(b"no", 403)
    with pytest.raises(RewardError, match=r"reward 'http' failed on every completion so far, first on .*HTTP 403: no"):
        build(patience=3)(rollouts({"a": ["x"] * 8}))


def test_closing_ends_the_thread_and_another_call_starts_it_again(build, service):
    rewards = build()
    for _ in range(2):
        assert values(rewards(rollouts({"a": ["x"]}))) == ((1.0,),)
        rewards.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "reward service"]
