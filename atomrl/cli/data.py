"""`atomrl data`: check a data file, make one from a task, tokenize text, serve documents for retrieval."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from atomrl.cli.arguments import check_exists
from atomrl.cli.main import Run
from atomrl.common.files import write_jsonl

if TYPE_CHECKING:
    from atomrl.environments.retrieval.index import Kind
    from atomrl.types import Problem

FIELDS = ("--prompt-field", "--answer-field", "--answer-pattern")
"""Options of `check` that are also keys of the section `data`."""
E5_PREFIXES = ("query: ", "passage: ")
"""Prefixes of queries and passages with which the e5 models were trained."""


def add_data_check(parser: argparse.ArgumentParser) -> Run:
    """Read a data file as the run that it is made for would, and report every error with its line.

    Its columns decide what it contains: problems, demonstrations, or preferences.

    atomrl data check train.jsonl
    atomrl data check gsm8k.jsonl --prompt-field question --answer-field answer --reward gsm8k
    """
    add = parser.add_argument
    add("file", metavar="FILE", help="JSONL, JSON or Parquet, or a data set of the hub")
    add("more", nargs="*", metavar="key=value", help=argparse.SUPPRESS)  # to say what to write in its place
    add("--prompt-field", default="prompt")
    add("--answer-field", default="ground_truth", help="field of the answer; null: none")
    add("--answer-pattern", help="its first group in the answer field is the ground truth")
    add("--reward", metavar="NAME[,NAME]", help="built-in rewards that must be able to parse the ground truths")
    add("--against", metavar="FILE", help="a file that must not have prompts of this one")
    return check


def add_data_make(parser: argparse.ArgumentParser) -> Run:
    """Write the problems of a task to a file.

    atomrl data make countdown --size 1000 --seed 0 --out countdown.jsonl
    atomrl data make arithmetic --size 500 --split eval --out held_out.jsonl steps=4
    """
    from atomrl.data.tasks import GENERATORS

    add = parser.add_argument
    add("task", metavar="TASK", help=f"{', '.join(GENERATORS)}, reasoning_gym:NAME")
    add("arguments", nargs="*", metavar="key=value", help="arguments of the task")
    add("--size", type=int, required=True, help="number of problems")
    add("--seed", type=int, default=0)
    add("--split", choices=("train", "eval"), default="train", help="the two splits share no problem")
    add("--out", type=Path, required=True, metavar="FILE", help="the JSONL file to write")
    return make


def add_data_prepare(parser: argparse.ArgumentParser) -> Run:
    """Tokenize text for pretraining.

    atomrl data prepare input.txt --tokenizer char --out data/shakespeare
    atomrl data prepare books/*.txt --tokenizer gpt2 --val-fraction 0.01 --out data/books
    """
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="UTF-8 text")
    add("--tokenizer", required=True, metavar="char|gpt2|MODEL", help="MODEL: a folder or a hub name")
    add("--val-fraction", type=float, default=0.1, help="fraction of the text, from its end (default 0.1)")
    add("--out", type=Path, required=True, metavar="FOLDER", help="the folder to write")
    return prepare_text


def add_data_serve(parser: argparse.ArgumentParser) -> Run:
    """Serve the documents of a corpus to models that search: an HTTP retriever (docs/guides/retriever.md).

    atomrl data serve wiki-18.jsonl                               # BM25, at http://127.0.0.1:8000/retrieve
    atomrl data serve wiki-18.jsonl --encoder models/e5-base-v2 --device cuda
    """
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="JSONL: id and contents, or title and text")
    parser.add_argument(
        "--index", type=Path, metavar="FOLDER", help="of the index, built once (CORPUS.bm25, CORPUS.dense)"
    )
    parser.add_argument("--topk", type=int, default=3, help="documents per query, unless it sets its own number (3)")
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1: only this machine; 0.0.0.0: the network")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port (8000)")
    parser.add_argument("--language", default="english", help="stop words and stems of BM25; none: neither")
    dense = parser.add_argument_group("dense retrieval")
    dense.add_argument("--encoder", type=Path, metavar="FOLDER", help="a sentence encoder in Hugging Face layout")
    dense.add_argument("--query-prefix", metavar="TEXT", help='"query: " if the folder\'s name has e5, else none')
    dense.add_argument("--passage-prefix", metavar="TEXT", help='likewise "passage: "')
    dense.add_argument(
        "--faiss", default="Flat", metavar="FACTORY", help="the index: Flat (exact), HNSW64, IVF4096,Flat ..."
    )
    dense.add_argument("--device", default="cpu", help="device of the encoder: cpu, cuda")
    return serve_corpus


def prepare_text(arguments: argparse.Namespace) -> int:
    """Tokenize text files into a folder of token ids."""
    for path in arguments.files:
        check_exists(path, "text file")
    from atomrl.data.text import distinct_characters, prepare_tokens
    from atomrl.models.tokenizer import text_tokenizer

    paths, name = arguments.files, arguments.tokenizer
    tokenizer = text_tokenizer(name, distinct_characters(paths) if name == "char" else ())
    meta = prepare_tokens(paths, tokenizer, name, arguments.out, arguments.val_fraction)
    for split, part in (("train", meta.train), ("val", meta.val)):
        print(f"{split}: {part.tokens:,} tokens of {part.characters:,} characters ({part.bytes:,} bytes)")
    print(f"{arguments.out}: {name}, {meta.vocab_size:,} tokens in the vocabulary, {meta.dtype}")
    return 0


def make(arguments: argparse.Namespace) -> int:
    """Write a task's problems."""
    from atomrl.config import parse_overrides
    from atomrl.data.tasks import generate

    extra = parse_overrides(arguments.arguments, section=None)
    rows = generate(arguments.task, arguments.size, arguments.seed, arguments.split, **extra)
    print(f"{write_jsonl(rows, arguments.out)} problems of {arguments.task} ({arguments.split} split): {arguments.out}")
    return 0


def truth_reader(names: str | None) -> Callable[[Problem], str | None]:
    """Return a function that checks a problem's ground truth, and returns an error message or None.

    Args:
        names: rewards that must be able to read the ground truth; None: only check that it is not empty.

    Raises:
        ValueError: a reward is unknown.
    """
    from atomrl.rewards.answers import require_truth
    from atomrl.rewards.table import find_reward, truth_problem

    rewards = names.split(",") if names else []
    for name in rewards:
        find_reward(name)

    def mistake(problem: Problem) -> str | None:
        truth = problem.ground_truth
        row = {**problem.columns, "ground_truth": truth}
        try:
            if not rewards and isinstance(truth, str | float):
                require_truth(truth.rpartition("####")[2] if isinstance(truth, str) and "####" in truth else truth)
        except ValueError as error:
            return str(error)
        return next((message for name in rewards if (message := truth_problem(name, row))), None)

    return mistake


def check(arguments: argparse.Namespace) -> int:
    """Check a file as a run would read it, and print its content; problems go to stderr."""
    check_exists(arguments.file)
    from atomrl.config import DataConfig
    from atomrl.data.checks import check_data
    from atomrl.data.tasks import is_generator

    if is_generator(arguments.file):
        raise ValueError(f"{arguments.file} is a task; data check needs a file (data make writes one)")
    if arguments.more:
        key, _, value = arguments.more[0].partition("=")
        option = "--" + key.removeprefix("data.").replace("_", "-")
        like = f"use {option} {shlex.quote(value)}" if option in FIELDS else "options begin with dashes (--help)"
        raise ValueError(f"data check has no argument {arguments.more[0]!r}; {like}")
    config = DataConfig(
        train=arguments.file,
        prompt_field=arguments.prompt_field,
        answer_field=None if arguments.answer_field == "null" else arguments.answer_field,
        answer_pattern=arguments.answer_pattern,
    )
    report = check_data(arguments.file, config, arguments.against, truth_reader(arguments.reward))
    print(report.text(), file=sys.stdout if report.ok else sys.stderr)
    return 0 if report.ok else 2


def serve_corpus(arguments: argparse.Namespace) -> int:
    """Index a corpus if it has no index yet, and serve searches until Ctrl-C."""
    from atomrl.common.memory import process_memory
    from atomrl.environments.retrieval.index import open_index
    from atomrl.environments.retrieval.server import MAX_TOPK, Service, address_of, serve_documents

    if not 1 <= arguments.topk <= MAX_TOPK:
        raise ValueError(f"--topk must be from 1 to {MAX_TOPK}")
    kind = chosen_kind(arguments)
    folder = arguments.index or arguments.corpus.with_name(f"{arguments.corpus.name}.{kind.name}")
    listener = address_of(arguments.host, arguments.port)  # report an address in use before building an index
    index = open_index(arguments.corpus, folder, kind, lambda line: print(line, flush=True))
    host, port = listener.getsockname()[:2]

    def announce() -> None:
        size = f"{len(index):,} documents, {kind.name}, {process_memory('VmRSS') / 2**20:.0f} MiB of memory"
        print(f"listening at http://{host}:{port}/retrieve: {size}", flush=True)

    serve_documents(Service(index, arguments.topk), listener, announce)
    return 0


def chosen_kind(arguments: argparse.Namespace) -> Kind:
    """Return the kind of index: BM25, or a dense index if there is an encoder."""
    from atomrl.environments.retrieval.bm25 import BM25
    from atomrl.environments.retrieval.dense import Dense

    if arguments.encoder is None:
        return BM25(arguments.language)
    e5 = "e5" in arguments.encoder.resolve().name.lower()
    prefixes = arguments.query_prefix, arguments.passage_prefix
    query, passage = (own if own is not None else usual * e5 for own, usual in zip(prefixes, E5_PREFIXES, strict=True))
    return Dense(arguments.encoder, query, passage, arguments.faiss, arguments.device)
