"""Costs and savings of several ranks: the time of a step, and the peak memory of a rank beside the estimate.

    python benchmarks/ranks.py                          3M and 53M parameters: one process, 2 and 4 ranks
    python benchmarks/ranks.py --sizes 3M --steps 3 --ranks 2
    python benchmarks/ranks.py --device cuda --sizes 53M --ranks 2       ranks with a GPU each, and NCCL

**Time.** One process has two threads, a rank has one, so of two ranks `of one` is what ranks cost. All are there at the
same time and take a step in turns: `step` is the median of those after the first, `of one` the median of its ratios to
the one process in the same turn. `waits` is the share of a step in which the slowest rank's thread does not compute:
exchanges that nothing hides, and the lateness of other ranks. `2 sharing` are two ranks that share rows
(`backend.sequence=2`), `2 tensor` two that share each layer's matrices (`backend.tensor=2`).

**Memory.** Of a rank in processes of their own, in two updates of several micro-batches, the most memory at once beyond
what was there before the model was loaded: `peak`, of the fullest rank. `loading` is the most until the model is in its
shards, `state` what its weights, gradients and moments take. `formula` is what a dry run says of the same
(`trainer/memory.py`), without what an engine takes; `off` is the distance of the peak from it. On a CPU it is glibc
that
counts, every piece of 16 kB and more, whichever thread takes or frees it: threads of gloo free tensors of collective
operations, which torch's profiler does not see and takes for kept. On a GPU torch's allocator counts.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

sys.path.insert(0, str(Path(__file__).parents[1]))

from atomrl.algorithms import objective_of
from atomrl.backends.base import BaseBackend
from atomrl.backends.fsdp import FSDPBackend
from atomrl.backends.group import Ranks
from atomrl.backends.local import LocalBackend
from atomrl.backends.ranks import rank_device
from atomrl.batches import TrainingBatch
from atomrl.config import FSDPConfig, ModelConfig, RunConfig, TrainConfig, load_config
from atomrl.models.gpt import new_gpt
from atomrl.models.loading import save_model
from atomrl.trainer.memory import memory_estimate, peak_of
from atomrl.weight_sync.broadcast import LOOPBACK, open_store

SIZES = {"3M": {"layers": 3, "hidden": 256, "heads": 4}, "53M": {"layers": 12, "hidden": 576, "heads": 8}}
ROWS, TOKENS, PROMPT, VOCABULARY = 64, 168, 40, 4096
BUDGET = 8 * TOKENS
"""Tokens of a micro-batch where memory is measured."""
LIMIT = timedelta(seconds=600)
OURS = (
    "trainer weights", "gradients", "optimizer", "activations", "log-prob chunk", "backward pass", "fresh gradients",
    "gathered", "rounded",
)  # fmt: skip
"""Parts of a dry run's memory that are the trainer's."""


class Variant(NamedTuple):
    """Number of training processes; one without a group is the back end of one process."""

    world: int = 1
    sequence: int = 1
    tensor: int = 1

    def __str__(self) -> str:
        if self.world == 1:
            return "one process"
        return f"{self.world} {'sharing' if self.sequence > 1 else 'tensor' if self.tensor > 1 else 'ranks'}"

    @property
    def settings(self) -> FSDPConfig:
        return FSDPConfig(type="fsdp", sequence=self.sequence, tensor=self.tensor)


def make_batch(rows: int = ROWS, full: bool = False) -> TrainingBatch:
    """Rows of unequal length, eight to a prompt; or `full` ones, of which every token is trained on."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(PROMPT + 16, TOKENS + 1, (rows,), generator=generator)
    lengths, prompt = (torch.full_like(lengths, TOKENS), 1) if full else (lengths, PROMPT)
    at = torch.arange(TOKENS)[None]
    mask = (at >= prompt) & (at < lengths[:, None])
    tokens = torch.randint(3, VOCABULARY, (rows, TOKENS), generator=generator)
    if not full:
        tokens[:, :PROMPT] = tokens[::8, :PROMPT].repeat_interleave(8, 0)
    return TrainingBatch(
        tokens=tokens * (at < lengths[:, None]),
        loss_mask=mask,
        lengths=lengths,
        prompt_lengths=torch.full((rows,), prompt),
        group_ids=torch.arange(rows) if full else torch.arange(rows) // 8,
        rewards=torch.zeros(rows),
        truncated=torch.zeros(rows, dtype=torch.bool),
        advantages=torch.randn(rows, 1, generator=generator) * mask,
        loss_weights=mask / mask.sum(),
    )


def given(folder: str, device: str, **train: Any) -> dict[str, Any]:
    """Return the arguments of a back end."""
    return {
        "model": ModelConfig(path=folder, dtype="float32" if device == "cpu" else "bfloat16"),
        "train": TrainConfig(learning_rate=1e-4, **train),
        "algorithm": objective_of({"name": "grpo"}).resolved(max_completion_tokens=TOKENS),  # type: ignore[union-attr, call-arg]
        "total_updates": 100,
    }


def formula(folder: str, variant: Variant, device: str) -> int:
    """Bytes of a rank's trainer, as a dry run counts them."""
    config: RunConfig = load_config(
        {
            "run_name": "r",
            "model": {"path": folder, "dtype": "float32" if device == "cpu" else "bfloat16"},
            "data": {"train": "arithmetic", "max_prompt_tokens": 1},
            "rollout": {"max_completion_tokens": TOKENS - 1},
            "train": {"tokens_per_micro_batch": BUDGET},
            "backend": variant.settings if variant.world > 1 else None,
        }
    )
    algorithm = given(folder, device)["algorithm"]
    parts = memory_estimate(config, algorithm, variant.world)
    return peak_of({name: size for name, size in parts.items() if name.startswith(OURS)})


def here(tensor: Any) -> Tensor:
    """Return the part of a tensor on this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def state_of(backend: BaseBackend) -> tuple[int, int]:
    """Bytes of weights and of moments here."""
    optimizer = backend.trained["policy"]
    weights = sum(here(weight).nbytes for weight in optimizer.weights.values())
    states = optimizer.adamw.state.values()
    return weights, sum(here(state[name]).nbytes for state in states for name in ("exp_avg", "exp_avg_sq"))


@contextmanager
def opened(variant: Variant, rank: int, folder: str, port: int, device: str, **train: Any) -> Iterator[BaseBackend]:
    """A rank's back end."""
    torch.set_num_threads(2 if variant.world == 1 else 1)
    own, settings = rank_device(device, rank), given(folder, device, **train)
    if variant.world == 1:
        yield LocalBackend(device=own, **settings)
        return
    store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=LIMIT)
    ranks = Ranks(store, rank, variant.world, own, LIMIT.total_seconds())
    backend = FSDPBackend(variant.settings, collective=ranks, device=own, **settings)
    yield backend
    ranks.max(0)
    backend.close()
    ranks.close()


def timed(at: Connection, variant: Variant, rank: int, folder: str, port: int, device: str) -> None:
    """A process that makes a step when it is told to, and says how long it took, and computed."""
    with opened(variant, rank, folder, port, device) as backend:
        batch, algorithm = make_batch(), given(folder, device)["algorithm"]
        at.send(None)
        while at.recv():
            began, computing = time.perf_counter(), time.thread_time()
            backend.train_step(batch, algorithm)
            if backend.device.type == "cuda":
                torch.cuda.synchronize()
            at.send((time.perf_counter() - began, time.thread_time() - computing))


class MallocInfo(ctypes.Structure):
    """The result of `mallinfo2`."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


class Counted:
    """Bytes that this process has from glibc's malloc in pieces of 16 kB and more, now and at most so far."""

    def __init__(self) -> None:
        self.libc: Any = ctypes.CDLL("libc.so.6")
        self.libc.mallopt(-3, 2**14)  # M_MMAP_THRESHOLD: larger pieces are mapped one by one, and counted
        self.libc.mallinfo2.restype = MallocInfo

    def now(self) -> int:
        return int(self.libc.mallinfo2().numbers[4])  # hblkhd

    def most(self) -> int:
        """The last line of what `malloc_stats` writes to stderr; nothing else says it."""
        with tempfile.TemporaryFile() as file:
            stderr = os.dup(2)
            os.dup2(file.fileno(), 2)
            self.libc.malloc_stats()
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            return int(file.read().split()[-1])


def weighed(at: Connection, variant: Variant, rank: int, folder: str, port: int, device: str) -> None:
    """A process that says its peak, its peak while it loads, and its state, in bytes."""
    counted = Counted()
    before = counted.now()
    with opened(variant, rank, folder, port, device, tokens_per_micro_batch=BUDGET) as backend:
        loading = counted.most() - before
        algorithm = given(folder, device)["algorithm"]
        batch = make_batch(2 * BUDGET // TOKENS * variant.world, full=True)  # two micro-batches of each rank
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            backend.train_step(batch, algorithm)
        weights, moments = state_of(backend)
        # At rest weights and moments are there, and what libraries keep for themselves.
        peak = weights + moments + counted.most() - counted.now()
        if device != "cpu":
            peak = torch.cuda.max_memory_allocated()
        at.send((peak, loading, 2 * weights + moments))


class Group:
    """The processes of a variant."""

    def __init__(self, work: Any, variant: Variant, folder: str, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.variant, self.ends = variant, []
        self.store, port = open_store(LOOPBACK, LIMIT)
        self.processes = []
        for rank in range(variant.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, variant, rank, folder, port, device), daemon=True)
            process.start()
            theirs.close()
            self.ends.append(ours)
            self.processes.append(process)

    def answers(self) -> list[Any]:
        """Return the next answer of each process."""
        return [end.recv() for end in self.ends]

    def step(self) -> tuple[float, float]:
        """Seconds of a step of the slowest, and of them those in which it computed."""
        for end in self.ends:
            end.send(True)
        return max(self.answers())

    def close(self) -> None:
        for end in self.ends:
            end.send(False)
        for process in self.processes:
            process.join(60)


def times(folder: str, variants: list[Variant], steps: int, device: str) -> list[str]:
    """A cell of each variant: step, of one, waits."""
    groups = [Group(timed, variant, folder, device) for variant in variants]
    for group in groups:
        group.answers()
        group.step()
    turns = [[group.step() for group in groups] for _ in range(steps)]
    for group in groups:
        group.close()
    cells = []
    for index, variant in enumerate(variants):
        of_one = median(turn[index][0] / turn[0][0] for turn in turns)
        waits = median(1 - turn[index][1] / turn[index][0] for turn in turns)
        step = median(turn[index][0] for turn in turns)
        cells.append(f"{step:>8.3f}s{of_one:>8.2f}" + (f"{waits:>8.0%}" if variant.world > 1 else f"{'':>8}"))
    return cells


def memory(folder: str, variants: list[Variant], device: str) -> list[str]:
    """A cell of each variant, one after the other: peak, formula, off, loading, state."""
    cells = []
    for variant in variants:
        group = Group(weighed, variant, folder, device)
        peak, loading, state = (max(each) for each in zip(*group.answers(), strict=True))
        for process in group.processes:
            process.join(60)
        expected = formula(folder, variant, device)
        sizes = [f"{size / 2**20:>9.1f}" for size in (peak, expected, loading, state)]
        cells.append(f"{sizes[0]}{sizes[1]}{peak / expected - 1:>+8.1%}{sizes[2]}{sizes[3]}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    asked = parser.parse_args()
    variants = [Variant(), *map(Variant, asked.ranks), Variant(2, sequence=2), Variant(2, tensor=2)]
    print(f"{'model':<7}{'':<12}{'step':>9}{'of one':>8}{'waits':>8}  MiB:", end="")
    print(f"{'peak':>5}{'formula':>9}{'off':>8}{'loading':>9}{'state':>9}")
    for size in asked.sizes:
        with tempfile.TemporaryDirectory() as folder:
            save_model(new_gpt(vocab_size=VOCABULARY, **SIZES[size]), None, folder)  # type: ignore[arg-type]
            rows = zip(
                variants,
                times(folder, variants, asked.steps, asked.device),
                memory(folder, variants, asked.device),
                strict=True,
            )
            for variant, seconds, sizes in rows:
                print(f"{size:<7}{variant!s:<12}{seconds}{sizes}", flush=True)


if __name__ == "__main__":
    main()
