"""Logits of the output matrix, in float32 whatever is multiplied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
    with bfloat16_products() if hidden.dtype == torch.bfloat16 and not hidden.is_cuda else nullcontext():
        return F.linear(hidden.float(), head.float())


@contextmanager
def bfloat16_products() -> Iterator[None]:
    """Here CPUs multiply float32 matrices as bfloat16 ones, and sum in float32.

    Nothing is rounded where the numbers are bfloat16's own: the one way to a float32 product of them, and up to four
    times as fast as float32's where there are instructions for it.
    """
    settings: Any = getattr(torch.backends.mkldnn, "matmul", None)  # of torch 2.9 and newer
    if settings is None:
        yield
        return
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
