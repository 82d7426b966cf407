"""A pool of groups in one SQLite file, for any number of processes of one machine.

Every call is one transaction: after a kill at any point it has happened or it has not. A group is written whole and
once (a second one with the same tokens is left out), is claimed by one reader at a time, and leaves the pool when its
reader says that it is finished. Until then the claim remembers for which step it was made, so that a reader that is
started again finds the same groups for the same steps; and when nothing is heard of the reader for the time of a lease,
another one may take them.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from atomrl.config import PoolConfig
from atomrl.pool import sql
from atomrl.pool.codec import checksum, columns, decode
from atomrl.pool.errors import BUSY_S, LeaseLost, PoolError, named
from atomrl.types import Trajectory

COUNTED = ("written", "duplicates", "finished", "returned", "evicted", "expired", "stale", "cleared")
"""What a pool counts from its first day on, in groups."""
_POLL_S = 0.002


@dataclass(frozen=True)
class Held:
    """A group that a reader has claimed."""

    group_id: int
    uses: int
    """How often it was trained on before."""
    group: list[Trajectory]


class RolloutPool:
    """A pool, open. It belongs to the thread and the process that made it.

    Args:
        path: the file; made if it is not there, on a local disk.
        settings: capacity, time to live, lease, and what readers pass over.
        clock: seconds since 1970, the same for all processes.

    Raises:
        PoolError: the file is no pool, has another layout, or cannot be opened.

    Example:
        >>> import tempfile
        >>> from atomrl.types import Sample, Segment
        >>> pool = RolloutPool(Path(tempfile.mkdtemp()) / "p.sqlite", PoolConfig())
        >>> parts = Segment(origin="prompt", token_ids=(5,)), Segment(origin="model", token_ids=(7,), policy_version=0)
        >>> sample = Sample(sample_id="a", prompt="", ground_truth="")
        >>> one = Trajectory(prompt_id="0:a", index=0, sample=sample, segments=parts, text="7", finish_reason="stop")
        >>> pool.put([[one]]), pool.put([[one]])
        (1, 0)
        >>> [held.group == [one] for held in pool.claim("me", step=1, count=5, version=0)]
        [True]
        >>> pool.finish("me", step=1), pool.stats()["groups"]
        (1, 0)
        >>> pool.close()
    """

    def __init__(self, path: Path, settings: PoolConfig, clock: Callable[[], float] = time.time) -> None:
        self.path, self.settings, self._clock = path, settings, clock
        self._identity: str | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PoolError(f"the rollout pool {path}: its folder cannot be made ({error.strerror})") from error
        self._lock = FileLock(f"{path}.lock", timeout=BUSY_S)
        with named(path):
            self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
            try:
                self._open()
            except BaseException:
                self._db.close()
                raise

    def _open(self) -> None:
        with self._transaction():
            (application,) = self._db.execute("PRAGMA application_id").fetchone()
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if tables and application != sql.APPLICATION_ID:
                raise PoolError(f"{self.path} is a database, but no rollout pool: take another pool.name")
            if not tables:
                for statement in sql.SCHEMA:
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA application_id = {sql.APPLICATION_ID}")
                self._db.execute(f"PRAGMA user_version = {sql.SCHEMA_VERSION}")
            elif version != sql.SCHEMA_VERSION:
                raise PoolError(
                    f"the rollout pool {self.path} has layout {version}, and this AtomRL writes {sql.SCHEMA_VERSION}: "
                    "use it with the AtomRL that wrote it, or remove the file"
                )
        # Not the write-ahead log: before SQLite 3.51.3, which few Pythons bring, it can lose or damage what several
        # processes write, as they did within seconds when some were killed.
        self._db.execute("PRAGMA journal_mode = TRUNCATE")
        self._db.execute("PRAGMA foreign_keys = ON")

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All of it or nothing, a power cut included, and no other process reads or writes meanwhile.

        Processes wait for a lock of their own: SQLite would let them wait for longer the longer they have waited, and
        not at all for one that mends what a killed process has left.
        """
        with named(self.path), self._lock.acquire(poll_interval=_POLL_S):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite ends it by itself where the disk is full
                    self._db.execute("ROLLBACK")
                raise

    def _count(self, name: str, by: int) -> None:
        if by:
            self._db.execute(
                "INSERT INTO counts VALUES (?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value", (name, by)
            )

    def _remove_expired(self, now: float) -> None:
        old = f"DELETE FROM groups WHERE written < :now - :ttl_s AND NOT {sql.IS_HELD}"
        self._count("expired", self._db.execute(old, {"now": now, "ttl_s": self.settings.ttl_s}).rowcount)

    def check_identity(self, identity: Mapping[str, str], adopt: bool = True) -> None:
        """That what the pool has was made with what this process has.

        Args:
            identity: what has to be the same, by the name that a person knows it by -> a hash, or the value itself.
            adopt: a pool that is empty is from now on one of this identity.

        Raises:
            PoolError: something differs; all that does is named.
        """
        mine = json.dumps(dict(identity), sort_keys=True)
        with self._transaction() as db:
            (groups,) = db.execute("SELECT count(*) FROM groups").fetchone()
            stored = db.execute("SELECT value FROM facts WHERE name = 'identity'").fetchone()
            if groups and stored:
                theirs = json.loads(stored[0])
                differ = [name for name in sorted({**theirs, **identity}) if theirs.get(name) != identity.get(name)]
                if differ:
                    raise PoolError(
                        f"the rollout pool {self.path} has {groups} groups that were made with another "
                        f"{', '.join(differ)}: take another pool (pool.name=NEW_NAME), or remove them: atomrl pool "
                        f"clear {self.path}"
                    )
            if adopt:
                db.execute("INSERT OR REPLACE INTO facts VALUES ('identity', ?)", (mine,))
                self._identity = mine

    def identity(self) -> dict[str, str]:
        """What the pool is made with (`check_identity`); empty where nobody has said so."""
        with self._transaction() as db:
            stored = db.execute("SELECT value FROM facts WHERE name = 'identity'").fetchone()
        return dict(json.loads(stored[0])) if stored else {}

    def start_run(self, name: str, resumed: bool) -> str:
        """What a trainer is called in this pool, as reader and as the one whose weights draw.

        A run that starts anew gets a new name: groups of an earlier run that was called the same go, and what that had
        claimed is free again. One that is resumed keeps its name, and with it its claims.
        """
        with self._transaction() as db:
            key = f"run:{name}"
            stored = db.execute("SELECT value FROM facts WHERE name = ?", (key,)).fetchone()
            run = stored[0] if stored and resumed else f"{name}@{uuid.uuid4().hex[:12]}"
            if stored and not resumed:
                gone = db.execute("DELETE FROM groups WHERE run = ?", stored).rowcount
                self._count("stale", gone)
                self._count("returned", db.execute("DELETE FROM claims WHERE reader = ?", stored).rowcount)
            db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, run))
            self._renew(run, self._clock())
        return str(run)

    # What producers call.

    def put(self, groups: Sequence[Sequence[Trajectory]], run: str = "") -> int:
        """Write groups: all of them or, after a kill or an error, none.

        A group with the same tokens as one that is there is left out. What is older than `ttl_s` goes, and what is over
        the `capacity`: of the oldest version first. Groups that a reader holds do not count, and stay.

        Args:
            groups: scored.
            run: whose weights drew them (`start_run`); empty for the model that runs start from.

        Returns:
            How many were new.

        Raises:
            ValueError: a group is empty, or its sample has a value that JSON has no form for.
            PoolError: the pool was emptied and is now used with another tokenizer, model, ... (`check_identity`).
        """
        rows = [columns(group) for group in groups]
        new = 0
        with self._transaction() as db:
            now = self._clock()
            if self._identity is not None:
                (identity,) = db.execute("SELECT value FROM facts WHERE name = 'identity'").fetchone()
                if identity != self._identity:
                    raise PoolError(f"the rollout pool {self.path} is now used by a run of another config: start again")
            for row in rows:
                names, marks = ", ".join(row), ", ".join("?" * len(row))
                statement = f"INSERT INTO groups (run, written, {names}) VALUES (?, ?, {marks}) ON CONFLICT DO NOTHING"
                new += db.execute(statement, (run, now, *row.values())).rowcount
            self._count("written", new)
            self._count("duplicates", len(rows) - new)
            self._remove_expired(now)
            (there,) = db.execute(sql.UNHELD, {"now": now}).fetchone()
            if (over := there - self.settings.capacity) > 0:
                gone = db.execute(f"DELETE FROM groups WHERE id IN ({sql.EVICTED})", {"now": now, "over": over})
                self._count("evicted", gone.rowcount)
        return new

    def take_positions(self, count: int) -> int:
        """The first of `count` places in the stream of prompts that no other producer draws."""
        with self._transaction() as db:
            self._count("prompts", count)
            (end,) = db.execute("SELECT value FROM counts WHERE name = 'prompts'").fetchone()
        return int(end) - count

    # What readers call.

    def claim(self, reader: str, step: int, count: int, version: int) -> list[Held]:
        """Take up to `count` groups for a step, in one transaction; all other claims of the reader are renewed.

        Those that nobody holds, that were used less than `max_uses` times and that pass the filters, in the order of
        `sql.CLAIMABLE`. A reader takes groups of its own weights and of the model that runs start from.

        Args:
            reader: its name, from `start_run`.
            step: for which they are; no group is there twice.
            count: how many at most.
            version: of the reader's policy. Groups are passed over whose oldest token is more than `max_staleness`
                versions behind it, or whose newest is ahead of it.

        Raises:
            PoolError: the content of a group is not what was written.
        """
        with self._transaction() as db:
            now, bounds = self._clock(), self._bounds(reader, step, version)
            self._renew(reader, now)
            self._remove_expired(now)
            stale = f"DELETE FROM groups WHERE run = :reader AND oldest < :oldest AND NOT {sql.IS_HELD}"
            self._count("stale", db.execute(stale, bounds).rowcount)
            found = db.execute(sql.CLAIMABLE, bounds | {"count": count}).fetchall()
            taken = "SELECT count(*) FROM claims WHERE reader = ? AND step = ?"
            (place,) = db.execute(taken, (reader, step)).fetchone()
            for number, (group_id, *_) in enumerate(found, start=place):
                lost = db.execute("DELETE FROM claims WHERE group_id = ? AND expires <= ?", (group_id, now))
                self._count("returned", lost.rowcount)
                expires = now + self.settings.lease_s
                db.execute("INSERT INTO claims VALUES (?, ?, ?, ?, ?)", (group_id, reader, step, number, expires))
        return [self._held(row) for row in found]

    def _bounds(self, reader: str, step: int, version: int) -> dict[str, Any]:
        settings = self.settings
        return {
            "now": self._clock(),
            "reader": reader,
            "step": step,
            "newest": version,
            "oldest": version - settings.max_staleness,
            "max_uses": settings.max_uses,
            "shortest": settings.min_response_tokens,
            "mixed": settings.mixed_only,
        }

    def _renew(self, reader: str, now: float) -> None:
        expires = now + self.settings.lease_s
        self._db.execute("UPDATE claims SET expires = ? WHERE reader = ?", (expires, reader))

    def held(self, reader: str, step: int) -> list[Held]:
        """What a reader has claimed for a step and not finished, in the order in which it was claimed."""
        with self._transaction() as db:
            found = db.execute(
                "SELECT id, uses, checksum, payload FROM claims JOIN groups ON id = group_id "
                "WHERE reader = ? AND step = ? ORDER BY place",
                (reader, step),
            ).fetchall()
        return [self._held(row) for row in found]

    def _held(self, row: tuple[int, int, bytes, bytes]) -> Held:
        group_id, uses, written, payload = row
        if checksum(payload) != written:
            raise PoolError(f"the rollout pool {self.path}: group {group_id} is not what was written: the disk is bad")
        return Held(group_id, uses, decode(payload))

    def finish(self, reader: str, step: int, expected: int | None = None) -> int:
        """The reader will not ask again for what it claimed for the steps up to `step`. Groups that were used
        `max_uses` times leave the pool.

        Args:
            expected: how many groups the reader thinks that these are.

        Returns:
            How many groups were finished.

        Raises:
            LeaseLost: less than `expected`: another reader has taken some. The others are finished.
        """
        mine = "FROM claims WHERE reader = ? AND step <= ?"
        with self._transaction() as db:
            ids = db.execute(f"SELECT group_id {mine}", (reader, step)).fetchall()
            db.execute(f"DELETE {mine}", (reader, step))
            db.executemany("UPDATE groups SET uses = uses + 1 WHERE id = ?", ids)
            used_up = "DELETE FROM groups WHERE id = ? AND uses >= ?"
            db.executemany(used_up, [(group_id, self.settings.max_uses) for (group_id,) in ids])
            self._count("finished", len(ids))
        if expected is not None and len(ids) < expected:
            raise LeaseLost(
                f"the rollout pool {self.path}: {expected - len(ids)} of the {expected} groups up to step {step} went "
                f"to another trainer, because this one was not heard of for pool.lease_s={self.settings.lease_s:g} "
                "seconds: raise it"
            )
        return len(ids)

    def why_not(self, reader: str, step: int, version: int) -> dict[str, int]:
        """Why groups are passed over (`sql.PASSED_OVER`) -> how many; a group may count under several."""
        with self._transaction() as db:
            found = db.execute(sql.WHY_NOT, self._bounds(reader, step, version)).fetchone()
        return {reason: number for reason, number in zip(sql.PASSED_OVER, found, strict=True) if number}

    # What people and tools call.

    def stats(self) -> dict[str, Any]:
        """How many groups there are and of what kind, and the counts since the pool was made (`COUNTED`)."""
        with self._transaction() as db:
            cursor = db.execute(sql.SUMMARY, {"now": self._clock()})
            summary = dict(zip((column[0] for column in cursor.description), cursor.fetchone(), strict=True))
            versions = self._db.execute("SELECT oldest, count(*) FROM groups GROUP BY oldest").fetchall()
        return self.counts() | summary | {"groups_by_version": dict(versions)}

    def counts(self) -> dict[str, int]:
        """How many groups there are, and the counts since the pool was made (`COUNTED`)."""
        with self._transaction() as db:
            (groups,) = db.execute("SELECT count(*) FROM groups").fetchone()
            found = dict(self._db.execute("SELECT name, value FROM counts").fetchall())
        return {"groups": groups} | {name: found.get(name, 0) for name in COUNTED}

    def groups(self) -> Iterator[tuple[dict[str, Any], list[Trajectory]]]:
        """Every group with what the store knows of it: `id`, `run`, `uses`, `written`. What is written or removed
        meanwhile may be there or not."""
        last = 0
        while True:
            with self._transaction() as db:
                rows = db.execute(
                    "SELECT id, uses, checksum, payload, run, written FROM groups WHERE id > ? ORDER BY id LIMIT 64",
                    (last,),
                ).fetchall()
            if not rows:
                return
            for *content, run, written in rows:
                held = self._held(tuple(content))
                yield {"id": held.group_id, "run": run, "uses": held.uses, "written": written}, held.group
            last = rows[-1][0]

    def clear(self) -> int:
        """Remove every group that no reader holds, and give the room back to the disk; returns how many."""
        with self._transaction() as db:
            gone = db.execute(f"DELETE FROM groups WHERE NOT {sql.IS_HELD}", {"now": self._clock()}).rowcount
            self._count("cleared", gone)
        with named(self.path), self._lock.acquire(poll_interval=_POLL_S):
            self._db.execute("VACUUM")
        return gone
