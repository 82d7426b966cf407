"""Schema and queries of a rollout pool's SQLite file."""

from __future__ import annotations

SCHEMA_VERSION = 5
APPLICATION_ID = 0x41525031
"""SQLite application id of a pool: "ARP1"."""
SCHEMA = (
    """CREATE TABLE groups (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        digest BLOB NOT NULL UNIQUE,      -- hash of the tokens
        checksum BLOB NOT NULL,           -- hash of the payload
        run TEXT NOT NULL,                -- run whose weights sampled it; '' for the initial model
        prompt_id TEXT NOT NULL,
        oldest INTEGER NOT NULL,          -- lowest policy version of its tokens
        newest INTEGER NOT NULL,
        trajectories INTEGER NOT NULL,
        tokens INTEGER NOT NULL,          -- without the prompt
        shortest INTEGER NOT NULL,        -- length of the shortest completion in tokens
        mixed INTEGER NOT NULL,           -- 1: the rewards differ
        reward REAL,                      -- mean reward
        written REAL NOT NULL,            -- seconds since 1970
        uses INTEGER NOT NULL DEFAULT 0,  -- how often it was trained on and finished
        payload BLOB NOT NULL
    )""",
    "CREATE INDEX by_version ON groups (uses, oldest, id)",
    "CREATE INDEX by_time ON groups (written)",
    """CREATE TABLE claims (
        group_id INTEGER NOT NULL REFERENCES groups ON DELETE CASCADE,
        reader TEXT NOT NULL,
        step INTEGER NOT NULL,
        place INTEGER NOT NULL,           -- position among the groups of the step
        expires REAL NOT NULL,
        PRIMARY KEY (group_id, reader, step)
    ) WITHOUT ROWID""",
    "CREATE INDEX by_reader ON claims (reader, step, place)",
    "CREATE TABLE counts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
)
IS_HELD = "EXISTS (SELECT 1 FROM claims WHERE group_id = id AND expires > :now)"
UNAVAILABLE = (
    "uses + (SELECT count(*) FROM claims WHERE group_id = id AND (expires > :now OR reader = :reader)) >= :max_uses "
    "OR EXISTS (SELECT 1 FROM claims WHERE group_id = id AND reader = :reader AND step = :step)"
)
PASSED_OVER = {
    "of another run's weights": "run NOT IN ('', :reader)",
    "more than pool.max_staleness behind": "oldest < :oldest",
    "of newer weights": "newest > :newest",
    "with a completion under pool.min_response_tokens": "shortest < :shortest",
    "held or used up": UNAVAILABLE,
}
"""Reason why a reader does not claim a group -> SQL condition."""
CLAIMABLE = (
    "SELECT id, uses, checksum, payload FROM groups WHERE "
    + " AND ".join(f"NOT ({condition})" for condition in PASSED_OVER.values())
    + " ORDER BY uses, oldest, id LIMIT :count"
)
"""Least used first, then lowest weight version, then first written."""
WHY_NOT = "SELECT " + ", ".join(f"coalesce(sum({condition}), 0)" for condition in PASSED_OVER.values()) + " FROM groups"
"""Number of groups for each condition of `PASSED_OVER`."""
FORGET_PRODUCERS = "DELETE FROM facts WHERE name = 'producers'"
"""Deletes the state of `RolloutPool.shared_state`: what producers learned from the weights of another run."""
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
"""Counts of groups since the pool was created."""
