"""What several ranks cost and save: the time of a step, and the memory of a rank beside the arithmetic.

    python benchmarks/ranks.py                        3M and 53M parameters: one process with two threads, 2 and 4 ranks
    python benchmarks/ranks.py --sizes 3M --steps 3

One process has two threads, a rank has one; so of two ranks, each with a core, `of one` is what ranks cost. A step is
the median of those after the first. `state` are the weights, gradients and moments of the fullest rank, and `formula`
is 16 bytes x parameters / ranks. `waiting` is the share of the step in collective operations, the lateness of other
ranks included.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.multiprocessing as processes
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))

from atomrl.algorithms.table import objective_of
from atomrl.batches import TrainingBatch
from atomrl.config import FSDPConfig, ModelConfig, TrainConfig
from atomrl.models.gpt import new_gpt
from atomrl.models.loading import save_model
from atomrl.training.base import BaseBackend
from atomrl.training.fsdp import FSDPBackend
from atomrl.training.group import Ranks
from atomrl.training.local import LocalBackend
from atomrl.weights.collective import LOOPBACK, open_store

SIZES = {"3M": {"layers": 3, "hidden": 256, "heads": 4}, "53M": {"layers": 12, "hidden": 576, "heads": 9}}
ROWS, TOKENS, PROMPT, VOCABULARY = 64, 168, 40, 4096
LIMIT = timedelta(seconds=600)


def make_batch() -> TrainingBatch:
    """Rows of unequal length, eight to a prompt."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(PROMPT + 16, TOKENS + 1, (ROWS,), generator=generator)
    at = torch.arange(TOKENS)[None]
    mask = (at >= PROMPT) & (at < lengths[:, None])
    tokens = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=generator)
    tokens[:, :PROMPT] = tokens[::8, :PROMPT].repeat_interleave(8, 0)
    return TrainingBatch(
        tokens=tokens * (at < lengths[:, None]),
        loss_mask=mask,
        lengths=lengths,
        prompt_lengths=torch.full((ROWS,), PROMPT),
        group_ids=torch.arange(ROWS) // 8,
        rewards=torch.zeros(ROWS),
        truncated=torch.zeros(ROWS, dtype=torch.bool),
        advantages=torch.randn(ROWS, 1, generator=generator) * mask,
        loss_weights=mask / mask.sum(),
    )


def settings(folder: str) -> dict[str, Any]:
    """What a back end is told."""
    return {
        "model": ModelConfig(path=folder, dtype="float32"),
        "train": TrainConfig(learning_rate=1e-4),
        "algorithm": objective_of("grpo", {}).resolved(max_completion_tokens=TOKENS),  # type: ignore[union-attr, call-arg]
        "total_updates": 100,
    }


def measured(backend: BaseBackend, algorithm: Any, steps: int) -> tuple[float, float, float]:
    """Seconds of a step, bytes of weights, gradients and moments here, and the share of a step that waits."""
    batch, seconds = make_batch(), []
    for _ in range(steps + 1):
        began = time.perf_counter()
        backend.train_step(batch, algorithm)
        seconds.append(time.perf_counter() - began)
    optimizer = backend.trained["policy"]
    state = sum(4 * 2 * here(weight).numel() for weight in optimizer.weights.values())  # and its gradient
    for moments in optimizer.adamw.state.values():
        state += sum(4 * here(moments[name]).numel() for name in ("exp_avg", "exp_avg_sq"))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        began = time.perf_counter()
        backend.train_step(batch, algorithm)
        whole = time.perf_counter() - began
    waiting = sum(event.cpu_time_total for event in trace.key_averages() if event.key.startswith("c10d::")) / 1e6
    return median(seconds[1:]), state, waiting / whole


def here(tensor: Any) -> Tensor:
    """What of a tensor is on this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def rank_main(rank: int, world: int, folder: str, steps: int, port: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=LIMIT)
    ranks, given = Ranks(store, rank, world, torch.device("cpu"), LIMIT.total_seconds()), settings(folder)
    backend = FSDPBackend(FSDPConfig(type="fsdp"), collective=ranks, device="cpu", **given)
    torch.save(measured(backend, given["algorithm"], steps), f"{folder}/rank_{rank}.pt")
    ranks.max(0)
    backend.close()
    ranks.close()


def on_ranks(world: int, folder: str, steps: int) -> tuple[float, float, float]:
    """The slowest and fullest rank's."""
    store, port = open_store(LOOPBACK, LIMIT)
    processes.spawn(rank_main, (world, folder, steps, port), nprocs=world)
    del store
    found = [torch.load(f"{folder}/rank_{rank}.pt", weights_only=True) for rank in range(world)]
    return tuple(max(each) for each in zip(*found, strict=True))  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--steps", type=int, default=5)
    asked = parser.parse_args()
    print(f"{'model':<7}{'':<12}{'step':>9}{'of one':>8}{'waiting':>9}{'state':>11}{'formula':>11}")
    for size in asked.sizes:
        with tempfile.TemporaryDirectory() as folder:
            model = new_gpt(vocab_size=VOCABULARY, **SIZES[size])  # type: ignore[arg-type]
            count = sum(weight.numel() for weight in model.parameters())
            save_model(model, None, folder)
            torch.set_num_threads(2)
            given, one = settings(folder), 0.0
            for world in (1, *asked.ranks):
                if world == 1:
                    step, state, waiting = measured(LocalBackend(**given), given["algorithm"], asked.steps)
                else:
                    step, state, waiting = on_ranks(world, folder, asked.steps)
                one = one or step
                what = "one process" if world == 1 else f"{world} ranks"
                numbers = f"{step:>8.3f}s{step / one:>8.2f}{waiting:>9.0%}"
                print(f"{size:<7}{what:<12}{numbers}{state / 2**20:>8.1f} MB{16 * count / world / 2**20:>8.1f} MB")


if __name__ == "__main__":
    main()
