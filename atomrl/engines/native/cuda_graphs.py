"""CUDA graphs."""

import logging
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakSet

import torch

from atomrl.models.process_memory import is_out_of_memory

log = logging.getLogger(__name__)

Run = Callable[[], None]
Capture = Callable[[Run], Run]
"""Captures what a function launches and returns a function that replays it."""


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
