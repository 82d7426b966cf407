"""KV caches of `NativeEngine`, with prefill and decode attention over them.

| class | layout | used |
|---|---|---|
| `KVCache` | completions in slots, prompts in groups, each as long as the longest | CPU, pure PyTorch; the reference |
| `KernelKVCache` | the same, with keys in blocks for the C++ kernel | CPU |
| `PagedKVCache` | pages of 32 tokens | GPU (`atomrl.engines.paged`) |

In all of them a prompt is stored once for its group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from atomrl.engines.decoder import DecoderModel, KernelArgs, Kernels

BLOCK = 32
"""Tokens of a block of keys in the slot layout."""
PAGE = 32
"""Tokens of a page."""
_POOL_GROWTH = 1.25
"""Factor by which the pool of pages grows."""

KeysValues = tuple[Tensor, Tensor]
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


# --------------------------------------------------------------------------------------------------------------------
# Prefill.


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


# --------------------------------------------------------------------------------------------------------------------
# Slots.


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


# --------------------------------------------------------------------------------------------------------------------
# Pages. A page has room for `PAGE` tokens of every layer. Page tables on the device map prompts and completions to
# their pages, so a decode step reads and writes through them and no address changes between steps. A completion starts
# a page of its own behind its prompt: no page is shared by prompt and completion, and none is copied.


class PagedKVCache:
    """Keys and values in pages from a pool that grows. Empty until `allocate` or `prefill`.

    Args:
        model: defines shape, dtype and projections.
        rope: cosine and sine [max_positions, D / 2].
        rows: initial rows of the completions' page table.
    """

    def __init__(self, model: DecoderModel, rope: tuple[Tensor, Tensor], rows: int) -> None:
        self.model, self.rope, self.device, self.rows = model, rope, rope[0].device, rows
        self.generation = 0
        """Increases whenever a tensor is replaced, which invalidates CUDA graphs."""
        self.pool = self.least_pool = 0
        """Pages of the pool, and those that it has at least as soon as one is allocated."""
        self.free()

    def free(self, least_pool: int = 0) -> None:
        """Free all memory; the pool will have at least `least_pool` pages when it is used again."""
        self.generation += 1
        self.slots = self.groups = self.pool = 0
        self.least_pool = least_pool
        self.unused: list[int] = []
        self.own, self.prompts = PageTable(self.device), PageTable(self.device)
        self.keys, self.values = ([self._new(0) for _ in range(self.model.spec.layers)] for _ in range(2))

    def _new(self, pages: int) -> Tensor:
        spec = self.model.spec
        # Not `empty`: what lies beyond a row's end is multiplied by 0, and 0 times NaN is NaN.
        return torch.zeros(pages, spec.kv_heads, PAGE, spec.head_dim, dtype=self.model.dtype, device=self.device)

    def reserve(self, slots: int, tokens: int, most_tokens: int) -> None:
        """Enlarge the page table for `slots` completions of `most_tokens` tokens; `allocate` adds the pages."""
        self.slots = max(self.slots, slots, self.rows)
        self.generation += self.own.grow(self.slots, pages_of(most_tokens))

    def reserve_prompts(self, groups: int, tokens: int) -> None:
        """Enlarge the page table for `groups` prompts of `tokens` tokens."""
        self.groups = max(self.groups, groups)
        self.generation += self.prompts.grow(self.groups, pages_of(tokens))

    def free_except(self, slots: Collection[int], groups: Collection[int]) -> None:
        """Free the pages of all other completions and prompts."""
        self.unused += self.own.free_except(slots)
        self.unused += self.prompts.free_except(groups)

    def allocate(self, tokens: Mapping[int, int]) -> None:
        """Allocate pages for completions: slot -> number of tokens it must have room for."""
        self._allocate(self.own, tokens)

    def allocate_prompts(self, tokens: Mapping[int, int]) -> None:
        """Allocate pages for prompts: group -> number of tokens."""
        self._allocate(self.prompts, tokens)

    def _allocate(self, table: PageTable, tokens: Mapping[int, int]) -> None:
        missing = {row: pages_of(count) - len(table.pages.get(row, ())) for row, count in tokens.items()}
        total = sum(count for count in missing.values() if count > 0)
        if not total:
            return
        if total > len(self.unused):
            self.grow(max(self.pool + total - len(self.unused), int(_POOL_GROWTH * self.pool), self.least_pool))
        for row, count in missing.items():
            if count > 0:
                table.add(row, self.unused[:count])
                del self.unused[:count]
        table.upload()

    def grow(self, pages: int) -> None:
        """Enlarge the pool to this number of pages, and keep their contents."""
        self.generation += 1
        for store in (self.keys, self.values):  # layer by layer, so that there is never a second copy of the cache
            for layer, old in enumerate(store):
                new = self._new(pages)
                new[: len(old)] = old
                store[layer] = new
        self.unused += range(self.pool, pages)
        self.pool = pages

    def prefill(self, prompts: Sequence[Sequence[int]], groups: Tensor) -> Tensor:
        """See `KVCache.prefill`."""
        lengths = dict(zip(groups.tolist(), map(len, prompts), strict=True))
        self.allocate_prompts(lengths)
        return run_prompts(self.model, self.rope, prompts, self._writer(self.prompts, lengths))

    def restore(self, rows: Sequence[Sequence[int]], prompt_lengths: Sequence[int], slots: Tensor) -> Tensor:
        """See `KVCache.restore`."""
        completions = [len(row) - start for row, start in zip(rows, prompt_lengths, strict=True)]
        lengths = dict(zip(slots.tolist(), completions, strict=True))
        self._allocate(self.own, lengths)
        keep = after_prompts(rows, prompt_lengths, self.device, self._writer(self.own, lengths))
        return run_prompts(self.model, self.rope, rows, keep)

    def _writer(self, table: PageTable, lengths: Mapping[int, int]) -> Keep:
        """Return a `keep` that writes rows of these lengths (table row -> tokens) into their pages."""
        counts = [pages_of(length) for length in lengths.values()]
        pages = torch.tensor([page for row, n in zip(lengths, counts, strict=True) for page in table.pages[row][:n]])
        owners = torch.repeat_interleave(torch.tensor(counts))  # the row of each page, and the page's index there
        places = torch.cat([torch.arange(count) for count in counts])
        pages, owners, places = (index.to(self.device) for index in (pages, owners, places))

        def keep(layer: int, key: Tensor, value: Tensor) -> None:
            for store, part in ((self.keys, key), (self.values, value)):
                blocks = F.pad(part, (0, 0, 0, -part.shape[2] % PAGE)).unflatten(2, (-1, PAGE))
                store[layer][pages] = blocks.transpose(1, 2)[owners, places]

        return keep

    def compact(self, slots: Tensor) -> bool:
        """Do nothing: unused slots are not computed."""
        return False

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use."""
        pages = self.pool - len(self.unused)
        return pages * sum(layer[:1].nbytes for layer in (*self.keys, *self.values)) if pages else 0


class PageTable:
    """Pages of each row, on the host and as `device` [rows, pages] int32."""

    def __init__(self, device: torch.device) -> None:
        self.pages: dict[int, list[int]] = {}
        self.host = np.zeros((0, 0), dtype=np.int32)
        self.device = torch.zeros(0, 0, dtype=torch.int32, device=device)

    def grow(self, rows: int, width: int) -> bool:
        """Enlarge the table to at least these rows and pages per row. Returns whether the device tensor was replaced.

        Replacing it captures the CUDA graphs again, and turns of an episode raise the width, so it grows by at least
        half.
        """
        old = self.host
        if rows <= old.shape[0] and width <= old.shape[1]:
            return False
        if width > old.shape[1]:
            width = max(width, int(1.5 * old.shape[1]))
        self.host = np.zeros((max(rows, old.shape[0]), max(width, old.shape[1])), dtype=np.int32)
        self.host[: old.shape[0], : old.shape[1]] = old
        self.device = torch.from_numpy(self.host).to(self.device.device, copy=True)
        return True

    def add(self, row: int, pages: Sequence[int]) -> None:
        """Append pages to a row on the host; `upload` must follow."""
        current = self.pages.setdefault(row, [])
        self.host[row, len(current) : len(current) + len(pages)] = pages
        current += pages

    def free_except(self, rows: Collection[int]) -> list[int]:
        """Remove all other rows and return their pages."""
        removed = self.pages.keys() - rows
        return [page for row in sorted(removed) for page in self.pages.pop(row)]

    def upload(self) -> None:
        """Copy the host's table to the device."""
        self.device.copy_(torch.from_numpy(self.host))


def pages_of(tokens: int) -> int:
    """Pages for so many tokens."""
    return -(-tokens // PAGE)
