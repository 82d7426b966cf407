"""The tutorial rewards, penalties and `boxed`, by hand-made cases; and how well graders agree with labels."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from atomrl.config import RewardConfig
from atomrl.rewards import (
    boxed,
    correctness_reward,
    digit_reward,
    exact_match,
    gsm8k,
    hard_format_reward,
    length_penalty,
    mark_reward,
    repetition_penalty,
    strict_math,
)
from atomrl.rewards.compute import build_rewards
from atomrl.rewards.table import POOLED, REWARDS
from tests.rewards.batches import rollouts, values

RIGHT = "<think>\n9 + 9\n</think>\n<answer>\n18\n</answer>"


@pytest.mark.parametrize(
    ("text", "correct", "digit", "form", "mark"),
    [
        (RIGHT, 2, 0.5, 0.5, 0.5),
        (RIGHT + "\n", 2, 0.5, 0.5, 0.5),
        (RIGHT + "\n\n", 2, 0.5, 0, 0.5),
        (RIGHT.replace("9 + 9", "9 + 9\nis\n\n18"), 2, 0.5, 0.5, 0.5),
        (RIGHT.replace("\n", ""), 2, 0.5, 0, 0.125),
        (RIGHT.replace("18", "18.0"), 2, 0, 0.5, 0.5),
        (RIGHT.replace("18", "19"), 0, 0.5, 0.5, 0.5),
        (RIGHT.replace("18", "-18"), 0, 0, 0.5, 0.5),
        (RIGHT.replace("18", "١٨"), 0, 0, 0.5, 0.5),
        ("Sure.\n" + RIGHT, 2, 0.5, 0, 0.5),
        (RIGHT + RIGHT, 2, 0.5, 0, 0.125),
        ("18", 0, 0, 0, 0),
        ("<answer>\n18", 0, 0, 0, 0.125),
        ("", 0, 0, 0, 0),
    ],
)
def test_the_tutorials_rewards(text, correct, digit, form, mark):
    values = [f([""], [text], ["18"]) for f in (correctness_reward, digit_reward, hard_format_reward, mark_reward)]
    assert values == [[correct], [digit], [form], [mark]]


def test_correctness_finds_the_ground_truth():
    texts, truth = [RIGHT] * 2, ["18", "9+9=18\n#### 18"]
    for column in ("ground_truth", "answer", "answers"):
        assert correctness_reward(prompts=["", ""], completions=texts, **{column: truth}) == [2.0, 2.0]
    assert correctness_reward(["", ""], texts, [None, 17], answer=[18, 18]) == [2.0, 0.0]
    with pytest.raises(ValueError, match="no ground truth"):
        correctness_reward(["", ""], texts, [None, 17])


def test_penalties_by_hand():
    texts = ["a b c d", "a a a a a", "A a b A a b", "a b", ""]
    assert repetition_penalty([""] * 5, texts) == [0.0, -2 / 3, -0.25, 0.0, 0.0]
    assert repetition_penalty([""], ["a a a"], ngram_size=1, max_penalty=-0.3) == pytest.approx([-0.2])
    assert length_penalty([""] * 4, [""] * 4, [0, 512, 768, 9999]) == [0.0, 0.0, -0.5, -1.0]
    for wrong in ({"ngram_size": 0}, {"max_penalty": 1}):
        with pytest.raises(ValueError, match="repetition_penalty needs"):
            repetition_penalty([""], [""], **wrong)
    with pytest.raises(ValueError, match="length_penalty needs"):
        length_penalty([""], [""], [1], free_tokens=5, max_tokens=5)


BOXED = [
    ("18", "18", 1), ("18.0", "18", 1), ("$18", 18, 1), ("1,000", "1000", 1), ("17", "18", 0), ("-18", "18", 0),
    (r"\frac12", "0.5", 1), (r"\dfrac{1}{2}", r"\frac{1}{2}", 1), (r"2\sqrt{2}", r"\sqrt{8}", 1), ("x=3", "3", 1),
    (r"50\%", "0.5", 1), (r"50\%", "50", 1), ("0.333", r"\frac{1}{3}", 0), (r"\{1,2\}", "2, 1", 1),
    ("(1,2)", "(2,1)", 0),
    (r"3\text{ apples}", "3", 1), (r"90^\circ", "90", 1), (r"\text{Paris}", "paris", 1), ("sipar", "Paris", 0),
    ("x+1", "1+x", 1), ("(x+1)^2", "x^2+2x+1", 1), (r"\pi", "3.14", 0), ("", "18", 0), (r"\frac{", "18", 0),
    ("18", r"so \boxed{18}", 1), ("__import__('os').getcwd()", "18", 0),
]  # fmt: skip


def test_boxed_by_hand():
    pytest.importorskip("math_verify")
    scores = [
        boxed([""], [f"I think \\boxed{{1}}, no: \\boxed{{{answer}}}."], [truth])[0] for answer, truth, _ in BOXED
    ]
    wrong = [(case, value) for case, value in zip(BOXED, scores, strict=True) if value != case[2]]
    assert not wrong
    assert boxed([""] * 2, ["18", r"\boxed{18"], ["18"] * 2) == [0.0, 0.0]


def test_boxed_runs_in_workers():
    pytest.importorskip("math_verify")
    rewards = build_rewards(RewardConfig(functions=[{"function": "boxed", "timeout_s": 120}]))
    texts = [f"\\boxed{{{text}}}" for text in ("7", "9^{9^{9^9}}", "x")]
    result = rewards(rollouts({"7": texts, "x": ["\\boxed{x}"] * 20}))
    rewards.close()
    assert values(result) == ((1.0, 0.0, 0.0), (1.0,) * 20)
    assert not [failure for item in result for failure in item.reward_failures]


UNITS = [
    "a",
    "<answer>",
    "\\boxed{",
    "####",
    "1,",
    "{",
    "9",
    "\u0301\u0327",
    "- $",
    "\n",
    "\n</think>\n<answer>\n",
    "a ",
]


@pytest.mark.parametrize("name", sorted(set(REWARDS) - set(POOLED)))
def test_rewards_of_this_process_cannot_be_kept_busy(name):
    """A completion of 100,000 characters that is made for it costs less than a second; quadratic time costs more."""
    for unit in UNITS:
        text = "<think>\n<answer>" + unit * (100_000 // len(unit))
        columns = {"ground_truth": ["18"] * 2, "numbers": [[9, 9]] * 2, "completion_tokens": [9] * 2}
        columns |= {"completion_ids": [[1]] * 2, "eos_token_id": 1}
        started = time.process_time()
        REWARDS[name]([""] * 2, [text, text + "\n</answer>"], **columns)
        assert time.process_time() - started < 2, unit


def labelled(shared_dir: Path):
    """1,004 solutions by real models, with the published label of each."""
    path = shared_dir / "data" / "preferences" / "gsm8k_solutions.jsonl"
    truths = {}
    for line in (shared_dir / "data" / "gsm8k" / "test.jsonl").read_text().splitlines():
        row = json.loads(line)
        truths[row["question"].strip()] = row["answer"].rpartition("####")[2].strip()
    for line in path.read_text().splitlines():
        pair = json.loads(line)
        truth = truths[pair["prompt"].strip()]
        yield pair["chosen"], truth, 1.0
        yield pair["rejected"], truth, 0.0


def test_gsm8k_agrees_with_the_labels_of_real_solutions(shared_dir):
    rows = list(labelled(shared_dir))
    scores = gsm8k([""] * len(rows), [text for text, _, _ in rows], [truth for _, truth, _ in rows])
    agree = sum(value == label for value, (_, _, label) in zip(scores, rows, strict=True))
    assert len(rows) == 1004 and agree / len(rows) >= 0.998


def test_graders_agree_with_real_answers_put_into_their_forms(shared_dir):
    """The answers and labels are of real models; the form that each grader reads is put around them here."""
    rng = random.Random(0)
    rows = [row for row in labelled(shared_dir) if "\nA: " in row[0]]
    forms = {
        strict_math: "<think>{}</think><answer>{}</answer>",
        correctness_reward: "<think>\n{}\n</think>\n<answer>\n{}\n</answer>",
        exact_match: "{}\n#### {}",
    }
    for grader, form in forms.items():
        texts = [form.format(*text.rsplit("\nA: ", 1)) for text, _, _ in rows]
        scores = grader([""] * len(rows), texts, [truth for _, truth, _ in rows])
        agree = sum((value > 0) == label for value, (_, _, label) in zip(scores, rows, strict=True))
        assert agree / len(rows) >= (0.995 if grader is exact_match else 0.998), grader.__name__
    pytest.importorskip("math_verify")
    some = rng.sample(rows, 150)
    texts = ["{}\n\\boxed{{{}}}".format(*text.rsplit("\nA: ", 1)) for text, _, _ in some]
    scores = boxed([""] * len(some), texts, [truth for _, truth, _ in some])
    assert sum(value == label for value, (_, _, label) in zip(scores, some, strict=True)) / len(some) >= 0.998


@pytest.mark.parametrize("reward", [strict_math, exact_match, gsm8k, boxed])
def test_a_missing_truth_is_no_silent_zero(reward):
    """Also where the completion would be wrong whatever the truth is."""
    with pytest.raises((TypeError, ValueError), match="ground_truth"):
        reward(["", ""], ["no form", "None"], ["1", None])
