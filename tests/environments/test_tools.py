"""Tools: calls are read in the model's own format, run, and answered; what goes wrong is said to whom it concerns."""

import gc
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from atomrl.config import ConfigError, EnvironmentConfig, ToolConfig, load_config
from atomrl.data.processor import DataProcessor
from atomrl.engines.episodes import EpisodeEngine
from atomrl.engines.fake import FakeEngine
from atomrl.engines.generation import generate
from atomrl.environments import tools as module
from atomrl.environments.pool import CHARACTERS_PER_TOKEN, EnvironmentPool
from atomrl.environments.tool_calls import FORMS, Call, find_calls, find_form
from atomrl.environments.tools import CRASHES, McpCrash, McpServer, connected, find_schemas
from atomrl.environments.worker import EpisodeError
from atomrl.sandbox import running
from atomrl.trainer.checks.environment import check_environment, check_outcome, with_tools
from atomrl.types import Problem, SamplingParams
from tests.environments.my_tools import MCP_SERVER, called, wait_until
from tests.templates import make_tokenizer

PATH = "tests.environments.my_tools"


def config_of(*tools, **changes):
    tree = {"run_name": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}, "tools": list(tools)}
    return load_config(tree | {"reward": {"functions": ["exact_match"]}} | changes)


class Script(FakeEngine):
    """Writes given texts, turn by turn."""

    def __init__(self, tokenizer, texts):
        super().__init__(lambda prompt, index: (), tokenizer)
        self.texts = texts

    def _advance(self, end):
        finished = []
        while self.waiting:
            state = self.waiting.popleft()
            text = self.texts[int(state.request.request_id.rpartition("#")[2])]
            state.set_version(0)
            state.token_ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
            state.logprobs = [-1.0] * len(state.token_ids)
            finished.append((state, "stop"))
        return finished


def played(config, *texts, template="qwen2.5", **columns):
    """An episode in which the model writes these texts: its trajectory, and the row as text."""
    tokenizer = make_tokenizer("added", template)
    config = with_tools(config, tokenizer)
    check_environment(config, tokenizer)
    environment = config.environment
    schemas = environment.args["schemas"]
    processor = DataProcessor(tokenizer, config.data, 9999, schemas, environment.opening)
    problem = Problem(problem_id="a", prompt="Do it.", ground_truth=None, columns=columns)
    with closing(EpisodeEngine(Script(tokenizer, texts), tokenizer, environment, schemas)) as engine:
        sampling = SamplingParams(max_completion_tokens=9999)
        (item,) = generate(engine, processor.to_prompts([("a", problem)]), sampling)
    return item, tokenizer.decode(item.token_ids)


def conversation(config, *messages, template="qwen2.5", prompt="Do it."):
    """As the template writes it whole."""
    tokenizer = make_tokenizer("added", template)
    schemas = with_tools(config, tokenizer).environment.args["schemas"]
    said = [{"role": "user", "content": prompt}, *messages]
    return tokenizer.apply_chat_template(said, tools=list(schemas), tokenize=False)


def assistant(content):
    return {"role": "assistant", "content": content}


def result(content):
    return {"role": "tool", "content": content}


def test_a_call_is_answered_as_the_template_writes_it():
    config, call = config_of(f"{PATH}.weather"), called("weather", city="Zürich")
    item, row = played(config, call, "It is 21 degrees.")
    answer = json.dumps({"city": "Zürich", "temperature": 21, "unit": "C"}, ensure_ascii=False)
    whole = conversation(config, assistant(call), result(answer), assistant("It is 21 degrees."))
    assert row == whole.rstrip("\n") and '"weather"' in row
    assert item.finish_reason == "environment" and item.episode.outcome is None
    assert [turn.labels for turn in item.episode.turns] == [("weather",), ()]


def test_calls_of_one_turn_run_at_the_same_time_and_are_answered_in_order():
    config = config_of(f"{PATH}.meet", f"{PATH}.divide")
    calls = "\n".join([called("meet", name="A"), called("divide", a=1, b=0), called("meet", name="B"),
                       called("meet", name="C"), "<tool_call>{oops</tool_call>", called("nobody")])  # fmt: skip
    item, row = played(config, calls, "Good.")
    answers = ["A came", "Error: divide: ZeroDivisionError: division by zero", "B came", "C came"]
    assert item.episode.turns[0].labels == ("meet", "error", "meet", "meet", "invalid", "invalid")
    problem = "it is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    last = [f"Error: the call of a tool cannot be read: {problem}"]
    last += ["Error: there is no tool 'nobody'; tools: meet, divide"]
    whole = conversation(config, assistant(calls), *map(result, answers + last), assistant("Good."))
    assert row == whole.rstrip("\n")


@pytest.mark.parametrize("call, label, words", [
    (called("divide", a=6, b=3), "divide", "2.0"),
    (called("divide", a="6", b=3), "divide", "2.0"),
    (called("divide", a="six", b=3), "invalid", "Error: divide: a: Input should be a valid integer"),
    (called("divide", a=6), "invalid", "Error: divide: b: Missing required argument"),
    (called("divide", a=6, b=3, c=1), "invalid", "Error: divide: c: Unexpected keyword argument"),
    (called("weather", city="B", unit="K"), "invalid", "unit: Input should be 'C' or 'F'"),
    (called("slow", seconds=0.01), "slow", "done"),
    (called("shop", item="tea"), "shop", "tea: 3 EUR"),
    ('<tool_call>{"name": "divide"', "invalid", "cannot be read"),
    (called("circle"), "error", "Error: circle: ValueError: Circular reference"),
    (called("wordless"), "error", "Error: wordless: Unprintable: (its __str__ raises ValueError)"),
    (called("numbers", values=["\ud800", float("nan")]), "numbers", "2 \ufffd"),
    (f'<tool_call>{{"name": "numbers", "arguments": {{"values": {"[" * 3000}', "invalid", "cannot be read"),
    ('<tool_call>[1]</tool_call>', "invalid", 'not an object with a "name"'),
    ('<tool_call>{"name": "divide", "arguments": 3}</tool_call>', "invalid", "arguments are not a JSON object"),
])  # fmt: skip
def test_the_model_is_told_the_fault_of_its_call(call, label, words):
    tools = [f"{PATH}.{name}" for name in ("divide", "weather", "slow", "circle", "wordless", "numbers")]
    tools += [{"function": f"{PATH}.shop", "args": {"currency": "EUR"}}]
    item, row = played(config_of(*tools), call, "So.")
    assert item.episode.turns[0].labels == (label,)
    assert words in row and item.episode.failure is None


def test_arguments_of_the_config_are_hidden_from_the_model():
    config = config_of({"function": f"{PATH}.shop", "args": {"currency": "EUR"}})
    item, row = played(config, called("shop", item="tea", currency="USD"), "So.")
    assert "currency" not in row.partition("</tools>")[0]
    assert "USD\n</tool_response>" not in row and item.episode.turns[0].labels == ("invalid",)


def test_a_thought_of_a_call_is_none():
    item, _ = played(config_of(f"{PATH}.weather"), f"<think>{called('weather', city='B')}</think>Hm.")
    assert len(item.episode.turns) == 1


@pytest.mark.parametrize("tool, failure", [("boxless", "error"), ("die", "crash")])
def test_a_broken_tool_gives_no_reward(tool, failure):
    arguments = {} if tool == "die" else {"query": "x"}
    item, _ = played(config_of(f"{PATH}.{tool}"), called(tool, **arguments), "So.")
    assert item.episode.failure == failure and item.finish_reason == "abort"


@pytest.mark.parametrize("tool", ["slow", "hang"])
def test_a_call_that_takes_too_long_is_answered_and_touches_no_other(tool):
    config = config_of({"function": f"{PATH}.{tool}", "timeout_s": 2.0}, f"{PATH}.divide")
    calls = called("divide", a=6, b=3) + called(tool, seconds=60) + called("divide", a=8, b=2) + called(tool, seconds=0)
    item, row = played(config, calls, "So.")
    assert item.episode.turns[0].labels == ("divide", "timeout", "divide", tool) and item.episode.failure is None
    assert f"Error: {tool}: no answer within 2 s" in row and 2.0 <= item.episode.turns[0].seconds < 60


def test_a_limit_that_the_environments_comes_before_is_warned_of(caplog):
    tokenizer = make_tokenizer("added", "qwen2.5")
    for seconds, said in ((10.0, 0), (30.0, 1)):
        with_tools(config_of({"function": f"{PATH}.hang", "timeout_s": seconds}), tokenizer)
        assert caplog.text.count("ends the whole episode first") == said


PYTHON = {"function": "atomrl.sandbox.running.python", "args": {"sandbox": "none"}}


def test_python_is_a_tool_whose_settings_are_the_configs():
    calls = [called("python", code=code) for code in ("print(6 * 7)", "1 / 0")]
    calls += [called("python", code="1", sandbox="none"), called("python", code="1", memory_mb=9999)]
    item, row = played(config_of(PYTHON), "".join(calls), "So.")
    assert item.episode.turns[0].labels == ("python", "python", "invalid", "invalid") and item.episode.failure is None
    assert "42" in row and "ZeroDivisionError" in row
    (schema,) = module.find_schemas([ToolConfig(function=PYTHON["function"], args=PYTHON["args"]).model_dump()])
    assert schema["function"]["parameters"]["properties"].keys() == {"code"}
    assert schema["function"]["parameters"]["required"] == ["code"]


@pytest.mark.parametrize("tool", [PYTHON["function"], {**PYTHON, "args": {"memory_mb": 64}}])
def test_python_is_refused_before_the_run_where_there_is_no_sandbox(tool, monkeypatch):
    monkeypatch.setattr(running, "WORKING", set())
    monkeypatch.setattr(running, "start", Mock(side_effect=FileNotFoundError("bwrap is not installed")))
    with pytest.raises(ConfigError, match=r"tool:.*sandbox: none"):
        with_tools(config_of(tool), make_tokenizer("added", "qwen2.5"))


@pytest.mark.parametrize("seconds, said", [(5, False), (15, True)])
def test_programs_that_outlast_the_environments_limit_are_warned_of(seconds, said, caplog):
    environment = {"function": "python", "args": {"sandbox": "none", "timeout_s": seconds}}
    check_environment(config_of(environment=environment), make_tokenizer("added", "qwen2.5"))
    assert ("30 s, which is not below environment.timeout_s=30" in caplog.text) == said


@pytest.mark.parametrize("tool, said", [("down", "the service is down"), ("gives_up", "the service is silent")])
def test_a_tool_whose_service_stays_unavailable_ends_the_run(tool, said):
    config = config_of(f"{PATH}.{tool}", environment={"function": "tools", "wait_s": 0})
    with pytest.raises(EpisodeError, match=rf"unavailable for .*environment.wait_s=0\): ConnectionError: .*{said}"):
        played(config, called(tool, **({"query": "x"} if tool == "down" else {})), "So.")


@pytest.mark.parametrize("address", ["http://no-such-host.invalid/", "see www.no-such-host.invalid"])
def test_an_address_that_the_model_wrote_ends_no_run(address):
    config = config_of(f"{PATH}.down", environment={"function": "tools", "wait_s": 0})
    item, row = played(config, called("down", query=address), "So.")
    assert item.episode.failure is None and "Error: down: ConnectionError: the service is down" in row


def test_a_worker_with_a_call_that_continues_is_replaced():
    problem = Problem(problem_id="a", prompt="", ground_truth=None)
    config = with_tools(config_of({"function": f"{PATH}.hang", "timeout_s": 2.0}), make_tokenizer("added", "qwen2.5"))
    with closing(EnvironmentPool(config.environment.model_copy(update={"workers": 1}))) as pool:
        first, second = pool.start(problem, 0), pool.start(problem, 0)
        wait_for(pool, 2)
        (worker,) = pool.workers
        for key in (first, second):
            pool.say(key, called("hang", seconds=600 if key == first else 0))
        assert {answer.reply.label for answer in wait_for(pool, 2).values()} == {"timeout", "hang"}
        assert worker.retiring
        third = pool.start(problem, 0)
        wait_for(pool, 1)
        assert len(pool.workers) == 2, "new episodes have a new one"
        for key in (first, second):
            pool.say(key, "So.")
        assert all(answer.ended and answer.failure is None for answer in wait_for(pool, 2).values())
        assert worker not in pool.workers and worker.process.poll() is not None
        pool.say(third, "So.")
        assert wait_for(pool, 1)[third].ended


def test_ten_megabytes_of_a_tool_are_cut_before_they_travel():
    problem = Problem(problem_id="a", prompt="", ground_truth=None)
    config = with_tools(config_of(f"{PATH}.much", f"{PATH}.divide"), make_tokenizer("added", "qwen2.5"))
    settings = config.environment.model_copy(update={"workers": 1, "max_reply_tokens": 64})
    with closing(EnvironmentPool(settings)) as pool:
        first, second = pool.start(problem, 0), pool.start(problem, 0)
        wait_for(pool, 2)
        pool.say(first, called("much") + called("divide", a=6, b=3))
        pool.say(second, called("divide", a=6, b=3))
        answers = wait_for(pool, 2)
        assert [reply.label for reply in answers[first].replies] == ["much", "divide"]
        assert sum(len(reply.text) for reply in answers[first].replies) <= 64 * CHARACTERS_PER_TOKEN
        assert answers[second].reply.text == "2.0" and len(pool.workers) == 1


def wait_for(pool, count, limit_s=120.0):
    answers, end = {}, time.monotonic() + limit_s
    while len(answers) < count and time.monotonic() < end:
        answers |= dict(pool.answers(0.2))
    return answers


def test_an_object_is_one_threads_and_its_calls_keep_their_order():
    words = [called("note", word=word, seconds=0.05 * (3 - place)) for place, word in enumerate("abc")]
    item, row = played(config_of(f"{PATH}.Notes", reward={}), "".join(words), called("note", word="d"), "So.")
    assert item.episode.outcome == 4.0 and "a b c d" in row
    late = {"function": f"{PATH}.Notes", "timeout_s": 2.0}
    calls = called("note", word="x") + called("note", word="y", seconds=60) + called("note", word="z")
    item, row = played(config_of(late, reward={}), calls, "So.")
    assert item.episode.turns[0].labels == ("note", "timeout", "timeout") and "has not returned" in row
    assert item.episode.failure == "error" and "has not returned" in item.episode.message


def test_a_class_is_made_for_each_episode_and_gives_the_reward():
    config = config_of({"function": f"{PATH}.Counter", "args": {"step": 2}}, reward={})
    assert [item.function for item in config.reward.functions] == ["environment"]
    twice = called("increment") + "\n" + called("increment", by=2)
    item, row = played(config, called("increment"), twice, "Done.", target=8)
    assert item.episode.outcome == 1.0
    prompt = "Do it. Count to 8."
    messages = [assistant(called("increment")), result("2"), assistant(twice), result("4"), result("8")]
    whole = conversation(config, *messages, assistant("Done."), prompt=prompt)
    assert row == whole.rstrip("\n") and item.episode.opening_tokens > 0
    item, _ = played(config, "No.", target=8)
    assert item.episode.outcome == 0.0


# ---- Formats ----

PLAIN = [("hermes", "qwen2.5"), ("hermes", "qwen3"), ("xml", "xml"), ("llama", "llama3"), ("mistral", "mistral")]
PROPERTIES = {"text": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
SCHEMAS = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": PARAMETERS}}]


@pytest.mark.parametrize("form, template", PLAIN)
def test_a_call_that_the_template_writes_is_read_again(form, template):
    tokenizer = make_tokenizer("added", template)
    assert find_form(tokenizer, SCHEMAS) == form
    arguments = {"text": 'a "b" </x>\n{1}', "n": 3, "l": [1, {"a": None}]}
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    user = {"role": "user", "content": "words"}
    front = tokenizer.apply_chat_template([user], tools=SCHEMAS, tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template([user, message], tools=SCHEMAS, tokenize=False)[len(front) :]
    assert find_calls(text.replace(tokenizer.eos_token, "").rstrip(), form, SCHEMAS) == [Call("f", arguments)]


@pytest.mark.parametrize("form, text, names", [
    ("hermes", "no call", []),
    ("hermes", called("a") + called("b"), ["a", "b"]),
    ("hermes", '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}', ["a"]),
    ("xml", "<tool_call>\n<function=a>\n</function>\n</tool_call>", ["a"]),
    ("llama", '{"name": "a", "parameters": {}}', ["a"]),
    ("llama", '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', ["a", "b"]),
    ("llama", '{"answer": 3}', []),
    ("llama", "It is 3.", []),
    ("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]', ["a", "b"]),
    ("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {"t": "[TOOL_CALLS] x[ARGS]{}"}}]', ["a"]),
    ("llama", '<|python_tag|>{"name": "a", "parameters": {"t": "<|python_tag|>"}}', ["a"]),
    ("llama", '<|python_tag|>{"name": "a"}<|python_tag|>{"name": "b"}', ["a", "b"]),
    ("llama", '{"name": "Bob", "age": 5}', []),
    ("mistral", '[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[ARGS]{}', ["a", "b"]),
])  # fmt: skip
def test_calls_are_read_in_each_format(form, text, names):
    calls = find_calls(text, form, SCHEMAS)
    assert [call.name for call in calls] == names and not any(call.problem for call in calls)


TAGS = "</think> <think> </tool_call> <tool_call>"


@pytest.mark.parametrize("form, text, calls", [
    ("hermes", '<tool_call>{"name": "a", "arguments": {"t": "TAGS"}}</tool_call><tool_call>{"name": "b"}', "ab"),
    ("hermes", '<think>hm</think>so <tool_call>{"name": "a", "arguments": {"t": "TAGS"}}', "a"),
    ("hermes", '<think><tool_call>{"name": "b", "arguments": {"t": "TAGS"}}</tool_call></think>', ""),
    ("xml", "<tool_call>\n<function=a>\n<parameter=t>\nTAGS\n</parameter>\n</function>\n</tool_call>", "a"),
    ("xml", "<tool_call><function=a><parameter=t>TAGS</parameter></function></tool_call><tool_call><function=b>", "ab"),
    ("llama", '{"name": "a", "parameters": {"t": "TAGS"}}; {"name": "b", "parameters": null}', "ab"),
    ("llama", '<think>hm</think>{"name": "a", "parameters": {"t": "TAGS"}}', "a"),
    ("mistral", '[TOOL_CALLS]a[ARGS]{"t": "TAGS"}[TOOL_CALLS]b[ARGS]{}', "ab"),
    ("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {"t": "TAGS"}}, {"name": "b", "arguments": ""}]', "ab"),
])  # fmt: skip
def test_tags_in_what_a_call_is_given_are_its_text(form, text, calls):
    given = {"a": {"t": TAGS}, "b": {}}
    assert find_calls(text.replace("TAGS", TAGS), form, SCHEMAS) == [Call(name, given[name]) for name in calls]


def test_a_value_may_end_a_parameter_in_its_midst():
    text = '<tool_call><function=a><parameter=t>print("</parameter>")</parameter></function></tool_call>'
    assert find_calls(text, "xml", SCHEMAS) == [Call("a", {"t": 'print("</parameter>")'})]


@pytest.mark.parametrize("arguments", ["null", '""', '" "', '"null"', "{}", '"{}"'])
def test_no_arguments_are_none(arguments):
    for key in ("arguments", "parameters"):
        assert find_calls(f'<tool_call>{{"name": "a", "{key}": {arguments}}}</tool_call>', "hermes") == [Call("a", {})]


@pytest.mark.parametrize("form, text", [
    ("hermes", '<tool_call>{"name": "a", "arguments": []}</tool_call>'),
    ("hermes", "<tool_call>{</tool_call>"), ("hermes", "<tool_call>3</tool_call>"),
    ("xml", "<tool_call>f()</tool_call>"),
    ("llama", '{"name": "a", "para'), ("llama", "<|python_tag|>print(3)"), ("mistral", "[TOOL_CALLS] f(3)"),
    ("mistral", "[TOOL_CALLS]f[ARGS]{x}"),
])  # fmt: skip
def test_unreadable_calls_have_a_problem(form, text):
    (call,) = find_calls(text, form, SCHEMAS)
    assert call.problem and form in FORMS


def test_a_tokenizer_that_brings_a_response_template():
    """A format of transformers that none of our parsers reads."""
    template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<call:(?P<name>\w+)>", "close": "</call>", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"content": "text"},
        },
    }  # fmt: skip
    text = 'Well. <call:f>{"n": 3}</call><call:g>{}</call>'
    assert find_calls(text, template, SCHEMAS) == [Call("f", {"n": 3}), Call("g", {})]
    (broken,) = find_calls("<call:f>{</call>", template, SCHEMAS)
    assert broken.problem
    tokenizer = make_tokenizer("added", "qwen2.5", adds_bos=False)
    tokenizer.response_template = template
    try:
        assert find_form(tokenizer, SCHEMAS) == template
    finally:
        del tokenizer.response_template


# ---- What is refused before a run ----


@pytest.mark.parametrize("tools, changes, template, words", [
    ([f"{PATH}.nothing_said"], {}, "qwen2.5", "nothing_said' cannot be a tool: .* no docstring"),
    ([f"{PATH}.absent"], {}, "qwen2.5", "no function 'absent'"),
    ([{"function": f"{PATH}.shop", "args": {"curency": "EUR"}}], {}, "qwen2.5", "unexpected keyword .*curency"),
    ([f"{PATH}.weather", f"{PATH}.weather"], {}, "qwen2.5", "two tools have the name 'weather'"),
    (["pathlib.Path"], {}, "qwen2.5", "without a method reset"),
    ([f"{PATH}.weather"], {}, "gemma", "ignores tools"),
    ([f"{PATH}.weather"], {"reward": {}}, "qwen2.5", "tools only give a reward"),
    ([f"{PATH}.weather"], {"data": {"train": "t", "chat_template": "none"}}, "qwen2.5", "cannot be added to prompts"),
    ([{"mcp": ["/no/such/command"]}], {}, "qwen2.5", "the MCP server /no/such/command: it cannot be reached"),
    ([{"mcp": "http://127.0.0.1:9", "headers_env": {"A": "NO_SUCH_VAR"}}], {}, "qwen2.5", "NO_SUCH_VAR is not set"),
    ([f"{PATH}.Bare"], {}, "qwen2.5", r"^tools: '[\w.]+Bare' has no tools"),
    ([f"{PATH}.Rowless"], {}, "qwen2.5", r"reset must accept the row, .* unexpected keyword argument 'prompt'"),
    ([f"{PATH}.Rewardless"], {"reward": {}}, "qwen2.5", "tools only give a reward"),
    ([{"function": "atomrl.sandbox.running.python", "args": {"sandbox": "none", "timeout_s": 0}}], {}, "qwen2.5",
     "timeout_s is a number above 0, not 0"),
    ([], {"environment": {"function": "tools"}}, "qwen2.5", "add the section tools"),
])  # fmt: skip
def test_functions_that_cannot_be_tools_are_refused(tools, changes, template, words):
    if tools and "mcp" in tools[0]:
        pytest.importorskip("mcp")
    tokenizer = make_tokenizer("added", template)
    if changes == {"reward": {}}:
        with_tools(config_of(*tools, **changes), tokenizer)  # what is only looked at needs none
    with pytest.raises(ConfigError, match=words):
        check_outcome(with_tools(config_of(*tools, **changes), tokenizer))


@pytest.mark.parametrize("tool, words", [
    ({}, "give either function or mcp"), ({"function": "a.b", "mcp": ["c"]}, "give either function or mcp"),
    ({"mcp": "python server.py"}, "a command as a list"), ({"mcp": ["a"], "args": {"b": 1}}, "args are for a function"),
])  # fmt: skip
def test_a_tool_is_a_function_or_an_mcp_server(tool, words):
    with pytest.raises(ConfigError, match=words):
        config_of(tool)
    assert config_of("a.b").environment.function == "tools"
    assert config_of("a.b", environment={"max_turns": 3}).environment.max_turns == 3
    with pytest.raises(ConfigError, match="one of the two"):
        config_of("a.b", environment={"function": "search_r1"})


# ---- MCP ----


@pytest.fixture
def mcp_file(tmp_path):
    pytest.importorskip("mcp", reason="needs the extra mcp")
    file = tmp_path / "server.py"
    file.write_text(MCP_SERVER)
    return str(file)


def server_of(**tool):
    return McpServer(ToolConfig(**tool).model_dump(mode="json"))


def test_an_mcp_server_by_its_command(mcp_file, monkeypatch):
    monkeypatch.setenv("HIDDEN", "key")
    config = config_of({"mcp": [sys.executable, mcp_file], "env": {"GIVEN": "yes"}}, f"{PATH}.divide")
    calls = "".join([called("add", a=2, b=3), called("divide", a=6, b=3), called("fail"), called("add", a="x", b=3),
                     called("secret")])  # fmt: skip
    item, row = played(config, calls, "Five.")
    assert item.episode.turns[0].labels[:3] == ("add", "divide", "error")
    assert item.episode.turns[0].labels[3] in ("invalid", "error") and item.episode.turns[0].labels[4] == "secret"
    answers = row.partition("<|im_end|>\n<|im_start|>user\n<tool_response>")[2].split("<tool_response>")
    assert "\n5\n" in answers[0] and "no such luck" in answers[2] and "yes None" in answers[4]


def test_a_secret_of_an_mcp_server_is_named_by_a_variable_and_not_repeated(mcp_file, monkeypatch):
    monkeypatch.setenv("MINE", "s3cr3t-value")
    named = [
        {"mcp": [sys.executable, mcp_file], "env": {"GIVEN": "${MINE}"}},
        {"mcp": [sys.executable, mcp_file], "env": {"GIVEN": "${MINE}", "API_KEY": "${MINE}"}},
        {"mcp": [sys.executable, mcp_file], "env": {"GIVEN": "s3cr3t-value", "API_KEY": "s3cr3t-value"}},
    ]
    for tool, told in zip(named, ("s3cr3t-value None", "*** None", "*** None"), strict=True):
        with closing(server_of(**tool)) as server:
            assert server.call("secret").text == told, "what is no secret is told as it is"
    monkeypatch.delenv("MINE")
    with closing(server_of(**named[0])) as server, pytest.raises(ConnectionError, match="MINE"):
        server.schemas()
    with closing(server_of(mcp=["/no/such", "--api-key", "s3cr3t-value"])) as server:
        with pytest.raises(ConnectionError, match=r"/no/such --api-key \[secret-left-out\]") as caught:
            server.schemas()
        assert "s3cr3t" not in str(caught.value)


def test_an_mcp_server_that_ends_or_hangs_is_a_failure_and_is_found_again(mcp_file):
    with closing(server_of(mcp=[sys.executable, mcp_file], timeout_s=60.0)) as server:
        assert {schema["function"]["name"] for schema in server.schemas()} >= {"add", "fail", "hang", "leave"}
        with pytest.raises(ConnectionError, match=r"MCP server .*server\.py"):
            server.call("leave")
        assert server.call("add", a=1, b=2).text == "3", "it has been started again"
        server.tool = {**server.tool, "timeout_s": 0.5}
        with pytest.raises((TimeoutError, ConnectionError), match="the MCP server"):
            server.call("hang", seconds=600.0)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by /proc")
def test_errors_of_an_mcp_server_are_told_and_cost_no_connection(mcp_file):
    with closing(server_of(mcp=[sys.executable, mcp_file])) as server:
        assert server.call("add", a=1, b=2).text == "3"
        (process,) = running_with(mcp_file)
        reply = server.call("overdrawn")
        assert (reply.label, reply.role) == ("error", "tool") and "no credit left" in reply.text
        assert server.call("nobody").label in ("invalid", "error")
        assert server.call("add", a=1, b=2).text == "3" and running_with(mcp_file) == [process]


def running_with(name):
    """The processes with a name among their arguments."""
    return [folder for folder in Path("/proc").glob("[0-9]*") if name in arguments_of(folder)]


def arguments_of(folder):
    try:
        return (folder / "cmdline").read_text()
    except OSError:
        return ""


SILENT = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by /proc")
def test_an_mcp_server_that_never_comes_up_leaves_no_process(tmp_path, caplog):
    pytest.importorskip("mcp", reason="needs the extra mcp")
    name = f"silent-{tmp_path}"
    server = server_of(mcp=[sys.executable, "-c", SILENT, name], timeout_s=0.5)
    try:
        for _ in range(2):
            with pytest.raises((TimeoutError, ConnectionError), match="the MCP server"):
                server.schemas()
        assert running_with(name), "nobody waited for its end"
        wait_until(lambda: not running_with(name))
    finally:
        server.close()
    gc.collect()
    assert "never retrieved" not in caplog.text


CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {silent!r}, sys.argv[1]], start_new_session=True)
time.sleep({seconds})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by /proc")
@pytest.mark.parametrize("code", [
    SILENT,
    CHILD.format(silent=SILENT, seconds=600),
    CHILD.format(silent=SILENT, seconds=0),
], ids=["silent", "with a child in its own session", "with a child, and has ended"])  # fmt: skip
def test_an_mcp_server_and_its_children_have_ended_when_the_check_of_a_config_has(tmp_path, code):
    pytest.importorskip("mcp", reason="needs the extra mcp")
    name = f"silent-{tmp_path}"
    tool = ToolConfig(mcp=[sys.executable, "-c", code, name], timeout_s=0.5).model_dump(mode="json")
    with pytest.raises((TimeoutError, ConnectionError), match=f"the MCP server {sys.executable}"):
        find_schemas([tool])
    assert not running_with(name)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by /proc")
def test_a_call_that_an_mcp_server_does_not_answer_leaves_others_theirs(mcp_file):
    """They keep the connection that new calls do not get."""
    with closing(server_of(mcp=[sys.executable, mcp_file], timeout_s=30.0)) as server, ThreadPoolExecutor(3) as pool:
        server.schemas()
        server.tool = {**server.tool, "timeout_s": 1.0}
        first = pool.submit(server.call, "hang")
        time.sleep(0.3)
        second = pool.submit(server.call, "hang")
        time.sleep(0.1)
        server.tool = {**server.tool, "timeout_s": 30.0}
        other = pool.submit(server.call, "hang", seconds=3.0)
        with pytest.raises(TimeoutError):
            first.result()
        assert server.call("add", a=1, b=2).text == "3"
        processes = running_with(mcp_file)
        with pytest.raises(TimeoutError):
            second.result()  # it lost the old connection, and not the new one
        assert server.call("add", a=1, b=2).text == "3" and other.result().text == "late"
        assert len(processes) == 2 and running_with(mcp_file) == processes


def test_a_worker_asks_a_server_that_was_down_again(mcp_file, tmp_path):
    tool = ToolConfig(mcp=[sys.executable, str(tmp_path / "later.py")]).model_dump(mode="json")
    with pytest.raises(ConnectionError):
        connected(tool)
    (tmp_path / "later.py").write_text(MCP_SERVER)
    with closing(connected(tool)) as server:
        assert "add" in server.names


def test_an_mcp_server_by_its_address(mcp_file):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with closing(server_of(mcp=f"http://127.0.0.1:{port}/mcp", timeout_s=60.0)) as server:
        with pytest.raises(ConnectionError, match="cannot be reached"):
            server.schemas()
        process = subprocess.Popen([sys.executable, mcp_file, str(port)], stdout=subprocess.DEVNULL)
        try:
            wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
            assert len(server.schemas()) == 6
            reply = server.call("add", a=1, b=2)
            assert (reply.text, reply.label, reply.role) == ("3", "add", "tool")
        finally:
            process.kill()
            process.wait()
        with pytest.raises((TimeoutError, ConnectionError)):
            server.call("add", a=1, b=2)


def test_a_call_that_ends_an_mcp_server_each_time_is_no_outage(mcp_file):
    """One that found it away each time is one."""
    with closing(server_of(mcp=[sys.executable, mcp_file], timeout_s=60.0)) as server:
        for _ in range(CRASHES):
            with pytest.raises(ConnectionError):
                server.call("leave")
        with pytest.raises(McpCrash, match=r"server\.py.*4 connections"):
            server.call("leave")
        assert server.call("add", a=1, b=2).text == "3"
        with pytest.raises(McpCrash):
            server.call("leave")
        server.tool = {**server.tool, "mcp": [sys.executable, "no-such-file.py"]}
        for _ in range(CRASHES + 2):
            with pytest.raises(ConnectionError, match="cannot be reached"):
                server.call("add", a=1, b=2)


def test_the_environment_is_in_the_table():
    assert EnvironmentConfig(function="tools").function == "tools" and module.AT_ONCE > 1
