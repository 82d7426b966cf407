"""Continuous batching over pages: buffers that stay where they are, and CUDA graphs that replay a step on them."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import ClassVar, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional as F

from atomrl.common.processes import progress
from atomrl.engines.batching import (
    GIVEN,
    GROUP,
    LENGTH,
    LIMIT,
    PROMPT_LENGTH,
    SEED,
    SLOT,
    STOPPED,
    TOKEN,
    ContinuousBatch,
    PromptGroup,
)
from atomrl.engines.cache import PAGE, DecodeBatch, PagedKVCache, attend_to_both, pages_of
from atomrl.engines.decoder import DecoderModel, StackedLinear, WideLinear
from atomrl.engines.requests import RequestState
from atomrl.models.attention import rotate
from atomrl.models.memory import is_out_of_memory

# --------------------------------------------------------------------------------------------------------------------
# One decode step of `NativeEngine` over pages, the way a CUDA graph can replay it.
#
# A step launches ten kernels a layer: norm, q|k|v, rotation with the write into the pages, attention (parts of prompts
# and own tokens, then their sum), output, norm, gate|up, SwiGLU, down; adapters add one product to each of the four
# projections. Nothing in it depends on the host: sizes are of the padded batch, and what rows need is read from
# `StepRows`.
#
# `PlainOps` is the reference in PyTorch, and what runs where Triton's kernels (`atomrl.engines.triton_kernels`) cannot.

Rope = tuple[Tensor, Tensor]


class StepRows:
    """The rows of a step: device tensors whose addresses stay, and sizes that the plain reference needs.

    Args:
        state: [10, N], as `ContinuousBatch.state`; a padded row has the slot -1.
        tiles: [N, members] int32: rows of one group, whose prompt is read once for them; -1 where there are fewer.
        own, prompts: tables [slots, pages] and [groups, pages] int32.
        batch: the same rows, with sizes of these rows alone; a graph holds for the same `least_splits` of them.
    """

    def __init__(self, state: Tensor, tiles: Tensor, own: Tensor, prompts: Tensor, batch: DecodeBatch) -> None:
        self.state, self.tiles, self.own, self.prompts, self.batch = state, tiles, own, prompts, batch
        self.slots, self.groups, self.prompt_lengths = state[SLOT], state[GROUP], state[PROMPT_LENGTH]
        self.lengths, self.given, self.limits = state[LENGTH], state[GIVEN], state[LIMIT]
        self.seeds, self.tokens, self.stopped = state[SEED], state[TOKEN], state[STOPPED]


def tiles_of(groups: Sequence[int], count: int, members: int) -> Tensor:
    """[count, members] int32: places of the same group, at most `members` in a row; -1 elsewhere."""
    places: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    parts = [part[at : at + members] for part in places.values() for at in range(0, len(part), members)]
    tiles = torch.full((count, members), -1, dtype=torch.int32)
    for row, part in zip(tiles.numpy(), parts, strict=False):
        row[: len(part)] = part
    return tiles


def least_splits(tokens: int) -> int:
    """Parts that so many keys are split into at least, a power of two: one program reads up to some 2,048 of them.

    Example:
        >>> [least_splits(tokens) for tokens in (0, 2048, 2049, 10_000)]
        [1, 1, 2, 8]
    """
    return 1 << max(0, -(-tokens // 2048) - 1).bit_length()


@dataclass(frozen=True)
class Drawing:
    """How the step draws, where all rows are drawn alike and nothing is cut; and where it writes."""

    greedy: bool
    bans: bool
    """Stop tokens are not drawn before `minimum` tokens."""
    temperature: Tensor
    """[1] float32."""
    minimum: Tensor
    """[1] int64."""
    stops: Tensor
    """[V] int8: 1 for stop tokens."""
    tokens: Tensor
    """[slots, T] int32: drawn so far."""
    logprobs: Tensor
    """[slots, T] float32."""


class StepOps(Protocol):
    """What a step computes beside matrix products. `out` may be the first columns of a wider tensor."""

    draws: ClassVar[bool]
    """Whether it has `draw`; else logits are drawn from outside of the step."""
    tile: int
    """Members of a group that attend to a prompt together."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """[N, H], [H] -> [N, H]."""

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """silu(gate) * up: [N, 2 * I] -> [N, I]."""

    def rotate_and_write(
        self, qkv: Tensor, rope: Rope, norms: tuple[Tensor, Tensor] | None, eps: float,
        keys: Tensor, values: Tensor, rows: StepRows,
    ) -> None:  # fmt: skip
        """Norm (Qwen3) and turn q and k [N, heads + 2 kv_heads, D]: q in place, k and v into the rows' pages."""

    def attend(self, qkv: Tensor, keys: Tensor, values: Tensor, rows: StepRows, out: Tensor) -> None:
        """Attention of q in `qkv` to prompts and completions, [N, heads * D]."""

    def draw(self, logits: Tensor, rows: StepRows, drawing: Drawing) -> None:
        """Draw the next token of each row that has not ended, and go on to it: logits [N, V] float32."""


class PlainOps:
    """The reference in PyTorch. `rows.batch` says how far it has to read."""

    draws: ClassVar[bool] = False
    tile: int = 1

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """As `StepOps`."""
        out.copy_(F.rms_norm(x, (x.shape[-1],), weight, eps))

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """As `StepOps`."""
        gate, up = gate_up.chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=out)

    def rotate_and_write(
        self, qkv: Tensor, rope: Rope, norms: tuple[Tensor, Tensor] | None, eps: float,
        keys: Tensor, values: Tensor, rows: StepRows,
    ) -> None:  # fmt: skip
        """As `StepOps`."""
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
        """As `StepOps`."""
        batch, kv_heads, size = rows.batch, keys.shape[1], keys.shape[3]
        prompt_lengths = rows.lengths.new_zeros(batch.group_count)
        prompt_lengths[rows.groups] = rows.prompt_lengths
        query = qkv[:, : out.shape[1]].unflatten(1, (kv_heads, -1, size)) * size**-0.5
        found, inside = [], []
        for pages, lengths in (
            (rows.prompts[: batch.group_count, : pages_of(batch.longest_prompt)], prompt_lengths),
            (rows.own[rows.slots, : pages_of(batch.longest)], rows.lengths),
        ):
            key, value = (store[pages.long()].transpose(1, 2).flatten(2, 3) for store in (keys, values))
            inside.append(torch.arange(key.shape[2], device=qkv.device) < lengths[:, None])
            # Pages that a row does not have may be those of one with NaN, and 0 times NaN is NaN.
            found.append((key, value.masked_fill(~inside[-1][:, None, :, None], 0.0)))
        outside = ~torch.cat((inside[0][rows.groups], inside[1]), dim=-1)[:, None, None]
        out.copy_(attend_to_both(query, batch, found[1], found[0], outside, None))

    def draw(self, logits: Tensor, rows: StepRows, drawing: Drawing) -> None:
        """`ContinuousBatch` draws."""
        raise NotImplementedError


class DecodeStep:
    """The forward pass of one token for every row, and where `drawing` is given the draw.

    Args:
        model: with `WideLinear` layers.
    """

    def __init__(self, model: DecoderModel, cache: PagedKVCache, ops: StepOps) -> None:
        self.model, self.cache, self.ops = model, cache, ops
        self.linears = [
            [_wide(linear) for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)] for layer in model.layers
        ]
        self.head = _wide(model.head)

    def __call__(self, rows: StepRows, drawing: Drawing | None) -> Tensor:
        """Logits [N, vocab] float32."""
        model, cache, ops, eps = self.model, self.cache, self.ops, self.model.spec.norm_eps
        x = F.embedding(rows.tokens, model.embedding)
        for index, (layer, (qkv, output, gate_up, down)) in enumerate(zip(model.layers, self.linears, strict=True)):
            keys, values = cache.keys[index], cache.values[index]
            norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
            heads = qkv.multiply(self._normed(x, layer.attention_norm, qkv))
            ops.rotate_and_write(heads, cache.rope, norms, eps, keys, values, rows)
            room = output.room(len(x))
            ops.attend(heads, keys, values, rows, room[:, : output.inputs])
            output.multiply(room, x)
            both = gate_up.multiply(self._normed(x, layer.mlp_norm, gate_up))
            room = down.room(len(x))
            ops.silu_mul(both, room[:, : down.inputs])
            down.multiply(room, x)
        logits = self.head.multiply(self._normed(x, model.norm, self.head))
        if drawing is not None:
            ops.draw(logits, rows, drawing)
        return logits

    def _normed(self, x: Tensor, weight: Tensor, linear: WideLinear) -> Tensor:
        """The input of a layer."""
        room = linear.room(len(x))
        self.ops.rms_norm(x, weight, self.model.spec.norm_eps, room[:, : linear.inputs])
        return room


def _wide(linear: StackedLinear) -> WideLinear:
    assert isinstance(linear, WideLinear)
    return linear


log = logging.getLogger(__name__)
Run = Callable[[], None]
Capture = Callable[[Run], Run]
"""Records what a function launches, and gives what launches it again."""


def padded(rows: int) -> int:
    """The batch size that so many rows are computed with: 1, 2, 4, 8, 16, then by 16, from 128 on by 32, from 256 on by
    64. Each is a graph to capture, as rows leave a batch.

    Example:
        >>> [padded(rows) for rows in (1, 3, 9, 17, 129, 250, 257)]
        [1, 4, 16, 32, 160, 256, 320]
    """
    if rows <= 16:
        return 1 << (rows - 1).bit_length()
    step = max(16, 1 << ((rows - 1).bit_length() - 3))
    return -(-rows // step) * step


class CUDACapture:
    """Captures CUDA graphs on a stream of its own. They share one pool of memory, since one of them runs at a time.

    `torch.cuda.graph` would wait for the GPU and empty the allocator's cache before each; here only where memory is
    short, which a capture cannot take from that cache.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def __call__(self, run: Run) -> Run:
        """As `Capture`.

        Raises:
            OutOfMemoryError: and other errors of `run`.
        """
        with suppress(torch.OutOfMemoryError):
            return self._capture(run)
        torch.cuda.empty_cache()
        return self._capture(run)

    def _capture(self, run: Run) -> Run:
        # Made late, on the device of the step.
        self.stream = self.stream or torch.cuda.Stream()
        # The pool is that of the graphs there are: PyTorch fails where a pool that all graphs have left is used again.
        pool = next((graph.pool() for graph in self.graphs), None)
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            # Another thread may train on the same GPU, and allocate meanwhile.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # the first error says more
                    graph.capture_end()
                raise
            graph.capture_end()
        self.graphs.add(graph)
        return graph.replay


class StepGraphs:
    """Steps that are captured when they come the second time, and replayed from then on.

    The first time a step runs as it is: its kernels are compiled then. Where one cannot be captured, a warning says
    why, and all steps run as they are; memory that runs out is an error.

    Args:
        capture: None: nothing is captured.
    """

    def __init__(self, capture: Capture | None) -> None:
        self.capture = capture
        self.seen: dict[tuple[object, ...], Run | None] = {}
        self.addresses: tuple[object, ...] = ()

    def clear(self) -> None:
        """Forget all graphs, and free their memory."""
        self.seen.clear()

    def __call__(self, key: tuple[object, ...], addresses: tuple[object, ...], run: Run) -> None:
        """Run a step.

        Args:
            key: what is baked into it: a graph is replayed for the same key.
            addresses: what changes where a tensor that it uses has been replaced; all graphs are then captured anew.
            run: the step.
        """
        if self.capture is None:
            run()
            return
        if addresses != self.addresses:
            self.clear()
            self.addresses = addresses
        if key not in self.seen:
            self.seen[key] = None
            run()
            return
        replay = self.seen[key]
        if replay is None:
            try:
                replay = self.seen[key] = self.capture(run)
            except Exception as error:
                if is_out_of_memory(error):  # fewer rows take less
                    raise
                log.warning("native engine: no CUDA graphs, so decoding is bound by launches: %s", error)
                self.capture = None
                self.clear()
                replay = run
        replay()


class PagedBatch(ContinuousBatch):
    """Completions whose keys and values are in pages.

    Args:
        cache, max_rows, waiting, check_every: as in `ContinuousBatch`.
        ops: what a step is made of.
        capture: of CUDA graphs; None where `ops` read sizes from the host.
    """

    cache: PagedKVCache

    def __init__(
        self,
        cache: PagedKVCache,
        max_rows: int,
        waiting: deque[RequestState],
        check_every: int,
        ops: StepOps,
        capture: Capture | None,
    ) -> None:
        super().__init__(cache, max_rows, waiting, check_every)
        self.step, self.graphs = DecodeStep(self.model, cache, ops), StepGraphs(capture)
        empty = torch.zeros(len(self.state), 1, dtype=torch.int64)
        empty[SLOT] = empty[GROUP] = -1
        empty[LENGTH] = empty[STOPPED] = 1
        self.empty = empty.to(self.device)
        self.columns = self.empty.repeat(1, padded(max_rows))
        self.tiles = torch.full((padded(max_rows), ops.tile), -1, dtype=torch.int32, device=self.device)
        self.temperature = torch.ones(1, device=self.device)
        self.minimum = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.stops = torch.zeros(self.model.spec.vocab, dtype=torch.int8, device=self.device)
        self.logits = torch.empty(0, device=self.device)
        """[rows, V] of a step that does not draw. Graphs have one for all, since a result of their own would stay."""
        self.drawing: tuple[bool, bool] | None = None
        """Greedy, and bans; None: the step ends with logits."""
        self.steps = self.held_steps = 0

    def free(self) -> None:
        """Give back the memory of cache and graphs; no row may need it."""
        self.graphs.clear()
        self.logits = self.logits[:0].clone()
        super().free()

    def _keep_pages(self) -> None:
        """Take the pages of completions and prompts that are gone."""
        groups = [group.index for group in self.groups.values() if group.index is not None]
        self.cache.keep({*self.state[SLOT].tolist(), *self.parking.slots}, set(groups))

    def _prefill(self, groups: Sequence[PromptGroup]) -> None:
        self._keep_pages()
        super()._prefill(groups)

    def _rows_changed(self) -> None:
        super()._rows_changed()
        self._keep_pages()
        self.steps = self.held_steps = 0
        if not self.rows:
            return
        state, count = self.state.clone(), len(self.rows)  # it may be those columns
        self.columns.copy_(self.empty.expand_as(self.columns))
        self.columns[:, :count] = state
        self.state = self.columns[:, :count]
        self.slots, groups, self.lengths, self.limits = state[[SLOT, GROUP, LENGTH, LIMIT]].tolist()
        self.tiles.copy_(tiles_of(groups, *self.tiles.shape))
        self.drawing = None
        if self.step.ops.draws and len(self.by_rule) == 1:
            rule = self.rows[0].rule
            sampling = rule.sampling
            if sampling.top_p >= 1 and not sampling.top_k and sampling.logprobs_over != "kept":
                self.drawing = (sampling.temperature == 0, rule.bans)
                self.temperature.fill_(sampling.temperature or 1.0)
                self.minimum.fill_(rule.minimum)
                self.stops.copy_(rule.is_stop)

    def _hold_pages(self) -> None:
        """Pages for the steps until the next look at what has ended."""
        if self.steps < self.held_steps:
            return
        self.held_steps = self.steps + self.check_every
        rows = zip(self.slots, self.lengths, self.limits, strict=True)
        self.cache.hold({slot: min(length + self.held_steps, limit) for slot, length, limit in rows})

    def _decode(self) -> None:
        progress()
        self._hold_pages()
        self.steps += 1
        self.batch.longest = min(self.limit, self.longest)
        self.longest += 1
        count = len(self.rows)
        size = count if self.graphs.capture is None else padded(count)
        drawing = self._drawing()
        if drawing is None and len(self.logits) < size:
            self.logits = torch.empty(size, self.model.spec.vocab, device=self.device)
        cache, buffers = self.cache, (self.tokens, self.logprobs, self.logits)
        addresses = (cache.generation, self.model.layout, *((buffer.data_ptr(), buffer.shape) for buffer in buffers))

        def run() -> None:
            tables = cache.own.device, cache.prompts.device
            rows = StepRows(self.columns[:, :size], self.tiles[:size], *tables, self.batch)
            logits = self.step(rows, drawing)
            if drawing is None:
                self.logits[:size] = logits

        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            splits = least_splits(self.batch.longest), least_splits(self.batch.longest_prompt)
            self.graphs((size, self.drawing, *splits), addresses, run)
        if drawing is None:
            self._draw(self.state, self.rows, self.by_rule, self.logits[:count])

    def _drawing(self) -> Drawing | None:
        if self.drawing is None:
            return None
        return Drawing(*self.drawing, self.temperature, self.minimum, self.stops, self.tokens, self.logprobs)
