"""Ulysses (arXiv:2309.14509): ranks that share the rows of a micro-batch.

Each rank has a part of the tokens, and all layers but attention compute that alone. For attention the ranks exchange
tokens for heads: each then has all tokens of its share of the heads, and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atomrl.config import ConfigError
from atomrl.models.kernels import apply


@dataclass(frozen=True, eq=False)
class Share:
    """How the N tokens of a stream lie on the S ranks of a group: one part after the other."""

    group: Any
    sizes: tuple[int, ...]
    """Tokens of each rank."""
    positions: Tensor
    """[N] of all tokens, in their rows."""

    def heads(self, *parts: Tensor) -> list[Tensor]:
        """This rank's tokens of all heads -> all tokens of its heads: [n, heads, D] -> [N, heads / S, D] of each."""
        ranks, own = len(self.sizes), len(parts[0])
        widths = [part.shape[1] // ranks * part.shape[2] for part in parts]
        cut = [part.reshape(own, ranks, width) for part, width in zip(parts, widths, strict=True)]
        flat = torch.cat(cut, dim=2).transpose(0, 1).flatten(0, 1)
        found = apply(_Exchange, flat, [own] * ranks, list(self.sizes), self.group).split(widths, dim=1)
        return [piece.unflatten(1, (-1, part.shape[2])) for piece, part in zip(found, parts, strict=True)]

    def tokens(self, mixed: Tensor) -> Tensor:
        """All tokens of this rank's heads -> its tokens of all heads: [N, W] -> [n, S * W]."""
        ranks, own = len(self.sizes), self.sizes[dist.get_rank(self.group)]
        found = apply(_Exchange, mixed, list(self.sizes), [own] * ranks, self.group)
        return found.view(ranks, own, mixed.shape[1]).transpose(0, 1).flatten(1)


def part_sizes(tokens: int, ranks: int) -> tuple[int, ...]:
    """Tokens of each rank, as equal as can be.

    Example:
        >>> part_sizes(8, 3)
        (3, 3, 2)
    """
    return tuple(tokens // ranks + (rank < tokens % ranks) for rank in range(ranks))


def check_heads(config: Any, ranks: int, path: object) -> None:
    """Raise ConfigError where the heads of a transformers config cannot be spread evenly over so many ranks."""
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks or keys % ranks:
        raise ConfigError(
            f"backend.sequence={ranks} does not divide the {heads} heads and {keys} key-value heads of {path}"
        )


def total(tensor: Tensor, group: Any) -> Tensor:
    """What each rank computed of its tokens, with zeros for those of others, as that of all tokens.

    All ranks make the same loss of it, of which each differentiates what is its own: so the gradient is handed on.

    Args:
        group: None: there are no others.
    """
    return tensor if group is None else apply(_Total, tensor, group)


class _Exchange(torch.autograd.Function):
    """`all_to_all_single`; backward it is the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Sequence[int], receive: Sequence[int], group: Any) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        found = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(found, x.contiguous(), list(receive), list(send), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return apply(_Exchange, grad, ctx.receive, ctx.send, ctx.group), None, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        found = tensor.contiguous().clone()
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
