"""Turns: atoms against loops over tokens in float64, written from their definitions."""

import math
import random

import pytest
import torch

from atomrl.atoms import returns as turns
from atomrl.atoms.advantages import group_mean_baseline, group_zscore
from atomrl.objectives import AdvantageInputs
from atomrl.objectives.advantage import GiGPOAdvantage, LastTurnAdvantage, TurnGRPOAdvantage


def made(seed, rows=9, most=4):
    """Ragged turns with gaps, a row without a turn, rewards on every token; and what the same is as plain lists."""
    draw = random.Random(seed)
    ids, states = [], []
    for row in range(rows):
        line, shown = [-1] * draw.randint(1, 3), [-1] * 3
        shown = [-1] * len(line)
        for turn in range(draw.randint(1, most) if row else 0):
            size, gap = draw.randint(1, 3), draw.randint(0, 2)
            line += [turn] * size + [-1] * gap
            shown += [draw.randint(0, 1) if turn else 9] * size + [-1] * gap
        ids.append(line)
        states.append(shown)
    width = max(map(len, ids)) + 1
    turn_ids = torch.tensor([line + [-1] * (width - len(line)) for line in ids])
    groups = torch.tensor([draw.randint(0, 2) for _ in range(rows)])
    state_ids = torch.tensor([line + [-1] * (width - len(line)) for line in states])
    state_ids = torch.where(state_ids >= 0, state_ids + 100 * groups[:, None], -1)
    rewards = torch.tensor([[draw.gauss(0, 1) for _ in range(width)] for _ in range(rows)], dtype=torch.float64)
    outcomes = torch.tensor([draw.gauss(0, 1) for _ in range(rows)], dtype=torch.float64)
    return turn_ids, state_ids, groups, rewards, outcomes


def turn_tokens(turn_ids, row):
    """Places of each turn of a row."""
    tokens = {}
    for place, turn in enumerate(turn_ids[row].tolist()):
        if turn >= 0:
            tokens.setdefault(turn, []).append(place)
    return [tokens[turn] for turn in sorted(tokens)]


def relative(values, own, by_std, eps=1e-6):
    """Normalized advantage of one number within its group."""
    mean = sum(values) / len(values)
    if not by_std or len(values) == 1:
        return own - mean
    return (own - mean) / (math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1)) + eps)


def inputs_of(turn_ids, state_ids, groups, rewards, outcomes):
    return AdvantageInputs(
        outcomes, groups, mask=turn_ids >= 0, token_rewards=rewards, turn_ids=turn_ids, state_ids=state_ids
    )


def spread(turn_ids, by_turn):
    expected = torch.zeros(turn_ids.shape, dtype=torch.float64)
    for row, values in enumerate(by_turn):
        for places, value in zip(turn_tokens(turn_ids, row), values, strict=True):
            expected[row, places] = value
    return expected


def earned(turn_ids, rewards):
    """Return of each turn; an environment's reward off the model's tokens counts at the token before, or the first."""
    returns = []
    for row in range(len(turn_ids)):
        places = turn_tokens(turn_ids, row)
        sums = [0.0] * len(places)
        for place, reward in enumerate(rewards[row].tolist()):
            begun = [turn for turn, tokens in enumerate(places) if tokens[0] <= place]
            if places:
                sums[begun[-1] if begun else 0] += reward
        returns.append(sums)
    return returns


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("by_std", [True, False])
def test_turn_grpo_is_what_a_loop_finds(seed, by_std):
    turn_ids, state_ids, groups, rewards, outcomes = made(seed)
    sums, expected = earned(turn_ids, rewards), []
    for row, own in enumerate(sums):
        same = [other for other in range(len(sums)) if groups[other] == groups[row]]
        credit = relative([outcomes[other].item() for other in same], outcomes[row].item(), by_std)
        line = []
        for turn in reversed(range(len(own))):
            others = [sums[other][turn] for other in same if len(sums[other]) > turn]
            credit = relative(others, own[turn], by_std) + (credit if turn == len(own) - 1 else 0.9 * credit)
            line.append(credit)
        expected.append(line[::-1])
    actual = TurnGRPOAdvantage(gamma=0.9, divide_by_std=by_std)(
        inputs_of(turn_ids, state_ids, groups, rewards, outcomes)
    )
    torch.testing.assert_close(actual, spread(turn_ids, expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("by_std", [True, False])
def test_gigpo_is_what_a_loop_finds(seed, by_std):
    turn_ids, state_ids, groups, rewards, outcomes = made(seed)
    sums = earned(turn_ids, rewards)
    totals = [outcomes[row].item() + rewards[row].sum().item() for row in range(len(sums))]
    returns, states = [], []
    for row, own in enumerate(sums):
        later, line = 0.0, []
        for turn in reversed(range(len(own))):
            later = own[turn] + (outcomes[row].item() if turn == len(own) - 1 else 0.0) + 0.95 * later
            line.append(later)
        returns.append(line[::-1])
        states.append([state_ids[row, tokens[0]].item() for tokens in turn_tokens(turn_ids, row)])
    expected = []
    for row, own in enumerate(returns):
        episode = relative([totals[o] for o in range(len(sums)) if groups[o] == groups[row]], totals[row], by_std)
        line = []
        for turn, value in enumerate(own):
            alike = [
                returns[o][k]
                for o in range(len(sums))
                for k in range(len(returns[o]))
                if states[o][k] == states[row][turn]
            ]
            line.append(episode + 0.5 * relative(alike, value, by_std))
        expected.append(line)
    actual = GiGPOAdvantage(omega=0.5, divide_by_std=by_std)(inputs_of(turn_ids, state_ids, groups, rewards, outcomes))
    torch.testing.assert_close(actual, spread(turn_ids, expected), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("seed", range(5))
def test_the_last_turn_alone_has_the_groups_advantage(seed):
    turn_ids, state_ids, groups, rewards, outcomes = made(seed)
    inputs = inputs_of(turn_ids, state_ids, groups, rewards, outcomes)
    actual, credit = LastTurnAdvantage()(inputs), group_zscore(inputs.totals, groups)
    for row in range(len(turn_ids)):
        places = turn_tokens(turn_ids, row)
        last = places[-1] if places else []
        assert actual[row, last].tolist() == [credit[row].item()] * len(last)
        assert actual[row].count_nonzero() == (len(last) if credit[row] else 0)


def test_rows_of_one_turn_have_the_advantages_of_grpo():
    """Without turn ids every row is one turn: the three are GRPO's advantage, GiGPO's twice that."""
    mask = torch.tensor([[0, 1, 1], [0, 1, 0], [0, 1, 1], [0, 1, 1]]).bool()
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 3.0]), torch.tensor([0, 0, 0, 5])
    inputs = AdvantageInputs(rewards, groups, mask=mask)
    credit = torch.where(mask, group_zscore(rewards, groups)[:, None], 0.0)
    assert torch.equal(TurnGRPOAdvantage()(inputs), credit) and torch.equal(LastTurnAdvantage()(inputs), credit)
    assert torch.equal(GiGPOAdvantage()(inputs), 2 * credit)
    plain = torch.where(mask, group_mean_baseline(rewards, groups)[:, None], 0.0)
    assert torch.equal(TurnGRPOAdvantage(divide_by_std=False)(inputs), plain)


def test_no_rows_and_rows_without_a_token():
    for turn_ids in (torch.zeros(0, 4, dtype=torch.long), torch.full((2, 3), -1), torch.zeros(2, 0, dtype=torch.long)):
        rewards = torch.zeros(len(turn_ids))
        inputs = AdvantageInputs(rewards, rewards.long(), mask=turn_ids >= 0, turn_ids=turn_ids, state_ids=turn_ids)
        for choice in (TurnGRPOAdvantage(), GiGPOAdvantage(), LastTurnAdvantage()):
            actual = choice(inputs)
            assert actual.shape == turn_ids.shape and not actual.any()


def test_a_discount_out_of_range_is_refused():
    with pytest.raises(ValueError, match="gamma"):
        turns.turn_returns(torch.zeros(1, 2), gamma=1.5)
