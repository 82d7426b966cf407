"""Countdown, and what stands between a model's text and scorers that would run it."""

from __future__ import annotations

import importlib.util
from fractions import Fraction

import pytest

from atomrl.rewards.expressions import evaluate_arithmetic, is_tame_formula
from atomrl.rewards.tasks import countdown, reasoning_gym


def form(answer: str) -> str:
    return f"<think>so</think><answer>{answer}</answer>"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("(25 - 3) * 7", 1),
        ("7*(25-3)", 1),
        ("(25 - 3) * 7 = 154", 1),
        ("(25 - 3) * 7 = 155", 0),
        ("(25 - 3) * 7 =", 0),
        ("154", 0),
        ("25 - 3 * 7", 0),
        ("22 * 7", 0),
        ("(25 - 3) * 7 + 3 - 3", 0),
        ("(25 - 3) * 7 * 1", 0),
        ("(25 -- 3) * 7", 0),
        ("(25.0 - 3) * 7", 0),
        ("(25 - 3) × 7", 0),
        ("(25 - 3) * 7;", 0),
        ("[(25 - 3) * 7][0]", 0),
        ("(25 - 3) * 7 if 1 else 0", 0),
        ("eval('154')", 0),
        ("(25 - 3) * 7 # 154", 0),
        ("7**25**3", 0),
        ("", 0),
        ("(" * 100 + "25", 0),
    ],
)
def test_countdown_rewards_an_expression_of_its_numbers(answer, expected):
    assert countdown([""], [form(answer)], ["154"], numbers=[[3, 7, 25]]) == [expected]


def test_countdown_uses_equal_numbers_as_often_as_given_and_fractions_exactly():
    assert countdown([""] * 2, [form("5 + 5"), form("5 + 5 + 0")], ["10"] * 2, numbers=[[5, 5]] * 2) == [1.0, 0.0]
    assert countdown([""], [form("8 / (3 - 8 / 3)")], [24], numbers=[[3, 3, 8, 8]]) == [1.0]
    assert countdown([""], ["(25 - 3) * 7"], ["154"], numbers=[[3, 7, 25]]) == [0.0]
    with pytest.raises(ValueError, match="list of numbers"):
        countdown([""], [form("1")], ["154"], numbers=[None])


def test_generated_solutions_score():
    from atomrl.data.tasks import generate

    rows = generate("countdown", 200)
    texts = [form(row["solution"]) for row in rows]
    columns = {"ground_truth": [row["ground_truth"] for row in rows], "numbers": [row["numbers"] for row in rows]}
    assert countdown([""] * 200, texts, **columns) == [1.0] * 200
    assert sum(countdown([""] * 200, texts[1:] + texts[:1], **columns)) == 0


def test_arithmetic_is_evaluated_exactly_and_nothing_else_is():
    assert evaluate_arithmetic("1/3 + 1/6") == (Fraction(1, 2), [1, 3, 1, 6])
    for text in ("1/0", "-1", "1e5", "0x10", "1j", "a", "1,2", "", "()", "2**3", "7//2", "1 if 1 else 2", "1\n+1",
                 "9" * 201, "1+" * 99 + "1", "(" * 199):  # fmt: skip
        assert (evaluate_arithmetic(text) is None) == (text != "1+" * 99 + "1"), text


@pytest.mark.parametrize(
    ("formula", "tame"),
    [
        ("x**2/2 + C", True),
        ("-3*x**4 + sin(2*x)*exp(x) - log(x)/5 + C", True),
        ("pi*sqrt(x) + (x + 1)**(1/2)", True),
        ("2*x**-3", True),
        ("(x**10 + 1)**10", True),
        ("x**n", True),
        ("9**9**9", False),
        ("(9**50)**50", False),
        ("2**x", False),
        ("9**(x - x + 100*100*100*100)", False),
        ("(x + 1)**999999", False),
        ("((x + 1)**20)**20", False),
        ("1e99999999", False),
        ("factorial(10)", False),
        ("x!", False),
        ("x^2", False),
        ("S('x')", False),
        ("S(x)", False),
        ("x.subs(x, 1)", False),
        ("().__class__", False),
        ("__import__('os').system('true')", False),
        ("exec(x)", False),
        ("lambda: x", False),
        ("[x for x in y]", False),
        ("sin(x)(x)", False),
        ("xx", False),
        ("sin", False),
    ],
)
def test_formulas_for_computer_algebra(formula, tame):
    assert is_tame_formula(formula) == tame


needs_reasoning_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="needs the tasks extra"
)


@needs_reasoning_gym
def test_no_answer_is_run(tmp_path):
    from atomrl.data.tasks import generate
    from atomrl.rewards.tasks import ARITHMETIC_TASKS, FORMULA_TASKS, LITERAL_TASKS

    witness = tmp_path / "witness"
    attack = f"__import__('pathlib').Path({str(witness)!r}).touch()"
    for name in LITERAL_TASKS + ARITHMETIC_TASKS + FORMULA_TASKS:
        [row] = generate(f"reasoning_gym:{name}", 1)
        column = [row["reasoning_gym"]] * 2
        for texts in ([f"<answer>{attack}</answer>", f"<answer>[{attack}]</answer>"],):
            assert reasoning_gym([""] * 2, texts, reasoning_gym=column) == [0.0, 0.0]
        assert not witness.exists()
        assert reasoning_gym([""], [f"<answer>{row['ground_truth']}</answer>"], reasoning_gym=column[:1]) == [1.0]


@needs_reasoning_gym
def test_boards_survive_the_file_format():
    from atomrl.data.tasks import generate

    [row] = generate("reasoning_gym:arc_agi", 1)
    text = f"<answer>{row['ground_truth']}</answer>"
    assert reasoning_gym([""], [text], reasoning_gym=[row["reasoning_gym"]]) == [1.0]
