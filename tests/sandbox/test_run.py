"""Programs run, are stopped at their limits, and are refused where there is no sandbox."""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from atomrl.environments.worker import EpisodeError, find_environment
from atomrl.rewards.errors import RewardError
from atomrl.rewards.scorer import find_scorer
from atomrl.sandbox import Limits, SandboxError, box, check, run, running
from atomrl.sandbox import box as layout
from atomrl.sandbox.judging import judge
from atomrl.sandbox.running import format_result, python


@pytest.fixture
def forgotten(monkeypatch):
    """A process that has not found any sandbox working."""
    monkeypatch.setattr(running, "WORKING", set())
    layout.helper.cache_clear()
    yield
    layout.helper.cache_clear()


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
def test_a_program_reads_writes_and_exits(kind, request):
    if kind == "bubblewrap":
        request.getfixturevalue("sandbox")
    source = "import sys\nprint(input().upper() + 'ß')\nprint('bad', file=sys.stderr)\nsys.exit(3)"
    result = run(source, stdin="abc\n", sandbox=kind)
    assert (result.stdout, result.stderr, result.code, result.ended) == ("ABCß\n", "bad\n", 3, "exit")
    assert not result.ok and run("pass", sandbox=kind).ok
    assert run("import os\nos.kill(os.getpid(), 11)", sandbox=kind).code == 128 + 11


def test_a_process_with_more_than_a_thousand_files_open_runs_and_judges(sandbox):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2048:
        pytest.skip("no process may have so many files open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert run("print(1)").stdout == "1\n"
        assert judge("def one(): return 1", ["assert one() == 1"])[0][0] == "passed"


@pytest.mark.parametrize(
    ("source", "ended"),
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(99)", "timeout"),
        ("while True: print('x' * 1000)", "output"),
        ("import os\nos.close(1); os.close(2)\nimport time; time.sleep(99)", "timeout"),
    ],
)
def test_a_limit_ends_it(source, ended, sandbox):
    wall_s = 20 if ended == "output" else 1.5  # a busy machine takes its time to start the program that prints
    result = run(source, limits=Limits(cpu_s=1, wall_s=wall_s, output_bytes=5000))
    assert result.ended == ended and result.seconds < wall_s + 60 and len(result.stdout) <= 5000 and not result.ok


def test_a_program_killed_by_a_signal_has_reached_no_limit():
    result = run("import os\nos.kill(os.getpid(), 9)", sandbox="none")
    assert (result.ended, result.code) == ("exit", 137)
    assert format_result(result, Limits(), 100) == "It was killed by SIGKILL."


def test_threads_event_loops_and_big_inputs_work(sandbox):
    assert run("import asyncio\nprint(asyncio.run(asyncio.sleep(0.01, 5)))").stdout == "5\n"
    threads = "import threading\nt = threading.Thread(target=print, args=('hi',))\nt.start()\nt.join()"
    assert run(threads).stdout == "hi\n"
    assert run("import sys\nprint(len(sys.stdin.read()))", stdin="x" * 3_000_000).stdout == "3000000\n"
    assert run("x = 1\n" * 100_000 + "print('long')").stdout == "long\n"
    assert run("print('\ud800' == 0)", stdin="\ud800").stdout == "False\n"
    children = "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'print(1)']).returncode)"
    assert run(children, limits=Limits(processes=4)).stdout.split() == ["1", "0"]
    modules = (
        "import bisect, collections, ctypes, decimal, fractions, hashlib, heapq, itertools, json, math, random, re"
    )
    assert (
        run(f"{modules}, sqlite3, statistics, string, zlib, datetime, functools, typing\nprint('all')").stdout
        == "all\n"
    )


def test_the_same_program_gives_the_same(sandbox):
    source = "print({str(k) for k in range(20)}, hash('x'), __name__)"
    assert len({run(source).stdout for _ in range(3)}) == 1


def test_many_at_once(sandbox):
    before = threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        printed = list(pool.map(lambda k: run(f"print({k} * 2)").stdout, range(24)))
    assert printed == [f"{k * 2}\n" for k in range(24)]
    assert threading.active_count() <= before + 2


def test_as_many_run_at_once_as_there_are_places(monkeypatch):
    active, most, go, count = [], [], threading.Event(), 3 * running.AT_ONCE

    def start(files, limits, sandbox, stdin):
        active.append(1)
        most.append(len(active))
        go.wait(60)
        active.pop()
        raise InterruptedError

    monkeypatch.setattr(running, "start", start)
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, "", sandbox="none") for _ in range(count)]
        end = time.monotonic() + 60
        while len(most) < running.AT_ONCE and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.2)  # in which others would begin
        go.set()
        assert {type(one.exception(60)) for one in futures} == {InterruptedError}
    assert max(most) == running.AT_ONCE and len(most) == count


def test_descriptors_and_children_do_not_pile_up(sandbox):
    run("pass")
    before, children = len(os.listdir("/proc/self/fd")), children_of_this_process()
    for source in ("pass", "while True: print(1)", "raise ValueError"):
        run(source, limits=Limits(wall_s=2, output_bytes=100))
    assert len(os.listdir("/proc/self/fd")) == before
    assert children_of_this_process() <= children


def children_of_this_process():
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def test_it_ends_with_the_process_that_started_it(sandbox):
    """Also where that one is killed."""
    source = (
        "from atomrl.sandbox import box\nimport os\n"
        "one = box.start({'main.py': 'import time; print(1, flush=True); time.sleep(600)'}, box.Limits(), 'bubblewrap', -3)\n"
        "one.process.stdout.readline()\n"
        "children = f'/proc/{one.process.pid}/task/{one.process.pid}/children'\n"
        "print(open(children).read(), flush=True)\nos.kill(os.getpid(), 9)"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as done:
        first = int(done.stdout.readline())
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with suppress(ChildProcessError):  # it may be ours now
            os.waitpid(first, os.WNOHANG)
        if not os.path.exists(f"/proc/{first}"):
            return
        time.sleep(0.02)
    raise AssertionError("the program goes on")


def test_a_missing_program_is_named_and_what_to_install(forgotten, monkeypatch, tmp_path):
    monkeypatch.setattr(layout.shutil, "which", lambda name, path=None: None if name == "bwrap" else f"/usr/bin/{name}")
    for ask in (lambda: check("bubblewrap"), lambda: run("pass"), lambda: python("pass")):
        with pytest.raises(SandboxError, match=r"bubblewrap.*sandbox: none"):
            ask()
    with pytest.raises(RewardError, match=r"reward 'code':.*bwrap"):
        find_scorer("code", {})
    with pytest.raises(EpisodeError, match=r"'python'.*bwrap"):
        find_environment("python", {})
    assert find_scorer("code", {"sandbox": "none"}) and find_environment("python", {"sandbox": "none"})


def test_a_system_that_forbids_it_is_told(forgotten, monkeypatch):
    monkeypatch.setattr(running, "start", lambda *given: _raise(PermissionError("no namespaces for you")))
    with pytest.raises(SandboxError, match="no namespaces"):
        check("bubblewrap")


def _raise(error):
    raise error


def test_no_sandbox_is_said_once_and_loudly(forgotten, caplog):
    for _ in range(3):
        assert run("print(1)", sandbox="none").stdout == "1\n"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "runs as you" in caplog.text


def test_an_unknown_one_is_no_sandbox():
    for name in ("nothing", None, ["none"], ""):
        with pytest.raises(SandboxError, match="unknown sandbox"):
            check(name)


def test_python_as_a_tool(sandbox):
    assert python("print(6 * 7)") == "42"
    assert python("1 / 0").endswith("ZeroDivisionError: division by zero")
    assert python("import sys\nsys.exit(2)") == "It exited with code 2."
    long = format_result(run("print('a' * 500 + 'b' * 500)"), Limits(), 100)
    assert len(long) < 110 and long.startswith("aaa") and long.endswith("bbb") and "\n...\n" in long


HELD = """
import sys
from pathlib import Path
from tests.sandbox.test_run import held

box, user = held(Path(sys.argv[1]))
print(user, flush=True)
sys.stdin.read()
"""


def held(folder):
    """A program that runs until it is ended, of a process whose turns begin anew; and its user id."""
    box.LEASES, box.user_turns = folder, itertools.count()
    source = "import os, time\nprint(os.getuid(), flush=True)\ntime.sleep(600)"
    program = box.start({"main.py": source}, Limits(wall_s=600), "bubblewrap", subprocess.DEVNULL)
    return program, int(program.process.stdout.readline())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives user ids of this machine")
def test_no_two_boxes_of_the_machine_have_the_same_user(sandbox, tmp_path, monkeypatch):
    """Not of two processes either; the id of a process that was killed can be had again."""
    monkeypatch.setattr(box, "LEASES", tmp_path / "users")
    monkeypatch.setattr(box, "user_turns", box.user_turns)
    command = [sys.executable, "-c", HELD, str(tmp_path / "users")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes) as other, ExitStack() as stack:
        stack.callback(other.kill)
        users = [int(other.stdout.readline())]
        for _ in range(2):
            program, user = held(tmp_path / "users")
            stack.callback(program.end)
            users.append(user)
        assert len({*users}) == 3
        other.kill()
        other.wait()
        program, user = held(tmp_path / "users")
        stack.callback(program.end)
        assert user == users[0]
    program, user = held(tmp_path / "users")
    program.end()
    assert user == users[0], "an id is free when its box has ended"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives user ids of this machine")
def test_a_folder_of_another_user_is_no_place_for_leases(sandbox, monkeypatch, tmp_path):
    monkeypatch.setattr(box, "LEASES", tmp_path)
    os.chown(tmp_path, 1, -1)
    with pytest.raises(PermissionError, match="another user"):
        run("pass")
