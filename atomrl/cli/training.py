"""`atomrl train` starts a run of any kind."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from atomrl.cli.arguments import add_config, check_config, sigterm_as_interrupt
from atomrl.cli.main import INTERRUPTED, Run

if TYPE_CHECKING:
    from atomrl.config import RunConfig
    from atomrl.trainer import Options

WIDTH, MOST_LINES = 160, 10
ADVICE = {
    "OutOfMemoryError": "Lower train.tokens_per_micro_batch or rollout.max_concurrent_completions, or set "
    "model.gradient_checkpointing=true; atomrl train CONFIG --dry-run estimates the memory.",
    "Diverged": "Lower train.learning_rate; model.dtype=float32 does not overflow so soon; RUN/rollouts has the "
    "rewards of that step. --resume --allow-changes continues from the checkpoint before, with other settings.",
    "RankFailed": "--resume continues from the newest checkpoint.",
    "RankLost": "--resume continues from the newest checkpoint.",
    "RankOutOfMemory": "With that, --resume continues from the newest checkpoint.",
    "ActorDied": "--resume continues from the newest checkpoint.",
}
"""Type of an error that is not a mistake in the config -> what to do about it."""


def add_train(parser: argparse.ArgumentParser) -> Run:
    """Train a model. The config decides the kind of run:

    RL             by default: an algorithm that is trained on rollouts (grpo, ppo, dapo, ...)
    SFT            a section `sft`; rows with `prompt` and `completion`, or `messages`
    preferences    algorithm.name=dpo, kto, orpo, ...; rows with `prompt`, `chosen` and `rejected`
    reward model   algorithm.name=reward_model; the same rows
    pretraining    a section `pretrain`; text that `atomrl data prepare` has tokenized

    atomrl train configs/quickstart_sft.yaml
    atomrl train configs/quickstart.yaml
    atomrl train configs/quickstart.yaml run_name=second train.steps=50 rollout.temperature=0.8
    atomrl train configs/quickstart.yaml --dry-run
    atomrl train configs/quickstart.yaml --resume
    """
    add_config(parser)
    add = partial(parser.add_argument, action="store_true")
    add("--resume", help="continue from the run's newest complete checkpoint")
    add("--allow-changes", help="with --resume: allow a changed config, data, tokenizer or model")
    add("--verbose", help="print the whole config first, not only what differs from the defaults")
    add("--quiet", help="print only problems, and the summary at the end; log.txt in the run's folder has the rest")
    add("--dry-run", help="run all checks, print batch sizes and a memory estimate; loads no weights")
    return train


@sigterm_as_interrupt()  # for the whole command, because importing torch alone takes seconds
def train(arguments: argparse.Namespace) -> int:
    """Start the run of a config, or with --dry-run check it.

    Returns:
        Exit code 0; 1 if a run on offline data made no update; 130 after Ctrl-C or SIGTERM, with a hint how to resume.
    """
    check_config(arguments)
    from atomrl.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    from atomrl.tracking.console import QUIET
    from atomrl.trainer import Options, prepare_run, run_to_end
    from atomrl.trainer.hang_watch import hang_watch

    if is_other_rank(config):
        return follow_rank_0(config, arguments.dry_run)
    if arguments.dry_run:
        options = Options(resume=arguments.resume, allow_changes=arguments.allow_changes)
        sections = dry_run_sections(config, options)  # before printing anything, so that an error stands alone
        print(format_config(config), file=sys.stderr)
        for title, lines in sections:
            print_section(title, lines)
        if not arguments.resume:
            exists = config.run_dir.exists() and any(config.run_dir.iterdir())
            note = " exists: use --resume or another run_name" if exists else " (new)"
            print_section("run", [f"{config.run_dir}{note}"])
        return 0
    try:
        prepared = prepare_run(config)
        place, *settings = non_defaults(config)
        settings = format_config(config).splitlines() if arguments.verbose else settings
        header = (
            [] if arguments.quiet else [place, *settings, "", *prepared.describe_batch(), prepared.describe_ranks()]
        )
        before = QUIET.set(arguments.quiet)
        try:
            with hang_watch(prepared.config):
                options = Options(resume=arguments.resume, allow_changes=arguments.allow_changes, header=header)
                summary = run_to_end(prepared, partial(prepare_run, config), options)
        finally:
            QUIET.reset(before)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(resume_hint(config, arguments)) from None
    except RuntimeError as error:
        if advice := ADVICE.get(type(error).__name__):
            raise ValueError(f"{str(error).splitlines()[0]}\n{advice}") from error
        raise
    print(json.dumps(summary, indent=2, default=str))
    if not summary.get("finished", True):
        print(f"stopped early: {resume_hint(config, arguments)}", file=sys.stderr)
        return INTERRUPTED
    return 0 if summary["updates"] or config.kind == "rl" else 1  # in RL, all groups may have equal rewards


def dry_run_sections(config: RunConfig, options: Options | None = None) -> Sequence[tuple[str, Sequence[str]]]:
    """Return the sections of a dry run; if the model or the data is not on this machine, those without it.

    Args:
        options: with `resume`, the run is compared with the one that is to be continued.

    Raises:
        ConfigError, DataError, ValueError: the run cannot be started, or not be continued.
    """
    from atomrl.data.files import DataNotHere
    from atomrl.models.loading import ModelNotHere
    from atomrl.trainer import prepare_run

    resumed = options is not None and options.resume
    try:
        prepared = prepare_run(config)
        run = prepared.describe_resumption(options.allow_changes) if options and resumed else []
        sections = [*prepared.describe()]
    except (ModelNotHere, DataNotHere) as absent:
        from atomrl.planner.dry_run import describe_without

        sections = [*describe_without(config, absent)]
        run = [f"{config.run_dir}: not compared, as its model or data are not on this machine"]
    return [*sections, ("run", run)] if resumed else sections


def is_other_rank(config: RunConfig) -> bool:
    """Return True if a launcher started this process as a rank other than 0."""
    from atomrl.backends.base import check_launcher
    from atomrl.common.launchers import launched
    from atomrl.common.workers import die_with_parent
    from atomrl.config import ConfigError
    from atomrl.trainer.build import in_actors

    if (started := launched()) is None:
        return False
    if config.backend is None:
        check_launcher(1)
    if in_actors(config):
        raise ConfigError(
            f"cluster.resources.trainer: this run starts its ranks as Ray actors, but a launcher started "
            f"{started.world} processes (WORLD_SIZE): start it without torchrun or accelerate"
        )
    die_with_parent(os.getppid())  # a killed torchrun leaves its processes behind
    return started.rank > 0


def follow_rank_0(config: RunConfig, dry_run: bool) -> int:
    """Execute the calls of rank 0 until the run ends. Rank 0 does all checks and prints."""
    from atomrl.backends.group import RankFailed
    from atomrl.backends.launcher import follow_launcher
    from atomrl.trainer.build import device_name, given_to_rank

    assert config.backend is not None
    if not dry_run:
        try:
            follow_launcher(config.backend, device_name(config.model.device), given_to_rank(config))
        except RankFailed as error:  # it could not join the others
            raise ValueError(str(error)) from error
    return 0


def print_section(title: str, lines: Sequence[str]) -> None:
    """Print lines beside a title."""
    for index, line in enumerate(lines):
        print(f"{title if index == 0 else '':<8}{line}")


def format_config(config: RunConfig) -> str:
    """Format the resolved config, with a line or two for each section that this kind of run uses."""
    import yaml

    from atomrl.common.secrets import mask_secrets

    lines, unused = [], set(config.unused_sections)
    tree = config.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=unused)
    for name, section in mask_secrets(tree).items():
        text = yaml.safe_dump(section, default_flow_style=True, sort_keys=False, width=108, allow_unicode=True).strip()
        lines.append(f"{name}: {text.removesuffix('...').strip()}")
    return "\n".join(lines)


def non_defaults(config: RunConfig) -> list[str]:
    """Format the settings that differ from the defaults: one line per section, at most ten."""
    import yaml

    from atomrl.common.secrets import mask_secrets

    unused = set(config.unused_sections)
    tree = config.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True, exclude=unused)
    sections = dict(mask_secrets(tree))
    last = {name: sections.pop(name) for name in ("eval", "checkpoint", "tracking") if sections.get(name)}
    sections.pop("run_name")
    place = f"{config.run_dir} (seed {sections.pop('seed', config.seed)})"
    sections.pop("output_dir", None)
    lines = [f"{config.kind}: {place}"]
    for name, section in [*sections.items(), *last.items()]:
        text = yaml.safe_dump(section, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
        text = f"{name}: {text.strip().removesuffix('...').strip()}"
        lines.append(text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}...")
    if len(lines) > MOST_LINES:
        others = ", ".join(line.partition(":")[0] for line in lines[MOST_LINES - 1 :])
        lines[MOST_LINES - 1 :] = [f"(and {others}; --verbose shows the whole config)"]
    return lines


def resume_hint(config: RunConfig, arguments: argparse.Namespace) -> str:
    """Format the command that resumes this run."""
    from atomrl.tracking.checkpoints import step_folders
    from atomrl.tracking.environment import redact_command

    if not config.run_dir.is_dir():
        return "nothing was written"
    folders = step_folders(config.run_dir / "checkpoints")  # `--resume` checks their content
    newest = folders[-1][1].name if folders else "no checkpoint yet"
    line = redact_command(["atomrl", "train", arguments.config, *arguments.overrides, "--resume"])
    return f"the run is in {config.run_dir}, with {newest}; continue with: {line}"
