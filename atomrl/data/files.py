"""Read rows from data files and the Hugging Face hub, with the place of every error.

Files: JSONL, CSV, JSON arrays, Parquet, and folders written by `datasets.Dataset.save_to_disk`; the first three also
as `.gz`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atomrl.common.errors import reraise_as

FEW, MANY = 50, 4096
"""Rows that are read at once: of rows with files in them (pictures), and of others."""
BOM = b"\xef\xbb\xbf"
SHOWN = 20
"""Reasons listed in an error message."""
MAX_LINE_BYTES = 64 << 20
"""Longest row: a file without line ends must not be read into memory at once."""
_FOREIGN = {
    b"\xff\xfe": "UTF-16; save it as UTF-8",
    b"\xfe\xff": "UTF-16; save it as UTF-8",
    b"\x1f\x8b": "gzip; name it .jsonl.gz",
    b"PK\x03\x04": "a ZIP archive; unpack it",
    b"\x28\xb5\x2f\xfd": "zstd; unpack it (unzstd)",
    b"PAR1": "Parquet; name it .parquet",
}
"""First bytes of formats that are often named .jsonl, and what to do."""


class DataError(ValueError):
    """Invalid data, or a wrong name of a data source; the message says where, and what to do."""


class DataNotHere(DataError):
    """A data file does not exist, or a hub data set can be neither downloaded nor read from the cache."""


def error_list(errors: Sequence[str], shown: int = SHOWN) -> str:
    """Format errors (`PLACE: REASON`), one indented line for each reason, and count the rest.

    Example:
        >>> print(error_list(["a.jsonl:1: no prompt", "a.jsonl:7: no prompt", "a.jsonl:9: no answer"], shown=1))
          a.jsonl:1: no prompt (and 1 more, such as a.jsonl:7)
          ... and 1 more
    """
    places = dict[str, list[str]]()
    for error in errors:
        place, colon, reason = error.partition(": ")
        places.setdefault(colon + reason if colon else error, []).append(place)
    lines = []
    for reason, (first, *others) in [*places.items()][:shown]:
        line = f"  {first}{reason}" if reason.startswith(": ") else f"  {reason}"
        lines.append(f"{line} (and {len(others)} more, such as {others[0]})" if others else line)
    if rest := sum(map(len, [*places.values()][shown:])):
        lines.append(f"  ... and {rest} more")
    return "\n".join(lines)


@dataclass(frozen=True)
class RawRow:
    """A row of a file, or the reason why it is invalid."""

    place: str
    """`train.jsonl:3`: file and first line of the row, with `:column` for a further row on the same line of a JSON
    array; in Parquet and Arrow files the number of the row."""
    row: dict[str, Any] | None
    error: str | None = None
    """Why the row is invalid; None if it is valid."""
    folder: str = ""
    """Folder of its file, from which relative paths in it are read."""


def read_rows(path: str | Path) -> Iterator[RawRow]:
    """Read the rows of a file in order, skipping blank lines. The suffix selects the format; the default is JSONL.

    A byte-order mark and Windows line ends are accepted. Each line must be one JSON object in UTF-8, without duplicate
    keys (which would hide a value), NaN, infinite numbers or half a surrogate pair (which no tokenizer accepts); other
    lines give a row with an `error`. All values of a CSV file are text; its first line names the columns.

    Raises:
        DataNotHere: the file does not exist.
        DataError: it cannot be read at all.
    """
    path = Path(path)
    if not path.exists():
        raise DataNotHere(f"data file {path} does not exist")
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if path.is_dir() or path.suffix == ".parquet":
        yield from _arrow_rows(path)
        return
    with _opened(path) as file:
        start = file.peek(1)  # what is buffered, some KiB
        if suffix == ".csv":
            yield from _csv_rows(path, file)
            return
        if suffix == ".json" and start.removeprefix(BOM).lstrip().startswith(b"["):  # otherwise it is read as JSONL
            yield from _array_rows(path, file.read())
            return
        # Another format under the name of JSONL is named at once, instead of an error for each line.
        for mark, kind in _FOREIGN.items():
            if start.startswith(mark):
                raise DataError(f"{path}:1: not JSONL but {kind}")
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            place = f"{path.name}:{number}"
            if number == 1:
                line = line.removeprefix(BOM)
            # Skip the rest of a line that is too long.
            if len(line) > MAX_LINE_BYTES:
                while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_BYTES)):
                    pass
                yield RawRow(place, None, f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
            elif line.strip():
                try:
                    yield RawRow(place, parse_line(line))
                except DataError as error:
                    yield RawRow(place, None, str(error))


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader | gzip.GzipFile]:
    try:
        with path.open("rb") as file, gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file as content:
            yield content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse a line of a JSONL file.

    Raises:
        DataError: the line is invalid; without the place.

    Example:
        >>> parse_line(b'{"prompt": "2+2=", "ground_truth": 4}')
        {'prompt': '2+2=', 'ground_truth': 4}
    """
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"not valid UTF-8 (byte {error.start + 1} of the line)") from None
    if "\0" in text:
        raise DataError("contains NUL bytes: the file is UTF-16 (save it as UTF-8), or was truncated by a crash")
    if text in ("{", "["):
        raise DataError("not valid JSON: the object spans several lines; JSONL needs one object per line")
    row, end = _decode(text, 0)
    if end < len(text):
        raise DataError(f"not valid JSON: Extra data (column {end + 1})")
    if isinstance(row, list):
        raise DataError("a JSON list; JSONL needs one object per line (name a file that is one list .json)")
    if not isinstance(row, dict):
        raise DataError(f"not a JSON object but {type(row).__name__}")
    return row


def _decode(text: str, start: int) -> tuple[Any, int]:
    """Decode the JSON value at `start`. Return it with the position behind it."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        if "\\u" in text[start:end]:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except DataError:
        raise
    except UnicodeEncodeError:
        raise DataError("contains a lone surrogate (\\ud800 to \\udfff), which is not a valid character") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise DataError(f"not valid JSON: {error.msg} ({line}column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; nesting without end
        raise DataError(f"cannot parse JSON: {error}") from None
    return value, end


def _array_rows(path: Path, content: bytes) -> Iterator[RawRow]:
    """Read a JSON array of objects.

    After invalid JSON the next row cannot be located, so the whole file is refused.
    """
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
        with reraise_as(DataError, f"{path}:{line}", DataError):
            value, end = _decode(text, position)
            end = _skip_space(text, end)
            mark = text[end : end + 1]
            if mark not in (",", "]"):
                raise DataError(
                    "not valid JSON: a comma or the end of the list is missing after the row that begins here"
                )
        problem = None if isinstance(value, dict) else f"not a JSON object but {type(value).__name__}"
        yield RawRow(f"{path.name}:{line}{column}", None if problem else value, problem)
        position, before = _skip_space(text, end + 1), line


def _skip_space(text: str, position: int) -> int:
    match = re.compile(r"\s*").match(text, position)
    assert match is not None
    return match.end()


def _csv_rows(path: Path, file: io.BufferedReader | gzip.GzipFile) -> Iterator[RawRow]:
    csv.field_size_limit(MAX_LINE_BYTES)
    with io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as text:
        reader = csv.reader(text, strict=True)
        names: list[str] = []
        while True:
            place = f"{path.name}:{reader.line_num + 1}"
            problem = None
            try:
                fields = next(reader)
                if len(names) not in (0, len(fields)) and fields:
                    problem = f"{len(fields)} fields, but the header has {len(names)}"
                "".join(fields).encode("utf-8")
                if any("\0" in field for field in fields):
                    problem = "contains NUL bytes"
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
    """Read a Parquet file, or a folder saved by `datasets`."""
    with reraise_as(DataError, f"{path}: reading Parquet and Arrow needs pyarrow: pip install pyarrow", ImportError):
        from pyarrow import ArrowException
    number, kind = 0, "folder of save_to_disk" if path.is_dir() else "Parquet file"
    with reraise_as(DataError, f"{path} is not a readable {kind}", ArrowException, OSError):
        for batch in _record_batches(path):
            names = batch.schema.names
            if len(set(names)) < len(names):
                raise DataError(f"{path} has duplicate column names: {', '.join(names)}")
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
            # As Python objects 65,536 rows, its default, take 300 MB.
            yield from reader.iter_batches(FEW if has_bytes(reader.schema_arrow) else MANY)


def has_bytes(schema: Any) -> bool:
    """Return True if rows of an Arrow schema have bytes, such as those of pictures."""
    return "binary" in str(schema)


def batch_rows(batch: Any) -> Iterator[tuple[dict[str, Any] | None, str | None]]:
    """Yield (row, None) or (None, reason) for each row of an Arrow batch or table."""
    try:
        yield from [({name: _as_written(value) for name, value in row.items()}, None) for row in batch.to_pylist()]
    except UnicodeDecodeError:  # in some rows: convert one by one, which is many times slower
        if batch.num_rows == 1:
            yield None, "contains text that is not valid UTF-8"
        else:
            for index in range(batch.num_rows):
                yield from batch_rows(batch.slice(index, 1))


def _as_written(value: Any) -> Any:
    """Remove nulls from messages and tools: Arrow gives each object of a column all keys that any of them has."""
    first = value[0] if isinstance(value, list) and value else value
    is_message = isinstance(first, dict) and (
        {"role", "from", "function"} & first.keys() or {"name", "parameters"} <= first.keys()
    )
    return _without_null(value) if is_message else value


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def _saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder saved by `datasets`, in order."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(state.parent.name for state in folder.glob("*/state.json"))
        raise DataError(f"{folder} has the splits {', '.join(splits)}; give one, as in {folder / splits[0]}")
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / str(item["filename"]) for item in state["_data_files"]]
    except FileNotFoundError:
        raise DataError(f"{folder} is not a file or a folder written by datasets' save_to_disk") from None
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{folder / 'state.json'} was not written by save_to_disk: {error!r}") from None
