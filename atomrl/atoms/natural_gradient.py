"""Natural-gradient steps (TRPO): Fisher-vector products, conjugate gradient, line search.

Parameters and directions are flat vectors [D], in the order of the list of parameters (`flat`, `parts`).
"""

import math
from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from atomrl.atoms import atom
from atomrl.atoms.masks import Flat, PerItem

LONGEST = 2.0
"""Longest step tried, as a multiple of the step that the quadratic model of the KL suggests."""
Product = Callable[[Tensor], Tensor]
"""Product with an implicit symmetric matrix: [D] -> [D]."""


@atom()
def flat(tensors: Sequence[Tensor]) -> Flat:
    """Flatten tensors into one vector.

    Args:
        tensors: of any shapes.

    Returns:
        A copy without gradient.

    Example:
        >>> flat([torch.tensor([[1.0, 2.0]]), torch.tensor([3.0])])
        tensor([1., 2., 3.])
    """
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@atom()
def parts(tensors: Sequence[Tensor], vector: Flat) -> list[Tensor]:
    """Split a vector into tensors of the given shapes: the inverse of `flat`.

    Args:
        tensors: give the shapes.
        vector: as many elements as all of them together.

    Returns:
        Views of the vector.

    Example:
        >>> parts([torch.zeros(1, 2), torch.zeros(1)], torch.tensor([1.0, 2.0, 3.0]))
        [tensor([[1., 2.]]), tensor([3.])]
    """
    pieces = torch.split(vector, [tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for tensor, piece in zip(tensors, pieces, strict=True)]


@atom("g = J^T c")
def flat_gradient(output: Tensor, parameters: Sequence[Tensor], cotangents: Tensor | None = None) -> Flat:
    """Gradient of an output as one vector; 0 for parameters that it does not depend on.

    Args:
        output: a scalar, or any shape.
        parameters: with D numbers in all.
        cotangents: c, in the shape of the output; 1 for a scalar.

    Returns:
        The vector.

    Example:
        >>> a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        >>> flat_gradient((3 * a).sum(), [a, b])
        tensor([3., 0.])
    """
    gradients = torch.autograd.grad(output, parameters, cotangents, allow_unused=True)
    return flat([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)])


@atom(
    "F v = sum_n w_n sum_a pi_n(a) grad log pi_n(a) (grad log pi_n(a) . v)",
    paper="TRPO, arXiv:1502.05477, appendix C.1",
)
def fisher_vector_product(
    distributions: Callable[[bool], Tensor], weights: PerItem, parameters: Sequence[Tensor], vector: Flat
) -> Flat:
    """Fisher-vector product: the Fisher matrix of a policy times a vector, without forming the matrix.

    The inner product is the derivative of the log-probs along v, by forward-mode differentiation; the outer sum is
    one backward pass. The product is exact, without sampling or finite differences, and equals that of the Hessian of
    KL(pi_old || pi) at pi = pi_old.

    Args:
        distributions: the forward pass with the parameters as they are, to log-probs [N, V] of every value in each of
            N states. It is called with True for the derivative along v, under `no_grad`, and must then consist of
            operations that have a forward-mode derivative; with False for the backward pass.
        weights: of each state. Products of parts of a batch add up to that of the batch.
        parameters: with gradient. Their values do not change.
        vector: v.

    Returns:
        F v, without gradient.

    Example: one state with logits (0, 0): F = diag(p) - p p^T
        >>> logits = torch.zeros(1, 2, requires_grad=True)
        >>> vector = torch.tensor([1.0, 0.0])
        >>> fisher_vector_product(lambda forward: logits.log_softmax(1), torch.ones(1), [logits], vector)
        tensor([ 0.2500, -0.2500])
    """
    with torch.no_grad(), forward_ad.dual_level():
        for parameter, part in zip(parameters, parts(parameters, vector), strict=True):
            dual = forward_ad.make_dual(parameter.detach().clone(), part.clone())
            parameter.copy_(dual)
        logprobs, along = forward_ad.unpack_dual(distributions(True))
        cotangents = weights[:, None] * logprobs.exp() * (torch.zeros_like(logprobs) if along is None else along)
    with torch.enable_grad():
        return flat_gradient(distributions(False), parameters, cotangents)


@atom(
    "x' = x + alpha d,   alpha = r . r / d . A d,   d' = r' + (r' . r' / r . r) d,   r = b - A x",
    paper='Hestenes and Stiefel, "Methods of conjugate gradients for solving linear systems" (1952)',
)
def conjugate_gradient(product: Product, b: Flat, iterations: int = 10, tolerance: float = 1e-5) -> tuple[Flat, float]:
    """Conjugate gradient: solve A x = b for a symmetric positive definite A, given as products A v.

    As used in TRPO, arXiv:1502.05477, appendix C.

    Args:
        product: v -> A v.
        b: the right side.
        iterations: maximum number of products; D of them solve it exactly, up to rounding.
        tolerance: ends earlier where |b - A x| <= tolerance |b|.

    Returns:
        x, and |b - A x| / |b|. Stops at the last x if A is not positive along a direction.

    Example:
        >>> matrix = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
        >>> conjugate_gradient(lambda v: matrix @ v, torch.tensor([2.0, 2.0]))[0]
        tensor([1.0000, 0.5000])
    """
    x, residual, direction = torch.zeros_like(b), b.clone(), b.clone()
    square = start = float(b @ b)
    for _ in range(iterations):
        if square <= tolerance**2 * start:
            break
        image = product(direction)
        curvature = float(direction @ image)
        if not curvature > 0:
            break
        alpha = square / curvature
        x.add_(direction, alpha=alpha)
        residual.sub_(image, alpha=alpha)
        before, square = square, float(residual @ residual)
        direction.mul_(square / before).add_(residual)
    return x, math.sqrt(square / start) if start else 0.0


@atom(
    "s = sqrt(2 delta / x^T F x) x,   KL(pi_old || pi) ~ s^T F s / 2 = delta",
    paper="TRPO, arXiv:1502.05477, appendix C",
)
def natural_step(direction: Flat, product: Product, kl_bound: float) -> Flat | None:
    """Scale a direction to the step whose KL equals the bound, in the quadratic model of the KL.

    Args:
        direction: x.
        product: v -> F v.
        kl_bound: delta, in nats.

    Returns:
        s; None if x^T F x is not positive and finite.

    Example:
        >>> natural_step(torch.tensor([2.0, 0.0]), lambda v: v, kl_bound=0.5)
        tensor([1., 0.])
    """
    curvature = float(direction @ product(direction))
    if not 0 < curvature < math.inf:
        return None
    return direction * math.sqrt(2 * kl_bound / curvature)


class Search(TypedDict):
    """Result of `line_search`."""

    scale: float
    """Scale of the accepted step; 0 if none was accepted."""
    kl: float
    gain: float
    backtracks: int


@atom(
    "the smallest j with  KL(ratio^j s) <= delta  and  L(theta + ratio^j s) > L(theta),   j = 0 ... backtracks",
    paper="TRPO, arXiv:1502.05477, appendix C",
)
def line_search(
    measure: Callable[[float], tuple[float, float]], kl_bound: float, backtracks: int = 10, ratio: float = 0.8
) -> Search:
    """Backtracking line search: the longest step that keeps the KL bound and improves the surrogate.

    The KL of a low-entropy policy grows more slowly than its quadratic model, so the full step may end far below the
    bound. If it does, by more than one backtrack, one longer step is tried, at most `LONGEST` times as long, and
    accepted if it keeps the bound and gains more. The paper has no such step.

    Args:
        measure: scale of the step -> measured KL in nats and gain of the surrogate. NaN is not accepted.
        kl_bound: delta.
        backtracks: maximum number of backtracks.
        ratio: factor of the scale per backtrack, between 0 and 1.

    Returns:
        The scale with its KL and gain; all 0 where no step was accepted. A scale above 1 is the longer step's.

    Example: a KL of scale^2, a gain of scale
        >>> line_search(lambda scale: (scale**2, scale), kl_bound=0.5, ratio=0.5)
        {'scale': 0.5, 'kl': 0.25, 'gain': 0.5, 'backtracks': 1}
    """
    scale = 1.0
    for tries in range(backtracks + 1):  # noqa: B007 (used after the loop)
        kl, gain = measure(scale)
        if kl <= kl_bound and gain > 0:
            break
        scale *= ratio
    else:
        return Search(scale=0.0, kl=0.0, gain=0.0, backtracks=backtracks)
    if tries == 0 and kl < ratio**2 * kl_bound:
        longer = LONGEST if kl * LONGEST**2 <= ratio * kl_bound else math.sqrt(ratio * kl_bound / kl)
        longer_kl, longer_gain = measure(longer)
        if longer_kl <= kl_bound and longer_gain > gain:
            scale, kl, gain = longer, longer_kl, longer_gain
    return Search(scale=scale, kl=kl, gain=gain, backtracks=tries)
