"""Pairwise preference losses: DPO and its family, ORPO, and those of reward models.

A loss takes the log-ratios z = log pi_theta(y) - log pi_ref(y) of both, or their margin D = z_chosen - z_rejected, and
gives one number per pair; beta is the strength of the pull to the reference. Without a reference (CPO, SimPO) the same
losses take log-probs. `preference_scores` has what may be put in the place of z and D.
"""

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from atomrl.atoms.masks import PerItem, PerPair, Scalar, row_mean, row_sum

# --------------------------------------------------------------------------------------------------------------------
# Preference scores and weights: implicit rewards, f-divergences, length normalisation, WPO, LD-DPO, AOT.

Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]


def implicit_reward(log_ratio: PerPair, beta: float = 0.1) -> PerPair:
    """DPO's implicit reward: that for which the policy is optimal under a KL penalty.

        r = beta (log pi_theta(y) - log pi_ref(y))

    Paper: DPO, arXiv:2305.18290, equation 5, up to a constant of the prompt.

    Args:
        log_ratio: per completion, in nats.
        beta: coefficient of the penalty.

    Returns:
        Rewards.

    Example:
        >>> implicit_reward(torch.tensor([5.0]))
        tensor([0.5000])
    """
    return beta * log_ratio


def f_divergence_score(log_ratio: PerPair, divergence: Divergence = "reverse_kl", alpha: float = 1.0) -> PerPair:
    """f-DPO score: in the place of the log-ratio, for another divergence than the reverse KL.

        f'(u),  u = exp(z):   reverse_kl z    forward_kl 1 - exp(-z)    js_divergence log 2 + log sigmoid(z)
                              alpha_divergence (exp((a - 1) z) - 1) / (a - 1), which is z for a = 1

    Paper: f-DPO, arXiv:2309.16240 (constants that cancel in a margin are chosen so that f'(1) = 0).

    Args:
        log_ratio: z, in nats.
        divergence: which one.
        alpha: a, of `alpha_divergence`. Its exponent is bounded by 80.

    Returns:
        Scores.

    Raises:
        ValueError: the divergence is not known.

    Example:
        >>> f_divergence_score(torch.tensor([0.0]), "forward_kl")
        tensor([0.])
    """
    if divergence == "reverse_kl" or (divergence == "alpha_divergence" and alpha == 1):
        return log_ratio
    if divergence == "forward_kl":
        return -(-log_ratio).expm1()
    if divergence == "js_divergence":
        return math.log(2) + F.logsigmoid(log_ratio)
    if divergence != "alpha_divergence":
        raise ValueError(f"divergence={divergence!r} is not one of {', '.join(get_args(Divergence))}")
    return ((alpha - 1) * log_ratio).clamp(max=80.0).expm1() / (alpha - 1)


def length_normalised(scores: PerPair, lengths: Int[Tensor, " P"]) -> PerPair:
    """Length-normalised scores: long completions have no larger margins for their length.

        s / max(1, n)

    Paper: length-normalised DPO in Tulu 3, arXiv:2411.15124; IPO as its authors advise.

    Args:
        scores: sums over tokens.
        lengths: tokens of each completion.

    Returns:
        Scores per token.

    Example:
        >>> length_normalised(torch.tensor([6.0]), torch.tensor([3]))
        tensor([2.])
    """
    return scores / lengths.clamp(min=1)


def length_desensitised_logprob(
    logprobs: Float[Tensor, "P T"], mask: Bool[Tensor, "P T"], shared_length: Int[Tensor, " P"], alpha: float = 0.5
) -> PerPair:
    """LD-DPO log-prob of a completion: what is longer than the other of its pair counts less.

        log p = sum over the first L tokens + alpha * sum over the rest,    L = length of the shorter completion

    Paper: LD-DPO, arXiv:2409.06411.

    Args:
        logprobs: per token.
        mask: True on the completion.
        shared_length: L, in tokens.
        alpha: between 0 (the rest does not count) and 1 (DPO).

    Returns:
        One number per completion, with gradient.

    Example:
        >>> every = torch.tensor([[True, True, True]])
        >>> length_desensitised_logprob(torch.tensor([[-1.0, -1.0, -1.0]]), every, torch.tensor([2]))
        tensor([-2.5000])
    """
    first = mask & (mask.cumsum(1) <= shared_length[:, None])
    return row_sum(logprobs, first) + alpha * row_sum(logprobs, mask & ~first)


def wpo_weight(
    logprobs: Float[Tensor, "P T"], log_collision: Float[Tensor, "P T"], mask: Bool[Tensor, "P T"]
) -> PerPair:
    """WPO weight: how much a completion looks like one of the policy's own, so that off-policy pairs count less.

        w = exp(mean_t (log pi_theta(a_t) - log sum_v pi_theta(v)^2))

    Paper: WPO, arXiv:2406.11827. The weight of a pair is the product of its two.

    Args:
        logprobs: of the policy.
        log_collision: log sum_v pi(v)^2 per token, the log of `collision_probability`.
        mask: True on the completion.

    Returns:
        One weight per completion, without gradient; 1 where the policy is uniform.

    Example:
        >>> wpo_weight(torch.tensor([[0.5]]).log(), torch.tensor([[0.5]]).log(), torch.tensor([[True]]))
        tensor([1.])
    """
    return row_mean((logprobs - log_collision).detach(), mask).exp()


def alpha_score(logprob: PerPair, alpha: float) -> PerPair:
    """AlphaPO score: a log-prob, bent so that its slope falls (alpha > 0) or rises with likelihood.

        s = (1 - p^-alpha) / alpha,   which is log p for alpha = 0

    Paper: AlphaPO, arXiv:2501.03884.

    Args:
        logprob: average log-prob of a completion.
        alpha: shape.

    Returns:
        Scores, to take the place of log-probs in SimPO.

    Example:
        >>> alpha_score(torch.tensor([0.0, -1.0]), alpha=0.0)
        tensor([ 0., -1.])
    """
    return logprob if alpha == 0 else -(-alpha * logprob).expm1() / alpha


def log_odds_ratio(chosen: PerPair, rejected: PerPair) -> PerPair:
    """ORPO's log-odds ratio of the chosen completion to the rejected one.

        log(p_c / (1 - p_c)) - log(p_r / (1 - p_r))

    Paper: ORPO, arXiv:2403.07691.

    Args:
        chosen: average log-prob per token of the chosen completion, below 0.
        rejected: of the rejected one.

    Returns:
        One number per pair.

    Example:
        >>> log_odds_ratio(torch.tensor([0.5]).log(), torch.tensor([0.25]).log())
        tensor([1.0986])
    """
    return (chosen - rejected) - ((-chosen.exp()).log1p() - (-rejected.exp()).log1p())


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


# --------------------------------------------------------------------------------------------------------------------
# Unpaired preference losses, of completions labelled good or bad: KTO and BCO.


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
