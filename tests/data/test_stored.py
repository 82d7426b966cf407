"""Rows kept as bytes are the rows that were given; lengths of prompts come back only for the same data."""

import datetime
from dataclasses import replace

import numpy as np
import pytest

from atomrl.data import stored
from atomrl.data.prompt_lengths import read_lengths, write_lengths
from atomrl.data.stored import StoredProblems
from atomrl.types import Problem

VALUES = [
    1, 2**70, 1.5, True, None, "é\U0001f600", b"x", ("a", 1), [("k", 2)], {"b": [{}], "a": {1: 2}},
    datetime.date(2026, 1, 2), np.float32(0.5), [np.int64(3)],
]  # fmt: skip


@pytest.mark.parametrize("in_memory", [1, 1 << 20])
def test_problems_are_restored(monkeypatch, in_memory):
    monkeypatch.setattr(stored, "IN_MEMORY", in_memory)
    given = [
        Problem(
            problem_id=f"a:{n}", prompt=({"role": "user", "content": "?"},), ground_truth=value, columns={"v": value}
        )
        for n, value in enumerate(VALUES)
    ]
    problems = StoredProblems(given)
    assert [*problems] == given
    assert [type(each.ground_truth) for each in problems] == [type(value) for value in VALUES]
    assert [*problems[2:4]] == given[2:4] and [*problems.select([5, 1])[1:]] == [given[1]]
    assert problems[-1].problem_id == given[-1].problem_id
    same, other = StoredProblems(given), StoredProblems([replace(given[0], prompt="!"), *given[1:]])
    assert problems.digest == same.digest != other.digest != problems.select(range(1)).digest


def test_lengths_of_other_data_and_damaged_files_are_not_used(tmp_path):
    file = tmp_path / "prompt_lengths.train"
    assert read_lengths(file, "key", 3) is None
    write_lengths(file, "key", [3, 70000, 1])
    assert [*read_lengths(file, "key", 3)] == [3, 70000, 1]
    assert read_lengths(file, "other", 3) is None and read_lengths(file, "key", 2) is None
    content = file.read_bytes()
    for damaged in (b"", content[:-4], content[:-1] + b"\1", content + b"\0\0\0\0"):
        file.write_bytes(damaged)
        assert read_lengths(file, "key", 3) is None
