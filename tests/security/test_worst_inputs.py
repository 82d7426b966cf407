"""Code that reads a model's text takes linear time: 1 MB of the worst input for each pattern."""

import contextlib
import itertools
import math
import re
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import atomrl
from atomrl.config import ConfigError, RewardConfig
from atomrl.engines import episodes as replies
from atomrl.environments import tools
from atomrl.environments.adapters import actions_in
from atomrl.environments.builtin import action_of, first_block
from atomrl.environments.retrieval.index import Words
from atomrl.environments.tool_calls import FORMS, find_calls
from atomrl.planner.gpus import gpu_of
from atomrl.rewards import latex as boxes
from atomrl.rewards import tasks
from atomrl.rewards.answers import answers_equal, ascii_digits, normalise_text, parse_number, read_choices
from atomrl.rewards.code_blocks import last_block
from atomrl.rewards.compute import build_rewards
from atomrl.rewards.expressions import evaluate_arithmetic, is_tame_formula
from atomrl.rewards.extraction import extract_answer, last_boxed, marked_answer
from atomrl.rewards.format import has_strict_format, reasoning_text
from atomrl.rewards.llm_judge import score_in
from atomrl.rewards.programs import same_output
from atomrl.rewards.regions import read_region
from atomrl.rewards.search_r1 import search_r1_em
from atomrl.rewards.table import POOLED, REWARDS
from atomrl.rewards.units import clock_time, split_base, split_unit
from atomrl.rewards.verifiable import gsm8k
from atomrl.tracking.doctor.quotes import repeated_unit
from atomrl.tracking.reading import comparison
from atomrl.tracking.run_directory import rollout_rows
from atomrl.trainer.evaluate import figures, judged
from atomrl.trainer.own_functions import trial
from atomrl.trainer.report.metrics import answer_end, runs_on
from atomrl.trainer.report.texts import hedges, is_empty, repeats
from atomrl.types import Problem
from tests.rewards.batches import trajectory

MEGABYTE = 10**6
BOUND_S = 10.0
"""Limit in seconds of CPU time for a text of 1 MB; a quadratic pattern takes hours."""
PIECES = (
    "#", "#### ", "#### 1 ", "\\boxed{", "\\boxed ", "{", "}", "\\text{", "<answer>", "</answer>", "<think>",
    " ", "1", "1,", "1.", "-", "$ ", ".", "a ", "\u0301", "\\frac{", "(1+",
)  # fmt: skip
CALLS = (
    "<tool_call>", "<tool_call>" + 80 * " " + "</tool_call>", "<function=", "<function=\n", "<function=>",
    "<function=a>", "<parameter=", "<parameter=a>", "<parameter=a></parameter>", "a", "a-", "[ARGS]", "[CALL_ID]a",
    "a[CALL_ID]", "[TOOL_CALLS]", "[TOOL_CALLS]a[ARGS]" + 80 * " ", '{"name": "a"}', "[", "<search>", "</search>",
    "<search></answer>", "left",
)  # fmt: skip
"""Pieces of tool calls, and of texts in which environments look for calls."""


def judged_score(text):
    with contextlib.suppress(ValueError):
        score_in(text, "Score: {score}")


def gpu_in(text):
    with contextlib.suppress(ConfigError):
        gpu_of(text)


@cache
def failing_rewards():
    """A reward whose errors have the text."""

    def repeat(prompts, completions, ground_truth, **columns):
        raise TypeError(completions[0])

    return build_rewards(RewardConfig(functions=[{"function": "repeat"}]), local={"repeat": repeat}, patience=None)


READERS = {
    "tracking/doctor/quotes": [repeated_unit],
    "tracking/reading/comparison": [comparison.JUDGED_BY.match],
    "environments/adapters": [lambda text: actions_in(text, ("left", "right"))],
    "environments/builtin": [action_of, lambda text: first_block(text, ("python", "answer"))],
    "environments/tool_calls": [lambda text, form=form: find_calls(text, form) for form in FORMS],
    "environments/tools": [tools.URL.search],
    "environments/retrieval/index": [Words("none")],
    "trainer/report/metrics": [answer_end],
    "trainer/report/texts": [repeats, lambda text: hedges(text, "18"), is_empty],
    "planner/gpus": [gpu_in],
    "trainer/own_functions/trial": [trial.ELSEWHERE.search],
    "rewards/answers": [
        normalise_text,
        parse_number,
        lambda text: answers_equal(text, "x"),
        ascii_digits,
        read_choices,
    ],
    "rewards/expressions": [evaluate_arithmetic, is_tame_formula],
    "rewards/units": [lambda text: [read(text[: boxes.MAX_CHARS]) for read in (split_unit, split_base, clock_time)]],
    "rewards/calling": [lambda text: failing_rewards()([trajectory(PROBLEM, text)])],
    "rewards/scorer": [lambda text: failing_rewards()([trajectory(PROBLEM, text)])],
    "rewards/compute": [lambda text: failing_rewards().try_functions(replace(PROBLEM, ground_truth=text))],
    "rewards/latex": [lambda text: boxes.boxed([""], [f"\\boxed{{{text}}}"], ["x"])],
    "rewards/regions": [lambda text: read_region(text[: boxes.MAX_CHARS], lambda _: None)],
    "rewards/extraction": [extract_answer, last_boxed, marked_answer],
    "rewards/format": [has_strict_format, reasoning_text],
    "rewards/llm_judge": [judged_score],
    "rewards/verifiable": [lambda text: gsm8k([""], [text], ["18"])],
    "rewards/search_r1": [lambda text: search_r1_em([""], [text], ["a"])],
    "rewards/tasks": [tasks.is_literal],
    "rewards/code_blocks": [last_block],
    "rewards/programs": [lambda text: same_output(text, text)],
    "engines/episodes": [replies.SPECIAL_NAMES.search],
}
"""Module -> what of it reads what a model wrote."""
PROBLEM = Problem(problem_id="a", prompt="p", ground_truth="18", columns={"numbers": [1, 2]})


def texts(piece):
    body = piece * (MEGABYTE // len(piece))
    return [body, f"<think>x</think><answer>\\boxed{{{body}}}</answer>"]


@pytest.mark.parametrize("piece", PIECES)
def test_one_megabyte_is_read_in_seconds(piece):
    for text in texts(piece):
        started = time.process_time()
        item = trajectory(PROBLEM, text, finish_reason="length")
        for function in itertools.chain(*READERS.values()):
            function(text)
        runs_on(item, ())
        assert time.process_time() - started < BOUND_S, (piece, text[:40])


@pytest.mark.parametrize("piece", CALLS)
def test_calls_and_actions_in_one_megabyte(piece):
    body = piece * (MEGABYTE // len(piece))
    readers = [functions for name, functions in READERS.items() if name.startswith("environments/")]
    for text in (body, f"<tool_call><function=f>{body}", f"<tool_call>{body}", f"[TOOL_CALLS]{body}"):
        started = time.process_time()
        for function in itertools.chain(*readers):
            function(text)
        assert time.process_time() - started < BOUND_S, (piece, text[:40])


def test_every_module_with_patterns_is_here():
    package = Path(atomrl.__file__).parent
    folders = ("tracking/doctor", "tracking/reading", "environments", "trainer", "rewards", "engines")
    modules = [path for folder in folders for path in (package / folder).rglob("*.py")]
    using = {path for path in modules if re.search(r"(?m)^\s*(import re\b|from re import)", path.read_text())}
    assert {path.relative_to(package).with_suffix("").as_posix() for path in using} <= set(READERS)


REWARDS_HERE = sorted(set(REWARDS) - set(POOLED))


@pytest.mark.parametrize("piece", ["#", "1,", "\\boxed{", "<answer>", "a a a ", "(1+", "$"])
def test_rewards_of_this_process(piece):
    given = texts(piece)
    rewards = build_rewards(RewardConfig(functions=[{"function": name} for name in REWARDS_HERE]), patience=None)
    started = time.process_time()
    rewards([trajectory(PROBLEM, text, index) for index, text in enumerate(given)])
    assert time.process_time() - started < BOUND_S * len(given)
    assert rewards.pool.pids == []


class NoTokens:
    """A tokenizer: what it takes is not measured here."""

    def encode(self, text, add_special_tokens):
        return []


@pytest.mark.parametrize("piece", ["#", "\\boxed{", "1,", "</answer>"])
def test_evaluation_takes_linear_time(piece):
    started = time.process_time()
    group = [trajectory(PROBLEM, text, index) for index, text in enumerate(texts(piece))]
    metrics = figures([[judged(row, NoTokens()) for row in rollout_rows(0, group, {})]])
    assert math.isnan(metrics["accuracy"].mean), "no reward judged them"
    assert time.process_time() - started < 5 * BOUND_S
