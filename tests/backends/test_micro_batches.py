"""Splits into micro-batches: every row once, within the budget, groups together."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from atomrl.batches import group_pieces, micro_batches


@given(
    rows=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5)), min_size=1, max_size=40),
    tokens=st.integers(1, 300),
    most=st.none() | st.integers(1, 10),
    grouped=st.booleans(),
)
def test_every_row_is_in_one_micro_batch_within_the_budget(rows, tokens, most, grouped):
    lengths, groups = (torch.tensor(column) for column in zip(*rows, strict=True))
    batches = micro_batches(lengths, groups if grouped else None, tokens, most)
    assert sorted(torch.cat(batches).tolist()) == list(range(len(rows)))
    for batch in batches:
        units = len(set(groups[batch].tolist())) if grouped else len(batch)
        padded = len(batch) * int(lengths[batch].max())
        assert units == 1 or (padded <= tokens and len(batch) <= (most or len(rows)))
    if grouped:
        homes = [set(groups[batch].tolist()) for batch in batches]
        assert sum(map(len, homes)) == len(set.union(*homes))


@given(
    rows=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5)), min_size=1, max_size=40),
    tokens=st.integers(1, 300),
    most=st.none() | st.integers(1, 10),
)
def test_pieces_of_groups_fit(rows, tokens, most):
    lengths, groups = (torch.tensor(column) for column in zip(*rows, strict=True))
    pieces = group_pieces(lengths, groups, tokens, most)
    for piece in pieces.unique():
        members = pieces == piece
        padded, count = int(members.sum() * lengths[members].max()), int(members.sum())
        assert len(groups[members].unique()) == 1
        assert count == 1 or (padded <= tokens and count <= (most or len(rows)))
    for group in groups.unique():
        whole = int((groups == group).sum() * lengths[groups == group].max())
        if whole <= tokens and most is None:
            assert len(pieces[groups == group].unique()) == 1


def test_rows_of_like_length_are_together():
    batches = micro_batches(torch.tensor([5, 50, 6, 49]), None, 100)
    assert [sorted(batch.tolist()) for batch in batches] == [[1, 3], [0, 2]]
