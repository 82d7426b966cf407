"""Tokenizers for text: what they make of it, as saved and loaded by transformers; GPT-2's from each of its files."""

import base64
import json
import sys
import types

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from atomrl.config import ConfigError
from atomrl.models.vocabulary import (
    byte_pair_tokenizer,
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


def ranks_of(bpe):
    """Its vocabulary as tiktoken has it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    byte_of = {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(rest)}
    return {bytes(byte_of[letter] for letter in token): rank for token, rank in bpe.get_vocab().items()}


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


def test_ranks_give_the_merges_back(bpe, tmp_path):
    tokenizer = byte_pair_tokenizer(ranks_of(bpe))
    for text in (TEXT, "unseen words, weird   spaces\t\n\n x ☃", "<|endoftext|>"[:5]):
        assert tokenizer(text)["input_ids"] == bpe.encode(text).ids
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    end = len(ranks_of(bpe))
    assert tokenizer("a<|endoftext|>")["input_ids"][-1] == end == tokenizer.eos_token_id


def test_as_tiktoken_encodes(bpe):
    tiktoken = pytest.importorskip("tiktoken")
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    ranks = ranks_of(bpe)
    theirs = tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    assert byte_pair_tokenizer(ranks)(TEXT)["input_ids"] == theirs.encode(TEXT)


def test_gpt2_from_each_kind_of_file(bpe, tmp_path, monkeypatch):
    expected = bpe.encode(TEXT).ids
    fake = types.ModuleType("tiktoken")
    fake.get_encoding = lambda name: types.SimpleNamespace(_mergeable_ranks=ranks_of(bpe))
    monkeypatch.setitem(sys.modules, "tiktoken", fake)
    monkeypatch.chdir(tmp_path)
    assert text_tokenizer("gpt2")(TEXT)["input_ids"] == expected
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks_of(bpe).items()]
    (tmp_path / "r.tiktoken").write_text("\n".join(lines))
    assert text_tokenizer("r.tiktoken")(TEXT)["input_ids"] == expected
    bpe.model.save(str(tmp_path))  # vocab.json, merges.txt
    assert text_tokenizer(str(tmp_path))(TEXT)["input_ids"] == expected
    openai = tmp_path / "openai"
    openai.mkdir()
    (tmp_path / "vocab.json").rename(openai / "encoder.json")
    (tmp_path / "merges.txt").rename(openai / "vocab.bpe")
    assert text_tokenizer("openai")(TEXT)["input_ids"] == expected
    text_tokenizer("openai").save_pretrained("folder")
    assert text_tokenizer("folder")(TEXT)["input_ids"] == expected


def test_gpt2_without_a_network_says_how_to_go_on(monkeypatch, tmp_path):
    fake = types.ModuleType("tiktoken")

    def get_encoding(name):
        raise OSError("no route to host")

    fake.get_encoding = get_encoding
    monkeypatch.setitem(sys.modules, "tiktoken", fake)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)OSError.*encoder.json and vocab.bpe.*TIKTOKEN_CACHE_DIR"):
        text_tokenizer("gpt2")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ConfigError, match=r"pip install 'atomrl\[pretrain\]'"):
        text_tokenizer("gpt2")


@pytest.mark.parametrize("content", ["", "YQ== x", "a b c", "YQ== 0\n", "not-base64! 0"])
def test_damaged_ranks(tmp_path, content):
    (tmp_path / "r.tiktoken").write_text(content)
    with pytest.raises(ConfigError, match=r"r\.tiktoken is no"):
        text_tokenizer(str(tmp_path / "r.tiktoken"))


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
