"""Operators of one layer's forward and backward pass, as a GPU would launch them, and the bytes that they move.

    python benchmarks/layer_launches.py                    # one layer of Qwen2.5-1.5B's shape, adapters of rank 32
    python benchmarks/layer_launches.py --tokens 8192 --rank 0

Runs on meta tensors: no GPU, no weights, no time. A view moves nothing and is not counted. Bytes are those of each
operator's inputs and outputs. Operators that a compiler would fuse count one by one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from atomrl.config import LoraConfig
from atomrl.models.attention import row_attention
from atomrl.models.gpt import GPT
from atomrl.models.known_shapes import planning_shape
from atomrl.models.lora import add_adapters

PRODUCTS = {"mm", "addmm", "addmm_", "linear"}
"""Names of matrix products. Attention is not counted: on meta tensors it is PyTorch's, on a GPU one kernel."""


class Launches(TorchDispatchMode):
    """Counts operators that compute or copy, by name, with their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.wide_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        tensors = [part for part in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
        outputs = [part for part in torch.utils._pytree.tree_leaves(result) if isinstance(part, torch.Tensor)]
        if func.is_view or name.startswith(("empty", "new_empty", "detach", "_unsafe_view", "split", "unbind")):
            return result
        self.counts[name] += 1
        self.bytes[name] += sum(each.numel() * each.itemsize for each in (*tensors, *outputs))
        self.wide_products += name in PRODUCTS and tensors[0].dtype == torch.float32
        return result


def count(model_name: str, tokens: int, row: int, rank: int) -> Launches:
    """One layer's passes over `tokens` tokens in rows of `row`."""
    shape = planning_shape(model_name, False)
    shape.num_hidden_layers = 1
    with torch.device("meta"):
        model = GPT(shape).to(torch.bfloat16)
        if rank:
            model.requires_grad_(False)
            add_adapters(model, LoraConfig(rank=rank, alpha=2.0 * rank), "base")
        layer = model.model.layers[0]
        x = torch.empty(tokens // row, row, shape.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        cos, sin = (torch.empty(row, layer.self_attn.size // 2) for _ in range(2))
        with Launches() as found:
            attend = partial(row_attention, tables=(cos, sin), kv_heads=layer.self_attn.kv_heads)
            layer(x, attend).sum().backward()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-1.5B")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--row", type=int, default=512)
    parser.add_argument("--rank", type=int, default=32, help="of the adapters; 0: all weights are trained")
    arguments = parser.parse_args()
    found = count(arguments.model, arguments.tokens, arguments.row, arguments.rank)
    print(f"{sum(found.counts.values())} operators, {sum(found.bytes.values()) / 1e9:.2f} GB moved, ", end="")
    print(f"{found.wide_products} products in float32")
    for name, number in found.counts.most_common(12):
        print(f"  {number:4d} {name:<32} {found.bytes[name] / 1e9:7.2f} GB")


if __name__ == "__main__":
    main()
