"""Train a model as a config says, which is of one of five kinds.

train         with reinforcement learning
sft           on demonstrations: rows with `prompt` and `completion`, or `messages`, or a task's own
dpo           on preferences: rows with `prompt`, `chosen` and `rejected` (docs/preferences.md)
reward-model  a reward model, on pairs of completions: the same rows
pretrain      on plain text: a fresh GPT, or one that is there already

atomrl train configs/quickstart.yaml
atomrl train configs/quickstart.yaml run_name=second train.steps=50 rollout.temperature=0.8
atomrl train configs/quickstart.yaml --dry-run
atomrl train configs/quickstart.yaml --resume
atomrl sft configs/quickstart_sft.yaml
atomrl dpo configs/algorithms/kto.yaml data.train=labelled.jsonl data.eval=null
atomrl reward-model configs/rlhf/reward_model.yaml model.path=MODEL data.train=pairs.jsonl data.eval=null
atomrl data prepare input.txt --tokenizer char --out data/shakespeare_char
atomrl pretrain configs/pretrain_shakespeare_char.yaml
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from atomrl.cli.config_arguments import add_config_arguments, config_from, join_overrides
from atomrl.cli.main import INTERRUPTED

if TYPE_CHECKING:
    from atomrl.config import RunConfig

prepare = join_overrides
WIDTH, MOST_LINES = 160, 10

ADVICE = {
    "OutOfMemoryError": "Lower train.tokens_per_micro_batch or rollout.max_concurrent_completions, or set "
    "model.gradient_checkpointing=true; atomrl train CONFIG --dry-run estimates the memory.",
    "Diverged": "Lower train.learning_rate; model.dtype=float32 does not overflow so soon; RUN/rollouts has the "
    "rewards that it happened with. --resume --allow-changes goes on from the checkpoint before, with other settings.",
    "RankFailed": "--resume goes on from the newest checkpoint.",
    "RankLost": "--resume goes on from the newest checkpoint.",
    "RankOutOfMemory": "With that, --resume goes on from the newest checkpoint.",
    "ActorDied": "--resume goes on from the newest checkpoint.",
}
"""What to do about errors of a run that are no mistakes in the config."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add = partial(parser.add_argument, action="store_true")
    add("--resume", help="go on from the run's newest whole checkpoint")
    add("--allow-changes", help="with --resume: although config, data, tokenizer or model differ")
    add("--verbose", help="begin with the whole config, and not with what differs from the defaults")
    add("--dry-run", help="check all that the run would, print its arithmetic and a memory estimate; loads no weights")


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends a job as Ctrl-C does, also while it starts or evaluates: parts are closed, workers end."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@terminated_like_interrupted()  # from the start: torch alone takes seconds to import
def run(arguments: argparse.Namespace) -> int:
    """Train, or check, what the config says.

    Returns:
        0; 1 where no step on given data made an update; 130 where Ctrl-C or SIGTERM ended it early, with how to go on.
    """
    config, command = config_from(arguments), arguments.command
    from atomrl.runs import check_command, prepare_run, run_to_end
    from atomrl.runs.hangs import hang_watch

    check_command(config, command)
    if is_other_rank(config):
        return follow(config, arguments.dry_run)
    if arguments.dry_run:
        sections = described(config)  # first: an error stands alone
        print(compact(config), file=sys.stderr)
        for title, lines in sections:
            print_section(title, lines)
        taken = config.run_dir.exists() and any(config.run_dir.iterdir())
        print_section("run", [f"{config.run_dir}{' exists: use --resume or another run_name' if taken else ' (new)'}"])
        return 0
    try:
        prepared, changes = prepare_run(config), arguments.allow_changes
        place, *settings = non_defaults(config)
        settings = compact(config).splitlines() if arguments.verbose else settings
        header = [place, *settings, "", *prepared.describe_batch(), prepared.describe_ranks()]
        with hang_watch(prepared.config):
            summary = run_to_end(
                prepared, partial(prepare_run, config), arguments.resume, allow_changes=changes, header=header
            )
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
    return 0 if summary["updates"] or config.kind == "train" else 1  # rollouts may well have nothing to learn from


def described(config: RunConfig) -> Sequence[tuple[str, Sequence[str]]]:
    """Return the sections of a dry run; without the model or the rows where they are not on this machine."""
    from atomrl.data.problems import DataNotHere
    from atomrl.models.loading import ModelNotHere
    from atomrl.runs import prepare_run

    try:
        return prepare_run(config).describe()
    except (ModelNotHere, DataNotHere) as absent:
        from atomrl.runs.without_model import describe_without

        return describe_without(config, absent)


def is_other_rank(config: RunConfig) -> bool:
    """Whether a launcher started this process as one of several ranks, and rank 0 is another."""
    from atomrl.config import ConfigError
    from atomrl.launcher import launched
    from atomrl.runs.build import in_actors
    from atomrl.training.collective import check_launcher
    from atomrl.worker_process import die_with

    if (started := launched()) is None:
        return False
    if config.backend is None:
        check_launcher(1)
    if in_actors(config):
        raise ConfigError(
            f"cluster.resources.trainer: this run starts its ranks as Ray actors, and a launcher started "
            f"{started.world} processes (WORLD_SIZE) besides: start it without torchrun or accelerate"
        )
    die_with(os.getppid())  # torchrun, killed, leaves its processes behind
    return started.rank > 0


def follow(config: RunConfig, dry_run: bool) -> int:
    """Do what rank 0 says until it ends; what there is to check and to print is its business."""
    from atomrl.runs.build import device_name
    from atomrl.training.ranks import follow_launcher

    assert config.backend is not None
    if not dry_run:
        follow_launcher(config.backend, device_name(config.model.device))
    return 0


def print_section(title: str, lines: Sequence[str]) -> None:
    """Lines under a title."""
    for index, line in enumerate(lines):
        print(f"{title if index == 0 else '':<8}{line}")


def compact(config: RunConfig) -> str:
    """The resolved config, a line or two for each section that this kind of run uses."""
    import yaml

    from atomrl.secrets import left_out

    lines, unused = [], set(config.unused_sections)
    tree = config.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=unused)
    for name, section in left_out(tree).items():
        text = yaml.safe_dump(section, default_flow_style=True, sort_keys=False, width=108, allow_unicode=True).strip()
        lines.append(f"{name}: {text.removesuffix('...').strip()}")
    return "\n".join(lines)


def non_defaults(config: RunConfig) -> list[str]:
    """The settings that differ from the defaults: a line for each section, ten at most."""
    import yaml

    from atomrl.secrets import left_out

    unused = set(config.unused_sections)
    tree = config.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True, exclude=unused)
    given = dict(left_out(tree))
    kept = {name: given.pop(name) for name in ("eval", "checkpoint", "tracking") if given.get(name)}
    given.pop("run_name")
    place = f"{config.run_dir} (seed {given.pop('seed', config.seed)})"
    given.pop("output_dir", None)
    lines = [f"{config.kind}: {place}"]
    for name, section in [*given.items(), *kept.items()]:
        text = yaml.safe_dump(section, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
        text = f"{name}: {text.strip().removesuffix('...').strip()}"
        lines.append(text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}...")
    if len(lines) > MOST_LINES:
        left = ", ".join(line.partition(":")[0] for line in lines[MOST_LINES - 1 :])
        lines[MOST_LINES - 1 :] = [f"(and {left}; --verbose shows the whole config)"]
    return lines


def how_to_go_on(command: str, config: RunConfig, arguments: argparse.Namespace) -> str:
    """The command that continues this run."""
    from atomrl.tracking.checkpoints import step_folders
    from atomrl.tracking.environment import redact

    if not config.run_dir.is_dir():
        return "nothing was written"
    folders = step_folders(config.run_dir / "checkpoints")  # `--resume` checks their content
    newest = folders[-1][1].name if folders else "no checkpoint yet"
    line = redact(["atomrl", command, arguments.config, *arguments.overrides, "--resume"])
    return f"the run is in {config.run_dir}, with {newest}; go on with: {line}"
