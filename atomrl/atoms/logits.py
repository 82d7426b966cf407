"""Logits of the output matrix, in float32 whatever is multiplied."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from atomrl.atoms.shapes import Vocabulary


def head_logits(hidden: Float[Tensor, "*batch H"], head_weight: Float[Tensor, "V H"]) -> Vocabulary:
    """Logits of the output matrix, `hidden @ head_weight.T`: inputs in the dtype of `hidden`, sums and result wider.

    A bfloat16 logit of 20 is off by up to 0.06, and so is every log-prob made of it; the product of bfloat16 numbers
    summed in float32 is not.

    Args:
        hidden: what the output matrix multiplies.
        head_weight: the output matrix, which is rounded to the dtype of `hidden`.

    Returns:
        Float32 (float64 for float64), differentiable in both.

    Example:
        >>> head_logits(torch.ones(1, 2, dtype=torch.bfloat16), torch.tensor([[1.0, 2**-9]]))
        tensor([[1.0020]])
    """
    head = head_weight.to(hidden.dtype)
    if hidden.dtype.itemsize > 2:
        return F.linear(hidden, head)
    if hidden.is_cuda and not torch.is_grad_enabled():
        wide: Tensor = torch.mm(hidden.flatten(0, -2), head.T, out_dtype=torch.float32)
        return wide.view(*hidden.shape[:-1], len(head))
    return bfloat16_matmul(hidden, head.T) if hidden.dtype == torch.bfloat16 else hidden.float() @ head.float().T


def bfloat16_matmul(left: Float[Tensor, "*batch H"], right: Float[Tensor, "H V"]) -> Vocabulary:
    """Product of matrices of bfloat16 numbers on a CPU, with float32 sums and a float32 result.

    oneDNN multiplies float32 matrices as bfloat16 ones, by the CPU's instructions for it, if it is told to. Nothing is
    rounded where the numbers are bfloat16's own, and it takes a quarter to two thirds of a float32 product's time.

    Args:
        left: bfloat16 numbers, in bfloat16 or float32.
        right: bfloat16 numbers, in bfloat16 or float32.

    Returns:
        Float32, differentiable in both.

    Example:
        >>> bfloat16_matmul(torch.ones(1, 2, dtype=torch.bfloat16), torch.tensor([[1.0], [2**-9]]))
        tensor([[1.0020]])
    """
    with _products_of_bfloat16():
        return left.float() @ right.float()


@contextmanager
def _products_of_bfloat16() -> Iterator[None]:
    settings: Any = getattr(torch.backends.mkldnn, "matmul", None)  # of torch 2.9 and newer
    if settings is None:
        yield
        return
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
