"""Statistics of groups against a loop over their members."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atomrl.atoms import advantages as groups

NAN = math.nan
STATISTICS = [
    groups.group_mean,
    groups.group_std,
    groups.leave_one_out_mean,
]


@st.composite
def grouped(draw):
    size = draw(st.integers(1, 12))
    rewards = draw(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, -3.0]), min_size=size, max_size=size))
    ids = draw(st.lists(st.integers(-2, 2), min_size=size, max_size=size))
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(ids)


@given(data=grouped())
@settings(max_examples=100)
def test_against_a_loop_over_the_members(data):
    rewards, ids = data
    for i in range(len(rewards)):
        members = [j for j in range(len(rewards)) if ids[j] == ids[i]]
        mine, others = [rewards[j].item() for j in members], [rewards[j].item() for j in members if j != i]
        assert groups.group_mean(rewards, ids)[i].item() == pytest.approx(statistics.mean(mine))
        std = statistics.stdev(mine) if len(mine) > 1 else 0.0
        assert groups.group_std(rewards, ids)[i].item() == pytest.approx(std, abs=1e-12)
        mean = statistics.mean(others) if others else rewards[i].item()
        assert groups.leave_one_out_mean(rewards, ids)[i].item() == pytest.approx(mean)
        assert (groups.group_std(rewards, ids)[i].item() > 0) == (len(set(mine)) > 1)


@pytest.mark.parametrize("statistic", STATISTICS)
@given(data=grouped(), random=st.randoms())
@settings(max_examples=20)
def test_the_order_of_rows_does_not_matter(statistic, data, random):
    rewards, ids = data
    order = list(range(len(ids)))
    random.shuffle(order)
    torch.testing.assert_close(statistic(rewards, ids)[order], statistic(rewards[order], ids[order]))


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1e8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_have_exactly_their_mean_and_no_spread(value, dtype):
    rewards, ids = torch.full((7,), value, dtype=dtype), torch.zeros(7, dtype=torch.long)
    assert torch.equal(groups.group_mean(rewards, ids), rewards)
    assert torch.equal(groups.leave_one_out_mean(rewards, ids), rewards)
    assert groups.group_std(rewards, ids).tolist() == [0.0] * 7


def test_missing_rewards_are_in_no_statistic():
    rewards, ids = torch.tensor([1.0, NAN, 0.0, NAN, 4.0, NAN]), torch.tensor([0, 0, 0, 1, 1, 2])
    assert groups.group_mean(rewards, ids).tolist() == [0.5, 0.5, 0.5, 4.0, 4.0, 0.0]
    assert groups.group_std(rewards, ids).tolist() == pytest.approx([0.5**0.5] * 3 + [0.0] * 3)
    assert groups.leave_one_out_mean(rewards, ids)[[0, 2, 4]].tolist() == [0.0, 1.0, 4.0]


@pytest.mark.parametrize("statistic", STATISTICS)
def test_no_gradient_and_no_rows(statistic):
    assert not statistic(torch.ones(2, requires_grad=True), torch.tensor([0, 0])).requires_grad
    assert statistic(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)
