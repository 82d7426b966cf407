"""Verdicts on solutions: right and wrong ones as plain Python would judge them, and forgers get nothing."""

from __future__ import annotations

import pytest

from atomrl.sandbox import Limits
from atomrl.sandbox.judging import judge

LIMITS = Limits(cpu_s=20, wall_s=60.0, memory_mb=256)
FAIR = """
import collections
def add(a, b): return a + b
def sort(items): items.sort()
def drop(d, key): d.pop(key)
def evens(most):
    for k in range(most):
        if k % 2 == 0: yield k
def naturals():
    k = 0
    while True:
        yield k
        k += 1
def point(): return collections.namedtuple('Point', 'x y')(1, 2)
def table(): return {(1, 'a'): [1.5, None, True], 'b': {2, 3}, 'c': frozenset('x')}
def count(text): return collections.Counter(text)
def data(): return b'\\x00\\xff', 1 + 2j, range(3), '\\ud800', 10 ** 5000, float('inf')
def root(x):
    if x < 0: raise ValueError('negative')
    return x ** 0.5
def sum(a, b): return a * 10 + b
class Solution:
    def __init__(self, start=0): self.total = start
    def add(self, x):
        self.total += x
        return self.total
class Custom(Exception): pass
def fail(): raise Custom('mine')
def loud():
    print('to stdout')
    return input.__name__
def reads():
    return input()
LIMIT = 7
"""
HOLD = [
    "assert add(1, 2) == 3",
    "assert add(b=1, a='x' * 0 or 2) == 3",
    "assert add([1], [2]) == [1, 2] and add('a', 'b') == 'ab' and add((1,), ()) == (1,)",
    "items = [3, 1, 2]\nassert sort(items) is None\nassert items == [1, 2, 3]",
    "d = {'a': 1, 'b': 2}\ndrop(d, 'a')\nassert d == {'b': 2}",
    "assert list(evens(5)) == [0, 2, 4]",
    "from itertools import islice\nassert list(islice(naturals(), 3)) == [0, 1, 2]",
    "assert next(naturals()) == 0",
    "assert point() == (1, 2)",
    "assert table() == {(1, 'a'): [1.5, None, True], 'b': {2, 3}, 'c': frozenset('x')}",
    "assert count('aab') == {'a': 2, 'b': 1}",
    "assert data() == (b'\\x00\\xff', 1 + 2j, range(3), '\\ud800', 10 ** 5000, float('inf'))",
    "assert math.isclose(root(2), 1.414, rel_tol=1e-3)",
    "import math\nassert math.isclose(root(2), math.sqrt(2))",
    "try:\n    root(-1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'negative'",
    "from unittest import TestCase\nTestCase().assertRaises(ValueError, root, -1)",
    "s = Solution(5)\nassert s.add(1) == 6 and s.add(2) == 8 and s.total == 8",
    "assert set(add([1, 2], [2])) == set([1, 2]) and sorted(add([2], [1])) == [1, 2]",
    "try:\n    fail()\n    assert False\nexcept RuntimeError as error:\n    assert 'mine' in str(error)",
    "assert loud() == 'input'",
    "try:\n    reads()\n    assert False\nexcept EOFError:\n    pass",
    "from solution import add as plus, Solution\nassert plus(1, 2) == 3 and Solution().add(4) == 4",
    "import solution\nassert solution.add(1, 2) == 3 and not hasattr(solution, 'other')",
    "def check(candidate):\n    assert candidate(1, 1) == 2\ncheck(add)",
    "assert add(1, 2) == LIMIT - 4",
    "assert not add(0, 0)",
    "assert sum(1, 2) == 12",
    "assert [add(x, 1) for x in (1, 2)] == [2, 3] and list(map(add, [1], [2])) == [3]",
    "print('tests may print')\nassert True",
]
FAIL = [
    "assert add(1, 2) == 4", "assert add(1)", "assert unknown(1) == 1", "assert root(-1)", "assert False", "1 / 0",
    "import sys\nsys.exit(0)\nassert False", "assert fail() is None", "assert add(1, 2) == '3'", "assert add(1, 2) is True",
    "assert Solution()", "assert Solution() == Solution()", "this is no Python",
]  # fmt: skip
UNSERVED = ["assert add(lambda x: x, 1)", "class A: pass\nassert add(A(), A())", "assert np.allclose(add(1, 2), 3)"]


def kinds(solution, tests, limits=LIMITS, **given):
    return [verdict.kind for verdict in judge(solution, tests, limits=limits, **given)]


def test_correct_assertions_pass_and_wrong_ones_fail(sandbox):
    verdicts = judge(FAIR, [*HOLD, *FAIL, *UNSERVED], limits=LIMITS, entries=["sum"])
    wanted = ["passed"] * len(HOLD) + ["failed"] * len(FAIL) + ["unserved"] * len(UNSERVED)
    wrong = [
        (test, one) for test, one, kind in zip(HOLD + FAIL + UNSERVED, verdicts, wanted, strict=True) if one[0] != kind
    ]
    assert wrong == []


def test_without_a_sandbox_too(caplog):
    verdicts = judge(FAIR, [HOLD[0], FAIL[0], UNSERVED[0]], limits=LIMITS, sandbox="none")
    assert [one.kind for one in verdicts] == ["passed", "failed", "unserved"]


FORGERIES = {
    "leaves": "import os\nos._exit(0)",
    "leaves in the call": "import os\ndef f(x): os._exit(0)",
    "exits": "import sys\ndef f(x): sys.exit(0)",
    "raises SystemExit at once": "raise SystemExit(0)",
    "is equal to everything": "class A:\n    def __eq__(s, o): return True\n    def __hash__(s): return 0\ndef f(x): return A()",
    "is an int that is equal to everything": "class A(int):\n    def __eq__(s, o): return True\ndef f(x): return A(0)",
    "is a str that is equal to everything": "class A(str):\n    def __eq__(s, o): return True\n    __hash__ = str.__hash__\n"
    "def f(x): return A('')",
    "is a list that is equal to everything": "class A(list):\n    def __eq__(s, o): return True\ndef f(x): return A()",
    "is a tuple that is equal to everything": "class A(tuple):\n    def __eq__(s, o): return True\ndef f(x): return A()",
    "is true": "class A:\n    def __bool__(s): return True\n    def __getattr__(s, n): return s\n"
    "    def __call__(s, *a): return s\ndef f(x): return A()",
    "is never unequal": "class A:\n    def __ne__(s, o): return False\ndef f(x): return A()",
    "patches builtins": "import builtins\nbuiltins.AssertionError = None\nbuiltins.isinstance = lambda *a: True\n"
    "builtins.int = builtins.float = lambda x: 42\ndef f(x): return 0",
    "patches json": "import json\njson.dumps = lambda x, **k: '{\"value\": true}'\njson.loads = lambda x: ['call', None, 'f']\n"
    "def f(x): return 0",
    "patches the harness": "import __main__ as m\nm.encode = lambda *a: True\nm.PASSED = m.FAILED = 'passed'\n"
    "m._judge = lambda *a: ('passed', '')\ndef f(x): return 0",
    "writes verdicts": "import os, sys\nfor d in range(64):\n    try: os.write(d, b'[\"passed\", \"\"]\\n' * 9)\n"
    "    except OSError: pass\ndef f(x): return 0",
    "writes verdicts in the call": "import os\ndef f(x):\n    for d in range(64):\n"
    "        try: os.write(d, b'[\"passed\", \"\"]\\n')\n        except OSError: pass\n    return 0",
    "writes values": "import os\ndef f(x):\n    for d in range(64):\n"
    "        try: os.write(d, b'{\"value\": true}\\n{\"value\": {\"remote\": 0}}\\n')\n        except OSError: pass\n    return 0",
    "writes no JSON": "import os\ndef f(x):\n    os.write(4, b'}{' * 9)\n    return 0",
    "writes deep JSON": "import os\ndef f(x):\n    os.write(4, b'[' * 10 ** 5 + b'\\n')\n    return 0",
    "writes without end": "import os\ndef f(x):\n    while True: os.write(4, b'x' * 10 ** 5)",
    "looks for the answer in frames": "import sys, gc\ndef f(x):\n    frame = sys._getframe()\n    found = []\n"
    "    while frame:\n        found += [v for v in frame.f_locals.values() if type(v) is int and v > 999]\n"
    "        frame = frame.f_back\n    found += [o for o in gc.get_objects() if type(o) is int and o > 999]\n"
    "    return found[0] if found else 0",
    "looks for the answer in files": "import glob\ndef f(x):\n    text = ''\n"
    "    for path in glob.glob('/code/*') + glob.glob('/tmp/**', recursive=True) + glob.glob('/proc/*/cmdline'):\n"
    "        try: text += open(path).read()\n        except OSError: pass\n"
    "    import re\n    found = re.findall(r'f\\(\\d+\\) == (\\d+)', text)\n    return int(found[0]) if found else 0",
    "traces": "import sys\ndef t(frame, event, arg):\n    if event == 'return': frame.f_locals['value'] = 1\n    return t\n"
    "sys.settrace(t)\nsys.setprofile(t)\ndef f(x): return 0",
    "hooks its end": "import atexit, os\natexit.register(lambda: os.write(1, b'[\"passed\", \"\"]'))\ndef f(x): raise KeyboardInterrupt",
    "calls something f that is not": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 0",
    "renames what judges": "def set(x): return 1\ndef sorted(x): return 1\ndef len(x): return 1\ndef f(x): return []",
    "gives back what it is asked": "def f(x): return x",
    "is a generator": "def f(x): yield True",
    "raises StopIteration": "def f(x): raise StopIteration(True)",
    "raises AssertionError": "def f(x): raise AssertionError",
    "is no number": "def f(x): return float('nan')",
    "hangs": "def f(x):\n    while True: pass",
    "hangs at once": "while True: pass",
    "fills memory": "def f(x): return [0] * 10 ** 9",
    "answers with much": "def f(x): return 'x' * 10 ** 8",
    "is slow to hash": "def f(x): return {k * (2 ** 61 - 1) for k in range(2 * 10 ** 4)}",
    "never answers": "import os\ndef f(x): os.closerange(0, 64)\n",
    "lies about its names": "import sys\nclass M(type(sys)):\n    @property\n    def __dict__(s): return {'check': 1}\n"
    "sys.modules['solution'].__class__ = M\ndef f(x): return 0",
}  # fmt: skip
TESTS = ["assert f(3) == 1234567", "assert not f(3) != 7654321", "assert math.isclose(f(2), 1234.5)",
         "assert set(f(2)) == set([1234])"]  # fmt: skip


SLOW = {"hangs", "hangs at once", "never answers", "is slow to hash"}
"""Each test of these takes all of its time, so one test is enough."""


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forger_passes_nothing(name, sandbox):
    tests = TESTS[-1:] if name in SLOW else TESTS
    verdicts = judge(FORGERIES[name], tests, limits=Limits(cpu_s=1, wall_s=1.0, memory_mb=256), total_s=6.0)
    assert [one.kind for one in verdicts if one.kind not in ("failed", "timeout")] == [] != verdicts


def test_a_crashed_solution_restarts_for_the_next_test(sandbox):
    solution = "import os, time\ndef f(x):\n    if x == 1: os._exit(0)\n    if x == 2: time.sleep(99)\n    return x"
    tests = [f"assert f({x}) == {x}" for x in (0, 1, 2, 3)]
    limits = Limits(cpu_s=2, wall_s=5.0, memory_mb=256)
    assert kinds(solution, tests, limits) == ["passed", "failed", "timeout", "passed"]


def test_when_time_is_over_the_rest_has_no_verdict(sandbox):
    """How many have one depends on the machine: each takes a third of the time, and none begins after it."""
    verdicts = kinds("import time\ndef f(x): time.sleep(1)", ["f(1)"] * 9, total_s=3.0)
    assert len(verdicts) <= 3 and set(verdicts) <= {"passed"}
