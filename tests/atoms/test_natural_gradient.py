"""Natural-gradient atoms against dense linear algebra."""

import math

import pytest
import torch

from atomrl.atoms.natural_gradient import (
    conjugate_gradient,
    fisher_vector_product,
    flat,
    line_search,
    natural_step,
)
from atomrl.objectives.policy_loss import assign


def positive_definite(size, seed=0):
    root = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return root @ root.T + 0.1 * torch.eye(size, dtype=torch.float64)


def test_conjugate_gradients_solve_a_dense_system():
    matrix, b = positive_definite(12), torch.arange(1.0, 13.0, dtype=torch.float64)
    solution, residual = conjugate_gradient(lambda v: matrix @ v, b, iterations=60, tolerance=1e-12)
    torch.testing.assert_close(solution, torch.linalg.solve(matrix, b))
    assert residual <= 1e-12


def test_few_iterations_say_how_far_they_came():
    matrix, b = positive_definite(12), torch.ones(12, dtype=torch.float64)
    kept = b.clone()
    solution, residual = conjugate_gradient(lambda v: matrix @ v, b, iterations=3)
    left = (b - matrix @ solution).norm() / b.norm()
    assert residual == pytest.approx(left.item(), rel=1e-9) and left > 1e-3
    assert torch.equal(b, kept)


@pytest.mark.parametrize("matrix", [torch.zeros(2, 2), -torch.eye(2), torch.full((2, 2), math.nan)])
def test_a_matrix_that_is_not_positive_ends_the_solution_where_it_is(matrix):
    solution, residual = conjugate_gradient(lambda v: matrix @ v, torch.ones(2))
    assert not solution.any() and residual == 1.0
    assert natural_step(torch.ones(2), lambda v: matrix @ v, 0.1) is None


def test_nothing_to_solve():
    solution, residual = conjugate_gradient(lambda v: v, torch.zeros(3))
    assert not solution.any() and residual == 0.0


def test_the_natural_step_has_the_bound_as_its_quadratic_kl():
    matrix, direction = positive_definite(5), torch.ones(5, dtype=torch.float64)
    step = natural_step(direction, lambda v: matrix @ v, 0.01)
    assert (step @ matrix @ step / 2).item() == pytest.approx(0.01)
    assert torch.allclose(step / step[0], direction)


def test_the_fisher_of_a_softmax_is_its_covariance():
    """Two states with weights; a parameter that has no part in it gets 0."""
    logits = torch.tensor([[0.3, -1.0, 0.5], [2.0, 0.0, 0.1]], dtype=torch.float64, requires_grad=True)
    unused = torch.ones(2, dtype=torch.float64, requires_grad=True)
    kept, weights = logits.detach().clone(), torch.tensor([0.25, 0.75], dtype=torch.float64)
    vector = torch.randn(8, dtype=torch.float64)
    product = fisher_vector_product(lambda forward: logits.log_softmax(1), weights, [logits, unused], vector)
    for state, p in enumerate(kept.softmax(1)):
        dense = weights[state] * (torch.diag(p) - torch.outer(p, p))
        torch.testing.assert_close(product[3 * state : 3 * state + 3], dense @ vector[3 * state : 3 * state + 3])
    assert not product[6:].any() and torch.equal(logits, kept) and logits.grad is None


def test_the_search_takes_the_longest_step_within_the_bound_that_gains():
    tried = []

    def measure(scale):
        tried.append(scale)
        return scale**2, 0.5 - scale

    assert line_search(measure, kl_bound=0.5, ratio=0.5) == {"scale": 0.25, "kl": 0.0625, "gain": 0.25, "backtracks": 2}
    assert tried == [1.0, 0.5, 0.25]


def test_a_step_far_below_the_bound_is_made_longer_once():
    """Towards ratio times the bound, as if the KL were quadratic; never by more than a factor of 2."""
    step = line_search(lambda scale: (0.2 * scale**2, scale), kl_bound=0.5, ratio=0.8)
    assert step["scale"] == pytest.approx(math.sqrt(0.4 / 0.2)) and step["kl"] == pytest.approx(0.4)
    assert line_search(lambda scale: (0.0, scale), kl_bound=0.5)["scale"] == 2.0
    near = {"scale": 1.0, "kl": 0.33, "gain": 1.0, "backtracks": 0}
    assert line_search(lambda scale: (0.33 * scale**2, scale), kl_bound=0.5, ratio=0.8) == near


@pytest.mark.parametrize(("kl", "gain"), [(0.51, 2.0), (math.nan, 2.0), (0.4, 0.9), (0.4, math.nan)])
def test_a_longer_step_that_is_no_better_is_not_taken(kl, gain):
    step = line_search(lambda scale: (0.1, 1.0) if scale == 1 else (kl, gain), kl_bound=0.5)
    assert step == {"scale": 1.0, "kl": 0.1, "gain": 1.0, "backtracks": 0}


@pytest.mark.parametrize(
    "step", [(math.nan, 1.0), (0.1, math.nan), (0.1, 0.0), (0.1, -1.0), (0.11, 1.0), (math.inf, 1.0)]
)
def test_the_search_accepts_nothing_else(step):
    assert line_search(lambda scale: step, 0.1, backtracks=3) == {
        "scale": 0.0,
        "kl": 0.0,
        "gain": 0.0,
        "backtracks": 3,
    }


def test_weights_are_restored_bit_for_bit():
    parameters = [torch.tensor([[0.1, -0.0], [1e-40, 3.0]]), torch.tensor(math.pi)]
    start = flat(parameters)
    kept = [p.clone() for p in parameters]
    assign(parameters, start + 1)
    assert not torch.equal(parameters[0], kept[0])
    assign(parameters, start)
    assert all(torch.equal(p.view(torch.int32), k.view(torch.int32)) for p, k in zip(parameters, kept, strict=True))
