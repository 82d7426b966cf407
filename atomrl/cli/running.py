"""What `train` and `sft` have in common: the start, the end, and how a stop is answered."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from atomrl.cli.main import INTERRUPTED

if TYPE_CHECKING:
    from atomrl.config import RunConfig

Job = Callable[["RunConfig", bool, bool], dict[str, Any]]
"""config, resume, allow_changes -> summary"""

ADVICE = {
    "OutOfMemoryError": "Lower train.tokens_per_micro_batch or rollout.max_concurrent_completions, or set "
    "model.gradient_checkpointing=true; atomrl train CONFIG --dry-run estimates the memory.",
    "Diverged": "Lower train.learning_rate; model.dtype=float32 does not overflow so soon; RUN/rollouts has the "
    "rewards that it happened with. --resume --allow-changes goes on from the checkpoint before, with other settings.",
    "NoSignal": "With other settings, --resume goes on from the newest checkpoint.",
}
"""What to do about errors of a run that are no mistakes in the config."""


def run_to_the_end(
    command: str, config: RunConfig, arguments: argparse.Namespace, job: Job, header: Sequence[str] = ()
) -> int:
    """Print the config and the header, run the job, print its summary.

    Returns:
        0, or 130 where Ctrl-C or SIGTERM ended it early, with how to go on.
    """
    print("\n".join([compact(config), "", *header]), file=sys.stderr)
    try:
        with terminated_like_interrupted():
            summary = job(config, arguments.resume, arguments.allow_changes)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(how_to_go_on(command, config, arguments)) from None
    except RuntimeError as error:
        if advice := ADVICE.get(type(error).__name__):
            raise ValueError(f"{str(error).splitlines()[0]}\n{advice}") from error
        raise
    print(json.dumps(summary, indent=2, default=str))
    if not summary.get("finished", True):
        print(f"stopped early: {how_to_go_on(command, config, arguments)}", file=sys.stderr)
        return INTERRUPTED
    return 0


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends a job as Ctrl-C does, also while it starts or evaluates: parts are closed, workers end."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def compact(config: RunConfig) -> str:
    """The resolved config, a line or two for each section."""
    import yaml

    lines = []
    for name, section in config.model_dump(mode="json", exclude_none=True).items():
        text = yaml.safe_dump(section, default_flow_style=True, sort_keys=False, width=108, allow_unicode=True).strip()
        lines.append(f"{name}: {text.removesuffix('...').strip()}")
    return "\n".join(lines)


def how_to_go_on(command: str, config: RunConfig, arguments: argparse.Namespace) -> str:
    """The command that continues this run."""
    from atomrl.tracking.checkpoints import step_folders

    if not config.run_dir.is_dir():
        return "nothing was written"
    folders = [path for _, path in step_folders(config.run_dir / "checkpoints")]  # `--resume` checks their content
    newest = folders[-1] if folders else None
    path = arguments.config_option or arguments.config
    given = [item for item in (arguments.config, *arguments.overrides) if item and item != path]
    line = " ".join(["atomrl", command, str(path), *given, "--resume"])
    return f"the run is in {config.run_dir}, with {newest.name if newest else 'no checkpoint yet'}; go on with: {line}"
