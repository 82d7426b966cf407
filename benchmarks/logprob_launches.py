"""Operators and bytes of a GPU's log-probs over a large vocabulary, forward and backward: whole, eager, compiled.

    python benchmarks/logprob_launches.py [--tokens 4096] [--hidden 1536] [--vocabulary 151936] [--trained] [--entropy]

Runs on meta tensors: no GPU, no weights, no time. Bytes are those of each operator's inputs and outputs. A compiled
function counts as one operator that writes its outputs once; of the forward pass it reads the logits three times
(largest, sum of exponentials, entropy). `whole` is `log_softmax` of all logits in float32; `eager` is chunks by
PyTorch's operators; `compiled` is what AtomRL does on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from layer_launches import Launches

from atomrl.atoms import logprobs


class Counted(Launches):
    """With functions that count as one operator each, and the largest matrix that is wider than `width`."""

    largest = 0
    inside = False
    width = 100_000

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {})) if self.inside else super().__torch_dispatch__(func, types, args, kwargs)
        if not self.inside:
            made = [part for part in tree_leaves(result) if isinstance(part, Tensor) and part.dim() == 2]
            logits = [part.nbytes for part in made if part.shape[1] > part.shape[0] and part.shape[1] > self.width]
            self.largest = max([self.largest, *(logits if not func.is_view else [])])
        return result

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        reads = 3 if function is logprobs.chunk_logprobs else 1

        def call(*arguments: Any) -> Any:
            self.inside = True
            try:
                result = function(*arguments)
            finally:
                self.inside = False
            self.counts[function.__name__] += 1
            self.bytes[function.__name__] += reads * _bytes(arguments) + _bytes(result)
            return result

        return call


def _bytes(tensors: Any) -> int:
    return sum(part.nbytes for part in tree_leaves(tensors) if isinstance(part, Tensor))


def whole(hidden: Tensor, head: Tensor, tokens: Tensor, entropy: bool) -> tuple[Tensor, ...]:
    logs = torch.log_softmax((hidden @ head.to(hidden.dtype).T).float(), dim=-1)
    picked = logs.gather(1, tokens[:, None])[:, 0]
    return (picked, -(logs.exp() * logs).sum(1)) if entropy else (picked,)


def fused(hidden: Tensor, head: Tensor, tokens: Tensor, entropy: bool, elements: int) -> tuple[Tensor, ...]:
    found = logprobs.fused_token_logprobs(hidden, head, tokens, 1.0, max(16, elements // len(head)), entropy)
    return tuple(part for part in found if part is not None)


def count(way: str, arguments: argparse.Namespace) -> Counted:
    """Count a forward and a backward pass."""
    dtype = torch.float32 if arguments.trained else torch.bfloat16
    with torch.device("meta"):
        hidden = torch.empty(arguments.tokens, arguments.hidden, dtype=torch.bfloat16, requires_grad=True)
        head = torch.empty(arguments.vocabulary, arguments.hidden, dtype=dtype, requires_grad=arguments.trained)
        tokens = torch.empty(arguments.tokens, dtype=torch.long)
    given = hidden, head, tokens, arguments.entropy
    with Counted() as found, patch.object(logprobs, "head_logits", product):
        if way == "whole":
            sum(part.sum() for part in whole(*given)).backward()
        elif way == "eager":
            sum(part.sum() for part in fused(*given, logprobs.CHUNK_ELEMENTS)).backward()
        else:
            functions = patch.object(logprobs, "gpu_function", lambda function, tensor: found.compiled(function))
            with functions, patch.object(logprobs, "add_outer_products", add):
                sum(part.sum() for part in fused(*given, logprobs.CHUNK_ELEMENTS_ON_GPU)).backward()
    return found


def product(hidden: Tensor, head: Tensor) -> Tensor:
    """As on a GPU: bfloat16 in, float32 out."""
    return torch.mm(hidden, head.to(hidden.dtype).T, out_dtype=torch.float32)


def add(total: Tensor, delta: Tensor, hidden: Tensor) -> None:
    """As on a GPU."""
    if total.dtype == hidden.dtype:
        total.addmm_(delta.T, hidden)
    else:
        torch.addmm(total, delta.T, hidden, out_dtype=torch.float32, out=total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--trained", action="store_true", help="the output matrix is trained, in float32")
    parser.add_argument("--entropy", action="store_true")
    arguments = parser.parse_args()
    for way in ("whole", "eager", "compiled"):
        found = count(way, arguments)
        print(
            f"{way:9} {sum(found.counts.values()):4d} operators  {sum(found.bytes.values()) / 1e9:7.1f} GB moved  "
            f"logits of {found.largest / 2**20:8.0f} MiB at once"
        )


if __name__ == "__main__":
    main()
