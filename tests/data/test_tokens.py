"""Text to token files and back: streamed, split, described; and what is refused."""

import json
import math

import numpy as np
import pytest
import torch

from atomrl.cli.main import main
from atomrl.data.files import DataError
from atomrl.data.text import distinct_characters, text_chunks
from atomrl.data.token_folder import TokenFolder, prepare_tokens
from atomrl.models.tokenizer import char_tokenizer
from tests.models.test_vocabulary import trained_bpe

TEXT = "".join(f"Line {k} of the text, with  spaces.\n" + "\n" * (k % 3) + "\tindented\n" * (k % 2) for k in range(300))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def prepared(path, out, fraction=0.1, **settings):
    return prepare_tokens([path], char_tokenizer(distinct_characters([path])), "char", out, fraction, **settings)


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 10**6])
def test_chunks_are_the_text_and_have_its_tokens(text, size):
    chunks = list(text_chunks(text, size))
    assert "".join(chunks) == TEXT and (size > 100 or len(chunks) > 50)
    tokenizer = trained_bpe(TEXT)
    joined = [token for chunk in chunks for token in tokenizer.encode(chunk).ids]
    assert joined == tokenizer.encode(TEXT).ids


def test_a_text_without_line_ends_is_cut_all_the_same(tmp_path):
    (tmp_path / "words").write_text("word " * 500_000)
    (tmp_path / "one").write_text("x" * 2_500_000)
    for name in ("words", "one"):
        chunks = list(text_chunks(tmp_path / name))
        assert len(chunks) > 1 and "".join(chunks) == (tmp_path / name).read_text()


def test_what_is_written(text, tmp_path):
    meta = prepared(text, tmp_path / "out")
    folder = TokenFolder(tmp_path / "out")
    assert folder.meta == meta and meta.dtype == "uint16" and meta.sources == {"text.txt": len(TEXT)}
    tokenizer = char_tokenizer(distinct_characters([text]))
    ids = {split: np.fromfile(tmp_path / "out" / f"{split}.bin", dtype="<u2").tolist() for split in ("train", "val")}
    assert tokenizer.decode(ids["train"] + ids["val"][:-1]) == TEXT
    assert ids["val"][-1] == tokenizer.eos_token_id  # the end of the document
    assert tokenizer.decode(ids["train"]).endswith("\n")  # cut after a line
    assert meta.train.characters + meta.val.characters == len(TEXT)
    assert 0.08 < meta.val.characters / len(TEXT) < 0.11
    nats = math.log(2) * 3
    bits = folder.bits("val", nats)
    assert bits["bits_per_byte"] == pytest.approx(3 * meta.val.tokens / meta.val.bytes)


def test_bytes_and_characters_differ_where_text_is_not_ascii(tmp_path):
    (tmp_path / "t").write_text("größer\n" * 50, encoding="utf-8")
    meta = prepared(tmp_path / "t", tmp_path / "out")
    assert meta.val.bytes > meta.val.characters


def test_a_large_vocabulary_takes_four_bytes(text, tmp_path):
    tokenizer = char_tokenizer([chr(code) for code in range(32, 0x11000) if not 0xD800 <= code < 0xE000] + ["\n", "\t"])
    assert prepare_tokens([text], tokenizer, "big", tmp_path / "out").dtype == "uint32"
    assert tokenizer.decode(TokenFolder(tmp_path / "out").windows("train", 1, 9, 0, 1)[0].tolist()) in TEXT


def test_windows_depend_on_seed_and_step_alone(text, tmp_path):
    prepared(text, tmp_path / "out")
    first, second = TokenFolder(tmp_path / "out"), TokenFolder(tmp_path / "out")
    second.windows("train", 3, 5, seed=9, step=9)
    windows = first.windows("train", 4, 16, seed=1, step=2)
    assert windows.shape == (4, 16) and windows.dtype == torch.int64
    assert torch.equal(windows, second.windows("train", 4, 16, seed=1, step=2))
    assert not torch.equal(windows, first.windows("train", 4, 16, seed=1, step=3))
    assert not torch.equal(windows, first.windows("train", 4, 16, seed=2, step=2))
    tokenizer = char_tokenizer(distinct_characters([text]))
    assert all(tokenizer.decode(row.tolist()) in TEXT for row in windows)
    whole = first.windows("val", 1, first.meta.val.tokens, seed=0, step=0)  # exactly as long as the split
    assert whole.shape[1] == first.meta.val.tokens


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"ok \xff", "is not UTF-8"),
        (b"x", "is empty"),
    ],
)
def test_a_text_that_cannot_be_read_leaves_no_folder(tmp_path, content, message):
    path = tmp_path / "t.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare_tokens([path], char_tokenizer(["x"]), "char", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()


def test_a_folder_that_is_no_token_folder(text, tmp_path):
    out = tmp_path / "out"
    for path, message in ((tmp_path / "absent", "does not exist"), (tmp_path, "has no meta.json")):
        with pytest.raises(DataError, match=f"{message}.*atomrl data prepare"):
            TokenFolder(path)
    prepared(text, out)
    with pytest.raises(ValueError, match="already exists"):
        prepared(text, out)
    with pytest.raises(DataError, match="fraction"):
        prepared(text, tmp_path / "other", 1.5)
    with pytest.raises(DataError, match="window_tokens=100000"):
        TokenFolder(out).windows("val", 1, 100_000, 0, 0)
    good = (out / "val.bin").read_bytes()
    for bad in (good[:-1], good[:-2], bytes([good[0] ^ 1]) + good[1:]):
        (out / "val.bin").write_bytes(bad)
        with pytest.raises(DataError, match=r"val\.bin"):
            TokenFolder(out)
    (out / "val.bin").write_bytes(good)
    tree = json.loads((out / "meta.json").read_text())
    for bad in (
        "{",
        "[]",
        json.dumps(tree | {"format": 9}),
        json.dumps({"format": 1}),
        json.dumps(tree | {"dtype": "q"}),
    ):
        (out / "meta.json").write_text(bad)
        with pytest.raises(DataError, match=r"prepare.*again"):
            TokenFolder(out)


def test_data_prepare_writes_tokens_and_names_its_mistakes(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "second.txt").write_text("A second document.\n")
    assert main(["data", "prepare", "text.txt", "second.txt", "--tokenizer", "char", "--out", "tokens"]) == 0
    assert "tokens: char, " in capsys.readouterr().out
    ids = np.fromfile(tmp_path / "tokens" / "val.bin", dtype="<u2").tolist()
    assert ids.count(1) == 2  # both documents end
    for arguments, message in (
        (["absent.txt", "--tokenizer", "char", "--out", "x"], "absent.txt does not exist"),
        (["text.txt", "--tokenizer", "meta.pkl", "--out", "x"], "meta.pkl is a pickle, which can run code"),
        (["text.txt", "--tokenizer", "./absent", "--out", "x"], "./absent does not exist"),
        (["text.txt", "--tokenizer", "text.txt", "--out", "x"], "is a file: give the folder"),
    ):
        assert main(["data", "prepare", *arguments]) == 2
        assert message in capsys.readouterr().err
    for arguments, missing in ((["--out", "x"], "--tokenizer"), (["--tokenizer", "char"], "--out")):
        with pytest.raises(SystemExit, match="2"):
            main(["data", "prepare", "text.txt", *arguments])
        assert f"required: {missing}" in capsys.readouterr().err
