"""200 answers in the styles of ten families of models, judged by hand before a grader saw them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from atomrl.rewards.table import find_reward


def test_graders_judge_answers_of_ten_families_as_people_do():
    pytest.importorskip("math_verify")
    lines = Path(__file__).with_name("answers_of_models.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    scores = [find_reward(name)([""], [text], [truth])[0] for _, name, truth, _, text in rows]
    missed = [row for row, value in zip(rows, scores, strict=True) if value != row[3]]
    assert [text for *_, text in missed] == [r"\[\boxed{\log 2}\]"]  # for \ln 2: math-verify reads \log to base 10
    assert Counter(family for family, *_ in rows) == Counter({family: 20 for family, *_ in rows}) and len(rows) == 200


def test_graders_judge_answers_in_other_notations_as_decided_before():
    """Sets, ratios, rates, several choices and digits of other scripts, each with near misses; right or wrong was
    written down before a grader saw them."""
    pytest.importorskip("math_verify")
    lines = Path(__file__).with_name("decided_answers.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    scores = [find_reward(name)([""], [text], [truth])[0] for _, name, truth, _, text in rows]
    missed = [row[2:] for row, value in zip(rows, scores, strict=True) if value != row[3]]
    # an angle may be asked in radians
    assert missed == [[r"\frac{\pi}{6}", 1, r"So the answer is $\boxed{30^\circ}$."]]
