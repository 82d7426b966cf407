"""An index on disk: made once, known again, and opened."""

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

from atomrl.common.errors import did_you_mean, said_as
from atomrl.common.files import new_folder, write_text
from atomrl.data.files import MAX_LINE_BYTES, DataError, parse_line

# --------------------------------------------------------------------------------------------------------------------
# From text to the words that BM25 counts.

WORD = re.compile(r"\b(?!(?<=['’])s\b)\w+")
"""A run of letters and digits; the s of a possessive is none."""
LANGUAGES = {
    "danish": "danish", "dutch": "dutch", "english": "porter", "french": "french", "german": "german",
    "italian": "italian", "norwegian": "norwegian", "portuguese": "portuguese", "russian": "russian",
    "spanish": "spanish", "swedish": "swedish", "turkish": "turkish",
}  # fmt: skip
"""Language -> its stemmer. Of English Porter's own, as in Lucene's analyzer, by which Search-R1's BM25 reads."""


class Words:
    """Splits a text into words in lower case, drops stop words, and cuts what is left to its stem.

    Args:
        language: of `LANGUAGES`; or `none`, with neither stop words nor stems.

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
        with said_as(RetrievalError, "BM25 needs bm25s and PyStemmer: pip install 'atomrl[retriever]'", ImportError):
            import Stemmer
            from bm25s import stopwords
        suffix = {"english": "EN"}.get(language, language.upper())
        self._stop = frozenset(getattr(stopwords, f"STOPWORDS_{suffix}"))
        self._stem = Stemmer.Stemmer(LANGUAGES[language])

    def __call__(self, text: str) -> list[str]:
        """The words of a text, in order."""
        return [stem for word in self.split(text) if (stem := self.stem(word))]

    def split(self, text: str) -> list[str]:
        """The words as they stand there, in lower case."""
        return WORD.findall(text.lower())

    def stem(self, word: str) -> str:
        """What a word is counted as; empty for a stop word."""
        if word in self._stop:
            return ""
        return str(self._stem.stemWord(word)) if self._stem else word


# --------------------------------------------------------------------------------------------------------------------
# A corpus in JSONL: read once from the first line to the last, and then any document by its number.

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


VERSION = 1
MANIFEST = "index.json"
SAY_EVERY_S = 10.0
Hit = tuple[dict[str, Any], float]
"""A document and its score."""


class Searcher(Protocol):
    """Finds documents by their number."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[tuple[int, float]]]:
        """Of each query the numbers of the best documents with their scores, the best first."""


class Kind(Protocol):
    """How an index is made: `BM25` or `Dense`."""

    @property
    def name(self) -> str:
        """Of the kind."""

    def settings(self) -> dict[str, Any]:
        """What an index depends on beside the corpus."""

    def build(self, texts: Iterable[str], folder: Path) -> None:
        """Write the index of documents into a folder."""

    def open(self, folder: Path) -> Searcher:
        """The index of a folder."""


class Index:
    """A corpus and what finds its documents; several threads may search at once.

    Args:
        corpus: the documents.
        searcher: finds them by number.
        kind: `bm25` or `dense`.
    """

    def __init__(self, corpus: Corpus, searcher: Searcher, kind: str) -> None:
        self.corpus, self.searcher, self.kind = corpus, searcher, kind

    def __len__(self) -> int:
        """Documents."""
        return len(self.corpus)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Of each query the best documents with their scores, the best first; at most `topk`, and of BM25 only those
        that have one of its words.

        Raises:
            RetrievalError: the corpus was written to meanwhile.
        """
        if not queries:
            return []
        found = self.searcher.search(queries, min(topk, len(self.corpus)))
        return [[(self.corpus[number], score) for number, score in hits] for hits in found]


def open_index(corpus: Path, folder: Path, kind: Kind, say: Callable[[str], None] = print) -> Index:
    """The index of a corpus, made where there is none.

    It is written beside its place and renamed when it is whole, so that an interruption leaves nothing that looks like
    an index. Of several processes that want the same one, one makes it and the others wait.

    Args:
        corpus: JSONL (`CorpusReader`).
        folder: of the index.
        kind: how it is made.
        say: is told how far it is.

    Raises:
        RetrievalError: corpus or encoder cannot be used; or the index was made of another corpus, or in another way.
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
    say(f"makes the index {folder} of {corpus}")
    with new_folder(folder) as aside:
        kind.build(_told(reader, say), aside)
        reader.save_offsets(aside)
        _write_manifest(aside, reader.fingerprint(), settings)
    say(f"{len(reader.offsets):,} documents, {time.monotonic() - started:.0f} s")


def _told(reader: CorpusReader, say: Callable[[str], None]) -> Iterator[str]:
    """The texts of a corpus, with a word on how far it is now and then."""
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
    """That an index is of this corpus, and made in this way."""
    remedy = "name another folder (--index), or remove it, and a new one is made"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, known = manifest["version"], manifest["settings"]
        fingerprint = Fingerprint(**manifest["corpus"])
    except (ValueError, LookupError, TypeError) as error:
        raise RetrievalError(f"{folder / MANIFEST} cannot be read ({error}); {remedy}") from None
    if version != VERSION:
        raise RetrievalError(f"the index {folder} has version {version}, not {VERSION}; {remedy}")
    for name in [*settings, *known]:
        if settings.get(name) != known.get(name):
            raise RetrievalError(
                f"the index {folder} was made with {name}={known.get(name)!r}, not {settings.get(name)!r}; {remedy}"
            )
    if not same_corpus(corpus, fingerprint):
        raise RetrievalError(f"{corpus} has changed since the index {folder} was made of it; {remedy}")
    if corpus.stat().st_mtime_ns != fingerprint.modified_ns:
        dated = Fingerprint(bytes=fingerprint.bytes, modified_ns=corpus.stat().st_mtime_ns, blake2b=fingerprint.blake2b)
        _write_manifest(folder, dated, settings)
