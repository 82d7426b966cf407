"""Continuous batching over pages: buffers that stay where they are, and CUDA graphs that replay a step on them."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from weakref import WeakSet

import torch

from atomrl.models.memory import is_out_of_memory
from atomrl.progress import progress
from atomrl.rollout.batch_rows import GROUP, LENGTH, LIMIT, SLOT, STOPPED, PromptGroup
from atomrl.rollout.batching import ContinuousBatch
from atomrl.rollout.decode_step import DecodeStep, Drawing, StepOps, StepRows, least_splits, tiles_of
from atomrl.rollout.paged import PagedKVCache
from atomrl.rollout.requests import RequestState

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
