# ruff: noqa: E501
"""Rows with messages are what the chat template renders of them, and train what the assistant says."""

import copy
import json
import logging

import pytest

from atomrl.config import DataConfig, PreferenceConfig
from atomrl.data import conversations
from atomrl.data.conversations import ConversationWriter
from atomrl.data.files import DataError
from atomrl.data.given import demonstration_reader, preference_reader
from atomrl.data.problems import load_problems
from atomrl.data.processor import DataProcessor
from atomrl.data.tokenized import TokenizedSamples
from tests.data.templates import FAMILIES, PHI4, QWEN25, family_tokenizer
from tests.templates import make_tokenizer

TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]


def user(text):
    return {"role": "user", "content": text}


def says(text="", **others):
    return {"role": "assistant", "content": text, **others}


def calls(*arguments):
    functions = [{"name": "get", "arguments": each} for each in arguments]
    return [{"id": "abcdefghi", "type": "function", "function": function} for function in functions]


RESULT = {"role": "tool", "content": "rain", "tool_call_id": "abcdefghi"}
CALLING = [user("w?"), says(tool_calls=calls({"c": 1})), RESULT, says("It rains.")]
TWO = [user("hi"), says("A"), user("more"), says("B")]


@pytest.fixture
def rows(tmp_path):
    """(row, tokenizer) -> for each completion of the row: its text, and that of its trained tokens."""

    def read(row, tokenizer, stops=(), preferences=False, suffix="jsonl", **config):
        path = tmp_path / f"d.{suffix}"
        if suffix == "jsonl":
            path.write_text(json.dumps(row) + "\n")
        config = DataConfig(train=str(path), **config)
        convert = demonstration_reader("prompt", "completion")
        if preferences:
            convert = preference_reader("prompt", PreferenceConfig())
        report = load_problems(config, convert=convert)
        stops = tokenizer.convert_tokens_to_ids(list(stops))
        data = TokenizedSamples(report, DataProcessor(tokenizer, config), "rows", stops=stops)
        batch = data.rows([("0", data.problems[0])])
        rows = zip(batch.tokens, batch.loss_mask, batch.lengths, strict=True)
        decode = tokenizer.decode
        return [(decode(ids[:size].tolist()), decode(ids[mask].tolist())) for ids, mask, size in rows]

    return read


def family_row(rows, name, messages, tools=(), **options):
    tokenizer = family_tokenizer(name)
    row = {"messages": messages} | ({"tools": tools} if tools else {})
    [(text, trained)] = rows(row, tokenizer, FAMILIES[name].stops, **options)
    return text, trained


@pytest.mark.parametrize(
    ("name", "trained"),
    {
        "llama3": "A<|eot_id|>B<|eot_id|>",
        "qwen2.5": "A<|im_end|>B<|im_end|>",
        "qwen-base": "A<|im_end|>B<|im_end|>",
        "qwen3": "A<|im_end|><think>\n\n</think>\n\nB<|im_end|>",
        "qwen3-thinking": "A<|im_end|>\n</think>\n\nB<|im_end|>",
        "gemma3": "A<end_of_turn>B<end_of_turn>",
        "phi4": "A<|end|>B<|end|>",
        "mistral": " A</s> B</s>",
        "deepseek": "A<|end_of_sentence|>B<|end_of_sentence|>",
        "r1-distill": "A<|end_of_sentence|>B<|end_of_sentence|>",
        "smollm3": "A<|im_end|>B<|im_end|>",
        "glm": "\n<think></think>\nA<|user|>\n<think></think>\nB<|endoftext|>",
        "gpt-oss": "<|channel|>final<|message|>A<|end|><|channel|>final<|message|>B<|return|>",
        "olmo": "A<|endoftext|>B<|endoftext|>",
        "alpaca": "AB</s>",
        "chatml": "A<|im_end|>B<|im_end|>",
    }.items(),
)
def test_each_turn_of_a_family_with_the_end_that_its_template_writes(rows, name, trained):
    text, own = family_row(rows, name, TWO)
    assert own == trained
    whole = family_tokenizer(name).apply_chat_template(TWO, tokenize=False)
    end = FAMILIES[name].end
    behind = whole[whole.rindex("B") + 1 :]
    assert text == whole.removesuffix(behind) + (end or FAMILIES[name].eos)
    assert text.endswith("B" + (end or FAMILIES[name].eos))


CALL = {
    "llama3": '{"name": "get", "parameters": {"c": 1}}<|eot_id|>It rains.<|eot_id|>',
    "qwen2.5": '<tool_call>\n{"name": "get", "arguments": {"c": 1}}\n</tool_call><|im_end|>It rains.<|im_end|>',
    "qwen3": '<tool_call>\n{"name": "get", "arguments": {"c": 1}}\n</tool_call><|im_end|><think>\n\n</think>\n\nIt rains.'
    "<|im_end|>",
    "mistral": '[TOOL_CALLS][{"name": "get", "arguments": {"c": 1}, "id": "abcdefghi"}]</s> It rains.</s>',
    "glm": "\n<think></think>\n<tool_call>get\n<arg_key>c</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>"
    "\n<think></think>\nIt rains.<|endoftext|>",
    "gpt-oss": ' to=functions.get<|channel|>commentary json<|message|>{"c": 1}<|call|><|channel|>final<|message|>It rains.'
    "<|return|>",
}


@pytest.mark.parametrize(("name", "trained"), CALL.items())
@pytest.mark.parametrize("written", ["object", "JSON", "tools as JSON, no content"])
def test_calls_are_trained_and_tools_shown(rows, name, trained, written):
    """Arguments may be an object, or its JSON as OpenAI's API has it."""
    messages, tools = CALLING, TOOLS
    if written != "object":
        messages = [CALLING[0], says(tool_calls=calls('{"c": 1}')), *CALLING[2:]]
    if written.startswith("tools"):
        messages, tools = [messages[0], messages[1] | {"content": None}, *messages[2:]], json.dumps(TOOLS)
    text, own = family_row(rows, name, messages, tools)
    whole = family_tokenizer(name).apply_chat_template(CALLING, tools=TOOLS, tokenize=False)
    assert own == trained and text.rstrip("\n").startswith(whole.rstrip("\n"))


def test_a_template_that_joins_arguments_to_text_gets_their_json(rows):
    for arguments in ({"c": 1}, '{"c": 1}'):
        messages = [user("w?"), says("Look.", tool_calls=calls(arguments)), RESULT, says("It rains.")]
        _, own = family_row(rows, "deepseek", messages)
        assert own == (
            'Look.<|calls_begin|><|call_begin|>function<|sep|>get\n```json\n{"c": 1}\n```<|call_end|><|calls_end|>'
            "<|end_of_sentence|>It rains.<|end_of_sentence|>"
        )


def test_a_template_that_prints_arguments_gets_their_json(rows):
    tokenizer = family_tokenizer("chatml").__class__(
        tokenizer_object=family_tokenizer("chatml").backend_tokenizer, eos_token="<|im_end|>", pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        chat_template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<call>{{ c.function.name }}{{ c.function.arguments }}</call>{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )  # fmt: skip
    [(_, own)] = rows({"messages": [user("w?"), says(tool_calls=calls({"c": "x"}))]}, tokenizer)
    assert own == '<call>get{"c": "x"}</call><|im_end|>'


THOUGHT = "<think>\nwhy\n</think>\n\nB"


@pytest.mark.parametrize(
    ("name", "last", "trained"),
    [
        ("qwen3", says("B", reasoning_content="why"), "<think>\nwhy\n</think>\n\nB<|im_end|>"),
        ("qwen3", says(THOUGHT), "<think>\nwhy\n</think>\n\nB<|im_end|>"),
        ("qwen3-thinking", says("B", reasoning_content="why"), "why\n</think>\n\nB<|im_end|>"),
        ("qwen3-thinking", says(THOUGHT), "why\n</think>\n\nB<|im_end|>"),
        ("r1-distill", says("B", reasoning_content="why"), "why\n</think>\n\nB<|end_of_sentence|>"),
        ("r1-distill", says(THOUGHT), "why\n</think>\n\nB<|end_of_sentence|>"),
        ("glm", says("B", reasoning_content="why"), "\n<think>why</think>\nB<|endoftext|>"),
        ("gpt-oss", says("B", thinking="why"),
         "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>B<|return|>"),
        ("llama3", says(THOUGHT), "<think>\nwhy\n</think>\n\nB<|eot_id|>"),
        ("qwen3", says("B", reasoning="why", reasoning_content="why"), "<think>\nwhy\n</think>\n\nB<|im_end|>"),
    ],
)  # fmt: skip
def test_thoughts_are_trained_once(rows, name, last, trained):
    text, own = family_row(rows, name, [user("w?"), last])
    assert own == trained and text.count("why") == 1 and text.count("<think>") == trained.count("</think>")


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("llama3", {"messages": [user("w?"), says("B", reasoning_content="y")]}, "message 2: .*'reasoning_content'; write it"),
        ("qwen3", {"messages": [user("w?"), says("B", thinking="y")]}, "reads thoughts from 'reasoning_content'"),
        ("qwen3", {"messages": [user("w?"), says(THOUGHT), *TWO]}, "message 2: .*, 'why'; .* its own row"),
        ("qwen3", {"messages": [user("w?"), says("B", reasoning_content="y"), *TWO]}, "message 2: .*'reasoning_content'"),
        ("deepseek", {"messages": [user("w?"), says(THOUGHT)]}, "message 2: .* 'why'; use a tokenizer"),
        ("qwen3", {"messages": [user("w?"), says("<think>a</think>bb<think>c</think>d")]}, "'bb'"),
        ("smollm3", {"messages": CALLING}, "message 2: the chat template does not show 'tool_calls'"),
        ("phi4", {"messages": CALLING, "tools": TOOLS}, "field 'tools': the chat template does not show tools"),
        ("phi4", {"prompt": "w?", "completion": "x", "tools": TOOLS}, "field 'tools'"),
        ("llama3", {"messages": [user("w?"), says("Look.", tool_calls=calls({}))]}, "message 2: .*'content'; it shows only a mes"),
        ("gpt-oss", {"messages": [user("w?"), says(tool_calls=calls({}, {}))]}, "message 2: .*'tool_calls'"),
        ("chatml", {"messages": [user("w?"), says("x", function_call={"name": "get", "arguments": "{}"})]}, "'function_call'"),
        ("mistral", {"messages": [{"role": "system", "content": "S"}, *CALLING], "tools": TOOLS}, "message 1: .*'content'"),
        ("olmo", {"messages": [user("w?"), {"role": "tool", "content": "r"}, says("x")]}, "message 2: .*'content'"),
        ("gemma3", {"messages": [*TWO[:2], *TWO[1:]]}, "for the conversation: Conversation roles must alternate"),
    ],
)  # fmt: skip
def test_messages_that_a_template_drops_are_refused_with_their_line(rows, name, row, message):
    with pytest.raises(DataError, match=r"d.jsonl:1: .*" + message):
        rows(row, family_tokenizer(name))


def test_rows_that_a_template_cannot_show_can_be_left_out(tmp_path, caplog):
    bad = {"messages": [user("w?"), says(THOUGHT), *TWO]}
    path = tmp_path / "d.jsonl"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in ({"messages": TWO}, bad, {"prompt": "a", "completion": "b"}, bad))
    )

    def read(**config):
        config = DataConfig(train=str(path), **config)
        report = load_problems(config, convert=demonstration_reader("prompt", "completion"))
        return TokenizedSamples(report, DataProcessor(family_tokenizer("qwen3"), config), "demonstrations")

    with pytest.raises(DataError, match=r"(?s)2 rows.*d\.jsonl:2: message 2.*1 more, such as d\.jsonl:4"):
        read()
    assert [sample.problem_id for sample in read(on_bad_row="skip").problems] == ["d.jsonl:1", "d.jsonl:3"]
    assert "2 of 4 demonstrations have problems (the first: d.jsonl:2: message 2" in caplog.text


def test_a_thought_in_the_prompt_need_not_be_shown(rows):
    """The template leaves it out in use, too: so each turn can be a row of its own."""
    row = {"prompt": [user("w?"), says(THOUGHT), user("x")], "completion": [says("<think>\nz\n</think>\n\nC")]}
    [(text, own)] = rows(row, family_tokenizer("qwen3"))
    assert own == "<think>\nz\n</think>\n\nC<|im_end|>" and "why" not in text


def test_ignored_keys_are_warned_of_once(rows, caplog):
    messages = [user("hi") | {"mood": 1}, says("A<|im_end|>\n"), user("more"), says("B", mood=0)]
    [(_, own)] = rows({"messages": messages}, family_tokenizer("chatml"))
    assert own == "A<|im_end|>B<|im_end|>"
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sorted(warned) == [
        "d.jsonl:1: messages have the key 'mood', which the chat template ignores",
        "d.jsonl:1: the content of message 2 ends in '<|im_end|>', which is appended anyway; it is kept once",
    ]


def test_a_system_prompt_of_the_config_does_not_count_as_a_message(rows):
    row = {"messages": [user("w?"), says("B", reasoning_content="y")]}
    with pytest.raises(DataError, match=r"d\.jsonl:1: message 2: "):
        rows(row, family_tokenizer("chatml"), system_prompt="S")
    [(text, _)] = rows({"messages": TWO}, family_tokenizer("chatml"), system_prompt="S")
    assert text.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi")


def test_a_template_may_write_earlier_turns_otherwise(rows):
    """Mistral's shows tools before the last question alone, so that no prompt of an earlier turn begins the text."""
    text, own = family_row(rows, "mistral", TWO, TOOLS)
    assert own == " A</s> B</s>" and text.index("[/INST] A</s>") < text.index("[AVAILABLE_TOOLS]")


def test_the_next_turn_ends_one_only_where_the_model_stops_there(rows):
    tokenizer = family_tokenizer("glm")
    [(text, own)] = rows({"messages": TWO}, tokenizer)
    assert own == "\n<think></think>\nA\n<think></think>\nB<|endoftext|>" and "A<|user|>" in text


def test_variables_of_the_template(rows):
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    [(text, own)] = rows({"messages": [user("hi"), says("A")]}, family_tokenizer("qwen3"), **off)
    assert own == "A<|im_end|>" and text.endswith("assistant\n<think>\n\n</think>\n\nA<|im_end|>")
    [(text, own)] = rows({"prompt": "hi", "completion": "A"}, family_tokenizer("qwen3"), **off)
    assert own == "A<|im_end|>" and text.endswith("assistant\n<think>\n\n</think>\n\nA<|im_end|>")
    with pytest.raises(DataError, match="thought: remove"):
        rows({"prompt": "hi", "completion": THOUGHT}, family_tokenizer("qwen3"), **off)


def test_variables_of_the_template_for_one_row(rows):
    off, asked = {"chat_template_kwargs": {"enable_thinking": False, "xml_tools": None}}, {"messages": TWO[:2]}
    [(text, own)] = rows(asked | off, family_tokenizer("qwen3"))
    assert own == "A<|im_end|>" and text.endswith("assistant\n<think>\n\n</think>\n\nA<|im_end|>")
    [(_, own)] = rows(asked, family_tokenizer("qwen3"))
    assert own != "A<|im_end|>", "without it the model writes the thought itself"
    for given, said in (("no", "must be a mapping"), ({"tools": []}, "'tools' is set by AtomRL")):
        with pytest.raises(DataError, match=said):
            rows(asked | {"chat_template_kwargs": given}, family_tokenizer("qwen3"))


# ---- Text ----


@pytest.mark.parametrize(
    ("name", "completion", "trained"),
    [
        ("qwen-base", "4", "4<|im_end|>"),
        ("gemma3", "4", "4<end_of_turn>"),
        ("phi4", "4 \n", "4 \n<|end|>"),
        ("glm", "4", "4<|endoftext|>"),
        ("qwen3-thinking", THOUGHT, "why\n</think>\n\nB<|im_end|>"),
        ("qwen3-thinking", "why\n</think>\n\nB", "why\n</think>\n\nB<|im_end|>"),
        ("r1-distill", "<think>why</think>B", "why</think>B<|end_of_sentence|>"),
        ("qwen3-thinking", "B", "\n</think>\n\nB<|im_end|>"),  # as its template closes it
        ("chatml", "4<|im_end|>\n", "4<|im_end|>"),
        ("qwen-base", "4<|endoftext|>", "4<|im_end|>"),
    ],
)
def test_a_text_follows_the_prompt_and_its_end_follows_it(rows, caplog, name, completion, trained):
    tokenizer = family_tokenizer(name)
    [(text, own)] = rows({"prompt": "2+2=", "completion": completion}, tokenizer)
    prompt = tokenizer.apply_chat_template([user("2+2=")], tokenize=False, add_generation_prompt=True)
    assert own == trained and text == prompt + trained
    assert ("appended anyway" in caplog.text) == (completion.rstrip().endswith(("_end|>", "text|>")))


def test_an_answer_without_the_thought_that_the_prompt_opens_is_refused(rows):
    with pytest.raises(DataError, match="no thought: begin"):
        rows({"prompt": "2+2=", "completion": "4"}, family_tokenizer("r1-distill"))


@pytest.mark.parametrize("kind", ["byte-level", "added", "unigram", "byte-fallback"])
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("Lily was", "n't sad"), ('She said "', "Hi"), ("2+2=", " 4"), ("a b", "\nc"), ("x", "def f():\n  y")],
)
def test_a_row_is_exactly_prompt_and_completion(rows, kind, prompt, completion):
    tokenizer = make_tokenizer(kind, "llama2", adds_bos=False)
    [(text, own)] = rows({"prompt": prompt, "completion": completion}, tokenizer, chat_template="none")
    assert text == f"{prompt}{completion}</s>"
    if not completion.startswith(" "):  # the decoder of some drops a text's first space
        assert own == f"{completion}</s>"


@pytest.mark.parametrize("kind", ["byte-level", "unigram", "byte-fallback"])
def test_words_behind_a_line_break_get_no_space(rows, kind):
    tokenizer = make_tokenizer(kind, "zephyr", adds_bos=False)
    [(text, _)] = rows({"messages": TWO}, tokenizer)
    assert "<|assistant|>\nA</s>" in text and text.endswith("<|assistant|>\nB</s>")


# ---- Layouts ----


def test_sharegpt_with_calls(rows):
    given = [
        {"from": "human", "value": "w?"},
        {"from": "function_call", "value": '{"name": "get", "arguments": {"c": 1}}'},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "It rains."},
    ]
    tools = json.dumps([tool["function"] for tool in TOOLS])
    row = {"conversations": given, "tools": tools, "system": "S"}
    [(text, own)] = rows(row, family_tokenizer("qwen2.5"))
    assert own == CALL["qwen2.5"] and "system\nS\n\n# Tools" in text and json.dumps(TOOLS[0]) in text


def test_alpaca_with_a_system_prompt_and_a_history(rows):
    row = {"instruction": "more", "input": "", "output": "B", "system": "S", "history": [["hi", "A"]]}
    [(text, own)] = rows(row, family_tokenizer("chatml"))
    assert own == "A<|im_end|>B<|im_end|>" and text.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi")
    [(text, own)] = rows({**row, "history": []}, family_tokenizer("chatml"))
    assert own == "B<|im_end|>" and text.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nmore")


def test_null_columns_from_parquet_are_ignored(rows, tmp_path):
    """A column's objects have all keys that any of them has."""
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    other = [user("t?"), says(tool_calls=calls({"unit": "K"})), RESULT, says("x", reasoning_content=None)]
    pd.DataFrame({"messages": [CALLING, other], "tools": [TOOLS, TOOLS]}).to_parquet(tmp_path / "d.parquet")
    [(_, own)] = rows(None, family_tokenizer("qwen2.5"), suffix="parquet")
    assert own == CALL["qwen2.5"]


def test_parts_of_text_are_joined_and_images_refused(rows):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    [(text, _)] = rows({"messages": [user(parts), *TWO[1:]]}, family_tokenizer("gemma3"))
    assert "user\nhi<end_of_turn>" in text
    with pytest.raises(DataError, match="message 1: 'content'"):
        rows({"messages": [user([*parts, {"type": "image"}]), *TWO[1:]]}, family_tokenizer("gemma3"))


HISTORY = CALLING[:3]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": HISTORY, "chosen": [says("good")], "rejected": [says("bad")], "tools": TOOLS},
        {"chosen": [*HISTORY, says("good")], "rejected": [*HISTORY, says("bad")], "tools": TOOLS},
        {"prompt": HISTORY, "chosen": "good", "rejected": "bad", "tools": TOOLS},
    ],
)
def test_preferences_keep_the_calls_before_them(rows, row):
    (chosen, good), (rejected, bad) = rows(row, family_tokenizer("qwen2.5"), preferences=True)
    assert (good, bad) == ("good<|im_end|>", "bad<|im_end|>")
    assert chosen.removesuffix(good) == rejected.removesuffix(bad)
    assert '"arguments": {"c": 1}' in chosen and json.dumps(TOOLS[0]) in chosen


def test_preferences_between_calls_and_thoughts(rows):
    pair = {
        "chosen": [user("w?"), says(tool_calls=calls({"c": 1}))],
        "rejected": [user("w?"), says(tool_calls=calls({"c": 2}))],
    }
    (_, good), (_, bad) = rows(pair, family_tokenizer("qwen2.5"), preferences=True)
    assert '{"c": 1}' in good and bad == good.replace("1", "2")
    pair = {
        "prompt": "w?",
        "chosen": [says("B", reasoning_content="y")],
        "rejected": [says("B", reasoning_content="n")],
    }
    (_, good), (_, bad) = rows(pair, family_tokenizer("qwen3"), preferences=True)
    assert good == "<think>\ny\n</think>\n\nB<|im_end|>" and bad == "<think>\nn\n</think>\n\nB<|im_end|>"
    with pytest.raises(DataError, match="are the same"):
        rows({**pair, "rejected": pair["chosen"]}, family_tokenizer("qwen3"), preferences=True)


def test_preferences_of_sharegpt_and_alpaca_are_read(rows):
    chosen, rejected = ({"from": "gpt", "value": text} for text in ("good", "bad"))
    row = {"conversations": [{"from": "human", "value": "w?"}], "chosen": chosen, "rejected": rejected}
    (_, good), (_, bad) = rows(row, family_tokenizer("chatml"), preferences=True)
    assert (good, bad) == ("good<|im_end|>", "bad<|im_end|>")
    (_, good), _ = rows(
        {"instruction": "w?", "chosen": "good", "rejected": "bad"}, family_tokenizer("chatml"), preferences=True
    )
    assert good == "good<|im_end|>"


def test_a_system_prompt_that_is_shown_in_use_alone_is_before_the_last_answer(rows, caplog):
    """Mistral's templates write it into the last message if that is the user's, so a whole conversation has none."""
    system = {"role": "system", "content": "Be brief."}
    text, trained = family_row(rows, "mistral", [system, *TWO])
    assert text == "<s>[INST]hi[/INST] A</s>[INST]Be brief.\n\nmore[/INST] B</s>" and trained == " A</s> B</s>"
    assert "the system prompt only before the last answer" in caplog.text
    caplog.clear()
    assert family_row(rows, "mistral", [system, *TWO[:2]]) == ("<s>[INST]Be brief.\n\nhi[/INST] A</s>", " A</s>")
    assert "system prompt" not in caplog.text


@pytest.mark.parametrize(
    ("name", "completion", "lead"),
    [
        ("gpt-oss", "4", "<|channel|>final<|message|>"),
        ("glm", "4", "<think></think>"),
        ("qwen3", "4", "<think>\\n\\n</think>"),
        ("gpt-oss", "<|channel|>final<|message|>4", None),
        ("qwen3", "<think>\nso\n</think>\n\n4", None),
        ("qwen3-thinking", "so</think>4", None),
        ("llama3", "4", None),
        ("mistral", "4", None),
    ],
)
def test_a_text_that_begins_otherwise_than_a_turn_is_said(rows, caplog, name, completion, lead):
    [(_, trained)] = rows({"prompt": "2+2", "completion": completion}, family_tokenizer(name))
    assert trained.startswith(completion), "as it is given"
    assert ("before the assistant's text" in caplog.text) == (lead is not None) and (lead or "") in caplog.text


def with_template(name, template):
    tokenizer = copy.deepcopy(family_tokenizer(name))
    tokenizer.chat_template = template
    return tokenizer


def test_the_begin_of_the_next_turn_is_no_end(rows, caplog):
    tokenizer = with_template("phi4", PHI4.replace("<|end|>", ""))
    [(text, trained)] = rows({"messages": TWO}, tokenizer)
    assert text == "<|user|>hi<|assistant|>A<|user|>more<|assistant|>B<|endoftext|>" and trained == "AB<|endoftext|>"
    assert "writes no end token after assistant turns" in caplog.text


def test_a_turn_without_all_of_its_header_is_trained_from_its_begin(rows, caplog):
    """In generation Gemma 4 writes an empty thought into the header, and none into the rows."""
    opening = "<|im_start|>assistant\n"
    tokenizer = with_template(
        "qwen2.5", QWEN25.replace(f"prompt %}}{{{{- '{opening}", f"prompt %}}{{{{- '{opening}<tool_response>\n")
    )
    [(_, trained)] = rows({"messages": CALLING, "tools": TOOLS}, tokenizer)
    call = '<tool_call>\n{"name": "get", "arguments": {"c": 1}}\n</tool_call><|im_end|>'
    assert trained == f"{call}It rains.<|im_end|>"
    assert "the assistant's turn begins with '<tool_response>\\n'" in caplog.text


TALKS = {
    "plain": TWO,
    "space": [user(" hi \n"), says("\n A \n"), user("more\n"), says("B ")],
    "system": [{"role": "system", "content": "Be brief. "}, *TWO, user("hi"), says("A")],
    "thoughts in words": [user("hi"), says("<think>\na\n</think>\n\nA"), user("b"), says("<think>\nb\n</think>\n\nB")],
    "thoughts": [user("hi"), says("A"), user("b"), says("B", reasoning_content="so")],
    "a word of the template": [user("assistant"), says("user"), user("user\nassistant"), says("assistant")],
    "a token of the template": [user("<|im_end|>\n[INST]"), says("A<|im_start|>"), user("</s>"), says("B<|im_end|>")],
    "an answer in tags": [user("<tool_response>\nhi\n</tool_response>"), says("A"), user("hi"), says("B")],
    "calls": CALLING,
    "texts in calls": [user("hi"), says(tool_calls=calls({"c": "A", "n": 1})), RESULT, says("A")],
    "calls in JSON": [user("hi"), says(tool_calls=calls('{"c":"A", "n": [1, "A"]}')), RESULT, says("A")],
    "names": [{**user("hi"), "name": "Ann"}, says("A", name="Bo"), {**user("b"), "weight": 1}, says("B")],
    "empty": [user("hi"), says("A"), user(""), says("B", reasoning_content="", tool_calls=[])],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_conversations_of_a_known_shape_become_the_same_rows(name):
    """Each is written after another of its shape, and as the first of it."""
    tokenizer = family_tokenizer(name)
    several = ConversationWriter(tokenizer)
    for talk in TALKS.values():
        like = json.dumps(talk).replace('"A', '"\\u00fc\\n').replace('\\"A', '\\"Other').replace('"hi', '"x\\n')
        like = json.loads(like)
        for messages in (like, talk):
            first = next(n for n, message in enumerate(messages) if message["role"] == "assistant")
            written = []
            for writer in (several, ConversationWriter(tokenizer)):
                try:
                    written.append(writer.pieces(messages[:first], messages[first:]))
                except DataError as error:
                    written.append(str(error))
            assert written[0] == written[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_of_a_known_shape_is_rendered_once(name, monkeypatch):
    tokenizer, rendered = family_tokenizer(name), []
    writer = ConversationWriter(tokenizer)
    writer.pieces(TWO[:1], TWO[1:])
    render = conversations.render
    monkeypatch.setattr(
        conversations, "render", lambda *given, **options: rendered.append(1) or render(*given, **options)
    )
    pieces = writer.pieces([user("Go")], [says("One"), user("on"), says("Two")])
    assert len(rendered) == 1 and "Two" in pieces[-1].text
