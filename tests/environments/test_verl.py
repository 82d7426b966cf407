"""The environment `verl`: who speaks when, what ends an episode, and what is refused before it begins."""

import sys
from contextlib import closing
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import yaml
from pydantic import BaseModel

from atomrl.config import ConfigError, EnvironmentConfig, load_config
from atomrl.environments import verl as module
from atomrl.environments.pool import EnvironmentPool
from atomrl.environments.worker import EpisodeError, find_environment
from atomrl.trainer.checks.environment import check_columns, check_environment, check_outcome, with_tools
from atomrl.types import Problem
from tests.environments.my_tools import called
from tests.environments.test_tools import assistant, conversation, played, result
from tests.environments.verl_classes import CLASSES, tool
from tests.templates import make_tokenizer

QUIZ = {"class_name": f"{CLASSES}.Quiz", "config": {"no": "no"}}
ROW = {
    "tools_kwargs": {"check": {"create_kwargs": {"ground_truth": "7"}}, "other": None},
    "interaction_kwargs": {"name": "quiz", "ground_truth": "seven"},
}


def config_of(reward="exact_match", environment=(), **args):
    tree = {"run_name": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
    tree |= {"environment": {"function": "verl", "args": args, **dict(environment)}}
    return load_config(tree | {"reward": {"functions": [reward]}})


def test_a_tool_gets_the_rows_arguments_and_the_state_of_the_episode():
    config = config_of(tools=[tool(word="yes")])
    texts = [called("check", answer="7"), called("check", answer="8"), called("check", answer="break"), "Seven."]
    item, row = played(config, *texts, extra_info=ROW)
    answers = ["yes 1 ['user', 'assistant'] []", "no", "Error: check: RuntimeError: it is broken"]
    said = [one for text, answer in zip(texts, answers, strict=False) for one in (assistant(text), result(answer))]
    assert row == conversation(config, *said, assistant(texts[-1])).rstrip("\n")
    assert [turn.labels for turn in item.episode.turns] == [("check",), ("check",), ("error",), ()]
    assert item.episode.outcome is None and not item.token_rewards  # a tool's reward is not part of the run's


@pytest.mark.parametrize(("most", "replies"), [(1, ["no"]), (2, ["no", "no"])])
def test_calls_over_the_limit_are_not_made(most, replies):
    config = config_of(tools=[tool(word="yes")], max_parallel_calls=most)
    calls = f"{called('check', answer='1')}\n{called('check', answer='2')}\n{called('check', answer='3')}"
    item, _ = played(config, calls, "Done.", extra_info=ROW)
    assert item.episode.turns[0].labels == ("check",) * most
    assert item.episode.turns[0].reply == "\n".join(replies)


def test_a_call_that_is_no_json_is_no_call():
    item, _ = played(config_of(tools=[tool(word="yes")]), "<tool_call>{oops</tool_call>", extra_info=ROW)
    assert item.episode.ended == "environment" and len(item.episode.turns) == 1


@pytest.mark.parametrize(("side", "text"), [
    ("left", "(truncated)...nonono"), ("right", "nonono...(truncated)"), ("middle", "non...(truncated)...ono"),
])  # fmt: skip
def test_a_long_text_of_a_tool_is_cut(side, text):
    args = {"max_tool_response_length": 6, "tool_response_truncate_side": side}
    item, _ = played(config_of(tools=[tool(word="", times=9)], **args), called("check", answer="1"), "Done.")
    assert item.episode.turns[0].reply == text


def test_an_interaction_answers_turns_without_a_call_until_it_ends_the_episode():
    config = config_of(tools=[tool(word="yes")], interactions=[QUIZ])
    item, row = played(config, "six", called("check", answer="7"), "seven", extra_info=ROW)
    said = [assistant("six"), {"role": "user", "content": "no (2, 1)"}, assistant(called("check", answer="7"))]
    said += [result("yes 2 ['user', 'assistant', 'user', 'assistant'] []"), assistant("seven")]
    assert row == conversation(config, *said).rstrip("\n")
    assert [turn.labels for turn in item.episode.turns] == [("interaction",), ("check",), ()]


@pytest.mark.parametrize(("kind", "open_at_second"), [("Quiz", 1), ("Shy", 2)])
def test_an_interaction_is_finalized_if_its_method_takes_an_id(kind, open_at_second):
    problem = Problem(problem_id="a", prompt="Do it.", ground_truth=None, columns={"extra_info": ROW})
    item = {"class_name": f"{CLASSES}.{kind}", "config": {"no": "not yet"}, "name": "quiz"}
    for count in (1, open_at_second):  # both episodes have the same object
        episode = module.verl(problem, interactions=[item])
        next(episode)
        (reply,) = episode.send("six")
        assert (reply.role, reply.text) == ("user", f"not yet (2, {count})")
        episode.close()


def test_a_call_that_takes_too_long_is_answered():
    config = config_of(tools=[tool(word="yes")], timeout_s=0.2)
    item, _ = played(config, called("check", answer="wait"), "Done.", extra_info=ROW)
    assert item.episode.turns[0].reply == "Error: check: no answer within 0.2 s"


def test_a_picture_of_a_tool_is_one_of_the_reply_and_a_video_ends_the_run():
    pytest.importorskip("PIL", reason="pictures need Pillow")
    problem = Problem(problem_id="a", prompt="Do it.", ground_truth=None)
    items = [tool("Draw", "draw")]
    args = {"tools": items, "schemas": module.schemas_of(items), "form": "hermes"}
    episode = module.verl(problem, **args)
    next(episode)
    (reply,) = episode.send(called("draw", answer=""))
    assert (reply.text, len(reply.images), reply.images[0].size) == ("ToolSchema", 1, (28, 28))
    with closing(EnvironmentPool(EnvironmentConfig(function="verl", args=args, workers=1))) as pool:
        key = pool.start(problem, 0)
        assert pool.answers(60)
        pool.say(key, called("draw", answer="", kind="video"))
        with pytest.raises(EpisodeError, match="the tool draw returned a video"):
            pool.answers(60)


def test_a_file_of_verl_is_read_as_it_is(tmp_path):
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": [tool(word="yes")]}))
    item, _ = played(config_of(tools=str(file)), called("check", answer="8"), "Done.", extra_info=ROW)
    assert item.episode.turns[0].reply == "no"


def test_tools_get_a_schema_of_verls_class_where_it_is_installed(monkeypatch):
    pytest.importorskip("PIL", reason="pictures need Pillow")

    class Function(BaseModel):
        name: str
        parameters: dict[str, object]

    class OpenAIFunctionToolSchema(BaseModel):
        type: str
        function: Function

    for name in ("verl", "verl.tools", "verl.tools.schemas"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["verl"], "__spec__", ModuleSpec("verl", None))
    monkeypatch.setattr(
        sys.modules["verl.tools.schemas"], "OpenAIFunctionToolSchema", OpenAIFunctionToolSchema, raising=False
    )
    items = [tool("Draw", "draw", of="verl")]
    schemas = module.schemas_of(items)
    assert "description" not in schemas[0]["function"]  # which the class above does not have
    episode = module.verl(
        Problem(problem_id="a", prompt="Do it.", ground_truth=None), tools=items, schemas=schemas, form="hermes"
    )
    next(episode)
    assert episode.send(called("draw", answer=""))[0].text == "OpenAIFunctionToolSchema"


@pytest.mark.parametrize(("args", "words"), [
    ({}, "give a tool_config_path or an interaction_config_path"),
    ({"tools": "/nowhere.yaml"}, "/nowhere.yaml does not exist"),
    ({"tools": [{"config": {}}]}, "an item has no class_name"),
    ({"tools": [tool() | {"config": {"type": "mcp"}}]}, "type 'mcp' is not supported"),
    ({"tools": [tool() | {"class_name": "verl.tools.gsm8k_tool.Gsm8kTool"}]}, "pip install verl"),
    ({"tools": [tool("Nobody")]}, "has no function 'Nobody'"),
    ({"tools": [tool(), tool()]}, "two tools have the name 'check'"),
    ({"tools": [tool() | {"tool_schema": {"type": "function"}}]}, "tool_schema.function: Field required"),
    ({"tools": [tool() | {"tool_schema": None}]}, "NoneType"),
    ({"interactions": [QUIZ, QUIZ]}, "two interactions have the name 'quiz'"),
    ({"tools": [tool()], "max_parallel_calls": "two"}, "args.max_parallel_calls"),
])  # fmt: skip
def test_what_cannot_be_used_is_refused_before_the_run(args, words):
    with pytest.raises(EpisodeError, match=words):
        find_environment("verl", args)


@pytest.mark.parametrize(("row", "words"), [
    ({"extra_info": ROW}, None),
    ({"extra_info": ROW, "agent_name": "tool_agent"}, None),
    ({"extra_info": ROW, "agent_name": "my_agent"}, "agent_name='my_agent'"),
    ({"extra_info": ROW | {"tool_selection": ["check"]}}, "tool_selection"),
    ({"extra_info": {"interaction_kwargs": {"query": "?"}}}, "name=None is none of the interactions: quiz"),
    ({}, "name=None is none of the interactions: quiz"),
])  # fmt: skip
def test_rows_that_no_episode_can_begin_with_are_refused(row, words):
    config = config_of(tools=[tool()], interactions=[QUIZ])
    problems = [Problem(problem_id="t.parquet:3", prompt="p", ground_truth=None, columns=row)]
    if words is None:
        check_columns(config, problems)
        return
    with pytest.raises(ConfigError, match=rf"t\.parquet:3.*{words}"):
        check_columns(config, problems)


def test_the_template_has_a_place_for_tools_and_the_run_has_a_reward():
    tokenizer = make_tokenizer("added", "gemma")
    with pytest.raises(ConfigError, match="chat template ignores tools"):
        with_tools(config_of(tools=[tool()]), tokenizer)
    config = with_tools(config_of("environment", interactions=[QUIZ]), tokenizer)
    check_environment(config, tokenizer)
    with pytest.raises(ConfigError, match="verl does not score the answer; set a reward"):
        check_outcome(config)
