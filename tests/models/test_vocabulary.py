"""Tokenizers for text: what they make of it, as saved and loaded by transformers; GPT-2's from each of its files."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from atomrl.config import ConfigError
from atomrl.models.tokenizer import (
    char_tokenizer,
    plain_char_tokenizer,
    read_characters,
    text_tokenizer,
)

TEXT = "It's the cat that the other cats' hats were on; 12345 hats!\n\n\nÜber the naïve 日本 hats  and  more.\n" * 3


def trained_bpe(text):
    """A byte-level BPE of tokenizers' own trainer: 256 bytes, then the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    return tokenizer


@pytest.fixture(scope="module")
def bpe():
    return trained_bpe(TEXT)


def test_characters_survive_saving(tmp_path):
    tokenizer = char_tokenizer(sorted(set(TEXT)))
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in (TEXT, "not in the vocabulary: ☃ %\r\n\x00", "  lead and trail  "):
        ids = tokenizer(text)["input_ids"]
        assert loaded(text)["input_ids"] == ids and loaded.decode(ids) == text
    assert len(tokenizer(TEXT)["input_ids"]) == len(TEXT)
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
    message = [{"role": "user", "content": "hi"}]
    assert loaded.apply_chat_template(message, tokenize=False, add_generation_prompt=True) == "<|user|>hi<|assistant|>"


def test_nanogpts_characters_have_their_ids(tmp_path):
    plain_char_tokenizer({"b": 0, " ": 1, "a": 2, "\n": 3}).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("ab a\n")["input_ids"] == [2, 0, 1, 2, 3] and loaded.decode([2, 0, 1, 2, 3]) == "ab a\n"
    assert loaded("aXb")["input_ids"] == [2, 0] and loaded.eos_token_id is None and len(loaded) == 4


def save_openai(bpe, folder):
    """GPT-2's own two files."""
    folder.mkdir()
    bpe.model.save(str(folder))
    (folder / "vocab.json").rename(folder / "encoder.json")
    (folder / "merges.txt").rename(folder / "vocab.bpe")
    return folder


def test_gpt2_from_each_kind_of_file(bpe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bpe.model.save(str(tmp_path))  # vocab.json, merges.txt
    save_openai(bpe, tmp_path / "openai")
    text_tokenizer("openai").save_pretrained("folder")
    for name in (str(tmp_path), "openai", "folder"):
        tokenizer = text_tokenizer(name)
        for text in (TEXT, "unseen words, weird   spaces\t\n\n x ☃", "<|endoftext|>"[:5]):
            assert tokenizer(text)["input_ids"] == bpe.encode(text).ids
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert (
            tokenizer("a<|endoftext|>")["input_ids"][-1]
            == bpe.get_vocab_size()
            == tokenizer.eos_token_id
            == tokenizer.pad_token_id
        )


def test_gpt2_is_the_hubs_and_without_a_network_says_how_to_continue(bpe, monkeypatch, tmp_path):
    asked = []

    def unreachable(name, **_):
        asked.append(name)
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)OSError.*encoder.json and vocab.bpe"):
        text_tokenizer("gpt2")
    assert asked == ["openai-community/gpt2"]


@pytest.mark.parametrize("content", ["", "{}"])
def test_a_damaged_vocabulary_is_refused(bpe, tmp_path, content):
    folder = save_openai(bpe, tmp_path / "openai")
    (folder / "encoder.json").write_text(content)
    with pytest.raises(ConfigError, match="GPT-2 vocabulary"):
        text_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("tree", "ids"),
    [(["b", "a"], {"b": 0, "a": 1}), ("ba", {"b": 0, "a": 1}), ({"a": 1, "b": 0}, {"a": 1, "b": 0}),
     ({"stoi": {"a": 0}, "itos": {"0": "a"}}, {"a": 0}), (3, None), (["ab"], None), ({"a": 1}, None),
     ({"a": 0, "b": 0}, None), (["a", "a"], None), ({"a": "x"}, None), ({"a": None}, None)],
)  # fmt: skip
def test_characters_from_json(tmp_path, tree, ids):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(tree))
    if ids is not None:
        assert read_characters(path) == ids
    else:
        with pytest.raises(ConfigError, match="--characters"):
            read_characters(path)
