"""GPU decoding of `NativeEngine`: a decode step over KV-cache pages that a CUDA graph can replay.

`PagedBatch` is `ContinuousBatch` with fixed device buffers, `DecodeStep` the forward pass over them, and `StepGraphs`
captures and replays it, one graph per padded batch size.

A step launches ten kernels per layer: norm, q|k|v, rotation with the write into the pages, attention (parts of prompts
and own tokens, then their sum), output, norm, gate|up, SwiGLU, down. Adapters add one product to each of the four
projections. Nothing in it depends on the host: sizes are those of the padded batch, and per-row values are read from
`StepRows`.

Everything except matrix products is a `StepOps`: Triton kernels (`atomrl.engines.triton_kernels`), or `PlainOps`, the
reference in PyTorch and the fallback.
"""

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

from atomrl.common.hangs import progress
from atomrl.engines.batching import (
    GROUP,
    LENGTH,
    LIMIT,
    PREFIX,
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

log = logging.getLogger(__name__)
Rope = tuple[Tensor, Tensor]
Run = Callable[[], None]
Capture = Callable[[Run], Run]
"""Captures what a function launches and returns a function that replays it."""


# --------------------------------------------------------------------------------------------------------------------
# Inputs of a step.


class StepRows:
    """Rows of a decode step: device tensors at fixed addresses, and host sizes for the PyTorch reference.

    Args:
        state: [10, N], as `ContinuousBatch.state`; padded rows have slot -1.
        tiles: [N, members] int32 from `tiles_of`: rows of one group, for which the prompt is read once.
        own, prompts: page tables [slots, pages] and [groups, pages] int32.
        batch: sizes of the rows without padding. A graph is valid for batches with equal `least_splits` of them.
    """

    def __init__(self, state: Tensor, tiles: Tensor, own: Tensor, prompts: Tensor, batch: DecodeBatch) -> None:
        self.state, self.tiles, self.own, self.prompts, self.batch = state, tiles, own, prompts, batch
        self.slots, self.groups, self.prompt_lengths = state[SLOT], state[GROUP], state[PROMPT_LENGTH]
        self.lengths, self.prefixes, self.limits = state[LENGTH], state[PREFIX], state[LIMIT]
        self.seeds, self.tokens, self.stopped = state[SEED], state[TOKEN], state[STOPPED]


def tiles_of(groups: Sequence[int], count: int, members: int) -> Tensor:
    """Tiles [count, members] int32 of row indices: at most `members` rows of one group each, filled with -1.

    Example:
        >>> tiles_of([0, 1, 0, 0], count=3, members=2).tolist()
        [[0, 2], [3, -1], [1, -1]]
    """
    rows: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        rows.setdefault(group, []).append(index)
    parts = [part[at : at + members] for part in rows.values() for at in range(0, len(part), members)]
    tiles = torch.full((count, members), -1, dtype=torch.int32)
    for row, part in zip(tiles.numpy(), parts, strict=False):
        row[: len(part)] = part
    return tiles


def least_splits(tokens: int) -> int:
    """Minimum number of parts to split this many keys into, a power of two: one program reads up to 2,048 of them.

    Example:
        >>> [least_splits(tokens) for tokens in (0, 2048, 2049, 10_000)]
        [1, 1, 2, 8]
    """
    return 1 << max(0, -(-tokens // 2048) - 1).bit_length()


@dataclass(frozen=True)
class Drawing:
    """Sampling inside of the step, if all rows share sampling parameters without top-k and top-p; and its buffers."""

    greedy: bool
    bans: bool
    """Stop tokens have probability 0 before `minimum` tokens."""
    temperature: Tensor
    """[1] float32."""
    minimum: Tensor
    """[1] int64."""
    stops: Tensor
    """[V] int8: 1 for stop tokens."""
    tokens: Tensor
    """[slots, T] int32: tokens sampled so far."""
    logprobs: Tensor
    """[slots, T] float32."""


# --------------------------------------------------------------------------------------------------------------------
# The operations of a step and their reference in PyTorch.


class StepOps(Protocol):
    """Operations of a step except matrix products. `out` may be the first columns of a wider tensor."""

    draws: ClassVar[bool]
    """True if `draw` is implemented; else sampling runs outside of the step."""
    tile: int
    """Maximum number of group members that read a prompt together."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """RMSNorm: [N, H], [H] -> [N, H]."""

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """silu(gate) * up: [N, 2 * I] -> [N, I]."""

    def rotate_and_write(
        self, qkv: Tensor, rope: Rope, norms: tuple[Tensor, Tensor] | None, eps: float,
        keys: Tensor, values: Tensor, rows: StepRows,
    ) -> None:  # fmt: skip
        """Apply q/k norm (Qwen3) and RoPE to [N, heads + 2 kv_heads, D]: q in place, k and v into the rows' pages."""

    def attend(self, qkv: Tensor, keys: Tensor, values: Tensor, rows: StepRows, out: Tensor) -> None:
        """Attention of the q in `qkv` over prompts and completions: [N, heads * D]."""

    def draw(self, logits: Tensor, rows: StepRows, drawing: Drawing) -> None:
        """Sample the next token of each unfinished row from logits [N, V] float32, and update the rows' state."""


class PlainOps:
    """Reference in PyTorch. It reads sizes from `rows.batch`, so it cannot be captured."""

    draws: ClassVar[bool] = False
    tile: int = 1

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `StepOps`."""
        out.copy_(F.rms_norm(x, (x.shape[-1],), weight, eps))

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See `StepOps`."""
        gate, up = gate_up.chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=out)

    def rotate_and_write(
        self, qkv: Tensor, rope: Rope, norms: tuple[Tensor, Tensor] | None, eps: float,
        keys: Tensor, values: Tensor, rows: StepRows,
    ) -> None:  # fmt: skip
        """See `StepOps`."""
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
        """See `StepOps`."""
        batch, kv_heads, size = rows.batch, keys.shape[1], keys.shape[3]
        prompt_lengths = rows.lengths.new_zeros(batch.group_count)
        prompt_lengths[rows.groups] = rows.prompt_lengths
        query = qkv[:, : out.shape[1]].unflatten(1, (kv_heads, -1, size)) * size**-0.5
        gathered, inside = [], []
        for pages, lengths in (
            (rows.prompts[: batch.group_count, : pages_of(batch.longest_prompt)], prompt_lengths),
            (rows.own[rows.slots, : pages_of(batch.longest)], rows.lengths),
        ):
            key, value = (store[pages.long()].transpose(1, 2).flatten(2, 3) for store in (keys, values))
            inside.append(torch.arange(key.shape[2], device=qkv.device) < lengths[:, None])
            # Unused entries of the table point to any page, maybe one with NaN, and 0 times NaN is NaN.
            gathered.append((key, value.masked_fill(~inside[-1][:, None, :, None], 0.0)))
        outside = ~torch.cat((inside[0][rows.groups], inside[1]), dim=-1)[:, None, None]
        out.copy_(attend_to_both(query, batch, gathered[1], gathered[0], outside, None))

    def draw(self, logits: Tensor, rows: StepRows, drawing: Drawing) -> None:
        """Not implemented: `ContinuousBatch` samples."""
        raise NotImplementedError


class DecodeStep:
    """Forward pass of one token for every row, with sampling if `drawing` is given.

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
        """Normalize `x` into the input buffer of a linear layer."""
        room = linear.room(len(x))
        self.ops.rms_norm(x, weight, self.model.spec.norm_eps, room[:, : linear.inputs])
        return room


def _wide(linear: StackedLinear) -> WideLinear:
    assert isinstance(linear, WideLinear)
    return linear


# --------------------------------------------------------------------------------------------------------------------
# CUDA graphs.


def padded(rows: int) -> int:
    """Batch size that this many rows are padded to: 1, 2, 4, 8, 16, then multiples of 16, from 128 on of 32, from 256
    on of 64. Each size is a graph to capture.

    Example:
        >>> [padded(rows) for rows in (1, 3, 9, 17, 129, 250, 257)]
        [1, 4, 16, 32, 160, 256, 320]
    """
    if rows <= 16:
        return 1 << (rows - 1).bit_length()
    step = max(16, 1 << ((rows - 1).bit_length() - 3))
    return -(-rows // step) * step


class CUDACapture:
    """Captures CUDA graphs on a stream of its own. They share one memory pool, since only one runs at a time.

    `torch.cuda.graph` would synchronize and empty the allocator's cache before each capture. This class does so only
    after an out-of-memory error, since a capture cannot use memory that the allocator has cached.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def __call__(self, run: Run) -> Run:
        """Capture `run`; see `Capture`.

        Raises:
            OutOfMemoryError: and other errors of `run`.
        """
        with suppress(torch.OutOfMemoryError):
            return self._capture(run)
        torch.cuda.empty_cache()
        return self._capture(run)

    def _capture(self, run: Run) -> Run:
        # Created here, when the current device is the model's.
        self.stream = self.stream or torch.cuda.Stream()
        # Take the pool of a graph that is alive: PyTorch fails if a pool that all its graphs have left is used again.
        pool = next((graph.pool() for graph in self.graphs), None)
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            # thread_local: another thread may train on this GPU and allocate meanwhile.
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
    """Captures a step when it runs for the second time, and replays it from then on.

    The first time it runs eagerly, which compiles its kernels. If a capture fails, a warning says why and all steps run
    eagerly; running out of memory is an error.

    Args:
        capture: None: capture nothing.
    """

    def __init__(self, capture: Capture | None) -> None:
        self.capture = capture
        self.seen: dict[tuple[object, ...], Run | None] = {}
        """Key -> replay; None: ran once, not captured yet."""
        self.addresses: tuple[object, ...] = ()

    def clear(self) -> None:
        """Drop all graphs and free their memory."""
        self.seen.clear()

    def __call__(self, key: tuple[object, ...], addresses: tuple[object, ...], run: Run) -> None:
        """Run a step.

        Args:
            key: constants baked into the graph; equal keys share one.
            addresses: changes when a tensor that the step uses was replaced; drops all graphs.
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
                if is_out_of_memory(error):  # the caller retries with fewer rows
                    raise
                log.warning("native engine: no CUDA graphs, so decoding is limited by kernel launches: %s", error)
                self.capture = None
                self.clear()
                replay = run
        replay()


# --------------------------------------------------------------------------------------------------------------------
# The batch.


class PagedBatch(ContinuousBatch):
    """Continuous batching over pages, with the state in buffers whose addresses a CUDA graph can hold.

    Args:
        cache, max_rows, waiting, check_every: see `ContinuousBatch`.
        ops: operations of a step.
        capture: for CUDA graphs; None if `ops` read sizes from the host.
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
        # The state of a padded row: no slot, no group, stopped.
        empty = torch.zeros(len(self.state), 1, dtype=torch.int64)
        empty[SLOT] = empty[GROUP] = -1
        empty[LENGTH] = empty[STOPPED] = 1
        self.empty = empty.to(self.device)
        self.columns = self.empty.repeat(1, padded(max_rows))
        """[10, padded rows] buffer of which `state` is a view."""
        self.tiles = torch.full((padded(max_rows), ops.tile), -1, dtype=torch.int32, device=self.device)
        self.temperature = torch.ones(1, device=self.device)
        self.minimum = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.stops = torch.zeros(self.model.spec.vocab, dtype=torch.int8, device=self.device)
        self.logits = torch.empty(0, device=self.device)
        """[rows, V] of a step that does not sample. Shared by all graphs, to not keep one per graph."""
        self.drawing: tuple[bool, bool] | None = None
        """(greedy, bans) if the step samples; None: it ends with logits."""
        self.steps = self.allocated_steps = 0
        """Decode steps since the rows changed, and steps that pages are allocated for."""

    def free(self) -> None:
        """Free the memory of cache and graphs; no row may be running."""
        self.graphs.clear()
        self.logits = self.logits[:0].clone()
        super().free()

    def sleep(self) -> None:
        """Free the memory of cache and graphs. The pool grows back at once, so graphs are captured only once more."""
        pages = self.cache.pool
        self.free()
        self.cache.free(pages)

    def _free_unused_pages(self) -> None:
        """Free the pages of completions and prompts that are gone."""
        groups = [group.index for group in self.groups.values() if group.index is not None]
        self.cache.free_except({*self.state[SLOT].tolist(), *self.retained.slots}, set(groups))

    def _prefill(self, groups: Sequence[PromptGroup]) -> None:
        self._free_unused_pages()
        super()._prefill(groups)

    def _rows_changed(self) -> None:
        """Also copy the state into the fixed buffers, and choose whether the step samples."""
        super()._rows_changed()
        self._free_unused_pages()
        self.steps = self.allocated_steps = 0
        if not self.rows:
            return
        state, count = self.state.clone(), len(self.rows)  # cloned: it may be a view of `columns`
        self.columns.copy_(self.empty.expand_as(self.columns))
        self.columns[:, :count] = state
        self.state = self.columns[:, :count]
        self.slots, groups, self.lengths, self.limits = state[[SLOT, GROUP, LENGTH, LIMIT]].tolist()
        self.tiles.copy_(tiles_of(groups, *self.tiles.shape))
        self.drawing = None
        if self.step.ops.draws and len(self.by_rule) == 1:
            rule = self.rows[0].rule
            sampling = rule.sampling
            if not sampling.cuts and sampling.logprobs_over != "kept":
                self.drawing = (sampling.temperature == 0, rule.bans)
                self.temperature.fill_(sampling.temperature or 1.0)
                self.minimum.fill_(rule.minimum)
                self.stops.copy_(rule.is_stop)

    def _allocate_pages(self) -> None:
        """Allocate pages for the steps until the next check."""
        if self.steps < self.allocated_steps:
            return
        self.allocated_steps = self.steps + self.check_every
        rows = zip(self.slots, self.lengths, self.limits, strict=True)
        self.cache.allocate({slot: min(length + self.allocated_steps, limit) for slot, length, limit in rows})

    def decode_step(self) -> None:
        progress()
        self._allocate_pages()
        self.steps += 1
        self.batch.longest = min(self.limit, self.longest)
        self.longest += 1
        count = len(self.rows)
        size = count if self.graphs.capture is None else padded(count)
        drawing = None
        if self.drawing is not None:
            buffers = self.temperature, self.minimum, self.stops, self.tokens, self.logprobs
            drawing = Drawing(*self.drawing, *buffers)
        elif len(self.logits) < size:
            self.logits = torch.empty(size, self.model.spec.vocab, device=self.device)
        # A graph holds addresses: capture again when the cache, the weights or an output buffer was replaced.
        outputs = self.tokens, self.logprobs, self.logits
        addresses = (
            self.cache.generation,
            self.model.layout,
            *((buffer.data_ptr(), buffer.shape) for buffer in outputs),
        )

        def run() -> None:
            tables = self.cache.own.device, self.cache.prompts.device
            rows = StepRows(self.columns[:, :size], self.tiles[:size], *tables, self.batch)
            logits = self.step(rows, drawing)
            if drawing is None:
                self.logits[:size] = logits

        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            splits = least_splits(self.batch.longest), least_splits(self.batch.longest_prompt)
            self.graphs((size, self.drawing, *splits), addresses, run)
        if drawing is None:
            self._draw(self.state, self.rows, self.by_rule, self.logits[:count])
