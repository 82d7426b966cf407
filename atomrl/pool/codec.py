"""Encode groups of trajectories as bytes for the rollout pool, and decode them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, NamedTuple

import torch

from atomrl.types import Episode, Image, Problem, RaggedIds, RewardFailure, Segment, Trajectory, Turn

SIZES = struct.Struct("<5I")
PROMPT = 0
"""Stands for the group's prompt in the list of a trajectory's segments."""
TO_JSON = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
COLUMNS = ("index", "text", "finish_reason", "reward", "baseline_reward")
"""Fields of a trajectory that are written unchanged."""


# --------------------------------------------------------------------------------------------------------------------
# Encoding.


class Encoded(NamedTuple):
    """An encoded group."""

    payload: bytes
    digest: bytes
    """Hash of the tokens of prompt and completions, by which duplicates are detected. It does not depend on rewards,
    log-probs or weight versions."""


def encode(group: Sequence[Trajectory]) -> Encoded:
    """Encode a group, and hash its tokens.

    Raises:
        ValueError: the group is empty, has several prompts, or its problem is not JSON-serializable.
    """
    first = group[0] if group else None
    if first is None or any(
        t.prompt_id != first.prompt_id or (t.problem is not first.problem and t.problem != first.problem) for t in group
    ):
        raise ValueError("a group has at least one trajectory, and all are of one prompt")
    # All tokens and numbers of the group are concatenated into four arrays; `segments` has the lengths to split them.
    # The prompt, which all completions share, is stored once, and PROMPT stands for it.
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
            id_count = None if chosen is None else len(chosen.ids)
            rows.append((part.origin, len(part.token_ids), part.logprobs is not None, part.policy_version, id_count))
        segments.append(rows)
        ends.append(len(tokens))
    # Everything else is JSON. The payload is: sizes, JSON, arrays.
    header = {name: [getattr(item, name) for item in group] for name in COLUMNS} | {
        "prompt_id": first.prompt_id,
        "opening": first.opening,
        "problem": problem_json(first.problem),
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
    # With the ends of the completions: the same tokens, split otherwise, are another group.
    digest = hashlib.blake2b(struct.pack(f"<{len(ends)}i", *ends), digest_size=16)
    digest.update(arrays[: 4 * len(tokens)])
    return Encoded(SIZES.pack(len(text), *numbers) + text + arrays, digest.digest())


def _arrays(tokens: int, logprobs: int, counts: int, ids: int) -> struct.Struct:
    return struct.Struct(f"<{tokens}i{logprobs}f{counts + ids}i")


def checksum(payload: bytes) -> bytes:
    """Hash a payload, to detect that the disk has changed it."""
    return hashlib.blake2b(payload, digest_size=16).digest()


def columns(group: Sequence[Trajectory]) -> dict[str, Any]:
    """Return the columns of a group in the pool's table (`store.SCHEMA`)."""
    payload, digest = encode(group)
    all_versions = {part.policy_version for item in group for part in item.segments}
    versions = [version for version in all_versions if version is not None] or [0]
    lengths = [sum([len(part.token_ids) for part in item.segments if part.origin != "prompt"]) for item in group]
    rewards = [item.total_reward for item in group if item.total_reward is not None]
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


def problem_json(problem: Problem) -> str:
    """Encode a problem as JSON.

    Raises:
        ValueError: it has a value that is not JSON-serializable.

    Example:
        >>> problem_json(Problem(problem_id="a", prompt="", ground_truth={1, 2}))
        Traceback (most recent call last):
        ...
        ValueError: problem a cannot be stored in a rollout pool: Object of type set is not JSON serializable; ...
    """
    fields = [problem.problem_id, problem.prompt, problem.ground_truth, problem.data_source, dict(problem.columns)]
    fields += [[asdict(image) for image in problem.images]] if problem.images else []
    try:
        return json.dumps(fields)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"problem {problem.problem_id} cannot be stored in a rollout pool: {error}; its prompt, ground truth and "
            "columns must be text, numbers, lists or mappings"
        ) from None


def _sample(text: str) -> Problem:
    problem_id, prompt, ground_truth, data_source, columns, *rest = json.loads(text)
    prompt = prompt if isinstance(prompt, str) else tuple(prompt)
    return Problem(
        problem_id=problem_id,
        prompt=prompt,
        ground_truth=ground_truth,
        data_source=data_source,
        columns=columns,
        images=images_of(rest[0]) if rest else (),
    )


# --------------------------------------------------------------------------------------------------------------------
# Decoding.


def decode(payload: bytes) -> list[Trajectory]:
    """Decode a group: the inverse of `encode`. Its trajectories share the problem and the prompt's segment."""
    length, *numbers = SIZES.unpack_from(payload)
    header = json.loads(payload[SIZES.size : SIZES.size + length])
    cursor = _Cursor(_arrays(*numbers).unpack_from(payload, SIZES.size + length), numbers)
    prompt = Segment(origin="prompt", token_ids=cursor.take(0, header["prompt_tokens"]))
    problem = _sample(header["problem"])
    group = []
    for place, rows in enumerate(header["segments"]):
        group.append(
            Trajectory(
                prompt_id=header["prompt_id"],
                opening=header.get("opening", ""),  # absent in pools of earlier versions
                problem=problem,
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
    """Build an episode from its fields, the inverse of `dataclasses.asdict`.

    Example:
        >>> from dataclasses import asdict
        >>> one = Episode(turns=(Turn(model_tokens=2, labels=("search",)),), ended="turns")
        >>> episode_of(asdict(one)) == one
        True
    """
    if fields is None:
        return None
    turns = [
        Turn(**{**turn, "labels": tuple(turn["labels"]), "images": images_of(turn.get("images", ()))})
        for turn in fields["turns"]
    ]
    opening = images_of(fields.get("opening_images", ()))  # absent in pools of earlier versions
    return Episode(**{**fields, "turns": tuple(turns), "opening_images": opening})


def images_of(rows: Iterable[Mapping[str, Any]]) -> tuple[Image, ...]:
    """Build pictures from their fields."""
    return tuple(Image(**fields) for fields in rows)


class _Cursor:
    """Reads the arrays of a payload in order, each with its own position.

    Args:
        values: the elements of all arrays, one array after the other.
        numbers: length of each array: tokens, log-probs, candidate counts, candidate ids.
    """

    def __init__(self, values: tuple[Any, ...], numbers: Sequence[int]) -> None:
        self._values, self._next = values, [sum(numbers[:place]) for place in range(len(numbers))]

    def take(self, array: int, size: int) -> tuple[Any, ...]:
        """Return the next `size` elements of an array."""
        start = self._next[array]
        self._next[array] = end = start + size
        return self._values[start:end]

    def segment(self, origin: Any, size: int, scored: bool, version: int | None, id_count: int | None) -> Segment:
        """Read a segment of `size` tokens; with log-probs if `scored`, with candidates if `id_count` is not None."""
        candidates = None
        if id_count is not None:
            counts, ids = self.take(2, size), self.take(3, id_count)
            candidates = RaggedIds(torch.tensor(counts, dtype=torch.int32), torch.tensor(ids, dtype=torch.int32))
        return Segment(
            origin=origin,
            token_ids=self.take(0, size),
            logprobs=self.take(1, size) if scored else None,
            policy_version=version,
            candidates=candidates,
        )
