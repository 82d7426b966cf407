"""Base of the KV caches of `NativeEngine`: the rows of a decode step, and attention over the prompts of groups.

| class | layout | used |
|---|---|---|
| `slot_cache.KVCache` | completions in slots, prompts in groups, each as long as the longest | CPU; the reference |
| `slot_cache.KernelKVCache` | the same, with keys in blocks for the C++ kernel | CPU |
| `paged_cache.PagedKVCache` | pages of 32 tokens | GPU |

In all of them a prompt is stored once for its group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from atomrl.engines.native.decoder import DecoderModel

Keep = Callable[[int, Tensor, Tensor], None]
"""Called with each layer's index, keys and values [P, kv_heads, T, D]; stores them."""


@dataclass
class DecodeBatch:
    """The rows of a decode step. Tensors are [N] int64; the integers are known to the host without a GPU sync."""

    slots: Tensor
    """Cache slot of the completion."""
    groups: Tensor
    """Cache index of the prompt."""
    members: Tensor
    """Index within the group, unique among its running rows."""
    prompt_lengths: Tensor
    lengths: Tensor
    """Completion tokens in the cache, without the one being decoded."""
    longest: int
    """Upper bound of max(lengths) + 1."""
    longest_prompt: int
    slot_count: int
    """max(slots) + 1; unused slots below it are computed too."""
    group_count: int
    member_count: int


def run_prompts(model: DecoderModel, rope: tuple[Tensor, Tensor], rows: Sequence[Sequence[int]], keep: Keep) -> Tensor:
    """Causal forward pass over token rows; `keep` receives each layer's keys and values, right-padded.

    Returns:
        Hidden states [P, hidden] of the last tokens.
    """
    # The projections run over the P rows packed end to end; only attention sees them padded to [P, width].
    device = rope[0].device
    lengths = [len(row) for row in rows]
    width = max(lengths)
    tokens = torch.tensor([token for row in rows for token in row], device=device)
    places = torch.tensor([index * width + at for index, size in enumerate(lengths) for at in range(size)])
    places = places.to(device)
    positions = places % width
    cosine, sine = rope[0][positions], rope[1][positions]

    def attend(layer: int, qkv: Tensor) -> Tensor:
        padded = []
        for heads in model.heads_of(layer, qkv, cosine, sine):
            full = heads.new_zeros(len(rows) * width, *heads.shape[1:])
            full[places] = heads
            padded.append(full.unflatten(0, (len(rows), width)).transpose(1, 2))  # [P, heads, width, D]
        query, key, value = padded
        keep(layer, key, value)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(0, 1)[places].flatten(1)

    ends = torch.tensor(lengths, device=device).cumsum(0) - 1
    return model.hidden(tokens, attend)[ends]


def after_prompts(
    rows: Sequence[Sequence[int]], prompt_lengths: Sequence[int], device: torch.device, keep: Keep
) -> Keep:
    """Wrap `keep` to receive only the completion part of each row, right-padded (the prompt is stored elsewhere)."""
    starts = torch.tensor(prompt_lengths, device=device)
    most = max(len(row) - start for row, start in zip(rows, prompt_lengths, strict=True))
    places = starts[:, None] + torch.arange(most, device=device)
    places = places.clamp(max=max(len(row) for row in rows) - 1)[:, None, :, None]

    def keep_rest(layer: int, key: Tensor, value: Tensor) -> None:
        at = places.expand(-1, key.shape[1], -1, key.shape[3])
        keep(layer, key.gather(2, at), value.gather(2, at))

    return keep_rest
