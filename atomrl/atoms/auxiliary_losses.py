"""Losses beside the policy's, per token: negative log-likelihood and DFT, a critic's value loss, distillation (GKD)."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from atomrl.atoms import atom
from atomrl.atoms.kl import distribution_kl
from atomrl.atoms.logprobs import CHUNK_ELEMENTS, add_outer_products, chunks, head_logits
from atomrl.atoms.masks import Mask, PerPosition, PerToken, Vocabulary
from atomrl.atoms.policy_losses import reinforce_loss

# --------------------------------------------------------------------------------------------------------------------
# Supervised losses.


@atom("L_t = -log pi_theta(a_t)", paper="InstructGPT, arXiv:2203.02155, section 3.5")
def nll_loss(logprobs: PerToken, mask: Mask) -> PerToken:
    """Negative log-likelihood of demonstrated tokens: supervised fine-tuning.

    It is REINFORCE with an advantage of 1.

    Args:
        logprobs: of the demonstrated tokens, with gradient.
        mask: True where the token is to be learned.

    Returns:
        Nats per token, 0 off the mask.

    Example:
        >>> nll_loss(torch.tensor([[-0.5, -2.0]]), torch.tensor([[True, True]]))
        tensor([[0.5000, 2.0000]])
    """
    return reinforce_loss(logprobs, torch.ones_like(logprobs), mask)


@atom("L_t = -sg[pi_theta(a_t)] log pi_theta(a_t)", paper="DFT, arXiv:2508.05629")
def dft_loss(logprobs: PerToken, mask: Mask) -> PerToken:
    """DFT loss (dynamic fine-tuning): log-likelihood, weighted by how likely the token already is.

    Differs from the NLL: its gradient lacks the factor 1/pi, with which unlikely tokens of a demonstration dominate.

    Args:
        logprobs: of the demonstrated tokens, with gradient.
        mask: True where the token is to be learned.

    Returns:
        Loss per token, 0 off the mask.

    Example:
        >>> dft_loss(torch.tensor([[0.5]]).log(), torch.tensor([[True]]))
        tensor([[0.3466]])
    """
    weights = logprobs.detach().masked_fill(~mask, 0.0).exp()
    return reinforce_loss(logprobs, torch.ones_like(logprobs), mask, weights)


# --------------------------------------------------------------------------------------------------------------------
# Value losses of a critic.


@atom(
    "L_t = max((v_t - R_t)^2, (clip(v_t, v_old - c, v_old + c) - R_t)^2) / 2",
    paper="PPO's reference implementation (the paper, arXiv:1707.06347, equation 9, has no clip)",
)
def clipped_value_loss(
    values: PerToken,
    old_values: PerToken,
    returns: PerToken,
    mask: Mask,
    clip: float | None = 0.2,
    huber_delta: float | None = None,
) -> PerToken:
    """PPO's clipped value loss: the worse of the errors of the prediction and of one that moved at most `clip`.


    Args:
        values: predictions, with gradient.
        old_values: predictions at the start of the step.
        returns: targets, without gradient.
        mask: True where the model wrote the token.
        clip: c, in units of the return; None for the plain error. A token whose clipped error is the greater has no
            gradient.
        huber_delta: from where on the error is linear (Huber's, an option of AReaL), in units of the return; by
            default it is half the square everywhere.

    Returns:
        Loss per token, 0 off the mask. It includes the factor 1/2.

    Example:
        >>> old, mask = torch.zeros(1, 1), torch.tensor([[True]])
        >>> clipped_value_loss(torch.tensor([[0.5]]), old, torch.tensor([[1.0]]), mask)
        tensor([[0.3200]])
    """
    plain = _value_error(values, returns, mask, huber_delta)
    if clip is None:
        return plain
    clipped = values.clamp(old_values - clip, old_values + clip)
    return torch.maximum(plain, _value_error(clipped, returns, mask, huber_delta))


@atom("(clip(v_t, v_old - c, v_old + c) - R_t)^2 > (v_t - R_t)^2", paper="PPO's reference implementation")
def clipped_values(values: PerToken, old_values: PerToken, returns: PerToken, mask: Mask, clip: float = 0.2) -> Mask:
    """Tokens on which the clip of `clipped_value_loss` acts: they have no gradient.

    Args:
        values: predictions.
        old_values: predictions at the start of the step.
        returns: targets.
        mask: True where the model wrote the token.
        clip: c, in units of the return.

    Returns:
        True where it acts; its mean over the mask is the metric `critic/vf_clipfrac`.

    Example:
        >>> old, mask = torch.zeros(1, 2), torch.tensor([[True, True]])
        >>> clipped_values(torch.tensor([[0.5, 0.1]]), old, torch.tensor([[1.0, 1.0]]), mask)
        tensor([[ True, False]])
    """
    clipped = values.clamp(old_values - clip, old_values + clip)
    return (_value_error(clipped, returns, mask) > _value_error(values, returns, mask)) & mask


def _value_error(values: Tensor, returns: Tensor, mask: Tensor, huber_delta: float | None = None) -> Tensor:
    values, returns = values.masked_fill(~mask, 0.0), returns.masked_fill(~mask, 0.0)
    if huber_delta is not None:
        return F.huber_loss(values, returns, reduction="none", delta=huber_delta)
    return (values - returns).square() / 2


# --------------------------------------------------------------------------------------------------------------------
# Distillation: divergences between a student's and a teacher's next-token distributions.

DIVERGENCE_ELEMENTS = CHUNK_ELEMENTS // 2
"""Logits per chunk: the divergence holds about ten intermediate values of each."""


@atom("beta KL(p || m) + (1 - beta) KL(q || m),   m = beta p + (1 - beta) q", paper="GKD, arXiv:2306.13649")
def generalised_jsd(
    student_logits: Vocabulary, teacher_logits: Vocabulary, beta: float = 0.5, temperature: float = 1.0
) -> PerPosition:
    """Generalised Jensen-Shannon divergence of GKD, between the forward and the reverse KL.

    p is the teacher's distribution, q the student's. beta = 0 is KL(p || q), beta = 1 is KL(q || p).

    Not multiplied by the square of the temperature, as in TRL.

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


@atom(
    "JSD_beta(softmax(hidden @ head_weight.T / temperature), softmax(teacher_hidden @ teacher_head_weight.T / ...))",
    paper="GKD, arXiv:2306.13649",
)
def fused_generalised_jsd(
    hidden: Float[Tensor, "N H"],
    head_weight: Float[Tensor, "V H"],
    teacher_hidden: Float[Tensor, "N G"],
    teacher_head_weight: Float[Tensor, "V G"],
    beta: float = 0.5,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> Float[Tensor, " N"]:
    """`generalised_jsd` from hidden states, without materializing the [N, V] logits of student or teacher.

    The forward pass keeps one number per token. The backward pass recomputes the logits of each chunk, and accumulates
    the chunk's gradient of the output matrix in place.

    Args:
        hidden: input of the student's output matrix, with gradient.
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
        divergence = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for part in chunks(len(hidden), chunk):
            logits, teacher_logits = head_logits(hidden[part], head), head_logits(teacher[part], teacher_head)
            divergence[part] = generalised_jsd(logits, teacher_logits, beta, temperature)
        ctx.save_for_backward(hidden, weight, teacher, teacher_weight)
        ctx.settings = beta, temperature, chunk
        return divergence

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        hidden, weight, teacher, teacher_weight = ctx.saved_tensors
        beta, temperature, chunk = ctx.settings
        head, teacher_head = weight.to(hidden.dtype), teacher_weight.to(teacher.dtype)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for part in chunks(len(hidden), chunk):
            logits, teacher_logits = head_logits(hidden[part], head), head_logits(teacher[part], teacher_head)
            with torch.enable_grad():
                divergence = generalised_jsd(logits.requires_grad_(), teacher_logits, beta, temperature)
            (delta,) = torch.autograd.grad(divergence, logits, grad[part])
            del divergence
            delta = delta.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(delta, head, out=grad_hidden[part])
            if grad_weight is not None:
                add_outer_products(grad_weight, delta, hidden[part])
        return grad_hidden, grad_weight, None, None, None, None, None
