"""Packing: the hidden states of a micro-batch without redundant computation.

The completions of a group share a prompt. It is computed once, and they attend to its keys and values. Not computed
are padding, tokens after the last one in the loss, and in the last layer all states but the requested ones. The rest
is one stream of tokens [N, H]; only attention knows the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from atomrl.common.devices import to_device
from atomrl.models.attention import Block, Spans
from atomrl.models.sequence_parallel import Share, part_sizes
from atomrl.types import Image

LEAST_SAVING = 1 / 32
"""Prompts are shared if that saves at least this share of the tokens, because attention in two parts costs a little."""


def packs_rows(setting: bool | None, device: str, dtype: torch.dtype) -> bool:
    """Return True if rows are packed on a type of device.

    Args:
        setting: `model.pack_rows`; None: on a CPU, and on a GPU in bfloat16, which variable-length attention needs.

    Example:
        >>> packs_rows(None, "cpu", torch.float32), packs_rows(None, "cuda", torch.float32)
        (True, False)
    """
    if setting is not None:
        return setting
    return device == "cpu" or (dtype == torch.bfloat16 and find_spec("torch.nn.attention.varlen") is not None)


@dataclass(frozen=True)
class Stream:
    """The packed tokens of a micro-batch. Created on the CPU; the model moves it to its device (`to`)."""

    source: Tensor
    """[N] index of each token in the flattened [B * T]."""
    positions: Tensor
    """[N] position of each token in its row."""
    before: Tensor
    """[n] index in the stream of the token before each wanted one."""
    blocks: tuple[Block, ...]
    spans: Spans | None = None
    """Arguments of variable-length attention, on a GPU."""
    share: Share | None = None
    """With sequence parallelism: `source`, `positions` and `before` are those of this rank, `blocks` of all."""

    def to(self, device: torch.device) -> "Stream":
        """Copy to a GPU and add `spans`; on a CPU, return self. Blocks stay on the CPU."""
        if device.type == "cpu":
            return self
        spans = Spans.of(self.blocks)
        order = None if spans.order is None else to_device(spans.order, device)
        spans = replace(
            spans, queries=to_device(spans.queries, device), keys=to_device(spans.keys, device), order=order
        )
        share = None if self.share is None else replace(self.share, positions=to_device(self.share.positions, device))
        source, positions, before = (to_device(part, device) for part in (self.source, self.positions, self.before))
        return Stream(source, positions, before, self.blocks, spans, share)

    def cut(self, group: Any) -> tuple["Stream", Tensor]:
        """Return this rank's share of the stream, and a mask [n] of the `before` tokens in it."""
        sizes = part_sizes(len(self.source), dist.get_world_size(group))
        start = sum(sizes[: (rank := dist.get_rank(group))])
        stop = start + sizes[rank]
        own = (self.before >= start) & (self.before < stop)
        share = Share(group, sizes, self.positions)
        parts = (self.source[start:stop], self.positions[start:stop], self.before[own] - start)
        return Stream(*parts, self.blocks, self.spans, share), own


def states_before(
    model: Any, tokens: Tensor, wanted: Tensor, prompt_lengths: Tensor, images: Sequence[Sequence[Image]] = ()
) -> tuple[Tensor, Tensor]:
    """Compute the hidden states that predict the wanted tokens: those of the token before, after the final norm.

    A model with `shares_prompts` computes a packed stream, others padded rows. Rows with pictures are padded.

    Args:
        model: `GPT` or `HFModel`.
        tokens: [B, T] int64, right-padded; on the CPU to avoid a sync.
        wanted: [B, T] bool; position 0 counts as False.
        prompt_lengths: [B]. Rows with identical prompts of this length share them.
        images: [B] pictures of each row; empty: no row has any.

    Returns:
        States [n, H] in the order of the rows, and the mask [B, T] of the tokens that they predict: `wanted`, or with
        sequence parallelism this rank's part of it.

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
    if model.shares_prompts and wanted.any() and not images:
        stream = make_stream(tokens.cpu(), wanted.cpu(), prompt_lengths.cpu())
        if model.sharing is not None:
            stream, own = stream.cut(model.sharing)
            wanted = wanted.masked_scatter(wanted, own.to(wanted.device))
        states = model.stream_states(to_device(tokens, device), stream)
    else:
        rows = to_device(tokens, device)
        hidden = (model.forward_hidden(rows, images) if images else model.forward_hidden(rows)).flatten(0, 1)
        states = hidden.index_select(0, to_device(wanted.flatten().nonzero()[:, 0] - 1, hidden.device))
    return states, wanted


def row_stream(rows: int, length: int) -> Stream:
    """Create the stream of full rows without packing, with the state of every token."""
    every = torch.arange(rows * length)
    return Stream(every, every % length, every, (_block(0, [(row, 0, length) for row in range(rows)], None, []),))


def make_stream(tokens: Tensor, wanted: Tensor, prompt_lengths: Tensor) -> Stream:
    """Pack a micro-batch into a stream of three blocks: shared prompts, rows that share none, and completions after
    shared prompts.

    Args:
        tokens, wanted, prompt_lengths: as in `states_before`, on the CPU; at least one token is wanted.
    """
    rows, width = tokens.shape
    # Rows are computed up to the token before their last wanted one. Rows with the same prompt bytes form a group.
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
    # The sequences (row, begin, end) of each block.
    group_of = {row: number for number, members in enumerate(shared) for row in members}
    parts = [
        [(row, 0, end) for row, end in ((members[0], lengths[members[0]]) for members in shared)],
        [(row, 0, ends[row]) for row in range(rows) if ends[row] and row not in group_of],
        [(row, lengths[row], ends[row]) for row in group_of if ends[row] > lengths[row]],
    ]
    # `where` [B, T]: index of each token in the stream; members of a group point to the shared prompt.
    where, pieces, blocks, start = np.zeros((rows, width), np.int64), [], [], 0
    for kind, part in enumerate(parts):
        if part:
            first = start
            for row, begin, end in part:
                where[row, begin:end] = np.arange(start, start + end - begin)
                pieces.append(np.arange(row * width + begin, row * width + end))
                start += end - begin
            owners = [group_of[row] for row, _, _ in part] if kind == 2 else None
            blocks.append(_block(first, part, owners, [lengths[members[0]] for members in shared]))
    for members in shared:
        where[members, : lengths[members[0]]] = where[members[0], : lengths[members[0]]]
    source = torch.from_numpy(np.concatenate(pieces))
    at = wanted.flatten().nonzero()[:, 0] - 1
    return Stream(source, source % width, torch.from_numpy(where).flatten()[at], tuple(blocks))


def _block(start: int, part: list[tuple[int, int, int]], owners: list[int] | None, prompts: list[int]) -> Block:
    """Create a block of sequences (row, begin, end).

    Args:
        owners: index of the shared prompt of each sequence; None: none.
        prompts: lengths of the shared prompts.
    """
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
