"""Workers that are stopped, killed, crowded or misused: the trainer never waits for one."""

import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from atomrl.config import EnvironmentConfig
from atomrl.environments.pool import EnvironmentPool
from atomrl.environments.worker import EpisodeError
from atomrl.types import Problem
from tests.environments.hard import Unreadable, Unsendable
from tests.environments.my_tools import wait_until


def make_problem(name="s0", **columns):
    return Problem(problem_id=name, prompt=name, ground_truth=None, columns=columns)


def make_pool(function, **settings):
    settings = {"workers": 1, **settings}
    return closing(EnvironmentPool(EnvironmentConfig(function=f"tests.environments.hard.{function}", **settings)))


def heard(pool, count, limit_s=120.0):
    """The next answers of as many episodes."""
    answers, end = {}, time.monotonic() + limit_s
    while len(answers) < count and time.monotonic() < end:
        answers |= dict(pool.answers(0.2))
    assert len(answers) >= count
    return answers


def test_a_worker_that_is_stopped_keeps_nobody_waiting():
    with make_pool("patient", timeout_s=5.0) as pool:
        keys = [pool.start(make_problem(), 0) for _ in range(20)]
        heard(pool, 20)
        os.kill(pool.workers[0].process.pid, signal.SIGSTOP)
        for key in keys:
            pool.say(key, "x" * 100_000)  # a send that waited for the worker would never return
        answers = heard(pool, 20)
        assert {answer.reply.text for answer in answers.values()} == {"100000"}, "played again by another worker"


IMPORTED = """
import os, time
from pathlib import Path
while not Path(__file__).with_name("go on").exists():
    time.sleep(0.02)
from tests.environments.hard import patient
"""


def test_requests_wait_while_a_new_worker_imports(tmp_path):
    (tmp_path / "late.py").write_text(IMPORTED)
    go_on = tmp_path / "go on"
    go_on.touch()
    settings = EnvironmentConfig(function=f"{tmp_path / 'late.py'}:patient", workers=1, timeout_s=3.0)
    with closing(EnvironmentPool(settings)) as pool:
        key = pool.start(make_problem(), 0)
        next_answer(pool, key)
        first = pool.workers[0]
        go_on.unlink()
        first.process.kill()
        while pool.workers in ([], [first]):
            pool.answers(0.1)
        pool.say(key, "xxx")
        end = pool.clock + 1.5 * settings.timeout_s
        while pool.clock < end:
            assert not pool.answers(0.2)
        assert not pool.workers[0].ready
        go_on.touch()
        assert next_answer(pool, key).reply.text == "3"


def next_answer(pool, key):
    return heard(pool, 1)[key]


def test_a_sample_that_cannot_be_sent_leaves_nothing_behind():
    with make_pool("patient") as pool:
        with pytest.raises(EpisodeError, match="problem 's0'"):
            pool.start(make_problem(value=Unsendable()), 0)
        assert not pool.waiting and not pool.workers


def test_a_sample_that_cannot_be_read_is_said():
    with (
        make_pool("patient") as pool,
        pytest.raises(EpisodeError, match="RuntimeError: not to be read"),
    ):
        pool.start(make_problem(value=Unreadable()), 0)
        heard(pool, 1)


@pytest.mark.parametrize("function", ["deaf", "deaf_and_waiting", "closing_badly"])
def test_an_environment_that_continues_after_the_last_turn_has_the_outcome_0(function):
    with make_pool(function) as pool:
        key = pool.start(make_problem(), 0)
        next_answer(pool, key)
        if function == "closing_badly":
            pool.say(key, "x")
            next_answer(pool, key)
        pool.cut(key)
        answer = next_answer(pool, key)
        assert answer.ended
        assert answer.outcome == 0.0 or (function == "closing_badly" and "ignored GeneratorExit" in answer.message)


@pytest.mark.parametrize("function, failure, words", [
    ("cancelled", "error", "CancelledError: a task was cancelled"),
    ("NoStart", "error", "OSError: no such game"),
    ("odd_label", "invalid", "label"),
    ("early_reward", "invalid", "not had a turn"),
    ("two_at_once", "invalid", "before the model answered"),
])  # fmt: skip
def test_what_goes_wrong_is_said_at_once(function, failure, words, tmp_path):
    refused = tmp_path / "refused"
    with make_pool(function, args={"refused": str(refused)} if function == "two_at_once" else {}) as pool:
        key = pool.start(make_problem(), 0)
        answer = next_answer(pool, key)
        if not answer.ended:
            wait_until(lambda: function != "two_at_once" or refused.exists())  # before the model answers
            pool.say(key, "x")
            answer = next_answer(pool, key)
        assert answer.failure == failure and words in answer.message


@pytest.mark.parametrize("function, args, failure, words", [
    ("nan_reward", {}, "invalid", "the reward of a Reply must be a finite number, not nan"),
    *[("odd_outcome", {"kind": kind}, "invalid", "must return a finite number, or None")
      for kind in ("nan", "inf", "text", "list", "huge", "complex", "reply")],
    ("long_message", {}, "error", "RuntimeError: \ufffd\u00e9"),
    ("no_words", {}, "error", "Unprintable: (its __str__ raises ValueError)"),
    ("nothing_at_all", {}, "invalid", "it replied []"), ("mixed", {}, "invalid", "several replies at once"),
    ("deep", {}, "error", "RecursionError"), ("exits", {}, "error", "SystemExit: 0"),
    ("interrupts", {}, "error", "KeyboardInterrupt"),
])  # fmt: skip
def test_errors_of_an_environment_are_one_line(function, args, failure, words):
    with nasty_pool(function, args) as pool:
        key = pool.start(make_problem(), 0)
        assert not next_answer(pool, key).ended
        pool.say(key, "x")
        answer = next_answer(pool, key)
        assert answer.failure == failure and words in answer.message and len(answer.message) < 1000


@pytest.mark.parametrize("function, turns, outcome", [
    ("leaves_at_once", 0, 1.0), ("never_says", 0, 0.5), ("empty", 4, 1.0), ("empty_message", 2, 1.0),
    ("task_left", 1, 1.0), ("many_words", 2, 1.0), ("mutates", 1, 1.0),
])  # fmt: skip
def test_what_is_odd_and_no_fault(function, turns, outcome):
    one, said = make_problem(), 0
    with nasty_pool(function, {}) as pool:
        key = pool.start(one, 0)
        while not (answer := next_answer(pool, key)).ended:
            pool.say(key, "x")
            said += 1
    assert (said, answer.outcome, answer.failure) == (turns, outcome, None)
    assert one.prompt == "s0" and not one.columns, "it has a copy"


def nasty_pool(function, args):
    settings = EnvironmentConfig(function=f"tests.environments.nasty.{function}", args=args, workers=1, timeout_s=60.0)
    return closing(EnvironmentPool(settings))


def test_half_a_character_is_replaced():
    with make_pool("surrogate") as pool:
        key = pool.start(make_problem(), 0)
        next_answer(pool, key)
        pool.say(key, "x")
        assert next_answer(pool, key).reply.text == "a\ufffdb"


def test_more_episodes_at_once_than_files_may_be_open():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = len(os.listdir("/proc/self/fd")) + 60  # of this process, and at first of its workers
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        with make_pool("sleepy") as pool:
            keys = [pool.start(make_problem(), 0) for _ in range(most)]
            heard(pool, most)
            for key in keys:
                pool.say(key, "x")
            assert {answer.failure for answer in heard(pool, most).values()} == {None}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_forks_threads_prints_and_folders_are_an_episodes_own_business(capfd):
    with make_pool("forking") as pool:
        for _ in range(2):
            key = pool.start(make_problem(), 0)
            next_answer(pool, key)
            pool.say(key, "x")
            assert next_answer(pool, key).reply.text == "a"
            pool.say(key, "x")
            assert next_answer(pool, key).outcome == 1.0
    out, err = capfd.readouterr()
    assert "printed" not in out and "printed" in err


def test_an_environment_that_closes_the_connection_costs_its_own_episode():
    with make_pool("closes") as pool:
        bad, good = pool.start(make_problem("bad"), 0), pool.start(make_problem(), 0)
        heard(pool, 2)
        pool.say(bad, "x")
        assert next_answer(pool, bad).failure == "crash"
        pool.say(good, "x")
        assert next_answer(pool, good).reply.text == "a"


def running(name):
    """The processes with a name among their arguments."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pids += [int(folder.name)] * (name.encode() in (folder / "cmdline").read_bytes())
    return pids


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by /proc")
@pytest.mark.parametrize("ends", [False, True])
def test_processes_that_left_the_session_end_with_the_worker(ends):
    """Also where the worker has ended by itself."""
    name = f"left-{os.getpid()}-{ends}"
    with make_pool("leaves", args={"name": name, "ends": ends}) as pool:
        key = pool.start(make_problem(), 0)
        next_answer(pool, key)
        pool.say(key, "x")
        next_answer(pool, key)
        wait_until(lambda: len(running(name)) == 2 + (not ends))
        if ends:
            pool.say(key, "x")
            assert next_answer(pool, key).failure == "crash"
    wait_until(lambda: not running(name))


def test_no_process_is_left(tmp_path):
    with make_pool("patient", workers=2) as pool:
        for _ in range(2):
            pool.start(make_problem(), 0)
        heard(pool, 2)
        pids = [worker.process.pid for worker in pool.workers]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


TRAINER = """
from atomrl.config import EnvironmentConfig
from atomrl.environments.pool import EnvironmentPool
from atomrl.types import Problem

pool = EnvironmentPool(EnvironmentConfig(function="tests.environments.hard.forks", workers=1))
key = pool.start(Problem(problem_id="s0", prompt="s0", ground_truth=None), 0)
answers = []
while not answers:
    answers = pool.answers(1.0)
print(answers[0][1].reply.text, flush=True)
pool.say(key, "x")
while True:
    pool.answers(1.0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel kills a worker with its parent on Linux only")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_and_its_forks_end_with_the_trainer(number):
    command, root = [sys.executable, "-c", TRAINER], Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, text=True) as trainer:
        worker, fork, program = map(int, trainer.stdout.readline().split())
        assert program == -signal.SIGTERM
        trainer.send_signal(number)
    wait_until(lambda: not alive(worker) and not alive(fork))


def alive(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    return False
