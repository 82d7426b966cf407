"""Pairwise preference losses: DPO and its family, ORPO, and those of reward models.

A loss takes the log-ratios z = log pi_theta(y) - log pi_ref(y) of both, or their margin D = z_chosen - z_rejected, and
gives one number per pair; beta is the strength of the pull to the reference. Without a reference (CPO, SimPO) the same
losses take log-probs. `preference_scores` has what may be put in the place of z and D.
"""

import torch.nn.functional as F

from atomrl.atoms.shapes import PerPair


def dpo_loss(margin: PerPair, beta: float = 0.1, label_smoothing: float = 0.0, target_margin: float = 0.0) -> PerPair:
    """DPO loss (sigmoid); with label smoothing cDPO, with a target margin SimPO.

        L = -(1 - e) log sigmoid(x) - e log sigmoid(-x),    x = beta D - gamma

    Paper: DPO, arXiv:2305.18290, equation 7. With label smoothing e it is cDPO (Mitchell, "A note on DPO with noisy
    preferences", 2023); with average log-probs for z and a target margin it is SimPO, arXiv:2405.14734, equation 6.

    Args:
        margin: D, in nats.
        beta: inverse temperature of the implicit reward.
        label_smoothing: e, how often a preference is taken to be wrong.
        target_margin: gamma, in units of the reward; SimPO alone has one.

    Returns:
        Loss per pair.

    Example:
        >>> dpo_loss(torch.tensor([0.0, 20.0]))
        tensor([0.6931, 0.1269])
    """
    logit = beta * margin - target_margin
    return -(1 - label_smoothing) * F.logsigmoid(logit) - label_smoothing * F.logsigmoid(-logit)


def robust_dpo_loss(margin: PerPair, beta: float = 0.1, label_smoothing: float = 0.0) -> PerPair:
    """Robust DPO loss: unbiased under labels that are flipped with a known rate.

        L = (-(1 - e) log sigmoid(beta D) + e log sigmoid(-beta D)) / (1 - 2 e)

    Paper: robust DPO, arXiv:2403.00409. Differs from cDPO: the sign of the second term.

    Args:
        margin: D, in nats.
        beta: inverse temperature of the implicit reward.
        label_smoothing: e, the rate, below 1/2.

    Returns:
        Loss per pair; may be negative.

    Raises:
        ValueError: the rate is not below 1/2.

    Example:
        >>> robust_dpo_loss(torch.tensor([0.0]), label_smoothing=0.1)
        tensor([0.6931])
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={label_smoothing} must be at least 0 and below 0.5")
    right = (1 - label_smoothing) * F.logsigmoid(beta * margin)
    return (label_smoothing * F.logsigmoid(-beta * margin) - right) / (1 - 2 * label_smoothing)


def hinge_preference_loss(margin: PerPair, beta: float = 0.1) -> PerPair:
    """Hinge loss of a pair (RSO, SLiC): nothing to gain beyond a margin of 1 / beta.

        L = max(0, 1 - beta D)

    Paper: RSO, arXiv:2309.06657, after SLiC-HF, arXiv:2305.10425.

    Args:
        margin: D, in nats.
        beta: the reciprocal of the margin.

    Returns:
        Loss per pair.

    Example:
        >>> hinge_preference_loss(torch.tensor([0.0, 20.0]))
        tensor([1., 0.])
    """
    return (1 - beta * margin).relu()


def ipo_loss(margin: PerPair, beta: float = 0.1) -> PerPair:
    """IPO loss: the squared distance of the margin from 1 / (2 beta).

        L = (D - 1 / (2 beta))^2

    Paper: IPO, arXiv:2310.12036, equation 17 (tau is beta).

    Args:
        margin: D. OpenRLHF takes it from summed log-probs, as the paper does; TRL from averages over tokens (as the
            authors advise: see `length_normalised`), since the target does not grow with the length.
        beta: half the reciprocal of the target.

    Returns:
        Loss per pair.

    Example:
        >>> ipo_loss(torch.tensor([5.0, 4.0]))
        tensor([0., 1.])
    """
    return (margin - 1 / (2 * beta)).square()


def exo_loss(margin: PerPair, beta: float = 0.1, label_smoothing: float = 1e-3) -> PerPair:
    """EXO loss: the reverse KL divergence of the model's preference from the smoothed label.

        L = q log(q / (1 - e)) + (1 - q) log((1 - q) / e),    q = sigmoid(beta D)

    Paper: EXO, arXiv:2402.00856. Differs from cDPO, which is the forward KL: mode-seeking.

    Args:
        margin: D, in nats.
        beta: inverse temperature of the implicit reward.
        label_smoothing: e, above 0, as its logarithm is taken.

    Returns:
        Loss per pair.

    Raises:
        ValueError: e is not between 0 and 1.

    Example:
        >>> exo_loss(torch.tensor([0.0]), label_smoothing=0.5)
        tensor([0.])
    """
    if not 0 < label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing} must be between 0 and 1, both excluded")
    smoothing = margin.new_tensor(label_smoothing)
    logit = beta * margin
    chosen = logit.sigmoid() * (F.logsigmoid(logit) - (1 - smoothing).log())
    return chosen + (-logit).sigmoid() * (F.logsigmoid(-logit) - smoothing.log())


def nca_loss(chosen: PerPair, rejected: PerPair, beta: float = 0.1) -> PerPair:
    """NCA loss (noise-contrastive alignment): raises the chosen completion's likelihood itself, not only the margin.

        L = -log sigmoid(beta z_c) - (log sigmoid(-beta z_c) + log sigmoid(-beta z_r)) / 2

    Paper: NCA, arXiv:2402.05369 (the pairwise loss).

    Args:
        chosen: z_c, in nats.
        rejected: z_r, in nats.
        beta: inverse temperature of the implicit reward.

    Returns:
        Loss per pair.

    Example:
        >>> nca_loss(torch.tensor([0.0]), torch.tensor([0.0]))
        tensor([1.3863])
    """
    both = F.logsigmoid(-beta * chosen) + F.logsigmoid(-beta * rejected)
    return -F.logsigmoid(beta * chosen) - both / 2


def bco_pair_loss(chosen: PerPair, rejected: PerPair, beta: float = 0.1) -> PerPair:
    """BCO loss of a pair: a binary classifier, chosen completions above a reward of 0, rejected ones below.

        L = -log sigmoid(beta z_c) - log sigmoid(-beta z_r)

    Paper: BCO, arXiv:2404.04656. For unpaired data: `bco_loss`.

    Args:
        chosen: z_c, in nats.
        rejected: z_r, in nats.
        beta: inverse temperature of the implicit reward.

    Returns:
        Loss per pair.

    Example:
        >>> bco_pair_loss(torch.tensor([0.0]), torch.tensor([0.0]))
        tensor([1.3863])
    """
    return -F.logsigmoid(beta * chosen) - F.logsigmoid(-beta * rejected)


def sppo_loss(chosen: PerPair, rejected: PerPair, beta: float = 0.1) -> PerPair:
    """SPPO loss with hard labels (self-play): each log-ratio has a target of its own.

        L = (z_c - 1 / (2 beta))^2 + (z_r + 1 / (2 beta))^2

    Paper: SPPO, arXiv:2405.00675 (eta is 1 / beta), with the win rate of the pair as 1 and 0.

    Args:
        chosen: z_c, in nats.
        rejected: z_r, in nats.
        beta: the reciprocal of twice the target.

    Returns:
        Loss per pair.

    Example:
        >>> sppo_loss(torch.tensor([5.0]), torch.tensor([-4.0]))
        tensor([1.])
    """
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


def apo_zero_loss(chosen: PerPair, rejected: PerPair, beta: float = 0.1) -> PerPair:
    """APO-zero loss (anchored): the chosen completion becomes likelier, the rejected one less likely.

        L = 1 - sigmoid(beta z_c) + sigmoid(beta z_r)

    Paper: APO, arXiv:2408.06266. For a model that is worse than the chosen completions.

    Args:
        chosen: z_c, in nats.
        rejected: z_r, in nats.
        beta: inverse temperature of the implicit reward.

    Returns:
        Loss per pair.

    Example:
        >>> apo_zero_loss(torch.tensor([0.0]), torch.tensor([0.0]))
        tensor([1.])
    """
    return 1 - (beta * chosen).sigmoid() + (beta * rejected).sigmoid()


def apo_down_loss(chosen: PerPair, rejected: PerPair, beta: float = 0.1) -> PerPair:
    """APO-down loss (anchored): both completions become less likely, the rejected one more so.

        L = sigmoid(beta z_c) + 1 - sigmoid(beta (z_c - z_r))

    Paper: APO, arXiv:2408.06266. For a model that is better than the chosen completions.

    Args:
        chosen: z_c, in nats.
        rejected: z_r, in nats.
        beta: inverse temperature of the implicit reward.

    Returns:
        Loss per pair.

    Example:
        >>> apo_down_loss(torch.tensor([0.0]), torch.tensor([0.0]))
        tensor([1.])
    """
    return (beta * chosen).sigmoid() + 1 - (beta * (chosen - rejected)).sigmoid()


def discopop_loss(margin: PerPair, beta: float = 0.1, tau: float = 0.05) -> PerPair:
    """DiscoPOP loss: a blend, found by search, of the logistic and the exponential loss.

        L = (1 - w) (-log sigmoid(x)) + w exp(-x),    x = beta D, w = sigmoid(x / tau)

    Paper: DiscoPOP, arXiv:2406.08414 (log-ratio modulated loss).

    Args:
        margin: D, in nats.
        beta: inverse temperature of the implicit reward.
        tau: temperature of the blend.

    Returns:
        Loss per pair; not convex.

    Example:
        >>> discopop_loss(torch.tensor([0.0]))
        tensor([0.8466])
    """
    logit = beta * margin
    blend = (logit / tau).sigmoid()
    return (1 - blend) * -F.logsigmoid(logit) + blend * (-logit).exp()


def bradley_terry_loss(chosen: PerPair, rejected: PerPair, margin: PerPair | None = None) -> PerPair:
    """Bradley-Terry loss of a reward model.

        L = -log sigmoid(r_c - r_r - m)

    Paper: InstructGPT, arXiv:2203.02155, equation 1; with a margin, Llama 2, arXiv:2307.09288, equation 2.

    Args:
        chosen: reward of the preferred completion, with gradient.
        rejected: reward of the other.
        margin: m, how much better the preferred one is; none by default.

    Returns:
        Loss per pair.

    Example:
        >>> bradley_terry_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]))
        tensor([0.6931])
    """
    gap = chosen - rejected
    return -F.logsigmoid(gap if margin is None else gap - margin)


def reward_centring_loss(chosen: PerPair, rejected: PerPair) -> PerPair:
    """Reward centring: keeps the mean reward of a pair at 0, which the preferences alone leave free.

        L = (r_c + r_r)^2

    Paper: Eisenstein et al., "Helping or herding?", arXiv:2312.09244.

    Args:
        chosen: reward of the preferred completion, with gradient.
        rejected: reward of the other.

    Returns:
        Loss per pair.

    Example:
        >>> reward_centring_loss(torch.tensor([1.0]), torch.tensor([-1.0]))
        tensor([0.])
    """
    return (chosen + rejected).square()


def odds_ratio_loss(log_odds_ratio: PerPair) -> PerPair:
    """ORPO's odds-ratio loss: no reference is needed.

        L = -log sigmoid(log odds_c - log odds_r)

    Paper: ORPO, arXiv:2403.07691; added to the NLL of the chosen completion with a weight.

    Args:
        log_odds_ratio: of `log_odds_ratio`.

    Returns:
        Loss per pair.

    Example:
        >>> odds_ratio_loss(torch.tensor([0.0]))
        tensor([0.6931])
    """
    return -F.logsigmoid(log_odds_ratio)
