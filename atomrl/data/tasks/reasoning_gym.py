"""The tasks of the `reasoning-gym` package (more than 100).

Needs the `tasks` extra.

The column `reasoning_gym` has everything that the package needs to score an answer; the reward of the same name reads
it. Arguments are those of the task's own config class, such as `min_n` for `binary_matrix`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from atomrl.common.errors import did_you_mean, reraise_as
from atomrl.data.files import DataError

CHUNK = 500
"""Problems per reasoning-gym data set: some tasks generate all of them at once."""
ANY_ANSWER = "(any answer that the task accepts)"
"""Ground truth of tasks with several right answers."""


def draw_rows(name: str, seed: int, args: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield problems of a reasoning-gym task without end.

    Raises:
        DataError: the package is not installed, or the task or an argument is unknown.
    """
    with reraise_as(DataError, "reasoning_gym tasks need the extra: pip install 'atomrl[tasks]'", ImportError):
        from reasoning_gym.factory import DATASETS, create_dataset
    if name not in DATASETS:
        raise DataError(f"reasoning-gym has no task {name!r}; {did_you_mean(name, DATASETS)}")
    if {"seed", "size"} & set(args):
        raise DataError("seed and size are not arguments of the task; pass them separately")
    while True:
        seed %= 2**31
        with reraise_as(DataError, f"reasoning_gym:{name} with {args}", AssertionError, TypeError, ValueError):
            dataset = create_dataset(name, seed=seed, size=CHUNK, **args)
            for index in range(len(dataset)):
                yield _reasoning_gym_row(name, args, dataset[index])
        seed += CHUNK  # a problem's own seed is the data set's plus its index


def _reasoning_gym_row(name: str, args: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    answer = entry["answer"]
    return {
        "prompt": entry["question"],
        "ground_truth": ANY_ANSWER if answer is None else str(answer),
        "data_source": f"reasoning_gym:{name}",
        # through JSON, so that rows from a file and from the generator are equal
        "reasoning_gym": json.loads(
            json.dumps({"name": name, "args": args, "answer": answer, "metadata": entry["metadata"]}, default=str)
        ),
    }
