"""The reward model's loss by numbers, and that no split changes it."""

from __future__ import annotations

import math

import pytest
import torch

from atomrl.algorithms.reward_model import RewardModelObjective
from atomrl.batches import TrainingBatch, select_rows
from atomrl.common.metrics import merge, values
from atomrl.protocols import ModelOutputs
from tests.algorithms.batches import flat_rows

SCORES = [2.0, 0.5, -1.0, 1.0, 0.25, 0.25]
MARGINS = [2.0, 2.0, 1.0, 1.0, 1.0, 1.0]


def training_batch(algorithm, pair_ids=(7, 7, 3, 3, 9, 9), labels=(1, -1) * 3):
    lengths = torch.tensor([4, 3, 5, 2, 3, 3])
    mask = torch.arange(5) < lengths[:, None]
    mask[:, 0] = False
    rows = flat_rows(
        tokens=torch.ones(6, 5, dtype=torch.long),
        loss_mask=mask,
        lengths=lengths,
        prompt_lengths=torch.zeros(6, dtype=torch.long),
        group_ids=torch.tensor(pair_ids),
        rewards=torch.zeros(6),
        truncated=torch.zeros(6, dtype=torch.bool),
        labels=torch.tensor(labels),
        pair_ids=torch.tensor(pair_ids),
        pair_margins=torch.tensor(MARGINS),
    )
    credited = algorithm.advantages(rows)
    return TrainingBatch(**vars(credited), loss_weights=algorithm.loss_weights(mask, torch.arange(len(mask))))


def result(algorithm, scores, batch):
    return algorithm.loss(ModelOutputs(scores=scores), batch)


@pytest.mark.parametrize(("margin", "centring"), [(0.0, 0.0), (0.5, 0.0), (0.0, 0.01), (0.5, 0.01)])
def test_the_loss_is_the_mean_over_pairs(margin, centring):
    algorithm = RewardModelObjective(margin=margin, centring=centring)
    pairs = [(2.0, 0.5, 2.0), (-1.0, 1.0, 1.0), (0.25, 0.25, 1.0)]
    expected = sum(math.log1p(math.exp(-(c - r - margin * m))) + centring * (c + r) ** 2 for c, r, m in pairs) / 3
    outcome = result(algorithm, torch.tensor(SCORES), training_batch(algorithm))
    assert outcome.loss.item() == pytest.approx(expected, rel=1e-6)
    assert values(outcome.metrics) == pytest.approx(
        {
            "reward_model/loss": expected,
            "rewards/chosen": 1.25 / 3,
            "rewards/rejected": 1.75 / 3,
            "rewards/margins": -0.5 / 3,
            "rewards/accuracies": 0.5,  # right, wrong, a tie
        },
        rel=1e-6,
    )


def test_micro_batches_change_neither_gradient_nor_metrics():
    algorithm = RewardModelObjective(margin=1.0, centring=0.1)
    batch = training_batch(algorithm)
    whole = torch.tensor(SCORES, dtype=torch.float64, requires_grad=True)
    together = result(algorithm, whole, batch)
    together.loss.backward()
    apart = torch.tensor(SCORES, dtype=torch.float64, requires_grad=True)
    parts = []
    for index in (torch.tensor([4, 5]), torch.tensor([0, 1, 2, 3])):
        part = result(algorithm, apart[index], select_rows(batch, index))
        part.loss.backward()
        parts.append(part.metrics)
    torch.testing.assert_close(apart.grad, whole.grad, atol=1e-12, rtol=0)
    assert values(merge(parts)) == pytest.approx(values(together.metrics), rel=1e-12)


@pytest.mark.parametrize("pair_ids", [(7, 7, 3, 9, 3, 9), (7, 7, 3, 3, 9, -1), (7, 7, 7, 7, 9, 8)])
def test_rows_that_are_no_pairs_are_refused(pair_ids):
    labels = (1, -1, 1, 1, -1, -1) if pair_ids[3] == 9 else (1, -1) * 3
    if pair_ids == (7, 7, 3, 9, 3, 9):
        training_batch(RewardModelObjective(), pair_ids, labels)  # in any order
        return
    with pytest.raises(ValueError, match="rows must be pairs"):
        training_batch(RewardModelObjective(), pair_ids, labels)


@pytest.mark.parametrize(
    ("key", "value"), [("margin", -1), ("centring", float("nan")), ("margin", True), ("center", 1)]
)
def test_mistakes_in_fields(key, value):
    with pytest.raises(ValueError, match=key):
        RewardModelObjective(**{key: value})
