"""The reward `http` against services that are slow, drop connections, fail and lie."""

from __future__ import annotations

import re
import socket
import threading
from collections import Counter

import pytest

from atomrl.common.outages import retry_after
from atomrl.config import RewardConfig
from atomrl.rewards import service as services
from atomrl.rewards.compute import build_rewards
from atomrl.rewards.errors import RewardError, RewardStop
from atomrl.types import Problem
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


def test_requests_and_replies_by_hand(build, service):
    chat = Problem(problem_id="b", prompt=({"role": "user", "content": "hi"},), ground_truth=[4], columns={"level": 2})
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


WRONG = [
    (answer({"scores": [1.0]}), "returned 1 scores for 2 completions"),
    (answer({"score": [1.0, 2.0]}), 'the answer must be {"scores": [...]}'),
    (answer({"scores": None}), 'the answer must be {"scores": [...]}'),
    (answer(5), 'the answer must be {"scores": [...]}, not 5'),
    (send(b"<html>hello"), "the answer is not JSON"),
    (send(b"[" * 100_000), "the answer is not JSON"),
    (send(b""), "the answer is not JSON"),
    (send(b"xx", Content_Encoding="gzip"), "cannot be decoded"),
]


@pytest.mark.parametrize(("deed", "message"), WRONG)
def test_a_service_that_has_never_answered_as_it_should_stops_the_run_at_once(build, service, deed, message):
    service.usual = deed
    with pytest.raises(RewardStop, match=f"{service.url}.*{re.escape(message)}"):
        build()(rollouts({"a": ["x", "y"]}))
    assert len(service.requests) == 1


@pytest.mark.parametrize(("deed", "message"), WRONG)
def test_one_that_has_is_asked_again(build, service, deed, message):
    rewards = build()
    rewards(rollouts({"a": ["x", "y"]}))
    service.deeds = [deed] * 6
    assert values(rewards(rollouts({"a": ["x", "yyy"]}))) == ((1.0, 3.0),) and len(service.requests) == 8


def test_scores_that_are_none_are_invalid(build, service):
    service.usual = send(b'{"scores": [NaN, "1", [2], 1]}')
    scored = build()(rollouts({"a": ["w", "x", "y", "z"]}))
    assert values(scored) == ((None, None, None, 1.0),) and {kind for kind, _ in failures(scored)} == {"invalid"}
    assert "it returned nan; return a finite number" in failures(scored)[0][1]


def test_an_answer_is_not_read_without_end(build, service, monkeypatch):
    monkeypatch.setattr(services, "MAX_ANSWER_BYTES", 1000)
    service.usual = send(b"1" * 2000)
    assert "longer than 1000 bytes" in failures(build()(rollouts({"a": ["x"]})))[0][1]


LATE = slow(30, lengths)


@pytest.mark.parametrize(
    "deed",
    [
        drop, half, LATE, drip, send(b"", 500), send(b"", 502), send(b"<html>", 503), send(b"", 504),
        send(b"", 408), send(b"", 429, Retry_After="0"),
    ],
)  # fmt: skip
def test_a_service_that_is_unavailable_is_asked_until_it_answers(build, service, deed, caplog):
    """More often than `retries`, which are of requests that fail while others are answered."""
    service.deeds = [deed] * 3
    rewards = build(timeout_s=1.0 if deed in (LATE, drip) else 20.0, retries=1)
    assert values(rewards(rollouts({"a": ["xx"]}))) == ((2.0,),)
    assert rewards.totals() == {"reward/http/requests": 4, "reward/http/retries": 3}
    assert (
        f"{service.url} is unavailable (" in caplog.text
        and "waiting up to 600 s more (reward.wait_s=600)" in caplog.text
    )
    assert f"{service.url} is available again after" in caplog.text


@pytest.mark.parametrize(("deed", "sent", "kind"), [
    (send(b"out of memory", 500), 3, "error"), (drop, 3, "error"), (send(b"oops"), 3, "invalid"),
    (LATE, 2, "timeout"),
])  # fmt: skip
def test_a_request_that_fails_while_others_are_answered_has_no_score(build, service, deed, sent, kind):
    def picky(handler, body):
        (deed if "bad" in body["completions"] else lengths)(handler, body)

    service.usual = picky
    rewards = build(batch_size=1, retries=2, timeout_s=2.0 if deed is LATE else 20.0)
    others = threading.Event()
    rewards.services["http"](rollouts({"b": ["x"]}))  # it has answered before

    def ask_others():
        while not others.wait(0.02):
            rewards.services["http"](rollouts({"b": ["x"]}))

    thread = threading.Thread(target=ask_others)
    thread.start()
    scored = rewards(rollouts({"a": ["x", "bad", "xyz"]}))
    others.set()
    thread.join()
    assert values(scored) == ((1.0, None, 3.0),) and [kind] == [failure for failure, _ in failures(scored)]
    asked = sum(body["completions"] == ["bad"] for _, body, _ in service.requests)
    assert asked >= sent, "some may have been before any other was answered"


@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        (send(b"out of memory", 500), "HTTP 500: out of memory"),
        (send(b"<html>Bad gateway", 502), "HTTP 502: <html>Bad gateway"),
        (drop, "the connection broke"),
        (LATE, "has not answered within 0.2 s"),
        (send(b"", 429, Retry_After="3600"), "asks to wait for 3600 s"),
    ],
)
def test_one_that_stays_unavailable_ends_the_run(build, service, deed, reason):
    service.usual = deed
    rewards = build(timeout_s=0.2 if deed is LATE else 20.0, wait_s=0.5, batch_size=1, concurrency=2)
    with pytest.raises(RewardStop, match=f"{service.url}.*reward.wait_s=0.5.*--resume") as stopped:
        rewards(rollouts({"a": [f"x{n}" for n in range(20)]}))
    assert reason in str(stopped.value)
    asked = Counter(body["completions"][0] for _, body, _ in service.requests)
    assert sum(times > 1 for times in asked.values()) <= 2, "those that had not been sent wait no time of their own"


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        (send(b"no such route", 404), "HTTP 404: no such route"),
        (send(b"who are you", 401), "HTTP 401: who are you"),
        (send(b"", 302, Location="http://example.invalid/x"), "HTTP 302:  to http://example.invalid/x"),
    ],
)
def test_a_service_that_answers_no_request_ends_the_run_at_once(build, service, deed, message):
    service.usual = deed
    with pytest.raises(RewardStop, match=message):
        build()(rollouts({"a": ["x"]}))
    assert len(service.requests) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_request_that_is_refused_has_no_score(build, service, status):
    service.deeds = [send(b"bad", status)]
    scored = build()(rollouts({"a": ["x"]}))
    assert failures(scored)[0][0] == "error" and f"HTTP {status}: bad" in failures(scored)[0][1]


def test_waits_are_as_long_as_the_service_asks_for(build, service):
    service.deeds = [send(b"", 429, Retry_After="1")]
    build()(rollouts({"a": ["x"]}))
    first, second = (when for _, _, when in service.requests)
    assert second - first >= 1.0


def test_retry_after_may_be_a_date():
    assert retry_after("Fri, 31 Dec 1999 23:59:59 GMT") == 0.0
    assert retry_after("Fri, 31 Dec 2100 23:59:59 GMT") > 1e9
    assert retry_after("2") == 2.0 and retry_after("soon") is None


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_no_service_at_all(build, service, host):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://{host}:{free.getsockname()[1]}"
    rewards = build(url=url, wait_s=0.2)
    with pytest.raises(RewardStop, match="no connection"):
        rewards(rollouts({"a": ["x"]}))
    assert rewards.totals()["reward/http/requests"] == 0


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


def test_several_threads_share_one_limit(build, service):
    service.usual = slow(0.02, lengths)
    asked, scores = build(batch_size=1, concurrency=2).services["http"], {}

    def score(n):
        scores[n] = asked(rollouts({"a": ["x" * n] * 5}))

    threads = [threading.Thread(target=score, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == {n: [n] * 5 for n in range(4)} and service.most_busy == 2


def test_keys_come_from_the_environment_and_are_shown_nowhere(build, service, monkeypatch, caplog):
    monkeypatch.setenv("MY_KEY", SECRET)
    monkeypatch.setenv("MY_OTHER_KEY", SECRET[::-1])
    caplog.set_level("DEBUG")
    told = f"the key {SECRET} is not allowed, nor is {SECRET[::-1]}".encode()
    service.deeds, service.usual = [send(told, 503)], send(told, 400)
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
        ({"url": "http://me:pw@host/x"}, "args.url: must not contain a password"),
        ({"retries": 0}, r"args.retries: .*greater than or equal to 1 \(got 0\)"),
        ({"batch": 3}, "has no argument 'batch'"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "the environment variable NOT_SET_ANYWHERE is not set"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(build, args, message):
    with pytest.raises(RewardError, match=message):
        build(**args)


def test_the_url_is_needed():
    with pytest.raises(RewardError, match=r"needs args: \{url:"):
        build_rewards(RewardConfig(functions=["http"]))


def test_a_column_that_is_no_json_is_named(build):
    problem = Problem(problem_id="a", prompt="p", ground_truth="", columns={"when": {1, 2}})
    with pytest.raises(RewardError, match="sent as JSON"):
        build()(rollouts({"a": ["x"]}, a=problem))


def test_a_service_that_never_answers_stops_the_run(build, service):
    service.usual = send(b"no", 400)
    with pytest.raises(RewardError, match=r"'http'.*every completion.*HTTP 400: no"):
        build(patience=3)(rollouts({"a": ["x"] * 8}))


def test_closing_ends_the_thread_and_another_call_starts_it_again(build, service):
    rewards = build()
    for _ in range(2):
        assert values(rewards(rollouts({"a": ["x"]}))) == ((1.0,),)
        rewards.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "reward service"]
