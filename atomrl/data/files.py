"""Reading rows from data files, with the place of every problem; and writing JSONL.

JSONL, CSV, JSON arrays, Parquet, and folders written by `datasets.Dataset.save_to_disk`; the first three also as `.gz`.
"""

import csv
import gzip
import io
import json
import math
import re
import zlib
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atomrl.data.problems import DataError, DataNotHere
from atomrl.hints import said_as


@dataclass(frozen=True)
class RawRow:
    """One row of a file, or what is wrong with it."""

    place: str
    """`train.jsonl:3`: the line where the row begins, and in a JSON array `:column` where another begins there before;
    in Parquet and Arrow files the number of the row."""
    row: dict[str, Any] | None
    problem: str | None = None


def read_rows(path: str | Path) -> Iterator[RawRow]:
    """The rows of a file in order; blank lines are passed over. The suffix says the format, and JSONL is the default.

    A byte-order mark and Windows line ends are tolerated. Everything that is not one JSON object in UTF-8 on a line
    is a problem, and so are duplicate keys (which would hide a value), NaN and infinite numbers, and half a
    surrogate pair (which no tokenizer takes). Every value of a CSV file is text, under the names of its first line.

    Raises:
        DataNotHere: there is no such file.
        DataError: it cannot be read at all.
    """
    path = Path(path)
    if not path.exists():
        raise DataNotHere(f"data file {path} does not exist")
    if path.is_dir() or path.suffix == ".parquet":
        return _arrow_rows(path)
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    return {".csv": _csv_rows, ".json": _json_rows}.get(suffix, _jsonl_rows)(path)


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader | gzip.GzipFile]:
    try:
        with path.open("rb") as file, gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file as content:
            yield content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _jsonl_rows(path: Path) -> Iterator[RawRow]:
    with _opened(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            place = f"{path.name}:{number}"
            if number == 1:
                for start, what in _FOREIGN.items():
                    if line.startswith(start):
                        raise DataError(f"{path}:1: not JSONL but {what}")
                line = line.removeprefix(b"\xef\xbb\xbf")
            if len(line) > MAX_LINE_BYTES:
                while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_BYTES)):
                    pass
                yield RawRow(place, None, f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
            elif line.strip():
                try:
                    yield RawRow(place, parse_line(line))
                except DataError as error:
                    yield RawRow(place, None, str(error))


def parse_line(line: bytes) -> dict[str, Any]:
    """One line of a JSONL file as a row.

    Raises:
        DataError: what is wrong with it, without the place.

    Example:
        >>> parse_line(b'{"prompt": "2+2=", "ground_truth": 4}')
        {'prompt': '2+2=', 'ground_truth': 4}
    """
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"not valid UTF-8 (byte {error.start + 1} of the line)") from None
    if "\0" in text:
        raise DataError("holds NUL bytes: a file in UTF-16 (save it as UTF-8), or one that a crash has torn")
    if text in ("{", "["):
        raise DataError("not valid JSON by itself; it goes on over several lines; JSONL needs one object a line")
    row, end = _decode(text, 0)
    if end < len(text):
        raise DataError(f"not valid JSON: Extra data (column {end + 1})")
    if isinstance(row, list):
        raise DataError("a JSON list; JSONL needs one object a line (a file that is one list is named .json)")
    if not isinstance(row, dict):
        raise DataError(f"not a JSON object but {type(row).__name__}")
    return row


def _decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and where it ends."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        if "\\u" in text[start:end]:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except DataError:
        raise
    except UnicodeEncodeError:
        raise DataError("holds half of a surrogate pair (\\ud800 to \\udfff), which is no character") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise DataError(f"not valid JSON: {error.msg} ({line}column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; nesting without end
        raise DataError(f"not readable JSON: {error}") from None
    return value, end


def _json_rows(path: Path) -> Iterator[RawRow]:
    """Of an array of objects; a file that holds none is read as JSONL, which often has this suffix.

    Behind what is no JSON the next row cannot be found, so it makes the whole file unreadable.
    """
    with _opened(path) as file:
        content = file.read()
    if not content.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from _jsonl_rows(path)
        return
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not valid UTF-8") from None
    line_ends = [match.start() for match in re.finditer("\n", text)]
    position = _skip_space(text, text.index("[") + 1)
    mark, before = "]" if text.startswith("]", position) else ",", 0
    while mark == ",":
        line = bisect(line_ends, position) + 1
        # Of several rows on a line, as where the whole array is on one, all but the first have a column too.
        column = f":{position - (line_ends[line - 2] if line > 1 else -1)}" if line == before else ""
        with said_as(DataError, f"{path}:{line}", DataError):
            value, end = _decode(text, position)
            end = _skip_space(text, end)
            mark = text[end : end + 1]
            if mark not in (",", "]"):
                raise DataError("not valid JSON: behind the row that begins here, a comma or the end is missing")
        problem = None if isinstance(value, dict) else f"not a JSON object but {type(value).__name__}"
        yield RawRow(f"{path.name}:{line}{column}", None if problem else value, problem)
        position, before = _skip_space(text, end + 1), line


def _skip_space(text: str, position: int) -> int:
    match = re.compile(r"\s*").match(text, position)
    assert match is not None
    return match.end()


def _csv_rows(path: Path) -> Iterator[RawRow]:
    csv.field_size_limit(MAX_LINE_BYTES)
    with _opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as text:
        reader = csv.reader(text, strict=True)
        names: list[str] = []
        while True:
            place = f"{path.name}:{reader.line_num + 1}"
            problem = None
            try:
                fields = next(reader)
                if len(names) not in (0, len(fields)) and fields:
                    problem = f"{len(fields)} fields, but the first line names {len(names)}"
                "".join(fields).encode("utf-8")
                if any("\0" in field for field in fields):
                    problem = "holds NUL bytes"
            except StopIteration:
                return
            except csv.Error as error:
                problem = f"not valid CSV: {error}"
            except UnicodeEncodeError:
                problem = "not valid UTF-8"
            if names:
                if problem or fields:
                    yield RawRow(place, None if problem else dict(zip(names, fields, strict=True)), problem)
            elif problem is None and len(set(fields)) == len(fields):
                names = fields
            else:
                raise DataError(f"{path}:1: {problem or 'two columns have the same name'}")


MAX_LINE_BYTES = 64 << 20
"""No row is longer: a file without line ends must not be read into memory whole."""
_FOREIGN = {
    b"\xff\xfe": "UTF-16; save it as UTF-8",
    b"\xfe\xff": "UTF-16; save it as UTF-8",
    b"\x1f\x8b": "gzip; name it .jsonl.gz",
    b"PK\x03\x04": "a ZIP archive; unpack it",
    b"\x28\xb5\x2f\xfd": "zstd; unpack it (unzstd)",
    b"PAR1": "Parquet; name it .parquet",
}
"""First bytes of files that are taken for JSONL, and what to do."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise DataError(f"key {twice!r} appears twice")
    return row


def _no_constant(name: str) -> None:
    raise DataError(f"{name} is not valid JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise DataError(f"number {text} is too large")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)


def _arrow_rows(path: Path) -> Iterator[RawRow]:
    """Of a Parquet file, or of a folder that `datasets` saved."""
    with said_as(DataError, f"{path}: reading Parquet and Arrow needs pyarrow: pip install pyarrow", ImportError):
        from pyarrow import ArrowException
    number, what = 0, "folder of save_to_disk" if path.is_dir() else "Parquet file"
    with said_as(DataError, f"{path} is not a readable {what}", ArrowException, OSError):
        for batch in _record_batches(path):
            names = batch.schema.names
            if len(set(names)) < len(names):
                raise DataError(f"{path} has two columns of one name, among {', '.join(names)}")
            for row, problem in batch_rows(batch):
                number += 1
                yield RawRow(f"{path.name}:{number}", row, problem)


def _record_batches(path: Path) -> Iterator[Any]:
    from pyarrow import ipc, parquet

    if path.is_dir():
        for part in _saved_files(path):
            with part.open("rb") as file, ipc.open_stream(file) as reader:
                yield from reader
    else:
        with parquet.ParquetFile(path) as reader:
            yield from reader.iter_batches()


def batch_rows(batch: Any) -> Iterator[tuple[dict[str, Any] | None, str | None]]:
    """The rows of a batch or a table of Arrow, or what is wrong with one."""
    try:
        yield from [({name: _as_written(value) for name, value in row.items()}, None) for row in batch.to_pylist()]
    except UnicodeDecodeError:  # in some of them: one by one, which is many times slower
        if batch.num_rows == 1:
            yield None, "holds a text that is not valid UTF-8"
        else:
            for index in range(batch.num_rows):
                yield from batch_rows(batch.slice(index, 1))


def _as_written(value: Any) -> Any:
    """Messages and tools without what is null: Arrow gives each object of a column all keys that any of them has."""
    first = value[0] if isinstance(value, list) and value else value
    spoken = isinstance(first, dict) and (
        {"role", "from", "function"} & first.keys() or {"name", "parameters"} <= first.keys()
    )
    return _without_null(value) if spoken else value


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def _saved_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder that `datasets` saved, in order."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(state.parent.name for state in folder.glob("*/state.json"))
        raise DataError(f"{folder} holds the splits {', '.join(splits)}; name one, as in {folder / splits[0]}")
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / str(item["filename"]) for item in state["_data_files"]]
    except FileNotFoundError:
        raise DataError(f"{folder} is not a file, nor a folder written by datasets' save_to_disk") from None
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{folder / 'state.json'} is not what save_to_disk writes: {error!r}") from None
