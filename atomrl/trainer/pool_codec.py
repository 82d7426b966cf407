"""A group of trajectories as bytes, and back: JSON for what is text, arrays for tokens and log-probs. No pickle.

    5 x uint32   bytes of the JSON; numbers of tokens, log-probs, candidate counts, candidate ids
    JSON         the prompt's sample, and a column for each field of the trajectories
    int32 ...    tokens: those of the prompt once, then trajectory after trajectory
    float32 ...  log-probs, which are trained as float32
    int32 ...    candidates (`types.RaggedIds`): how many each token has, then their ids

All little-endian. Nothing is compressed: at the quickstart's size zlib would take longer than all the rest
(docs/guides/rollout_pool.md).
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from filelock import Timeout

from atomrl.types import Episode, RaggedIds, RewardFailure, Sample, Segment, Trajectory, Turn

# --------------------------------------------------------------------------------------------------------------------
# What can go wrong with a pool.

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


SIZES = struct.Struct("<5I")
PROMPT = 0
"""In the place of a segment: the group's prompt."""
TO_JSON = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
COLUMNS = ("index", "text", "finish_reason", "reward", "baseline_reward")
"""Fields of a trajectory that are written as they are."""


class Encoded(NamedTuple):
    """A group as the store keeps it."""

    payload: bytes
    digest: bytes
    """Of the tokens of prompt and completions: equal for equal groups, whoever drew them and whatever they earned."""


def encode(group: Sequence[Trajectory]) -> Encoded:
    """The bytes of a group, and the hash of its tokens.

    Raises:
        ValueError: it is empty or of several prompts, or its sample has a value that JSON has no form for.
    """
    first = group[0] if group else None
    if first is None or any(
        t.prompt_id != first.prompt_id or (t.sample is not first.sample and t.sample != first.sample) for t in group
    ):
        raise ValueError("a group has at least one trajectory, and all are of one prompt")
    prompt = first.segments[0].token_ids
    tokens, logprobs, counts, candidates = [*prompt], list[float](), list[int](), list[int]()
    segments: list[list[Any]] = []
    ends = [len(tokens)]
    for item in group:
        rows: list[Any] = []
        for part in item.segments:
            if part.origin == "prompt" and part.token_ids == prompt:
                rows.append(PROMPT)
                continue
            tokens.extend(part.token_ids)
            if part.logprobs is not None:
                logprobs.extend(part.logprobs)
            chosen = part.candidates
            if chosen is not None:
                counts.extend(chosen.counts.tolist())
                candidates.extend(chosen.ids.tolist())
            places = None if chosen is None else len(chosen.ids)
            rows.append((part.origin, len(part.token_ids), part.logprobs is not None, part.policy_version, places))
        segments.append(rows)
        ends.append(len(tokens))
    header = {name: [getattr(item, name) for item in group] for name in COLUMNS} | {
        "prompt_id": first.prompt_id,
        "opening": first.opening,
        "sample": sample_json(first.sample),
        "prompt_tokens": len(prompt),
        "segments": segments,
        "token_rewards": [item.token_rewards for item in group],
        "episode": [None if item.episode is None else asdict(item.episode) for item in group],
        "reward_parts": [dict(item.reward_parts) for item in group],
        "part_weights": [dict(item.part_weights) for item in group],
        "reward_failures": [[asdict(failure) for failure in item.reward_failures] for item in group],
    }
    text = TO_JSON(header).encode()
    numbers = (len(tokens), len(logprobs), len(counts), len(candidates))
    arrays = _arrays(*numbers).pack(*tokens, *logprobs, *counts, *candidates)
    digest = hashlib.blake2b(struct.pack(f"<{len(ends)}i", *ends), digest_size=16)
    digest.update(arrays[: 4 * len(tokens)])
    return Encoded(SIZES.pack(len(text), *numbers) + text + arrays, digest.digest())


def _arrays(tokens: int, logprobs: int, counts: int, ids: int) -> struct.Struct:
    return struct.Struct(f"<{tokens}i{logprobs}f{counts + ids}i")


def checksum(payload: bytes) -> bytes:
    """The hash by which a payload that the disk has changed is known."""
    return hashlib.blake2b(payload, digest_size=16).digest()


def columns(group: Sequence[Trajectory]) -> dict[str, Any]:
    """The columns of the store (`sql.SCHEMA`) that a group decides by itself."""
    payload, digest = encode(group)
    found = {part.policy_version for item in group for part in item.segments}
    versions = [version for version in found if version is not None] or [0]
    lengths = [sum([len(part.token_ids) for part in item.segments if part.origin != "prompt"]) for item in group]
    rewards = [item.earned for item in group if item.earned is not None]
    return {
        "digest": digest,
        "checksum": checksum(payload),
        "prompt_id": group[0].prompt_id,
        "oldest": min(versions),
        "newest": max(versions),
        "trajectories": len(group),
        "tokens": sum(lengths),
        "shortest": min(lengths),
        "mixed": len(set(rewards)) > 1,
        "reward": fmean(rewards) if rewards else None,
        "payload": payload,
    }


def sample_json(sample: Sample) -> str:
    """A problem as JSON.

    Raises:
        ValueError: a column has a value that JSON has no form for.

    Example:
        >>> sample_json(Sample(sample_id="a", prompt="", ground_truth={1, 2}))
        Traceback (most recent call last):
        ...
        ValueError: the problem a cannot be kept in a rollout pool: Object of type set is not JSON serializable; ...
    """
    fields = (sample.sample_id, sample.prompt, sample.ground_truth, sample.data_source, dict(sample.columns))
    try:
        return json.dumps(fields)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the problem {sample.sample_id} cannot be kept in a rollout pool: {error}; its prompt, ground truth and "
            "columns must be text, numbers, lists or mappings"
        ) from None


def _sample(text: str) -> Sample:
    sample_id, prompt, ground_truth, data_source, columns = json.loads(text)
    prompt = prompt if isinstance(prompt, str) else tuple(prompt)
    return Sample(
        sample_id=sample_id, prompt=prompt, ground_truth=ground_truth, data_source=data_source, columns=columns
    )


def decode(payload: bytes) -> list[Trajectory]:
    """The group that `encode` made the bytes of; its trajectories share the sample and the prompt's segment."""
    length, *numbers = SIZES.unpack_from(payload)
    header = json.loads(payload[SIZES.size : SIZES.size + length])
    cursor = _Cursor(_arrays(*numbers).unpack_from(payload, SIZES.size + length), numbers)
    prompt = Segment(origin="prompt", token_ids=cursor.take(0, header["prompt_tokens"]))
    sample = _sample(header["sample"])
    group = []
    for place, rows in enumerate(header["segments"]):
        group.append(
            Trajectory(
                prompt_id=header["prompt_id"],
                opening=header.get("opening", ""),  # earlier versions wrote none
                sample=sample,
                segments=tuple([prompt if row == PROMPT else cursor.segment(*row) for row in rows]),
                token_rewards=tuple([(where, value) for where, value in header["token_rewards"][place]]),
                episode=episode_of(header["episode"][place]),
                reward_parts=header["reward_parts"][place],
                part_weights=header["part_weights"][place],
                reward_failures=tuple([RewardFailure(**failure) for failure in header["reward_failures"][place]]),
                **{name: header[name][place] for name in COLUMNS},
            )
        )
    return group


def episode_of(fields: Mapping[str, Any] | None) -> Episode | None:
    """An episode from its fields, as `dataclasses.asdict` gives them.

    Example:
        >>> from dataclasses import asdict
        >>> one = Episode(turns=(Turn(model_tokens=2, labels=("search",)),), ended="turns")
        >>> episode_of(asdict(one)) == one
        True
    """
    if fields is None:
        return None
    return Episode(**{**fields, "turns": tuple([_turn(turn) for turn in fields["turns"]])})


def _turn(fields: Mapping[str, Any]) -> Turn:
    return Turn(**{**fields, "labels": tuple(fields["labels"])})


class _Cursor:
    """Takes from the front of each array what has not been taken yet.

    Args:
        values: of all arrays, one after the other.
        numbers: how many are of each: tokens, log-probs, candidate counts, candidate ids.
    """

    def __init__(self, values: tuple[Any, ...], numbers: Sequence[int]) -> None:
        self._values, self._next = values, [sum(numbers[:place]) for place in range(len(numbers))]

    def take(self, array: int, size: int) -> tuple[Any, ...]:
        start = self._next[array]
        self._next[array] = end = start + size
        return self._values[start:end]

    def segment(self, origin: Any, size: int, scored: bool, version: int | None, places: int | None) -> Segment:
        candidates = None
        if places is not None:
            counts, ids = self.take(2, size), self.take(3, places)
            candidates = RaggedIds(torch.tensor(counts, dtype=torch.int32), torch.tensor(ids, dtype=torch.int32))
        return Segment(
            origin=origin,
            token_ids=self.take(0, size),
            logprobs=self.take(1, size) if scored else None,
            policy_version=version,
            candidates=candidates,
        )
