"""What can go wrong with a pool."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import Timeout

BUSY_S = 60.0
"""How long a process waits for others to finish their transactions, which take milliseconds."""


class PoolError(ValueError):
    """A pool cannot be used as it is; the message names the file and says what to do."""


class PoolEmpty(PoolError):
    """A step waited too long for groups."""


class LeaseLost(PoolError):
    """Groups that a trainer had taken were given to another one, because it was not heard of for too long."""


ADVICE = {
    "SQLITE_FULL": "the disk is full: make room, or take another folder (pool.folder); what was written stays",
    "SQLITE_BUSY": f"another process has kept it locked for {BUSY_S:.0f} s: see which one has stopped in the middle",
    "SQLITE_NOTADB": "it is no rollout pool, or is damaged",
    "SQLITE_CORRUPT": "it is damaged: copy what `atomrl pool export` can read, then remove the file",
    "SQLITE_CANTOPEN": "it cannot be opened",
    "SQLITE_READONLY": "it cannot be written",
    "SQLITE_IOERR": "the disk does not read or write it; a pool belongs on a local disk, not on a network file system",
}
"""By the name of SQLite's error, or the start of it."""


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Turns SQLite's errors into a `PoolError` that names the file and says what to do."""
    try:
        yield
    except Timeout as error:
        raise PoolError(f"the rollout pool {path}: {ADVICE['SQLITE_BUSY']}") from error
    except sqlite3.DatabaseError as error:
        name = getattr(error, "sqlite_errorname", None) or ""
        advice = next((text for start, text in ADVICE.items() if name.startswith(start)), None)
        if advice is None:
            raise
        raise PoolError(f"the rollout pool {path}: {advice} ({error})") from error
