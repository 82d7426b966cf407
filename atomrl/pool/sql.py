"""The layout of a pool's file, and its longer questions."""

from __future__ import annotations

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
