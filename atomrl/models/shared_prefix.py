"""A micro-batch's hidden states without what would be computed twice, or for nothing.

The completions of a group start with the same prompt: it is computed once, and they attend to its keys and values.
Padding, tokens after the last one that a loss looks at, and in the last layer all but the states that are asked for,
are not computed at all. What is left lies in one stream of tokens [N, H], and only attention knows of rows.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from atomrl.devices import sent
from atomrl.models.attention import Block, Spans
from atomrl.models.ulysses import Share, part_sizes

LEAST_SAVING = 1 / 32
"""Prompts are shared where that saves at least this share of the tokens: attention in two parts costs a little."""


def packs_rows(setting: bool | None, device: str, dtype: torch.dtype) -> bool:
    """Whether rows lie end to end on a type of device: as `model.pack_rows` says, or else on a CPU, and on a GPU in
    bfloat16, where there is attention of variable length.

    Example:
        >>> packs_rows(None, "cpu", torch.float32), packs_rows(None, "cuda", torch.float32)
        (True, False)
    """
    if setting is not None:
        return setting
    return device == "cpu" or (dtype == torch.bfloat16 and find_spec("torch.nn.attention.varlen") is not None)


@dataclass(frozen=True)
class Stream:
    """What is computed of a micro-batch. It is laid out on the host, and the model takes it to its device (`to`)."""

    source: Tensor
    """[N] where each token is in the flattened [B * T]."""
    positions: Tensor
    """[N] in its row."""
    before: Tensor
    """[n] where in the stream the token before each wanted one is."""
    blocks: tuple[Block, ...]
    spans: Spans | None = None
    """Of the blocks, where attention is of variable length."""
    share: Share | None = None
    """Of ranks that share the stream: then `source`, `positions` and `before` are of this rank's tokens, and the blocks
    of all."""

    def to(self, device: torch.device) -> "Stream":
        """On a GPU, with `spans`; on a CPU as it is. The blocks stay."""
        if device.type == "cpu":
            return self

        spans = Spans.of(self.blocks)
        order = None if spans.order is None else sent(spans.order, device)
        spans = replace(spans, queries=sent(spans.queries, device), keys=sent(spans.keys, device), order=order)
        share = None if self.share is None else replace(self.share, positions=sent(self.share.positions, device))
        source, positions, before = (sent(part, device) for part in (self.source, self.positions, self.before))
        return Stream(source, positions, before, self.blocks, spans, share)

    def cut(self, group: Any) -> tuple["Stream", Tensor]:
        """This rank's share, and [n] bool, which of `before` are in it."""
        sizes = part_sizes(len(self.source), dist.get_world_size(group))
        start = sum(sizes[: (rank := dist.get_rank(group))])
        stop = start + sizes[rank]
        own = (self.before >= start) & (self.before < stop)
        share = Share(group, sizes, self.positions)
        parts = (self.source[start:stop], self.positions[start:stop], self.before[own] - start)
        return Stream(*parts, self.blocks, self.spans, share), own


def states_before(model: Any, tokens: Tensor, wanted: Tensor, prompt_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden state from which each wanted token is predicted: that of the token before it, after the final norm.

    A model that `shares_prompts` computes a stream, others plain rows. Of rows on the host nothing waits for the
    model's device.

    Args:
        model: `GPT` or `HFModel`.
        tokens: [B, T] int64, right-padded.
        wanted: [B, T] bool; position 0 counts as False.
        prompt_lengths: [B]. Rows whose first tokens, up to here, are the same share them.

    Returns:
        [n, H], in the order of the rows, and [B, T] bool, beside `wanted`, of which tokens: all that are wanted, or
        this rank's of them, where ranks share the rows.

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
    if model.shares_prompts and wanted.any():
        stream = make_stream(tokens.cpu(), wanted.cpu(), prompt_lengths.cpu())
        if model.sharing is not None:
            stream, own = stream.cut(model.sharing)
            wanted = wanted.masked_scatter(wanted, own.to(wanted.device))
        states = model.stream_states(sent(tokens, device), stream)
    else:
        hidden = model.forward_hidden(sent(tokens, device)).flatten(0, 1)
        states = hidden.index_select(0, sent(wanted.flatten().nonzero()[:, 0] - 1, hidden.device))
    return states, wanted


def row_stream(rows: int, length: int) -> Stream:
    """All tokens of whole rows, and the state of each."""
    every = torch.arange(rows * length)
    return Stream(every, every % length, every, (_block(0, [(row, 0, length) for row in range(rows)], None, []),))


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
