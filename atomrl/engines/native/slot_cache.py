"""KV caches with one slot per row, which decoding on a CPU reads in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from atomrl.engines.native.cache import DecodeBatch, after_prompts, run_prompts
from atomrl.engines.native.cpu_kernels import KernelArgs, Kernels
from atomrl.engines.native.decoder import DecoderModel

BLOCK = 32
"""Tokens of a block of keys in the slot layout."""
KeysValues = tuple[Tensor, Tensor]


class KVCache:
    """Keys and values of completions in slots, and of prompts in groups. Empty until `reserve`.

    All slots are as long as the longest completion, and all groups as the longest prompt, so that a CPU reads them in
    place. `PagedKVCache` is the layout for GPUs.

    Args:
        model: defines shape, dtype and projections.
        rope: cosine and sine [max_positions, D / 2].
    """

    def __init__(self, model: DecoderModel, rope: tuple[Tensor, Tensor]) -> None:
        self.model, self.rope, self.device = model, rope, rope[0].device
        self.dtype = model.dtype
        self.free()

    def free(self) -> None:
        """Free all memory."""
        layers = range(self.model.spec.layers)
        self.slots = self.groups = self.blocks = self.prompt_blocks = 0
        self.keys, self.prompt_keys = ([self._new_keys(0, 0) for _ in layers] for _ in range(2))
        self.values, self.prompt_values = ([self._new_values(0, 0) for _ in layers] for _ in range(2))

    def _new_values(self, rows: int, blocks: int) -> Tensor:
        spec = self.model.spec
        shape = (rows, spec.kv_heads, blocks * BLOCK, spec.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _new_keys(self, rows: int, blocks: int) -> Tensor:
        return self._new_values(rows, blocks)

    def reserve(self, slots: int, tokens: int, most_tokens: int) -> None:
        """Allocate at least `slots` slots of `tokens` tokens, which may later grow to `most_tokens`. Keeps contents."""
        blocks, most = -(-tokens // BLOCK), -(-most_tokens // BLOCK)
        if blocks > self.blocks:
            blocks = max(blocks, min(most, max(4, 2 * self.blocks)))
        if slots > self.slots or blocks > self.blocks:
            self.slots, self.blocks = max(self.slots, slots), max(self.blocks, blocks)
            self.enlarge(self.keys, self.values, self.slots, self.blocks)

    def reserve_prompts(self, groups: int, tokens: int) -> None:
        """Allocate at least `groups` prompts of `tokens` tokens. Keeps contents."""
        blocks = -(-tokens // BLOCK)
        if groups > self.groups or blocks > self.prompt_blocks:
            self.groups, self.prompt_blocks = max(self.groups, groups), max(self.prompt_blocks, blocks)
            self.enlarge(self.prompt_keys, self.prompt_values, self.groups, self.prompt_blocks)

    def enlarge(self, keys: list[Tensor], values: list[Tensor], rows: int, blocks: int) -> None:
        """Replace the tensors of all layers by larger ones with the same contents."""
        for store, new in ((keys, self._new_keys), (values, self._new_values)):
            for layer, old in enumerate(store):
                store[layer] = new(rows, blocks)
                store[layer][tuple(slice(size) for size in old.shape)] = old

    def prefill(self, prompts: Sequence[Sequence[int]], groups: Tensor) -> Tensor:
        """Run prompts and store their keys and values in `groups` [P].

        Returns:
            Hidden states [P, hidden] of the last tokens.
        """

        def keep(layer: int, key: Tensor, value: Tensor) -> None:
            self._write(self.prompt_keys[layer], self.prompt_values[layer], groups, key, value)

        return run_prompts(self.model, self.rope, prompts, keep)

    def restore(self, rows: Sequence[Sequence[int]], prompt_lengths: Sequence[int], slots: Tensor) -> Tensor:
        """Run prompts with partial completions and store the completions' keys and values in `slots` [P].

        Returns:
            Hidden states [P, hidden] of the last tokens.
        """

        def keep(layer: int, key: Tensor, value: Tensor) -> None:
            self._write(self.keys[layer], self.values[layer], slots, key, value)

        return run_prompts(self.model, self.rope, rows, after_prompts(rows, prompt_lengths, self.device, keep))

    def _write(self, keys: Tensor, values: Tensor, rows: Tensor, key: Tensor, value: Tensor) -> None:
        keys[rows, :, : key.shape[2]] = key
        values[rows, :, : key.shape[2]] = value

    def decode(self, tokens: Tensor, rows: DecodeBatch) -> Tensor:
        """Decode one token [N] of each row and store its keys and values; hidden states [N, hidden]."""
        positions = rows.prompt_lengths + rows.lengths
        cosine, sine = self.rope[0][positions], self.rope[1][positions]
        prompt_width, width = rows.longest_prompt, rows.longest
        keys_inside = torch.arange(prompt_width, device=self.device) < rows.prompt_lengths[:, None]
        own_inside = torch.arange(width, device=self.device) <= rows.lengths[:, None]
        outside = ~torch.cat((keys_inside, own_inside), dim=-1)[:, None, None]
        top_slot, top_group = rows.slot_count, rows.group_count
        kv_heads, head_dim = self.model.spec.kv_heads, self.model.spec.head_dim

        def attend(layer: int, qkv: Tensor) -> Tensor:
            query, key, value = self.model.heads_of(layer, qkv, cosine, sine)
            self.keys[layer][rows.slots, :, rows.lengths] = key
            self.values[layer][rows.slots, :, rows.lengths] = value
            query = query.unflatten(1, (kv_heads, -1)) * head_dim**-0.5  # [N, kv, R, D]
            own = (self.keys[layer][:top_slot, :, :width], self.values[layer][:top_slot, :, :width])
            prompt = (
                self.prompt_keys[layer][:top_group, :, :prompt_width],
                self.prompt_values[layer][:top_group, :, :prompt_width],
            )
            return attend_to_both(query, rows, own, prompt, outside, rows.slots)

        return self.model.hidden(tokens, attend)

    def compact(self, slots: Tensor) -> bool:
        """Move the used slots [N] to the front, so that decoding skips unused ones. Returns whether they moved."""
        count = len(slots)
        for store in (self.keys, self.values):
            for cache in store:
                cache[:count] = cache[slots]
        return True


def attend_to_both(
    query: Tensor, rows: DecodeBatch, own: KeysValues, prompt: KeysValues, outside: Tensor, order: Tensor | None
) -> Tensor:
    """Attention of one token per row over its prompt and its completion. A prompt is read once for all of its group.

    Args:
        query: [N, kv_heads, R, D], scaled; R query heads share a key head.
        own: keys and values [S, kv_heads, T, D] of the completions.
        prompt: [groups, kv_heads, P, D] of the prompts.
        outside: [N, 1, 1, P + T] True where a row has no token.
        order: [N] index of each row among the S; None: S are the rows themselves.

    Returns:
        [N, heads * D].
    """
    members, (prompt_width, width) = rows.member_count, (prompt[0].shape[2], own[0].shape[2])

    # Scatter the (small) queries into the caches' order rather than gather the (large) caches into the queries' order.
    def by_own(x: Tensor) -> Tensor:  # [N, *] -> [S, *]
        if order is None:
            return x
        spread = x.new_zeros(own[0].shape[0], *x.shape[1:])
        spread[order] = x
        return spread

    def by_group(x: Tensor) -> Tensor:  # [N, kv, R, *] -> [groups, kv, members * R, *]
        spread = x.new_zeros(prompt[0].shape[0], members, *x.shape[1:])
        spread[rows.groups, rows.members] = x
        return spread.transpose(1, 2).flatten(2, 3)

    def of_own(x: Tensor) -> Tensor:  # inverse of by_own
        return x if order is None else x[order]

    def of_group(x: Tensor) -> Tensor:  # inverse of by_group
        y: Tensor = x.unflatten(2, (members, -1))[rows.groups, :, rows.members]
        return y

    scores = torch.cat((of_group(by_group(query) @ prompt[0].mT), of_own(by_own(query) @ own[0].mT)), dim=-1)
    shares = scores.float().masked_fill(outside, -torch.inf).softmax(-1).to(query.dtype)
    to_prompt, to_own = shares.split((prompt_width, width), dim=-1)
    return (of_own(by_own(to_own) @ own[1]) + of_group(by_group(to_prompt) @ prompt[1])).flatten(1)


class KernelKVCache(KVCache):
    """`KVCache` for the C++ decode kernel: keys in blocks `[D, 32]`. Unused slots cost nothing, so rows never move.

    The cache has the weights' dtype, also where bfloat16 weights are multiplied in float32.
    """

    def __init__(self, model: DecoderModel, rope: tuple[Tensor, Tensor], kernels: Kernels) -> None:
        super().__init__(model, rope)
        self.kernels, self.dtype = kernels, model.weight_dtype
        self.free()

    def _new_keys(self, rows: int, blocks: int) -> Tensor:
        spec = self.model.spec
        return self._new_values(rows, blocks).view(rows, spec.kv_heads, blocks, spec.head_dim, BLOCK)

    def _write(self, keys: Tensor, values: Tensor, rows: Tensor, key: Tensor, value: Tensor) -> None:
        width = key.shape[2]
        key = F.pad(key, (0, 0, 0, -width % BLOCK)).unflatten(2, (-1, BLOCK)).mT
        keys[rows, :, : key.shape[2]] = key.to(keys.dtype)
        values[rows, :, :width] = value.to(values.dtype)

    def decode(self, tokens: Tensor, rows: DecodeBatch) -> Tensor:
        """See `KVCache.decode`."""
        spec, dtype = self.model.spec, self.model.dtype
        out = torch.empty(len(tokens), spec.heads * spec.head_dim, dtype=dtype)
        # The kernel takes a struct of pointers; `indices` keeps its tensors alive until the last call.
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
            cache_bf16=self.dtype == torch.bfloat16,
            eps=spec.norm_eps,
        )
        args.slots, args.groups, args.prompt_lengths, args.lengths = (index.data_ptr() for index in indices)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            weights = self.model.layers[layer]
            args.qkv = qkv.data_ptr()
            if weights.q_norm is not None and weights.k_norm is not None:
                args.q_norm, args.k_norm = weights.q_norm.data_ptr(), weights.k_norm.data_ptr()
            args.keys, args.values = self.keys[layer].data_ptr(), self.values[layer].data_ptr()
            args.prompt_keys = self.prompt_keys[layer].data_ptr()
            args.prompt_values = self.prompt_values[layer].data_ptr()
            self.kernels.attention(args)
            return out

        return self.model.hidden(tokens, attend)

    def compact(self, slots: Tensor) -> bool:
        """Do nothing: the kernel skips unused slots."""
        return False
