"""Dense retrieval: build and search an index with a sentence encoder (Hugging Face layout) and faiss."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from atomrl.common.errors import reraise_as
from atomrl.common.files import sha256
from atomrl.environments.retrieval.index import RetrievalError

MAX_TOKENS = 256
"""Longer queries and documents are cut, as in Search-R1."""
BATCH = 64
"""Texts per forward pass."""
CHUNK = 32 * BATCH
"""Documents in memory at once; within them, batches are formed by length."""
TRAINING_VECTORS = 262_144
"""Most vectors that a faiss index is trained on, evenly spread over the documents."""
PROBES = 4
"""A query searches `PROBES * sqrt(n)` of the n lists of an IVF index: 256 of 4096, or 6% of the documents. By default
faiss searches one list, and returns no more documents than it has."""
VECTORS, INDEX = "vectors.f32", "faiss.index"
POOLING = "1_Pooling/config.json"
MODULES = ("Transformer", "Pooling", "Normalize")
"""Modules of sentence-transformers that `Encoder` implements."""
log = logging.getLogger(__name__)
Pooling = Literal["mean", "cls"]


@dataclass(frozen=True)
class Dense:
    """Settings of a dense index.

    Args:
        encoder: a folder in Hugging Face layout (e5, bge, MiniLM, ...).
        query_prefix: text before each query, such as `query: ` for the e5 models.
        passage_prefix: text before each document.
        factory: faiss index factory string. `Flat` compares a query with every document, from disk; `HNSW64`,
            `IVF4096,PQ64` and others are faster but approximate.
        device: device of the encoder.
    """

    encoder: Path
    query_prefix: str = ""
    passage_prefix: str = ""
    factory: str = "Flat"
    device: str = "cpu"

    name = "dense"

    def settings(self) -> dict[str, Any]:
        """Return the settings that an index depends on besides the corpus.

        Raises:
            RetrievalError: the folder has no encoder.
        """
        return {
            "kind": self.name,
            "encoder": self.encoder.name,
            "weights": _weights_hash(self.encoder),
            "passage_prefix": self.passage_prefix,
            "factory": self.factory,
        }

    def build(self, texts: Iterable[str], folder: Path) -> None:
        """Build the index of documents in a folder.

        Raises:
            RetrievalError: faiss cannot build an index with this factory string.
        """
        encoder = Encoder(self.encoder, self.device)
        index = None if self.factory == "Flat" else _faiss_index(encoder.size, self.factory)
        with (folder / VECTORS).open("wb") as file:
            remaining = iter(texts)
            while chunk := list(islice(remaining, CHUNK)):
                file.write(encoder.encode([self.passage_prefix + text for text in chunk]).tobytes())
        if index is not None:
            _fill(index, _vectors(folder, encoder.size), folder / INDEX, self.factory)
            (folder / VECTORS).unlink()

    def open(self, folder: Path) -> DenseIndex:
        """Open the index in a folder."""
        return DenseIndex(folder, Encoder(self.encoder, self.device), self.query_prefix)


class Encoder:
    """A sentence encoder: texts to unit vectors, whose inner products are cosine similarities.

    The vector of a text is the mean over its tokens, or its first token's if the folder says so
    (`1_Pooling/config.json` of sentence-transformers).

    Raises:
        RetrievalError: the folder has no encoder, or one with further modules (`modules.json`).
    """

    def __init__(self, folder: Path, device: str) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        _check_modules(folder)
        with reraise_as(RetrievalError, f"{folder} has no sentence encoder", OSError, ValueError, KeyError):
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder))
            dtype = torch.float16 if device.startswith("cuda") else torch.float32
            model = AutoModel.from_pretrained(str(folder), dtype=dtype)
        if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in model.config.architectures or ()):
            log.warning("%s: %s is a generative model; was it trained as an encoder?", folder, model.config.model_type)
        if model.config.is_encoder_decoder:
            raise RetrievalError(f"{folder}: a {model.config.model_type} has a decoder; use an encoder-only model")
        self._model, self._device = model.to(device).eval(), device
        self._pooling = _pooling(folder)
        self._max_tokens = min(MAX_TOKENS, self._tokenizer.model_max_length)
        self.size = int(model.config.hidden_size)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Encode texts to vectors [texts, size], float32, in order."""
        vectors = np.empty((len(texts), self.size), np.float32)
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        for start in range(0, len(texts), BATCH):
            places = order[start : start + BATCH]
            vectors[places] = self._encode([texts[place] for place in places])
        return vectors

    def _encode(self, texts: list[str]) -> np.ndarray:
        import torch

        inputs = self._tokenizer(
            texts, padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt"
        ).to(self._device)
        with torch.inference_mode():
            hidden = self._model(**inputs).last_hidden_state.float()
            if self._pooling == "cls":
                pooled = hidden[:, 0]
            else:
                mask = inputs["attention_mask"][..., None]
                pooled = (hidden * mask).sum(1) / mask.sum(1)
            result: np.ndarray = torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()
        return result


class DenseIndex:
    """Searches a dense index."""

    def __init__(self, folder: Path, encoder: Encoder, query_prefix: str) -> None:
        self._encoder, self._prefix, self._faiss = encoder, query_prefix, _faiss()
        self._index, self._vectors = None, None
        if (folder / INDEX).exists():
            self._index = self._faiss.read_index(str(folder / INDEX), self._faiss.IO_FLAG_MMAP_IFC)
            if (lists := self._faiss.try_extract_index_ivf(self._index)) is not None:
                lists.nprobe = min(lists.nlist, math.ceil(PROBES * math.sqrt(lists.nlist)))
        else:
            self._vectors = _vectors(folder, encoder.size)

    def search(self, queries: Sequence[str], topk: int) -> list[list[tuple[int, float]]]:
        """Return the best documents of each query, as (document, cosine similarity), best first."""
        vectors = self._encoder.encode([self._prefix + query for query in queries])
        if self._index is not None:
            scores, documents = self._index.search(vectors, topk)
        else:
            inner_product = self._faiss.METRIC_INNER_PRODUCT
            scores, documents = self._faiss.knn(vectors, self._vectors, topk, metric=inner_product)
        return [
            [(int(number), float(score)) for number, score in zip(numbers, row, strict=True) if number >= 0]
            for numbers, row in zip(documents, scores, strict=True)
        ]


def _faiss() -> Any:
    with reraise_as(RetrievalError, "dense retrieval needs faiss: pip install faiss-cpu", ImportError):
        import faiss

    return faiss


def _faiss_index(size: int, factory: str) -> Any:
    with reraise_as(RetrievalError, f"faiss cannot make an index {factory!r}", RuntimeError):
        return _faiss().index_factory(size, factory, _faiss().METRIC_INNER_PRODUCT)


def _fill(index: Any, vectors: np.ndarray, path: Path, factory: str) -> None:
    """Train an index, add all vectors, and write it."""
    if not index.is_trained:
        step = -(-len(vectors) // TRAINING_VECTORS)
        with reraise_as(RetrievalError, f"{factory}: {len(vectors)} documents are too few to train it", RuntimeError):
            index.train(np.ascontiguousarray(vectors[::step]))
    for block in _parts(vectors):
        index.add(block)
    _faiss().write_index(index, str(path))


def _parts(vectors: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(vectors), CHUNK):
        yield vectors[start : start + CHUNK]


def _vectors(folder: Path, size: int) -> np.ndarray:
    return np.memmap(folder / VECTORS, np.float32, "r").reshape(-1, size)


def _check_modules(folder: Path) -> None:
    """Raise RetrievalError if the encoder has modules of sentence-transformers that `Encoder` does not implement."""
    path = folder / "modules.json"
    types = [part["type"] for part in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []
    if others := [name for name in types if name.rpartition(".")[2] not in MODULES]:
        raise RetrievalError(f"{path}: {others[0]} is not supported; supported: {', '.join(MODULES)}")


def _pooling(folder: Path) -> Pooling:
    path = folder / POOLING
    if not path.exists():
        return "mean"
    known: dict[str, Pooling] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    settings = json.loads(path.read_text(encoding="utf-8"))
    used = [key for key, value in settings.items() if key.startswith("pooling_mode") and value]
    if len(used) != 1 or used[0] not in known:
        raise RetrievalError(f"{path}: the pooling is {', '.join(used)}; supported: {', '.join(known)}")
    return known[used[0]]


def _weights_hash(folder: Path) -> str:
    """Hash the weight files and the pooling config of a folder."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])
    if not files:
        raise RetrievalError(
            f"the encoder {folder} is not a folder with weights (model.safetensors) in Hugging Face layout"
        )
    files += [folder / POOLING] if (folder / POOLING).exists() else []
    return hashlib.blake2b("".join(map(sha256, files)).encode(), digest_size=20).hexdigest()
