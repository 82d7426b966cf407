"""Sequence parallelism by Ulysses (arXiv:2309.14509).

Each rank has a part of the tokens. For attention, an all-to-all exchanges tokens for heads: each rank then has all
tokens of some heads. A second one exchanges back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atomrl.config import ConfigError
from atomrl.models.kernel_switches import apply
from atomrl.models.shapes import size


@dataclass(frozen=True, eq=False)
class Share:
    """Distribution of the N tokens of a stream over the S ranks of a group, in consecutive parts."""

    group: Any
    sizes: tuple[int, ...]
    """Number of tokens of each rank."""
    positions: Tensor
    """[N] positions of all tokens in their rows."""

    def heads(self, *parts: Tensor) -> list[Tensor]:
        """Exchange tokens for heads: [n, heads, D] -> [N, heads / S, D] of each part."""
        ranks, own = len(self.sizes), len(parts[0])
        widths = [part.shape[1] // ranks * part.shape[2] for part in parts]
        cut = [part.reshape(own, ranks, width) for part, width in zip(parts, widths, strict=True)]
        flat = torch.cat(cut, dim=2).transpose(0, 1).flatten(0, 1)
        pieces = apply(_Exchange, flat, [own] * ranks, list(self.sizes), self.group).split(widths, dim=1)
        return [piece.unflatten(1, (-1, part.shape[2])) for piece, part in zip(pieces, parts, strict=True)]

    def tokens(self, mixed: Tensor) -> Tensor:
        """Exchange heads for tokens: [N, W] -> [n, S * W]; the inverse of `heads`."""
        ranks, own = len(self.sizes), self.sizes[dist.get_rank(self.group)]
        received = apply(_Exchange, mixed, list(self.sizes), [own] * ranks, self.group)
        return received.view(ranks, own, mixed.shape[1]).transpose(0, 1).flatten(1)


def part_sizes(tokens: int, ranks: int) -> tuple[int, ...]:
    """Split tokens over ranks as evenly as possible.

    Example:
        >>> part_sizes(8, 3)
        (3, 3, 2)
    """
    return tuple(tokens // ranks + (rank < tokens % ranks) for rank in range(ranks))


def check_heads(config: Any, ranks: int, path: object) -> None:
    """Raise ConfigError if `ranks` does not divide the heads of a transformers config."""
    heads = size(config, "num_attention_heads")
    keys = size(config, "num_key_value_heads") or heads
    if heads % ranks or keys % ranks:
        raise ConfigError(
            f"backend.sequence={ranks} does not divide the {heads} heads and {keys} key-value heads of {path}"
        )


def total(tensor: Tensor, group: Any) -> Tensor:
    """Sum over ranks what each computed for its tokens, with zeros for those of others.

    Backward is the identity: all ranks compute the same loss, and each differentiates its own part.

    Args:
        group: process group; None: return the tensor.
    """
    return tensor if group is None else apply(_Total, tensor, group)


class _Exchange(torch.autograd.Function):
    """`all_to_all_single` with gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Sequence[int], receive: Sequence[int], group: Any) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        received = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(received, x.contiguous(), list(receive), list(send), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return apply(_Exchange, grad, ctx.receive, ctx.send, ctx.group), None, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        summed = tensor.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
