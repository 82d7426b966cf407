"""Weights from trainer to engines by every way: seconds and bytes beside a plain copy, and whether each one arrives.

    python benchmarks/weight_transfer.py [--ways in_process shared_memory files collective] [--megabytes 1 600]
        [--dtypes float32] [--transfers 50] [--adapters 0 16] [--replicas 2] [--folder DIR] [--out FILE]

A random Qwen2 model of the size that is asked for (of its float32 weights; 1 MB is the quickstart's), the native
engine, in this process or in as many Ray actors on this machine. The weights are others at each transfer, and each is
verified as in a run: the hashes of what every engine then computes with are compared with those of what was sent. With
`--adapters RANK` the first transfer has the weights too, and then adapters travel alone; 0 is whole weights. The first
transfer of a way is not counted in the medians. `copy_` copies the same tensors once in this process; `posix shm`
writes them once into POSIX shared memory, the alternative to Ray's object store. Ways other than `in_process` need Ray.
It ends with 1 where a transfer did not arrive; a hash that differs ends it at once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from itertools import product
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from atomrl.cluster.ray_cluster import RayCluster
from atomrl.config import ClusterConfig, ResourceConfig
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.replicas import ReplicatedEngine
from atomrl.engines.requests import EngineOptions
from atomrl.protocols import Adapter, RolloutEngine, WeightUpdate
from atomrl.weight_sync.transfer import checked_update, compare, dtypes_of, expected_hashes


def make_model(folder: Path, megabytes: float) -> Path:
    """Save a random model whose float32 weights have about this size, with a tokenizer of numbers."""
    from tokenizers import Tokenizer, models

    width, vocabulary = (64, 512) if megabytes < 4 else (256, 4096) if megabytes < 100 else (1024, 4096)
    layer = width * width * 2.5 + 3 * width * 4 * width
    layers = max(1, round((megabytes * 1e6 / 4 - vocabulary * width) / layer))
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(number): number for number in range(vocabulary)}, "0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="2", pad_token="0").save_pretrained(folder)
    return folder


def build(path: str, dtype: torch.dtype) -> NativeEngine:
    """The engine, here or in an actor."""
    options = EngineOptions(dtype, "cpu", max_concurrent_completions=4)
    return NativeEngine.from_pretrained(path, AutoTokenizer.from_pretrained(path), options)


def open_engine(way: str, path: Path, dtype: torch.dtype, replicas: int, folder: str | None) -> RolloutEngine:
    """The engine behind a way."""
    if way == "in_process":
        return build(str(path), dtype)
    where = str(Path(folder or path) / "weights")
    resources = {"rollout": ResourceConfig(num_cpus=0.1)}
    config = ClusterConfig(replicas=replicas, resources=resources, weight_transfer=way, weight_folder=where)
    return ReplicatedEngine(partial(build, str(path), dtype), RayCluster(config, ["rollout"]))


def copied(tensors: list[Tensor], dtype: torch.dtype) -> float:
    """Seconds of a plain copy, the median of five."""
    targets = [torch.zeros_like(tensor, dtype=dtype) for tensor in tensors]
    return median(
        timed(lambda: [target.copy_(t) for target, t in zip(targets, tensors, strict=True)]) for _ in range(5)
    )


def posix_shm(tensors: list[Tensor], dtype: torch.dtype) -> float:
    """Seconds of a write into POSIX shared memory that has been touched before, the median of five."""
    segment = SharedMemory(create=True, size=sum(tensor.numel() for tensor in tensors) * dtype.itemsize)
    parts = torch.frombuffer(segment.buf, dtype=dtype).split([tensor.numel() for tensor in tensors])
    seconds = [
        timed(lambda: [part.view(t.shape).copy_(t) for part, t in zip(parts, tensors, strict=True)]) for _ in range(6)
    ]
    del parts
    segment.unlink()
    return median(seconds[1:])


def timed(action: Any) -> float:
    """Seconds."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def one_way(engine: RolloutEngine, transfers: int, rank: int) -> tuple[dict[str, Any], list[Tensor]]:
    """Transfers of ever other weights, each verified; what was found, and what one transfer sends."""
    generator, shapes = torch.Generator().manual_seed(0), engine.weight_shapes()
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    adapters = {
        name: Adapter(torch.randn(rank, shape[1]), torch.randn(shape[0], rank), 0.5)
        for name, shape in shapes.items()
        if rank and name.endswith("proj.weight")
    }
    base: dict[tuple[str, torch.dtype], int] = {}
    moved, verified, equal = [], [], 0
    for version in range(1, transfers + 2):
        sending = () if base and adapters else tensors.items()
        for tensor in [tensor for _, tensor in sending] + [adapter.b for adapter in adapters.values()]:
            tensor.add_(1e-3)
        update = checked_update(WeightUpdate(version, sending, adapters), shapes)
        moved.append(timed(lambda update=update: engine.update_weights(update)))
        begin = time.perf_counter()
        held = engine.weight_hashes()
        expected = expected_hashes(update.parts(), dtypes_of(held))
        compare(held, base | expected, version)
        verified.append(time.perf_counter() - begin)
        equal += engine.version == version
        base = base or {key: value for key, value in expected.items() if ".lora_" not in key[0]}
    dtypes = {found.name: found.dtype for found in held}
    parts = list(update.parts())
    sent = sum(tensor.numel() * dtypes[name].itemsize for name, tensor in parts)
    row = {
        "transfers": transfers + 1,
        "equal": equal,
        "megabytes": sent / 1e6,
        "move_s": median(moved[1:]),
        "move_worst_s": max(moved[1:]),
        "verify_s": median(verified[1:]),
    }
    return row, [tensor for _, tensor in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = ["in_process", "shared_memory", "files", "collective"]
    parser.add_argument("--ways", nargs="+", default=ways, choices=ways)
    parser.add_argument("--megabytes", nargs="+", type=float, default=[1, 600])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--transfers", type=int, default=50)
    parser.add_argument("--adapters", nargs="+", type=int, default=[0], help="ranks of adapters; 0: whole weights")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--folder", help="of the files' way; beside the model unless given")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for megabytes in args.megabytes:
        with tempfile.TemporaryDirectory() as folder:
            path = make_model(Path(folder), megabytes)
            for name, way, rank in product(args.dtypes, args.ways, args.adapters):
                dtype = getattr(torch, name)
                engine = open_engine(way, path, dtype, args.replicas, args.folder)
                try:
                    row, sent = one_way(engine, args.transfers, rank)
                finally:
                    engine.close()
                    if isinstance(engine, ReplicatedEngine):
                        engine.cluster.close()
                row |= {"way": way, "dtype": name, "adapters": rank}
                row |= {"copy_s": copied(sent, dtype), "posix_shm_s": posix_shm(sent, dtype)}
                rows.append(row)
                what = f"rank {rank}" if rank else "weights"
                print(
                    f"{row['megabytes']:6.1f} MB {what:8} {name:9} {way:13} {row['equal']}/{row['transfers']} equal"
                    f", moved {row['move_s'] * 1e3:7.1f} ms ({row['move_s'] / row['copy_s']:.1f} x copy_, worst "
                    f"{row['move_worst_s'] * 1e3:.0f}), verified "
                    f"{row['verify_s'] * 1e3:7.1f}; copy_ {row['copy_s'] * 1e3:.1f}, "
                    f"posix shm {row['posix_shm_s'] * 1e3:.1f}",
                    flush=True,
                )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(any(row["equal"] != row["transfers"] for row in rows))


if __name__ == "__main__":
    main()
