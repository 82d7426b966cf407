"""Learning rates by hand."""

import pytest

from atomrl.training.schedules import learning_rate


def rates(total, *arguments):
    return [learning_rate(update, total, 2.0, *arguments) for update in range(total)]


def test_constant():
    assert rates(3, "constant") == [2.0, 2.0, 2.0]


def test_constant_after_warm_up():
    assert rates(6, "constant", 0.5) == pytest.approx([2 / 3, 4 / 3, 2.0, 2.0, 2.0, 2.0])


def test_cosine_to_a_floor():
    # cos(pi k / 4) = 1, 0.7071, 0, -0.7071 between 2.0 and 0.5
    assert rates(4, "cosine", 0.0, 0.25) == pytest.approx([2.0, 1.780330, 1.25, 0.719670], abs=1e-6)
    assert learning_rate(4, 4, 2.0, "cosine", 0.0, 0.25) == learning_rate(9, 4, 2.0, "cosine", 0.0, 0.25) == 0.5


def test_warm_up_may_take_the_whole_run():
    assert rates(2, "cosine", 1.0) == [1.0, 2.0]
    assert learning_rate(2, 2, 2.0, "cosine", 1.0) == 2.0
