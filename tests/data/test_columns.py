"""Columns and keys that belong to a conversation are used, or the row is refused."""

import json
import logging

import pytest

from atomrl.common.chat_template import EndlessTemplateError, turn_marks
from atomrl.config import DataConfig, PreferenceConfig
from atomrl.data.files import DataError
from atomrl.data.given import demonstration_reader, preference_reader
from atomrl.data.problems import load_problems
from atomrl.data.processor import DataProcessor
from atomrl.data.tokenized import TokenizedSamples
from atomrl.models.tokenizer import make_tokenizer
from tests.data.templates import family_tokenizer

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
TEXT = {"prompt": "hi", "completion": "yo"}
PAIR = {"prompt": "hi", "chosen": "yo", "rejected": "no"}
RL = {"prompt": "hi", "ground_truth": "yo"}
READERS = {
    "sft": (demonstration_reader("prompt", "completion"), "demonstrate"),
    "pair": (preference_reader("prompt", PreferenceConfig()), "pair"),
    "rl": (None, None),
}


def load(tmp_path, kind, *rows):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_problems(DataConfig(train=str(path)), "train", 0, *READERS[kind])


def sft_rows(tmp_path, *rows):
    """Return (text, trained text) of each row."""
    tokenizer = family_tokenizer("chatml")
    processor = DataProcessor(tokenizer, DataConfig(train="d.jsonl"))
    samples = TokenizedSamples(load(tmp_path, "sft", *rows), processor, "demonstrations")
    batch = samples.rows([(f"0:{problem.problem_id}", problem) for problem in samples.problems])
    parts = zip(batch.tokens, batch.loss_mask, batch.lengths, strict=True)
    return [(tokenizer.decode(ids[:size]), tokenizer.decode(ids[mask])) for ids, mask, size in parts]


@pytest.mark.parametrize("name", ["system", "system_prompt"])
@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("sft", TEXT),
        ("sft", {"messages": TALK}),
        ("sft", {"instruction": "hi", "output": "yo"}),
        ("sft", {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}),
        ("pair", PAIR),
        ("pair", {**PAIR, "prompt": TALK[:1]}),
        ("pair", {"chosen": TALK, "rejected": [TALK[0], {"role": "assistant", "content": "no"}]}),
        ("rl", RL),
    ],
)
def test_a_system_column_is_the_first_message(tmp_path, kind, row, name):
    [problem] = load(tmp_path, kind, {**row, name: "Be brief."}).problems
    assert problem.prompt == ({"role": "system", "content": "Be brief."}, TALK[0])


def test_the_history_of_a_preference_is_part_of_its_prompt(tmp_path):
    row = {"system": "S", "history": [["a", "b"]], "instruction": "hi", "input": "", "chosen": "yo", "rejected": "no"}
    [problem] = load(tmp_path, "pair", row).problems
    assert [message["content"] for message in problem.prompt] == ["S", "a", "b", "hi"]
    assert [turns for turns, _ in problem.columns["completions"]] == ["yo", "no"]


@pytest.mark.parametrize(
    ("kind", "row", "reason"),
    [
        ("sft", {**TEXT, "history": [["a", "b"]]}, "column 'history'"),
        ("pair", {**PAIR, "messages": [{"role": "user", "content": "before"}, *TALK]}, "column 'messages'"),
        ("rl", {**RL, "history": [["a", "b"]]}, "column 'history'"),
        ("sft", {**TEXT, "thinking": "as it is so"}, "column 'thinking'"),
        ("rl", {**RL, "system": "S", "prompt": [{"role": "system", "content": "T"}, TALK[0]]}, "another system prompt"),
        ("sft", {**TEXT, "system": 3}, "'system' must be text"),
        ("sft", {"messages": TALK, "loss_mask": [0, 1]}, "column 'loss_mask' is"),
        ("pair", {**PAIR, "weight": 0.5}, "column 'weight' is 0.5"),
        ("sft", {"messages": [TALK[0], {**TALK[1], "weight": 0.5}]}, "message 2: 'weight' must be 0"),
        ("sft", {"messages": [{**TALK[0], "train": True}, TALK[1]]}, "message 1: 'train' is True"),
        ("pair", {**PAIR, "chosen": [{**TALK[1], "loss": False}], "rejected": [TALK[1]]}, "weight 0"),
        ("rl", {**RL, "images": ["a.png"]}, "column 'images'"),
        ("sft", {**TEXT, "image": {"bytes": "abc", "path": None}}, "column 'image'"),
        ("pair", {**PAIR, "prompt": "What is it? <image>"}, "<image>"),
        ("rl", {**RL, "prompt": "<|vision_start|><|image_pad|><|vision_end|>?"}, "vision_start"),
        ("sft", {"messages": [*TALK, {"role": "user", "content": "<video> so?"}, TALK[1]]}, "<video>"),
    ],
)
def test_what_would_be_left_over_is_refused(tmp_path, kind, row, reason):
    with pytest.raises(DataError, match=f"d.jsonl:1: .*{reason}"):
        load(tmp_path, kind, row)


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("sft", {**TEXT, "messages": TALK, "images": [], "image": None, "weight": 1, "history": []}),
        ("pair", {**PAIR, "messages": TALK, "audio": ""}),
        ("rl", {**RL, "messages": [TALK[0], {"role": "assistant", "content": "a solution"}], "thinking": "so"}),
        ("rl", {**RL, "prompt": "What does <video>a.mp4</video> do in HTML?"}),
    ],
)
def test_what_repeats_the_conversation_or_is_empty_is_accepted(tmp_path, kind, row):
    assert len(load(tmp_path, kind, row).problems) == 1


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"loss": False}, {"loss_mask": 0}])
def test_a_message_of_weight_0_is_not_trained(tmp_path, flag):
    talk = [TALK[0], {"role": "assistant", "content": "bad", **flag}, TALK[0], {**TALK[1], next(iter(flag)): 1}]
    plain = [{key: message[key] for key in ("role", "content")} for message in talk]
    (text, trained), (same, all_trained) = sft_rows(tmp_path, {"messages": talk}, {"messages": plain})
    assert text == same and trained == "yo<|im_end|>" and all_trained == "bad<|im_end|>yo<|im_end|>"


@pytest.mark.parametrize("more", [{}, {"tools": []}, {"tools": None}])
def test_rows_with_and_without_tools(tmp_path, more):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with_tools = load(tmp_path, "sft", {"messages": TALK, "tools": tools}, {"messages": TALK, **more}).problems
    processor = DataProcessor(family_tokenizer("chatml"), DataConfig(train="d.jsonl"))
    assert [len(processor.tools_of(problem)) for problem in with_tools] == [1, 0]


@pytest.mark.parametrize("template", [None, "own"])
def test_marks_of_another_template_are_warned_of(caplog, tmp_path, template):
    tokenizer = make_tokenizer()
    if template is None:
        tokenizer.chat_template = None
    rows = load(tmp_path, "rl", RL, {**RL, "prompt": "<start_of_turn>user\nhi<end_of_turn>"}).problems
    with caplog.at_level(logging.WARNING):
        DataProcessor(tokenizer, DataConfig(train="d.jsonl")).lengths(rows)
    [warning] = [record.getMessage() for record in caplog.records]
    assert "d.jsonl:2" in warning and "<start_of_turn>" in warning and "another model" in warning


def test_a_template_that_never_ends_is_stopped(monkeypatch):
    monkeypatch.setattr("atomrl.common.chat_template.RENDER_S", 0.1)
    tokenizer, many = make_tokenizer(), "{% for i in range(90000) %}"
    tokenizer.chat_template = many * 3 + "{% endfor %}" * 3
    with pytest.raises(EndlessTemplateError, match="may never end"):
        turn_marks(tokenizer)


def test_equal_errors_are_one_line_with_the_key_to_set(tmp_path):
    with pytest.raises(DataError) as caught:
        load(tmp_path, "rl", *[{"question": f"{n}?", "answer": n} for n in range(30)])
    [_, line] = str(caught.value).split("\n")
    assert "data.prompt_field=question" in line and "and 29 more" in line


def test_prompts_are_tokenized_in_chunks_of_the_same_result(tmp_path, monkeypatch):
    problems = load(tmp_path, "rl", *[{**RL, "prompt": f"{n}+1="} for n in range(7)]).problems
    whole = DataProcessor(make_tokenizer(), DataConfig(train="d.jsonl")).lengths(problems)
    monkeypatch.setattr("atomrl.data.problems.AT_ONCE", 3)
    processor = DataProcessor(make_tokenizer(), DataConfig(train="d.jsonl"))
    assert processor.lengths(problems) == whole


def test_tools_of_rl_rows_are_rendered(tmp_path):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    problems = load(tmp_path, "rl", RL, {**RL, "tools": tools}, {**RL, "tools": json.dumps(tools)}).problems
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[-1].content }}"
    processor = DataProcessor(tokenizer, DataConfig(train="d.jsonl"))
    texts = [processor.rendered(each.prompt, each.problem_id, processor.tools_of(each)) for each in problems]
    assert ['"add"' in text for text in texts] == [False, True, True]
    with pytest.raises(DataError, match="tools of its own"):
        DataProcessor(tokenizer, DataConfig(train="d.jsonl"), tools=tools).lengths(problems)
    with pytest.raises(DataError, match=r"d\.jsonl:1: field 'tools'"):
        load(tmp_path, "rl", {**RL, "tools": ["add"]})
