"""Steps before and after a checkpoint."""

import pytest

from atomrl.common.metrics import values
from atomrl.data.rows import to_training_batches
from tests.backends.batches import weights_of
from tests.backends.equality import drawn


def step(backend, algorithm, number):
    made = backend.forward_only(drawn(number), algorithm.needs)
    (part,) = to_training_batches(algorithm.advantages(made), algorithm, updates=1, epochs=1, seed=0, step=number)
    return values(backend.train_step(part, algorithm))


def go_on(backend, algorithm):
    metrics = [step(backend, algorithm, number) for number in (2, 3)]
    return metrics, {name: tensor.clone() for name, tensor in weights_of(backend).items()}


def alike(actual, expected):
    for mine, theirs in zip(actual[0], expected[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5, nan_ok=True)
    for name, tensor in expected[1].items():
        assert (tensor - actual[1][name]).abs().max() <= 1e-5 * tensor.abs().max(), name
