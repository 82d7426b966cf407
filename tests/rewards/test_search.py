"""The reward of Search-R1."""

import numpy as np
import pytest

from atomrl.rewards import search_r1_em
from atomrl.rewards.search_r1 import last_answer, normalised


def score(text, truth):
    return search_r1_em([""], [text], [truth])[0]


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("Paris", "Paris", True),
        (" the  PARIS. ", "Paris", True),
        ("Paris, France", "Paris", False),
        ("a cat's life", "Cats Life", True),  # punctuation goes before articles are looked for
        ("theatre", "atre", False),
        ("U.S.A.", ["America", "USA"], True),
        ("1,234", 1234, True),
        ("42", 42.0, True),  # as pandas keeps whole numbers of a column with gaps
        ("420", 42.0, False),
        ("42.0", [42.0], True),
        ("420", "42.0", False),
        ("4.2", "42", False),
        ("-5", "5", False),
        ("−5", "-5", True),
        ("the 42!", 42, True),
        ("don’t", "don't", True),
        ("rock ‘n’ roll", "rock 'n' roll", True),
        ("《三体》", "三体", True),
        ("１２３", "123", True),
        ("1914–1918", "1914-1918", True),
        ("Beyonce\u0301", "Beyoncé", True),
        ("A", "A", True),
        ("", "A", False),
        ("the", "A", False),
        ("an", "The", False),
        ("Zürich", "Zurich", False),
        ("", "Paris", False),
        ("1.5 million", "15 million", False),
        ("-5 degrees", "5 degrees", False),
        ("19141918", "1914-1918", False),
        ("330", "3:30", False),
        ("123", "1.2.3", False),
        ("C", "C++", False),
        ("C++", "C#", False),
        ("€5", "$5", False),
        ("$5 million", "$5 million", True),
        ("5 million", "$5 million", True),
        ("€5 million", "$5 million", False),
        ("10,000 people", "10000 people", True),
        ("T-34", "T34", True),
        ("42", np.array(["41", "42"]), True),
    ],
)
def test_an_answer_is_right_but_for_case_punctuation_and_articles(answer, truth, right):
    assert score(f"<think>so</think><answer>{answer}</answer>", truth) == right


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Paris", None),
        ("<answer>Paris", None),
        ("Paris</answer>", None),
        ("</answer><answer>", None),
        ("<answer>Rome</answer><answer>Paris</answer>", "Paris"),
        ("<answer>Rome</answer> <answer>Paris", "Rome"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer>one <answer>two</answer>", "one <answer>two"),  # as the published pattern reads it
        ("<ANSWER>Paris</ANSWER>", None),
    ],
)
def test_the_last_answer_counts(text, answer):
    assert last_answer(text) == answer


def test_no_answer_is_not_the_one_of_the_prompts_example():
    """The published code finds the tags of the prompt where the model wrote none."""
    assert score("I do not know.", "Beijing") == score("I should use <answer> now", "Beijing") == 0.0


def test_a_truth_that_is_none_is_named():
    for truth in (None, [], [None], {"target": ["x"]}):
        with pytest.raises(TypeError, match="correct answers"):
            score("<answer>x</answer>", truth)
    for truth in ("", " ", ["Paris", ""], "...", '["Paris", "Lutetia"]', float("nan")):
        with pytest.raises(ValueError, match="ground_truth"):
            score("<answer></answer>", truth)


def test_answers_are_normalised_before_they_are_compared():
    assert normalised("An  A-Team, the «best»!") == "ateam best"
