"""Export a rollout pool to JSONL and Parquet, and import it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from atomrl.common.files import write_jsonl
from atomrl.pool.codec import episode_of, images_of
from atomrl.pool.errors import PoolError
from atomrl.pool.store import RolloutPool
from atomrl.types import Problem, RaggedIds, RewardFailure, Segment, Trajectory

AS_TEXT = ("problem", "episode", "reward_parts", "part_weights", "made_with")
"""Columns whose values have no common type; they are JSON text in Parquet."""
BATCH = 64
"""Groups per transaction of an import."""


def export_rows(pool: RolloutPool) -> Iterator[dict[str, Any]]:
    """Yield a row for each trajectory, with its problem, segments, rewards and group, and the pool's identity."""
    made_with = pool.identity()
    for about, group in pool.groups():
        for item in group:
            row = {field.name: getattr(item, field.name) for field in fields(item)}
            yield {
                "group": about["id"], "uses": about["uses"], "written": about["written"], "run": about["run"], **row,
                "problem": asdict(item.problem),
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
    """Build the trajectory of a row from `export_rows`.

    Raises:
        KeyError, TypeError, ValueError: the row has another format.
    """
    values = dict(row)
    for name in AS_TEXT:
        if isinstance(values.get(name), str):
            values[name] = json.loads(values[name])
    problem, parts = values["problem"], []
    for part in values["segments"]:
        ragged = part["candidates"]
        if ragged is not None:
            counts, ids = (torch.tensor(ragged[name], dtype=torch.int32) for name in ("counts", "ids"))
            ragged = RaggedIds(counts, ids)
        logprobs = None if part["logprobs"] is None else tuple(part["logprobs"])
        tokens = tuple(int(token) for token in part["token_ids"])
        parts.append(Segment(**{**part, "token_ids": tokens, "logprobs": logprobs, "candidates": ragged}))
    if not isinstance(problem["prompt"], str):
        problem = {**problem, "prompt": tuple(problem["prompt"])}
    names = {field.name for field in fields(Trajectory)}
    return Trajectory(
        **{name: value for name, value in values.items() if name in names}
        | {
            "problem": Problem(**problem | {"images": images_of(problem.get("images", ()))}),
            "segments": tuple(parts),
            "episode": episode_of(values.get("episode")),
            "token_rewards": tuple((int(place), float(reward)) for place, reward in values["token_rewards"]),
            "reward_failures": tuple(RewardFailure(**failure) for failure in values["reward_failures"]),
        }
    )


def write_rows(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write rows as JSONL or Parquet, by the suffix of `path`; return their number.

    Raises:
        ValueError: the suffix is neither.
    """
    if path.suffix == ".jsonl":
        return write_jsonl(rows, path, lenient=True)
    if path.suffix != ".parquet":
        raise ValueError(f"{path}: the file name must end in .jsonl or .parquet")
    pyarrow, parquet = _pyarrow()
    table = pyarrow.Table.from_pylist([{**row, **{name: json.dumps(row[name]) for name in AS_TEXT}} for row in rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    parquet.write_table(table, partial)
    partial.replace(path)
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

    They get weight version 0 (the initial model), because versions of one run mean nothing in another. Their log-probs
    stay those of the weights that sampled them, as importance correction needs them.

    Returns:
        Number of groups in the file, and number of groups that were new to the pool.

    Raises:
        PoolError: the pool has groups that were made with another tokenizer, model, ...
        ValueError: a row has another format than `atomrl pool export` writes; the message has its line.
    """
    groups: dict[Any, list[Trajectory]] = {}
    made_with: set[str] = set()
    for number, row in enumerate(_read(path), start=1):
        try:
            item = trajectory_of(row)
            made_with.add(row["made_with"] if isinstance(row["made_with"], str) else json.dumps(row["made_with"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: not a row of `atomrl pool export`: {error!r}") from None
        parts = (replace(part, policy_version=0) if part.origin == "model" else part for part in item.segments)
        groups.setdefault(row["group"], []).append(replace(item, segments=tuple(parts)))
    if len(made_with) != 1:
        raise PoolError(f"{path} has {len(made_with)} different values of `made_with`; import files of one pool")
    pool.check_identity(json.loads(made_with.pop()))
    all_groups, new = list(groups.values()), 0
    for start in range(0, len(all_groups), BATCH):
        new += pool.put(all_groups[start : start + BATCH])
    return len(all_groups), new


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
