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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from atomrl.common.files import write_jsonl
from atomrl.config import PoolConfig
from atomrl.trainer.pool_codec import BUSY_S, LeaseLost, PoolError, checksum, columns, decode, episode_of, named
from atomrl.types import RaggedIds, RewardFailure, Sample, Segment, Trajectory

# --------------------------------------------------------------------------------------------------------------------
# The layout of a pool's file, and its longer questions.

SCHEMA_VERSION = 3
APPLICATION_ID = 0x41525031
"""In the header of the file: it is a pool of this package ("ARP1")."""
SCHEMA = (
    """CREATE TABLE groups (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        digest BLOB NOT NULL UNIQUE,      -- of the tokens
        checksum BLOB NOT NULL,           -- of the payload
        run TEXT NOT NULL,                -- whose weights drew it; '' for the model that runs start from
        prompt_id TEXT NOT NULL,
        oldest INTEGER NOT NULL,          -- policy version of its oldest token
        newest INTEGER NOT NULL,
        trajectories INTEGER NOT NULL,
        tokens INTEGER NOT NULL,          -- after the prompt
        shortest INTEGER NOT NULL,        -- of the completions, in tokens
        mixed INTEGER NOT NULL,           -- 1: not all completions earn the same
        reward REAL,                      -- mean
        written REAL NOT NULL,            -- seconds since 1970
        uses INTEGER NOT NULL DEFAULT 0,  -- finished ones
        payload BLOB NOT NULL
    )""",
    "CREATE INDEX by_version ON groups (uses, oldest, id)",
    "CREATE INDEX by_time ON groups (written)",
    """CREATE TABLE claims (
        group_id INTEGER NOT NULL REFERENCES groups ON DELETE CASCADE,
        reader TEXT NOT NULL,
        step INTEGER NOT NULL,
        place INTEGER NOT NULL,           -- among the groups of the step
        expires REAL NOT NULL,
        PRIMARY KEY (group_id, reader, step)
    ) WITHOUT ROWID""",
    "CREATE INDEX by_reader ON claims (reader, step, place)",
    "CREATE TABLE counts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
)
IS_HELD = "EXISTS (SELECT 1 FROM claims WHERE group_id = id AND expires > :now)"
TAKEN = (
    "uses + (SELECT count(*) FROM claims WHERE group_id = id AND (expires > :now OR reader = :reader)) >= :max_uses "
    "OR EXISTS (SELECT 1 FROM claims WHERE group_id = id AND reader = :reader AND step = :step)"
)
PASSED_OVER = {
    "of another run's weights": "run NOT IN ('', :reader)",
    "more than pool.max_staleness behind": "oldest < :oldest",
    "of newer weights": "newest > :newest",
    "with a completion under pool.min_response_tokens": "shortest < :shortest",
    "in which all earn the same (pool.mixed_only)": "mixed < :mixed",
    "held or used up": TAKEN,
}
"""Why a reader does not take a group -> the condition."""
CLAIMABLE = (
    "SELECT id, uses, checksum, payload FROM groups WHERE "
    + " AND ".join(f"NOT ({condition})" for condition in PASSED_OVER.values())
    + " ORDER BY uses, oldest, id LIMIT :count"
)
"""The least used first, then the oldest version, then what was written first."""
WHY_NOT = "SELECT " + ", ".join(f"coalesce(sum({condition}), 0)" for condition in PASSED_OVER.values()) + " FROM groups"
"""How many groups each condition of `PASSED_OVER` holds for."""
UNHELD = "SELECT (SELECT count(*) FROM groups) - (SELECT count(DISTINCT group_id) FROM claims WHERE expires > :now)"
EVICTED = f"SELECT id FROM groups WHERE NOT {IS_HELD} ORDER BY oldest, id LIMIT :over"
SUMMARY = f"""SELECT
    count(*) AS groups,
    coalesce(sum({IS_HELD}), 0) AS held,
    coalesce(sum(trajectories), 0) AS trajectories,
    coalesce(sum(tokens), 0) AS tokens,
    coalesce(sum(mixed), 0) AS mixed,
    coalesce(sum(length(payload)), 0) AS payload_bytes,
    avg(reward) AS reward,
    min(oldest) AS oldest_version,
    max(newest) AS newest_version,
    :now - min(written) AS oldest_age_s
FROM groups"""


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
            if tables and application != APPLICATION_ID:
                raise PoolError(f"{self.path} is a database, but no rollout pool: take another pool.name")
            if not tables:
                for statement in SCHEMA:
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            elif version != SCHEMA_VERSION:
                raise PoolError(
                    f"the rollout pool {self.path} has layout {version}, and this AtomRL writes {SCHEMA_VERSION}: "
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
        old = f"DELETE FROM groups WHERE written < :now - :ttl_s AND NOT {IS_HELD}"
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
            (there,) = db.execute(UNHELD, {"now": now}).fetchone()
            if (over := there - self.settings.capacity) > 0:
                gone = db.execute(f"DELETE FROM groups WHERE id IN ({EVICTED})", {"now": now, "over": over})
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
            stale = f"DELETE FROM groups WHERE run = :reader AND oldest < :oldest AND NOT {IS_HELD}"
            self._count("stale", db.execute(stale, bounds).rowcount)
            found = db.execute(CLAIMABLE, bounds | {"count": count}).fetchall()
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
            found = db.execute(WHY_NOT, self._bounds(reader, step, version)).fetchone()
        return {reason: number for reason, number in zip(PASSED_OVER, found, strict=True) if number}

    # What people and tools call.

    def stats(self) -> dict[str, Any]:
        """How many groups there are and of what kind, and the counts since the pool was made (`COUNTED`)."""
        with self._transaction() as db:
            cursor = db.execute(SUMMARY, {"now": self._clock()})
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
            gone = db.execute(f"DELETE FROM groups WHERE NOT {IS_HELD}", {"now": self._clock()}).rowcount
            self._count("cleared", gone)
        with named(self.path), self._lock.acquire(poll_interval=_POLL_S):
            self._db.execute("VACUUM")
        return gone


# --------------------------------------------------------------------------------------------------------------------
# Groups as rows that people and other programs read, and back.

AS_TEXT = ("sample", "episode", "reward_parts", "part_weights", "made_with")
"""Columns whose values have no common type: in Parquet they are JSON."""
BATCH = 64
"""Groups that are written to a pool in one transaction."""


def export_rows(pool: RolloutPool) -> Iterator[dict[str, Any]]:
    """A row for each trajectory: text, reward, sample, and segments with tokens, log-probs and versions; beside them
    the number of its group, how often that was used, and what the pool was made with."""
    made_with = pool.identity()
    for about, group in pool.groups():
        for item in group:
            row = {field.name: getattr(item, field.name) for field in fields(item)}
            yield {
                "group": about["id"], "uses": about["uses"], "written": about["written"], "run": about["run"], **row,
                "sample": asdict(item.sample),
                "episode": None if item.episode is None else asdict(item.episode),
                "segments": [_segment_row(part) for part in item.segments],
                "reward_parts": dict(item.reward_parts),
                "part_weights": dict(item.part_weights),
                "reward_failures": [asdict(failure) for failure in item.reward_failures],
                "made_with": made_with,
            }  # fmt: skip


def _segment_row(part: Segment) -> dict[str, Any]:
    chosen = part.candidates
    ragged = None if chosen is None else {"counts": chosen.counts.tolist(), "ids": chosen.ids.tolist()}
    return {
        "origin": part.origin,
        "token_ids": part.token_ids,
        "logprobs": part.logprobs,
        "policy_version": part.policy_version,
        "candidates": ragged,
    }


def trajectory_of(row: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a row of `export_rows`.

    Raises:
        KeyError, TypeError, ValueError: it is no such row.
    """
    given = dict(row)
    for name in AS_TEXT:
        if isinstance(given.get(name), str):
            given[name] = json.loads(given[name])
    sample, parts = given["sample"], []
    for part in given["segments"]:
        ragged = part["candidates"]
        if ragged is not None:
            counts, ids = (torch.tensor(ragged[name], dtype=torch.int32) for name in ("counts", "ids"))
            ragged = RaggedIds(counts, ids)
        logprobs = None if part["logprobs"] is None else tuple(part["logprobs"])
        tokens = tuple(int(token) for token in part["token_ids"])
        parts.append(Segment(**{**part, "token_ids": tokens, "logprobs": logprobs, "candidates": ragged}))
    if not isinstance(sample["prompt"], str):
        sample = {**sample, "prompt": tuple(sample["prompt"])}
    known = {field.name for field in fields(Trajectory)}
    return Trajectory(
        **{name: value for name, value in given.items() if name in known}
        | {
            "sample": Sample(**sample),
            "segments": tuple(parts),
            "episode": episode_of(given.get("episode")),
            "token_rewards": tuple((int(where), float(reward)) for where, reward in given["token_rewards"]),
            "reward_failures": tuple(RewardFailure(**failure) for failure in given["reward_failures"]),
        }
    )


def write_rows(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write rows as JSONL or, by the name's ending, Parquet; returns how many.

    Raises:
        ValueError: the name ends otherwise.
    """
    if path.suffix == ".jsonl":
        return write_jsonl(rows, path, lenient=True)
    if path.suffix != ".parquet":
        raise ValueError(f"{path}: name the file *.jsonl or *.parquet")
    pyarrow, parquet = _pyarrow()
    table = pyarrow.Table.from_pylist([{**row, **{name: json.dumps(row[name]) for name in AS_TEXT}} for row in rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    parquet.write_table(table, aside)
    aside.replace(path)
    return int(table.num_rows)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ImportError("Parquet needs pyarrow: pip install 'atomrl[parquet]'") from None
    return pyarrow, parquet


def import_rows(pool: RolloutPool, path: Path) -> tuple[int, int]:
    """Put the groups of an exported file into a pool.

    They count as drawn by the model that runs start from (version 0), because versions of one run mean nothing in
    another; their log-probs are those of the weights that drew them, as the importance correction needs them.

    Returns:
        How many groups the file has, and how many of them were new to the pool.

    Raises:
        PoolError: the pool has groups that were made with another tokenizer, model, ...
        ValueError: a row is not what `atomrl pool export` writes; names its line.
    """
    groups: dict[Any, list[Trajectory]] = {}
    made_with: set[str] = set()
    for number, row in enumerate(_read(path), start=1):
        try:
            item = trajectory_of(row)
            made_with.add(row["made_with"] if isinstance(row["made_with"], str) else json.dumps(row["made_with"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: no row of `atomrl pool export`: {error!r}") from None
        parts = (replace(part, policy_version=0) if part.origin == "model" else part for part in item.segments)
        groups.setdefault(row["group"], []).append(replace(item, segments=tuple(parts)))
    if len(made_with) != 1:
        raise PoolError(
            f"{path} has {len(made_with)} kinds of `made_with`, and a pool has one; import files of one pool"
        )
    pool.check_identity(json.loads(made_with.pop()))
    found, new = list(groups.values()), 0
    for start in range(0, len(found), BATCH):
        new += pool.put(found[start : start + BATCH])
    return len(found), new


def _read(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".parquet":
        yield from _pyarrow()[1].read_table(path).to_pylist()
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number} is not JSON: {error}") from None
