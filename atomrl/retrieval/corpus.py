"""A corpus in JSONL: read once from the first line to the last, and then any document by its number."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atomrl.data.files import MAX_LINE_BYTES, parse_line
from atomrl.data.problems import DataError

MARK = b"\xef\xbb\xbf"
"""Of the byte order, which some editors write at the beginning."""
OFFSETS = "offsets.npy"


class RetrievalError(ValueError):
    """A corpus or an index cannot be used: what, where, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """By which a corpus is known again."""

    bytes: int
    modified_ns: int
    blake2b: str
    """Of its content."""


def document_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a corpus as the service gives it: as it is, and with `contents` in any case.

    Raises:
        DataError: it has neither `contents` nor `text`, or one of them is no text.

    Example:
        >>> document_of({"id": 7, "title": "Paris", "text": "Capital of France."})["contents"]
        '"Paris"\\nCapital of France.'
    """
    for key in ("contents", "title", "text"):
        if row.get(key) is not None and not isinstance(row[key], str):
            raise DataError(f"{key!r} must be text, not {type(row[key]).__name__}")
    if row.get("contents") is not None:
        return dict(row)
    if row.get("text") is None:
        raise DataError(f"a document has 'contents', or 'title' and 'text'; this row has {', '.join(row) or 'no key'}")
    return {**row, "contents": f'"{row.get("title") or ""}"\n{row["text"]}'}


class CorpusReader:
    """Reads a corpus from the first document to the last, in the memory of one line; notes where each begins.

    Args:
        path: JSONL, one document a line: `{"id": ..., "contents": "\\"title\\"\\ntext"}`, as Search-R1's wiki-18, or
            `title` and `text`. Other keys stay with the document. Blank lines are passed over.

    Raises:
        RetrievalError: there is no such file, or it is no JSONL.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.offsets = path, array("q")
        self._digest = hashlib.blake2b(digest_size=20)
        self._before = _stat(path)
        with path.open("rb") as file:
            if file.read(2) == b"\x1f\x8b":
                raise RetrievalError(
                    f"{path} is compressed; documents are read from the file itself: unpack it (gunzip)"
                )

    def texts(self) -> Iterator[str]:
        """The contents of each document.

        Raises:
            RetrievalError: a line is no document, or there is none; with the line.
        """
        offset, number = 0, 0
        with self.path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise RetrievalError(f"{self.path}:{number}: the line is longer than {MAX_LINE_BYTES >> 20} MiB")
                self._digest.update(line)
                if line.strip():
                    self.offsets.append(offset)
                    try:
                        yield parse_document(line)["contents"]
                    except DataError as error:
                        raise RetrievalError(f"{self.path}:{number}: {error}") from None
                offset += len(line)
        if not self.offsets:
            raise RetrievalError(f"{self.path} has no document")

    def fingerprint(self) -> Fingerprint:
        """Of what was read, after the last document.

        Raises:
            RetrievalError: the file was written to meanwhile.
        """
        after = _stat(self.path)
        if (after.st_size, after.st_mtime_ns) != (self._before.st_size, self._before.st_mtime_ns):
            raise RetrievalError(f"{self.path} was written to while it was read; begin again when it is complete")
        return Fingerprint(bytes=after.st_size, modified_ns=after.st_mtime_ns, blake2b=self._digest.hexdigest())

    def save_offsets(self, folder: Path) -> None:
        """Where each document begins, and where the last ends, for `Corpus`."""
        np.save(folder / OFFSETS, np.append(np.frombuffer(self.offsets, np.int64), self._before.st_size))


class Corpus:
    """The documents of a corpus by their number, each read from the file when it is asked for.

    Several threads may ask at once.

    Args:
        path: of the corpus.
        folder: of its index.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self.path = path
        self._offsets = np.load(folder / OFFSETS, mmap_mode="r")
        self._file = path.open("rb")
        self._stat = os.fstat(self._file.fileno())

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        """A document, as `document_of` makes it.

        Raises:
            RetrievalError: the file was written to since it was opened.
        """
        start, end = (int(place) for place in self._offsets[number : number + 2])
        now = os.fstat(self._file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self._stat.st_size, self._stat.st_mtime_ns):
            raise RetrievalError(f"{self.path} was written to since the service began; start it again")
        return parse_document(os.pread(self._file.fileno(), end - start, start))


def parse_document(line: bytes) -> dict[str, Any]:
    """A line of a corpus as `document_of` gives it.

    Raises:
        DataError: it is no document.
    """
    return document_of(parse_line(line.removeprefix(MARK)))


def same_corpus(path: Path, known: Fingerprint) -> bool:
    """Whether a file is the one of a fingerprint: by size and date, and where the date alone differs by its content.

    Raises:
        RetrievalError: there is no such file.
    """
    now = _stat(path)
    if now.st_size != known.bytes:
        return False
    if now.st_mtime_ns == known.modified_ns:
        return True
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20))
    return digest.hexdigest() == known.blake2b


def _stat(path: Path) -> os.stat_result:
    if not path.is_file():
        raise RetrievalError(f"the corpus {path} does not exist, or is no file")
    return path.stat()
