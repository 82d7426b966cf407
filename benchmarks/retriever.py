"""The retriever on a large corpus: memory while it indexes, queries a second and latency under load, and recall.

    python benchmarks/retriever.py                                a million documents, some minutes and 2 GB of disk
    python benchmarks/retriever.py --documents 20000 --seconds 3

Makes documents of 40 to 120 random words (200,000 of them, of Zipf's frequencies without the hundred most frequent, as
in text without stop words), and starts `atomrl data serve` on them as a user would. Prints how long the index took and
the most memory that the process had (VmHWM); queries a second and latency (p50, p99) with 1 and with 64 clients in
another process, each of which waits for its answer, over kept connections and with a new one for each request; and
recall against a BM25 that is computed here of its definition, over all documents, in float64. Queries are 2 to 8 words
of one document, for 3 documents.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
WORDS, TOPK = 200_000, 3
K1, B = 0.9, 0.4


def make_words(rng: random.Random) -> np.ndarray:
    words: dict[str, None] = {}
    while len(words) < WORDS:
        words["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8)))] = None
    return np.array(list(words))


def make_corpus(path: Path, documents: int) -> None:
    """Documents as those of Search-R1's wiki-18."""
    words, rng = make_words(random.Random(0)), np.random.default_rng(0)
    shares = np.cumsum(1 / (np.arange(WORDS) + 100.0))
    with path.open("w", encoding="ascii") as file:
        for start in range(0, documents, 1000):
            lengths = rng.integers(40, 121, min(1000, documents - start))
            drawn = words[np.searchsorted(shares, rng.random(lengths.sum()) * shares[-1])]
            ends = np.cumsum(lengths)
            for number, (end, length) in enumerate(zip(ends, lengths, strict=True), start):
                text = " ".join(drawn[end - length : end])
                file.write(json.dumps({"id": str(number), "contents": f'"Title {number}"\n{text}'}) + "\n")


def make_queries(path: Path, count: int, rng: random.Random) -> list[str]:
    """Words of documents at random places in the file."""
    queries, size = [], path.stat().st_size
    with path.open("rb") as file:
        while len(queries) < count:
            file.seek(rng.randrange(size))
            file.readline()
            if line := file.readline():
                words = json.loads(line)["contents"].partition("\n")[2].split()
                queries.append(" ".join(rng.sample(words, rng.randint(2, 8))))
    return queries


def exhaustive(path: Path, queries: list[str]) -> Iterator[np.ndarray]:
    """Yield the BM25 score of every document, for each query."""
    wanted = {word for query in queries for word in query.split()}
    places = {word: (array("i"), array("i")) for word in wanted}
    lengths = array("i")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            words = re.findall(r"\w+", json.loads(line)["contents"].lower())
            lengths.append(len(words))
            for word, often in Counter(word for word in words if word in wanted).items():
                places[word][0].append(number)
                places[word][1].append(often)
    size = np.array(lengths, np.float64)
    norm = K1 * (1 - B + B * size / size.mean())
    for query in queries:
        scores = np.zeros(len(size))
        for word in query.split():
            documents, counts = (np.array(values) for values in places[word])
            idf = math.log(1 + (len(size) - len(documents) + 0.5) / (len(documents) + 0.5))
            scores[documents] += idf * counts / (counts + norm[documents])
        yield scores


def ask(connection: HTTPConnection, queries: list[str]) -> list[list[dict]]:
    body = json.dumps({"queries": queries, "topk": TOPK, "return_scores": True})
    connection.request("POST", "/retrieve", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == 200, content
    return json.loads(content)["result"]


def load(port: int, clients: int, seconds: float, keep: bool, queries: list[str]) -> None:
    """Ask without a pause, and print queries a second and latency."""
    taken: list[float] = []
    end = time.perf_counter() + seconds

    def client(number: int) -> None:
        rng, connection = random.Random(number), HTTPConnection("127.0.0.1", port)
        while (started := time.perf_counter()) < end:
            ask(connection, [rng.choice(queries)])
            taken.append(time.perf_counter() - started)
            if not keep:
                connection.close()  # and the next request opens another

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = len(taken) / (time.perf_counter() - begun)
    p50, p99 = np.percentile(np.array(taken) * 1000, [50, 99])
    how = "kept connections" if keep else "a new connection each"
    print(f"{clients:3d} clients, {how}: {rate:.0f} queries a second, p50 {p50:.1f} ms, p99 {p99:.1f} ms", flush=True)


def recall(port: int, path: Path, queries: list[str]) -> float:
    """The share of the best documents that is answered; equal ones count alike, and those without a word not at all."""
    connection, found, wanted = HTTPConnection("127.0.0.1", port), 0, 0
    answers = ask(connection, queries)
    for hits, scores in zip(answers, exhaustive(path, queries), strict=True):
        least = max(np.partition(scores, -TOPK)[-TOPK], 1e-9)
        wanted += min(TOPK, np.count_nonzero(scores))
        found += sum(scores[int(hit["document"]["id"])] >= least - 1e-4 for hit in hits)
    return found / wanted


def start(corpus: Path) -> tuple[subprocess.Popen[str], int]:
    """The service and its port; prints what it says, and its memory."""
    command = [
        sys.executable,
        "-m",
        "atomrl.cli.main",
        "data",
        "serve",
        str(corpus),
        "--language",
        "none",
        "--port",
        "0",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print("  " + line, end="", flush=True)
        if match := re.search(r"listens at http://[^:]+:(\d+)", line):
            return process, int(match[1])
    raise SystemExit("the service did not start")


def most_memory_mib(process: subprocess.Popen[str]) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) / 1024


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load")
    parser.add_argument("--queries", type=int, default=200, help="whose recall is computed")
    parser.add_argument("--load", nargs=4, metavar=("PORT", "CLIENTS", "KEEP", "CORPUS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        port, clients, keep, corpus = arguments.load
        queries = make_queries(Path(corpus), 2000, random.Random(1))
        load(int(port), int(clients), arguments.seconds, keep == "1", queries)
        return
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        make_corpus(corpus, arguments.documents)
        print(f"{arguments.documents:,} documents, {corpus.stat().st_size / 2**20:.0f} MiB", flush=True)
        process, _ = start(corpus)
        size = sum(path.stat().st_size for path in corpus.with_name("corpus.jsonl.bm25").iterdir()) / 2**20
        print(
            f"indexing: at most {most_memory_mib(process):.0f} MiB of memory; the index has {size:.0f} MiB", flush=True
        )
        stop(process)
        process, port = start(corpus)
        for clients, keep in ((1, 1), (64, 1), (64, 0)):
            given = [str(port), str(clients), str(keep), str(corpus), "--seconds", str(arguments.seconds)]
            subprocess.run([sys.executable, __file__, "--load", *given], check=True)
        print(f"serving: at most {most_memory_mib(process):.0f} MiB of memory", flush=True)
        queries = make_queries(corpus, arguments.queries, random.Random(2))
        print(f"recall@{TOPK}: {recall(port, corpus, queries):.4f} over {len(queries)} queries", flush=True)
        stop(process)


if __name__ == "__main__":
    main()
