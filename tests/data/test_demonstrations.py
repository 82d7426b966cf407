"""Layouts of demonstrations, how they become tokens, and what the tokens cost."""

import json
import tracemalloc
from dataclasses import replace

import pytest

from atomrl.config import DataConfig, PreferenceConfig
from atomrl.data.completions import demonstration_reader, preference_reader
from atomrl.data.problems import DataError
from atomrl.data.processor import DataProcessor
from atomrl.data.sources import load_samples
from atomrl.data.tokenized import TokenizedSamples, demonstration, rows_from_tokens
from atomrl.models.loading import load_tokenizer
from tests.tiny import make_tiny_model

USER, ASSISTANT = {"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


def load(tmp_path, *rows, field="completion", **config):
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = demonstration_reader("prompt", field)
    return load_samples(DataConfig(train=str(path), **config), convert=read, completions="demonstrate")


@pytest.mark.parametrize(
    ("row", "prompt", "turns"),
    [
        ({"prompt": "2+2=", "completion": "4"}, "2+2=", "4"),
        ({"prompt": "2+2=", "completion": "4", "ground_truth": None, "completions": 3}, "2+2=", "4"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, (USER,), "4"),
        ({"messages": [USER, ASSISTANT]}, "2+2=", "4"),
        ({"messages": [USER, ASSISTANT, USER, ASSISTANT]}, "2+2=", (ASSISTANT, USER, ASSISTANT)),
        ({"conversations": [{"from": "human", "value": "2+2="}, {"from": "gpt", "value": "4"}]}, "2+2=", "4"),
        ({"instruction": "Add.", "input": "2+2", "output": "4"}, "Add.\n\n2+2", "4"),
        ({"instruction": "Add 2+2.", "input": "", "output": "4"}, "Add 2+2.", "4"),
    ],
)
def test_layouts(tmp_path, row, prompt, turns):
    (sample,) = load(tmp_path, row).samples
    assert (
        sample.prompt == prompt
        and sample.columns == {"completions": ((turns, 0.0),)}
        and sample.sample_id == "sft.jsonl:1"
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "2+2="}, "no demonstration: it has 'prompt', but neither 'prompt' and 'completion'"),
        ({"completion": "4"}, "field 'prompt' is missing"),
        ({"prompt": "2+2=", "completion": ""}, "field 'completion' is empty"),
        ({"prompt": "2+2=", "completion": 4}, "field 'completion' must be text or messages"),
        ({"messages": [USER]}, "has no message of the assistant"),
        ({"messages": [ASSISTANT]}, "has no message of the assistant after another"),
        ({"messages": [USER, ASSISTANT, USER]}, "must begin and end with the assistant"),
        ({"messages": "hello"}, "field 'messages' must be text or a list of messages"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "must have 'from'"),
        ({"instruction": "a", "output": 3}, "must be text"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_its_line(tmp_path, row, message):
    with pytest.raises(DataError, match=r"sft\.jsonl:2: ") as raised:
        load(tmp_path, {"prompt": "a", "completion": "b"}, row)
    assert message in str(raised.value)


def tokenized(tokenizer, report, **options):
    return TokenizedSamples(
        report, DataProcessor(tokenizer, DataConfig(train="sft.jsonl")), "demonstrations", **options
    )


def test_a_conversation_trains_what_the_assistant_says_as_it_would_have_been_sampled(tmp_path, tokenizer):
    user, again = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
    data = tokenized(
        tokenizer, load(tmp_path, {"messages": [user, again, USER, ASSISTANT]}, {"messages": [user, again]})
    )
    rows = data.rows([("0", data.samples[0]), ("1", data.samples[1])])
    eos = tokenizer.eos_token
    learned = [tokenizer.decode(tokens[mask]) for tokens, mask in zip(rows.tokens, rows.loss_mask, strict=True)]
    assert learned == [f"2{eos}4{eos}", f"2{eos}"]
    prompt = tokenizer.apply_chat_template([user, again, USER], tokenize=False, add_generation_prompt=True)
    text = tokenizer.decode(rows.tokens[0, : rows.lengths[0]])
    assert text.replace(eos, "").startswith(prompt.replace(eos, "")), "what is between turns is the template's"
    assert rows.labels is None and rows.pair_ids is None and not rows.rewards.any()


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(
        tokenizer,
        "chat_template",
        "{% for m in messages %}{{ 'last ' if loop.last else '' }}{{ m.content }}{% endfor %}",
    )
    report = load(tmp_path, {"messages": [USER, ASSISTANT, USER, ASSISTANT]})
    with pytest.raises(DataError, match=r"sft.jsonl:1: the chat template writes earlier turns otherwise"):
        tokenized(tokenizer, report)


def test_a_tokenized_file_takes_at_most_8_bytes_a_token(tmp_path, tokenizer):
    rows = [{"prompt": f"{k} and so on", "completion": "word " * 300, "chosen": "a " * 300, "rejected": "b " * 290}
            for k in range(300)]  # fmt: skip
    reports = [
        load(tmp_path, *rows),
        load_samples(
            DataConfig(train=str(tmp_path / "sft.jsonl")), convert=preference_reader("prompt", PreferenceConfig())
        ),
    ]
    for report in reports:
        tokenized(tokenizer, replace(report, samples=report.samples[:1]))
        tracemalloc.start()
        data = tokenized(tokenizer, report)
        bytes_held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        tokens = sum(int(batch.lengths.sum()) for batch in data.batches(64))
        assert tokens > 100_000 and bytes_held / tokens <= 8, bytes_held / tokens


def test_limits(tmp_path, tokenizer, caplog):
    report = load(tmp_path, {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b " * 50})
    assert [s.sample_id for s in tokenized(tokenizer, report, limit=30).samples] == ["sft.jsonl:1"]
    assert "1 of 2 demonstrations are longer than 30 tokens" in caplog.text
    assert "sft.jsonl:2) and are left out" in caplog.text
    with pytest.raises(DataError, match=r"take a model with a longer context .*, or shorter data"):
        tokenized(tokenizer, replace(report, samples=report.samples[1:]), limit=30)
    cut = tokenized(tokenizer, report, max_row_tokens=12).rows([("0", report.samples[1])])
    assert cut.tokens.shape == (1, 12) and cut.truncated.tolist() == [True]


def test_completions_of_other_prompts():
    first = [demonstration([5], [6, 2], 1), demonstration([5], [7, 2], -1)]
    rows = rows_from_tokens([first, [demonstration([8, 9], [3], 1)]], mismatched=True)
    assert rows.tokens.tolist()[3:] == [[5, 3, 0, 0], [8, 9, 6, 2], [8, 9, 7, 2]]
    assert rows.mismatched.tolist() == [False] * 3 + [True] * 3 and rows.labels.tolist() == [1, -1, 1, 0, 0, 0]
    assert rows.pair_ids.tolist() == [0, 0, -1, -1, -1, -1] and len(set(rows.group_ids.tolist())) == 5
    with pytest.raises(ValueError, match="rows_per_update must be at least 2"):
        rows_from_tokens([first], mismatched=True)
