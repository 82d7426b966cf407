"""Rewards that hang, crash and lie, in worker processes; and what becomes of the processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atomrl.config import RewardConfig
from atomrl.rewards.compute import build_rewards, failure_counts
from atomrl.rewards.errors import RewardError
from atomrl.types import Problem
from tests.rewards.batches import rollouts, values

HERE = "tests.rewards.misbehaving."


def build(function, timeout_s=30.0, workers=2, **options):
    item = {"function": HERE + function, "timeout_s": timeout_s}
    return build_rewards(RewardConfig(functions=[item], workers=workers), **options)


@pytest.fixture(scope="module")
def by_row():
    rewards = build("obey_score")
    yield rewards
    rewards.close()


@pytest.fixture(scope="module")
def impatient():
    rewards = build("obey_score", timeout_s=3.0)
    yield rewards
    rewards.close()


def kinds(result):
    return {(t.problem.problem_id, t.index): f.kind for t in result for f in t.reward_failures}


def wait_until(condition, seconds=120):
    patience = time.monotonic() + seconds
    while not condition() and time.monotonic() < patience:
        time.sleep(0.02)
    return condition()


def alive(pid):
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


OUTCOMES = {
    "raise": "error", "sysexit": "error", "recursion": "error", "exit": "crash", "killed": "crash", "nan": "invalid",
    "inf": "invalid", "string": "invalid", "hang": "timeout", "spin": "timeout", "child": "timeout",
    "scribble": "crash", "garble": "crash", "no_words": "error",
}  # fmt: skip


def test_each_misdeed_has_its_outcome_and_costs_no_other_score(impatient):
    texts = [text for deed in OUTCOMES for text in (deed, str(len(deed)))] + ["none", "terminated"]
    result = impatient(rollouts({"a": texts}))
    expected = [None if text in OUTCOMES or text == "none" else 1.0 if text == "terminated" else float(text)
                for text in texts]  # fmt: skip
    assert list(values(result)[0]) == expected
    assert kinds(result) == {("a", 2 * n): kind for n, kind in enumerate(OUTCOMES.values())}
    counts = failure_counts(result)
    assert {name.rpartition("/")[2]: count for name, count in counts.items()} == {
        "timeouts": 3, "errors": 4, "crashes": 4, "invalid": 3
    }  # fmt: skip
    assert values(impatient(rollouts({"a": ["1", "2", "3"]}))) == ((1.0, 2.0, 3.0),)


@pytest.mark.parametrize("function", ["obey", "Obedient"])
def test_a_call_with_the_whole_batch_that_fails_is_done_again_one_by_one(function):
    rewards = build(function, timeout_s=3.0)
    try:
        result = rewards(rollouts({"a": ["1", "raise", "2"], "b": ["3"]}))
        assert values(result) == ((1.0, None, 2.0), (3.0,)) and kinds(result) == {("a", 1): "error"}
        result = rewards(rollouts({"a": ["1", "exit", "2"], "b": ["nan"]}))
        assert values(result) == ((1.0, None, 2.0), (None,)) and kinds(result) == {
            ("a", 1): "crash",
            ("b", 0): "invalid",
        }
        result = rewards(rollouts({"a": ["1", "hang"], "b": ["3"]}))
        assert values(result) == ((1.0, None), (3.0,)) and kinds(result) == {("a", 1): "timeout"}
    finally:
        rewards.close()


def test_a_wrong_number_of_values_is_no_value_for_any():
    rewards = build("forgets", patience=None)
    result = rewards(rollouts({"a": ["1", "2"]}))
    rewards.close()
    assert values(result) == ((None, None),) and set(kinds(result).values()) == {"invalid"}
    assert "returned 1 values for 2 completions" in result[0].reward_failures[0].message


@settings(max_examples=60, suppress_health_check=[*HealthCheck])
@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_permutations_drops_and_failures_never_give_a_completion_anothers_reward(by_row, seed, sizes):
    rng = random.Random(seed)
    bad = ["raise", "nan", "string", "sysexit", "none"] + ["exit"] * (seed % 10 == 0)
    groups = {
        f"{p}": [rng.choice(bad) if rng.random() < 0.3 else f"{p}.{g}1" for g in rng.sample(range(5), size)]
        for p, size in rng.sample(list(enumerate(sizes)), len(sizes))
    }
    by_row.patience = None
    result = by_row(rollouts(groups))
    expected = tuple(
        tuple(None if text in bad else float(text) for text in texts) for texts in groups.values() if texts
    )
    assert values(result) == expected
    failed = {(p, g) for p, texts in groups.items() for g, text in enumerate(texts) if text in bad and text != "none"}
    assert set(kinds(result)) == failed


@pytest.mark.slow
def test_a_reward_that_never_works_stops_early():
    for deed, kind in (("hang", "timeout"), ("exit", "crash")):
        rewards = build("obey_score", timeout_s=0.3)
        with pytest.raises(RewardError, match=f"first 16 calls.*{kind}: ") as error:
            rewards(rollouts({f"p{n}": [deed] * 8 for n in range(16)}))
        assert ("raise the reward's timeout_s" in str(error.value)) == (deed == "hang")
        assert values(rewards(rollouts({"a": ["1"]}))) == ((1.0,),), "and leaves the pool whole"
        rewards.close()


def test_random_rewards_depend_on_the_completion_alone():
    batch = rollouts({f"p{n}": ["random"] * 3 for n in range(10)})
    results = []
    for workers in (1, 3):
        rewards = build("obey_score", workers=workers)
        results += [values(rewards(batch)), values(rewards(batch))]
        rewards.close()
    assert all(result == results[0] for result in results)
    assert len({value for group in results[0] for value in group}) == 30


def test_workers_are_light_and_write_to_stderr_only(capfd):
    rewards = build("obey_score")
    assert values(rewards(rollouts({"a": ["torch", "print"] * 8}))) == ((0.0, 1.0) * 8,)
    rewards.close()
    captured = capfd.readouterr()
    assert captured.out == "" and "from a reward" in captured.err


def test_idle_workers_are_replaced_when_they_die(by_row):
    by_row(rollouts({"a": ["pid"] * 40}))
    for pid in by_row.pool.pids:
        os.kill(pid, signal.SIGKILL)
    assert values(by_row(rollouts({"a": ["2"] * 40}))) == ((2.0,) * 40,)


def test_several_threads_may_score(by_row):
    scores = {}

    def score(n):
        scores[n] = values(by_row(rollouts({"a": [f"{n}.{k}" for k in range(30)]})))[0]

    threads = [threading.Thread(target=score, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == {n: tuple(float(f"{n}.{k}") for k in range(30)) for n in range(4)}


def test_workers_outlive_the_thread_that_they_were_started_for():
    rewards = build("obey_score")
    pids = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: rewards(rollouts({"a": ["1"] * 40})))
        thread.start()
        thread.join()
        time.sleep(0.1)
        pids.append(rewards.pool.pids)
        assert all(map(alive, pids[-1]))
    rewards.close()
    assert pids[0] == pids[1]


def test_columns_that_cannot_be_sent_and_modules_that_a_worker_cannot_import(by_row, tmp_path, monkeypatch):
    problem = Problem(problem_id="a", prompt="p", ground_truth="", columns={"extra_info": {"lock": threading.Lock()}})
    with pytest.raises(RewardError, match=r"misbehaving\.obey_score.*columns"):
        by_row(rollouts({"a": ["1"]}, a=problem))
    module = tmp_path / "only_once.py"
    module.write_text("def f(prompts, completions, **columns):\n    return [1.0] * len(prompts)\n")
    monkeypatch.syspath_prepend(tmp_path)
    rewards = build_rewards(RewardConfig(functions=[{"function": "only_once.f"}]))
    module.write_text("raise RuntimeError('not twice')\n")
    with pytest.raises(RewardError, match=r"'only_once.f'.*twice"):
        rewards(rollouts({"a": ["1"]}))
    rewards.close()
    module.write_text("import os; os._exit(1)\n")
    with pytest.raises(RewardError, match="importing it ends"):
        rewards(rollouts({"a": ["1"]}))
    rewards.close()


def test_closing_leaves_no_process(impatient):
    impatient(rollouts({"a": ["child", "1"]}))
    impatient(rollouts({"a": ["pid"] * 40}))
    pids = impatient.pool.pids
    assert len(pids) == 2 and all(map(alive, pids))
    impatient.close()
    assert not any(map(alive, pids)) and impatient.pool.pids == []


def test_a_users_file_hides_none_of_pythons_modules(tmp_path):
    for name in ("json", "random", "socket", "traceback"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file of the user, beside the run')\n")
    (tmp_path / "mine.py").write_text("def f(prompts, completions, **columns):\n    return [1.0] * len(completions)\n")
    script = (
        "import os, sys; from tests.rewards.batches import rollouts, values\n"
        "from atomrl.config import RewardConfig; from atomrl.rewards.compute import build_rewards\n"
        "os.chdir(sys.argv[1]); sys.path.insert(0, '')\n"
        "rewards = build_rewards(RewardConfig(functions=[{'function': 'mine.f'}]))\n"
        "print(values(rewards(rollouts({'a': ['x']}))))"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600)
    assert done.stdout == "((1.0,),)\n", done.stderr


SCRIPT = """
import signal, sys, threading, time
from atomrl.config import RewardConfig
from atomrl.rewards.compute import build_rewards
from tests.rewards.batches import rollouts, values
item = {"function": "tests.rewards.misbehaving.obey_score", "timeout_s": 500}
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
rewards = build_rewards(RewardConfig(functions=[item]))
rewards(rollouts({"a": ["1"] * 40}))
print(*rewards.pool.pids, flush=True)
if sys.argv[1] == "busy":
    rewards(rollouts({"a": ["hang", "spin"]}))
elif sys.argv[1] == "raise":
    raise RuntimeError
elif sys.argv[1] == "wait":
    time.sleep(500)
"""


@pytest.mark.parametrize(
    ("state", "number"),
    [("busy", signal.SIGKILL), ("busy", signal.SIGTERM), ("busy", signal.SIGINT), ("wait", signal.SIGKILL),
     ("raise", None), ("end", None)],
)  # fmt: skip
def test_no_worker_outlives_the_process(state, number):
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, state], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    if number:
        time.sleep(0.5)
        process.send_signal(number)
    try:
        process.wait(timeout=120)
    finally:
        process.kill()
    process.stdout.close()
    assert wait_until(lambda: not any(map(alive, pids)))


def test_a_slow_group_holds_up_no_other(tmp_path):
    """Once others wait, one of two workers takes its calls one after another, and the other one theirs."""
    rewards = build("obey_score", timeout_s=600.0, workers=2, patience=None)
    scores, files = {}, [tmp_path / str(n) for n in range(8)]

    def score(name, texts):
        scores[name] = values(rewards(rollouts({name: texts}), judge=False))

    calls = {"slow": [*map(str, files)]}  # each waits for its file
    calls |= {f"fast{n}": [f"{n}.{k}" for k in range(8)] for n in range(3)}
    threads = [threading.Thread(target=score, args=call) for call in calls.items()]
    threads[0].start()
    assert wait_until(lambda: len(rewards.pool.pids) == 2), "alone it has both"
    for thread in threads[1:]:
        thread.start()
    # The first three are with the workers. A further one only if the fast ones were not there yet when these ended.
    # Never the last two: in the order of arrival both workers would now hold these.
    for number, file in enumerate(files[:-2]):
        file.touch()
        if number >= 2 and wait_until(lambda: len(scores) == 3, seconds=10):
            break
    ended = set(scores)
    for file in files:
        file.touch()
    for thread in threads:
        thread.join()
    rewards.close()
    assert ended == {"fast0", "fast1", "fast2"}
    assert scores == {"slow": ((1.0,) * 8,)} | {
        f"fast{n}": (tuple(float(f"{n}.{k}") for k in range(8)),) for n in range(3)
    }


def test_closing_ends_running_calls():
    rewards = build("obey_score", timeout_s=60.0)
    errors = []

    def score():
        try:
            rewards(rollouts({"a": ["hang", "hang"]}), judge=False)
        except RewardError as error:
            errors.append(str(error))

    thread = threading.Thread(target=score)
    thread.start()
    assert wait_until(lambda: len(rewards.pool.pids) == 2)
    rewards.close()
    thread.join(120)
    assert errors == ["the rewards were closed while they were computed"] and rewards.pool.pids == []


def test_a_reward_in_this_process_is_called_by_one_thread_at_a_time():
    inside, most = [], []

    def alone(prompts, completions, **columns):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return [1.0] * len(completions)

    class Waits:
        concurrent, together = True, threading.Barrier(4)

        def __call__(self, prompts, completions, **columns):
            self.together.wait(120)
            return alone(prompts, completions, **columns)

    for function in (alone, Waits()):
        rewards = build_rewards(RewardConfig(functions=[{"function": "local"}]), {"local": function})
        threads = [threading.Thread(target=rewards, args=(rollouts({"a": ["x"]}), False)) for _ in range(4)]
        most.clear()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(most) == 4 and (function is not alone or max(most) == 1)
        rewards.close()
