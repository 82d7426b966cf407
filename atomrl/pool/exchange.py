"""Groups as rows that people and other programs read, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from atomrl.files import write_jsonl
from atomrl.pool.codec import episode_of
from atomrl.pool.errors import PoolError
from atomrl.pool.store import RolloutPool
from atomrl.types import RaggedIds, RewardFailure, Sample, Segment, Trajectory

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
