"""The tasks of the `reasoning-gym` package (more than 100) as rows. Needs the `tasks` extra.

Everything that the package needs to score an answer is in the column `reasoning_gym`; the reward of the same name
reads it. Arguments are those of the task's own config class, such as `min_n` for `binary_matrix`.
"""

import json
from collections.abc import Iterator
from typing import Any

from atomrl.data.problems import DataError
from atomrl.hints import did_you_mean, said_as

CHUNK = 500
"""Problems of one data set object: some tasks prepare all of them when they are made."""
ANY_ANSWER = "(any answer that the task accepts)"
"""The ground truth of tasks that have no one right answer."""


def draw_rows(name: str, seed: int, args: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Problems of one task without end.

    Raises:
        DataError: the package is absent, the task is unknown, or the arguments are not the task's.
    """
    with said_as(DataError, "reasoning_gym tasks need the extra: pip install 'atomrl[tasks]'", ImportError):
        from reasoning_gym.factory import DATASETS, create_dataset
    if name not in DATASETS:
        raise DataError(f"reasoning-gym has no task {name!r}; {did_you_mean(name, DATASETS)}")
    if {"seed", "size"} & set(args):
        raise DataError("seed and size are given apart, not among the arguments of the task")
    while True:
        seed %= 2**31
        with said_as(DataError, f"reasoning_gym:{name} with {args}", AssertionError, TypeError, ValueError):
            dataset = create_dataset(name, seed=seed, size=CHUNK, **args)
            for index in range(len(dataset)):
                yield _row(name, args, dataset[index])
        seed += CHUNK  # a problem's own seed is the data set's plus its index


def _row(name: str, args: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    answer = entry["answer"]
    return {
        "prompt": entry["question"],
        "ground_truth": ANY_ANSWER if answer is None else str(answer),
        "data_source": f"reasoning_gym:{name}",
        # as a file would give it back, so that a run from a file and one from the generator are the same
        "reasoning_gym": json.loads(
            json.dumps({"name": name, "args": args, "answer": answer, "metadata": entry["metadata"]}, default=str)
        ),
    }
