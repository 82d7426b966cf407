"""BM25: build an index on disk in bounded memory, and search it.

The files are those of bm25s (`bm25s.BM25.load(folder)` reads them): for each word, the documents that contain it and
its part of their score. bm25s builds them from a corpus in memory. Here sorted runs of the corpus are written to disk
and merged word by word.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from atomrl.environments.retrieval.index import RetrievalError, Words

K1, B = 0.9, 0.4
"""Parameters of Anserini, which Search-R1's BM25 retriever uses."""
RUN_WORDS = 1 << 22
"""Words per sorted run."""
KNOWN_WORDS = 1 << 20
"""Words whose stems are cached."""
JOIN_ENTRIES = 1 << 22
"""Entries of the index that are merged in memory at once; a single word may have more."""
DATA, INDICES, INDPTR = (f"{name}.csc.index.npy" for name in ("data", "indices", "indptr"))


@dataclass(frozen=True)
class BM25:
    """Settings of a BM25 index."""

    language: str = "english"
    """Language of stop words and stems; `none` for neither."""

    name = "bm25"

    def settings(self) -> dict[str, Any]:
        """Return the settings that an index depends on besides the corpus."""
        return {"kind": self.name, "language": self.language, "k1": K1, "b": B}

    def build(self, texts: Iterable[str], folder: Path) -> None:
        """Build the index of documents in a folder."""
        runs = _Runs(Words(self.language), folder)
        for text in texts:
            runs.add(text)
        runs.join()

    def open(self, folder: Path) -> BM25Index:
        """Open the index in a folder."""
        return BM25Index(folder, Words(self.language))


class _Numbers(dict[str, int]):
    """Maps words to the numbers of their stems; -1 for stop words. New stems get the next number."""

    def __init__(self, words: Words, vocabulary: dict[str, int]) -> None:
        super().__init__()
        self._words, self._vocabulary = words, vocabulary

    def __missing__(self, word: str) -> int:
        if len(self) >= KNOWN_WORDS:
            self.clear()
        stem = self._words.stem(word)
        self[word] = number = self._vocabulary.setdefault(stem, len(self._vocabulary)) if stem else -1
        return number


class _Runs:
    """Counts the words of documents in sorted runs, and merges the runs."""

    def __init__(self, words: Words, folder: Path) -> None:
        self.words, self.folder = words, folder
        self.vocabulary: dict[str, int] = {}
        self._numbers = _Numbers(words, self.vocabulary)
        self.lengths, self.frequencies = array("i"), np.zeros(0, np.int64)
        self._tokens, self._first, self._paths = array("i"), 0, list[Path]()

    def add(self, text: str) -> None:
        """Add a document."""
        numbers = map(self._numbers.__getitem__, self.words.split(text))
        tokens = [number for number in numbers if number >= 0]
        self._tokens.extend(tokens)
        self.lengths.append(len(tokens))
        if len(self._tokens) >= RUN_WORDS:
            self._write()

    def _write(self) -> None:
        """Write the documents since the last run as sorted entries (word, document, count)."""
        lengths = np.array(self.lengths[self._first :], np.int64)
        documents = np.repeat(np.arange(self._first, len(self.lengths), dtype=np.int64), lengths)
        keys = np.frombuffer(self._tokens, np.int32).astype(np.int64) << 32 | documents
        keys, counts = np.unique(keys, return_counts=True)
        self.frequencies = _sum(self.frequencies, np.bincount(keys >> 32, minlength=len(self.vocabulary)))
        path = self.folder / f"run-{len(self._paths)}.npy"
        np.save(path, np.stack([keys >> 32, keys & 0xFFFFFFFF, counts]).astype(np.int32))
        self._paths.append(path)
        self._tokens, self._first = array("i"), len(self.lengths)

    def join(self) -> None:
        """Merge the runs into the index.

        Raises:
            RetrievalError: no document has a word.
        """
        if self._first < len(self.lengths):
            self._write()
        indptr = np.append(0, np.cumsum(self.frequencies))
        if not indptr[-1]:
            raise RetrievalError("no document has a word that BM25 could count")
        np.save(self.folder / INDPTR, indptr)
        lengths = np.frombuffer(self.lengths, np.int32)
        norm = (K1 * (1 - B + B * lengths / lengths.mean())).astype(np.float32)
        idf = np.log(1 + (len(lengths) - self.frequencies + 0.5) / (self.frequencies + 0.5)).astype(np.float32)
        data, indices = self.folder / DATA, self.folder / INDICES
        with _array_file(data, "<f4", indptr[-1]) as scores, _array_file(indices, "<i4", indptr[-1]) as places:
            for first, last in _blocks(indptr):
                words, documents, counts = self._entries(first, last)
                scores.write((idf[words] * (counts / (counts + norm[documents])).astype(np.float32)).tobytes())
                places.write(documents.tobytes())
        for path in self._paths:
            path.unlink()
        self._describe()

    def _describe(self) -> None:
        """Write vocabulary and settings in the format of bm25s."""
        with (self.folder / "vocab.index.json").open("w", encoding="utf-8") as file:
            json.dump(self.vocabulary, file, ensure_ascii=False)
        settings = {"k1": K1, "b": B, "method": "lucene", "num_docs": len(self.lengths)}
        (self.folder / "params.index.json").write_text(json.dumps(settings), encoding="utf-8")

    def _entries(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the entries of words `first` to `last - 1`, sorted: words, documents, counts."""
        parts = []
        for path in self._paths:
            run = np.load(path, mmap_mode="r")
            start, end = np.searchsorted(run[0], [first, last])
            parts.append(np.array(run[:, start:end]))
        words, documents, counts = np.concatenate(parts, axis=1)
        order = np.argsort(words, kind="stable")  # stable: each run has later documents than the one before
        return words[order], documents[order], counts[order]


@contextmanager
def _array_file(path: Path, kind: str, size: int) -> Iterator[BinaryIO]:
    """Open a file for `np.load`, to be written in pieces."""
    with path.open("wb") as file:
        header = {"descr": kind, "fortran_order": False, "shape": (int(size),)}
        np.lib.format.write_array_header_1_0(file, header)
        yield file


def _sum(totals: np.ndarray, more: np.ndarray) -> np.ndarray:
    more[: len(totals)] += totals
    return more


def _blocks(indptr: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges of words with at most `JOIN_ENTRIES` entries, or of one word."""
    first, words = 0, len(indptr) - 1
    while first < words:
        last = int(np.searchsorted(indptr, indptr[first] + JOIN_ENTRIES, "right")) - 1
        yield first, (first := max(last, first + 1))


class BM25Index:
    """Searches a BM25 index.

    Unlike bm25s, which ranks all documents for each query, it ranks only those that contain one of its words.
    """

    def __init__(self, folder: Path, words: Words) -> None:
        import bm25s

        bm25 = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        self._words, self._vocabulary = words, bm25.vocab_dict
        self._added, self._documents, self._starts = (bm25.scores[name] for name in ("data", "indices", "indptr"))
        self._count, self._own = int(bm25.scores["num_docs"]), threading.local()

    def search(self, queries: Sequence[str], topk: int) -> list[list[tuple[int, float]]]:
        """Return the best documents of each query, as (document, BM25 score), best first; ties by document number.
        Documents without any of its words are left out."""
        return [self._best(self._words(query), topk) for query in queries]

    def _best(self, words: Sequence[str], topk: int) -> list[tuple[int, float]]:
        numbers = [number for word in words if (number := self._vocabulary.get(word)) is not None]
        spans = [slice(self._starts[number], self._starts[number + 1]) for number in numbers]
        if not spans:
            return []
        documents = np.concatenate([self._documents[span] for span in spans])
        totals = self._totals()
        np.add.at(totals, documents, np.concatenate([self._added[span] for span in spans]))
        scores = totals[documents]
        totals[documents] = 0
        rank = topk * len(spans)  # a document appears once for each of its query words
        if rank < len(scores):
            best = scores >= np.partition(scores, -rank)[-rank]
            documents, scores = documents[best], scores[best]
        documents, first = np.unique(documents, return_index=True)
        order = np.argsort(-scores[first], kind="stable")[:topk]
        return list(zip(documents[order].tolist(), scores[first][order].tolist(), strict=True))

    def _totals(self) -> np.ndarray:
        """Return the score buffer of this thread: a zero for each document."""
        if not hasattr(self._own, "totals"):
            self._own.totals = np.zeros(self._count, np.float32)
        totals: np.ndarray = self._own.totals
        return totals
