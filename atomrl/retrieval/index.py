"""An index on disk: made once, known again, and opened."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock

from atomrl.files import new_folder, write_text
from atomrl.retrieval.corpus import Corpus, CorpusReader, Fingerprint, RetrievalError, same_corpus

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
