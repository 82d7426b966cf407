"""Reward shaping, by hand: missing parts, penalties, the KL in the reward, bounds."""

import math

import pytest
import torch

from atomrl.atoms import shaping

MASK = torch.tensor([[True, True, False], [True, False, True], [False] * 3])


def test_weighted_reward_ignores_missing_parts():
    parts = torch.tensor([[1.0, 2.0], [math.nan, 2.0], [math.nan, math.nan]])
    ours = shaping.weighted_reward(parts, torch.tensor([1.0, 0.5]))
    assert ours[:2].tolist() == [2.0, 1.0] and ours[2].isnan()


def test_soft_overlong_penalty_by_hand():
    lengths = torch.tensor([0, 10, 11, 15, 20, 21, 99])
    capped = shaping.soft_overlong_penalty(lengths, 20, 10, factor=2.0)
    assert capped.tolist() == pytest.approx([0, 0, -0.2, -1, -2, -2, -2])


def test_repetition_penalty_by_hand():
    tokens = torch.tensor([[1, 2, 1, 2, 1], [1, 2, 3, 4, 5], [7, 7, 7, 7, 7]])
    mask = torch.tensor([[True] * 5, [True] * 5, [True, False, True, True, False]])
    ours = shaping.repetition_penalty(tokens, mask, ngram_tokens=2, max_penalty=-2.0)
    assert ours.tolist() == pytest.approx([-2 * (1 - 2 / 4), 0, -2 * (1 - 1 / 2)])  # 12 21 12 21; none; 77 77
    assert shaping.repetition_penalty(tokens, ~mask & mask, 1).tolist() == [0.0] * 3


def test_where_a_reward_goes():
    rewards = torch.tensor([1.0, 2.0, 3.0])
    assert shaping.reward_at_last_token(rewards, MASK).tolist() == [[0, 1, 0], [0, 0, 2], [0, 0, 0]]
    assert shaping.reward_at_last_token(rewards, MASK[:, :0]).shape == (3, 0)


def test_kl_in_the_reward():
    rewards, kl = torch.ones(3, 3), torch.full((3, 3), 0.5, requires_grad=True)
    everywhere = shaping.kl_penalised_reward(rewards, kl, 0.2)
    assert everywhere.unique().item() == pytest.approx(0.9) and not everywhere.requires_grad
    masked = shaping.kl_penalised_reward(rewards, kl.where(MASK, math.nan), 0.2, MASK)
    torch.testing.assert_close(masked, torch.where(MASK, 0.9, 1.0))


def test_clipped_rewards_are_within_both_bounds():
    assert shaping.clipped_reward(torch.tensor([-9.0, 0.0, 9.0]), -1.0, 2.0).tolist() == [-1, 0, 2]


def test_bad_values_are_refused():
    lengths = torch.tensor([3])
    for buffer in (0, 21):
        with pytest.raises(ValueError, match="buffer_tokens"):
            shaping.soft_overlong_penalty(lengths, 20, buffer)
    with pytest.raises(ValueError, match="low"):
        shaping.clipped_reward(torch.ones(1), 1.0, 0.0)
    with pytest.raises(ValueError, match="ngram_tokens"):
        shaping.repetition_penalty(torch.zeros(1, 2, dtype=torch.long), MASK[:1, :2], 0)
    with pytest.raises(ValueError, match="max_penalty"):
        shaping.repetition_penalty(torch.zeros(1, 2, dtype=torch.long), MASK[:1, :2], 2, max_penalty=1.0)
