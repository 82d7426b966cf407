"""Search-R1's protocol: which action is taken, what is answered, when it ends; and the configs that say so too."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from atomrl.common.outages import ServiceFault
from atomrl.config import load_config, read_yaml
from atomrl.environments import builtin as search
from atomrl.environments.builtin import INVALID_SEARCH, PROMPT, STOP, action_of, information, search_r1
from atomrl.types import Problem

SAMPLE = Problem(problem_id="a", prompt=PROMPT.format(question="Who?"), ground_truth=["A"])
ROOT = Path(__file__).parents[2]


def answered_by(monkeypatch, urlopen):
    """Let a function answer requests instead of a service."""
    monkeypatch.setattr(search.urllib.request, "build_opener", lambda *_: SimpleNamespace(open=urlopen))


@pytest.fixture
def asked(monkeypatch):
    """Requests that the service got; it answers one document with the number of the request."""
    requests = []

    def urlopen(request, timeout):
        requests.append((request.full_url, json.loads(request.data), timeout))
        number = len(requests)
        return io.BytesIO(
            json.dumps({"result": [[{"document": {"contents": f'"T{number}"\nx\ny'}, "score": 1.0}]]}).encode()
        )

    answered_by(monkeypatch, urlopen)
    return requests


def played(*texts, **args):
    """The replies to what the model writes; and whether the episode was over then."""
    episode, replies = search_r1(SAMPLE, **args), []
    assert next(episode) is None
    for text in texts:
        try:
            replies.append(episode.send(text))
        except StopIteration as end:
            assert end.value is None
            return replies, True
    return replies, False


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<search> who? </search>", ("search", "who?")),
        ("<think>a</think>\n<search>b\nc</search>", ("search", "b\nc")),
        ("<answer>x</answer>", ("answer", "x")),
        ("<search>a</search><answer>b</answer>", ("search", "a")),
        ("<search>a</answer>", ("", "")),
        ("search: a", ("", "")),
        ("<answer>a</search>b</answer>", ("answer", "a</search>b")),
        ("<search></search>", ("search", "")),
    ],
)
def test_the_first_pair_of_tags_is_the_action(text, action):
    assert action_of(text) == action


def test_an_episode_searches_is_corrected_and_answers(asked):
    replies, over = played("<search> one </search>", "hm", "<search>two</search>", "<answer>A</answer>")
    assert over and [reply.label for reply in replies] == ["search", "invalid", "search"]
    assert replies[0].text == '\n\n<information>Doc 1(Title: "T1") x\ny</information>\n\n'
    assert replies[1].text == INVALID_SEARCH and {reply.role for reply in replies} == {""}
    assert [body for _, body, _ in asked] == [
        {"queries": [query], "topk": 3, "return_scores": True} for query in ("one", "two")
    ]


def test_the_last_turn_has_no_search(asked):
    """Whatever the turns before were; and a search in it is not answered."""
    searching = "<search>a</search>"
    replies, over = played(*[searching, "hm"] * 4, max_searches=4)
    assert over and len(replies) == 4 and len(asked) == 2


def test_documents_are_numbered_and_their_first_line_is_the_title():
    shown = information(['"A"\nfirst\nsecond', '"B"', ""])
    lines = ['Doc 1(Title: "A") first', "second", 'Doc 2(Title: "B") ', "Doc 3(Title: )"]
    assert shown == "\n\n<information>" + "\n".join(lines) + "</information>\n\n"


@pytest.mark.parametrize("answer", [
    {"detail": "no"}, {"result": None}, {"result": []}, {"result": [{}]}, {"result": [""]}, {"result": [[{}]]},
    {"result": [[{"document": {}}]]},
    [1], None, 5, {"result": [["a text"]]}, {"result": [[{"contents": None}]]}, {"result": [[{"contents": 7}]]},
    {"result": [[{"document": {"contents": ["a"]}, "score": 1.0}]]}, {"result": [[{"document": None, "score": 1.0}]]},
])  # fmt: skip
def test_an_answer_without_documents_that_have_a_text_is_an_error_with_the_url(monkeypatch, answer):
    content = json.dumps(answer).encode()
    answered_by(monkeypatch, lambda *_, **__: io.BytesIO(content))
    with pytest.raises(ServiceFault, match=r"retrieve.*documents"):
        played("<search>a</search>")


def test_an_answer_is_not_read_without_end(monkeypatch):
    monkeypatch.setattr(search, "MAX_ANSWER_BYTES", 1000)
    answered_by(monkeypatch, lambda *_, **__: io.BytesIO(b"[" * 2000))
    with pytest.raises(ServiceFault, match="1000 bytes"):
        played("<search>a</search>")


@pytest.mark.parametrize("name", ["search_r1_grpo", "search_r1_ppo"])
def test_the_configs_have_the_published_limits(name):
    config = load_config(read_yaml(ROOT / "configs" / f"{name}.yaml"))
    environment = config.environment
    assert environment.stop == STOP and environment.max_turns == environment.args["max_searches"] + 1 == 5
    assert (environment.max_turn_tokens, environment.max_reply_tokens) == (500, 500)
    assert (config.data.max_prompt_tokens, config.rollout.max_completion_tokens) == (2048, 4096)
    assert config.rollout.prompts_per_step * config.rollout.completions_per_prompt in (512, 2560)
    assert [item.function for item in config.reward.functions] == ["search_r1_em"]
