"""Completions without a reward: left out of their group and of training, and counted; also where all are."""

from __future__ import annotations

import torch

from atomrl.algorithms import objective_of
from atomrl.config import RewardConfig
from atomrl.data.rows import to_rows
from atomrl.rewards.compute import build_rewards
from atomrl.trainer.report.metrics import rollout_metrics
from tests.rewards.batches import rollouts

DEEDS = "tests.rewards.misbehaving.obey_score"


def scored(groups):
    from tests.rewards.misbehaving import obey_score

    config = RewardConfig(functions=[{"function": DEEDS}])
    return build_rewards(config, {DEEDS: obey_score}, patience=None)(rollouts(groups))


def test_the_others_of_a_group_are_credited_as_if_it_had_not_been_there():
    algorithm = objective_of({"name": "grpo"}).resolved()
    some = algorithm.advantages(to_rows(scored({"a": ["1", "raise", "0", "nan", "1"], "b": ["none", "3"]})))
    without = algorithm.advantages(to_rows(scored({"a": ["1", "0", "1"], "b": ["3"]})))
    assert some.group_ids.tolist() == [0, 0, 0, 1]
    assert torch.equal(some.advantages, without.advantages) and torch.equal(some.rewards, without.rewards)


def test_a_batch_without_any_value_is_counted_and_has_no_rows():
    for deed, failures in (("none", 0.0), ("raise", 4.0)):
        result = scored({"a": [deed] * 3, "b": [deed]})
        rows = to_rows(result)
        credited = objective_of({"name": "grpo"}).resolved().advantages(rows)
        metrics = rollout_metrics(result, credited)
        assert rows.rows == 0 and metrics["reward/missing"] == 4.0
        assert metrics["reward/obey_score/errors"] == failures
