"""Progress of a run in the terminal: a progress bar, or a line per step if the output is not a TTY; and completions."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Self, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from atomrl.common.redaction import redacted
from atomrl.common.terminal import printable, printable_output
from atomrl.tracking.reading.metrics import accuracies, held_out_rewards
from atomrl.tracking.reading.token_records import IMAGES

TERMINAL_METRICS = {
    "loss": ("sft/nll_per_token", "{:.3f}"),
    "preference loss": ("preference/loss", "{:.3f}"),
    "reward model loss": ("reward_model/loss", "{:.3f}"),
    "train loss": ("train/loss", "{:.3f}"),
    "reward": ("critic/score/mean", "{:.3f}"),
    "accuracy": ("train/accuracy", "{:.3f}"),
    "length": ("response_length/mean", "{:.1f}"),
    "margin": ("rewards/margins", "{:.3f}"),
    "pairs in order": ("rewards/accuracies", "{:.3f}"),
    "entropy": ("actor/entropy", "{:.3f}"),
    "staleness": ("async/staleness_mean", "{:.1f}"),
    "tok/s": ("perf/throughput", "{:,.0f}"),
}
"""Label -> metric and format."""
QUIET: ContextVar[bool] = ContextVar("QUIET", default=False)
"""True: progress bars that are made show no progress and no completions, only findings of the doctor."""
REPLY_STYLE, QUOTED = "cyan", "\n> "
COMPLETIONS, CHARACTERS = 3, 200
"""Completions shown per step, and characters of each prompt (its end) and completion (its start)."""


class _Bar(Progress):
    """A progress bar with a line of metrics below it."""

    metrics = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.metrics, style="cyan")


class ProgressBar:
    """Shows the progress of a run. A context manager; call `update` once per step.

    Args:
        log: also called with each line, even if only a bar is shown.

    Example:
        >>> with ProgressBar(total_steps=2, stream=sys.stdout) as progress:
        ...     progress.update(1, {"critic/score/mean": 0.5})
        step 1/2  reward 0.500  ETA 0:00:00
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 1,
        name: str = "",
        stream: TextIO | None = None,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.total_steps, self.first_step, self._log = total_steps, first_step, log
        stream, self._quiet = stream or sys.stderr, QUIET.get()
        # rich draws with control sequences, so it writes to the terminal itself, and only printable texts.
        self._console, self._live = Console(file=getattr(stream, "terminal", stream)), stream.isatty()
        columns = BarColumn(bar_width=None), MofNCompleteColumn(), TimeElapsedColumn()
        eta = TextColumn("[dim]ETA {task.fields[eta]}")
        self._bar = _Bar(
            TextColumn("{task.description}", style="bold", markup=False), *columns, eta,
            console=self._console, refresh_per_second=4, expand=True, disable=self._quiet or not self._live,
        )  # fmt: skip
        self._task = self._bar.add_task(
            printable(name) or "steps", total=total_steps, completed=first_step - 1, eta="-:--:--"
        )
        self._output = ExitStack()
        self._started = time.monotonic()
        self._first: tuple[int, float] | None = None

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        self._bar.start()
        self._output.enter_context(printable_output())  # what others print while rich has replaced stdout and stderr
        return self

    def __exit__(self, *error: object) -> None:
        self._output.close()
        self._bar.stop()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step and its metrics."""
        parts, eta = describe(metrics), self._eta(step)
        line = "  ".join([f"step {step}/{self.total_steps}", *parts, f"ETA {eta}"])
        if self._live:
            self._bar.metrics = "   ".join(parts)
            self._bar.update(self._task, completed=step, eta=eta)
            self._log(line)
        else:
            self.note(line)

    def note(self, text: str, always: bool = False) -> None:
        """Print a line above the bar, for an evaluation or a checkpoint.

        Args:
            always: also in a quiet run.
        """
        self._log(text)
        if always or not self._quiet:
            self._console.print(Text(printable(text)), soft_wrap=True)

    def show_completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print a few of a step's completions, spread over its prompts, as a table.

        Args:
            rows: the step's rows of `rollouts/`.
        """
        if self._quiet:
            return
        table = Table(title=f"completions of step {step}", box=SIMPLE_HEAD, show_lines=True)
        for name in ("prompt", "completion"):
            table.add_column(name, ratio=1, overflow="fold")
        for name in ("reward", "advantage"):
            table.add_column(name, justify="right")
        for row in map(redacted, rows[:: -(-len(rows) // COMPLETIONS)]):
            prompt = printable(prompt_text(row["prompt"]).strip())
            numbers = ("-" if row[name] is None else f"{row[name]:.3g}" for name in ("reward", "advantage"))
            short = Text(f"…{prompt[-CHARACTERS:]}" if len(prompt) > CHARACTERS else prompt)
            episode = row.get("episode")
            table.add_row(short, Text(shortened(row["completion"])) if episode is None else by_turn(episode), *numbers)
        self._console.print(table)

    def _eta(self, step: int) -> str:
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        first, at = self._first
        # The first step includes warm-up, so it counts only until there is another.
        pace = (now - at) / (step - first) if step > first else (now - self._started) / (step - self.first_step + 1)
        return str(timedelta(seconds=int(pace * (self.total_steps - step))))


def describe(metrics: Mapping[str, float]) -> list[str]:
    """Format the metrics of `TERMINAL_METRICS` that are present.

    Example:
        >>> describe({"critic/score/mean": 0.25, "perf/throughput": 5120.4, "other": 1.0})
        ['reward 0.250', 'tok/s 5,120']
    """
    return [
        f"{label} {form.format(metrics[key])}"
        for label, (key, form) in TERMINAL_METRICS.items()
        if metrics.get(key) is not None
    ]


def describe_evaluation(metrics: Mapping[str, float]) -> str:
    """Format an evaluation: accuracy if the reward is binary, else the mean reward; else losses.

    Example:
        >>> describe_evaluation({"val/loss": 1.5, "val/bits_per_byte": 2.0})
        'held-out loss 1.5000, bits per byte 2.0000'
        >>> describe_evaluation({"val-core/sums/reward/mean@1": 0.7, "val-core/sums/acc/mean@1": 0.5})
        'held-out accuracy: sums 0.500'
    """
    for what, names in (("accuracy", accuracies(metrics)), ("reward", held_out_rewards(metrics))):
        if names:
            return f"held-out {what}: " + ", ".join(f"{source} {metrics[name]:.3f}" for source, name in names.items())
    short = {name: name.partition("/")[2].replace("nll_per_token", "loss").replace("_", " ") for name in metrics}
    return "held-out " + ", ".join(f"{short[name]} {value:.4f}" for name, value in metrics.items())


def shortened(text: str) -> str:
    """Return the start of a text, with control characters escaped."""
    text = printable(text.strip())
    return text[:CHARACTERS] + "…" * (len(text) > CHARACTERS)


def by_turn(episode: Mapping[str, Any], whole: bool = False) -> Text:
    """Format an episode: the model's texts plain, the environment's replies quoted with label, seconds and reward of
    the turn; and the reason of the end, unless the environment ended it.

    Args:
        episode: the `episode` of a row of `rollouts/`.
        whole: show all turns in full, with the paths of pictures; else the starts of the first two and of the last
            one.

    Example:
        >>> turn = {"text": "<search>Paris", "reply": "a city", "labels": ["search"], "seconds": 0.25, "reward": None}
        >>> last = {"text": "a city", "reply": "", "labels": [], "seconds": 0.0, "reward": None}
        >>> print(by_turn({"opening": "", "turns": [turn] * 9 + [last], "ended": "turns", "message": ""}))
        <search>Paris
        > search (0.25 s): a city
        <search>Paris
        > search (0.25 s): a city
        ... 7 more
        a city
        ended: turns
    """
    turns, lines = episode["turns"], list[tuple[str, str]]()

    def text_of(text: str, newline: str = "\n") -> str:
        return printable(text).strip("\n").replace("\n", newline) if whole else shortened(text)

    def pictures_of(names: Iterable[str] | None) -> None:
        lines.extend((f"> picture: {IMAGES}/{printable(str(name))}", REPLY_STYLE) for name in (names or ()) if whole)

    if episode["opening"]:
        lines.append((f"> {text_of(episode['opening'], QUOTED)}", REPLY_STYLE))
        pictures_of(episode.get("opening_images"))
    for number, turn in enumerate(turns):
        if 1 < number < len(turns) - 1 and not whole:
            lines += [(f"... {len(turns) - 3} more", "")] * (number == 2)
            continue
        lines.append((text_of(turn["text"]), ""))
        if turn["reply"] or turn["labels"] or turn["reward"] is not None:
            reward = "" if turn["reward"] is None else f", reward {turn['reward']:.3g}"
            labels = printable(" ".join(", ".join(filter(None, turn["labels"])).split()))
            header = f"{labels} ({turn['seconds']:.2f} s{reward})".strip()
            lines.append((f"> {header}: {text_of(turn['reply'], QUOTED)}", REPLY_STYLE))
            pictures_of(turn.get("images"))
    if episode["ended"] != "environment":
        why = f": {episode['failure']}: {text_of(episode['message'])}" if episode.get("failure") else ""
        lines.append((f"ended: {episode['ended']}{why}", "bold"))
    return Text("\n").join(Text(text, style=style) for text, style in lines)


def prompt_text(prompt: Any) -> str:
    """Return a prompt as text: messages with their roles.

    Example:
        >>> prompt_text([{"role": "user", "content": "1+1="}])
        'user: 1+1=\\n'
    """
    return prompt if isinstance(prompt, str) else "".join(f"{turn['role']}: {turn['content']}\n" for turn in prompt)
