"""`PagedKVCache`: keys and values in pages, for GPUs. A page has room for `PAGE` tokens of every layer.

Page tables on the device map prompts and completions to their pages, so a decode step reads and writes through them and
no address changes between steps. A completion starts a page of its own behind its prompt: no page is shared by prompt
and completion, and none is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from atomrl.engines.native.cache import Keep, after_prompts, run_prompts
from atomrl.engines.native.decoder import DecoderModel

PAGE = 32
"""Tokens of a page."""
_POOL_GROWTH = 1.25
"""Factor by which the pool of pages grows."""


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
