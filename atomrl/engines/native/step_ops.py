"""The rows of a decode step, and its operations except matrix products, with their reference in PyTorch.

`PlainOps` is the reference and the fallback; `triton_ops.TritonOps` has the Triton kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from atomrl.engines.native.batching import GROUP, LENGTH, LIMIT, PREFIX, PROMPT_LENGTH, SEED, SLOT, STOPPED, TOKEN
from atomrl.engines.native.cache import DecodeBatch
from atomrl.engines.native.paged_cache import PAGE, pages_of
from atomrl.engines.native.slot_cache import attend_to_both
from atomrl.models.attention import rotate

Rope = tuple[Tensor, Tensor]


class StepRows:
    """Rows of a decode step: device tensors at fixed addresses, and host sizes for the PyTorch reference.

    Args:
        state: [10, N], as `ContinuousBatch.state`; padded rows have slot -1.
        tiles: [N, members] int32 from `tiles_of`: rows of one group, for which the prompt is read once.
        own, prompts: page tables [slots, pages] and [groups, pages] int32.
        batch: sizes of the rows without padding. A graph is valid for batches with equal `least_splits` of them.
    """

    def __init__(self, state: Tensor, tiles: Tensor, own: Tensor, prompts: Tensor, batch: DecodeBatch) -> None:
        self.state, self.tiles, self.own, self.prompts, self.batch = state, tiles, own, prompts, batch
        self.slots, self.groups, self.prompt_lengths = state[SLOT], state[GROUP], state[PROMPT_LENGTH]
        self.lengths, self.prefixes, self.limits = state[LENGTH], state[PREFIX], state[LIMIT]
        self.seeds, self.tokens, self.stopped = state[SEED], state[TOKEN], state[STOPPED]


def tiles_of(groups: Sequence[int], count: int, members: int) -> Tensor:
    """Tiles [count, members] int32 of row indices: at most `members` rows of one group each, filled with -1.

    Example:
        >>> tiles_of([0, 1, 0, 0], count=3, members=2).tolist()
        [[0, 2], [3, -1], [1, -1]]
    """
    rows: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        rows.setdefault(group, []).append(index)
    parts = [part[at : at + members] for part in rows.values() for at in range(0, len(part), members)]
    tiles = torch.full((count, members), -1, dtype=torch.int32)
    for row, part in zip(tiles.numpy(), parts, strict=False):
        row[: len(part)] = part
    return tiles


def least_splits(tokens: int) -> int:
    """Minimum number of parts to split this many keys into, a power of two: one program reads up to 2,048 of them.

    Example:
        >>> [least_splits(tokens) for tokens in (0, 2048, 2049, 10_000)]
        [1, 1, 2, 8]
    """
    return 1 << max(0, -(-tokens // 2048) - 1).bit_length()


@dataclass(frozen=True)
class Drawing:
    """Sampling inside of the step, if all rows share sampling parameters without top-k and top-p; and its buffers."""

    greedy: bool
    bans: bool
    """Stop tokens have probability 0 before `minimum` tokens."""
    temperature: Tensor
    """[1] float32."""
    minimum: Tensor
    """[1] int64."""
    stops: Tensor
    """[V] int8: 1 for stop tokens."""
    tokens: Tensor
    """[slots, T] int32: tokens sampled so far."""
    logprobs: Tensor
    """[slots, T] float32."""


class StepOps(Protocol):
    """Operations of a step except matrix products. `out` may be the first columns of a wider tensor."""

    draws: ClassVar[bool]
    """True if `draw` is implemented; else sampling runs outside of the step."""
    tile: int
    """Maximum number of group members that read a prompt together."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """RMSNorm: [N, H], [H] -> [N, H]."""

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """silu(gate) * up: [N, 2 * I] -> [N, I]."""

    def rotate_and_write(
        self, qkv: Tensor, rope: Rope, norms: tuple[Tensor, Tensor] | None, eps: float,
        keys: Tensor, values: Tensor, rows: StepRows,
    ) -> None:  # fmt: skip
        """Apply q/k norm (Qwen3) and RoPE to [N, heads + 2 kv_heads, D]: q in place, k and v into the rows' pages."""

    def attend(self, qkv: Tensor, keys: Tensor, values: Tensor, rows: StepRows, out: Tensor) -> None:
        """Attention of the q in `qkv` over prompts and completions: [N, heads * D]."""

    def draw(self, logits: Tensor, rows: StepRows, drawing: Drawing) -> None:
        """Sample the next token of each unfinished row from logits [N, V] float32, and update the rows' state."""


class PlainOps:
    """Reference in PyTorch. It reads sizes from `rows.batch`, so it cannot be captured."""

    draws: ClassVar[bool] = False
    tile: int = 1

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `StepOps`."""
        out.copy_(F.rms_norm(x, (x.shape[-1],), weight, eps))

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See `StepOps`."""
        gate, up = gate_up.chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=out)

    def rotate_and_write(
        self, qkv: Tensor, rope: Rope, norms: tuple[Tensor, Tensor] | None, eps: float,
        keys: Tensor, values: Tensor, rows: StepRows,
    ) -> None:  # fmt: skip
        """See `StepOps`."""
        kv_heads, size = keys.shape[1], keys.shape[3]
        heads = qkv.unflatten(1, (-1, size))
        query, key, value = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            query, key = (F.rms_norm(x, (size,), norm, eps) for x, norm in zip((query, key), norms, strict=True))
        places = rows.lengths - 1
        cosine, sine = (table[rows.prompt_lengths + places][:, None] for table in rope)
        heads[:, : query.shape[1]] = rotate(query, cosine, sine)
        pages = rows.own[rows.slots, places // PAGE].long()
        keys[pages, :, places % PAGE] = rotate(key, cosine, sine)
        values[pages, :, places % PAGE] = value

    def attend(self, qkv: Tensor, keys: Tensor, values: Tensor, rows: StepRows, out: Tensor) -> None:
        """See `StepOps`."""
        batch, kv_heads, size = rows.batch, keys.shape[1], keys.shape[3]
        prompt_lengths = rows.lengths.new_zeros(batch.group_count)
        prompt_lengths[rows.groups] = rows.prompt_lengths
        query = qkv[:, : out.shape[1]].unflatten(1, (kv_heads, -1, size)) * size**-0.5
        gathered, inside = [], []
        for pages, lengths in (
            (rows.prompts[: batch.group_count, : pages_of(batch.longest_prompt)], prompt_lengths),
            (rows.own[rows.slots, : pages_of(batch.longest)], rows.lengths),
        ):
            key, value = (store[pages.long()].transpose(1, 2).flatten(2, 3) for store in (keys, values))
            inside.append(torch.arange(key.shape[2], device=qkv.device) < lengths[:, None])
            # Unused entries of the table point to any page, maybe one with NaN, and 0 times NaN is NaN.
            gathered.append((key, value.masked_fill(~inside[-1][:, None, :, None], 0.0)))
        outside = ~torch.cat((inside[0][rows.groups], inside[1]), dim=-1)[:, None, None]
        out.copy_(attend_to_both(query, batch, gathered[1], gathered[0], outside, None))

    def draw(self, logits: Tensor, rows: StepRows, drawing: Drawing) -> None:
        """Not implemented: `ContinuousBatch` samples."""
        raise NotImplementedError
