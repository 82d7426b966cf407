"""Unpaired preference losses, of completions labelled good or bad: KTO and BCO."""

import torch
import torch.nn.functional as F

from atomrl.atoms.shapes import PerItem, Scalar


def kto_loss(
    log_ratio: PerItem,
    desirable: PerItem,
    reference: Scalar,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PerItem:
    """KTO loss of completions that are labelled good or bad, against a reference point.

        L = w_d (1 - sigmoid(beta (z - z_0)))   where good
        L = w_u (1 - sigmoid(beta (z_0 - z)))   where bad

    Paper: KTO, arXiv:2402.01306. With z_0 = 0 it is the unpaired APO-zero.

    Args:
        log_ratio: z, in nats, with gradient.
        desirable: 1 where good, 0 where bad.
        reference: z_0 of `kto_reference`, without gradient.
        beta: inverse temperature of the implicit reward.
        desirable_weight: w_d.
        undesirable_weight: w_u.

    Returns:
        Loss per completion.

    Example:
        >>> kto_loss(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]), torch.tensor(0.0))
        tensor([0.5000, 0.5000])
    """
    gap = beta * (log_ratio - reference.detach())
    good = desirable_weight * (1 - gap.sigmoid())
    return torch.where(desirable > 0, good, undesirable_weight * (1 - (-gap).sigmoid()))


def bco_loss(rewards: PerItem, desirable: PerItem, delta: Scalar, weights: PerItem | None = None) -> PerItem:
    """BCO loss, a binary classifier over unpaired completions: good ones above the mean reward, bad ones below.

        L = -w log sigmoid(r - delta) where good,    -w log sigmoid(-(r - delta)) where bad

    Paper: BCO, arXiv:2404.04656.

    Args:
        rewards: implicit rewards beta z, with gradient.
        desirable: 1 where good, 0 where bad.
        delta: running mean of rewards (`running_mean`), without gradient.
        weights: w, say `density_ratio` for bad completions; 1 by default.

    Returns:
        Loss per completion.

    Example:
        >>> bco_loss(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor(0.0))
        tensor([0.6931])
    """
    gap = rewards - delta.detach()
    loss = -F.logsigmoid(torch.where(desirable > 0, gap, -gap))
    return loss if weights is None else loss * weights.detach()


def kto_reference(log_ratio: PerItem) -> Scalar:
    """KTO's reference point: an estimate of the KL from completions of other prompts.

        z_0 = max(0, mean z')

    Paper: KTO, arXiv:2402.01306.

    Args:
        log_ratio: z' of mismatched pairs of prompt and completion, in nats.

    Returns:
        A scalar without gradient.

    Example:
        >>> kto_reference(torch.tensor([-1.0, 3.0]))
        tensor(1.)
    """
    return log_ratio.detach().mean().clamp(min=0)


def running_mean(mean: Scalar, count: float, values: PerItem) -> tuple[Scalar, float]:
    """Running mean: of all values seen so far, after some more.

        mean' = mean + (mean(x) - mean) N / (count + N)

    Paper: BCO, arXiv:2404.04656 (its reward shift delta).

    Args:
        mean: so far.
        count: of values so far; 0 at the start.
        values: new ones; detached.

    Returns:
        The new mean, and the new count.

    Example:
        >>> running_mean(torch.tensor(1.0), 2.0, torch.tensor([4.0]))
        (tensor(2.), 3.0)
    """
    total = count + len(values)
    return mean + (values.detach().mean() - mean) * len(values) / total, total
