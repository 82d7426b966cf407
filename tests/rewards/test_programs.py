"""The reward `code`: layouts of tests, scores, and what is no score."""

from __future__ import annotations

import json

import pytest

from atomrl.config import RewardConfig
from atomrl.rewards.code_blocks import last_block
from atomrl.rewards.compute import build_rewards
from atomrl.rewards.program_tests import cases_of
from atomrl.rewards.programs import code, same_output
from atomrl.types import Problem
from tests.rewards.batches import failures, rollouts, values
from tests.sandbox.attacks import ATTACKS, source_of

STDIN = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ADDS = "a, b = map(int, input().split())\nprint(a + b)"
MULTIPLIES_TO_THREE = "a, b = map(int, input().split())\nprint(3)"
FUNCTION = "def add(a, b):\n    return a + b"
CLASS = "class Solution:\n    def add(self, a, b):\n        return a + b"


def block(program):
    return f"I think so:\n```python\n{program}\n```\n"


def score(program, tests, all_or_nothing=False, **row):
    args = {"total_s": 30.0, "all_or_nothing": all_or_nothing}
    [score] = code([""], [block(program)], [tests], **args, **{name: [value] for name, value in row.items()})
    return score


LAYOUTS = {
    "verl, APPS, TACO": (STDIN, ADDS, {}),
    "as JSON": (json.dumps(STDIN), ADDS, {}),
    "lines": ({"inputs": [["1 2"]], "outputs": [["3"]]}, ADDS, {}),
    "calls of APPS": ({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}, FUNCTION, {}),
    "calls of APPS, whose outputs are in lists": ({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}, FUNCTION, {}),
    "calls of APPS of a class": ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}, CLASS, {}),
    "PrimeIntellect": ([{"type": "stdin_stdout", "input": "1 2", "output": "3"}], ADDS, {}),
    "PrimeIntellect's calls": ([{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3}], FUNCTION, {}),
    "LiveCodeBench": ([{"testtype": "stdin", "input": "1 2", "output": "3"}], ADDS, {}),
    "LiveCodeBench's calls": (
        [{"testtype": "functional", "input": "1\n2", "output": "3", "metadata": {"func_name": "add"}}], CLASS, {},
    ),
    "MBPP": (["assert add(1, 2) == 3", "assert math.isclose(add(1, 2), 3)"], FUNCTION, {"test_imports": ["import math"]}),
    "MBPP, older": (["assert add(1, 2) == three"], FUNCTION, {"test_setup_code": "three = 3"}),
    "HumanEval": ("def check(candidate):\n    assert candidate(1, 2) == 3\n", FUNCTION, {"entry_point": "add"}),
    "functions": ("def test_a():\n    assert add(1, 2) == 3\ndef test_b():\n    assert add(0, 0) == 0", FUNCTION, {}),
    "assertions": ("x = add(1, 2)\nassert x == 3\nx = add(x, 1)\nassert x == 4", FUNCTION, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_tests_of_each_layout_tell_right_from_wrong(name, sandbox):
    tests, program, row = LAYOUTS[name]
    assert score(program, tests, **row) == 1.0
    wrong = program.replace("a + b", "a + b + 1")
    assert wrong != program and score(wrong, tests, **row) == 0.0


def test_the_share_of_tests(sandbox):
    assert score(MULTIPLIES_TO_THREE, STDIN) == 0.5
    assert score(MULTIPLIES_TO_THREE, STDIN, all_or_nothing=True) == 0.0
    assert score(ADDS, STDIN, all_or_nothing=True) == 1.0
    assert score(FUNCTION, ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "assert add(0, 1)"]) == pytest.approx(
        2 / 3
    )


def test_the_last_block_is_the_program():
    text = block("first") + "No.\n```\nsecond\n```\n" + "```python\nunfinished"
    assert last_block(text) == "second\n" and last_block("print(1)") is None and last_block("```\n") is None
    assert last_block("```python\r\nprint('a\u2028b')\r\n```\r\n") == "print('a\u2028b')\r\n"
    assert code([""], ["print(3)"], [STDIN], sandbox="none") == [0.0]


def fenced(*blocks, fence="```"):
    return (
        "So:\n" + "\nThen:\n".join(f"{fence}{language}\n{source}\n{fence}" for language, source in blocks) + "\nDone."
    )


DEFINES = "def f(x):\n    return x + 1"
READS = DEFINES + "\nprint(f(int(input())))"


@pytest.mark.parametrize(
    ("text", "wanted", "program"),
    [
        (fenced(("python", READS), ("", "2")), (), READS),
        (fenced(("python", READS), ("", "[1, 2]")), (), READS),
        (fenced(("python", READS), ("text", "f(1)")), (), READS),
        (fenced(("python", READS), ("bash", "python main.py")), (), READS),
        (fenced(("python", READS), ("python", "print(f(1))")), (), READS),
        (fenced(("python", READS), ("python", "assert f(1) == 2")), (), READS),
        (fenced(("python", DEFINES), ("python", "print(f(int(input())))")), (), DEFINES + "\nprint(f(int(input())))"),
        (fenced(("python", DEFINES), ("python", "print(f(1))")), ("f",), DEFINES),
        (fenced(("python", DEFINES), ("python", "from solution import f\nf(1)")), ("f",), DEFINES),
        (fenced(("python", "import math"), ("python", DEFINES)), ("f",), DEFINES),
        (fenced(("python", "def g(x):\n    return x"), ("python", "def f(x):\n    return g(x)")), ("f",),
         "def g(x):\n    return x\ndef f(x):\n    return g(x)"),
        (fenced(("python", "print(1)"), ("python", "print(2)")), (), "print(2)"),
        (fenced(("python", READS), ("", "n = 5")), (), READS),
        (fenced(("python", 'def f(x):\n    """\n    ```\n    1\n    ```\n    """')), (),
         'def f(x):\n    """\n    ```\n    1\n    ```\n    """'),
        (fenced(("py", DEFINES), fence="~~~"), ("f",), DEFINES),
        (fenced(("python", DEFINES), fence="````"), ("f",), DEFINES),
        ("1. So:\n   ```python\n   print(2)\n   ```", (), "print(2)"),
        ("- So:\n\t```\n\tif 1:\n\t    print(2)\n\t```", (), "if 1:\n    print(2)"),
        ("> ```python\n> print(2)\n> ```", (), "print(2)"),
        ("```python\nbroken(\n```python\nprint(2)\n```", (), "print(2)"),
    ],
)  # fmt: skip
def test_the_program_among_several_blocks(text, wanted, program):
    assert last_block(text, wanted).rstrip("\n") == program


def test_names_that_the_judge_of_a_problem_imports():
    assert last_block(fenced(("python", "def f(x: List[int]): return x"))).startswith("from typing import List\n")
    future = last_block(fenced(("python", "from __future__ import annotations\nx: Optional[int] = 1")))
    assert future.startswith("from __future__ import annotations\nfrom typing import Optional\n")
    solution = last_block(
        fenced(("python", "class Solution:\n    def f(self, x):\n        return Counter(math.gcd(x, 2))"))
    )
    assert solution.startswith("from collections import Counter\nimport math\n")
    plain = "List = list\ndef f(x: List): return Counter(x)"
    assert last_block(fenced(("python", plain))) == plain + "\n"


LISTS = {"fn_name": "s", "inputs": [[[3, 1, 2]], [[9]]], "outputs": [[1, 2, 3], [9]]}


@pytest.mark.parametrize("tests", [
    LISTS, json.dumps(LISTS),
    [{"testtype": "functional", "input": "[3, 1, 2]", "output": "[1, 2, 3]"}, {"testtype": "functional", "input": "[9]", "output": "[9]"}],
    {"fn_name": "s", "inputs": [[[3, 1, 2]], [[9]]], "outputs": [[[1, 2, 3]], [[9]]]},
])  # fmt: skip
def test_a_part_of_a_list_is_not_the_list(tests, sandbox):
    row = {"fn_name": "s"}
    assert score("def s(a): return sorted(a)", tests, **row) == 1.0
    for forged in ("s = min", "def s(a): return min(a)", "def s(a): return [sorted(a)]", "def s(a): return sorted(a)[:1]",
                   "class Any:\n    def __eq__(self, other): return True\ndef s(a): return Any()",
                   "import builtins\ndef s(a):\n    builtins.list = object\n    return min(a)",
                   "def s(a):\n    raise SystemExit(0)"):  # fmt: skip
        assert score(forged, tests, all_or_nothing=True, **row) == 0.0, forged


def test_output_is_compared_as_people_do():
    assert same_output(" 1 2 \r\n3\n\n", "1 2\n3") and not same_output("1\n2", "1 2") and not same_output("", "0")
    assert same_output("0.3333333", "0.333333333333") and same_output("1e-9", "0.0") and not same_output("0.34", "0.33")
    assert not same_output("1.0", "1") and same_output("1", "1.0") and not same_output("nan", "1.0")
    assert not same_output("2_0.0", "20.0") and not same_output("２0.0", "20.0") and same_output("2e1", "20.0")
    assert not same_output("1.0000001", "1") and not same_output("inf", "2.5")


@pytest.mark.parametrize("tests", [None, 5, "", "{", "no tests here", "def f(): pass", [], {"inputs": ["1"]}, [1],
                                   {"inputs": ["1"], "outputs": []}, ["f(1) == 2"], ["assert f(1"],
                                   {"inputs": "12", "outputs": "34"}, {"inputs": [{"x": 1}], "outputs": [2], "fn_name": "f"}, [{"type": "function_call", "input": 1, "output": 2}],
                                   ])  # fmt: skip
def test_malformed_tests_are_an_error(tests):
    with pytest.raises(ValueError):
        cases_of(tests, {})


@pytest.mark.slow
def test_in_a_run_attacks_score_nothing_and_honest_programs_do(sandbox, tmp_path):
    chosen = ["fork bomb", "two gigabytes", "endless output", "kill the parent", "write into the host", "sleep"]
    texts = [
        block(ADDS),
        *(block(source_of(ATTACKS[name], str(tmp_path))) for name in chosen),
        "no program",
        block(ADDS),
    ]
    config = RewardConfig(functions=[{"function": "code", "args": {"case_s": 1.0}, "timeout_s": 30}], workers=2)
    rewards = build_rewards(config)
    try:
        scored = rewards(rollouts({"a": texts}, a=Problem(problem_id="a", prompt="p", ground_truth=STDIN)))
        assert values(scored) == ((1.0, *[0.0] * (len(chosen) + 1), 1.0),) and failures(scored) == []
    finally:
        rewards.close()
    assert [*tmp_path.iterdir()] == []


def test_no_score_is_no_zero(sandbox):
    [unserved] = code([""], [block("def f(g): return g(1)")], [["assert f(lambda x: x) == 1"]])
    assert unserved.kind == "invalid" and "test 1: a function cannot be passed" in str(unserved)
    many = {"inputs": ["1 2"] * 500, "outputs": ["3"] * 500}
    [late] = code([""], [block(ADDS)], [many], total_s=0.5)
    assert late.kind == "timeout" and "500 tests took over 0.5 s" in str(late)
    [slow] = code([""], [block("import time\ntime.sleep(9)")], [many], total_s=1.0, case_s=0.1)
    assert slow == 0.0


def test_tests_may_stand_in_another_column(sandbox):
    [score] = code([""], [block(FUNCTION)], [None], test_column="test_list", test_list=[["assert add(1, 2) == 3"]])
    assert score == 1.0
    with pytest.raises(ValueError, match="column 'tests'"):
        code([""], [""], [None], test_column="tests")
