"""Returns and GAE against a loop written from the definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atomrl.atoms.returns import discounted_returns, gae, length_adaptive_lambda


def slow_gae(rewards, values, gamma, lam):
    """A_t = sum_l (gamma lam)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l}), one sum per step."""
    next_values = [*values[1:], 0.0][: len(values)]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, next_values, values, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


def slow_returns(rewards, gamma):
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


@st.composite
def rows(draw):
    count, width = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    numbers = st.lists(st.lists(st.floats(-3, 3), min_size=width, max_size=width), min_size=count, max_size=count)
    masks = st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=count, max_size=count)
    return (
        torch.tensor(draw(numbers), dtype=torch.float64),
        torch.tensor(draw(numbers), dtype=torch.float64),
        torch.tensor(draw(masks)),
    )


@given(data=rows(), gamma=st.floats(0, 1), lam=st.floats(0, 1))
@settings(max_examples=100)
def test_gae_is_its_definition_over_the_tokens_that_the_model_wrote(data, gamma, lam):
    rewards, values, mask = data
    ours = gae(rewards, values, mask, gamma, lam)
    for i in range(len(mask)):
        expected = slow_gae(rewards[i, mask[i]].tolist(), values[i, mask[i]].tolist(), gamma, lam)
        torch.testing.assert_close(ours["advantages"][i, mask[i]], torch.tensor(expected, dtype=torch.float64))
        torch.testing.assert_close(ours["returns"][i], (ours["advantages"][i] + values[i]) * mask[i])
    assert (ours["advantages"][~mask] == 0).all()


@given(data=rows(), gamma=st.floats(0, 1))
@settings(max_examples=50)
def test_returns_are_their_definition(data, gamma):
    rewards, _, mask = data
    ours = discounted_returns(rewards, mask, gamma)
    for i in range(len(mask)):
        expected = slow_returns(rewards[i, mask[i]].tolist(), gamma)
        torch.testing.assert_close(ours[i, mask[i]], torch.tensor(expected, dtype=torch.float64))
    assert (ours[~mask] == 0).all()


def test_lambda_one_without_values_is_the_return_and_lambda_zero_the_temporal_difference():
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.5, 1.0, 2.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    whole = gae(rewards, torch.zeros_like(values), mask, gamma=0.5, lam=1.0)["advantages"]
    torch.testing.assert_close(whole, discounted_returns(rewards, mask, gamma=0.5))
    assert gae(rewards, values, mask, gamma=1.0, lam=0.0)["advantages"].tolist() == [[1.5, 3.0, 2.0]]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1e30])
def test_garbage_off_the_mask_is_harmless(garbage):
    mask = torch.tensor([[True, False, True, False], [False] * 4])
    rewards, values = torch.rand(2, 4), torch.rand(2, 4)
    clean = gae(rewards * mask, values * mask, mask, 0.9, 0.9)
    dirty = gae(rewards.where(mask, garbage), values.where(mask, garbage), mask, 0.9, 0.9)
    assert torch.equal(clean["advantages"], dirty["advantages"]) and torch.equal(clean["returns"], dirty["returns"])
    assert torch.equal(
        discounted_returns(rewards * mask, mask, 0.9),
        discounted_returns(rewards.where(mask, garbage), mask, 0.9),
    )


def test_the_length_of_an_observation_does_not_change_credit():
    turns = {"rewards": torch.tensor([[0.0, 1.0]]), "values": torch.tensor([[0.2, 0.4]])}
    near = gae(**turns, mask=torch.ones(1, 2, dtype=torch.bool), gamma=0.9)["advantages"]
    spread = torch.tensor([[True, False, False, False, True]])
    far = {name: torch.zeros(1, 5).masked_scatter(spread, value) for name, value in turns.items()}
    torch.testing.assert_close(gae(**far, mask=spread, gamma=0.9)["advantages"][spread], near[0])


def test_one_lambda_per_row():
    rewards, values, mask = torch.rand(2, 5), torch.rand(2, 5), torch.ones(2, 5, dtype=torch.bool)
    both = gae(rewards, values, mask, lam=torch.tensor([0.3, 0.9]))["advantages"]
    torch.testing.assert_close(both[:1], gae(rewards[:1], values[:1], mask[:1], lam=0.3)["advantages"])
    torch.testing.assert_close(both[1:], gae(rewards[1:], values[1:], mask[1:], lam=0.9)["advantages"])


def test_length_adaptive_lambda_by_hand():
    mask = torch.arange(100) < torch.tensor([0, 10, 20, 40, 100])[:, None]
    assert length_adaptive_lambda(mask, alpha=0.05).tolist() == pytest.approx([0, 0, 0, 0.5, 0.8])


def test_no_gradient_and_no_tokens():
    rewards, values = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 3, requires_grad=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert not any(value.requires_grad for value in gae(rewards, values, mask).values())
    assert not discounted_returns(rewards, mask).requires_grad
    nothing = torch.zeros(2, 0)
    assert gae(nothing, nothing, nothing.bool())["returns"].shape == (2, 0)
    assert discounted_returns(nothing, nothing.bool()).shape == (2, 0)


def test_bad_values_are_refused():
    numbers, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="gamma"):
        gae(numbers, numbers, mask, gamma=1.5)
    with pytest.raises(ValueError, match="alpha"):
        length_adaptive_lambda(mask, 0.0)
