"""`atomrl pool`: fill, list, export, import and clear rollout pools (docs/guides/rollout_pool.md)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from atomrl.cli.arguments import add_config, check_config, sigterm_as_interrupt
from atomrl.cli.main import Run

if TYPE_CHECKING:
    from atomrl.pool.store import RolloutPool


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
    from atomrl.pool.exports import export_rows, write_rows

    with open_pool(arguments.pool) as pool:
        print(f"{arguments.file}: {write_rows(export_rows(pool), arguments.file)} completions")
    return 0


def import_pool(arguments: argparse.Namespace) -> int:
    from atomrl.pool.exports import import_rows

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
    from atomrl.trainer.checks.config import check_secrets
    from atomrl.trainer.hang_watch import hang_watch
    from atomrl.trainer.pool_fill import fill
    from atomrl.trainer.rl import RLRun

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
