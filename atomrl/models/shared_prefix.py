"""A micro-batch's hidden states without what would be computed twice, or for nothing.

The completions of a group start with the same prompt: it is computed once, and they attend to its keys and values.
Padding, tokens after the last one that a loss looks at, and in the last layer all but the states that are asked for,
are not computed at all. What is left lies in one stream of tokens [N, H], and only attention knows of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from atomrl.models import cpp, gpt
from atomrl.models.kernels import PackedAttention, Rotate, are_plain

LEAST_SAVING = 1 / 32
"""Prompts are shared where that saves at least this share of the tokens: attention in two parts costs a little."""


@dataclass(frozen=True)
class Block:
    """Consecutive tokens of the stream: R sequences of at most C tokens, one after the other."""

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
        return x.unflatten(0, (self.rows, self.length))

    def collect(self, x: Tensor) -> Tensor:
        """[R, C, ...] -> the block's part of a stream."""
        x = x.flatten(0, 1)
        return x if self.even else x.index_select(0, self.slots)

    def angles(self) -> Tensor:
        """[1 or R, C] positions with padding, for the rotation of `spread`; the same for all rows where they are."""
        seen = self.seen[:1] if bool((self.seen == self.seen[0]).all()) else self.seen
        return seen[:, None] + torch.arange(self.length)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """[1 or R, C, P + C] 0 or -inf: of the P tokens of the prompt and the sequence's own."""
        own = torch.full((self.length, self.length), -torch.inf, dtype=dtype).triu(1)[None]
        if self.prompts is None:
            return own
        seen = self.seen[:1] if bool((self.seen == self.seen[0]).all()) else self.seen
        hidden = torch.arange(self.before) >= seen[:, None]
        prompt = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf)[:, None]
        return torch.cat([prompt.expand(-1, self.length, -1), own.expand(len(seen), -1, -1)], dim=2)


@dataclass(frozen=True)
class Stream:
    """What is computed of a micro-batch."""

    source: Tensor
    """[N] where each token is in the flattened [B * T]."""
    positions: Tensor
    """[N] in its row."""
    before: Tensor
    """[n] where in the stream the token before each wanted one is."""
    blocks: tuple[Block, ...]


def states_before(model: Any, tokens: Tensor, wanted: Tensor, prompt_lengths: Tensor) -> Tensor:
    """The hidden state from which each wanted token is predicted: that of the token before it, after the final norm.

    A `GPT` on a CPU that is not compiled shares prompts; other models compute plain rows.

    Args:
        model: `GPT` or `HFModel`.
        tokens: [B, T] int64, right-padded.
        wanted: [B, T] bool; position 0 counts as False.
        prompt_lengths: [B]. Rows whose first tokens, up to here, are the same share them.

    Returns:
        [n, H], in the order of the rows.

    Example:
        >>> model = gpt.new_gpt(vocab_size=11, layers=1, hidden=32, heads=1)
        >>> tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]])
        >>> wanted = torch.tensor([[False, False, True, True], [False, False, True, False]])
        >>> torch.equal(states_before(model, tokens, wanted, torch.tensor([2, 2]))[0],
        ...             states_before(model, tokens, wanted, torch.tensor([2, 2]))[2])
        True
    """
    wanted = wanted.clone()
    wanted[:, 0] = False
    if not shares_prompts(model) or not wanted.any():
        hidden = model.forward_hidden(tokens).flatten(0, 1)
        return hidden.index_select(0, wanted.flatten().nonzero()[:, 0] - 1)
    return _forward(model, tokens, make_stream(tokens, wanted, prompt_lengths))


def shares_prompts(model: Any) -> bool:
    """Whether `states_before` shares the prompts of this model's rows."""
    shares = isinstance(model, gpt.GPT) and not model.compiled and not are_plain()
    return shares and model.head_weight.device.type == "cpu"


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


def _forward(model: gpt.GPT, tokens: Tensor, stream: Stream) -> Tensor:
    weight = model.model.embed_tokens.weight
    x = F.embedding(tokens.flatten()[stream.source], weight).to(model.compute_dtype or weight.dtype)
    attend = _attention(model, x, stream, explicit=tokens.shape[1] <= gpt.BMM_MAX_TOKENS)
    kept, back = stream.before.unique(return_inverse=True)
    last = model.model.layers[-1]
    for layer in model.model.layers:
        keep = kept if layer is last and len(kept) < len(x) else None
        if model.gradient_checkpointing and torch.is_grad_enabled():
            x = checkpoint(_layer, layer, x, attend, keep, use_reentrant=False)
        else:
            x = _layer(layer, x, attend, keep)
    at = stream.before if len(kept) == len(stream.source) else back
    return model.model.norm(x).index_select(0, at)


def _layer(layer: gpt.Layer, x: Tensor, attend: Callable[[Tensor], Tensor], keep: Tensor | None) -> Tensor:
    """`Layer.forward` on a stream; `keep` are the tokens that go on."""
    mixed = attend(layer.self_attn.project(layer.input_layernorm(x)))
    if keep is not None:
        x, mixed = x.index_select(0, keep), mixed.index_select(0, keep)
    x = _add_linear(x, layer.self_attn.o_proj, mixed)
    return _add_linear(x, layer.mlp.down_proj, layer.mlp.gated(layer.post_attention_layernorm(x)))


def _add_linear(x: Tensor, linear: gpt.Linear, y: Tensor) -> Tensor:
    """x + linear(y), in one pass where the layer is a plain product."""
    if type(linear) is not gpt.Linear or linear.bias is not None:
        return x + linear(y)
    return torch.addmm(x, y, linear.weight.to(y.dtype).T)


def _attention(model: gpt.GPT, x: Tensor, stream: Stream, explicit: bool) -> Callable[[Tensor], Tensor]:
    """The attention of all layers on this stream: qkv [N, heads + 2 kv_heads, D] -> [N, heads * D]."""
    blocks, attention = stream.blocks, model.model.layers[0].self_attn
    heads, kv_heads = attention.heads, attention.kv_heads
    longest = max(int(block.seen.max()) + block.length for block in blocks)  # padding may lie beyond all tokens
    cos, sin = model.rope_tables(longest, x.device)
    if not explicit:
        cos, sin = cos[stream.positions], sin[stream.positions]
        masks = [None if block.prompts is None else block.mask(x.dtype)[:, None] for block in blocks]
        return lambda qkv: _long_attention(qkv, blocks, masks, cos, sin, heads, kv_heads)
    if cpp.usable(x):
        cos, sin = cos[:, -1].contiguous(), sin[:, -1].contiguous()  # those of a key head, without 1 / sqrt(D)
        return lambda qkv: cpp.StreamAttention.apply(qkv, blocks, cos, sin, kv_heads)
    plans = []
    for block in blocks:
        bias, angles = block.mask(x.dtype).repeat(1, heads // kv_heads, 1), block.angles()
        bias = bias if len(bias) == 1 else bias.repeat_interleave(kv_heads, dim=0)
        plans.append((block, cos[angles], sin[angles], bias))
    return lambda qkv: PackedAttention.apply(qkv, plans, kv_heads)


def _long_attention(
    qkv: Tensor,
    blocks: tuple[Block, ...],
    masks: list[Tensor | None],
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
) -> Tensor:
    """Attention by SDPA, which keeps no scores: qkv [N, heads + 2 kv_heads, D] -> [N, heads * D]."""
    qk, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
    q, k = Rotate.apply(qk, cos, sin).split([heads, kv_heads], dim=1)
    parts, prompts = [], None
    for block, mask in zip(blocks, masks, strict=True):
        own = [block.spread(part).transpose(1, 2) for part in (q, k, v)]
        if block.prompts is None:
            prompts = prompts or own[1:]
        else:
            before = [part.index_select(0, block.prompts) for part in prompts]
            own[1:] = [torch.cat(pair, dim=2) for pair in zip(before, own[1:], strict=True)]
        mixed = F.scaled_dot_product_attention(
            *own, attn_mask=mask, is_causal=mask is None, scale=1.0, enable_gqa=heads > kv_heads
        )
        parts.append(block.collect(mixed.transpose(1, 2).flatten(2)))
    return torch.cat(parts)
