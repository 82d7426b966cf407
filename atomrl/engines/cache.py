"""The key-value cache of `NativeEngine`: prompts once per group, completions once per slot; and attention over both.

`KVCache` is pure PyTorch. `KernelKVCache` keeps keys in blocks for the C++ kernel and attends with it while decoding.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from atomrl.engines.decoder import DecoderModel, KernelArgs, Kernels

BLOCK = 32


@dataclass
class DecodeBatch:
    """The completions that are decoded in one step. Tensors are [N] int64; numbers are known without asking a GPU."""

    slots: Tensor
    """Where the completion's keys and values are."""
    groups: Tensor
    """Where its prompt's are."""
    members: Tensor
    """Its place within the group: no two of a group have the same."""
    prompt_lengths: Tensor
    lengths: Tensor
    """Tokens of the completion in the cache, without the one being decoded."""
    longest: int
    """max(lengths) + 1, or more."""
    longest_prompt: int
    slot_count: int
    """max(slots) + 1; those below it that nobody uses are computed in vain."""
    group_count: int
    member_count: int


KeysValues = tuple[Tensor, Tensor]
Keep = Callable[[int, Tensor, Tensor], None]


def run_prompts(model: DecoderModel, rope: tuple[Tensor, Tensor], rows: Sequence[Sequence[int]], keep: Keep) -> Tensor:
    """Causal forward pass over rows; `keep` gets each layer's keys and values [P, kv_heads, T, D], right-padded.

    Returns:
        Hidden states [P, hidden] of the last tokens.
    """
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
    """A `keep` for `run_prompts` of these rows that hands the part after each row's prompt on, right-padded."""
    starts = torch.tensor(prompt_lengths, device=device)
    most = max(len(row) - start for row, start in zip(rows, prompt_lengths, strict=True))
    places = starts[:, None] + torch.arange(most, device=device)
    places = places.clamp(max=max(len(row) for row in rows) - 1)[:, None, :, None]

    def keep_rest(layer: int, key: Tensor, value: Tensor) -> None:
        at = places.expand(-1, key.shape[1], -1, key.shape[3])
        keep(layer, key.gather(2, at), value.gather(2, at))

    return keep_rest


def attend_to_both(
    query: Tensor, rows: DecodeBatch, own: KeysValues, prompt: KeysValues, outside: Tensor, order: Tensor | None
) -> Tensor:
    """Attention of one token of each row to its completion and to its group's prompt, which is read once for the group.

    Args:
        query: [N, kv_heads, R, D], scaled.
        own: keys and values [S, kv_heads, T, D] of the completions.
        prompt: [groups, kv_heads, P, D] of the prompts.
        outside: [N, 1, 1, P + T] True where a row has no token.
        order: [N] where a row is among the S; None: S are the rows.

    Returns:
        [N, heads * D].
    """
    members, (prompt_width, width) = rows.member_count, (prompt[0].shape[2], own[0].shape[2])

    # Queries go to the caches' order, not the caches to the queries': no copy of keys and values.
    def by_own(x: Tensor) -> Tensor:
        if order is None:
            return x
        spread = x.new_zeros(len(own[0]), *x.shape[1:])
        spread[order] = x
        return spread

    def by_group(x: Tensor) -> Tensor:  # [groups, kv, members * R, *]
        spread = x.new_zeros(len(prompt[0]), members, *x.shape[1:])
        spread[rows.groups, rows.members] = x
        return spread.transpose(1, 2).flatten(2, 3)

    def of_own(x: Tensor) -> Tensor:
        return x if order is None else x[order]

    def of_group(x: Tensor) -> Tensor:
        found: Tensor = x.unflatten(2, (members, -1))[rows.groups, :, rows.members]
        return found

    scores = torch.cat((of_group(by_group(query) @ prompt[0].mT), of_own(by_own(query) @ own[0].mT)), dim=-1)
    shares = scores.float().masked_fill(outside, -torch.inf).softmax(-1).to(query.dtype)
    to_prompt, to_own = shares.split((prompt_width, width), dim=-1)
    return (of_own(by_own(to_own) @ own[1]) + of_group(by_group(to_prompt) @ prompt[1])).flatten(1)


class KVCache:
    """Keys and values of completions in slots, and of prompts in groups. Empty until `reserve`.

    All slots have the room of the longest completion, and all groups that of the longest prompt, so that a CPU reads
    them in place; `atomrl.engines.cache` keeps them in pages, for GPUs.

    Args:
        model: gives shape, dtype and projections.
        rope: cosine and sine [max_positions, D / 2].
    """

    def __init__(self, model: DecoderModel, rope: tuple[Tensor, Tensor]) -> None:
        self.model, self.rope, self.device = model, rope, rope[0].device
        self.dtype = model.dtype
        self.free()

    def free(self) -> None:
        """Give back all memory."""
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
        """Room for so many completions of `tokens` tokens, which may grow up to `most_tokens`; what is kept stays."""
        blocks, most = -(-tokens // BLOCK), -(-most_tokens // BLOCK)
        if blocks > self.blocks:
            blocks = max(blocks, min(most, max(4, 2 * self.blocks)))
        if slots > self.slots or blocks > self.blocks:
            self.slots, self.blocks = max(self.slots, slots), max(self.blocks, blocks)
            self._enlarge(self.keys, self.values, self.slots, self.blocks)

    def reserve_prompts(self, groups: int, tokens: int) -> None:
        """Room for so many prompts of `tokens` tokens; what is kept stays."""
        blocks = -(-tokens // BLOCK)
        if groups > self.groups or blocks > self.prompt_blocks:
            self.groups, self.prompt_blocks = max(self.groups, groups), max(self.prompt_blocks, blocks)
            self._enlarge(self.prompt_keys, self.prompt_values, self.groups, self.prompt_blocks)

    def _enlarge(self, keys: list[Tensor], values: list[Tensor], rows: int, blocks: int) -> None:
        for store, new in ((keys, self._new_keys), (values, self._new_values)):
            for layer, old in enumerate(store):
                store[layer] = new(rows, blocks)
                store[layer][tuple(slice(size) for size in old.shape)] = old

    def prefill(self, prompts: Sequence[Sequence[int]], groups: Tensor) -> Tensor:
        """Run prompts and keep their keys and values in `groups` [P]; the last tokens' hidden states [P, hidden]."""

        def keep(layer: int, key: Tensor, value: Tensor) -> None:
            self._write(self.prompt_keys[layer], self.prompt_values[layer], groups, key, value)

        return run_prompts(self.model, self.rope, prompts, keep)

    def restore(self, rows: Sequence[Sequence[int]], prompt_lengths: Sequence[int], slots: Tensor) -> Tensor:
        """Run prompts with the completions begun, keep the completions' part in `slots` [P]; hidden states as above."""

        def keep(layer: int, key: Tensor, value: Tensor) -> None:
            self._write(self.keys[layer], self.values[layer], slots, key, value)

        return run_prompts(self.model, self.rope, rows, after_prompts(rows, prompt_lengths, self.device, keep))

    def _write(self, keys: Tensor, values: Tensor, rows: Tensor, key: Tensor, value: Tensor) -> None:
        keys[rows, :, : key.shape[2]] = key
        values[rows, :, : key.shape[2]] = value

    def decode(self, tokens: Tensor, rows: DecodeBatch) -> Tensor:
        """Hidden states [N, hidden] of the rows' next tokens [N], whose keys and values are added."""
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
        """Move the used slots [N] to the front, so that none is computed in vain; whether they were moved."""
        count = len(slots)
        for store in (self.keys, self.values):
            for cache in store:
                cache[:count] = cache[slots]
        return True


class KernelKVCache(KVCache):
    """Decodes with the C++ kernel: keys in blocks `[D, 32]`, and rows wherever they are, so nothing is ever moved.

    The cache has the precision that was asked for, also where bfloat16 weights are multiplied in float32.
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
        """As `KVCache.decode`."""
        spec, dtype = self.model.spec, self.model.dtype
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
        """Nothing: the kernel skips unused slots."""
        return False


# --------------------------------------------------------------------------------------------------------------------
# Keys and values of `NativeEngine` in pages: a prompt's once for its group, a completion's as it grows.
#
# A page has room for `PAGE` tokens of every layer. Tables on the device say which pages a prompt or a completion has,
# so that a decode step reads and writes through them and never changes an address. A completion's own pages begin
# behind its prompt: no page is shared by prompt and completion, and none has to be copied.

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
