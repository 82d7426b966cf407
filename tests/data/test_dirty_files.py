"""Broken data files: `atomrl data check` and `atomrl train --dry-run` name each with its file and line, or count it."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from atomrl.cli.main import main
from atomrl.data import files
from tests.tiny import make_tiny_model

GOOD = b'{"prompt": "What is 2+2?", "ground_truth": "4"}\n'


def row(prompt: object = "What is 3+3?", **columns: object) -> bytes:
    return json.dumps({"prompt": prompt, "ground_truth": "6"} | columns).encode() + b"\n"


def messages(*turns: object) -> bytes:
    return row(prompt=list(turns))


# Files of rows: name -> (content, line, part of the message). Each begins with a good row, but where line 1 is named.
BAD_ROWS: dict[str, tuple[bytes, int, str]] = {
    "no JSON": (GOOD + b"prompt: hello\n", 2, "not valid JSON"),
    "CSV by another name": (b"prompt,ground_truth\n2+2,4\n", 1, "not valid JSON"),
    "a comma at the end": (GOOD + b'{"prompt": "x", "ground_truth": "4",}\n', 2, "not valid JSON"),
    "single quotes": (GOOD + b"{'prompt': 'x', 'ground_truth': '4'}\n", 2, "not valid JSON"),
    "two objects on a line": (GOOD + GOOD.strip() + GOOD, 2, "Extra data"),
    "a last line that is torn": (GOOD + GOOD[:20], 2, "not valid JSON"),
    "old Macintosh line ends": ((GOOD + GOOD).replace(b"\n", b"\r"), 1, "Extra data"),
    "a JSON list for JSONL": (b"[" + GOOD.strip() + b", " + GOOD.strip() + b"]", 1, "a JSON list"),
    "JSON over several lines": (json.dumps([{"prompt": "x"}], indent=1).encode(), 1, "spans several lines"),
    "a number for an object": (GOOD + b"17\n", 2, "not a JSON object but int"),
    "Latin-1": (GOOD + '{"prompt": "é", "ground_truth": "4"}\n'.encode("latin-1"), 2, "not valid UTF-8"),
    "UTF-16 without a mark": (GOOD.decode().encode("utf-16-le"), 1, "NUL bytes"),
    "NUL bytes of a crash": (GOOD + bytes(64) + b"\n", 2, "NUL bytes"),
    "half a surrogate pair": (GOOD + b'{"prompt": "\\ud83d", "ground_truth": "4"}\n', 2, "surrogate"),
    "a key twice": (GOOD + b'{"prompt": "a", "prompt": "b", "ground_truth": "4"}\n', 2, "'prompt' appears twice"),
    "NaN for an answer": (GOOD + b'{"prompt": "x", "ground_truth": NaN}\n', 2, "NaN is not valid JSON"),
    "a number without end": (GOOD + b'{"prompt": "x", "ground_truth": 1e999}\n', 2, "too large"),
    "nesting without end": (GOOD + b"[" * 100_000 + b"\n", 2, "cannot parse JSON"),
    "no prompt": (GOOD + b'{"question": "x", "ground_truth": "4"}\n', 2, "field 'prompt' is missing (has 'question'"),
    "no answer": (GOOD + b'{"prompt": "x"}\n', 2, "field 'ground_truth' is missing"),
    "an empty answer": (GOOD + row(ground_truth=" "), 2, "field 'ground_truth' is empty"),
    "null for a prompt": (GOOD + row(None), 2, "not NoneType"),
    "an empty prompt": (GOOD + row("  \n"), 2, "the prompt is empty"),
    "a number for a prompt": (GOOD + row(7), 2, "not int"),
    "an object for a prompt": (GOOD + row({"role": "user", "content": "x"}), 2, "not dict"),
    "no messages": (GOOD + messages(), 2, "an empty list of messages"),
    "a text among messages": (GOOD + messages({"role": "user", "content": "x"}, "y"), 2, "message 2 must be an object"),
    "messages in messages": (GOOD + messages([{"role": "user", "content": "x"}]), 2, "message 1 must be an object"),
    "a role that is unknown": (GOOD + messages({"role": "human", "content": "x"}), 2, "unknown role 'human'"),
    "null for a content": (GOOD + messages({"role": "user", "content": None}), 2, "'content' must be text"),
    "parts for a content": (GOOD + messages({"role": "user", "content": [{"type": "text"}]}), 2, "must be text"),
    "a list for a data source": (GOOD + row(data_source=["a"]), 2, "'data_source' must be text"),
    "a column with a reserved name": (GOOD + row(completions=["x"]), 2, "column 'completions'"),
    "a line without end": (GOOD + row("x" * 4000), 2, "the line is longer than"),
}

# Faults of whole files: name -> (file name, content, message).
BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "empty": ("data.jsonl", b"", "is empty|has no usable row"),
    "a byte-order mark alone": ("data.jsonl", b"\xef\xbb\xbf", "is empty|has no usable row"),
    "blank lines alone": ("data.jsonl", b"\n \n\r\n", "is empty|has no usable row"),
    "UTF-16": ("data.jsonl", GOOD.decode().encode("utf-16"), "data.jsonl:1: .*UTF-16"),
    "gzip, torn": ("data.jsonl", gzip.compress(GOOD * 9)[:-9], "data.jsonl:1: .*gzip"),
    "Parquet by another name": ("data.jsonl", b"PAR1" + bytes(30), "data.jsonl:1: .*Parquet"),
    "no Parquet": ("data.parquet", GOOD, "data.parquet is not a readable Parquet file"),
    "Parquet, torn": ("data.parquet", b"PAR1" + bytes(300), "data.parquet is not a readable Parquet file"),
}

Answer = tuple[int, str]
Command = Callable[..., Answer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(path: Path) -> Answer:
        code = main(["data", "check", str(path)])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


@pytest.fixture
def dry_run(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> Command:
    def run(path: Path, *overrides: str) -> Answer:
        config = tmp_path / "config.yaml"
        config.write_text(json.dumps({"run_name": "r", "model": {"path": str(model)}, "data": {"train": str(path)}}))
        code = main(["train", str(config), "--dry-run", f"output_dir={tmp_path}", *overrides])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_with_its_line(name, tmp_path, monkeypatch, caplog, check: Command, dry_run: Command):
    content, line, message = BAD_ROWS[name]
    if name == "a line without end":
        monkeypatch.setattr(files, "MAX_LINE_BYTES", 2000)
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    for code, text in (check(path), dry_run(path)):
        named = re.search(rf"^  data\.jsonl:{line}: (.*)$", text, re.MULTILINE)
        assert code == 2 and named and message in named.group(1) and len(named.group(0)) < 200
    if line == 2:  # and where the user asks for it, it is counted
        code, text = dry_run(path, "data.on_bad_row=skip")
        assert code == 0 and "1 problems (" in text and "1 rows with problems were skipped" in caplog.text


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named(name, tmp_path, check: Command, dry_run: Command):
    file, content, message = BAD_FILES[name]
    path = tmp_path / file
    path.write_bytes(content)
    for code, text in (check(path), dry_run(path)):
        assert code == 2 and re.search(message, text) and file in text


def test_unreadable_files_are_named(tmp_path, monkeypatch, check: Command, dry_run: Command):
    path = tmp_path / "data.jsonl"
    assert check(path)[0] == 2 and f"data file {path} does not exist" in check(path)[1]
    path.mkdir()
    for code, text in (check(path), dry_run(path)):
        assert code == 2 and f"{path} is not a file" in text
    path.rmdir()
    path.write_bytes(GOOD)
    monkeypatch.setattr(Path, "open", refuse)  # permissions stop nobody who is root
    for code, text in (check(path), dry_run_report(path)):
        assert code == 2 and f"{path} cannot be read: Permission denied" in text


def refuse(self: Path, *arguments: object, **options: object) -> None:
    raise PermissionError(13, "Permission denied", str(self))


def dry_run_report(path: Path) -> Answer:
    """Read a file as a dry run does."""
    from atomrl.config import DataConfig
    from atomrl.data.problems import load_problems

    with pytest.raises(ValueError) as caught:
        load_problems(DataConfig(train=str(path)))
    return 2, str(caught.value)


def test_a_parquet_text_that_is_no_utf8_is_named_with_its_row(tmp_path, check: Command, dry_run: Command):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    text = pyarrow.array([b"2+2", b"\xff\xfe", b"3+3"], pyarrow.binary()).view(pyarrow.string())
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"prompt": text, "ground_truth": ["4", "5", "6"]}), path)
    for code, answer in (check(path), dry_run(path)):
        assert code == 2 and "data.parquet:2: contains text that is not valid UTF-8" in answer
    assert "2 problems (" in dry_run(path, "data.on_bad_row=skip")[1]


def test_rows_over_the_limit_are_counted(tmp_path, caplog, check: Command, dry_run: Command):
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + row("x" * 2_000_000))
    code, text = check(path)
    assert code == 0 and "longest 2000000" in text
    code, text = dry_run(path, "rollout.max_completion_tokens=32")
    assert code == 0 and "1 prompts over 480 tokens were dropped" in caplog.text


def test_duplicate_ids_are_named(tmp_path, check: Command, dry_run: Command):
    path = tmp_path / "data.jsonl"
    path.write_bytes(row("a", id=1) + row("b", id=2) + row("A ", id=3) + row("c", id=2))
    for _, text in (check(path), dry_run(path)):
        assert "duplicates by normalised prompt: 1" in text and "data.jsonl:3 is a duplicate of data.jsonl:1" in text
        assert "rows with the same id: 1" in text and "data.jsonl:4 is a duplicate of data.jsonl:2" in text


@pytest.mark.parametrize("content", [b"\xef\xbb\xbf" + GOOD, GOOD.replace(b"\n", b"\r\n"), b"\n\n" + GOOD + b"\n"])
def test_harmless_oddities_are_accepted(content, tmp_path, check: Command, dry_run: Command):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    assert check(path)[0] == dry_run(path)[0] == 0
