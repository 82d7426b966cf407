"""Stopwatch of a step's phases."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from atomrl.common.hangs import phase as name_phase
from atomrl.common.metrics import values
from atomrl.models.process_memory import memory_metrics


class Stopwatch:
    """Measure seconds by phase: `with watch("gen"): ...` adds to `timing_s/gen`.

    The phase is also reported to the watchdog, which names it if it hangs.
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with name_phase(phase):
                yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - started

    def metrics(self, tokens: int) -> dict[str, float]:
        """Return `timing_s/*`, throughput, and the memory of this process.

        Args:
            tokens: tokens of the step's prompts and responses.
        """
        total = time.perf_counter() - self.started
        phases = {f"timing_s/{phase}": seconds for phase, seconds in self.phases.items()}
        speed = {
            "timing_s/step": total,
            "perf/total_num_tokens": float(tokens),
            "perf/throughput": tokens / total,
        }
        return phases | speed | values(memory_metrics())
