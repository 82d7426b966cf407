"""CPU time and peak memory of commands that read large inputs: prompts for RL, and the metrics of long runs.

    python benchmarks/large_inputs.py rows 20000 200000             JSONL: `atomrl train --dry-run`
    python benchmarks/large_inputs.py rows 2000000 --parquet        the same rows as a Parquet file of 1 GB
    python benchmarks/large_inputs.py steps 100000                  three runs: doctor, compare, compare --plot

A row has a prompt of about 450 characters, which are 100 tokens of the tokenizer made here. A step has 41 metrics.
Seconds are user and system time together, of the command and its children; another revision is measured with
`PYTHONPATH` set to its work tree.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, make_tiny_model

WORDS = ["x", "y", "the", "of", "is", "if", "then", "what", "how", "many", "each", "total", "sum", "value", "apples"]
METRICS = ("critic/score/mean", "critic/score/min", "critic/score/max", "train/accuracy", "actor/entropy")
COLUMNS = 41


def rows(count: int) -> Iterator[dict[str, object]]:
    """Yield rows of prompts."""
    rng = random.Random(0)
    for number in range(count):
        yield {
            "id": number, "prompt": " ".join(rng.choices(WORDS, k=90)) + f" {number}?", "level": number % 5,
            "ground_truth": str(rng.randrange(10**6)), "data_source": "made",
        }  # fmt: skip


def write_rows(folder: Path, count: int, parquet: bool) -> Path:
    """Write rows to a file, in batches."""
    path = folder / f"{count}.{'parquet' if parquet else 'jsonl'}"
    if not parquet:
        with path.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows(count))
        return path
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    schema = pyarrow.Table.from_pylist([*rows(1)]).schema
    with ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        batch = []
        for row in rows(count):
            batch.append(row)
            if len(batch) == 10_000 or row["id"] == count - 1:
                writer.write_table(pyarrow.Table.from_pylist(batch, schema))
                batch = []
    return path


def write_model(folder: Path) -> Path:
    """Write a tiny model with a byte-level BPE of a few thousand tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator((str(row["prompt"]) for row in rows(2000)), trainer)
    make_tiny_model(folder, "llama", vocab_size=tokenizer.get_vocab_size())
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL_TOKENS[0], eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)
    return folder


def write_run(folder: Path, steps: int, seed: int) -> Path:
    """Write the folder of a finished run."""
    folder.mkdir()
    rng = random.Random(seed)
    names = [*METRICS, "timing_s/step", *(f"group/metric_{number}" for number in range(COLUMNS - len(METRICS) - 1))]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"step": step} | {name: rng.random() for name in names}) + "\n")
    (folder / "config.yaml").write_text(f"seed: {seed}\ntrain: {{steps: {steps}}}\n")
    (folder / "summary.json").write_text('{"finished": true}')
    return folder


def measure(name: str, *arguments: object) -> None:
    """Run a command in a process of its own and print its time and peak memory."""
    command = [sys.executable, "-m", "atomrl.cli.main", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):  # 1: the doctor found something
        sys.exit(said)
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**30
    print(f"{name:<40}{used.ru_utime + used.ru_stime:8.1f} s{peak:8.2f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("rows", "steps"))
    parser.add_argument("counts", type=int, nargs="+", metavar="N")
    parser.add_argument("--parquet", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for count in options.counts:
            if options.kind == "steps":
                runs = [write_run(folder / f"{count}-{seed}", count, seed) for seed in range(3)]
                measure(f"doctor, {count} steps", "doctor", runs[0])
                measure(f"compare, three of {count} steps", "compare", *runs)
                measure(f"compare --plot, three of {count} steps", "compare", *runs, "--plot", folder / "curves.png")
                continue
            model = write_model(folder / f"model-{count}")
            data = write_rows(folder, count, options.parquet)
            config = folder / "config.yaml"
            config.write_text(
                f"run_name: large\nmodel: {{path: {model}, dtype: float32}}\ndata: {{train: {data}}}\n"
                "algorithm: {name: grpo}\nreward: {functions: [{function: exact_match}]}\n"
                "rollout: {prompts_per_step: 2, completions_per_prompt: 2, max_completion_tokens: 8}\n"
                "train: {steps: 1}\n"
            )
            measure(f"train --dry-run, {count} rows", "train", config, "--dry-run")


if __name__ == "__main__":
    main()
