"""Causal attention with rotary positions and grouped queries, of padded rows and of a stream of tokens."""

import inspect
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from atomrl.models import cpp

NAMES_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
"""Whether `varlen_attn` has to be told of grouped queries. That of torch 2.11 has no word for them; the FlashAttention
beneath it takes fewer key heads all the same, forward and backward."""

Tables = tuple[Tensor, Tensor]
"""Cosine and sine, [positions, D/2] float32."""


@dataclass(frozen=True, eq=False)
class Block:
    """Consecutive tokens of a stream: R sequences of at most C tokens, one after the other."""

    start: int
    stop: int
    rows: int
    length: int
    slots: Tensor
    """[stop - start] where each token is among the R * C."""
    even: bool
    """Every sequence has C tokens."""
    positions: Tensor
    """[stop - start] of each token in its row."""
    prompts: Tensor | None
    """[R] the sequence of the first block that comes before this one; None where nothing does."""
    before: int
    """P: tokens of the longest prompt before; 0 where nothing is."""
    seen: Tensor
    """[R] tokens of the prompt before each sequence."""

    def spread(self, x: Tensor) -> Tensor:
        """The block's part of a stream [N, ...] as [R, C, ...], zeros where a sequence is shorter."""
        x = x[self.start : self.stop]
        if not self.even:
            x = x.new_zeros(self.rows * self.length, *x.shape[1:]).index_copy(0, self.slots, x)
        return x.view(self.rows, self.length, *x.shape[1:])

    def collect(self, x: Tensor) -> Tensor:
        """[R, C, ...] -> the block's part of a stream."""
        x = x.flatten(0, 1)
        return x if self.even else x.index_select(0, self.slots)

    @cached_property
    def _seen(self) -> Tensor:
        """[1 or R, 1] `seen`; one where all rows have the same."""
        return (self.seen[:1] if bool((self.seen == self.seen[0]).all()) else self.seen)[:, None]

    @cached_property
    def angles(self) -> Tensor:
        """[1 or R, C] positions with padding, for the rotation of `spread`."""
        return self._seen + torch.arange(self.length)

    @cached_property
    def mask(self) -> Tensor:
        """[1 or R, C, P + C] 0 or -inf: of the P tokens of the prompt and the sequence's own."""
        own = torch.full((self.length, self.length), -torch.inf).triu(1)
        hidden = torch.arange(self.before) >= self._seen
        prompt = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[:, None]
        return torch.cat([prompt.expand(-1, self.length, -1), own.expand(len(hidden), -1, -1)], dim=2)


@dataclass(frozen=True, eq=False)
class Spans:
    """A stream of S sequences for attention of variable length: what of it each one's queries and keys are."""

    queries: Tensor
    """[S + 1] int32: where each sequence begins in the stream, and the end."""
    keys: Tensor
    """[S + 1] int32: where the keys of each begin among those at `order`, and the end."""
    order: Tensor | None
    """[M] the tokens of the keys: a sequence's prompt before its own; None: the stream as it is."""
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, blocks: tuple[Block, ...]) -> "Spans":
        """The sequences of a stream's blocks, prompts in the first.

        Example:
            >>> from atomrl.models.shared_prefix import row_stream
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
    """Attention of a stream: by SDPA over its blocks, or, with `spans`, by flash attention of variable length.

    Args:
        q: [N, heads, D], turned.
        k, v: [N, kv_heads, D].
        spans: of the blocks, on the device, which is a GPU. All is float16 or bfloat16 then.
        scale: of the products; None is 1 / sqrt(D).

    Returns:
        [N, heads, D].
    """
    grouped = q.shape[1] > k.shape[1]
    if spans is not None:
        if spans.order is not None:
            k, v = k.index_select(0, spans.order), v.index_select(0, spans.order)
        # Where a sequence has more keys than queries, its last query sees the last key.
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
        found = F.scaled_dot_product_attention(
            queries, own[0], own[1], mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        parts.append(block.collect(found.transpose(1, 2)))
    return torch.cat(parts)


def row_attention(qkv: Tensor, tables: Tables, kv_heads: int) -> Tensor:
    """Attention of rows of any length by SDPA, which keeps no scores.

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
    """`attend` with rotary positions: qkv [N, heads + 2 kv_heads, D]; cos, sin [N, 1, D/2] -> [N, heads * D]."""
    q, k, v = _rotated(qkv, cos, sin, kv_heads)
    return attend(q, k, v, blocks, spans).flatten(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., T, heads, D] with the pairs (i, i + D/2) turned; cos, sin [T, 1, D/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _rotated(qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> list[Tensor]:
    """Queries, keys and values, [..., heads, D], the first two turned."""
    qk, v = qkv.split([qkv.shape[-2] - kv_heads, kv_heads], dim=-2)
    return [*rotate(qk, cos, sin).split([qk.shape[-2] - kv_heads, kv_heads], dim=-2), v]


class PackedAttention(torch.autograd.Function):
    """`stream_attention` by explicit matrix products, which is faster on a CPU for short rows.

    All query heads of one key head go through one product, so that no key or value is repeated. Rotation, change of
    layout and softmax run in C++ where it can be built.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, blocks: tuple[Block, ...], cos: Tensor, sin: Tensor, kv_heads: int) -> Tensor:
        """qkv [N, heads + 2 kv_heads, D]; cos, sin [positions, D/2] -> [N, heads * D].

        Blocks after prompts follow the one that holds the prompts.
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
            if block.prompts is not None:
                for part, theirs in zip((k, v), prompts, strict=True):
                    part[:, :, : block.before] = theirs.index_select(0, block.prompts)
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
            if number == 0:
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
    """Heads of the block's tokens, from the `first` on, into rows [R, heads, S, D], turned and scaled; or back."""
    _, heads, slots, size = rows.shape
    skip, stride = slots - block.length, stream[0].numel()
    if cpp.usable(stream):
        part = stream[block.start : block.stop]
        shape = (len(part), stride, first * size, heads, size, block.length, slots, skip, int(back))
        cpp.call("move_heads", part, rows, block.slots, block.positions, *tables, *shape, factor)
        return
    stream, own = stream.view(len(stream), -1, size)[:, first : first + heads], rows[:, :, skip:].transpose(1, 2)
    there = torch.empty_like(own) if back and not block.even else block.spread(stream)
    target, source = (there, own) if back else (own, there)
    if tables[0] is None:
        target.copy_(source)
    else:
        wide = torch.promote_types(stream.dtype, torch.float32)
        cos, sin = (table[block.angles][:, :, None].to(wide) * factor for table in tables)
        target.copy_(rotate(source, cos, -sin if back else sin))
    if back and not block.even:
        stream[block.start : block.stop] = block.collect(there)


def _softmax(block: Block, scores: Tensor) -> Tensor:
    """Shares of what each query sees, in place: [R * kv_heads, heads / kv_heads * C, P + C]."""
    heads = scores[..., 0].numel() // (block.rows * block.length)
    if cpp.usable(scores):
        cpp.call("softmax_forward", scores, block.seen, block.rows, heads, block.length, block.before)
        return scores
    scores.view(block.rows, heads, block.length, -1).add_(block.mask[:, None])
    return torch.softmax(scores, dim=-1, out=scores)


def _softmax_backward(block: Block, shares: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the scores from that of the shares, which is overwritten."""
    if cpp.usable(grad):
        cpp.call("softmax_backward", shares, grad, grad[..., 0].numel(), block.length, block.before)
        return grad
    return cast(Tensor, torch.ops.aten._softmax_backward_data(grad, shares, -1, shares.dtype))
