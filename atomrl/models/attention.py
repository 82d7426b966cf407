"""Causal attention with rotary positions and grouped queries, over padded rows and over packed streams.

`stream.make_stream` lays a packed micro-batch out on the CPU; `attend` is its attention.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from atomrl.models import kernel_library as cpp

NAMES_GROUPS = TorchVersion(torch.__version__) >= "2.12"
"""True if `varlen_attn` has the parameter for grouped queries. In torch 2.11 it does not; its FlashAttention supports
fewer key heads without it, forward and backward."""
Tables = tuple[Tensor, Tensor]
"""Cosine and sine, [positions, D/2] float32."""


@dataclass(frozen=True, eq=False)
class Block:
    """Consecutive tokens of a stream: R sequences of at most C tokens, end to end."""

    start: int
    stop: int
    rows: int
    length: int
    slots: Tensor
    """[stop - start] index of each token in the padded [R * C]."""
    even: bool
    """True if every sequence has C tokens."""
    positions: Tensor
    """[stop - start] position of each token in its row."""
    prompts: Tensor | None
    """[R] index of each sequence's shared prompt in the first block; None: no shared prompts."""
    before: int
    """P: length of the longest shared prompt; 0 without any."""
    seen: Tensor
    """[R] length of the shared prompt of each sequence."""

    def spread(self, x: Tensor) -> Tensor:
        """Pad the block's part of a stream [N, ...] to [R, C, ...] with zeros."""
        x = x[self.start : self.stop]
        if not self.even:
            x = x.new_zeros(self.rows * self.length, *x.shape[1:]).index_copy(0, self.slots, x)
        return x.view(self.rows, self.length, *x.shape[1:])

    def collect(self, x: Tensor) -> Tensor:
        """Remove the padding of [R, C, ...]; the inverse of `spread`."""
        x = x.flatten(0, 1)
        return x if self.even else x.index_select(0, self.slots)

    @cached_property
    def _seen(self) -> Tensor:
        """`seen` as [R, 1], or [1, 1] if it is the same for all rows."""
        return (self.seen[:1] if bool((self.seen == self.seen[0]).all()) else self.seen)[:, None]

    @cached_property
    def angles(self) -> Tensor:
        """Positions [1 or R, C] of the padded tokens, for rotary embeddings."""
        return self._seen + torch.arange(self.length)

    @cached_property
    def mask(self) -> Tensor:
        """Additive mask [1 or R, C, P + C], 0 or -inf, over the P tokens of the prompt and the C of the sequence."""
        own = torch.full((self.length, self.length), -torch.inf).triu(1)
        hidden = torch.arange(self.before) >= self._seen
        prompt = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[:, None]
        return torch.cat([prompt.expand(-1, self.length, -1), own.expand(len(hidden), -1, -1)], dim=2)


@dataclass(frozen=True, eq=False)
class Spans:
    """Arguments of variable-length attention (`varlen_attn`) for a stream of S sequences."""

    queries: Tensor
    """[S + 1] int32 cumulative lengths of the queries."""
    keys: Tensor
    """[S + 1] int32 cumulative lengths of the keys."""
    order: Tensor | None
    """[M] tokens of the stream that are the keys: each sequence's prompt, then its own; None: all in order."""
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, blocks: tuple[Block, ...]) -> "Spans":
        """Create the spans of a stream's blocks; shared prompts are in the first block.

        Example:
            >>> from atomrl.models.stream import row_stream
            >>> Spans.of(row_stream(2, 3).blocks).queries
            tensor([0, 3, 6], dtype=torch.int32)
        """
        own: list[tuple[int, int]] = []
        order: list[Tensor] = []
        for block in blocks:
            ends = torch.bincount(block.slots // block.length, minlength=block.rows).cumsum(0) + block.start
            pieces = list(zip([block.start, *ends[:-1].tolist()], ends.tolist(), strict=True))
            for number, piece in enumerate(pieces):
                before = [] if block.prompts is None else [torch.arange(*own[int(block.prompts[number])])]
                order.append(torch.cat([*before, torch.arange(*piece)]))
            own += pieces
        sizes, keys = [stop - start for start, stop in own], [len(tokens) for tokens in order]
        starts, key_starts = (torch.tensor([0, *part]).cumsum(0).int() for part in (sizes, keys))
        return cls(starts, key_starts, None if sizes == keys else torch.cat(order), max(sizes), max(keys))


def attend(
    q: Tensor, k: Tensor, v: Tensor, blocks: tuple[Block, ...], spans: Spans | None = None, scale: float | None = None
) -> Tensor:
    """Compute attention over a stream: by SDPA over its blocks or, with `spans`, by variable-length FlashAttention.

    Args:
        q: [N, heads, D], after rotary embedding.
        k, v: [N, kv_heads, D].
        spans: spans of the blocks, on a GPU; q, k and v are then float16 or bfloat16.
        scale: scale of the dot products; None: 1 / sqrt(D).

    Returns:
        [N, heads, D].
    """
    grouped = q.shape[1] > k.shape[1]
    if spans is not None:
        from torch.nn.attention import varlen  # it imports torch._dynamo: over a second in each process of a run

        if spans.order is not None:
            k, v = k.index_select(0, spans.order), v.index_select(0, spans.order)
        # With more keys than queries, causal masking aligns the last query with the last key.
        groups: dict[str, Any] = {"enable_gqa": grouped} if NAMES_GROUPS else {}
        mixed = varlen.varlen_attn(
            q, k, v, spans.queries, spans.keys, spans.most_queries, spans.most_keys,
            scale=scale, window_size=(-1, 0), **groups,
        )  # fmt: skip
        return cast(Tensor, mixed)
    parts: list[Tensor] = []
    prompts: list[Tensor] = []
    for block in blocks:
        queries, *own = (block.spread(part).transpose(1, 2) for part in (q, k, v))
        mask = None if block.prompts is None else block.mask.to(q.dtype)[:, None]
        if block.prompts is None:
            prompts = prompts or own
        else:
            own = [torch.cat([p.index_select(0, block.prompts), o], 2) for p, o in zip(prompts, own, strict=True)]
        mixed = F.scaled_dot_product_attention(
            queries, own[0], own[1], mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        parts.append(block.collect(mixed.transpose(1, 2)))
    return torch.cat(parts)


def row_attention(qkv: Tensor, tables: Tables, kv_heads: int) -> Tensor:
    """Compute attention over padded rows by SDPA.

    Args:
        qkv: [B, T, heads + 2 kv_heads, D].

    Returns:
        [B, T, heads * D].
    """
    cos, sin = (table[: qkv.shape[1], None] for table in tables)
    q, k, v = (part.transpose(1, 2) for part in _rotated(qkv, cos, sin, kv_heads))
    grouped = q.shape[1] > kv_heads
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2).flatten(2)


def stream_attention(
    qkv: Tensor, blocks: tuple[Block, ...], cos: Tensor, sin: Tensor, kv_heads: int, spans: Spans | None = None
) -> Tensor:
    """Apply rotary embeddings and `attend`: qkv [N, heads + 2 kv_heads, D]; cos, sin [N, 1, D/2] -> [N, heads * D]."""
    q, k, v = _rotated(qkv, cos, sin, kv_heads)
    return attend(q, k, v, blocks, spans).flatten(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to x [..., T, heads, D], pairs (i, i + D/2); cos, sin [T, 1, D/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _rotated(qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> list[Tensor]:
    """Split into queries, keys and values, [..., heads, D], and apply rotary embeddings to the first two."""
    qk, v = qkv.split([qkv.shape[-2] - kv_heads, kv_heads], dim=-2)
    return [*rotate(qk, cos, sin).split([qk.shape[-2] - kv_heads, kv_heads], dim=-2), v]


class PackedAttention(torch.autograd.Function):
    """`stream_attention` by explicit matrix products, which are faster than SDPA on a CPU for short rows.

    All query heads of one key head are in one product, so keys and values are not repeated. Rotary embedding, change of
    layout and softmax run in C++ if it can be built.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, blocks: tuple[Block, ...], cos: Tensor, sin: Tensor, kv_heads: int) -> Tensor:
        """qkv [N, heads + 2 kv_heads, D]; cos, sin [positions, D/2] -> [N, heads * D].

        The block with the shared prompts is the first.
        """
        qkv, (tokens, heads, size) = qkv.contiguous(), qkv.shape
        heads -= 2 * kv_heads
        out, saved, prompts = qkv.new_empty(tokens, heads * size), [], None
        for block in blocks:
            make = qkv.new_empty if block.even else qkv.new_zeros
            q = make(block.rows, heads, block.length, size)
            k, v = (make(block.rows, kv_heads, block.before + block.length, size) for _ in range(2))
            _move(block, qkv, 0, q, (cos, sin), size**-0.5)
            _move(block, qkv, heads, k, (cos, sin))
            _move(block, qkv, heads + kv_heads, v)
            prompts = prompts or (k, v)
            if block.prompts is not None:  # copy keys and values of the shared prompts in front of each sequence's own
                for part, shared in zip((k, v), prompts, strict=True):
                    part[:, :, : block.before] = shared.index_select(0, block.prompts)
            q, k, v = (x.view(block.rows * kv_heads, -1, size) for x in (q, k, v))
            shares = _softmax(block, torch.bmm(q, k.transpose(1, 2)))
            _move(block, out, 0, torch.bmm(shares, v).view(block.rows, heads, block.length, size), back=True)
            saved += [q, k, v, shares]
        ctx.save_for_backward(cos, sin, *saved)
        ctx.blocks, ctx.shape = blocks, qkv.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin, *saved = ctx.saved_tensors
        grad, result = grad.contiguous(), grad.new_empty(ctx.shape)
        shared: list[tuple[Tensor, Tensor, Tensor]] = []
        for number, block in reversed(list(enumerate(ctx.blocks))):
            q, k, v, shares = saved[4 * number : 4 * number + 4]
            size, kv_heads = q.shape[2], len(q) // block.rows
            heads = ctx.shape[1] - 2 * kv_heads
            own = (grad.new_empty if block.even else grad.new_zeros)(q.shape)
            _move(block, grad, 0, own.view(block.rows, heads, -1, size))
            grad_v = torch.bmm(shares.transpose(1, 2), own)
            scores = _softmax_backward(block, shares, torch.bmm(own, v.transpose(1, 2)))
            grad_q, grad_k = torch.bmm(scores, k), torch.bmm(scores.transpose(1, 2), q)
            grad_k, grad_v = (x.view(block.rows, kv_heads, -1, size) for x in (grad_k, grad_v))
            if block.prompts is not None:
                shared.append((block.prompts, grad_k[:, :, : block.before], grad_v[:, :, : block.before]))
            if number == 0:  # the block of prompts collects the gradients of all sequences that share them
                for owners, more_k, more_v in shared:
                    grad_k.index_add_(0, owners, more_k)
                    grad_v.index_add_(0, owners, more_v)
            _move(block, result, 0, grad_q.view(block.rows, heads, -1, size), (cos, sin), size**-0.5, back=True)
            _move(block, result, heads, grad_k, (cos, sin), back=True)
            _move(block, result, heads + kv_heads, grad_v, back=True)
        return result, None, None, None, None


def _move(
    block: Block,
    stream: Tensor,
    first: int,
    rows: Tensor,
    tables: Tables | tuple[None, None] = (None, None),
    factor: float = 1.0,
    back: bool = False,
) -> None:
    """Copy heads of a block's tokens from a stream into padded rows, with rotary embedding and scale; or `back`.

    Args:
        stream: [N, ..., D].
        first: index of the first head in the stream.
        rows: [R, heads, S, D]; the block's tokens are the last C of S.
        tables: cosine and sine; (None, None): no rotary embedding.
        factor: scale.
        back: copy from rows to the stream, with the inverse rotation.
    """
    _, heads, slots, size = rows.shape
    skip, stride = slots - block.length, stream[0].numel()
    if cpp.usable(stream):
        part = stream[block.start : block.stop]
        shape = (len(part), stride, first * size, heads, size, block.length, slots, skip, int(back))
        cpp.call("move_heads", part, rows, block.slots, block.positions, *tables, *shape, factor)
        return
    stream, own = stream.view(len(stream), -1, size)[:, first : first + heads], rows[:, :, skip:].transpose(1, 2)
    padded = torch.empty_like(own) if back and not block.even else block.spread(stream)
    target, source = (padded, own) if back else (own, padded)
    if tables[0] is None:
        target.copy_(source)
    else:
        wide = torch.promote_types(stream.dtype, torch.float32)
        cos, sin = (table[block.angles][:, :, None].to(wide) * factor for table in tables)
        target.copy_(rotate(source, cos, -sin if back else sin))
    if back and not block.even:
        stream[block.start : block.stop] = block.collect(padded)


def _softmax(block: Block, scores: Tensor) -> Tensor:
    """Apply the mask and softmax in place to scores [R * kv_heads, heads / kv_heads * C, P + C]."""
    heads = scores[..., 0].numel() // (block.rows * block.length)
    if cpp.usable(scores):
        cpp.call("softmax_forward", scores, block.seen, block.rows, heads, block.length, block.before)
        return scores
    scores.view(block.rows, heads, block.length, -1).add_(block.mask[:, None])
    return torch.softmax(scores, dim=-1, out=scores)


def _softmax_backward(block: Block, shares: Tensor, grad: Tensor) -> Tensor:
    """Backward of softmax: overwrite the gradient of the probabilities by that of the scores."""
    if cpp.usable(grad):
        cpp.call("softmax_backward", shares, grad, grad[..., 0].numel(), block.length, block.before)
        return grad
    return cast(Tensor, torch.ops.aten._softmax_backward_data(grad, shares, -1, shares.dtype))
