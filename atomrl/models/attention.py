"""Causal attention with rotary positions and grouped queries, over padded rows and over packed streams.

A `Stream` is a micro-batch packed for the forward pass: rows lie end to end without padding, and a prompt that several
rows share is computed once. `make_stream` lays it out on the CPU; `attend` is its attention. `Share` splits a stream
over ranks (sequence parallelism).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from atomrl.common.threads import to_device
from atomrl.config import ConfigError
from atomrl.models import kernels as cpp
from atomrl.models.kernels import apply
from atomrl.models.shapes import size
from atomrl.types import Image

NAMES_GROUPS = TorchVersion(torch.__version__) >= "2.12"
"""True if `varlen_attn` has the parameter for grouped queries. In torch 2.11 it does not; its FlashAttention supports
fewer key heads without it, forward and backward."""

Tables = tuple[Tensor, Tensor]
"""Cosine and sine, [positions, D/2] float32."""

# --------------------------------------------------------------------------------------------------------------------
# Attention.


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
            >>> from atomrl.models.attention import row_stream
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


# --------------------------------------------------------------------------------------------------------------------
# Sequence parallelism by Ulysses (arXiv:2309.14509). Each rank has a part of the tokens. For attention, an all-to-all
# exchanges tokens for heads: each rank then has all tokens of some heads. A second one exchanges back.


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


# --------------------------------------------------------------------------------------------------------------------
# Packing: the hidden states of a micro-batch without redundant computation.
#
# The completions of a group share a prompt. It is computed once, and they attend to its keys and values. Not computed
# are padding, tokens after the last one in the loss, and in the last layer all states but the requested ones. The rest
# is one stream of tokens [N, H]; only attention knows the rows.

LEAST_SAVING = 1 / 32
"""Prompts are shared if that saves at least this share of the tokens, because attention in two parts costs a little."""


def packs_rows(setting: bool | None, device: str, dtype: torch.dtype) -> bool:
    """Return True if rows are packed on a type of device.

    Args:
        setting: `model.pack_rows`; None: on a CPU, and on a GPU in bfloat16, which variable-length attention needs.

    Example:
        >>> packs_rows(None, "cpu", torch.float32), packs_rows(None, "cuda", torch.float32)
        (True, False)
    """
    if setting is not None:
        return setting
    return device == "cpu" or (dtype == torch.bfloat16 and find_spec("torch.nn.attention.varlen") is not None)


@dataclass(frozen=True)
class Stream:
    """The packed tokens of a micro-batch. Created on the CPU; the model moves it to its device (`to`)."""

    source: Tensor
    """[N] index of each token in the flattened [B * T]."""
    positions: Tensor
    """[N] position of each token in its row."""
    before: Tensor
    """[n] index in the stream of the token before each wanted one."""
    blocks: tuple[Block, ...]
    spans: Spans | None = None
    """Arguments of variable-length attention, on a GPU."""
    share: Share | None = None
    """With sequence parallelism: `source`, `positions` and `before` are those of this rank, `blocks` of all."""

    def to(self, device: torch.device) -> "Stream":
        """Copy to a GPU and add `spans`; on a CPU, return self. Blocks stay on the CPU."""
        if device.type == "cpu":
            return self
        spans = Spans.of(self.blocks)
        order = None if spans.order is None else to_device(spans.order, device)
        spans = replace(
            spans, queries=to_device(spans.queries, device), keys=to_device(spans.keys, device), order=order
        )
        share = None if self.share is None else replace(self.share, positions=to_device(self.share.positions, device))
        source, positions, before = (to_device(part, device) for part in (self.source, self.positions, self.before))
        return Stream(source, positions, before, self.blocks, spans, share)

    def cut(self, group: Any) -> tuple["Stream", Tensor]:
        """Return this rank's share of the stream, and a mask [n] of the `before` tokens in it."""
        sizes = part_sizes(len(self.source), dist.get_world_size(group))
        start = sum(sizes[: (rank := dist.get_rank(group))])
        stop = start + sizes[rank]
        own = (self.before >= start) & (self.before < stop)
        share = Share(group, sizes, self.positions)
        parts = (self.source[start:stop], self.positions[start:stop], self.before[own] - start)
        return Stream(*parts, self.blocks, self.spans, share), own


def states_before(
    model: Any, tokens: Tensor, wanted: Tensor, prompt_lengths: Tensor, images: Sequence[Sequence[Image]] = ()
) -> tuple[Tensor, Tensor]:
    """Compute the hidden states that predict the wanted tokens: those of the token before, after the final norm.

    A model with `shares_prompts` computes a packed stream, others padded rows. Rows with pictures are padded.

    Args:
        model: `GPT` or `HFModel`.
        tokens: [B, T] int64, right-padded; on the CPU to avoid a sync.
        wanted: [B, T] bool; position 0 counts as False.
        prompt_lengths: [B]. Rows with identical prompts of this length share them.
        images: [B] pictures of each row; empty: no row has any.

    Returns:
        States [n, H] in the order of the rows, and the mask [B, T] of the tokens that they predict: `wanted`, or with
        sequence parallelism this rank's part of it.

    Example:
        >>> from atomrl.models.gpt import new_gpt
        >>> model = new_gpt(vocab_size=11, layers=1, hidden=32, heads=1)
        >>> tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]])
        >>> wanted = torch.tensor([[False, False, True, True], [False, False, True, False]])
        >>> states, _ = states_before(model, tokens, wanted, torch.tensor([2, 2]))
        >>> torch.equal(states[0], states[2])
        True
    """
    wanted = wanted.clone()
    wanted[:, 0] = False
    device = model.head_weight.device
    states: Tensor
    if model.shares_prompts and wanted.any() and not images:
        stream = make_stream(tokens.cpu(), wanted.cpu(), prompt_lengths.cpu())
        if model.sharing is not None:
            stream, own = stream.cut(model.sharing)
            wanted = wanted.masked_scatter(wanted, own.to(wanted.device))
        states = model.stream_states(to_device(tokens, device), stream)
    else:
        rows = to_device(tokens, device)
        hidden = (model.forward_hidden(rows, images) if images else model.forward_hidden(rows)).flatten(0, 1)
        states = hidden.index_select(0, to_device(wanted.flatten().nonzero()[:, 0] - 1, hidden.device))
    return states, wanted


def row_stream(rows: int, length: int) -> Stream:
    """Create the stream of full rows without packing, with the state of every token."""
    every = torch.arange(rows * length)
    return Stream(every, every % length, every, (_block(0, [(row, 0, length) for row in range(rows)], None, []),))


def make_stream(tokens: Tensor, wanted: Tensor, prompt_lengths: Tensor) -> Stream:
    """Pack a micro-batch into a stream of three blocks: shared prompts, rows that share none, and completions after
    shared prompts.

    Args:
        tokens, wanted, prompt_lengths: as in `states_before`, on the CPU; at least one token is wanted.
    """
    rows, width = tokens.shape
    # Rows are computed up to the token before their last wanted one. Rows with the same prompt bytes form a group.
    ends = (wanted * torch.arange(width)).amax(1).tolist()
    prompts: dict[bytes, list[int]] = {}
    flat = tokens.numpy()
    for row, prompt in enumerate(prompt_lengths.tolist()):
        if ends[row]:
            shareable = 0 < prompt <= ends[row]
            prompts.setdefault(flat[row, :prompt].tobytes() if shareable else f"row {row}".encode(), []).append(row)
    lengths = {row: int(prompt_lengths[row]) for members in prompts.values() for row in members}
    shared = [members for members in prompts.values() if len(members) > 1]
    saved = sum((len(members) - 1) * lengths[members[0]] for members in shared)
    if saved < LEAST_SAVING * sum(ends):
        shared = []
    # The sequences (row, begin, end) of each block.
    group_of = {row: number for number, members in enumerate(shared) for row in members}
    parts = [
        [(row, 0, end) for row, end in ((members[0], lengths[members[0]]) for members in shared)],
        [(row, 0, ends[row]) for row in range(rows) if ends[row] and row not in group_of],
        [(row, lengths[row], ends[row]) for row in group_of if ends[row] > lengths[row]],
    ]
    # `where` [B, T]: index of each token in the stream; members of a group point to the shared prompt.
    where, pieces, blocks, start = np.zeros((rows, width), np.int64), [], [], 0
    for kind, part in enumerate(parts):
        if part:
            first = start
            for row, begin, end in part:
                where[row, begin:end] = np.arange(start, start + end - begin)
                pieces.append(np.arange(row * width + begin, row * width + end))
                start += end - begin
            owners = [group_of[row] for row, _, _ in part] if kind == 2 else None
            blocks.append(_block(first, part, owners, [lengths[members[0]] for members in shared]))
    for members in shared:
        where[members, : lengths[members[0]]] = where[members[0], : lengths[members[0]]]
    source = torch.from_numpy(np.concatenate(pieces))
    at = wanted.flatten().nonzero()[:, 0] - 1
    return Stream(source, source % width, torch.from_numpy(where).flatten()[at], tuple(blocks))


def _block(start: int, part: list[tuple[int, int, int]], owners: list[int] | None, prompts: list[int]) -> Block:
    """Create a block of sequences (row, begin, end).

    Args:
        owners: index of the shared prompt of each sequence; None: none.
        prompts: lengths of the shared prompts.
    """
    begins, ends = torch.tensor([piece[1:] for piece in part]).T.contiguous()
    sizes, length = ends - begins, int((ends - begins).max())
    own = torch.arange(length).expand(len(part), -1)
    real = own < sizes[:, None]
    return Block(
        start=start,
        stop=start + int(sizes.sum()),
        rows=len(part),
        length=length,
        slots=real.flatten().nonzero()[:, 0],
        even=bool(real.all()),
        positions=(begins[:, None] + own)[real],
        prompts=None if owners is None else torch.tensor(owners),
        before=0 if owners is None else max(prompts),
        seen=begins,
    )
