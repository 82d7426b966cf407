"""Prompts as token ids: the template once, one BOS at most, system prompts, the length limit."""

from __future__ import annotations

from array import array

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from atomrl.config import DataConfig
from atomrl.data.columns import with_system
from atomrl.data.files import DataError
from atomrl.data.processor import DataProcessor
from atomrl.types import Problem

WORDS = ["a", "b", "c", "d", "sys", "user", "assistant", "system", "done", "[", "]"]
TEMPLATE = (
    "{% for m in messages %}{{ '[ ' + m['role'] + ' ] ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[ assistant ] ' }}{% endif %}"
)


def make_tokenizer(adds: str = "", template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words; `adds` is the post-processor's form, such as "<s> $A </s>"."""
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds:
        core.post_processor = processors.TemplateProcessing(single=adds, special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer


def config(**keys) -> DataConfig:
    return DataConfig(train="x", **keys)


def make_problem(prompt, name="s") -> Problem:
    return Problem(problem_id=name, prompt=prompt, ground_truth="1")


def words(processor: DataProcessor, *prompts) -> list[str]:
    batch = processor.to_prompts([(str(n), make_problem(prompt, str(n))) for n, prompt in enumerate(prompts)])
    return [processor.tokenizer.decode(ids) for ids in (prompt.token_ids for prompt in batch)]


USER = ({"role": "user", "content": "a b"},)


@pytest.mark.parametrize("adds", ["", "<s> $A", "<s> $A </s>", "$A </s>"])
@pytest.mark.parametrize("template_has_bos", [True, False])
def test_never_two_bos_and_never_an_eos(adds, template_has_bos):
    template = ("{{ bos_token }} " if template_has_bos else "") + TEMPLATE
    templated = DataProcessor(make_tokenizer(adds, template), config())
    expected = ("<s> " if template_has_bos else "") + "[ user ] a b [ assistant ]"
    assert words(templated, "a b", USER) == [expected] * 2  # the template alone decides
    front = "<s> " if adds.startswith("<s>") else ""
    for processor in (
        DataProcessor(make_tokenizer(adds), config()),
        DataProcessor(make_tokenizer(adds, template), config(chat_template="none")),
    ):
        assert words(processor, "a b", "<s> a b", "<s>a b") == [front + "a b", "<s> a b", "<s> a b"]


def test_templates_of_real_tokenizers_agree_with_transformers(shared_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_dir / "models/stories260k")
    bare = DataProcessor(tokenizer, config())
    [ids] = [prompt.token_ids for prompt in bare.to_prompts([("p", make_problem("Once upon a time"))])]
    assert list(ids) == tokenizer("Once upon a time")["input_ids"] and ids.count(tokenizer.bos_token_id) == 1
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    templated = DataProcessor(tokenizer, config())
    [ids] = [prompt.token_ids for prompt in templated.to_prompts([("p", make_problem("Once upon a time"))])]
    assert ids.count(tokenizer.bos_token_id) == 1
    [expected] = tokenizer.apply_chat_template([[{"role": "user", "content": "Once upon a time"}]])["input_ids"]
    assert list(ids) == expected


def test_system_prompt_from_text_and_file(tmp_path):
    file = tmp_path / "system.txt"
    file.write_text("\ufeffc d\n", encoding="utf-8")
    for keys in ({"system_prompt": "c d"}, {"system_prompt_file": str(file)}):
        templated = DataProcessor(make_tokenizer(template=TEMPLATE), config(**keys))
        own = ({"role": "system", "content": "sys"}, *USER)
        assert words(templated, "a b", USER, own) == [
            "[ system ] c d [ user ] a b [ assistant ]",
            "[ system ] c d [ user ] a b [ assistant ]",
            "[ system ] sys [ user ] a b [ assistant ]",
        ]
        assert words(DataProcessor(make_tokenizer("<s> $A"), config(**keys)), "a b") == ["<s> c d a b"]


def test_system_prompts_that_cannot_be_put_in(tmp_path):
    (tmp_path / "empty.txt").write_text(" ")
    for keys, message in [
        ({"system_prompt_file": str(tmp_path / "absent.txt")}, "absent.txt cannot be read"),
        ({"system_prompt_file": str(tmp_path / "empty.txt")}, "is empty"),
        ({"system_prompt": "c", "chat_template": "none"}, "uses prompts unchanged"),
    ]:
        with pytest.raises(DataError, match=message):
            DataProcessor(make_tokenizer(template=TEMPLATE), config(**keys))
    deaf = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="system prompt"):
        words(DataProcessor(make_tokenizer(template=deaf), config(system_prompt="c d")), "a")
    refusing = "{{ raise_exception('no system role') if messages[0]['role'] == 'system' }}"
    with pytest.raises(DataError, match="chat template raised"):
        words(DataProcessor(make_tokenizer(template=refusing), config(system_prompt="c d")), "a")


def test_messages_need_a_template():
    with pytest.raises(DataError, match="no chat template"):
        words(DataProcessor(make_tokenizer(), config()), USER)
    with pytest.raises(DataError, match=r"but data.chat_template=none"):
        words(DataProcessor(make_tokenizer(template=TEMPLATE), config(chat_template="none")), USER)
    row = with_system({"system_prompt": "Be brief."}, "a")
    problem = Problem(problem_id="d:1", prompt=row, ground_truth="", columns={"system_prompt": "Be brief."})
    with pytest.raises(DataError, match=r"d:1: the column 'system_prompt' is a system prompt, .*chat_template=none"):
        DataProcessor(make_tokenizer(template=TEMPLATE), config(chat_template="none")).to_prompts([("1", problem)])


def test_a_last_message_of_the_assistant_is_continued_and_said(caplog):
    processor = DataProcessor(make_tokenizer(template=TEMPLATE), config())
    assert words(processor, USER) and "continue" not in caplog.text
    assert words(processor, (*USER, {"role": "assistant", "content": "c"})) == ["[ user ] a b [ assistant ] c"]
    assert "completions continue" in caplog.text


def test_overlong_prompts_are_dropped_or_truncated_and_counted(caplog):
    rows = [make_problem("a " * length, str(length)) for length in (1, 3, 4, 9, 2)]
    dropping = DataProcessor(make_tokenizer(), config(max_prompt_tokens=3))
    assert [s.problem_id for s in dropping.filter_overlong(rows, "d.jsonl")[0]] == ["1", "3", "2"]
    assert "d.jsonl: 2 prompts over 3 tokens were dropped" in caplog.text
    with pytest.raises(DataError, match="9: 9 prompt"):
        dropping.to_prompts([("0", rows[3])])
    with pytest.raises(DataError, match="all 1 prompts"):
        dropping.filter_overlong(rows[3:4])

    truncating = DataProcessor(make_tokenizer(), config(max_prompt_tokens=3, overlong_prompt="truncate"))
    assert truncating.filter_overlong(rows, "t.jsonl") == (rows, array("i", [1, 3, 4, 9, 2]))
    assert "t.jsonl: 2 prompts over 3 tokens were truncated" in caplog.text
    assert words(truncating, "a b c d") == ["b c d"]
    assert words(DataProcessor(make_tokenizer(), config(), max_prompt_tokens=4), "a b c d") == ["a b c d"]


def test_a_prompt_without_tokens_is_an_error():
    with pytest.raises(DataError, match="no tokens"):
        words(DataProcessor(make_tokenizer(), config()), "\u200a")


def test_a_batch_is_tokenized_in_one_call(monkeypatch):
    processor = DataProcessor(make_tokenizer("<s> $A"), config())
    seen: list[str] = []
    original = PreTrainedTokenizerFast.__call__

    def spy(self, texts, **keys):
        seen.append(texts)
        return original(self, texts, **keys)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", spy)
    rows = [make_problem("a b", "1"), make_problem("c", "2")]
    batch = processor.to_prompts([("0:1", rows[0]), ("0:2", rows[1]), ("1:1", rows[0])])
    assert seen == [["a b", "c", "a b"]]
    assert [prompt.prompt_id for prompt in batch] == ["0:1", "0:2", "1:1"]
    assert [prompt.problem for prompt in batch] == [rows[0], rows[1], rows[0]]
    assert [prompt.token_ids for prompt in batch] == [(1, 3, 4), (1, 5), (1, 3, 4)]
