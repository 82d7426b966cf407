"""Layouts of demonstrations, how they become tokens, and what the tokens cost."""

import copy
import json
import tracemalloc
from dataclasses import replace

import pytest
import torch

from atomrl.algorithms.sft import SFT
from atomrl.backends import base as roles
from atomrl.backends.local import LocalBackend
from atomrl.common.metrics import values
from atomrl.config import DataConfig, ModelConfig, PreferenceConfig, TrainConfig
from atomrl.data.files import DataError
from atomrl.data.given import demonstration_reader, preference_reader
from atomrl.data.problems import load_problems
from atomrl.data.processor import DataProcessor
from atomrl.data.rows import to_training_batches
from atomrl.data.tokenized import TokenizedSamples, demonstration, rows_from_tokens
from atomrl.models.loading import load_tokenizer
from tests.tiny import make_tiny_model

USER, ASSISTANT = {"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}
ASKS, ANSWERS = {"role": "assistant", "content": "<add>2 2"}, {"role": "environment", "content": "=4>"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


def load(tmp_path, *rows, field="completion", **config):
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = demonstration_reader("prompt", field)
    return load_problems(DataConfig(train=str(path), **config), convert=read, completions="demonstrate")


@pytest.mark.parametrize(
    ("row", "prompt", "turns"),
    [
        ({"prompt": "2+2=", "completion": "4"}, "2+2=", "4"),
        ({"prompt": "2+2=", "completion": "4", "ground_truth": None, "completions": 3}, "2+2=", "4"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, (USER,), (ASSISTANT,)),
        ({"messages": [USER, ASSISTANT]}, (USER,), (ASSISTANT,)),
        ({"messages": [USER, ASSISTANT, USER, ASSISTANT]}, (USER,), (ASSISTANT, USER, ASSISTANT)),
        ({"prompt": "2+2=", "completion": [ASKS, ANSWERS, ASSISTANT]}, "2+2=", (ASKS, ANSWERS, ASSISTANT)),
        ({"messages": [USER, ASKS, ANSWERS, ASSISTANT]}, (USER,), (ASKS, ANSWERS, ASSISTANT)),
        ({"conversations": [{"from": "human", "value": "2+2="}, {"from": "gpt", "value": "4"}]}, (USER,), (ASSISTANT,)),
        ({"instruction": "Add.", "input": "2+2", "output": "4"}, "Add.\n\n2+2", "4"),
        ({"instruction": "Add 2+2.", "input": "", "output": "4"}, "Add 2+2.", "4"),
        ({"text": "2+2=4"}, "", "2+2=4"),
    ],
)
def test_layouts_of_demonstrations_are_read(tmp_path, row, prompt, turns):
    (problem,) = load(tmp_path, row).problems
    assert (
        problem.prompt == prompt
        and problem.columns["completions"] == ((turns, 0.0),)
        and problem.problem_id == "sft.jsonl:1"
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "2+2="}, "not a demonstration: it has 'prompt', but neither 'prompt' and 'completion'"),
        ({"completion": "4"}, "field 'prompt' is missing"),
        ({"prompt": "2+2=", "completion": ""}, "field 'completion' is empty"),
        ({"prompt": "2+2=", "completion": 4}, "field 'completion' must be text or messages"),
        ({"messages": [USER]}, "has no assistant message"),
        ({"messages": [ASSISTANT]}, "has no assistant message after another"),
        ({"messages": [USER, ASSISTANT, USER]}, "must begin and end with an assistant message"),
        ({"messages": "hello"}, "field 'messages' must be text or a list of messages"),
        ({"messages": [USER, ASKS, ANSWERS]}, "must begin and end with an assistant message"),
        ({"messages": [USER, ANSWERS, ASSISTANT]}, "between two assistant messages"),
        ({"messages": [USER, ASSISTANT, USER, ANSWERS, ASSISTANT]}, "between two assistant messages"),
        ({"messages": [USER, ASKS, ANSWERS, ANSWERS, ASSISTANT]}, "between two assistant messages"),
        ({"prompt": "2+2=", "completion": [ASKS, ANSWERS, USER, ASSISTANT]}, "between two ass"),
        ({"prompt": [USER, ANSWERS], "completion": "4"}, "unknown role 'environment'"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "must have 'from'"),
        ({"instruction": "a", "output": 3}, "must be text"),
    ],
)
def test_invalid_rows_are_named_with_their_line(tmp_path, row, message):
    with pytest.raises(DataError, match=r"sft\.jsonl:2: ") as raised:
        load(tmp_path, {"prompt": "a", "completion": "b"}, row)
    assert message in str(raised.value)


def tokenized(tokenizer, report, **options):
    return TokenizedSamples(
        report, DataProcessor(tokenizer, DataConfig(train="sft.jsonl")), "demonstrations", **options
    )


def test_replies_of_an_environment_are_masked(tmp_path, tokenizer):
    """As in an episode: what the assistant writes before it has no end of sequence, and no template is between."""
    again = {"role": "user", "content": "and 1+1?"}
    data = tokenized(tokenizer, load(
        tmp_path,
        {"prompt": "2+2=", "completion": [ASKS, ANSWERS, ASSISTANT]},
        {"messages": [USER, ASKS, ANSWERS, ASSISTANT, again, ASKS, ANSWERS, ASSISTANT]},
    ))  # fmt: skip
    rows = data.rows([("0", data.problems[0]), ("1", data.problems[1])])
    eos = tokenizer.eos_token_id
    prompt = tokenizer.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    asks, answers, ends = (tokenizer.encode(turn["content"]) for turn in (ASKS, ANSWERS, ASSISTANT))
    expected, mask = [*prompt, *asks, *answers, *ends, eos], [0] * len(prompt) + [1] * len(asks) + [0] * len(answers)
    mask += [1] * (len(ends) + 1)
    assert rows.tokens[0, : rows.lengths[0]].tolist() == expected
    assert rows.loss_mask[0, : rows.lengths[0]].tolist() == mask
    assert rows.tokens[1, : len(expected) - 1].tolist() == expected[:-1], "this template writes no end of a turn"
    assert rows.prompt_lengths.tolist() == [len(prompt)] * 2
    own = tokenizer.decode(rows.tokens[1][rows.loss_mask[1]])
    assert own == (ASKS["content"] + ASSISTANT["content"]) * 2 + tokenizer.eos_token
    turn = {"role": "assistant", "content": "<add>2 2=4>4"}
    text = tokenizer.apply_chat_template([USER, turn, again, turn], tokenize=False)
    assert tokenizer.decode(rows.tokens[1]) == text + tokenizer.eos_token, "the template sees one turn of the assistant"


def test_no_template_is_needed_for_what_an_environment_answers(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    data = tokenized(tokenizer, load(tmp_path, {"prompt": "2+2=", "completion": [ASKS, ANSWERS, ASSISTANT]}))
    (row,) = data.rows([("0", data.problems[0])]).tokens
    assert tokenizer.decode(row) == f"2+2=<add>2 2=4>4{tokenizer.eos_token}"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": "2+2=", "completion": [ASSISTANT, USER, ASSISTANT]},
    ],
)
def test_messages_without_a_template_are_refused_with_what_to_do(tmp_path, tokenizer, monkeypatch, row):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(DataError, match=r"sft\.jsonl:1.*data\.chat_template"):
        tokenized(tokenizer, load(tmp_path, row))


def test_loss_and_gradient_know_nothing_of_targets_under_the_mask(tmp_path, tokenizer, monkeypatch):
    data = tokenized(tokenizer, load(tmp_path, {"prompt": "2+2=", "completion": [ASKS, ANSWERS, ASSISTANT]}))
    rows, row_logprobs = data.rows([("0", data.problems[0])]), roles.row_logprobs
    folder = make_tiny_model(tmp_path / "model")
    model, train = ModelConfig(path=str(folder), dtype="float32"), TrainConfig()

    def trained(changed):
        """Loss and gradient where the targets at `changed` are others; what the model reads is the same."""

        def with_others(states, head, tokens, *rest):
            others = torch.randint(3, 90, tokens.shape, generator=torch.Generator().manual_seed(5))
            return row_logprobs(states, head, torch.where(changed, others, tokens), *rest)

        monkeypatch.setattr(roles, "row_logprobs", with_others)
        backend = LocalBackend(model, train, SFT, total_updates=1)
        (batch,) = to_training_batches(SFT.advantages(rows, {}), SFT, updates=1, epochs=1, seed=0, step=1)
        metrics = values(backend.gradients(batch, SFT))
        return metrics, [weight.grad for weight in backend.policy.model.parameters()]

    (loss, gradient), (same, also) = trained(rows.loss_mask & False), trained(~rows.loss_mask)
    assert loss == same and all(torch.equal(a, b) for a, b in zip(gradient, also, strict=True))
    last = torch.arange(rows.tokens.shape[1])[None] == rows.lengths[:, None] - 1
    assert trained(last)[0] != loss, "nothing was changed at all"


def test_a_tokenized_file_takes_at_most_8_bytes_a_token(tmp_path, tokenizer):
    rows = [{"prompt": f"{k} and so on", "completion": "word " * 300, "chosen": "a " * 300, "rejected": "b " * 290}
            for k in range(300)]  # fmt: skip
    reports = [
        load(tmp_path, *rows),
        load_problems(
            DataConfig(train=str(tmp_path / "sft.jsonl")), convert=preference_reader("prompt", PreferenceConfig())
        ),
    ]
    for report in reports:
        tokenized(tokenizer, replace(report, problems=report.problems[:1]))
        tracemalloc.start()
        data = tokenized(tokenizer, report)
        bytes_held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        tokens = sum(int(batch.lengths.sum()) for batch in data.batches(64))
        assert tokens > 100_000 and bytes_held / tokens <= 8, bytes_held / tokens


def test_demonstrations_beyond_the_limit_are_dropped_or_cut(tmp_path, tokenizer, caplog):
    report = load(tmp_path, {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b " * 50})
    assert [s.problem_id for s in tokenized(tokenizer, report, limit=30).problems] == ["sft.jsonl:1"]
    assert "1 of 2 demonstrations are longer than 30 tokens" in caplog.text
    assert "sft.jsonl:2) and are dropped" in caplog.text
    with pytest.raises(DataError, match="longer context"):
        tokenized(tokenizer, replace(report, problems=report.problems[1:]), limit=30)
    cut = tokenized(tokenizer, report, max_row_tokens=12).rows([("0", report.problems[1])])
    assert cut.tokens.shape == (1, 12) and cut.truncated.tolist() == [True]


def test_completions_of_other_prompts():
    first = [demonstration([5], [6, 2], 1), demonstration([5], [7, 2], -1)]
    rows = rows_from_tokens([first, [demonstration([8, 9], [3], 1)]], mismatched=True)
    assert rows.tokens.tolist()[3:] == [[5, 3, 0, 0], [8, 9, 6, 2], [8, 9, 7, 2]]
    assert rows.preference.mismatched.tolist() == [False] * 3 + [True] * 3
    assert rows.preference.labels.tolist() == [1, -1, 1, 0, 0, 0]
    assert rows.pair_ids.tolist() == [0, 0, -1, -1, -1, -1] and len(set(rows.group_ids.tolist())) == 5
    with pytest.raises(ValueError, match="rows_per_update"):
        rows_from_tokens([first], mismatched=True)


ASKED = "<|user|>2+2=<|assistant|>"


@pytest.mark.parametrize(
    ("row", "train_on", "trained"),
    [
        ({"text": "2+2=4"}, "completions", "+2=4</s>"),
        ({"text": "2+2=4</s>"}, "completions", "+2=4</s>"),
        ({"messages": [USER, ASSISTANT]}, "conversations", "2+2=<|assistant|>4</s>"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, "conversations", "4</s>"),
        ({"prompt": [USER], "completion": [ASSISTANT, USER, ASSISTANT]}, "conversations", f"4{ASKED}4</s>"),
        ({"prompt": "2+2=", "completion": "4"}, "all", "+2=4</s>"),
    ],
)
def test_the_tokens_that_trl_trains(tmp_path, tokenizer, row, train_on, trained):
    report = load(tmp_path, row)
    processor = DataProcessor(tokenizer, DataConfig(train="-", chat_template="messages_only"))
    samples = TokenizedSamples(report, processor, "demonstrations", train_on=train_on)
    rows = samples.rows([("0", samples.problems[0])])
    assert tokenizer.decode(rows.tokens[0][rows.loss_mask[0]]) == trained  # nothing predicts a first token


def test_a_row_ends_with_the_turn_or_with_all_that_the_template_writes(tmp_path, tokenizer):
    one = copy.deepcopy(tokenizer)
    turn = "{{ '<|' + m.role + '|>' + m.content + ('</s>=\\n' if m.role == 'assistant' else '') }}"
    header = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    one.chat_template = "{% for m in messages %}" + turn + "{% endfor %}" + header
    report = load(tmp_path, {"messages": [USER, ASSISTANT, USER, ASSISTANT]})
    ends = []
    for row_end in ("turn", "template"):
        processor = DataProcessor(one, DataConfig(train="-", row_end=row_end))
        rows = TokenizedSamples(report, processor, "demonstrations").rows([("0", report.problems[0])])
        ends.append(one.decode(rows.tokens[0][rows.loss_mask[0]]))
    assert ends[0] == "4</s>4</s>" and ends[1].startswith("4</s>4</s>=")


def test_text_ends_with_the_tokenizers_end_where_only_messages_have_a_template(tmp_path, tokenizer):
    one = copy.deepcopy(tokenizer)
    one.eos_token = "<|user|>"
    report = load(tmp_path, {"prompt": "2+2=", "completion": "4"})
    processor = DataProcessor(one, DataConfig(train="-", chat_template="messages_only"))
    rows = TokenizedSamples(report, processor, "demonstrations").rows([("0", report.problems[0])])
    assert one.decode(rows.tokens[0][rows.loss_mask[0]]) == "4<|user|>"
