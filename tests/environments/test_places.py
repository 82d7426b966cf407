"""The environment `places`: what it answers, what it costs, and that an answer must be right."""

from contextlib import closing

import pytest

from atomrl.config import EnvironmentConfig
from atomrl.data.tasks import generate
from atomrl.data.tasks.search import find
from atomrl.environments.builtin import places
from atomrl.environments.pool import EnvironmentPool
from atomrl.types import Problem

SAMPLE = Problem(problem_id="1", prompt="?", ground_truth="114883")


def played(texts, problem=SAMPLE, **args):
    """Its replies to a model that writes these texts, and its outcome."""
    episode, replies = places(problem, **args), []
    assert next(episode) is None
    try:
        for text in texts:
            replies.append(episode.send(text).text)
    except StopIteration as end:
        return replies, end.value
    return replies, None


def test_searches_are_answered_and_cost_a_share_of_a_right_answer():
    search, answer = "<search>Balkh</search>", "<answer>114883</answer>"
    document = "<information>Balkh: population 114883, nearest larger place Kunduz</information>"
    assert played([answer]) == ([], 1.0)
    assert played([search, answer]) == ([document], 0.95)
    assert played([search, search, answer], cost=0.2)[1] == pytest.approx(0.6)
    assert played([search, "<answer>114884</answer>"])[1] == 0.0, "a wrong answer costs nothing more"
    assert played([search, "114883"])[1] == 0.0 and played(["<search>Balkh"])[1] == 0.0
    assert played(["<search>Camelot</search>", answer])[0] == ["<information></information>"]
    assert played([search, answer], empty=True) == (["<information></information>"], 0.95)


def test_an_answer_in_a_search_is_none():
    assert played(["<search><answer>114883</answer></search>", "<answer>1</answer>"])[1] == 0.0


def test_it_is_built_in():
    (row,) = generate("places", 1, hops=[1])
    problem = Problem(problem_id="1", prompt=row["prompt"], ground_truth=row["ground_truth"])
    with closing(EnvironmentPool(EnvironmentConfig(function="places", workers=1))) as pool:
        key = pool.start(problem, seed=0)
        assert [(at, answer.reply) for at, answer in pool.answers(30)] == [(key, None)]
        pool.say(key, f"<search>{row['chain'][0]}</search>")
        ((_, answer),) = pool.answers(30)
        assert answer.reply.text == find(row["chain"][0]) and answer.reply.label == "search"
        pool.say(key, f"<answer>{row['ground_truth']}</answer>")
        ((_, answer),) = pool.answers(30)
        assert answer.ended and answer.outcome == 0.95
