"""unsloth's helpers of rewards that run functions which a model wrote."""

import threading
import time

import pytest

from atomrl.config import ConfigError
from atomrl.trl.unsloth import check_python_modules, create_locked_down_function, execute_with_time_limit


def in_thread(function):
    """Call a function on another thread, as rewards are."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("called", [lambda function: function(), in_thread], ids=["here", "on a thread"])
def test_the_error_of_a_limit_is_raised_in_the_function(called):
    """One that catches it returns its result, one that does not has none, and one in C is late."""

    @execute_with_time_limit(0.1)
    def play(how):
        try:
            if how == "sleeps":
                time.sleep(0.4)
            end = time.monotonic() + (0 if how == "sleeps" else 20)
            while time.monotonic() < end:
                pass
        except Exception:
            if how == "catches":
                return "caught"
            raise
        return "ran on"

    def tried(how):
        begun = time.monotonic()
        try:
            return play(how), time.monotonic() - begun < 10
        except TimeoutError as error:
            return str(error), time.monotonic() - begun < 10

    answers = [called(lambda how=how: tried(how)) for how in ("catches", "runs", "sleeps")]
    assert answers == [("caught", True), ("no result after 0.1 s", True), ("no result after 0.1 s", True)]


def test_a_function_within_its_limit_returns_raises_and_changes_its_arguments():
    @execute_with_time_limit(5)
    def play(board):
        board.append(1)
        return 10 // len(board[1:])

    board = []
    with pytest.raises(ZeroDivisionError):
        play(board)
    assert play(board) == 10 and board == [1, 1]
    time.sleep(0.01)  # and nothing is raised afterwards


def test_a_process_of_its_own_is_refused():
    with pytest.raises(ConfigError, match="process"):
        execute_with_time_limit(1, backend="process")


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("import math\nfrom os import path", (True, ["math", "os"], [], 0)),
        ("def f():\n  import numpy.linalg\n  from . import x", (False, [], ["numpy"], 1)),
    ],
)
def test_modules_of_a_program(program, answer):
    ok, found = check_python_modules(program)
    assert (ok, found["stdlib"], found["non_stdlib"], found["relative_imports"]) == answer
    assert check_python_modules("def f(")[1]["error"].startswith("SyntaxError")


def test_a_locked_function_sees_no_globals():
    assert create_locked_down_function('"""A rule."""\ndef f(x):\n  def g(y): return y + 1\n  return g(x)')(2) == 3
    with pytest.raises(NameError):
        create_locked_down_function("def f():\n  return pytest")()


@pytest.mark.parametrize(
    "program", ["x = 1", "def f(): pass\ndef g(): pass", "def f(x=open('a')): pass", "def f(", "@int\ndef f(): pass"]
)
def test_a_program_that_is_not_one_function_is_an_error(program):
    with pytest.raises(RuntimeError):
        create_locked_down_function(program)
