"""Progress of a run on the terminal: a live bar where it is one, else one line a step."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.live import Live

SHOWN = {
    "loss": ("sft/nll_per_token", "{:.3f}"),
    "train loss": ("train/loss", "{:.3f}"),
    "reward": ("critic/score/mean", "{:.3f}"),
    "accuracy": ("train/accuracy", "{:.3f}"),
    "length": ("response_length/mean", "{:.1f}"),
    "entropy": ("actor/entropy", "{:.3f}"),
    "tok/s": ("perf/throughput", "{:,.0f}"),
}
"""What is shown: label -> metric and format."""


class ProgressBar:
    """Shows how far a run is. A context manager; `update` once a step.

    Example:
        >>> with ProgressBar(total_steps=2, stream=sys.stdout) as progress:
        ...     progress.update(1, {"critic/score/mean": 0.5})
        step 1/2  reward 0.500  ETA 0:00
    """

    def __init__(self, total_steps: int, *, first_step: int = 1, name: str = "", stream: TextIO | None = None) -> None:
        self.total_steps = total_steps
        self.first_step = first_step
        self.stream = stream or sys.stderr
        self._started = time.monotonic()
        self._first: tuple[int, float] | None = None
        self._live: Live | None = None
        if self.stream.isatty():
            from rich.console import Console
            from rich.live import Live
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("[bold]{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(),
                TimeElapsedColumn(), TextColumn("[dim]ETA {task.fields[eta]}"), expand=True,
            )  # fmt: skip
            self._task = self._bar.add_task(name or "steps", total=total_steps, completed=first_step - 1, eta="-:--")
            self._live = Live(self._bar, console=Console(file=self.stream), refresh_per_second=4)

    def __enter__(self) -> ProgressBar:
        self._started = time.monotonic()
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step `step` is done, with these metrics."""
        if self._live is None:
            line = "  ".join([f"step {step}/{self.total_steps}", *describe(metrics), f"ETA {self._eta(step)}"])
            print(line, file=self.stream, flush=True)
            return
        from rich.console import Group
        from rich.text import Text

        self._bar.update(self._task, completed=step, eta=self._eta(step))
        under = Text()
        for label, _, value in (item.rpartition(" ") for item in describe(metrics)):
            under.append(f"{label} ", style="dim").append(f"{value}   ", style="cyan")
        self._live.update(Group(self._bar, under))

    def note(self, text: str) -> None:
        """A line of its own, above the bar: an evaluation, a checkpoint."""
        if self._live:
            self._live.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self.stream, flush=True)

    def _eta(self, step: int) -> str:
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        first, at = self._first
        # The first step warms up, so the pace is that of the others where there are others.
        pace = (now - at) / (step - first) if step > first else (now - self._started) / (step - self.first_step + 1)
        return clock(pace * (self.total_steps - step))


def describe(metrics: Mapping[str, float]) -> list[str]:
    """The shown metrics that are there.

    Example:
        >>> describe({"critic/score/mean": 0.25, "perf/throughput": 5120.4, "other": 1.0})
        ['reward 0.250', 'tok/s 5,120']
    """
    return [
        f"{label} {form.format(metrics[key])}" for label, (key, form) in SHOWN.items() if metrics.get(key) is not None
    ]


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss.

    Example:
        >>> clock(61), clock(3661)
        ('1:01', '1:01:01')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
