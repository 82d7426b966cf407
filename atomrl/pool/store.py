"""A rollout pool: groups in one SQLite file, shared by any number of processes on one machine.

Producers write scored groups (`put`), trainers claim them (`claim`) and release them when a checkpoint has the step
(`finish`). A group with the same tokens as one in the pool is skipped. A claim stores its step, so a resumed trainer
gets the same groups for the same steps. If a trainer does not renew its claims within the lease, its groups can be
claimed by others.

Every call is one transaction, so a kill at any point leaves the pool consistent.
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
from atomrl.pool.codec import checksum, columns, decode
from atomrl.pool.errors import BUSY_S, LeaseLost, PoolError, pool_errors
from atomrl.pool.queries import (
    APPLICATION_ID,
    CLAIMABLE,
    COUNTED,
    EVICTED,
    FORGET_PRODUCERS,
    IS_HELD,
    PASSED_OVER,
    SCHEMA,
    SCHEMA_VERSION,
    SUMMARY,
    UNHELD,
    WHY_NOT,
)
from atomrl.types import Trajectory

_POLL_S = 0.002
"""Interval in which a process tries to get the pool's lock."""


@dataclass(frozen=True)
class Held:
    """A group that a reader has claimed."""

    group_id: int
    uses: int
    """Number of steps that trained on the group before."""
    group: list[Trajectory]


class RolloutPool:
    """An open rollout pool. It can be used only by the thread and process that opened it.

    Args:
        path: the file, on a local disk; created if it does not exist.
        settings: capacity, time to live, lease, and filters of readers.
        clock: returns seconds since 1970, the same in all processes.

    Raises:
        PoolError: the file is not a pool, has another schema version, or cannot be opened.

    Example:
        >>> import tempfile
        >>> from atomrl.types import Problem, Segment
        >>> pool = RolloutPool(Path(tempfile.mkdtemp()) / "p.sqlite", PoolConfig())
        >>> parts = Segment(origin="prompt", token_ids=(5,)), Segment(origin="model", token_ids=(7,), policy_version=0)
        >>> problem = Problem(problem_id="a", prompt="", ground_truth="")
        >>> one = Trajectory(prompt_id="0:a", index=0, problem=problem, segments=parts, text="7", finish_reason="stop")
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
            raise PoolError(f"rollout pool {path}: cannot create its folder ({error.strerror})") from error
        self._lock = FileLock(f"{path}.lock", timeout=BUSY_S)
        with pool_errors(path):
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
            if tables and application != APPLICATION_ID:
                raise PoolError(f"{self.path} is a database, but not a rollout pool: use another pool.name")
            if not tables:
                for statement in SCHEMA:
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            elif version != SCHEMA_VERSION:
                raise PoolError(
                    f"rollout pool {self.path} has format {version}, but this AtomRL uses {SCHEMA_VERSION}: "
                    "use the AtomRL version that wrote it, or remove the file"
                )
        # No write-ahead log: before SQLite 3.51.3, which few Pythons have, it can lose or corrupt data that several
        # processes write. Killing some of them showed it within seconds.
        self._db.execute("PRAGMA journal_mode = TRUNCATE")
        self._db.execute("PRAGMA foreign_keys = ON")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction, exclusively among all processes; it is atomic even if the power fails.

        Processes queue for a file lock before SQLite's own. SQLite's busy handler backs off, so processes that have
        waited long wait even longer, and it does not wait for one that recovers the journal of a killed process.
        """
        with pool_errors(self.path), self._lock.acquire(poll_interval=_POLL_S):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite has already rolled back if the disk is full
                    self._db.execute("ROLLBACK")
                raise

    def _count(self, name: str, by: int) -> None:
        if by:
            self._db.execute(
                "INSERT INTO counts VALUES (?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value", (name, by)
            )

    def _remove_expired(self, now: float) -> None:
        old = f"DELETE FROM groups WHERE written < :now - :ttl_s AND NOT {IS_HELD}"
        self._count("expired", self._db.execute(old, {"now": now, "ttl_s": self.settings.ttl_s}).rowcount)

    def check_identity(self, identity: Mapping[str, str], adopt: bool = True) -> None:
        """Check that the pool's groups were made with the same tokenizer, model and so on as this process has.

        Args:
            identity: name for users -> value, or a hash of it.
            adopt: store this identity in the pool. The state of producers (`shared_state`) of another one is deleted.

        Raises:
            PoolError: something differs; the message names all that does.
        """
        own = json.dumps(dict(identity), sort_keys=True)
        with self._transaction() as db:
            (groups,) = db.execute("SELECT count(*) FROM groups").fetchone()
            stored = db.execute("SELECT value FROM facts WHERE name = 'identity'").fetchone()
            if groups and stored:
                theirs = json.loads(stored[0])
                differ = [name for name in sorted({**theirs, **identity}) if theirs.get(name) != identity.get(name)]
                if differ:
                    raise PoolError(
                        f"rollout pool {self.path} has {groups} groups with another "
                        f"{', '.join(differ)}: use another pool (pool.name=NEW_NAME), or remove them: atomrl pool "
                        f"clear {self.path}"
                    )
            if adopt:
                if stored and stored[0] != own:
                    db.execute(FORGET_PRODUCERS)
                db.execute("INSERT OR REPLACE INTO facts VALUES ('identity', ?)", (own,))
                self._identity = own

    def identity(self) -> dict[str, str]:
        """Return the identity that the pool was made with (`check_identity`); empty if none is stored."""
        with self._transaction() as db:
            stored = db.execute("SELECT value FROM facts WHERE name = 'identity'").fetchone()
        return dict(json.loads(stored[0])) if stored else {}

    def start_run(self, name: str, resumed: bool) -> str:
        """Return a trainer's unique name in this pool, for its claims and for groups sampled with its weights.

        A new run gets a new name: groups of an earlier run called `name` and the state of producers (`shared_state`)
        are deleted, and its claims released. A resumed run keeps its name, and so its claims.
        """
        with self._transaction() as db:
            key = f"run:{name}"
            stored = db.execute("SELECT value FROM facts WHERE name = ?", (key,)).fetchone()
            run = stored[0] if stored and resumed else f"{name}@{uuid.uuid4().hex[:12]}"
            if stored and not resumed:
                self._count("stale", db.execute("DELETE FROM groups WHERE run = ?", stored).rowcount)
                self._count("returned", db.execute("DELETE FROM claims WHERE reader = ?", stored).rowcount)
                db.execute(FORGET_PRODUCERS)
            db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, run))
            self._renew(run, self._clock())
        return str(run)

    # For producers.

    def put(self, groups: Sequence[Sequence[Trajectory]], run: str = "") -> int:
        """Write groups; after a kill or an error none of them is written.

        A group with the same tokens as one in the pool is skipped. Groups older than `ttl_s` are deleted, and groups
        over the `capacity`, the lowest weight version first. Groups held by a reader do not count, and stay.

        Args:
            groups: scored groups.
            run: name of the run whose weights sampled them (`start_run`); empty for the initial model.

        Returns:
            Number of new groups.

        Raises:
            ValueError: a group is empty, or its problem is not JSON-serializable.
            PoolError: the pool was emptied and is now used with another tokenizer, model, ... (`check_identity`).
        """
        rows = [columns(group) for group in groups]
        new = 0
        with self._transaction() as db:
            now = self._clock()
            if self._identity is not None:
                (identity,) = db.execute("SELECT value FROM facts WHERE name = 'identity'").fetchone()
                if identity != self._identity:
                    raise PoolError(f"rollout pool {self.path} is now used by a run of another config: start again")
            for row in rows:
                names, marks = ", ".join(row), ", ".join("?" * len(row))
                statement = f"INSERT INTO groups (run, written, {names}) VALUES (?, ?, {marks}) ON CONFLICT DO NOTHING"
                new += db.execute(statement, (run, now, *row.values())).rowcount
            self._count("written", new)
            self._count("duplicates", len(rows) - new)
            self._remove_expired(now)
            (unheld,) = db.execute(UNHELD, {"now": now}).fetchone()
            if (over := unheld - self.settings.capacity) > 0:
                evicted = db.execute(f"DELETE FROM groups WHERE id IN ({EVICTED})", {"now": now, "over": over})
                self._count("evicted", evicted.rowcount)
        return new

    @contextmanager
    def shared_state(self) -> Iterator[dict[str, Any]]:
        """Context of a state as JSON, which all producers share (of their curriculum); empty at first. What the caller
        changes in it is stored at the end, as one transaction."""
        with self._transaction() as db:
            stored = db.execute("SELECT value FROM facts WHERE name = 'producers'").fetchone()
            state = dict(json.loads(stored[0])) if stored else {}
            yield state
            db.execute("INSERT OR REPLACE INTO facts VALUES ('producers', ?)", (json.dumps(state),))

    # For readers.

    def claim(self, reader: str, step: int, count: int, version: int) -> list[Held]:
        """Claim up to `count` groups for a step, and renew all other claims of the reader.

        Groups are claimable if nobody holds them, they were used fewer than `max_uses` times and they pass the filters
        (`PASSED_OVER`), in the order of `CLAIMABLE`. A reader gets groups of its own weights and of the initial model.

        Args:
            reader: the reader's name, from `start_run`.
            step: the step that will train on them; a group is never in a step twice.
            count: maximum number of groups.
            version: version of the reader's policy. Groups with tokens more than `max_staleness` versions behind it, or
                ahead of it, are skipped.

        Raises:
            PoolError: a group's checksum is wrong.
        """
        with self._transaction() as db:
            now, bounds = self._clock(), self._bounds(reader, step, version)
            self._renew(reader, now)
            self._remove_expired(now)
            stale = f"DELETE FROM groups WHERE run = :reader AND oldest < :oldest AND NOT {IS_HELD}"
            self._count("stale", db.execute(stale, bounds).rowcount)
            rows = db.execute(CLAIMABLE, bounds | {"count": count}).fetchall()
            claimed = "SELECT count(*) FROM claims WHERE reader = ? AND step = ?"
            (first_place,) = db.execute(claimed, (reader, step)).fetchone()
            expires = now + self.settings.lease_s
            for place, (group_id, *_) in enumerate(rows, start=first_place):
                expired = db.execute("DELETE FROM claims WHERE group_id = ? AND expires <= ?", (group_id, now))
                self._count("returned", expired.rowcount)
                db.execute("INSERT INTO claims VALUES (?, ?, ?, ?, ?)", (group_id, reader, step, place, expires))
        return [self._held(row) for row in rows]

    def _bounds(self, reader: str, step: int, version: int) -> dict[str, Any]:
        """Return the parameters of `CLAIMABLE` and `WHY_NOT`."""
        settings = self.settings
        return {
            "now": self._clock(),
            "reader": reader,
            "step": step,
            "newest": version,
            "oldest": version - settings.max_staleness,
            "max_uses": settings.max_uses,
            "shortest": settings.min_response_tokens,
        }

    def _renew(self, reader: str, now: float) -> None:
        expires = now + self.settings.lease_s
        self._db.execute("UPDATE claims SET expires = ? WHERE reader = ?", (expires, reader))

    def held(self, reader: str, step: int) -> list[Held]:
        """Return the groups that a reader has claimed for a step and not finished, in the order of the claims."""
        with self._transaction() as db:
            rows = db.execute(
                "SELECT id, uses, checksum, payload FROM claims JOIN groups ON id = group_id "
                "WHERE reader = ? AND step = ? ORDER BY place",
                (reader, step),
            ).fetchall()
        return [self._held(row) for row in rows]

    def _held(self, row: tuple[int, int, bytes, bytes]) -> Held:
        """Decode a row (id, uses, checksum, payload)."""
        group_id, uses, expected, payload = row
        if checksum(payload) != expected:
            raise PoolError(f"rollout pool {self.path}: group {group_id} is corrupted; check the disk")
        return Held(group_id, uses, decode(payload))

    def finish(self, reader: str, step: int, expected: int | None = None) -> int:
        """Release a reader's claims for all steps up to `step`; delete groups that were used `max_uses` times.

        Args:
            expected: number of groups that the reader has claimed for these steps.

        Returns:
            Number of groups that were finished.

        Raises:
            LeaseLost: fewer than `expected`, because another reader has claimed some. The others are finished.
        """
        own_claims = "FROM claims WHERE reader = ? AND step <= ?"
        with self._transaction() as db:
            ids = db.execute(f"SELECT group_id {own_claims}", (reader, step)).fetchall()
            db.execute(f"DELETE {own_claims}", (reader, step))
            db.executemany("UPDATE groups SET uses = uses + 1 WHERE id = ?", ids)
            used_up = "DELETE FROM groups WHERE id = ? AND uses >= ?"
            db.executemany(used_up, [(group_id, self.settings.max_uses) for (group_id,) in ids])
            self._count("finished", len(ids))
        if expected is not None and len(ids) < expected:
            raise LeaseLost(
                f"rollout pool {self.path}: {expected - len(ids)} of the {expected} groups up to step {step} were "
                f"claimed by another trainer, because this one did not renew its claims for pool.lease_s="
                f"{self.settings.lease_s:g} seconds: increase it"
            )
        return len(ids)

    def why_not(self, reader: str, step: int, version: int) -> dict[str, int]:
        """Return why groups are skipped: reason (`PASSED_OVER`) -> number of groups. A group may have several."""
        with self._transaction() as db:
            numbers = db.execute(WHY_NOT, self._bounds(reader, step, version)).fetchone()
        return {reason: number for reason, number in zip(PASSED_OVER, numbers, strict=True) if number}

    # For users and tools.

    def stats(self) -> dict[str, Any]:
        """Return a summary of the groups in the pool (`SUMMARY`), and the counts since it was created (`COUNTED`)."""
        with self._transaction() as db:
            cursor = db.execute(SUMMARY, {"now": self._clock()})
            summary = dict(zip((column[0] for column in cursor.description), cursor.fetchone(), strict=True))
            versions = self._db.execute("SELECT oldest, count(*) FROM groups GROUP BY oldest").fetchall()
        return self.counts() | summary | {"groups_by_version": dict(versions)}

    def counts(self) -> dict[str, int]:
        """Return the number of groups in the pool, and the counts since it was created (`COUNTED`)."""
        with self._transaction() as db:
            (groups,) = db.execute("SELECT count(*) FROM groups").fetchone()
            counts = dict(self._db.execute("SELECT name, value FROM counts").fetchall())
        return {"groups": groups} | {name: counts.get(name, 0) for name in COUNTED}

    def groups(self) -> Iterator[tuple[dict[str, Any], list[Trajectory]]]:
        """Yield every group with its `id`, `run`, `uses` and `written`.

        Groups that are written or deleted during the iteration may or may not be included.
        """
        last = 0
        while True:
            with self._transaction() as db:
                rows = db.execute(
                    "SELECT id, uses, checksum, payload, run, written FROM groups WHERE id > ? ORDER BY id LIMIT 64",
                    (last,),
                ).fetchall()
            if not rows:
                return
            for *row, run, written in rows:
                held = self._held(tuple(row))
                yield {"id": held.group_id, "run": run, "uses": held.uses, "written": written}, held.group
            last = rows[-1][0]

    def clear(self) -> int:
        """Delete every group that no reader holds, and shrink the file; return the number of groups."""
        with self._transaction() as db:
            deleted = db.execute(f"DELETE FROM groups WHERE NOT {IS_HELD}", {"now": self._clock()}).rowcount
            self._count("cleared", deleted)
        with pool_errors(self.path), self._lock.acquire(poll_interval=_POLL_S):
            self._db.execute("VACUUM")
        return deleted
