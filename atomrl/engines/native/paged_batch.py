"""`PagedBatch`: `ContinuousBatch` on a GPU, with fixed device buffers over KV-cache pages.

`decode_step.DecodeStep` is the forward pass over them, and `cuda_graphs.StepGraphs` captures and replays it, one graph
per padded batch size.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from atomrl.common.hangs import progress
from atomrl.engines.native.batching import GROUP, LENGTH, LIMIT, SLOT, STOPPED, ContinuousBatch, PromptGroup
from atomrl.engines.native.cuda_graphs import Capture, StepGraphs, padded
from atomrl.engines.native.decode_step import DecodeStep
from atomrl.engines.native.paged_cache import PagedKVCache
from atomrl.engines.native.step_ops import Drawing, StepOps, StepRows, least_splits, tiles_of
from atomrl.engines.requests import RequestState


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
