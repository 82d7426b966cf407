"""The environment `python`: programs are answered, whatever they do."""

from __future__ import annotations

import pytest

from atomrl.environments.builtin import python
from atomrl.types import Problem

pytestmark = pytest.mark.usefixtures("sandbox")
SAMPLE = Problem(problem_id="s", prompt="p", ground_truth="4")


def said(*turns, **args):
    """Labels and texts of the replies, and whether it ended by itself with the last turn."""
    episode, replies = python(SAMPLE, **args), []
    assert next(episode) is None
    for turn in turns:
        try:
            replies.append(episode.send(turn))
        except StopIteration as end:
            return replies, end.value
    return replies, "it goes on"


def test_a_program_is_answered_with_what_it_prints_and_an_answer_ends_it():
    replies, outcome = said("hm <python>\nprint(2 + 2)\n</python> and then", "<answer>4</answer>")
    assert [(reply.text, reply.label) for reply in replies] == [("\n<output>\n4\n</output>\n", "python")]
    assert outcome is None


def test_mistakes_are_replies():
    replies, _ = said("<python>1 / 0</python>", "hm", "<python>while True: pass</python>", "<python>x", timeout_s=3.0)
    assert [reply.label for reply in replies] == ["error", "invalid", "timeout", "invalid"]
    assert "ZeroDivisionError" in replies[0].text and "<python> and </python>" in replies[1].text
    assert "took over 3 s" in replies[2].text


def test_calls_tags_and_characters_are_bounded():
    program = "<code>print('x' * 10000)</code>"
    replies, outcome = said(*[program] * 3, tag="code", output_tag="result", max_calls=2, max_characters=50)
    assert len(replies) == 2 and outcome is None
    assert all(len(reply.text) < 90 and reply.text.startswith("\n<result>\nxxx") for reply in replies)


def test_nothing_is_kept_between_calls():
    replies, _ = said(
        "<python>x = 1\nopen('/tmp/x', 'w')</python>", "<python>import os\nprint(os.listdir('/tmp'))\nx</python>"
    )
    assert replies[1].text.startswith("\n<output>\n[]\n") and "NameError" in replies[1].text
