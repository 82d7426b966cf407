"""The stream: each sample exactly once an epoch, and one integer resumes it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atomrl.data.files import DataError
from atomrl.data.prompt_stream import PromptStream
from atomrl.types import Problem


def make_problems(count: int) -> list[Problem]:
    return [Problem(problem_id=f"s{n}", prompt=f"p{n}", ground_truth=n, columns={"n": n}) for n in range(count)]


@settings(max_examples=60)
@given(size=st.integers(1, 12), batches=st.lists(st.integers(0, 9), max_size=12), seed=st.integers(0, 99),
       shuffle=st.booleans())  # fmt: skip
def test_each_sample_exactly_once_an_epoch(size, batches, seed, shuffle):
    stream = PromptStream(make_problems(size), seed, shuffle)
    taken = [item for count in batches for item in stream.take(count)]
    assert len(taken) == stream.position == sum(batches)
    ids = [prompt_id for prompt_id, _ in taken]
    assert len(set(ids)) == len(ids) and all(i == f"{i.split(':')[0]}:{s.problem_id}" for i, s in taken)
    for epoch in range(sum(batches) // size):
        chunk = ids[epoch * size : (epoch + 1) * size]
        assert Counter(chunk) == Counter(f"{epoch}:s{n}" for n in range(size))


@settings(max_examples=60)
@given(size=st.integers(1, 12), position=st.integers(0, 50), seed=st.integers(0, 99), shuffle=st.booleans())
def test_any_position_resumes(size, position, seed, shuffle):
    whole = PromptStream(make_problems(size), seed, shuffle)
    whole.take(position)
    resumed = PromptStream(make_problems(size), seed, shuffle)
    resumed.position = position
    assert resumed.take(30) == whole.take(30) and resumed.position == whole.position
    resumed.position = position  # and back
    assert resumed.take(1)[0][1] == PromptStream(make_problems(size), seed, shuffle).take(position + 1)[-1][1]


def test_orders_differ_by_epoch_and_seed():
    ids = [prompt_id.split(":")[1] for prompt_id, _ in PromptStream(make_problems(20), seed=1).take(40)]
    other = [prompt_id.split(":")[1] for prompt_id, _ in PromptStream(make_problems(20), seed=2).take(20)]
    plain = [f"s{n}" for n in range(20)]
    assert ids[:20] != ids[20:] and ids[:20] != other and ids[:20] != plain
    assert [s.problem_id for _, s in PromptStream(make_problems(20), shuffle=False).take(40)] == plain * 2


def test_the_order_is_the_same_in_every_version():
    assert [problem.ground_truth for _, problem in PromptStream(make_problems(6), seed=0).take(12)] == ORDER


ORDER = [1, 0, 5, 2, 4, 3, 4, 3, 2, 1, 5, 0]


def test_the_fingerprint_notices_any_change():
    base = make_problems(3)
    fingerprint = PromptStream(base).fingerprint
    assert fingerprint == PromptStream(make_problems(3), seed=5, shuffle=False).fingerprint
    changes = [{"problem_id": "x"}, {"prompt": "x"}, {"ground_truth": "0"}, {"data_source": "x"}, {"columns": {"n": 1}}]
    others = [[replace(base[0], **change), *base[1:]] for change in changes] + [base[:2], base[::-1]]
    prints = {PromptStream(other).fingerprint for other in others}
    assert len(prints) == len(others) and fingerprint not in prints


def test_a_stream_needs_problems_with_ids_of_their_own():
    with pytest.raises(DataError, match="at least one"):
        PromptStream([])
    with pytest.raises(DataError, match="unique: 4"):
        PromptStream(make_problems(2) * 2)
