"""Serve the documents of a corpus to models that search (docs/retriever.md).

atomrl retriever wiki-18.jsonl                                          # BM25, at http://127.0.0.1:8000/retrieve
atomrl retriever wiki-18.jsonl --encoder models/e5-base-v2 --device cuda
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atomrl.retrieval.index import Kind


E5_PREFIXES = ("query: ", "passage: ")
"""With which the e5 models were trained."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="JSONL: id and contents, or title and text")
    parser.add_argument(
        "--index", type=Path, metavar="FOLDER", help="of the index, made once (CORPUS.bm25, CORPUS.dense)"
    )
    parser.add_argument("--topk", type=int, default=3, help="documents for a query that does not say how many (3)")
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1: this machine alone; 0.0.0.0: all that reach it")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (8000)")
    parser.add_argument("--language", default="english", help="of BM25: stop words and stems; none for neither")
    dense = parser.add_argument_group("dense retrieval")
    dense.add_argument("--encoder", type=Path, metavar="FOLDER", help="a sentence encoder in Hugging Face layout")
    dense.add_argument("--query-prefix", metavar="TEXT", help='"query: " where the folder\'s name has e5, else none')
    dense.add_argument("--passage-prefix", metavar="TEXT", help='likewise "passage: "')
    dense.add_argument(
        "--faiss", default="Flat", metavar="FACTORY", help="the index: Flat (exact), HNSW64, IVF4096,Flat ..."
    )
    dense.add_argument("--device", default="cpu", help="that encodes: cpu, cuda")


def run(arguments: argparse.Namespace) -> int:
    from atomrl.retrieval.index import open_index
    from atomrl.retrieval.requests import MAX_TOPK
    from atomrl.retrieval.server import Service, address_of, memory_bytes, serve

    if not 1 <= arguments.topk <= MAX_TOPK:
        raise ValueError(f"--topk must be from 1 to {MAX_TOPK}")
    kind = chosen_kind(arguments)
    folder = arguments.index or arguments.corpus.with_name(f"{arguments.corpus.name}.{kind.name}")
    listener = address_of(arguments.host, arguments.port)  # an address that is taken is said before an index is made
    index = open_index(arguments.corpus, folder, kind, lambda line: print(line, flush=True))
    host, port = listener.getsockname()[:2]

    def announce() -> None:
        size = f"{len(index):,} documents, {kind.name}, {memory_bytes() / 2**20:.0f} MiB of memory"
        print(f"listens at http://{host}:{port}/retrieve: {size}", flush=True)

    serve(Service(index, arguments.topk), listener, announce)
    return 0


def chosen_kind(arguments: argparse.Namespace) -> "Kind":
    """BM25, or with an encoder a dense index."""
    from atomrl.retrieval.bm25 import BM25
    from atomrl.retrieval.dense import Dense

    if arguments.encoder is None:
        return BM25(arguments.language)
    e5 = "e5" in arguments.encoder.resolve().name.lower()
    given = arguments.query_prefix, arguments.passage_prefix
    query, passage = (own if own is not None else usual * e5 for own, usual in zip(given, E5_PREFIXES, strict=True))
    return Dense(arguments.encoder, query, passage, arguments.faiss, arguments.device)
