"""Causal attention with rotary positions and grouped queries, of padded rows and of a stream of tokens."""

import inspect
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
from torch.nn.attention import varlen

from atomrl.common.threads import sent
from atomrl.config import ConfigError
from atomrl.models import kernels as cpp
from atomrl.models.kernels import apply

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


# --------------------------------------------------------------------------------------------------------------------
# Ulysses (arXiv:2309.14509): ranks that share the rows of a micro-batch.
#
# Each rank has a part of the tokens, and all layers but attention compute that alone. For attention the ranks exchange
# tokens for heads: each then has all tokens of its share of the heads, and back.


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


# --------------------------------------------------------------------------------------------------------------------
# A micro-batch's hidden states without what would be computed twice, or for nothing.
#
# The completions of a group start with the same prompt: it is computed once, and they attend to its keys and values.
# Padding, tokens after the last one that a loss looks at, and in the last layer all but the states that are asked for,
# are not computed at all. What is left lies in one stream of tokens [N, H], and only attention knows of rows.

LEAST_SAVING = 1 / 32
"""Prompts are shared where that saves at least this share of the tokens: attention in two parts costs a little."""


def packs_rows(setting: bool | None, device: str, dtype: torch.dtype) -> bool:
    """Whether rows lie end to end on a type of device: as `model.pack_rows` says, or else on a CPU, and on a GPU in
    bfloat16, where there is attention of variable length.

    Example:
        >>> packs_rows(None, "cpu", torch.float32), packs_rows(None, "cuda", torch.float32)
        (True, False)
    """
    if setting is not None:
        return setting
    return device == "cpu" or (dtype == torch.bfloat16 and find_spec("torch.nn.attention.varlen") is not None)


@dataclass(frozen=True)
class Stream:
    """What is computed of a micro-batch. It is laid out on the host, and the model takes it to its device (`to`)."""

    source: Tensor
    """[N] where each token is in the flattened [B * T]."""
    positions: Tensor
    """[N] in its row."""
    before: Tensor
    """[n] where in the stream the token before each wanted one is."""
    blocks: tuple[Block, ...]
    spans: Spans | None = None
    """Of the blocks, where attention is of variable length."""
    share: Share | None = None
    """Of ranks that share the stream: then `source`, `positions` and `before` are of this rank's tokens, and the blocks
    of all."""

    def to(self, device: torch.device) -> "Stream":
        """On a GPU, with `spans`; on a CPU as it is. The blocks stay."""
        if device.type == "cpu":
            return self

        spans = Spans.of(self.blocks)
        order = None if spans.order is None else sent(spans.order, device)
        spans = replace(spans, queries=sent(spans.queries, device), keys=sent(spans.keys, device), order=order)
        share = None if self.share is None else replace(self.share, positions=sent(self.share.positions, device))
        source, positions, before = (sent(part, device) for part in (self.source, self.positions, self.before))
        return Stream(source, positions, before, self.blocks, spans, share)

    def cut(self, group: Any) -> tuple["Stream", Tensor]:
        """This rank's share, and [n] bool, which of `before` are in it."""
        sizes = part_sizes(len(self.source), dist.get_world_size(group))
        start = sum(sizes[: (rank := dist.get_rank(group))])
        stop = start + sizes[rank]
        own = (self.before >= start) & (self.before < stop)
        share = Share(group, sizes, self.positions)
        parts = (self.source[start:stop], self.positions[start:stop], self.before[own] - start)
        return Stream(*parts, self.blocks, self.spans, share), own


def states_before(model: Any, tokens: Tensor, wanted: Tensor, prompt_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden state from which each wanted token is predicted: that of the token before it, after the final norm.

    A model that `shares_prompts` computes a stream, others plain rows. Of rows on the host nothing waits for the
    model's device.

    Args:
        model: `GPT` or `HFModel`.
        tokens: [B, T] int64, right-padded.
        wanted: [B, T] bool; position 0 counts as False.
        prompt_lengths: [B]. Rows whose first tokens, up to here, are the same share them.

    Returns:
        [n, H], in the order of the rows, and [B, T] bool, beside `wanted`, of which tokens: all that are wanted, or
        this rank's of them, where ranks share the rows.

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
    if model.shares_prompts and wanted.any():
        stream = make_stream(tokens.cpu(), wanted.cpu(), prompt_lengths.cpu())
        if model.sharing is not None:
            stream, own = stream.cut(model.sharing)
            wanted = wanted.masked_scatter(wanted, own.to(wanted.device))
        states = model.stream_states(sent(tokens, device), stream)
    else:
        hidden = model.forward_hidden(sent(tokens, device)).flatten(0, 1)
        states = hidden.index_select(0, sent(wanted.flatten().nonzero()[:, 0] - 1, hidden.device))
    return states, wanted


def row_stream(rows: int, length: int) -> Stream:
    """All tokens of whole rows, and the state of each."""
    every = torch.arange(rows * length)
    return Stream(every, every % length, every, (_block(0, [(row, 0, length) for row in range(rows)], None, []),))


def make_stream(tokens: Tensor, wanted: Tensor, prompt_lengths: Tensor) -> Stream:
    """Lay out prompts that several rows share, then rows that share none, then what comes after shared prompts.

    Args:
        tokens, wanted, prompt_lengths: as in `states_before`; at least one token is wanted.
    """
    rows, width = tokens.shape
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
    inside = {row: number for number, members in enumerate(shared) for row in members}
    parts = [
        [(row, 0, end) for row, end in ((members[0], lengths[members[0]]) for members in shared)],
        [(row, 0, ends[row]) for row in range(rows) if ends[row] and row not in inside],
        [(row, lengths[row], ends[row]) for row in inside if ends[row] > lengths[row]],
    ]
    where, pieces, blocks, start = np.zeros((rows, width), np.int64), [], [], 0
    for kind, part in enumerate(parts):
        if part:
            first = start
            for row, begin, end in part:
                where[row, begin:end] = np.arange(start, start + end - begin)
                pieces.append(np.arange(row * width + begin, row * width + end))
                start += end - begin
            owners = [inside[row] for row, _, _ in part] if kind == 2 else None
            blocks.append(_block(first, part, owners, [lengths[members[0]] for members in shared]))
    for members in shared:
        where[members, : lengths[members[0]]] = where[members[0], : lengths[members[0]]]
    source = torch.from_numpy(np.concatenate(pieces))
    at = wanted.flatten().nonzero()[:, 0] - 1
    return Stream(source, source % width, torch.from_numpy(where).flatten()[at], tuple(blocks))


def _block(start: int, part: list[tuple[int, int, int]], owners: list[int] | None, prompts: list[int]) -> Block:
    """A block of sequences (row, begin, end), each after its prompt where there are `owners`."""
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
