"""Preference losses: DPO and its variants, ORPO, reward models, KTO and BCO.

A pairwise loss takes the scores s_c and s_r of the chosen and the rejected completion, or their margin s_c - s_r, and
returns one number per pair. In DPO a score is the log-ratio z = log pi_theta(y) - log pi_ref(y); without a reference
(CPO, SimPO) it is the log-prob. beta is the inverse temperature of the implicit reward beta s.
"""

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from atomrl.atoms import atom
from atomrl.atoms.masks import PerItem, PerPair, Scalar, row_mean, row_sum

# --------------------------------------------------------------------------------------------------------------------
# Scores and weights of completions: implicit reward, f-divergences, length normalisation, LD-DPO, WPO, AlphaPO, ORPO.

Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]


@atom(
    "r = beta (log pi_theta(y) - log pi_ref(y))",
    paper="DPO, arXiv:2305.18290, equation 5, up to a constant of the prompt",
)
def implicit_reward(log_ratio: PerPair, beta: float = 0.1) -> PerPair:
    """DPO's implicit reward: the reward for which the policy is optimal under a KL penalty.

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


@atom(
    "f'(u),  u = exp(z):   reverse_kl z    forward_kl 1 - exp(-z)    js_divergence log 2 + log sigmoid(z)\n"
    "                      alpha_divergence (exp((a - 1) z) - 1) / (a - 1), which is z for a = 1",
    paper="f-DPO, arXiv:2309.16240 (constants that cancel in a margin are chosen so that f'(1) = 0)",
)
def f_divergence_score(log_ratio: PerPair, divergence: Divergence = "reverse_kl", alpha: float = 1.0) -> PerPair:
    """f-DPO score: replaces the log-ratio for divergences other than the reverse KL.

    Args:
        log_ratio: z, in nats.
        divergence: which one.
        alpha: a, of `alpha_divergence`. Its exponent is bounded by 80.

    Returns:
        Scores.

    Raises:
        ValueError: unknown divergence.

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


@atom("s / max(1, n)", paper="Length-normalised DPO in Tulu 3, arXiv:2411.15124")
def length_normalised(scores: PerPair, lengths: Int[Tensor, " P"]) -> PerPair:
    """Length-normalised scores: per token, so margins do not grow with the length.

    The authors of IPO recommend it, too.

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


@atom(
    "log p = sum over the first L tokens + alpha * sum over the rest,    L = length of the shorter completion",
    paper="LD-DPO, arXiv:2409.06411",
)
def length_desensitised_logprob(
    logprobs: Float[Tensor, "P T"], mask: Bool[Tensor, "P T"], shared_length: Int[Tensor, " P"], alpha: float = 0.5
) -> PerPair:
    """LD-DPO log-prob of a completion: tokens beyond the length of the pair's shorter completion count less.

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


@atom("w = exp(mean_t (log pi_theta(a_t) - log sum_v pi_theta(v)^2))", paper="WPO, arXiv:2406.11827")
def wpo_weight(
    logprobs: Float[Tensor, "P T"], log_collision: Float[Tensor, "P T"], mask: Bool[Tensor, "P T"]
) -> PerPair:
    """WPO weight: how on-policy a completion is, so that off-policy pairs count less.

    The weight of a pair is the product of its two.

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


@atom("s = (1 - p^-alpha) / alpha,   which is log p for alpha = 0", paper="AlphaPO, arXiv:2501.03884")
def alpha_score(logprob: PerPair, alpha: float) -> PerPair:
    """AlphaPO score: a transformed log-prob whose slope falls (alpha > 0) or rises with the likelihood.

    Args:
        logprob: average log-prob of a completion.
        alpha: shape.

    Returns:
        Scores, which replace the log-probs in SimPO.

    Example:
        >>> alpha_score(torch.tensor([0.0, -1.0]), alpha=0.0)
        tensor([ 0., -1.])
    """
    return logprob if alpha == 0 else -(-alpha * logprob).expm1() / alpha


@atom("log(p_c / (1 - p_c)) - log(p_r / (1 - p_r))", paper="ORPO, arXiv:2403.07691")
def log_odds_ratio(chosen: PerPair, rejected: PerPair) -> PerPair:
    """ORPO's log-odds ratio of the chosen completion to the rejected one.

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


@atom(
    "L = -(1 - e) log sigmoid(beta (s_c - s_r) - gamma) - e log sigmoid(gamma - beta (s_c - s_r))",
    latex=(
        r"L = -(1 - e) \log \sigma\big(\beta (s_c - s_r) - \gamma\big) - e \log \sigma\big(\gamma - \beta (s_c - "
        r"s_r)\big)"
    ),
    paper="DPO, arXiv:2305.18290, equation 7",
)
def dpo_loss(margin: PerPair, beta: float = 0.1, label_smoothing: float = 0.0, target_margin: float = 0.0) -> PerPair:
    """DPO loss (sigmoid); with label smoothing cDPO, with a target margin SimPO.

    With label smoothing e it is cDPO (Mitchell, "A note on DPO with noisy preferences", 2023); with mean log-probs as
    scores and a target margin it is SimPO, arXiv:2405.14734, equation 6.

    Args:
        margin: s_c - s_r, in nats.
        beta: inverse temperature of the implicit reward.
        label_smoothing: e, the assumed rate of wrong labels.
        target_margin: gamma, in units of the reward; used by SimPO.

    Returns:
        Loss per pair.

    Example:
        >>> dpo_loss(torch.tensor([0.0, 20.0]))
        tensor([0.6931, 0.1269])
    """
    logit = beta * margin - target_margin
    return -(1 - label_smoothing) * F.logsigmoid(logit) - label_smoothing * F.logsigmoid(-logit)


@atom(
    "L = (-(1 - e) log sigmoid(beta (s_c - s_r)) + e log sigmoid(-beta (s_c - s_r))) / (1 - 2 e)",
    latex=r"L = \frac{-(1 - e) \log \sigma(\beta (s_c - s_r)) + e \log \sigma(-\beta (s_c - s_r))}{1 - 2e}",
    paper="Robust DPO, arXiv:2403.00409",
)
def robust_dpo_loss(margin: PerPair, beta: float = 0.1, label_smoothing: float = 0.0) -> PerPair:
    """Robust DPO loss: unbiased if labels are flipped at a known rate.

    Differs from cDPO: the sign of the second term.

    Args:
        margin: s_c - s_r, in nats.
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


@atom(
    "L = max(0, 1 - beta (s_c - s_r))",
    latex=r"L = \max\big(0, 1 - \beta (s_c - s_r)\big)",
    paper="RSO, arXiv:2309.06657, after SLiC-HF, arXiv:2305.10425",
)
def hinge_preference_loss(margin: PerPair, beta: float = 0.1) -> PerPair:
    """Hinge loss of a pair (RSO, SLiC): 0 beyond a margin of 1 / beta.

    Args:
        margin: s_c - s_r, in nats.
        beta: the reciprocal of the margin.

    Returns:
        Loss per pair.

    Example:
        >>> hinge_preference_loss(torch.tensor([0.0, 20.0]))
        tensor([1., 0.])
    """
    return (1 - beta * margin).relu()


@atom(
    "L = (s_c - s_r - 1 / (2 beta))^2",
    latex=r"L = \Big(s_c - s_r - \frac{1}{2\beta}\Big)^2",
    paper="IPO, arXiv:2310.12036, equation 17 (tau is beta)",
)
def ipo_loss(margin: PerPair, beta: float = 0.1) -> PerPair:
    """IPO loss: the squared distance of the margin from 1 / (2 beta).

    Args:
        margin: s_c - s_r. The paper and OpenRLHF sum log-probs over tokens; TRL averages them, as the authors recommend
            (`length_normalised`), since the target does not grow with the length.
        beta: half the reciprocal of the target.

    Returns:
        Loss per pair.

    Example:
        >>> ipo_loss(torch.tensor([5.0, 4.0]))
        tensor([0., 1.])
    """
    return (margin - 1 / (2 * beta)).square()


@atom(
    "L = q log(q / (1 - e)) + (1 - q) log((1 - q) / e),   q = sigmoid(beta (s_c - s_r))",
    latex=r"L = q \log \frac{q}{1 - e} + (1 - q) \log \frac{1 - q}{e}, \quad q = \sigma(\beta (s_c - s_r))",
    paper="EXO, arXiv:2402.00856",
)
def exo_loss(margin: PerPair, beta: float = 0.1, label_smoothing: float = 1e-3) -> PerPair:
    """EXO loss: the reverse KL divergence of the model's preference from the smoothed label.

    Differs from cDPO, which is the forward KL: mode-seeking.

    Args:
        margin: s_c - s_r, in nats.
        beta: inverse temperature of the implicit reward.
        label_smoothing: e, above 0, since the loss contains log e.

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


@atom(
    "L = -log sigmoid(beta s_c) - (log sigmoid(-beta s_c) + log sigmoid(-beta s_r)) / 2",
    latex=r"L = -\log \sigma(\beta s_c) - \tfrac12 \big(\log \sigma(-\beta s_c) + \log \sigma(-\beta s_r)\big)",
    paper="NCA, arXiv:2402.05369 (the pairwise loss)",
)
def nca_loss(chosen: PerPair, rejected: PerPair, beta: float = 0.1) -> PerPair:
    """NCA loss (noise-contrastive alignment): raises the chosen completion's likelihood itself, not only the margin.

    Args:
        chosen: s_c, in nats.
        rejected: s_r, in nats.
        beta: inverse temperature of the implicit reward.

    Returns:
        Loss per pair.

    Example:
        >>> nca_loss(torch.tensor([0.0]), torch.tensor([0.0]))
        tensor([1.3863])
    """
    both = F.logsigmoid(-beta * chosen) + F.logsigmoid(-beta * rejected)
    return -F.logsigmoid(beta * chosen) - both / 2


@atom(
    "L = -log sigmoid(beta s_c) - log sigmoid(-beta s_r)",
    latex=r"L = -\log \sigma(\beta s_c) - \log \sigma(-\beta s_r)",
    paper="BCO, arXiv:2404.04656",
)
def bco_pair_loss(chosen: PerPair, rejected: PerPair, beta: float = 0.1) -> PerPair:
    """BCO loss of a pair: a binary classifier with chosen completions above a reward of 0, rejected ones below.

    For unpaired data: `bco_loss`.

    Args:
        chosen: s_c, in nats.
        rejected: s_r, in nats.
        beta: inverse temperature of the implicit reward.

    Returns:
        Loss per pair.

    Example:
        >>> bco_pair_loss(torch.tensor([0.0]), torch.tensor([0.0]))
        tensor([1.3863])
    """
    return -F.logsigmoid(beta * chosen) - F.logsigmoid(-beta * rejected)


@atom(
    "L = (s_c - 1 / (2 beta))^2 + (s_r + 1 / (2 beta))^2",
    latex=r"L = \Big(s_c - \frac{1}{2\beta}\Big)^2 + \Big(s_r + \frac{1}{2\beta}\Big)^2",
    paper="SPPO, arXiv:2405.00675 (eta is 1 / beta), with the win rate of the pair as 1 and 0",
)
def sppo_loss(chosen: PerPair, rejected: PerPair, beta: float = 0.1) -> PerPair:
    """SPPO loss with hard labels (self-play): each log-ratio has a target of its own.

    Args:
        chosen: s_c, in nats.
        rejected: s_r, in nats.
        beta: the reciprocal of twice the target.

    Returns:
        Loss per pair.

    Example:
        >>> sppo_loss(torch.tensor([5.0]), torch.tensor([-4.0]))
        tensor([1.])
    """
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


@atom(
    "L = 1 - sigmoid(beta s_c) + sigmoid(beta s_r)",
    latex=r"L = 1 - \sigma(\beta s_c) + \sigma(\beta s_r)",
    paper="APO, arXiv:2408.06266",
)
def apo_zero_loss(chosen: PerPair, rejected: PerPair, beta: float = 0.1) -> PerPair:
    """APO-zero loss (anchored): raises the chosen completion's likelihood, lowers the rejected one's.

    For models that are worse than the chosen completions.

    Args:
        chosen: s_c, in nats.
        rejected: s_r, in nats.
        beta: inverse temperature of the implicit reward.

    Returns:
        Loss per pair.

    Example:
        >>> apo_zero_loss(torch.tensor([0.0]), torch.tensor([0.0]))
        tensor([1.])
    """
    return 1 - (beta * chosen).sigmoid() + (beta * rejected).sigmoid()


@atom(
    "L = sigmoid(beta s_c) + 1 - sigmoid(beta (s_c - s_r))",
    latex=r"L = \sigma(\beta s_c) + 1 - \sigma(\beta (s_c - s_r))",
    paper="APO, arXiv:2408.06266",
)
def apo_down_loss(chosen: PerPair, rejected: PerPair, beta: float = 0.1) -> PerPair:
    """APO-down loss (anchored): lowers both likelihoods, the rejected one's more.

    For models that are better than the chosen completions.

    Args:
        chosen: s_c, in nats.
        rejected: s_r, in nats.
        beta: inverse temperature of the implicit reward.

    Returns:
        Loss per pair.

    Example:
        >>> apo_down_loss(torch.tensor([0.0]), torch.tensor([0.0]))
        tensor([1.])
    """
    return (beta * chosen).sigmoid() + 1 - (beta * (chosen - rejected)).sigmoid()


@atom(
    "L = -(1 - w) log sigmoid(x) + w exp(-x),   x = beta (s_c - s_r), w = sigmoid(x / tau)",
    latex=r"L = -(1 - w) \log \sigma(x) + w e^{-x}, \quad x = \beta (s_c - s_r),\ w = \sigma(x / \tau)",
    paper="DiscoPOP, arXiv:2406.08414 (log-ratio modulated loss)",
)
def discopop_loss(margin: PerPair, beta: float = 0.1, tau: float = 0.05) -> PerPair:
    """DiscoPOP loss: a blend of the logistic and the exponential loss, discovered by search.

    Args:
        margin: s_c - s_r, in nats.
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


@atom("L = -log sigmoid(r_c - r_r - m)", paper="InstructGPT, arXiv:2203.02155, equation 1")
def bradley_terry_loss(chosen: PerPair, rejected: PerPair, margin: PerPair | None = None) -> PerPair:
    """Bradley-Terry loss of a reward model.

    The margin is Llama 2's, arXiv:2307.09288, equation 2.

    Args:
        chosen: reward of the preferred completion, with gradient.
        rejected: reward of the other.
        margin: m, by which the preferred reward has to be higher; none by default.

    Returns:
        Loss per pair.

    Example:
        >>> bradley_terry_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]))
        tensor([0.6931])
    """
    gap = chosen - rejected
    return -F.logsigmoid(gap if margin is None else gap - margin)


@atom("L = (r_c + r_r)^2", paper='Eisenstein et al., "Helping or herding?", arXiv:2312.09244')
def reward_centring_loss(chosen: PerPair, rejected: PerPair) -> PerPair:
    """Reward centring: penalises a mean reward other than 0, which preferences alone do not determine.

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


@atom("L = -log sigmoid(log odds_c - log odds_r)", paper="ORPO, arXiv:2403.07691")
def odds_ratio_loss(log_odds_ratio: PerPair) -> PerPair:
    """ORPO's odds-ratio loss: needs no reference.

    ORPO adds it to the NLL of the chosen completion, with a weight.

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
# Unpaired preference losses, for completions labelled good or bad: KTO and BCO.


@atom(
    "L = w_d (1 - sigmoid(beta (z - z_0)))   where good\nL = w_u (1 - sigmoid(beta (z_0 - z)))   where bad",
    paper="KTO, arXiv:2402.01306",
)
def kto_loss(
    log_ratio: PerItem,
    desirable: PerItem,
    reference: Scalar,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PerItem:
    """KTO loss of completions labelled good or bad, relative to a reference point.

    With z_0 = 0 it is the unpaired APO-zero.

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


@atom(
    "L = -w log sigmoid(r - delta) where good,    -w log sigmoid(-(r - delta)) where bad",
    paper="BCO, arXiv:2404.04656",
)
def bco_loss(rewards: PerItem, desirable: PerItem, delta: Scalar, weights: PerItem | None = None) -> PerItem:
    """BCO loss: a binary classifier of unpaired completions, good ones above the mean reward, bad ones below.

    Args:
        rewards: implicit rewards beta z, with gradient.
        desirable: 1 where good, 0 where bad.
        delta: running mean of rewards (`running_mean`), without gradient.
        weights: w, for example density ratios of bad completions; 1 by default.

    Returns:
        Loss per completion.

    Example:
        >>> bco_loss(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor(0.0))
        tensor([0.6931])
    """
    gap = rewards - delta.detach()
    loss = -F.logsigmoid(torch.where(desirable > 0, gap, -gap))
    return loss if weights is None else loss * weights.detach()


@atom("z_0 = max(0, mean z')", paper="KTO, arXiv:2402.01306")
def kto_reference(log_ratio: PerItem) -> Scalar:
    """KTO's reference point: an estimate of the KL from prompts with completions of other prompts.

    Args:
        log_ratio: z' of mismatched pairs of prompt and completion, in nats.

    Returns:
        A scalar without gradient.

    Example:
        >>> kto_reference(torch.tensor([-1.0, 3.0]))
        tensor(1.)
    """
    return log_ratio.detach().mean().clamp(min=0)


@atom("mean' = mean + (mean(x) - mean) N / (count + N)", paper="BCO, arXiv:2404.04656 (its reward shift delta)")
def running_mean(mean: Scalar, count: float, values: PerItem) -> tuple[Scalar, float]:
    """Update a running mean with new values.

    Args:
        mean: before.
        count: number of values before; 0 at the start.
        values: new values; detached.

    Returns:
        The new mean, and the new count.

    Example:
        >>> running_mean(torch.tensor(1.0), 2.0, torch.tensor([4.0]))
        (tensor(2.), 3.0)
    """
    total = count + len(values)
    return mean + (values.detach().mean() - mean) * len(values) / total, total
