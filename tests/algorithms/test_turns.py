"""Every algorithm on episodes: rows of several turns, with rewards of turns."""

import math
from dataclasses import replace

import pytest
import torch

from atomrl.algorithms import PREFERENCES
from atomrl.atoms.returns import gae
from atomrl.batches import flat_fields
from atomrl.objectives import AdvantageInputs
from atomrl.objectives.advantage import GAEAdvantage
from tests.algorithms.batches import changed, loss_gradient, make_rows, moved_logprobs, training_batch, with_turns
from tests.algorithms.test_properties import CASES, build

ROWS = with_turns(make_rows())
BY_TOKEN = (
    "old_logprobs",
    "ref_logprobs",
    "rollout_logprobs",
    "old_entropy",
    "old_squared_probs",
    "values",
    "teacher_logprobs",
)
DRAWN = {"random", "clip"}
"""In the names of cases that choose tokens at random, with a seed that is what all rows hold."""
ONLINE = [name for name, objective in PREFERENCES.items() if objective.online]


def test_the_rows_are_episodes():
    turns = ROWS.rollout.turn_ids.amax(1)
    assert turns.max() == 2 and (turns == 1).any() and torch.equal(ROWS.rollout.turn_ids >= 0, ROWS.loss_mask)
    inner = [row for row in range(ROWS.rows) if "0, 1" in str(ROWS.loss_mask[row].int().tolist()).partition("1")[2]]
    assert len(inner) > 4 and not ROWS.rollout.token_rewards[~ROWS.loss_mask].any() and ROWS.rollout.token_rewards.any()


def off_the_mask(rows, seed):
    """The same with other tokens where the model wrote none, and any numbers there."""
    generator = torch.Generator().manual_seed(seed)
    off = ~rows.loss_mask
    tokens = torch.where(off, torch.randint(0, 50, rows.tokens.shape, generator=generator), rows.tokens)
    noise = 9 * torch.randn(rows.tokens.shape, generator=generator, dtype=torch.float64)
    changes = {name: torch.where(off, noise, flat_fields(rows)[name]) for name in BY_TOKEN}
    return changed(rows, tokens=tokens, **changes), off, noise


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", [case for case in CASES if not DRAWN & set(case.replace("_", " ").split())])
def test_tokens_the_model_did_not_write_do_not_change_the_loss(case, seed):
    other, off, noise = off_the_mask(ROWS, seed)
    gradients = []
    for rows in (ROWS, other):
        algorithm = build(case)
        batch = training_batch(algorithm, rows)
        logprobs = moved_logprobs(ROWS)
        gradients.append(
            loss_gradient(algorithm, batch, logprobs if rows is ROWS else torch.where(off, noise, logprobs))
        )
        assert not batch.advantages[off].any()
    assert gradients[0][0] == gradients[1][0] and math.isfinite(gradients[0][0])
    assert torch.equal(gradients[0][1], gradients[1][1]) and gradients[0][1].any() and not gradients[0][1][off].any()


@pytest.mark.parametrize("case", [case for case in CASES if not build(case).token_filter])
def test_rewards_of_turns_are_learned_from(case):
    """In every algorithm that learns from rewards at all."""
    algorithm = build(case)
    without, reward = changed(ROWS, token_rewards=None), algorithm.advantage.type not in ("none", "reverse_kl")
    advantages = [algorithm.advantages(rows).advantages for rows in (ROWS, without)]
    assert torch.equal(*advantages) != reward


@pytest.mark.parametrize("name", ONLINE)
def test_preferences_of_episodes_are_by_all_that_was_earned(name):
    rows = replace(ROWS, trajectory_index=torch.arange(ROWS.rows))
    batch = PREFERENCES[name].resolved().advantages(rows)
    labels = batch.preference.labels
    totals = rows.rewards + rows.rollout.token_rewards.sum(1)
    for group in range(3):
        own = [i for i in range(4 * group, 4 * group + 4) if rows.loss_mask[i].any()]
        chosen = [int(i) for i, label in zip(batch.trajectory_index, labels, strict=True) if label == 1]
        assert max(own, key=lambda i: totals[i]) in chosen


def test_gae_over_turns_is_that_of_the_models_tokens_alone():
    """A reward of a turn stands at its last token, and what the environment wrote is no step between two turns."""
    batch = GAEAdvantage(gamma=0.9, lam=0.8, whiten=False)(
        AdvantageInputs(ROWS.rewards, ROWS.group_ids, ROWS.loss_mask, ROWS.rollout.token_rewards, values=ROWS.values)
    )
    for row in range(ROWS.rows):
        places = ROWS.loss_mask[row].nonzero()[:, 0].tolist()
        advantage, value = 0.0, 0.0
        for place in reversed(places):
            reward = ROWS.rollout.token_rewards[row, place].item()
            reward += ROWS.rewards[row].item() if place == places[-1] else 0.0
            own = ROWS.values[row, place].item()
            advantage = reward + 0.9 * value - own + 0.9 * 0.8 * advantage
            value = own
            assert batch.advantages[row, place].item() == pytest.approx(advantage, abs=1e-12)
            assert batch.returns[row, place].item() == pytest.approx(advantage + own, abs=1e-12)
        assert not batch.advantages[row][~ROWS.loss_mask[row]].any()
    packed = gae(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 0.5]]), torch.tensor([[True, True]]), 0.9, 0.8)
    gaps = gae(
        torch.tensor([[1.0, 7.0, 7.0, 2.0]]), torch.tensor([[0.5, 7.0, 7.0, 0.5]]),
        torch.tensor([[True, False, False, True]]), 0.9, 0.8,
    )  # fmt: skip
    assert gaps["advantages"][0, [0, 3]].tolist() == packed["advantages"][0].tolist()
