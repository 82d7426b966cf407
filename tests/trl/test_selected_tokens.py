"""Which tokens of a row SFT trains: collators of TRL and transformers, unsloth's responses, rows of token ids."""

import json

import pytest
from transformers import AutoTokenizer, DataCollatorForLanguageModeling

from atomrl.config import ConfigError
from atomrl.data.files import DataError
from atomrl.trl import DataCollatorForCompletionOnlyLM, SFTConfig, SFTTrainer
from atomrl.trl.unsloth import train_on_responses_only
from tests.tiny import make_tiny_model

TEXTS = [{"text": "Q: 1+2= A: 3"}, {"text": "Q: 2+2= A: 4"}]
TURNS = [{"text": "Q: 1+2= A: 3 Q: 4+1= A: 5"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trainer(model, rows, **arguments):
    args = SFTConfig("out", max_steps=1, per_device_train_batch_size=1, use_cpu=True, max_length=64)
    return SFTTrainer(model, args=args, train_dataset=rows, **arguments)


def trained(place, tokenizer):
    """Return the text of the trained tokens of each row of the run."""
    rows = [json.loads(line) for line in (place / "out/inputs/train.jsonl").read_text().splitlines()]
    kept = [[token for token in row["labels"] if token != -100] for row in rows]
    return [tokenizer.decode(ids).replace(tokenizer.eos_token, "<end>") for ids in kept]


def test_the_collator_trains_what_follows_the_last_response_template(place, model, tokenizer):
    collator = DataCollatorForCompletionOnlyLM("A:", tokenizer=tokenizer)
    made = trainer(model, TURNS, data_collator=collator)
    made.train()
    assert [text.strip() for text in trained(place, tokenizer)] == ["5<end>"]
    batch = collator([tokenizer(TEXTS[0]["text"])])  # a script that looks at its batch
    assert tokenizer.decode(batch["labels"][0][batch["labels"][0] != -100]).strip() == "3"


def test_with_an_instruction_template_each_answer_is_trained(place, model, tokenizer):
    collator = DataCollatorForCompletionOnlyLM("A:", instruction_template="Q:", tokenizer=tokenizer)
    trainer(model, TURNS, data_collator=collator).train()
    assert "".join(trained(place, tokenizer)[0].split()) == "35<end>"


def test_unsloths_responses(place, model, tokenizer):
    made = train_on_responses_only(trainer(model, TURNS), instruction_part="Q:", response_part="A:")
    made.train()
    assert "".join(trained(place, tokenizer)[0].split()) == "35<end>"


def test_a_pad_token_that_ends_rows_is_not_trained_with_a_collator(place, model, tokenizer):
    tokenizer.pad_token = tokenizer.eos_token
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer(model, TEXTS, data_collator=collator, processing_class=tokenizer).train()
    assert trained(place, tokenizer) == [row["text"] for row in TEXTS]


def test_rows_of_tokens_train_their_labels_without_padding(place, model, tokenizer):
    ids = tokenizer("1+2=3")["input_ids"]
    row = {"input_ids": [*ids, 0, 0], "attention_mask": [1] * len(ids) + [0, 0], "labels": [-100, *ids[1:], -100, -100]}
    result = trainer(model, [row]).train()
    rows = [json.loads(line) for line in (place / "out/inputs/train.jsonl").read_text().splitlines()]
    assert rows == [{"input_ids": ids, "labels": [-100, *ids[1:]]}]
    assert result.global_step == 1


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        (TEXTS, {"response_template": "Answer:"}, "data_collator: its tokens are in no row"),
        (TEXTS, {"response_template": ""}, "has no tokens"),
        ([{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}],
         {"response_template": "A:"}, "needs rows of text or messages, not prompt, completion"),
        ([{"text": "a"}, {"text": None}], {"response_template": "A:"}, "row 1 has no text"),
    ],
)  # fmt: skip
def test_what_selects_nothing_is_refused(model, tokenizer, rows, arguments, message):
    with pytest.raises(ConfigError, match=message):
        trainer(model, rows, data_collator=DataCollatorForCompletionOnlyLM(**arguments, tokenizer=tokenizer))


@pytest.mark.parametrize(
    ("rows", "field", "message"),
    [
        ([{"text": "a"}, {"text": ""}], "text", r"train_dataset: 1 rows have problems:\n  train_dataset\[1\]"),
        ([{"text": "a"}], "body", "no column 'body', but text"),
        ([{"text": "a", "odd": float("nan")}], "text", r"train_dataset\[0\]: column 'odd'"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_trained_is_named_as_in_the_script(model, rows, field, message):
    with pytest.raises((ConfigError, DataError), match=message):
        args = SFTConfig("out", max_steps=1, use_cpu=True, dataset_text_field=field)
        SFTTrainer(model, args=args, train_dataset=rows).train()
