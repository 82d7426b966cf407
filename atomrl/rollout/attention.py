"""The key-value cache of `NativeEngine`: prompts once per group, completions once per slot; and attention over both.

`KVCache` is pure PyTorch. `KernelKVCache` keeps keys in blocks for the C++ kernel and attends with it while decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from atomrl.rollout.decoder import Decoder
from atomrl.rollout.kernel import KernelArgs, Kernels

BLOCK = 32


@dataclass
class Rows:
    """The completions that are decoded in one step, all `[N]` int64."""

    slots: Tensor
    """Where the completion's keys and values are."""
    groups: Tensor
    """Where its prompt's are."""
    members: Tensor
    """Its index within the group."""
    prompt_lengths: Tensor
    lengths: Tensor
    """Tokens of the completion in the cache, without the one being decoded."""
    longest: int
    """max(lengths) + 1."""


class KVCache:
    """Keys and values of at most `slots` completions and `groups` prompts.

    Args:
        decoder: gives shape, dtype and projections.
        slots: completions held at once.
        groups: prompts held at once.
        prompt_tokens: longest prompt.
        completion_tokens: longest completion; room for it grows as it is needed.
        members: completions of one prompt.
        rope: cosine and sine [max_positions, D / 2].
    """

    def __init__(
        self,
        decoder: Decoder,
        slots: int,
        groups: int,
        prompt_tokens: int,
        completion_tokens: int,
        members: int,
        rope: tuple[Tensor, Tensor],
    ):
        self.decoder, self.rope, self.members = decoder, rope, members
        self.device = rope[0].device
        self.slots, self.groups = slots, groups
        self.prompt_blocks = -(-prompt_tokens // BLOCK)
        self.max_blocks = -(-completion_tokens // BLOCK)
        self.blocks = min(4, self.max_blocks)
        layers = range(decoder.spec.layers)
        self.prompt_keys = [self._new_keys(groups, self.prompt_blocks) for _ in layers]
        self.prompt_values = [self._new_values(groups, self.prompt_blocks) for _ in layers]
        self.keys = [self._new_keys(slots, self.blocks) for _ in layers]
        self.values = [self._new_values(slots, self.blocks) for _ in layers]

    def _new_values(self, rows: int, blocks: int) -> Tensor:
        spec = self.decoder.spec
        shape = (rows, spec.kv_heads, blocks * BLOCK, spec.head_dim)
        return torch.zeros(shape, dtype=self.decoder.dtype, device=self.device)

    def _new_keys(self, rows: int, blocks: int) -> Tensor:
        return self._new_values(rows, blocks)

    def fits(self, slots: int, groups: int, prompt_tokens: int, completion_tokens: int, members: int) -> bool:
        """Whether a run of that size can use this cache as it is."""
        return (
            slots <= self.slots
            and groups <= self.groups
            and prompt_tokens <= self.prompt_blocks * BLOCK
            and completion_tokens <= self.max_blocks * BLOCK
            and members == self.members
        )

    def reserve(self, tokens: int) -> None:
        """Make room for completions of `tokens` tokens."""
        if tokens <= self.blocks * BLOCK:
            return
        self.blocks = min(self.max_blocks, 2 * self.blocks)
        for store, new in ((self.keys, self._new_keys), (self.values, self._new_values)):
            for layer, old in enumerate(store):
                store[layer] = new(self.slots, self.blocks)
                store[layer][:, :, : old.shape[2]] = old

    def prefill(self, prompts: list[tuple[int, ...]], groups: Tensor) -> Tensor:
        """Run prompts and keep their keys and values in `groups` [P]; the last tokens' hidden states [P, hidden]."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        width = int(lengths.max())
        inside = torch.arange(width, device=self.device) < lengths[:, None]  # [P, width], right-padded
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        positions = inside.nonzero()[:, 1]
        cosine, sine = self.rope[0][positions], self.rope[1][positions]

        def attend(layer: int, qkv: Tensor) -> Tensor:
            padded = []
            for heads in self.decoder.heads_of(layer, qkv, cosine, sine):
                full = heads.new_zeros(*inside.shape, *heads.shape[1:])
                full[inside] = heads
                padded.append(full.transpose(1, 2))  # [P, heads, width, D]
            query, key, value = padded
            self._write_prompt(layer, groups, key, value)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return mixed.transpose(1, 2)[inside].flatten(1)

        return self.decoder.hidden(tokens, attend)[lengths.cumsum(0) - 1]

    def _write_prompt(self, layer: int, groups: Tensor, key: Tensor, value: Tensor) -> None:
        self.prompt_keys[layer][groups, :, : key.shape[2]] = key
        self.prompt_values[layer][groups, :, : key.shape[2]] = value

    def decode(self, tokens: Tensor, rows: Rows) -> Tensor:
        """Hidden states [N, hidden] of the rows' next tokens [N], whose keys and values are added."""
        positions = rows.prompt_lengths + rows.lengths
        cosine, sine = self.rope[0][positions], self.rope[1][positions]
        prompt_width, width = int(rows.prompt_lengths.max()), rows.longest
        keys_inside = torch.arange(prompt_width, device=self.device) < rows.prompt_lengths[:, None]
        own_inside = torch.arange(width, device=self.device) <= rows.lengths[:, None]
        outside = ~torch.cat((keys_inside, own_inside), dim=-1)[:, None, None]
        kv_heads, head_dim = self.decoder.spec.kv_heads, self.decoder.spec.head_dim
        top_slot, top_group = int(rows.slots.max()) + 1, int(rows.groups.max()) + 1

        def attend(layer: int, qkv: Tensor) -> Tensor:
            query, key, value = self.decoder.heads_of(layer, qkv, cosine, sine)
            self.keys[layer][rows.slots, :, rows.lengths] = key
            self.values[layer][rows.slots, :, rows.lengths] = value
            query = query.unflatten(1, (kv_heads, -1)) * head_dim**-0.5  # [N, kv, R, D]
            # Queries go to the caches' order, not the caches to the queries': no copy of keys and values.
            by_slot = query.new_zeros(top_slot, *query.shape[1:])
            by_slot[rows.slots] = query
            by_group = query.new_zeros(top_group, self.members, *query.shape[1:])
            by_group[rows.groups, rows.members] = query
            by_group = by_group.transpose(1, 2).flatten(2, 3)  # [groups, kv, members * R, D]
            own = (by_slot @ self.keys[layer][:top_slot, :, :width].mT)[rows.slots]
            prompt = by_group @ self.prompt_keys[layer][:top_group, :, :prompt_width].mT
            prompt = prompt.unflatten(2, (self.members, -1))[rows.groups, :, rows.members]
            scores = torch.cat((prompt, own), dim=-1).float().masked_fill(outside, -torch.inf)
            prompt, own = scores.softmax(-1).to(query.dtype).split((prompt_width, width), dim=-1)
            by_slot = own.new_zeros(top_slot, *own.shape[1:])
            by_slot[rows.slots] = own
            by_group = prompt.new_zeros(top_group, self.members, *prompt.shape[1:])
            by_group[rows.groups, rows.members] = prompt
            by_group = by_group.transpose(1, 2).flatten(2, 3)
            own = (by_slot @ self.values[layer][:top_slot, :, :width])[rows.slots]
            prompt = by_group @ self.prompt_values[layer][:top_group, :, :prompt_width]
            return (own + prompt.unflatten(2, (self.members, -1))[rows.groups, :, rows.members]).flatten(1)

        return self.decoder.hidden(tokens, attend)

    def compact(self, slots: Tensor) -> Tensor:
        """Move the used slots together where many are unused, so that none is computed; the new slots."""
        count = len(slots)
        if not count or count > 0.85 * (int(slots.max()) + 1):
            return slots
        for store in (self.keys, self.values):
            for cache in store:
                cache[:count] = cache[slots]
        return torch.arange(count, device=slots.device)


class KernelKVCache(KVCache):
    """Decodes with the C++ kernel: keys in blocks `[D, 32]`, and rows wherever they are, so nothing is ever moved.

    The cache has the precision that was asked for, also where bfloat16 weights are multiplied in float32.
    """

    def __init__(self, decoder: Decoder, kernels: Kernels, **size: Any):
        self.kernels = kernels
        super().__init__(decoder, **size)

    def _new_values(self, rows: int, blocks: int) -> Tensor:
        spec = self.decoder.spec
        return torch.zeros(rows, spec.kv_heads, blocks * BLOCK, spec.head_dim, dtype=self.decoder.weight_dtype)

    def _new_keys(self, rows: int, blocks: int) -> Tensor:
        return self._new_values(rows, blocks).view(rows, -1, blocks, self.decoder.spec.head_dim, BLOCK)

    def _write_prompt(self, layer: int, groups: Tensor, key: Tensor, value: Tensor) -> None:
        width = key.shape[2]
        key = F.pad(key, (0, 0, 0, -width % BLOCK)).unflatten(2, (-1, BLOCK)).mT
        self.prompt_keys[layer][groups, :, : key.shape[2]] = key.to(self.decoder.weight_dtype)
        self.prompt_values[layer][groups, :, :width] = value.to(self.decoder.weight_dtype)

    def decode(self, tokens: Tensor, rows: Rows) -> Tensor:
        """As `KVCache.decode`."""
        spec, dtype = self.decoder.spec, self.decoder.dtype
        out = torch.empty(len(tokens), spec.heads * spec.head_dim, dtype=dtype)
        indices = [row.contiguous() for row in (rows.slots, rows.groups, rows.prompt_lengths, rows.lengths)]
        args = KernelArgs(
            out=out.data_ptr(),
            cosine=self.rope[0].data_ptr(),
            sine=self.rope[1].data_ptr(),
            rows=len(tokens),
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            blocks=self.blocks,
            prompt_blocks=self.prompt_blocks,
            threads=torch.get_num_threads(),
            act_bf16=dtype == torch.bfloat16,
            cache_bf16=self.decoder.weight_dtype == torch.bfloat16,
            eps=spec.norm_eps,
        )
        args.slots, args.groups, args.prompt_lengths, args.lengths = (index.data_ptr() for index in indices)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            weights = self.decoder.layers[layer]
            args.qkv = qkv.data_ptr()
            if weights.q_norm is not None and weights.k_norm is not None:
                args.q_norm, args.k_norm = weights.q_norm.data_ptr(), weights.k_norm.data_ptr()
            args.keys, args.values = self.keys[layer].data_ptr(), self.values[layer].data_ptr()
            args.prompt_keys = self.prompt_keys[layer].data_ptr()
            args.prompt_values = self.prompt_values[layer].data_ptr()
            self.kernels.attention(args)
            return out

        return self.decoder.hidden(tokens, attend)

    def compact(self, slots: Tensor) -> Tensor:
        """Nothing: the kernel skips unused slots."""
        return slots
