"""The strict form and exact answers, against everything that should not pass."""

from __future__ import annotations

import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from atomrl.rewards.answers import answers_equal, parse_number
from atomrl.rewards.extraction import extract_answer, last_boxed, tagged_answer
from atomrl.rewards.format import has_strict_format, reasoning_text, strict_format
from atomrl.rewards.verifiable import exact_match, gsm8k, strict_math


def form(answer: str, think: str = "so") -> str:
    return f"<think>{think}</think><answer>{answer}</answer>"


RIGHT_FORM = [
    form("18"),
    " \n" + form("18") + "\n\n",
    "<think>\nline one\nline two\n</think>\n\n<answer>\n18\n</answer>",
    form("18", "is 3 < 4 and <b>this</b> fine? $x$ \\boxed{17} #### 12"),
    form("18", "思考 🤔"),
    form("18", "so " * 20_000),
]
WRONG_FORM = [
    "",
    "18",
    "<answer>18</answer>",
    "<think>so</think>18",
    "<think>so</think>",
    "<think>so</think><answer>18",
    "<think>so<answer>18</answer>",
    "so</think><answer>18</answer>",
    "<think>so</think><answer></answer>",
    "<think>so</think><answer> \n</answer>",
    "<think></think><answer>18</answer>",
    "<think> \n </think><answer>18</answer>",
    "Sure! " + form("18"),
    form("18") + " Hope that helps.",
    form("18") + "<|im_end|>",
    "<think>so</think> the answer is <answer>18</answer>",
    form("17") + form("18"),
    form("18") * 2,
    "<think>a</think><think>b</think><answer>18</answer>",
    "<think>a</think><answer>17</answer><answer>18</answer>",
    form("18", "<answer>18</answer>"),
    form("18", "I close with </answer> soon"),
    form("18", "<think>nested</think>"),
    form("<answer>18</answer>"),
    form("18</think>"),
    form("<think>18"),
    "<answer>18</answer><think>so</think>",
    "<answer><think>so</think>18</answer>",
    "<think>so<answer>18</answer></think>",
    "<think><answer>18</think></answer>",
    "<THINK>so</THINK><ANSWER>18</ANSWER>",
    "<Think>so</Think><answer>18</answer>",
    "< think>so</ think><answer>18</answer>",
    "<think >so</think><answer>18</answer>",
    '<think class="x">so</think><answer>18</answer>',
    "<thinking>so</thinking><answer>18</answer>",
    "<think>so<\\think><answer>18<\\answer>",
    "<think>so</think\n><answer>18</answer>",
    "＜think＞so＜/think＞＜answer＞18＜/answer＞",
    "```\n" + form("18") + "\n```",
    "\u200b" + form("18"),
    "<think>so</think>.<answer>18</answer>",
]


@pytest.mark.parametrize("text", RIGHT_FORM)
def test_a_right_form_is_rewarded_by_its_answer(text):
    assert strict_math([""], [text], ["18"]) == strict_format([""], [text]) == [1.0]
    assert strict_math([""], [text], ["19"]) == [0.0] and has_strict_format(text)


@pytest.mark.parametrize("text", WRONG_FORM)
def test_a_wrong_form_is_never_rewarded(text):
    assert strict_math([""], [text], ["18"]) == strict_format([""], [text]) == [0.0]


EQUAL = [
    ("１８", "18"),
    ("－１８", "-18"),
    ("–18", "-18"),
    ("- 18", "-18"),
    ("1{,}234", "1234"),
    (r"1\,234", "1234"),
    ("1 234", "1234"),
    ("1\u202f234\u202f567.5", "1234567.5"),
    ("1'234", "1234"),
    ("1’234", "1234"),
    ("12,34,567", "1234567"),
    ("1.234.567", "1234567"),
    (r"3 \times 10^{5}", "300000"),
    (r"\frac12", "0.5"),
    (r"\frac{-1}{2}", "-0.5"),
    (r"1\frac{1}{2}", "1.5"),
    ("1½", "1.5"),
    ("1 ½", "1.5"),
    ("1.5 x 10^3", "1500"),
    ("1.5×10³", "1500"),
    ("2×10⁻⁷", "2e-7"),
    ("1.5*10**3", "1500"),
    (r"$\$5$", "5"),
    ("True", np.bool_(True)),
    ("42", np.array(42.0)),
    ("5", Decimal("5.00")),
    ("18元", "18"),
    ("Rs. 1,800", "1800"),
    ("90°", "90"),
    (r"90^\circ", "90"),
    ("**18**", "18"),
    (r"\(18\)", "18"),
    ("18", 18.0),
    ("(A)", "A"),
    (r"\textbf{(A)}", "A"),
    ("don’t", "don't"),
    ("18", "18"),
    ("18", 18),
    ("18.0", 18),
    ("18.", "18"),
    ("+18", "18"),
    ("018", "18"),
    ("-18", -18),
    ("−18", "-18"),
    ("1,234", "1234"),
    ("1234567", "1,234,567"),
    ("$18", "18"),
    ("$1,234.50", "1234.5"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    ("\\$18", "18"),
    ("€ 18", "18"),
    ("$18$", "18"),
    ("50%", "50"),
    ("50\\%", "50%"),
    ("1/2", "0.5"),
    ("2/4", "1/2"),
    ("-1/2", "-0.5"),
    ("\\frac{1}{2}", "1/2"),
    ("-\\dfrac{3}{4}", "-0.75"),
    ("1 1/2", "1.5"),
    (".5", "0.50"),
    ("1e3", "1000"),
    ("0.1", 0.1),
    ("1e-07", 1e-07),
    ("-0", "0"),
    ("\\boxed{18}", "18"),
    ("$\\boxed{\\frac{1}{2}}$", "1/2"),
    ("0.30000000000000004", 0.30000000000000004),
    ("Paris", "paris"),
    ("New   York.", "New York"),
    ("\\text{B}", "B"),
    ("(3, -2)", "(3, -2)"),
    ("12:30", "12:30"),
    ("cafe\u0301", "café"),
    ("18 dollars", "18 dollars"),
    ("9" * 200, "9" * 200),
]
DIFFERENT = [
    ("€5", "$5"),
    ("50%", "50°"),
    ("−18", "18"),
    ("1.234", "1234"),
    ("0,123", "123"),
    ("1, 234", "1234"),
    ("3-5", "35"),
    ("18", "19"),
    ("-18", "18"),
    ("1.8", "18"),
    ("18.0000001", "18"),
    ("0.333", "1/3"),
    ("0.3", 0.30000000000000004),
    ("18 dollars", "18"),
    ("18 million", "18"),
    ("18 or 19", "18"),
    ("17 18", "18"),
    ("18, 19", "18"),
    ("x = 18", "18"),
    ("9+9", "18"),
    ("9*2", "18"),
    ("2**4+2", "18"),
    ("int(18)", "18"),
    ("__import__('os').system('true')", "18"),
    ("True", "1"),
    ("eighteen", "18"),
    ("١٨", "18"),
    ("2²", "22"),
    ("1_8", "18"),
    ("1 8", "18"),
    ("1,8", "18"),
    ("12,34", "1234"),
    ("1,2345", "12345"),
    ("0x12", "18"),
    ("18e0e0", "18"),
    ("--18", "18"),
    ("50%", "0.5"),
    ("1/0", "0"),
    ("0/0", "0"),
    ("1/2/1", "1/2"),
    ("nan", "18"),
    ("inf", "18"),
    ("1e999999999", "18"),
    ("9" * 100_000, "18"),
    ("18" + "0" * 99, "18"),
    (".", "0"),
    ("-", "0"),
    ("$", "0"),
    ("%", "0"),
    ("\\boxed{}", "0"),
    ("\\boxed{18", "18"),
    ("\\boxed{17}\\boxed{18}", "18"),
    ("3/4", "34"),
    ("London", "Paris"),
    ("Paris or London", "Paris"),
    ("AB", "B"),
    ("18\x0018", "18"),
]


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_equal_answers_are_right(answer, truth):
    assert answers_equal(answer, truth)
    assert strict_math([""], [form(answer)], [truth]) == [1.0]


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_different_answers_are_wrong(answer, truth):
    assert not answers_equal(answer, truth)
    assert strict_math([""], [form(answer)], [truth]) == [0.0]


def test_numbers_are_exact():
    assert parse_number("0.1") == Fraction(1, 10) and parse_number("123456789012345678901") == 123456789012345678901
    assert parse_number("1 1/2") == Fraction(3, 2) and parse_number("-1 1/2") == Fraction(-3, 2)
    assert parse_number("1 1/0") is None and parse_number("\\frac{a}{2}") is None and parse_number("") is None


@pytest.mark.parametrize("reward", [strict_math, exact_match, gsm8k])
def test_an_empty_truth_is_an_error(reward):
    for truth in ("", " ", float("nan"), None):
        with pytest.raises((TypeError, ValueError), match="ground_truth"):
            reward([""], [form("18")], [truth])


def test_a_truth_that_is_neither_text_nor_number_is_an_error():
    for truth in ([18], {"a": 1}, None):
        with pytest.raises(TypeError, match="ground_truth"):
            strict_math([""], [form("18")], [truth])


@pytest.mark.parametrize(
    "text",
    ["<think>" * 20_000, form("(" * 50_000), form("\\boxed{" * 20_000), form("{}" * 50_000), form("9," * 50_000),
     "\\boxed{" * 20_000, "#### " * 50_000, "<answer>" * 20_000, "-$" * 100_000, "#### " + "1=" * 100_000,
     " " * 100_000, form("1" * 99 + "e99")],
)  # fmt: skip
def test_hostile_texts_cost_little(text):
    start = time.process_time()
    for reward in (strict_math, gsm8k, exact_match):
        assert reward([""], [text], ["18"]) == [0.0]
    assert time.process_time() - start < 1


def test_the_last_complete_answer_is_taken():
    for text, answer in [
        ("<answer>1</answer> and <answer> 2 </answer> tail", "2"),
        ("<answer>1 #### 5", "5"),
        ("so\n#### 1\nno\n#### 2 \nbye", "2"),
        ("first \\boxed{1}, then \\boxed{ \\frac{1}{2} }.", "\\frac{1}{2}"),
        ("open \\boxed{3} and \\boxed{4", "3"),
        ("  plain text ", "plain text"),
        ("", ""),
    ]:
        assert extract_answer(text) == answer
    assert last_boxed("\\boxed{a{b}c} {x}") == "a{b}c" and last_boxed("} {x} \\boxed{") is None
    assert tagged_answer("</answer><answer>") is None and tagged_answer("a <answer></answer>") == ""


def test_reasoning_is_the_text_between_its_tags():
    assert reasoning_text("x<think> a\nb </think>y") == "a\nb"
    assert reasoning_text("<think> still going") == "still going"
    assert reasoning_text("none") == ""


def test_exact_match_compares_the_text_of_the_answer():
    completions = ["<answer> B </answer>", "b", "#### B", "\\boxed{B}", "B", "B."]
    assert exact_match([""] * 6, completions, ["B"] * 6) == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    assert exact_match([""] * 2, ["18", "18.0"], [18, 18]) == [1.0, 0.0]
    assert exact_match([""] * 3, ["#### 18", "18.0", "180"], [18.0] * 3) == [1.0, 1.0, 0.0]
    assert exact_match([""] * 2, ["#### Step 1\nx\n#### Answer\nB", "#### Step 1: \\boxed{B}"], ["B"] * 2) == [1.0] * 2


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("9*2=18\n#### 18", 1),
        ("#### Step 1: add\n7+2=9\n#### Step 2: double it\n9*2=18\nThe answer is 18.", 1),
        ("#### 1. Add\n7+2=9\n#### 2. Double it\n9*2=18\n\n#### 18", 1),
        ("#### Final Answer: 18\nIt has 2 digits", 1),
        ("#### Answer\n18", 1),
        ("#### 9+9 = 18", 1),
        ("#### x = 3 * 6 = 18", 1),
        ("#### 18 = 9 + 9", 1),
        ("#### 18 (because x = 3)", 1),
        ("#### 18/5", 0),
        ("so it is 18/5", 0),
        ("#### 18*2", 0),
        ("#### 18:30", 0),
        ("it is −18", 0),
        ("it is －18", 0),
        ("气温是−18度", 0),
        ("it is negative 18", 0),
        ("答案是１８元。", 1),
        (r"\boxed{18} in 2 hours", 1),
        ("18 cm^2", 1),
        ("- 18 apples", 1),
        ("18 (of the 20 apples)", 1),
        (r"Total: $\frac{18}{5}$", 0),
        ("#### 17\n#### 18", 1),
        ("#### $18.00", 1),
        ("#### 18 dollars a day", 1),
        ("#### 17 or 18", 0),
        ("18 it is.\n####", 0),
        ("She makes $18.", 1),
        ("She makes 18 dollars every day.", 1),
        ("<think>3</think><answer>18</answer>", 1),
        ("21-3 is easy: 21-18", 1),
        ("#### *18*", 1),
        ("#### _18_", 1),
        ("#### 9x2=18", 1),
        (r"\boxed{9 + 9 = 18}", 1),
        ("The answer is 18.</s>", 1),
        ("at $18/hour", 1),
        ("#### 18e0", 1),
        ("it is minus 18", 0),
        ("20 minus 2 is 18", 1),
        ("#### --18", 0),
        ("#### -(18)", 0),
        ("#### 18_000", 0),
        ("#### 18 and 1/2", 0),
        ("#### 18 and a half", 0),
        ("#### 18 or 19", 0),
        ("#### 18, 19", 0),
        ("#### 18 to 20", 0),
        ("#### 18 : 20", 0),
        ("#### 18 thousand", 0),
        ("#### 18K", 0),
        ("共18万元", 0),
        ("负18", 0),
        (r"\boxed{18^\circ}", 1),
        ("18x", 0),
        ("#### 18π", 0),
        (r"#### 18\sqrt{2}", 0),
        (r"#### \frac{18}{x}", 0),
        (r"#### 18 \over 2", 0),
        ("#### 18²", 0),
        ("10^18 or 18^10", 0),
        ("18³", 0),
        ("1 / 18", 0),
        ("#### √18", 0),
        ("#### sqrt(18)", 0),
        ("#### ±18", 0),
        ("#### x > 18", 0),
        ("#### ≤18", 0),
        ("on 2024-01-18", 0),
        ("#### 18_2", 0),
        ("#### 18 x 10^3", 0),
        (r"\boxed{3 \text{ or } 18}", 0),
        (r"\boxed{3, 18}", 0),
        (r"\boxed{x < 18}", 0),
        (r"\boxed{\sqrt{18}}", 0),
        (r"\boxed{18x}", 0),
        (r"\boxed{2+18}", 0),
        ("it is -18", 0),
        ("18 and then 19", 0),
        ("1,8", 0),
        ("", 0),
    ],
)
def test_gsm8k_takes_the_last_number(completion, expected):
    assert gsm8k([""], [completion], ["18"]) == [expected]
    assert gsm8k([""], [completion], ["9 * 2 = <<9*2=18>>18\n#### 18"]) == [expected]


@pytest.mark.parametrize(
    ("completion", "truth"),
    [("共3万元", 30000), ("#### $5 million", 5_000_000), ("#### 3千", 3000), ("3千克", 3), ("it is minus 5", -5),
     ("#### 2 ½", "2.5"), ("#### 1.5 x 10^3", 1500), ("#### 3 hundred", 300)],
)  # fmt: skip
def test_gsm8k_reads_signs_and_multiples_in_words(completion, truth):
    assert gsm8k([""], [completion], [truth]) == [1.0]


def test_gsm8k_scores_its_own_solutions(shared_dir):
    import json

    lines = (shared_dir / "data/gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    truths = [answer.rpartition("####")[2].strip() for answer in answers]
    assert gsm8k(answers, answers, truths) == [1.0] * 1319
    assert strict_math(truths, [form(truth) for truth in truths], truths) == [1.0] * 1319
    assert sum(gsm8k(answers, answers[1:] + answers[:1], truths)) < 40  # another problem's solution


def test_gsm8k_needs_a_number_as_truth():
    with pytest.raises(ValueError, match="number: 'many'"):
        gsm8k([""], ["18"], ["many"])


def test_real_preferences_are_distinguished(shared_dir):
    import json

    lines = (shared_dir / "data/preferences/gsm8k_solutions.jsonl").read_text(encoding="utf-8").splitlines()
    truths = {}
    for line in (shared_dir / "data/gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        truths[row["question"]] = row["answer"]
    pairs = [json.loads(line) for line in lines]
    wanted = [truths[pair["prompt"]] for pair in pairs]
    chosen = gsm8k([""] * len(pairs), [pair["chosen"] for pair in pairs], wanted)
    rejected = gsm8k([""] * len(pairs), [pair["rejected"] for pair in pairs], wanted)
    assert sum(chosen) >= 0.98 * len(pairs) and sum(rejected) <= 0.02 * len(pairs), (sum(chosen), sum(rejected))
