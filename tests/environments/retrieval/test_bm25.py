"""The BM25 index: the same as by definition and as bm25s makes it; known again; whole or not there at all."""

import json
import math
import os
import random
import re
import signal
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from atomrl.environments.retrieval import bm25 as module
from atomrl.environments.retrieval.bm25 import BM25, K1, B
from atomrl.environments.retrieval.index import LANGUAGES, MANIFEST, RetrievalError, Words, open_index
from tests.environments.retrieval.conftest import WORDS, rows, start, until, write

bm25s = pytest.importorskip("bm25s")
pytest.importorskip("Stemmer")


def quiet(line: str) -> None:
    pass


def index_of(corpus, language="none", say=quiet):
    return open_index(corpus, corpus.with_name("index"), BM25(language), say)


def by_definition(texts: list[str], query: str) -> dict[int, float]:
    """The BM25 of every document that has a word of the query, word by word."""
    documents = [re.findall(r"\w+", text.lower()) for text in texts]
    average = sum(map(len, documents)) / len(documents)
    scores: dict[int, float] = {}
    for word in re.findall(r"\w+", query.lower()):
        having = [number for number, document in enumerate(documents) if word in document]
        idf = math.log(1 + (len(documents) - len(having) + 0.5) / (len(having) + 0.5))
        for number in having:
            often, length = documents[number].count(word), len(documents[number])
            added = idf * often / (often + K1 * (1 - B + B * length / average))
            scores[number] = scores.get(number, 0.0) + added
    return scores


@pytest.mark.parametrize(("run", "join"), [(1 << 22, 1 << 22), (64, 16), (64, 1 << 22)])
def test_scores_are_those_of_the_definition(corpus, monkeypatch, run, join):
    """However many runs and pieces the index is made of."""
    monkeypatch.setattr(module, "RUN_WORDS", run)
    monkeypatch.setattr(module, "JOIN_ENTRIES", join)
    index, rng = index_of(corpus), random.Random(1)
    texts = [row["contents"] for row in rows(500)]
    queries = [" ".join(rng.choices(WORDS, k=rng.randint(1, 6))) for _ in range(40)]
    ranked = index.search(queries, 500)
    for topk in (1, 3):
        assert index.search(queries, topk) == [hits[:topk] for hits in ranked]
    for query, hits in zip(queries, ranked, strict=True):
        wanted = by_definition(texts, query)
        assert {int(document["id"]) for document, _ in hits} == set(wanted)
        assert [score for _, score in hits] == pytest.approx(sorted(wanted.values(), reverse=True), rel=1e-5)
        for document, score in hits:
            assert score == pytest.approx(wanted[int(document["id"])], rel=1e-5)


def test_the_files_are_those_of_bm25s(corpus, monkeypatch):
    monkeypatch.setattr(module, "RUN_WORDS", 1000)
    index_of(corpus, "english")
    ours = bm25s.BM25.load(corpus.with_name("index"), mmap=True, show_progress=False)
    theirs, words = bm25s.BM25(k1=K1, b=B, method="lucene"), Words("english")
    theirs.index([words(row["contents"]) for row in rows(500)], show_progress=False, create_empty_token=False)
    assert set(ours.vocab_dict) == set(theirs.vocab_dict)
    for word in ours.vocab_dict:
        mine, others = ours.get_scores([word]), theirs.get_scores([word])
        assert np.allclose(mine, others, rtol=1e-5) and mine.any()


def test_only_documents_with_a_word_of_the_query_are_found(corpus):
    write(corpus, [{"contents": "one two"}, {"contents": "two three"}, {"contents": "four"}])
    results = index_of(corpus).search(["one", "two", "nine", "", "?!"], 3)
    assert [len(hits) for hits in results] == [1, 2, 0, 0, 0]


@pytest.mark.parametrize(
    ("language", "text", "words"),
    [
        ("none", "The dogs' O'Neill, 7 it's Zürich", ["the", "dogs", "o", "neill", "7", "it", "zürich"]),
        ("english", "The running dogs' bones were not in France’s box", ["run", "dog", "bone", "were", "franc", "box"]),
        ("german", "Die Häuser der Stadt", ["haus", "stadt"]),
    ],
)
def test_words_are_split_and_stemmed_by_language(language, text, words):
    assert Words(language)(text) == words


def test_every_language_has_its_words():
    for language in (*LANGUAGES, "none"):
        assert Words(language)("42") == ["42"]
    with pytest.raises(RetrievalError, match="'german'"):
        Words("germen")


def test_documents_come_as_they_are_in_the_file(corpus):
    lines = [
        b'\xef\xbb\xbf{"id": "a", "contents": "\\"One\\"\\nfirst"}\r\n', b"\n", b"   \n",
        b'{"id": 2, "title": "Two", "text": "second", "source": "x"}\n',
        '{"text": "drítte"}'.encode(),
    ]  # fmt: skip
    corpus.write_bytes(b"".join(lines))
    index = index_of(corpus)
    assert [index.corpus[number] for number in range(len(index))] == [
        {"id": "a", "contents": '"One"\nfirst'},
        {"id": 2, "title": "Two", "text": "second", "source": "x", "contents": '"Two"\nsecond'},
        {"text": "drítte", "contents": '""\ndrítte'},
    ]
    assert [document["contents"] for document, _ in index.search(["DRÍTTE"], 3)[0]] == ['""\ndrítte']


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{oops", "corpus.jsonl:3: not valid JSON"),
        ("[1]", "corpus.jsonl:3: a JSON list"),
        ('{"id": 1}', "corpus.jsonl:3: a document has 'contents', or 'title' and 'text'"),
        ('{"contents": 3}', "corpus.jsonl:3: 'contents' must be text"),
        ('{"title": ["x"], "text": "y"}', "corpus.jsonl:3: 'title' must be text"),
    ],
)
def test_invalid_documents_are_named_with_their_line(corpus, line, said):
    with corpus.open("w") as file:
        file.write('{"contents": "a"}\n\n' + line + "\n")
    with pytest.raises(RetrievalError, match=re.escape(said)):
        index_of(corpus)
    assert sorted(path.name for path in corpus.parent.iterdir()) == [".index.lock", "corpus.jsonl"]


def test_invalid_corpora_are_named(corpus):
    corpus.write_bytes(b"\x1f\x8b123")
    with pytest.raises(RetrievalError, match="compressed"):
        index_of(corpus)
    corpus.write_text("\n\n")
    with pytest.raises(RetrievalError, match="has no document"):
        index_of(corpus)
    corpus.write_text('{"contents": "?"}\n')
    with pytest.raises(RetrievalError, match="no document"):
        index_of(corpus)
    with pytest.raises(RetrievalError, match="does not exist"):
        index_of(corpus.with_name("absent.jsonl"))


def test_an_index_is_made_once(corpus):
    said = []
    first = index_of(corpus, say=said.append).search(["ban"], 5)
    assert said and said.clear() is None
    assert index_of(corpus, say=said.append).search(["ban"], 5) == first and not said
    os.utime(corpus, (1, 1))  # as a copy of the file
    for _ in range(2):
        assert index_of(corpus, say=said.append).search(["ban"], 5) == first and not said


def test_another_corpus_or_another_way_is_named(corpus):
    index_of(corpus)
    with pytest.raises(RetrievalError, match=r"language='none'.*--index"):
        index_of(corpus, "german")
    content = corpus.read_bytes()
    corpus.write_bytes(content + b'{"contents": "more"}\n')
    with pytest.raises(RetrievalError, match="changed since"):
        index_of(corpus)
    corpus.write_bytes(content.replace(b"T1", b"U1", 1))
    with pytest.raises(RetrievalError, match="changed since"):
        index_of(corpus)
    corpus.write_bytes(content)
    assert len(index_of(corpus)) == 500
    manifest = corpus.with_name("index") / MANIFEST
    manifest.write_text(manifest.read_text()[:40])
    with pytest.raises(RetrievalError, match="cannot be read"):
        index_of(corpus)


def test_a_corpus_that_changes_under_the_service_is_named(corpus):
    index = index_of(corpus)
    with corpus.open("a") as file:
        file.write('{"contents": "ban"}\n')
    with pytest.raises(RetrievalError, match="changed since"):
        index.search(["ban"], 1)


def test_a_kill_while_it_is_made_leaves_no_index(tmp_path):
    """And the next one makes it whole."""
    corpus = write(tmp_path / "corpus.jsonl", rows(60_000))
    folder, aside = tmp_path / "corpus.jsonl.bm25", tmp_path / ".corpus.jsonl.bm25.partial"
    process = start(str(corpus), "--port", "0")
    until(aside.exists)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert aside.exists() and not folder.exists()
    write(corpus, rows(200))
    index = open_index(corpus, folder, BM25(), quiet)
    assert len(index) == 200 and not aside.exists() and (folder / MANIFEST).exists()


def test_one_of_two_processes_builds_the_index(tmp_path):
    corpus = write(tmp_path / "corpus.jsonl", rows(20_000))
    processes = [start(str(corpus), "--port", "0") for _ in range(2)]
    said = []
    for process in processes:
        text = ""
        while "listening at" not in text:
            line = process.stdout.readline()
            assert line, text
            text += line
        said.append(text)
    for process in processes:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert Counter("building the index" in text for text in said) == {True: 1, False: 1}


def test_memory_does_not_grow_with_the_texts(tmp_path, monkeypatch):
    """While an index is made there are in memory the words, each once, and some bytes of each document."""
    monkeypatch.setattr(module, "RUN_WORDS", 20_000)
    monkeypatch.setattr(module, "JOIN_ENTRIES", 20_000)
    peaks = []
    for count in (300, 2300):
        corpus = write(tmp_path / f"{count}.jsonl", [{"text": " ".join(WORDS)}] * count)
        tracemalloc.start()
        open_index(corpus, tmp_path / str(count), BM25("none"), quiet)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 2000 * 100 < corpus.stat().st_size / 4, peaks
    assert json.loads((tmp_path / "2300" / "params.index.json").read_text())["num_docs"] == 2300
