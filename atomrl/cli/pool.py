"""List rollout pools; show, export, import or clear one (docs/rollout_pool.md).

atomrl pool list                                      # those in runs/pools
atomrl pool stats runs/pools/quickstart.sqlite
atomrl pool export runs/pools/quickstart.sqlite groups.jsonl      # one completion a line; *.parquet writes Parquet
atomrl pool import runs/pools/second.sqlite groups.jsonl
atomrl pool clear runs/pools/quickstart.sqlite        # all but what a trainer holds
"""

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path

ACTIONS = ("list", "stats", "export", "import", "clear")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("pool", nargs="?", type=Path, metavar="POOL", help="a file; of list, a folder")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="of export and import: *.jsonl or *.parquet")


def run(arguments: argparse.Namespace) -> int:
    action, path, file = arguments.action, arguments.pool, arguments.file
    if action == "list":
        return list_pools(path or Path("runs/pools"))
    if path is None or (file is None) == (action in ("export", "import")):
        needed = "POOL FILE" if action in ("export", "import") else "POOL"
        raise ValueError(
            f"atomrl pool {action} takes {needed}, as in: atomrl pool {action} runs/pools/quickstart.sqlite"
        )
    if action != "import" and not path.is_file():
        raise ValueError(f"there is no rollout pool {path}; `atomrl pool list FOLDER` shows those of a folder")
    from atomrl.config import PoolConfig
    from atomrl.pool.exchange import export_rows, import_rows, write_rows
    from atomrl.pool.store import RolloutPool

    if action == "import" and not file.is_file():
        raise ValueError(f"{file} does not exist")
    everything = PoolConfig(capacity=sys.maxsize, ttl_s=1e12)  # nothing goes but by `clear`
    with closing(RolloutPool(path, everything)) as pool:
        if action == "stats":
            print(json.dumps(pool.stats(), indent=2))
        elif action == "export":
            print(f"{file}: {write_rows(export_rows(pool), file)} completions")
        elif action == "import":
            found, new = import_rows(pool, file)
            print(f"{path}: {new} new groups of {found}")
        else:
            gone, held = pool.clear(), pool.stats()["held"]
            print(f"{path}: {gone} groups removed" + (f", {held} are held by a trainer" if held else ""))
    return 0


def list_pools(folder: Path) -> int:
    """A line for each pool of a folder."""
    from atomrl.config import PoolConfig
    from atomrl.pool.store import RolloutPool

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
