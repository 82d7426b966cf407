"""Distillation losses between a student's and a teacher's next-token distributions, per position."""

import torch
import torch.nn.functional as F

from atomrl.atoms.kl import distribution_kl
from atomrl.atoms.shapes import PerPosition, Vocabulary


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
