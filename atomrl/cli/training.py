"""Commands that train: `train` starts a run of any kind, `tune` searches for better values of config keys, `pool`
samples rollouts that a run trains on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from atomrl.cli.arguments import add_config, check_config, sigterm_as_interrupt
from atomrl.cli.main import INTERRUPTED, Run

if TYPE_CHECKING:
    from atomrl.config import RunConfig
    from atomrl.config.run import Kind
    from atomrl.pool.store import RolloutPool

WIDTH, MOST_LINES = 160, 10
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

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
    from atomrl.trainer import prepare_run, run_to_end
    from atomrl.trainer.base import hang_watch

    if is_other_rank(config):
        return follow_rank_0(config, arguments.dry_run)
    if arguments.dry_run:
        sections = dry_run_sections(config)  # before printing anything, so that an error stands alone
        print(format_config(config), file=sys.stderr)
        for title, lines in sections:
            print_section(title, lines)
        exists = config.run_dir.exists() and any(config.run_dir.iterdir())
        print_section("run", [f"{config.run_dir}{' exists: use --resume or another run_name' if exists else ' (new)'}"])
        return 0
    try:
        prepared, changes = prepare_run(config), arguments.allow_changes
        place, *settings = non_defaults(config)
        settings = format_config(config).splitlines() if arguments.verbose else settings
        header = (
            [] if arguments.quiet else [place, *settings, "", *prepared.describe_batch(), prepared.describe_ranks()]
        )
        before = QUIET.set(arguments.quiet)
        try:
            with hang_watch(prepared.config):
                summary = run_to_end(
                    prepared, partial(prepare_run, config), arguments.resume, allow_changes=changes, header=header
                )
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


def dry_run_sections(config: RunConfig) -> Sequence[tuple[str, Sequence[str]]]:
    """Return the sections of a dry run; if the model or the data is not on this machine, those without it."""
    from atomrl.data.files import DataNotHere
    from atomrl.models.loading import ModelNotHere
    from atomrl.trainer import prepare_run

    try:
        return prepare_run(config).describe()
    except (ModelNotHere, DataNotHere) as absent:
        from atomrl.planner.dry_run import describe_without

        return describe_without(config, absent)


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
    from atomrl.backends.ranks import follow_launcher
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
    from atomrl.tracking.run_directory import redact_command

    if not config.run_dir.is_dir():
        return "nothing was written"
    folders = step_folders(config.run_dir / "checkpoints")  # `--resume` checks their content
    newest = folders[-1][1].name if folders else "no checkpoint yet"
    line = redact_command(["atomrl", "train", arguments.config, *arguments.overrides, "--resume"])
    return f"the run is in {config.run_dir}, with {newest}; continue with: {line}"


def add_tune(parser: argparse.ArgumentParser) -> Run:
    """Search for better values of a config's keys.

    Trials are runs; bad ones stop half way; the best are repeated with fresh seeds. The space is a YAML file that maps
    dotted keys to a range or to choices:

        train.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}
        rollout.completions_per_prompt: {low: 4, high: 16, step: 4}
        algorithm.kl.coefficient: [0.0, 0.05, 0.1]

    atomrl tune configs/quickstart.yaml --space space.yaml --runs 20 --seeds 3 --budget 2h
    atomrl tune configs/quickstart.yaml --space space.yaml --metric critic/score/mean --out runs/study
    """
    add_config(parser)
    add = parser.add_argument
    add("--space", type=Path, required=True, metavar="FILE", help="ranges or choices of keys")
    add("--runs", type=int, default=20, help="trials (20)")
    add("--seeds", type=int, default=3, help="fresh seeds for the best three and the original config (3)")
    add("--budget", metavar="TIME", help="90m, 2h: start no trial that would leave no time for the fresh seeds")
    by_kind = "mean score, accuracy of pairs, or loss"
    add("--metric", metavar="M", help=f"key of metrics.jsonl to maximize; --metric=-M minimizes ({by_kind})")
    add("--window", type=int, default=10, help="average the metric over this many last steps (10)")
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="the study (default: OUTPUT_DIR/tune-NAME); an existing one is continued",
    )
    return tune


@sigterm_as_interrupt()
def tune(arguments: argparse.Namespace) -> int:
    check_config(arguments)
    from atomrl.config import load_config
    from atomrl.tools.tuning import Settings, read_space
    from atomrl.tools.tuning import tune as search
    from atomrl.trainer import prepare_run

    config = load_config(arguments.config, arguments.overrides)
    if min(arguments.runs, arguments.seeds, arguments.window) < 1:
        raise ValueError("--runs, --seeds and --window must be at least 1")
    space = read_space(arguments.space, config)
    config = prepare_run(config).config  # checked, with its number of steps
    folder = arguments.out or Path(config.output_dir) / f"tune-{config.run_name}"
    settings = Settings(
        folder=folder.resolve(), runs=arguments.runs, seeds=arguments.seeds, budget_s=seconds(arguments.budget),
        metric=arguments.metric or default_metric(config.kind), window=arguments.window,
        command=[sys.executable, "-P", "-m", "atomrl.cli.main", "train", arguments.config, *arguments.overrides],
    )  # fmt: skip
    search(config, space, settings, log=lambda line: print(line, flush=True))
    print(f"{folder}: result.json, best.yaml and the runs")
    return 0


def default_metric(kind: Kind) -> str:
    """Return the default metric of a kind of run; `-` in front means that smaller is better."""
    losses = {"sft": "-sft/nll_per_token", "pretrain": "-train/loss"}
    return "critic/score/mean" if kind == "rl" else losses.get(kind, "rewards/accuracies")


def seconds(text: str | None) -> float:
    """Parse a time such as `2h` into seconds; None: no limit.

    Example:
        >>> seconds("90m"), seconds("1.5h"), seconds(None)
        (5400.0, 5400.0, inf)

    Raises:
        ValueError: it is not a time.
    """
    if text is None:
        return float("inf")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if not match:
        raise ValueError(f"--budget {text}: write a time as in 90m or 2h")
    return float(match[1]) * UNITS[match[2]]


# --------------------------------------------------------------------------------------------------------------------
# Rollout pools (docs/guides/rollout_pool.md).


def add_pool_fill(parser: argparse.ArgumentParser) -> Run:
    """Sample completions into a rollout pool, which `atomrl train` with rollout.source=pool trains on.

    The config is that of the training: engine, data, rewards. Weights are those of model.path, and newer ones as soon
    as the run of the config publishes them. Several of these commands may run at once.

    atomrl pool fill configs/quickstart.yaml run_name=pooled --groups 640
    atomrl train configs/quickstart.yaml run_name=pooled rollout.source=pool train.steps=10 pool.max_staleness=10
    """
    add_config(parser)
    parser.add_argument("--groups", type=int, metavar="N", help="sample N groups and stop; default: until Ctrl-C")
    return fill_pool


def add_pool_list(parser: argparse.ArgumentParser) -> Run:
    """List the rollout pools of a folder.

    atomrl pool list
    atomrl pool list runs/pools
    """
    folder = Path("runs/pools")
    parser.add_argument("folder", nargs="?", type=Path, default=folder, metavar="FOLDER", help=f"({folder})")
    return list_pools


def add_pool_stats(parser: argparse.ArgumentParser) -> Run:
    """Print number and age of a pool's groups, as JSON.

    atomrl pool stats runs/pools/quickstart.sqlite
    """
    add_pool(parser)
    return show_stats


def add_pool_export(parser: argparse.ArgumentParser) -> Run:
    """Write a pool's completions to a file, one per line.

    atomrl pool export runs/pools/quickstart.sqlite groups.jsonl
    atomrl pool export runs/pools/quickstart.sqlite groups.parquet
    """
    add_pool(parser)
    parser.add_argument("file", type=Path, metavar="FILE", help="*.jsonl or *.parquet")
    return export_pool


def add_pool_import(parser: argparse.ArgumentParser) -> Run:
    """Read completions from a file into a pool; groups that it already has are not changed.

    atomrl pool import runs/pools/second.sqlite groups.jsonl
    atomrl pool import runs/pools/second.sqlite groups.parquet
    """
    add_pool(parser)
    parser.add_argument("file", type=Path, metavar="FILE", help="*.jsonl or *.parquet")
    return import_pool


def add_pool_clear(parser: argparse.ArgumentParser) -> Run:
    """Remove all groups from a pool except those held by a trainer.

    atomrl pool clear runs/pools/quickstart.sqlite
    """
    add_pool(parser)
    return clear_pool


def add_pool(parser: argparse.ArgumentParser) -> None:
    """Add the argument POOL, the file of a pool."""
    parser.add_argument("pool", type=Path, metavar="POOL", help="the file of a pool: *.sqlite")


@contextmanager
def open_pool(path: Path, new: bool = False) -> Iterator[RolloutPool]:
    """Open a pool without limits on capacity and age, so that nothing is evicted.

    Args:
        new: create the pool if it does not exist.

    Raises:
        ValueError: the pool does not exist.
    """
    if not new and not path.is_file():
        raise ValueError(f"rollout pool {path} does not exist; `atomrl pool list FOLDER` lists those of a folder")
    from atomrl.config import PoolConfig
    from atomrl.pool.store import RolloutPool

    with closing(RolloutPool(path, PoolConfig(capacity=sys.maxsize, ttl_s=1e12))) as pool:
        yield pool


def show_stats(arguments: argparse.Namespace) -> int:
    with open_pool(arguments.pool) as pool:
        print(json.dumps(pool.stats(), indent=2))
    return 0


def export_pool(arguments: argparse.Namespace) -> int:
    from atomrl.pool.store import export_rows, write_rows

    with open_pool(arguments.pool) as pool:
        print(f"{arguments.file}: {write_rows(export_rows(pool), arguments.file)} completions")
    return 0


def import_pool(arguments: argparse.Namespace) -> int:
    from atomrl.pool.store import import_rows

    if not arguments.file.is_file():
        raise ValueError(f"{arguments.file} does not exist")
    with open_pool(arguments.pool, new=True) as pool:
        total, new = import_rows(pool, arguments.file)
    print(f"{arguments.pool}: {new} new groups of {total}")
    return 0


def clear_pool(arguments: argparse.Namespace) -> int:
    with open_pool(arguments.pool) as pool:
        removed, held = pool.clear(), pool.stats()["held"]
    print(f"{arguments.pool}: {removed} groups removed" + (f", {held} are held by a trainer" if held else ""))
    return 0


@sigterm_as_interrupt()
def fill_pool(arguments: argparse.Namespace) -> int:
    """Fill the pool. Ctrl-C finishes and writes the current batch, and then returns exit code 0 as well."""
    if arguments.groups is not None and arguments.groups < 1:
        raise ValueError("--groups must be at least 1")
    check_config(arguments)
    from atomrl.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    from atomrl.trainer import check_rl
    from atomrl.trainer.base import hang_watch
    from atomrl.trainer.checks.config import check_secrets
    from atomrl.trainer.rl import RLRun, fill

    check_rl(config)
    check_secrets(config)
    run = RLRun(config)
    with hang_watch(config):
        counts = fill(run, arguments.groups, report=lambda line: print(line, file=sys.stderr))
    print(json.dumps(counts, indent=2))
    return 0


def list_pools(arguments: argparse.Namespace) -> int:
    """Print one line per pool of a folder."""
    from atomrl.config import PoolConfig
    from atomrl.pool.store import RolloutPool

    folder: Path = arguments.folder
    files = sorted(folder.glob("*.sqlite"))
    if not files:
        print(f"no rollout pools in {folder}")
    for path in files:
        with closing(RolloutPool(path, PoolConfig())) as pool:
            stats = pool.stats()
        age = stats["oldest_age_s"]
        print(
            f"{path}  {stats['groups']} groups, {stats['held']} of them held; {stats['payload_bytes'] / 2**20:.1f} MiB"
            + (f"; the oldest is {age / 3600:.1f} hours old" if age is not None else "")
        )
    return 0
