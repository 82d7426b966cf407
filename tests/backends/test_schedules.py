"""Learning rates by hand."""

import pytest

from atomrl.backends.optimizer import learning_rate
from atomrl.config import TrainConfig


def settings(schedule, warmup=0.0, least=0.0):
    return TrainConfig(schedule=schedule, warmup_ratio=warmup, min_lr_ratio=least)


def rates(total, *arguments):
    return [learning_rate(update, total, 2.0, settings(*arguments)) for update in range(total)]


def test_a_constant_rate_stays():
    assert rates(3, "constant") == [2.0, 2.0, 2.0]


def test_constant_after_warm_up():
    assert rates(6, "constant", 0.5) == pytest.approx([2 / 3, 4 / 3, 2.0, 2.0, 2.0, 2.0])


def test_cosine_to_a_floor():
    # cos(pi k / 4) = 1, 0.7071, 0, -0.7071 between 2.0 and 0.5
    assert rates(4, "cosine", 0.0, 0.25) == pytest.approx([2.0, 1.780330, 1.25, 0.719670], abs=1e-6)
    cosine = settings("cosine", 0.0, 0.25)
    assert learning_rate(4, 4, 2.0, cosine) == learning_rate(9, 4, 2.0, cosine) == 0.5


def test_linear_to_a_floor():
    assert rates(6, "linear", 1 / 3, 0.25) == pytest.approx([1.0, 2.0, 2.0, 1.625, 1.25, 0.875])


def test_warm_up_may_take_the_whole_run():
    assert rates(2, "cosine", 1.0) == [1.0, 2.0]
    assert learning_rate(2, 2, 2.0, settings("cosine", 1.0)) == 2.0


def test_a_number_of_warm_up_updates_replaces_their_share():
    train = TrainConfig(schedule="linear", warmup_ratio=1.0, warmup_updates=2)
    assert [learning_rate(update, 4, 2.0, train) for update in range(4)] == [1.0, 2.0, 2.0, 1.0]
