"""Distillation losses between a student's and a teacher's next-token distributions, per position."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from atomrl.atoms.kl import distribution_kl
from atomrl.atoms.logits import head_logits
from atomrl.atoms.logprobs import CHUNK_ELEMENTS, _add_outer, _parts
from atomrl.atoms.shapes import PerPosition, Vocabulary

DIVERGENCE_ELEMENTS = CHUNK_ELEMENTS // 2
"""Logits of a chunk whose divergence is taken: about ten numbers of each are held at a time."""


def generalised_jsd(
    student_logits: Vocabulary, teacher_logits: Vocabulary, beta: float = 0.5, temperature: float = 1.0
) -> PerPosition:
    """Generalised Jensen-Shannon divergence of GKD, between the forward and the reverse KL.

        beta KL(p || m) + (1 - beta) KL(q || m),   m = beta p + (1 - beta) q

    with p of the teacher and q of the student; at its ends KL(p || q) for beta = 0 and KL(q || p) for beta = 1.

    Paper: GKD, arXiv:2306.13649. Not multiplied by the square of the temperature, as in TRL.

    Args:
        student_logits: with gradient.
        teacher_logits: over the same vocabulary.
        beta: between 0 (covers the teacher's modes) and 1 (seeks one).
        temperature: divides both logits.

    Returns:
        Nats per position.

    Raises:
        ValueError: beta is not between 0 and 1, or the temperature not above 0.

    Example:
        >>> generalised_jsd(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]))
        tensor(0.0285)
    """
    if not 0 <= beta <= 1 or not temperature > 0:
        raise ValueError(f"beta={beta} must be between 0 and 1, and temperature={temperature} above 0")
    student = F.log_softmax(student_logits / temperature, dim=-1)
    teacher = F.log_softmax(teacher_logits / temperature, dim=-1)
    if beta in (0.0, 1.0):
        return distribution_kl(teacher, student) if beta == 0 else distribution_kl(student, teacher)
    share = student.new_tensor(beta)
    mixture = torch.logaddexp(teacher + share.log(), student + (1 - share).log())
    return beta * distribution_kl(teacher, mixture) + (1 - beta) * distribution_kl(student, mixture)


def fused_generalised_jsd(
    hidden: Float[Tensor, "N H"],
    head_weight: Float[Tensor, "V H"],
    teacher_hidden: Float[Tensor, "N G"],
    teacher_head_weight: Float[Tensor, "V G"],
    beta: float = 0.5,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> Float[Tensor, " N"]:
    """`generalised_jsd` from hidden states, without ever holding the [N, V] logits of student or teacher.

        JSD_beta(softmax(hidden @ head_weight.T / temperature), softmax(teacher_hidden @ teacher_head_weight.T / ...))

    Paper: GKD, arXiv:2306.13649. The forward pass keeps one number per token; the backward pass makes the logits of
    each chunk again, and adds the chunk's part to the gradient of the output matrix in place.

    Args:
        hidden: what the student's output matrix multiplies, with gradient.
        head_weight: the student's output matrix; its gradient is in its own dtype.
        teacher_hidden: the teacher's, at the same tokens, and without gradient.
        teacher_head_weight: over the same vocabulary.
        beta: as in `generalised_jsd`.
        temperature: divides both logits.
        chunk_tokens: tokens whose logits are held at a time; None holds about 16 million logits of each.

    Returns:
        Nats per token, in float32 (float64 for float64).

    Raises:
        ValueError: beta is not between 0 and 1, or the temperature not above 0.

    Example:
        >>> fused_generalised_jsd(torch.zeros(1, 2), torch.eye(2), torch.tensor([[1.0, 0.0]]), torch.eye(2))
        tensor([0.0285])
    """
    chunk = chunk_tokens or max(16, DIVERGENCE_ELEMENTS // head_weight.shape[0])
    arguments = hidden, head_weight, teacher_hidden, teacher_head_weight, beta, temperature, chunk
    divergence: Tensor = _Divergence.apply(*arguments)  # type: ignore[no-untyped-call]  # torch has no types for it
    return divergence


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor,
        beta: float, temperature: float, chunk: int,
    ) -> Tensor:  # fmt: skip
        head, teacher_head = weight.to(hidden.dtype), teacher_weight.to(teacher.dtype)
        found = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for part in _parts(len(hidden), chunk):
            logits, wanted = head_logits(hidden[part], head), head_logits(teacher[part], teacher_head)
            found[part] = generalised_jsd(logits, wanted, beta, temperature)
        ctx.save_for_backward(hidden, weight, teacher, teacher_weight)
        ctx.settings = beta, temperature, chunk
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        hidden, weight, teacher, teacher_weight = ctx.saved_tensors
        beta, temperature, chunk = ctx.settings
        head, teacher_head = weight.to(hidden.dtype), teacher_weight.to(teacher.dtype)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for part in _parts(len(hidden), chunk):
            logits, wanted = head_logits(hidden[part], head), head_logits(teacher[part], teacher_head)
            with torch.enable_grad():
                divergence = generalised_jsd(logits.requires_grad_(), wanted, beta, temperature)
            (delta,) = torch.autograd.grad(divergence, logits, grad[part])
            del divergence
            delta = delta.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(delta, head, out=grad_hidden[part])
            if grad_weight is not None:
                _add_outer(grad_weight, delta, hidden[part])
        return grad_hidden, grad_weight, None, None, None, None, None
