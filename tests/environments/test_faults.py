"""Environments that hang, raise, end their process or say too much: what it costs, and that no other one notices."""

import os
import time
from dataclasses import replace

import pytest

from atomrl.config import EnvironmentConfig
from atomrl.environments import pool as module
from atomrl.environments.pool import EnvironmentPool
from atomrl.environments.worker import EpisodeError
from tests.episodes import SAMPLING, make_prompts

ONE = replace(SAMPLING, completions_per_prompt=2)


def failures(trajectories):
    return [item.episode.failure for item in trajectories if item.problem.problem_id.startswith("bad")]


@pytest.mark.parametrize("how, failure, words", [
    ("raise", "error", "RuntimeError: no such luck"),
    ("nan", "invalid", "finite number"),
    ("none", "invalid", "it replied None after"),
    ("number", "invalid", "it replied 3"),
    ("hang", "timeout", "over 3 s"),
    ("spin", "timeout", "over 3 s"),
    ("stuck", "timeout", "over 3 s"),
    ("exit", "crash", "its process ended"),
])  # fmt: skip
def test_a_fault_is_its_own_episodes(played, tokenizer, how, failure, words):
    trajectories = played(
        "faulty", prompts=make_prompts(tokenizer, bad=2), sampling=ONE, timeout_s=3.0, args={"how": how}
    )
    good = [item for item in trajectories if item.problem.problem_id.startswith("s")]
    assert {(item.episode.ended, item.episode.outcome) for item in good} == {("environment", 1.0)}
    assert failures(trajectories) == [failure] * 4
    assert all(words in item.episode.message for item in trajectories if item.episode.failure)


def test_replies_are_cut_before_they_are_sent(played, tokenizer):
    trajectories = played(
        "faulty", prompts=make_prompts(tokenizer, bad=1), sampling=ONE, args={"how": "huge"}, max_reply_tokens=8
    )
    assert failures(trajectories) == [None] * 2
    assert max(turn.reply_tokens for item in trajectories for turn in item.episode.turns) == 8


def wait_for(pool, keys, limit_s=120.0):
    """The next answer of each; those of others are kept for later."""
    end = time.monotonic() + limit_s
    while not set(keys) <= pool.heard.keys() and time.monotonic() < end:
        pool.heard |= dict(pool.answers(0.5))
    return {key: pool.heard.pop(key) for key in keys}


def make_pool(function, **settings):
    pool = EnvironmentPool(EnvironmentConfig(function=f"tests.environments.played.{function}", **settings))
    pool.heard = {}
    return pool


def test_blocking_code_costs_one_timeout_and_the_others_no_more(tokenizer, monkeypatch):
    """It is known by the CPU time that it has while the worker owes an answer to a ping."""
    monkeypatch.setattr(module, "PONG_S", 2.0)  # a busy machine gives it none within a tenth of a second
    bad, *good = (prompt.problem for prompt in make_prompts(tokenizer, bad=1)[:4])
    pool = make_pool("faulty", args={"how": "stuck"}, timeout_s=4.0, workers=1)
    started, start = [], pool.start_worker
    pool.start_worker = lambda: (started.append(1), start())[1]
    try:
        keys = [pool.start(one, 0) for one in (*good, bad)]
        wait_for(pool, keys)
        for key in (keys[-1], *keys[:-1]):
            pool.say(key, "x")
        assert wait_for(pool, keys[-1:])[keys[-1]].failure == "timeout"
        assert {answer.failure for answer in wait_for(pool, keys[:-1]).values()} == {None}
        assert len(started) == 2, "each of them tried alone would need another worker"
    finally:
        pool.close()


def test_a_hang_costs_its_time_out_and_no_other_episode_anything(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "PONG_S", 60.0)
    pool = make_pool("faulty", args={"how": "hang"}, timeout_s=2.0, workers=1)
    good, bad = (prompt.problem for prompt in (make_prompts(tokenizer)[1], make_prompts(tokenizer, bad=1)[0]))
    try:
        keys = [pool.start(problem, 0) for problem in (bad, good)]
        wait_for(pool, keys)
        worker = pool.workers[0].process.pid
        pool.say(keys[0], "x")
        assert wait_for(pool, keys[:1])[keys[0]].failure == "timeout"
        pool.say(keys[1], "y")
        assert wait_for(pool, keys[1:])[keys[1]].reply.text == "d"
        assert pool.workers[0].process.pid == worker and pool.workers[0].retiring, "its own worker goes on"
        new = pool.start(good, 0)
        wait_for(pool, [new])
        assert len(pool.workers) == 2, "another episode gets another worker"
        pool.end(keys[1])
        assert [one.process.pid == worker for one in pool.workers] == [False]
    finally:
        pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_episodes_of_a_worker_that_ends_are_played_again(tokenizer):
    pool = make_pool("faulty", args={"how": "exit"}, workers=1)
    good, bad = (prompt.problem for prompt in (make_prompts(tokenizer)[1], make_prompts(tokenizer, bad=1)[0]))
    try:
        keys = [pool.start(problem, 0) for problem in (bad, good, good)]
        wait_for(pool, keys)
        pool.say(keys[1], "y")
        wait_for(pool, keys[1:2])
        pool.say(keys[0], "x")
        assert wait_for(pool, keys[:1])[keys[0]].failure == "crash"
        pool.say(keys[1], "y")
        pool.say(keys[2], "y")
        answers = wait_for(pool, keys[1:])
        assert all(answer.reply.text == "d" for answer in answers.values())
    finally:
        pool.close()


def test_an_environment_that_is_not_deterministic_is_found_out(tokenizer, tmp_path):
    pool = make_pool("fickle", args={"folder": str(tmp_path)}, workers=1)
    good, bad = (prompt.problem for prompt in (make_prompts(tokenizer)[1], make_prompts(tokenizer, bad=1)[0]))
    try:
        keys = [pool.start(problem, 0) for problem in (bad, good)]
        wait_for(pool, keys)
        pool.say(keys[1], "y")
        wait_for(pool, keys[1:])
        pool.say(keys[0], "x")
        answers = wait_for(pool, keys)
        assert answers[keys[0]].failure == "crash"
        answer = answers[keys[1]]
        assert answer.failure == "error" and "changed when it was replayed" in answer.message
    finally:
        pool.close()


@pytest.mark.parametrize("function, args, words", [
    ("nothing_here", {}, "has no function 'nothing_here'"),
    ("echo", {"turms": 3}, "unexpected keyword argument 'turms'"),
    ("os", {}, "no function"),
])  # fmt: skip
def test_unusable_environments_are_reported(tokenizer, function, args, words):
    pool = make_pool(function, args=args)
    try:
        with pytest.raises(EpisodeError, match=words):
            wait_for(pool, [pool.start(make_prompts(tokenizer)[0].problem, 0)])
    finally:
        pool.close()


def test_a_reply_that_has_no_place_costs_its_own_episode(played, tokenizer, monkeypatch):
    """As whom an environment without an argument `role` speaks is not known before it does."""
    prompts = make_prompts(tokenizer, bad=2)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    trajectories = played("misplaced", prompts=prompts, sampling=ONE)
    assert failures(trajectories) == ["invalid"] * 4
    assert all("no chat template" in item.episode.message for item in trajectories if item.episode.failure)
    assert {item.episode.outcome for item in trajectories if not item.episode.failure} == {1.0}


@pytest.mark.parametrize(
    ("how", "failure", "least"), [("raise", "error", 1e-6), ("exit", "crash", 0.0), ("hang", "timeout", 2.0)]
)
def test_failures_report_their_duration(tokenizer, how, failure, least):
    """A process that has ended is asked once more in another one; that this was ready, and has ended too, may be heard
    at once, and then it took no time that is known."""
    pool = make_pool("faulty", args={"how": how}, timeout_s=2.0 if how == "hang" else 30.0, workers=1)
    try:
        key = pool.start(make_prompts(tokenizer, bad=1)[0].problem, 0)
        wait_for(pool, [key])
        pool.say(key, "x")
        answer = wait_for(pool, [key])[key]
        assert answer.failure == failure and least <= answer.seconds < 60
    finally:
        pool.close()


def test_half_a_character_is_a_question_mark(played, tokenizer):
    trajectories = played("odd", prompts=make_prompts(tokenizer, bad=2))
    failed = [item.episode for item in trajectories if item.episode.failure]
    assert len(failed) == 8 and all(episode.message.startswith("RuntimeError: \ufffd") for episode in failed)
    answered = [item.episode.turns[0] for item in trajectories if not item.episode.failure]
    assert {(turn.reply, turn.labels) for turn in answered} == {("a\ufffdb", ("\ufffd",))}
