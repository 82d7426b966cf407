"""How far a student's next-token distribution is from a teacher's, per position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from atomrl.atoms.kl import distribution_kl, kl_terms


def generalised_jsd(
    student_logits: Float[Tensor, "*batch V"],
    teacher_logits: Float[Tensor, "*batch V"],
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Float[Tensor, "*batch"]:
    """Generalised Jensen-Shannon divergence: between the forward and the reverse KL.

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


def mixed_kl(
    student_logprobs: Float[Tensor, "*batch K"],
    teacher_logprobs: Float[Tensor, "*batch K"],
    forward_weight: float = 1.0,
) -> Float[Tensor, "*batch"]:
    """A weighted sum of the forward and the reverse KL over the same part of the vocabulary.

        w KL(p || q) + (1 - w) KL(q || p),   p of the teacher, q of the student

    Paper: Hinton et al., "Distilling the knowledge in a neural network" (2015), and MiniLLM, arXiv:2306.08543.

    Args:
        student_logprobs: of the values that both are given for (the teacher's top k, say), with gradient.
        teacher_logprobs: of the same values; neither is normalised again.
        forward_weight: w; 1 is the forward KL, 0 the reverse.

    Returns:
        Nats per position.

    Example:
        >>> mixed_kl(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.75, 0.25]).log(), forward_weight=0.5)
        tensor(0.1373)
    """
    forward = distribution_kl(teacher_logprobs, student_logprobs)
    return forward_weight * forward + (1 - forward_weight) * distribution_kl(student_logprobs, teacher_logprobs)


def reverse_kl_outside(
    student_logprobs: Float[Tensor, "*batch K"],
    student_negentropy: Float[Tensor, "*batch"],
    teacher_floor: float = -100.0,
) -> Float[Tensor, "*batch"]:
    """The rest of the reverse KL, outside the values that the teacher is known for: it is taken to give them nothing.

        sum_{v outside} q_v (log q_v - floor) = (sum_v q_v log q_v - sum_{v inside} q_v log q_v) - floor (1 - Q)

    Paper: none; NeMo-RL's `zero_outside_topk`.

    Args:
        student_logprobs: of the values inside, with gradient.
        student_negentropy: sum over the whole vocabulary of q log q.
        teacher_floor: the log-prob that the teacher is taken to give every value outside.

    Returns:
        Nats per position.

    Example:
        >>> inside = torch.tensor([0.5, 0.25]).log()
        >>> reverse_kl_outside(inside, torch.tensor(-1.0397), teacher_floor=-2.0)
        tensor(0.1534)
    """
    mass = student_logprobs.exp()
    return student_negentropy - (mass * student_logprobs).sum(-1) - teacher_floor * (1 - mass.sum(-1))


def logprobs_at(logits: Float[Tensor, "*batch V"], ids: Int[Tensor, "*batch K"]) -> Float[Tensor, "*batch K"]:
    """Log-probs of some values of the vocabulary, normalised over all of it.

        log q_k = z_k - log sum_v exp(z_v)

    Paper: none.

    Args:
        logits: z.
        ids: which values, say the teacher's top k.

    Returns:
        Natural log-probs, with gradient.

    Example:
        >>> logprobs_at(torch.tensor([0.0, 0.0]), torch.tensor([1]))
        tensor([-0.6931])
    """
    return logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)


def topk_forward_kl(
    student_logprobs: Float[Tensor, "*batch K"],
    teacher_logprobs: Float[Tensor, "*batch K"],
    floor: float | None = None,
) -> Float[Tensor, "*batch K"]:
    """The forward KL's part of each of the teacher's top k values.

        p_k (log p_k - log q_k),   log p and log q at least the floor

    Paper: Hinton et al. (2015), truncated to what a teacher's server gives. Its sum may be negative, as neither side
    is normalised again.

    Args:
        student_logprobs: over the whole vocabulary's softmax, with gradient.
        teacher_logprobs: of the same values.
        floor: lower bound of both log-probs; the default is none. A value below it has no gradient.

    Returns:
        Nats per value.

    Example:
        >>> topk_forward_kl(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.75, 0.25]).log())
        tensor([ 0.3041, -0.1733])
    """
    if floor is not None:
        student_logprobs, teacher_logprobs = student_logprobs.clamp(min=floor), teacher_logprobs.clamp(min=floor)
    return kl_terms(teacher_logprobs, student_logprobs)


def probability_mass(logprobs: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch"]:
    """How much of a distribution some of its values hold.

        sum_k p_k

    Paper: none.

    Args:
        logprobs: of the values.

    Returns:
        A probability per position.

    Example:
        >>> probability_mass(torch.tensor([0.5, 0.25]).log())
        tensor(0.7500)
    """
    return logprobs.exp().sum(-1)


def topk_overlap(student_logits: Float[Tensor, "*batch V"], ids: Int[Tensor, "*batch K"]) -> Bool[Tensor, "*batch K"]:
    """Which of the teacher's top k values are among the student's top k.

        id_k in topk(z)

    Paper: none; how near a student has come to a teacher.

    Args:
        student_logits: z.
        ids: the teacher's top k.

    Returns:
        True where the student agrees.

    Example:
        >>> topk_overlap(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0, 2]))
        tensor([ True, False])
    """
    own = student_logits.topk(ids.shape[-1], dim=-1).indices
    return (ids[..., :, None] == own[..., None, :]).any(-1)
