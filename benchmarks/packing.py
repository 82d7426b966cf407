"""Rows end to end against padded rows: time of a step, and memory.

    python benchmarks/packing.py                            our GPT and a transformers model of 3M, groups of 8 rows
    python benchmarks/packing.py --models mistral --group 1 --spread 4
    python benchmarks/packing.py --device cuda --dtype bfloat16 --size large

Each way is a process of its own, and ways take turns; all have the same weights and rows:

- `padded`: `model.pack_rows=false`; rows of like length are in a micro-batch together.
- `mask`: end to end with transformers' own mask of blocks, over all pairs of tokens.
- `apart`: end to end, attention by rows, and nothing shared.
- `shared`: the same with a group's prompt once: `model.pack_rows=true`.

A step is loss, gradients and AdamW of GRPO. `tokens/s` counts what the rows have, whatever is computed. Completions
have 16 tokens and an exponential number more, `--spread` prompts long on average, up to four times that. `memory` is
what the process grew by at its peak (CPU), or had allocated (GPU).
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config

sys.path.insert(0, str(Path(__file__).parents[1]))

from atomrl.algorithms.grpo import GRPO
from atomrl.backends.local import LocalBackend
from atomrl.batches import TrainingBatch
from atomrl.config import ModelConfig, TrainConfig
from atomrl.models import stream as shared_prefix
from atomrl.models import transformers_model

CONFIGS = {"gpt": Qwen2Config, "mistral": MistralConfig}
SIZES = {"small": (256, 4, 4, 2, 576), "medium": (768, 12, 12, 4, 2048), "large": (2048, 24, 16, 8, 5632)}
WAYS = {"gpt": ("padded", "apart", "shared"), "mistral": ("padded", "mask", "apart", "shared")}
VOCABULARY = 4096


def make_batch(rows: int, group: int, prompt: int, spread: float) -> TrainingBatch:
    """Groups that share a prompt, with completions of unequal length."""
    generator = torch.Generator().manual_seed(1)
    more = torch.empty(rows).exponential_(1 / (spread * prompt), generator=generator)
    lengths = prompt + 16 + more.clamp(max=4 * spread * prompt).long()
    width = int(lengths.max())
    at = torch.arange(width)
    mask = (at >= prompt) & (at < lengths[:, None])
    groups = torch.arange(rows) // group
    tokens = torch.randint(3, VOCABULARY, (rows, width), generator=generator)
    tokens[:, :prompt] = tokens[groups * group, :prompt]
    advantages = torch.randn(rows, generator=generator)
    return TrainingBatch(
        tokens=tokens,
        loss_mask=mask,
        lengths=lengths,
        prompt_lengths=torch.full((rows,), prompt),
        group_ids=groups,
        rewards=advantages,
        truncated=torch.zeros(rows, dtype=torch.bool),
        advantages=advantages[:, None] * mask,
        loss_weights=mask / mask.sum(),
    )


def measure(way: str, folder: str, options: argparse.Namespace, answers: Any) -> None:
    """Put the seconds of each step, the norm of its gradient and the memory into the queue."""
    torch.set_num_threads(options.threads)
    model = ModelConfig(path=folder, dtype=options.dtype, device=options.device, pack_rows=way != "padded")
    train = TrainConfig(learning_rate=1e-6, tokens_per_micro_batch=options.tokens_per_micro_batch)
    if way in ("mask", "apart"):
        shared_prefix.LEAST_SAVING = 2.0
    if way == "mask":
        transformers_model.streaming = lambda stream: nullcontext()  # type: ignore[assignment]
    batch = make_batch(options.rows, options.group, options.prompt, options.spread)
    backend = LocalBackend(model, train, GRPO, total_updates=9, device=options.device)
    on_gpu, before, times = options.device != "cpu", peak(), []
    for _ in range(options.steps + 1):
        start = time.perf_counter(), time.process_time()
        metrics = backend.train_step(batch, GRPO)
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    grown = torch.cuda.max_memory_allocated() if on_gpu else peak() - before
    answers.put((times[1:], float(metrics["actor/grad_norm"].value), grown))


def peak() -> int:
    """The most memory that this process had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def save(name: str, size: str, folder: Path) -> str:
    hidden, layers, heads, kv_heads, inner = SIZES[size]
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    shape |= {"num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name](**shape, sliding_window=None)).save_pretrained(folder / name)
    return str(folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=40)
    parser.add_argument("--spread", type=float, default=1.5)
    parser.add_argument("--tokens-per-micro-batch", type=int, default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    batch, context = make_batch(options.rows, options.group, options.prompt, options.spread), multiprocessing
    tokens = int(batch.lengths.sum())
    print(f"{options.rows} rows, {tokens} tokens, {batch.tokens.numel()} in one padded rectangle; {options}")
    print(
        f"{'model':9}{'way':9}{'s (least)':>16}{'CPU s (least)':>16}{'tokens/s':>10}{'memory MB':>11}{'gradient':>12}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            path, found = save(name, options.size, Path(folder)), {way: ([], [], []) for way in WAYS[name]}
            for _ in range(options.rounds):
                for way, results in found.items():
                    answers = context.get_context("spawn").SimpleQueue()
                    child = context.get_context("spawn").Process(target=measure, args=(way, path, options, answers))
                    child.start()
                    child.join()
                    for part, value in zip(results, answers.get(), strict=True):
                        part.append(value)
            for way, (runs, norms, memory) in found.items():
                seconds, cpu = zip(*(times for run in runs for times in run), strict=True)
                middle, of_cpu = (f"{median(part):.3f} ({min(part):.3f})" for part in (seconds, cpu))
                print(
                    f"{name:9}{way:9}{middle:>16}{of_cpu:>16}{tokens / median(seconds):>10.0f}"
                    f"{max(memory) / 1e6:>11.0f}{norms[0]:>12.7g}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
