"""Reading rows from JSONL and Parquet files, with the place of every problem; and writing JSONL."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atomrl.data.problems import DataError


@dataclass(frozen=True)
class RawRow:
    """One line of a file: its row, or what is wrong with it."""

    place: str
    """`train.jsonl:3`; in a Parquet file the number of the row."""
    row: dict[str, Any] | None
    problem: str | None = None


def read_rows(path: str | Path) -> Iterator[RawRow]:
    """The rows of a JSONL or Parquet (by suffix) file in order; blank lines are passed over.

    A byte-order mark and Windows line ends are tolerated. Everything that is not one JSON object in UTF-8 on a line
    is a problem, and so are duplicate keys (which would hide a value), NaN and infinite numbers, and half a
    surrogate pair (which no tokenizer takes).

    Raises:
        DataError: the file cannot be read at all.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"data file {path} does not exist")
    if not path.is_file():
        raise DataError(f"{path} is not a file; name one JSONL or Parquet file")
    return _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)


def _jsonl_rows(path: Path) -> Iterator[RawRow]:
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                place = f"{path.name}:{number}"
                if number == 1:
                    _refuse_other_formats(path, line)
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if len(line) > MAX_LINE_BYTES:
                    while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_BYTES)):
                        pass
                    yield RawRow(place, None, f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
                elif line.strip():
                    yield _raw_row(place, line)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _raw_row(place: str, line: bytes) -> RawRow:
    try:
        return RawRow(place, parse_line(line))
    except DataError as error:
        return RawRow(place, None, str(error))


def _refuse_other_formats(path: Path, line: bytes) -> None:
    for start, what in _FOREIGN.items():
        if line.startswith(start):
            raise DataError(f"{path}:1: not JSONL but {what}")


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
        if "\0" in text:
            raise DataError("holds NUL bytes: a file in UTF-16 (save it as UTF-8), or one that a crash has torn")
        if text in ("{", "["):
            raise DataError("not valid JSON by itself; it goes on over several lines; JSONL needs one object a line")
        row = _DECODER.decode(text)
        if "\\u" in text:
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except DataError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"not valid UTF-8 (byte {error.start + 1} of the line)") from None
    except UnicodeEncodeError:
        raise DataError("holds half of a surrogate pair (\\ud800 to \\udfff), which is no character") from None
    except json.JSONDecodeError as error:
        raise DataError(f"not valid JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; nesting without end
        raise DataError(f"not readable JSON: {error}") from None
    if isinstance(row, list):
        raise DataError("a JSON list; JSONL needs one object a line")
    if not isinstance(row, dict):
        raise DataError(f"not a JSON object but {type(row).__name__}")
    return row


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DataError(f"key {twice!r} appears twice")
    return row


def _no_constant(name: str) -> Any:
    raise DataError(f"{name} is not valid JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise DataError(f"number {text} is too large")
    return value


MAX_LINE_BYTES = 64 << 20
"""No row is longer: a file without line ends must not be read into memory whole."""
_FOREIGN = {
    b"\xff\xfe": "UTF-16; save it as UTF-8",
    b"\xfe\xff": "UTF-16; save it as UTF-8",
    b"\x1f\x8b": "gzip; unpack it (gunzip)",
    b"PK\x03\x04": "a ZIP archive; unpack it",
    b"\x28\xb5\x2f\xfd": "zstd; unpack it (unzstd)",
    b"PAR1": "Parquet; name it .parquet",
}
"""First bytes of files that are taken for JSONL, and what to do."""

_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)


def _parquet_rows(path: Path) -> Iterator[RawRow]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise DataError(f"{path} has two columns of one name, among {', '.join(names)}")
            for batch in file.iter_batches():
                try:
                    rows = [RawRow("", row) for row in batch.to_pylist()]
                except UnicodeDecodeError:  # in some of them: one by one, which is many times slower
                    rows = [_parquet_row(batch.slice(index, 1)) for index in range(batch.num_rows)]
                for row in rows:
                    number += 1
                    yield replace(row, place=f"{path.name}:{number}")
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from None


def _parquet_row(row: Any) -> RawRow:
    try:
        return RawRow("", row.to_pylist()[0])
    except UnicodeDecodeError:
        return RawRow("", None, "holds a text that is not valid UTF-8")


def write_jsonl(rows: Iterable[Mapping[str, Any]], path: str | Path) -> int:
    """Write rows one a line; the file appears complete or not at all, and an existing one is replaced.

    Returns:
        How many rows were written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    count = 0
    try:
        with aside.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
                count += 1
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return count
