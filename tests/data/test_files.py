"""Formats beside JSONL, and several files: the same rows, and every problem with file and line."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from atomrl.config import DataConfig
from atomrl.data.files import DataError, RawRow, read_rows
from atomrl.data.problems import load_problems, read_source

ROWS = [{"prompt": 'one, "two"\nthree', "ground_truth": "1"}, {"prompt": "é", "ground_truth": "2"}]
CSV = 'prompt,ground_truth\r\n"one, ""two""\nthree",1\r\n\r\né,2\r\n'.encode()
JSONL = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def read(folder: Path, name: str, content: bytes) -> list[RawRow]:
    (folder / name).write_bytes(content)
    return list(read_rows(folder / name))


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("a.csv", CSV, (2, 5)),
        ("a.csv", b"\xef\xbb\xbf" + CSV.replace(b"\r\n", b"\n"), (2, 5)),
        ("a.csv.gz", gzip.compress(CSV, mtime=0), (2, 5)),
        ("a.json", json.dumps(ROWS).encode(), (1, f"1:{len(json.dumps(ROWS[0])) + 4}")),
        ("a.json", b"\xef\xbb\xbf\n" + json.dumps(ROWS, indent=1).encode() + b"\n", (3, 7)),
        ("a.json.gz", gzip.compress(json.dumps(ROWS, indent=1).encode(), mtime=0), (2, 6)),
        ("a.json", JSONL, (1, 2)),
        ("a.jsonl.gz", gzip.compress(JSONL, mtime=0), (1, 2)),
        ("a.txt", JSONL, (1, 2)),
    ],
)
def test_formats_give_the_same_rows_with_their_lines(tmp_path, name, content, lines):
    rows = read(tmp_path, name, content)
    assert [raw.row for raw in rows] == ROWS and not any(raw.error for raw in rows)
    assert [raw.place for raw in rows] == [f"{name}:{line}" for line in lines]


def test_problems_of_a_csv_file_are_named_with_the_line_where_the_row_begins(tmp_path):
    rows = read(tmp_path, "a.csv", b'p,g\n"a\nb",1\none\n"x"y,1\nz,\xff\nn,\0\n1,2,3\nok,4\n"open,1\n')
    assert [(raw.place, raw.row, raw.error) for raw in rows] == [
        ("a.csv:2", {"p": "a\nb", "g": "1"}, None),
        ("a.csv:4", None, "1 fields, but the header has 2"),
        ("a.csv:5", None, "not valid CSV: ',' expected after '\"'"),
        ("a.csv:6", None, "not valid UTF-8"),
        ("a.csv:7", None, "contains NUL bytes"),
        ("a.csv:8", None, "3 fields, but the header has 2"),
        ("a.csv:9", {"p": "ok", "g": "4"}, None),
        ("a.csv:10", None, "not valid CSV: unexpected end of data"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"a,a\n1,2\n", "a.csv:1: two columns have the same name"),
        ("a.csv", "a,b\n".encode("utf-16"), "a.csv:1: not valid UTF-8"),
        ("a.json", b'[{"a": 1},\n {"a" 2}]', "a.json:2: not valid JSON: Expecting ':' delimiter"),
        ("a.json", b'[\n{"a": 1}\n{"a": 2}]', "a.json:2: .*a comma or the end of the list is missing"),
        ("a.json", b'[\n{"a": 1}', "a.json:2: .*a comma or the end of the list is missing"),
        ("a.json", b'[{"a": 1},\n]', "a.json:2: not valid JSON: Expecting value"),
        ("a.json", b'[\n{"a": 1, "a": 2}]', "a.json:2: key 'a' appears twice"),
        ("a.json", b'[\n{"a": NaN}]', "a.json:2: NaN is not valid JSON"),
        ("a.json", b'[\n\n{"a": "\xff"}]', "a.json:3: not valid UTF-8"),
        ("a.jsonl.gz", JSONL, "a.jsonl.gz cannot be read: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(JSONL, mtime=0)[:-9], "a.jsonl.gz cannot be read: Compressed file ended"),
    ],
)
def test_files_that_cannot_be_read_on_are_named_with_the_line(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, name, content)


def test_an_element_of_an_array_that_is_no_object_is_a_problem_of_its_row(tmp_path):
    rows = read(tmp_path, "a.json", b'[{"a": 1},\n 3,\n {"a": 2}]')
    assert [raw.row for raw in rows] == [{"a": 1}, None, {"a": 2}]
    assert (rows[1].place, rows[1].error) == ("a.json:2", "not a JSON object but int")
    assert read(tmp_path, "a.json", b"[]") == []


def save_to_disk(folder: Path, parts: list[list[dict[str, object]]]) -> Path:
    """Write a folder like `datasets.Dataset.save_to_disk(folder, num_shards=len(parts))`."""
    pyarrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    names = [f"data-{index:05}-of-{len(parts):05}.arrow" for index in range(len(parts))]
    for name, rows in zip(names, parts, strict=True):
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.OSFile(str(folder / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_folder_of_datasets(tmp_path):
    folder = save_to_disk(tmp_path / "saved", [[ROWS[0]], [ROWS[1]]])
    assert list(read_rows(folder)) == [RawRow("saved:1", ROWS[0]), RawRow("saved:2", ROWS[1])]
    assert [sample.ground_truth for sample in load_problems(DataConfig(train=str(folder))).problems] == ["1", "2"]
    (folder / "data-00001-of-00002.arrow").write_bytes(b"torn")
    with pytest.raises(DataError, match="save_to_disk"):
        list(read_rows(folder))
    (folder / "state.json").write_text("{}")
    with pytest.raises(DataError, match="save_to_disk"):
        list(read_rows(folder))


def test_a_folder_of_several_splits_asks_for_one(tmp_path):
    for split in ("train", "test"):
        save_to_disk(tmp_path / "dict" / split, [ROWS])
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"splits test, train;.*dict/test"):
        list(read_rows(tmp_path / "dict"))


def test_without_pyarrow_its_files_say_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for path in (tmp_path / "a.parquet", tmp_path):
        with pytest.raises(DataError, match="pip install pyarrow"):
            list(read_rows(path))


def test_several_files_are_one_source(tmp_path):
    first, second, third = tmp_path / "a.jsonl", tmp_path / "b.csv", tmp_path / "more" / "a.jsonl"
    third.parent.mkdir()
    first.write_bytes(JSONL)
    second.write_bytes(CSV)
    third.write_bytes(JSONL[:20])
    places = [raw.place for raw in read_source([str(first), str(second)])]
    assert places == ["a.jsonl:1", "a.jsonl:2", "b.csv:2", "b.csv:5"]
    places = [raw.place for raw in read_source([str(first), str(third)])]  # told apart where names are the same
    assert places == [f"{first}:1", f"{first}:2", f"{third}:1"]
    config = DataConfig(train="-", train_size=3).model_copy(update={"train": [str(first), str(second)]})
    report = load_problems(config)
    assert len(report.problems) == 3 and report.source == f"{first}, {second}"
    config = config.model_copy(update={"train": [str(second), str(third)]})
    with pytest.raises(DataError, match=rf"{second}, {third}(.|\n)*a\.jsonl:1"):
        load_problems(config)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "at least one file"),
        (["a.jsonl", "a.jsonl"], "each once"),
        (["arithmetic", "a.jsonl"], "'arithmetic' is a generator; a list of sources may only have files"),
        (["absent.jsonl", "a.jsonl"], "absent.jsonl does not exist"),
    ],
)
def test_lists_that_make_no_source(sources, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_bytes(JSONL)
    with pytest.raises(DataError, match=message):
        list(read_source(sources))


def test_an_array_on_one_line_is_trained_on(tmp_path):
    rows = [{"prompt": f"{n}+1=", "ground_truth": str(n + 1)} for n in range(3)]
    path = tmp_path / "a.json"
    path.write_text("[\n" + json.dumps(rows)[1:])
    assert [raw.place for raw in read_rows(path)] == ["a.json:2", "a.json:2:42", "a.json:2:83"]
    samples = load_problems(DataConfig(train=str(path)), "train", seed=0).problems
    assert len({sample.problem_id for sample in samples}) == 3
