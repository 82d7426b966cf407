"""Build or open an index on disk (`open_index`); the corpus behind it; and the tokenizer of BM25."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from filelock import FileLock

from atomrl.common.errors import did_you_mean, reraise_as
from atomrl.common.files import new_folder, write_text
from atomrl.data.files import MAX_LINE_BYTES, DataError, parse_line

# --------------------------------------------------------------------------------------------------------------------
# Words of a text, for BM25.

WORD = re.compile(r"\b(?!(?<=['’])s\b)\w+")
"""A run of letters and digits, except the s of a possessive."""
LANGUAGES = {
    "danish": "danish", "dutch": "dutch", "english": "porter", "french": "french", "german": "german",
    "italian": "italian", "norwegian": "norwegian", "portuguese": "portuguese", "russian": "russian",
    "spanish": "spanish", "swedish": "swedish", "turkish": "turkish",
}  # fmt: skip
"""Language -> stemmer. Porter for English, as in Lucene's analyzer, which Search-R1's BM25 uses."""


class Words:
    """Splits a text into words in lower case, removes stop words, and stems the others.

    Args:
        language: a key of `LANGUAGES`, or `none` for neither stop words nor stems.

    Raises:
        RetrievalError: the language is unknown, or a package is missing.

    Example:
        >>> Words("none")("The dog's 2 bones")
        ['the', 'dog', '2', 'bones']
    """

    def __init__(self, language: str) -> None:
        self._stop: frozenset[str] = frozenset()
        self._stem: Any = None
        if language == "none":
            return
        if language not in LANGUAGES:
            raise RetrievalError(f"unknown language {language!r}; {did_you_mean(language, [*LANGUAGES, 'none'])}")
        with reraise_as(RetrievalError, "BM25 needs bm25s and PyStemmer: pip install 'atomrl[retriever]'", ImportError):
            import Stemmer
            from bm25s import stopwords
        suffix = {"english": "EN"}.get(language, language.upper())
        self._stop = frozenset(getattr(stopwords, f"STOPWORDS_{suffix}"))
        self._stem = Stemmer.Stemmer(LANGUAGES[language])

    def __call__(self, text: str) -> list[str]:
        """Return the stems of a text, in order."""
        return [stem for word in self.split(text) if (stem := self.stem(word))]

    def split(self, text: str) -> list[str]:
        """Return the words of a text in lower case."""
        return WORD.findall(text.lower())

    def stem(self, word: str) -> str:
        """Return the stem of a word; "" for a stop word."""
        if word in self._stop:
            return ""
        return str(self._stem.stemWord(word)) if self._stem else word


# --------------------------------------------------------------------------------------------------------------------
# A corpus in JSONL: read once in order (`CorpusReader`), then by document number (`Corpus`).

MARK = b"\xef\xbb\xbf"
"""Byte-order mark, which some editors write at the beginning of a file."""
OFFSETS = "offsets.npy"


class RetrievalError(ValueError):
    """A corpus or an index cannot be used; the message says where, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Identifies the content of a corpus."""

    bytes: int
    modified_ns: int
    blake2b: str
    """Hash of the content."""


def document_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a corpus with `contents`, made from `title` and `text` if it has none.

    Raises:
        DataError: it has neither `contents` nor `text`, or one of them is not text.

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
    """Reads a corpus once, line by line, and records the offset of each document.

    Args:
        path: JSONL, one document a line: `{"id": ..., "contents": "\\"title\\"\\ntext"}`, as Search-R1's wiki-18, or
            `title` and `text`. Other keys stay in the document. Blank lines are skipped.

    Raises:
        RetrievalError: the file does not exist, or is compressed.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.offsets = path, array("q")
        self._digest = hashlib.blake2b(digest_size=20)
        self._before = _stat(path)
        with path.open("rb") as file:
            if file.read(2) == b"\x1f\x8b":
                raise RetrievalError(f"{path} is compressed; unpack it first (gunzip)")

    def texts(self) -> Iterator[str]:
        """Yield the contents of each document.

        Raises:
            RetrievalError: a line is not a document (with its number), or there is none.
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
        """Return the fingerprint of the corpus, after the last document.

        Raises:
            RetrievalError: the file has changed since.
        """
        after = _stat(self.path)
        if (after.st_size, after.st_mtime_ns) != (self._before.st_size, self._before.st_mtime_ns):
            raise RetrievalError(f"{self.path} changed while it was read; start again when it is complete")
        return Fingerprint(bytes=after.st_size, modified_ns=after.st_mtime_ns, blake2b=self._digest.hexdigest())

    def save_offsets(self, folder: Path) -> None:
        """Write the offset of each document, and of the end, for `Corpus`."""
        np.save(folder / OFFSETS, np.append(np.frombuffer(self.offsets, np.int64), self._before.st_size))


class Corpus:
    """The documents of a corpus by number, read from the file on demand. Thread-safe.

    Args:
        path: file of the corpus.
        folder: folder of its index.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self.path = path
        self._offsets = np.load(folder / OFFSETS, mmap_mode="r")
        self._file = path.open("rb")
        self._stat = os.fstat(self._file.fileno())

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a document, as by `document_of`.

        Raises:
            RetrievalError: the file has changed since it was opened.
        """
        start, end = (int(place) for place in self._offsets[number : number + 2])
        now = os.fstat(self._file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self._stat.st_size, self._stat.st_mtime_ns):
            raise RetrievalError(f"{self.path} has changed since the service started; restart it")
        return parse_document(os.pread(self._file.fileno(), end - start, start))


def parse_document(line: bytes) -> dict[str, Any]:
    """Parse a line of a corpus to a document, as by `document_of`.

    Raises:
        DataError: it is not a document.
    """
    return document_of(parse_line(line.removeprefix(MARK)))


def same_corpus(path: Path, fingerprint: Fingerprint) -> bool:
    """Return True if a file has a fingerprint: by size and date, or by its hash if only the date differs.

    Raises:
        RetrievalError: the file does not exist.
    """
    now = _stat(path)
    if now.st_size != fingerprint.bytes:
        return False
    if now.st_mtime_ns == fingerprint.modified_ns:
        return True
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20))
    return digest.hexdigest() == fingerprint.blake2b


def _stat(path: Path) -> os.stat_result:
    if not path.is_file():
        raise RetrievalError(f"the corpus {path} does not exist, or is not a file")
    return path.stat()


# --------------------------------------------------------------------------------------------------------------------
# The index.

VERSION = 1
MANIFEST = "index.json"
SAY_EVERY_S = 10.0
Hit = tuple[dict[str, Any], float]
"""A document and its score."""


class Searcher(Protocol):
    """Searches an index."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[tuple[int, float]]]:
        """Return the best documents of each query, as (document number, score), best first."""


class Kind(Protocol):
    """Settings of an index, which build and open it: `BM25` or `Dense`."""

    @property
    def name(self) -> str:
        """Name of the kind."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that an index depends on besides the corpus."""

    def build(self, texts: Iterable[str], folder: Path) -> None:
        """Build the index of documents in a folder."""

    def open(self, folder: Path) -> Searcher:
        """Open the index in a folder."""


class Index:
    """A corpus with its index. Thread-safe.

    Args:
        corpus: the documents.
        searcher: searches document numbers.
        kind: `bm25` or `dense`.
    """

    def __init__(self, corpus: Corpus, searcher: Searcher, kind: str) -> None:
        self.corpus, self.searcher, self.kind = corpus, searcher, kind

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.corpus)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return the best documents of each query, as (document, score), best first; at most `topk`, and for BM25 only
        those with one of its words.

        Raises:
            RetrievalError: the corpus has changed since it was opened.
        """
        if not queries:
            return []
        hits_by_query = self.searcher.search(queries, min(topk, len(self.corpus)))
        return [[(self.corpus[number], score) for number, score in hits] for hits in hits_by_query]


def open_index(corpus: Path, folder: Path, kind: Kind, say: Callable[[str], None] = print) -> Index:
    """Open the index of a corpus, after building it if it does not exist.

    It is built in a temporary folder and renamed when complete, so that an interruption leaves no partial index. If
    several processes open the same index, one builds it and the others wait.

    Args:
        corpus: JSONL (`CorpusReader`).
        folder: folder of the index.
        kind: settings of the index.
        say: called with progress messages.

    Raises:
        RetrievalError: corpus or encoder cannot be used, or the index is of another corpus or has other settings.
    """
    settings = kind.settings()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not (folder / MANIFEST).exists():
            _build(corpus, folder, kind, settings, say)
        else:
            _check(corpus, folder, settings)
    return Index(Corpus(corpus, folder), kind.open(folder), kind.name)


def _build(corpus: Path, folder: Path, kind: Kind, settings: dict[str, Any], say: Callable[[str], None]) -> None:
    reader, started = CorpusReader(corpus), time.monotonic()
    say(f"building the index {folder} of {corpus}")
    with new_folder(folder) as temporary:
        kind.build(_with_progress(reader, say), temporary)
        reader.save_offsets(temporary)
        _write_manifest(temporary, reader.fingerprint(), settings)
    say(f"{len(reader.offsets):,} documents, {time.monotonic() - started:.0f} s")


def _with_progress(reader: CorpusReader, say: Callable[[str], None]) -> Iterator[str]:
    """Yield the texts of a corpus, with a progress message every `SAY_EVERY_S` seconds."""
    started = last = time.monotonic()
    total = max(1, reader.path.stat().st_size)
    for text in reader.texts():
        if (now := time.monotonic()) >= last + SAY_EVERY_S:
            share, last = max(reader.offsets[-1], 1) / total, now
            say(f"{len(reader.offsets):,} documents, {share:.0%}, {(now - started) * (1 / share - 1):.0f} s to go")
        yield text


def _write_manifest(folder: Path, fingerprint: Fingerprint, settings: dict[str, Any]) -> None:
    manifest = {"version": VERSION, "corpus": asdict(fingerprint), "settings": settings}
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n", flush=True)


def _check(corpus: Path, folder: Path, settings: dict[str, Any]) -> None:
    """Check that an index is of this corpus and has these settings."""
    remedy = "name another folder (--index), or remove this one to build a new one"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, stored = manifest["version"], manifest["settings"]
        fingerprint = Fingerprint(**manifest["corpus"])
    except (ValueError, LookupError, TypeError) as error:
        raise RetrievalError(f"{folder / MANIFEST} cannot be read ({error}); {remedy}") from None
    if version != VERSION:
        raise RetrievalError(f"the index {folder} has version {version}, not {VERSION}; {remedy}")
    for name in [*settings, *stored]:
        if settings.get(name) != stored.get(name):
            raise RetrievalError(
                f"the index {folder} was built with {name}={stored.get(name)!r}, not {settings.get(name)!r}; {remedy}"
            )
    if not same_corpus(corpus, fingerprint):
        raise RetrievalError(f"{corpus} has changed since the index {folder} was built; {remedy}")
    if corpus.stat().st_mtime_ns != fingerprint.modified_ns:
        dated = Fingerprint(bytes=fingerprint.bytes, modified_ns=corpus.stat().st_mtime_ns, blake2b=fingerprint.blake2b)
        _write_manifest(folder, dated, settings)
