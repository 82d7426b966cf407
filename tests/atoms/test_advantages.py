"""Advantages of groups, by hand: z-score, mean baseline, leave-one-out, MaxRL."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atomrl.atoms.advantages import (
    group_mean_baseline,
    group_zscore,
    leave_one_out_baseline,
    maxrl_advantage,
    per_token,
    raw_reward,
    standardised,
)

MODES = [raw_reward, group_mean_baseline, group_zscore, leave_one_out_baseline, maxrl_advantage]
NAN = float("nan")


def test_zscore_by_hand():
    # group 3: rewards 1, 0, 0, 1: mean 0.5, unbiased variance 4 * 0.25 / 3
    rewards = torch.tensor([1.0, 5.0, 0.0, 0.0, 1.0, 7.0])
    groups = torch.tensor([3, 9, 3, 3, 3, 9])
    std = (1 / 3) ** 0.5
    expected = torch.tensor([0.5 / std, -1 / 2**0.5, -0.5 / std, -0.5 / std, 0.5 / std, 1 / 2**0.5])
    torch.testing.assert_close(group_zscore(rewards, groups, eps=0.0), expected)
    torch.testing.assert_close(group_zscore(rewards, groups, eps=1e-6), expected, atol=1e-5, rtol=0)


def test_eps_is_added_to_the_standard_deviation():
    rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    torch.testing.assert_close(group_zscore(rewards, groups, eps=0.5)[0], torch.tensor(0.5 / (0.5**0.5 + 0.5)))


def test_mean_baseline_by_hand():
    torch.testing.assert_close(
        group_mean_baseline(torch.tensor([3.0, 0.0, 0.0, 8.0]), torch.tensor([0, 0, 0, 1])),
        torch.tensor([2.0, -1.0, -1.0, 0.0]),
    )


def test_raw_is_the_reward():
    torch.testing.assert_close(raw_reward(torch.tensor([2.0, 1.0]), torch.tensor([0, 0])), torch.tensor([2.0, 1.0]))


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8, -7.3])
def test_equal_rewards_and_single_completions_give_exactly_zero(mode, value):
    rewards = torch.tensor([value] * 7 + [2.0])
    groups = torch.tensor([0] * 7 + [1])
    assert mode(rewards, groups).tolist() == [0.0] * 8


@pytest.mark.parametrize("mode", MODES)
@given(data=st.data())
@settings(max_examples=50)
def test_the_order_of_rows_does_not_matter(mode, data):
    size = data.draw(st.integers(1, 12))
    rewards = torch.tensor(data.draw(st.lists(st.floats(-5, 5, width=32), min_size=size, max_size=size)))
    groups = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    order = torch.tensor(data.draw(st.permutations(range(size))))
    torch.testing.assert_close(mode(rewards, groups)[order], mode(rewards[order], groups[order]))


@pytest.mark.parametrize("mode", MODES)
def test_no_gradient_and_no_rows(mode):
    assert not mode(torch.ones(2, requires_grad=True), torch.tensor([0, 0])).requires_grad
    assert mode(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_negative_eps_is_refused():
    with pytest.raises(ValueError, match="eps"):
        group_zscore(torch.ones(2), torch.tensor([0, 0]), eps=-1.0)


def test_per_token_repeats_an_advantage_where_the_mask_is_set():
    mask = torch.tensor([[False, True], [True, False]])
    assert per_token(torch.tensor([2.0, -3.0]), mask).tolist() == [[0, 2], [-3, 0]]


def test_shapes_are_checked():
    with pytest.raises(Exception, match="group_ids"):
        group_zscore(torch.ones(3), torch.tensor([0, 0]))


def test_leave_one_out_by_hand():
    rewards, groups = torch.tensor([3.0, 0.0, 1.5, 8.0]), torch.tensor([0, 0, 0, 1])
    assert leave_one_out_baseline(rewards, groups).tolist() == pytest.approx([2.25, -2.25, 0, 0])


def test_maxrl_by_hand():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0, -1.0, -3.0]), torch.tensor([0, 0, 0, 0, 1, 1])
    assert maxrl_advantage(rewards, groups).tolist() == pytest.approx([3, -1, -1, -1, 0, 0])
    with pytest.raises(ValueError, match="eps"):
        maxrl_advantage(rewards, groups, eps=-1.0)


@pytest.mark.parametrize("mode", MODES[1:4])
def test_a_missing_reward_has_no_advantage_and_no_influence(mode):
    rewards, groups = torch.tensor([1.0, NAN, 0.0, NAN, 4.0]), torch.tensor([0, 0, 0, 1, 1])
    present = ~rewards.isnan()
    ours = mode(rewards, groups)
    torch.testing.assert_close(ours[present], mode(rewards[present], groups[present]))
    assert ours[~present].tolist() == [0.0, 0.0]
    assert mode(rewards, groups, missing="nan").isnan().tolist() == (~present).tolist()


def test_standardised_leaves_alone_what_has_no_spread():
    ours = standardised(torch.tensor([2.0, 2.0]), torch.tensor([0.0, 3.0]), eps=1.0)
    assert ours.tolist() == [2.0, 0.5]
    with pytest.raises(ValueError, match="eps"):
        standardised(torch.ones(1), torch.ones(1), eps=-1.0)


def test_unknown_options_are_refused():
    with pytest.raises(Exception, match="missing"):
        group_zscore(torch.ones(2), torch.tensor([0, 0]), missing="none")


@pytest.mark.parametrize("mode", MODES)
def test_an_infinite_reward_is_seen(mode):
    assert not mode(torch.tensor([torch.inf, 0.0]), torch.tensor([0, 0])).isfinite().all()
