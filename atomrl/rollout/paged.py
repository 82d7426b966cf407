"""Keys and values of `NativeEngine` in pages: a prompt's once for its group, a completion's as it grows.

A page has room for `PAGE` tokens of every layer. Tables on the device say which pages a prompt or a completion has, so
that a decode step reads and writes through them and never changes an address. A completion's own pages begin behind
its prompt: no page is shared by prompt and completion, and none has to be copied.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from atomrl.rollout.attention import Keep, after_prompts, run_prompts
from atomrl.rollout.decoder import DecoderModel

PAGE = 32
_GROWTH = 1.25


class PageTable:
    """Which pages each row has, on the host and as `device` [rows, pages] int32."""

    def __init__(self, device: torch.device) -> None:
        self.pages: dict[int, list[int]] = {}
        self.host = np.zeros((0, 0), dtype=np.int32)
        self.device = torch.zeros(0, 0, dtype=torch.int32, device=device)

    def grow(self, rows: int, width: int) -> bool:
        """Room for so many rows of so many pages. Returns whether the tensor on the device is another one.

        Turns of an episode raise the width, and another tensor has graphs captured anew: the width grows by more than
        was asked for.
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
        """Give a row more pages; `upload` is then to be called."""
        held = self.pages.setdefault(row, [])
        self.host[row, len(held) : len(held) + len(pages)] = pages
        held += pages

    def keep(self, rows: Collection[int]) -> list[int]:
        """Take the pages of all other rows, and return them."""
        gone = self.pages.keys() - rows
        return [page for row in sorted(gone) for page in self.pages.pop(row)]

    def upload(self) -> None:
        """Bring the table to the device."""
        self.device.copy_(torch.from_numpy(self.host))


class PagedKVCache:
    """Keys and values in pages of a pool that grows. Empty until `hold` or `prefill`.

    Args:
        model: gives shape, dtype and projections.
        rope: cosine and sine [max_positions, D / 2].
        rows: completions for which there is room in the table from the start.
    """

    def __init__(self, model: DecoderModel, rope: tuple[Tensor, Tensor], rows: int) -> None:
        self.model, self.rope, self.device, self.rows = model, rope, rope[0].device, rows
        self.generation = 0
        """How often a tensor has been replaced by another one."""
        self.free()

    def free(self) -> None:
        """Give back all memory."""
        self.generation += 1
        self.slots = self.groups = self.pool = 0
        self.unused: list[int] = []
        self.own, self.prompts = PageTable(self.device), PageTable(self.device)
        self.keys, self.values = ([self._new(0) for _ in range(self.model.spec.layers)] for _ in range(2))

    def _new(self, pages: int) -> Tensor:
        spec = self.model.spec
        # Not `empty`: what is beyond a row's end counts 0 times, and 0 times NaN is NaN.
        return torch.zeros(pages, spec.kv_heads, PAGE, spec.head_dim, dtype=self.model.dtype, device=self.device)

    def reserve(self, slots: int, tokens: int, most_tokens: int) -> None:
        """Room in the table for so many completions of up to `most_tokens`; they get pages as they grow (`hold`)."""
        self.slots = max(self.slots, slots, self.rows)
        self.generation += self.own.grow(self.slots, pages_of(most_tokens))

    def reserve_prompts(self, groups: int, tokens: int) -> None:
        """Room in the table for so many prompts of `tokens` tokens."""
        self.groups = max(self.groups, groups)
        self.generation += self.prompts.grow(self.groups, pages_of(tokens))

    def keep(self, slots: Collection[int], groups: Collection[int]) -> None:
        """Take the pages of all other completions and prompts back."""
        self.unused += self.own.keep(slots)
        self.unused += self.prompts.keep(groups)

    def hold(self, tokens: Mapping[int, int]) -> None:
        """Let completions (by slot) have the pages for so many tokens."""
        self._give(self.own, tokens)

    def _give(self, table: PageTable, tokens: Mapping[int, int]) -> None:
        short = {row: pages_of(count) - len(table.pages.get(row, ())) for row, count in tokens.items()}
        need = sum(count for count in short.values() if count > 0)
        if not need:
            return
        if need > len(self.unused):
            self._grow(max(self.pool + need - len(self.unused), int(_GROWTH * self.pool)))
        for row, count in short.items():
            if count > 0:
                table.add(row, self.unused[:count])
                del self.unused[:count]
        table.upload()

    def _grow(self, pages: int) -> None:
        self.generation += 1
        for store in (self.keys, self.values):  # one layer after the other: no second cache
            for layer, old in enumerate(store):
                new = self._new(pages)
                new[: len(old)] = old
                store[layer] = new
        self.unused += range(self.pool, pages)
        self.pool = pages

    def prefill(self, prompts: Sequence[Sequence[int]], groups: Tensor) -> Tensor:
        """Run prompts and keep their keys and values for `groups` [P]; the last tokens' hidden states [P, hidden]."""
        lengths = dict(zip(groups.tolist(), map(len, prompts), strict=True))
        self._give(self.prompts, lengths)
        return run_prompts(self.model, self.rope, prompts, self._writer(self.prompts, lengths))

    def restore(self, rows: Sequence[Sequence[int]], prompt_lengths: Sequence[int], slots: Tensor) -> Tensor:
        """Run prompts with the completions begun, keep the completions' part in `slots` [P]; hidden states as above."""
        begun = [len(row) - start for row, start in zip(rows, prompt_lengths, strict=True)]
        lengths = dict(zip(slots.tolist(), begun, strict=True))
        self._give(self.own, lengths)
        keep = after_prompts(rows, prompt_lengths, self.device, self._writer(self.own, lengths))
        return run_prompts(self.model, self.rope, rows, keep)

    def _writer(self, table: PageTable, lengths: Mapping[int, int]) -> Keep:
        """Writes each layer's keys and values [P, kv_heads, T, D] of rows of these lengths into their pages."""
        counts = [pages_of(length) for length in lengths.values()]
        pages = torch.tensor([page for row, n in zip(lengths, counts, strict=True) for page in table.pages[row][:n]])
        owners = torch.repeat_interleave(torch.tensor(counts))
        places = torch.cat([torch.arange(count) for count in counts])
        pages, owners, places = (index.to(self.device) for index in (pages, owners, places))

        def keep(layer: int, key: Tensor, value: Tensor) -> None:
            for store, part in ((self.keys, key), (self.values, value)):
                blocks = torch.nn.functional.pad(part, (0, 0, 0, -part.shape[2] % PAGE)).unflatten(2, (-1, PAGE))
                store[layer][pages] = blocks.transpose(1, 2)[owners, places]

        return keep

    def compact(self, slots: Tensor) -> bool:
        """Nothing: unused slots are not computed."""
        return False

    @property
    def used_bytes(self) -> int:
        """Number of the pages that prompts and completions have."""
        pages = self.pool - len(self.unused)
        return pages * sum(layer[:1].nbytes for layer in (*self.keys, *self.values)) if pages else 0


def pages_of(tokens: int) -> int:
    """Pages for so many tokens."""
    return -(-tokens // PAGE)
