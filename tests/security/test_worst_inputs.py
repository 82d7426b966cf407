"""What meets a model's text in the main process takes time that is linear in it: 1 MB of the worst for each pattern."""

import time

import pytest

from atomrl.config import RewardConfig
from atomrl.loop.evaluate import figures, judged
from atomrl.loop.report import answer_end, runs_on
from atomrl.rewards.answers import answers_equal, normalise_text, parse_number
from atomrl.rewards.compute import build_rewards
from atomrl.rewards.format import extract_answer, has_strict_format, last_boxed, marked_answer, reasoning_text
from atomrl.rewards.table import POOLED, REWARDS
from atomrl.tracking.run_directory import rollout_rows
from atomrl.types import Sample
from tests.rewards.batches import trajectory

MEGABYTE = 10**6
BOUND_S = 10.0
"""Of CPU time for a text of 1 MB; a quadratic pattern takes hours."""
PIECES = (
    "#", "#### ", "#### 1 ", "\\boxed{", "\\boxed ", "{", "}", "\\text{", "<answer>", "</answer>", "<think>",
    " ", "1", "1,", "1.", "-", "$ ", ".", "a ", "\u0301", "\\frac{", "(1+",
)  # fmt: skip
SAMPLE = Sample(sample_id="a", prompt="p", ground_truth="18", columns={"numbers": [1, 2]})


def texts(piece):
    body = piece * (MEGABYTE // len(piece))
    return [body, f"<think>x</think><answer>\\boxed{{{body}}}</answer>"]


@pytest.mark.parametrize("piece", PIECES)
def test_one_megabyte_is_read_in_seconds(piece):
    for text in texts(piece):
        started = time.process_time()
        item = trajectory(SAMPLE, text, finish_reason="length")
        for function in (answer_end, extract_answer, has_strict_format, last_boxed, marked_answer, reasoning_text,
                         normalise_text, parse_number):  # fmt: skip
            function(text)
        answers_equal(text, text)
        runs_on(item, ())
        assert time.process_time() - started < BOUND_S, (piece, text[:40])


REWARDS_HERE = sorted(set(REWARDS) - set(POOLED))


@pytest.mark.parametrize("piece", ["#", "1,", "\\boxed{", "<answer>", "a a a ", "(1+", "$"])
def test_rewards_of_this_process(piece):
    given = texts(piece)
    rewards = build_rewards(RewardConfig(functions=[{"function": name} for name in REWARDS_HERE]), patience=None)
    started = time.process_time()
    rewards([trajectory(SAMPLE, text, index) for index, text in enumerate(given)])
    assert time.process_time() - started < BOUND_S * len(given)
    assert rewards.pool.pids == []


class NoTokens:
    """A tokenizer: what it takes is not measured here."""

    def encode(self, text, add_special_tokens):
        return []


@pytest.mark.parametrize("piece", ["#", "\\boxed{", "1,", "</answer>"])
def test_evaluation(piece):
    started = time.process_time()
    group = [trajectory(SAMPLE, text, index) for index, text in enumerate(texts(piece))]
    assert figures([[judged(row, NoTokens()) for row in rollout_rows(0, group, {})]])["accuracy"].mean == 0
    assert time.process_time() - started < 5 * BOUND_S
