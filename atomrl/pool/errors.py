"""Errors of a rollout pool."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import Timeout

BUSY_S = 60.0
"""Seconds that a process waits for the transactions of others, which take milliseconds."""
ADVICE = {
    "SQLITE_FULL": "the disk is full: free space, or use another folder (pool.folder); written groups are kept",
    "SQLITE_BUSY": f"locked by another process for {BUSY_S:.0f} s: check which one hangs",
    "SQLITE_NOTADB": "not a rollout pool, or corrupted",
    "SQLITE_CORRUPT": "corrupted: save what `atomrl pool export` can read, then remove the file",
    "SQLITE_CANTOPEN": "cannot be opened",
    "SQLITE_READONLY": "cannot be written",
    "SQLITE_IOERR": "I/O error; use a local disk, not a network file system",
}
"""Name of an SQLite error, or its beginning -> what to do."""


class PoolError(ValueError):
    """A pool cannot be used; the message names the file and what to do."""


class PoolEmpty(PoolError):
    """A step waited longer than `pool.timeout_s` for groups."""


class LeaseLost(PoolError):
    """Groups that a trainer had claimed went to another one, because its lease expired."""


@contextmanager
def pool_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into a `PoolError` that names the file and what to do."""
    try:
        yield
    except Timeout as error:
        raise PoolError(f"rollout pool {path}: {ADVICE['SQLITE_BUSY']}") from error
    except sqlite3.DatabaseError as error:
        name = getattr(error, "sqlite_errorname", None) or ""
        advice = next((text for start, text in ADVICE.items() if name.startswith(start)), None)
        if advice is None:
            raise
        raise PoolError(f"rollout pool {path}: {advice} ({error})") from error
