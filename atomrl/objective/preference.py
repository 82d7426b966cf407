"""The axes of a preference objective: what scores a completion, what a pair or a label costs, and what is added."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from atomrl.atoms import preference_losses, preference_scores, supervised_losses, unpaired_losses
from atomrl.atoms.masks import row_mean, row_sum
from atomrl.atoms.preference_scores import Divergence
from atomrl.objective.axis import AnySign, Axis, reads


class Completions(NamedTuple):
    """What a score sees: rows `[B, T]`."""

    logprobs: Tensor
    ref_logprobs: Tensor | None
    mask: Tensor
    shared_length: Tensor
    """[B] tokens of the shorter completion of a pair."""


def _sums(logprobs: Tensor, c: Completions, ld_alpha: float) -> Tensor:
    if ld_alpha == 1:
        return row_sum(logprobs, c.mask)
    return preference_scores.length_desensitised_logprob(logprobs, c.mask, c.shared_length, ld_alpha)


@reads("ref_logprobs")
def _log_ratio(
    c: Completions,
    *,
    divergence: Divergence = "reverse_kl",
    alpha: AnySign = 1.0,
    ld_alpha: float = 1.0,
    length_normalised: bool = False,
) -> Tensor:
    r"""The log-ratio to the reference, which holds the policy: the implicit reward is beta times it.

        s(y) = log pi(y) - log pi_ref(y)

    LaTeX: s(y) = \log \frac{\pi_\theta(y)}{\pi_{\mathrm{ref}}(y)}
    """
    assert c.ref_logprobs is not None, "the back end annotates what `needs` names"
    ratio = _sums(c.logprobs, c, ld_alpha) - _sums(c.ref_logprobs, c, ld_alpha)
    score = preference_scores.f_divergence_score(ratio, divergence, alpha)
    return preference_scores.length_normalised(score, c.mask.sum(1)) if length_normalised else score


def _logprob(c: Completions, *, shape: AnySign = 0.0, ld_alpha: float = 1.0, length_normalised: bool = False) -> Tensor:
    r"""The log-prob itself: no reference is loaded, and none holds the policy.

        s(y) = log pi(y)

    LaTeX: s(y) = \log \pi_\theta(y)
    """
    score = _sums(c.logprobs, c, ld_alpha)
    if length_normalised:
        score = preference_scores.length_normalised(score, c.mask.sum(1))
    return preference_scores.alpha_score(score, shape)


SCORES: dict[str, Callable[..., Tensor]] = {"log_ratio": _log_ratio, "logprob": _logprob}


class Score(Axis):
    """What is compared of two completions. `length_normalised` takes it per token; `ld_alpha` below 1 counts what one
    completion is longer than the other less (LD-DPO); `divergence` is another than the reverse KL (f-DPO, with the
    `alpha` of `alpha_divergence`); `shape` bends a log-prob (AlphaPO)."""

    label, kinds, default = "score", SCORES, "log_ratio"


class Pair(NamedTuple):
    """Scores of the chosen and of the rejected completions, each [P]."""

    chosen: Tensor
    rejected: Tensor


def _sigmoid(p: Pair, *, beta: float = 0.1, label_smoothing: float = 0.0, target_margin: float = 0.0) -> Tensor:
    r"""The likelihood of the preference; with label smoothing e it is cDPO, with a target margin gamma SimPO's.

        L = -(1 - e) log sigmoid(beta (s_c - s_r) - gamma) - e log sigmoid(gamma - beta (s_c - s_r))

    LaTeX: L = -(1 - e) \log \sigma\big(\beta (s_c - s_r) - \gamma\big)
        - e \log \sigma\big(\gamma - \beta (s_c - s_r)\big)
    """
    return preference_losses.dpo_loss(p.chosen - p.rejected, beta, label_smoothing, target_margin)


def _robust(p: Pair, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    r"""Unbiased under labels that are flipped at a known rate e.

        L = (-(1 - e) log sigmoid(beta (s_c - s_r)) + e log sigmoid(-beta (s_c - s_r))) / (1 - 2 e)

    LaTeX: L = \frac{-(1 - e) \log \sigma(\beta (s_c - s_r)) + e \log \sigma(-\beta (s_c - s_r))}{1 - 2e}
    """
    return preference_losses.robust_dpo_loss(p.chosen - p.rejected, beta, label_smoothing)


def _hinge(p: Pair, *, beta: float = 0.1) -> Tensor:
    r"""Nothing to gain beyond a margin of 1 / beta.

        L = max(0, 1 - beta (s_c - s_r))

    LaTeX: L = \max\big(0, 1 - \beta (s_c - s_r)\big)
    """
    return preference_losses.hinge_preference_loss(p.chosen - p.rejected, beta)


def _ipo(p: Pair, *, beta: float = 0.1) -> Tensor:
    r"""The squared distance of the margin from 1 / (2 beta).

        L = (s_c - s_r - 1 / (2 beta))^2

    LaTeX: L = \Big(s_c - s_r - \frac{1}{2\beta}\Big)^2
    """
    return preference_losses.ipo_loss(p.chosen - p.rejected, beta)


def _exo_pair(p: Pair, *, beta: float = 0.1, label_smoothing: float = 1e-3) -> Tensor:
    r"""The reverse KL of the model's preference from the smoothed label.

        L = q log(q / (1 - e)) + (1 - q) log((1 - q) / e),   q = sigmoid(beta (s_c - s_r))

    LaTeX: L = q \log \frac{q}{1 - e} + (1 - q) \log \frac{1 - q}{e}, \quad q = \sigma(\beta (s_c - s_r))
    """
    return preference_losses.exo_loss(p.chosen - p.rejected, beta, label_smoothing)


def _nca_pair(p: Pair, *, beta: float = 0.1) -> Tensor:
    r"""Noise contrast: raises the chosen completion's likelihood itself.

        L = -log sigmoid(beta s_c) - (log sigmoid(-beta s_c) + log sigmoid(-beta s_r)) / 2

    LaTeX: L = -\log \sigma(\beta s_c) - \tfrac12 \big(\log \sigma(-\beta s_c) + \log \sigma(-\beta s_r)\big)
    """
    return preference_losses.nca_loss(p.chosen, p.rejected, beta)


def _bco_pair(p: Pair, *, beta: float = 0.1) -> Tensor:
    r"""A binary classifier of each completion.

        L = -log sigmoid(beta s_c) - log sigmoid(-beta s_r)

    LaTeX: L = -\log \sigma(\beta s_c) - \log \sigma(-\beta s_r)
    """
    return preference_losses.bco_pair_loss(p.chosen, p.rejected, beta)


def _sppo_hard(p: Pair, *, beta: float = 0.1) -> Tensor:
    r"""Self-play with hard labels: each score has a target of its own.

        L = (s_c - 1 / (2 beta))^2 + (s_r + 1 / (2 beta))^2

    LaTeX: L = \Big(s_c - \frac{1}{2\beta}\Big)^2 + \Big(s_r + \frac{1}{2\beta}\Big)^2
    """
    return preference_losses.sppo_loss(p.chosen, p.rejected, beta)


@reads("old_logprobs", "ref_logprobs")
def _aot(p: Pair, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    r"""The policy's margins against the reference's of the same rank in the whole step.

        L = -(1 - e) log sigmoid(beta D_k) - e log sigmoid(-beta D_k),   D_k = policy margin_(k) - reference margin_(k)

    LaTeX: L = -(1 - e) \log \sigma(\beta D_{(k)}) - e \log \sigma(-\beta D_{(k)}), \quad
        D_{(k)} = m^\theta_{(k)} - m^{\mathrm{ref}}_{(k)}
    """
    return preference_losses.dpo_loss(p.chosen - p.rejected, beta, label_smoothing)


@reads("old_logprobs", "ref_logprobs")
def _aot_unpaired(p: Pair, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    r"""The scores of chosen completions against those of rejected ones of the same rank in the whole step.

        L = -(1 - e) log sigmoid(beta D_k) - e log sigmoid(-beta D_k),   D_k = s_c(k) - s_r(k)

    LaTeX: L = -(1 - e) \log \sigma(\beta D_{(k)}) - e \log \sigma(-\beta D_{(k)}), \quad
        D_{(k)} = s_{c,(k)} - s_{r,(k)}
    """
    return preference_losses.dpo_loss(p.chosen - p.rejected, beta, label_smoothing)


def _apo_zero(p: Pair, *, beta: float = 0.1) -> Tensor:
    r"""Anchored: chosen up, rejected down; for a model worse than the chosen completions.

        L = 1 - sigmoid(beta s_c) + sigmoid(beta s_r)

    LaTeX: L = 1 - \sigma(\beta s_c) + \sigma(\beta s_r)
    """
    return preference_losses.apo_zero_loss(p.chosen, p.rejected, beta)


def _apo_down(p: Pair, *, beta: float = 0.1) -> Tensor:
    r"""Anchored: both down, rejected more; for a model better than the chosen completions.

        L = sigmoid(beta s_c) + 1 - sigmoid(beta (s_c - s_r))

    LaTeX: L = \sigma(\beta s_c) + 1 - \sigma(\beta (s_c - s_r))
    """
    return preference_losses.apo_down_loss(p.chosen, p.rejected, beta)


def _discopop(p: Pair, *, beta: float = 0.1, tau: float = 0.05) -> Tensor:
    r"""A blend, found by search, of the logistic and the exponential loss.

        L = -(1 - w) log sigmoid(x) + w exp(-x),   x = beta (s_c - s_r), w = sigmoid(x / tau)

    LaTeX: L = -(1 - w) \log \sigma(x) + w e^{-x}, \quad x = \beta (s_c - s_r),\ w = \sigma(x / \tau)
    """
    return preference_losses.discopop_loss(p.chosen - p.rejected, beta, tau)


def _odds_ratio(p: Pair, *, beta: float = 0.1) -> Tensor:
    r"""The logistic loss of the odds of mean log-probs.

        L = -beta log sigmoid(log odds(s_c) - log odds(s_r)),   odds(s) = exp(s) / (1 - exp(s))

    LaTeX: L = -\beta \log \sigma\Big(\log \frac{e^{s_c}}{1 - e^{s_c}} - \log \frac{e^{s_r}}{1 - e^{s_r}}\Big)
    """
    odds = preference_scores.log_odds_ratio(p.chosen, p.rejected)
    return beta * preference_losses.odds_ratio_loss(odds)


class Labelled(NamedTuple):
    """Scores [N] of completions that are good (1) or bad (0), and what they are held against."""

    scores: Tensor
    desirable: Tensor
    reference: Tensor
    """A number of the whole step: KTO's z_0, or BCO's delta."""


@reads("old_logprobs", "ref_logprobs")
def _kto(s: Labelled, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> Tensor:
    r"""Good completions above a reference point, the KL as completions of other prompts tell it, and bad ones below.

        L = w (1 - sigmoid(beta (s - z_0))) if good, w (1 - sigmoid(beta (z_0 - s))) if bad,   z_0 = max(0, mean s')

    LaTeX: L = w_y \big(1 - \sigma(\pm\beta (s - z_0))\big), \quad z_0 = \max\big(0, \overline{s'}\big)
    """
    return unpaired_losses.kto_loss(s.scores, s.desirable, s.reference, beta, desirable_weight, undesirable_weight)


def _apo_zero_unpaired(
    s: Labelled, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> Tensor:
    r"""KTO with a reference point of 0.

        L = w (1 - sigmoid(beta s)) if good, w (1 - sigmoid(-beta s)) if bad

    LaTeX: L = w_y \big(1 - \sigma(\pm\beta s)\big)
    """
    zero = s.scores.new_zeros(())
    return unpaired_losses.kto_loss(s.scores, s.desirable, zero, beta, desirable_weight, undesirable_weight)


@reads("old_logprobs", "ref_logprobs")
def _bco(s: Labelled, *, beta: float = 0.1) -> Tensor:
    r"""A binary classifier: good completions above the running mean of rewards, bad ones below.

        L = -log sigmoid(beta s - delta) if good, -log sigmoid(delta - beta s) if bad,   delta = running mean of beta s

    LaTeX: L = -\log \sigma\big(\pm(\beta s - \delta)\big), \quad \delta = \text{running mean of } \beta s
    """
    return unpaired_losses.bco_loss(preference_scores.implicit_reward(s.scores, beta), s.desirable, s.reference)


_kto.atoms = (unpaired_losses.kto_reference,)  # type: ignore[attr-defined]  # of a whole step: `pair_up`
_bco.atoms = (unpaired_losses.running_mean,)  # type: ignore[attr-defined]
LOSSES: dict[str, Callable[..., Tensor]] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "odds_ratio": _odds_ratio,
    "kto": _kto,
    "apo_zero_unpaired": _apo_zero_unpaired,
    "bco": _bco,
}
UNPAIRED = {"kto", "apo_zero_unpaired", "bco"}
"""Losses of single completions with a label."""
RANKED = {"aot", "aot_unpaired"}
"""Losses that match by rank in the whole step."""


class Loss(Axis):
    """What a pair costs: `Pair` -> [P]; or a labelled completion: `Labelled` -> [N]."""

    label, kinds, default = "loss", LOSSES, "sigmoid"


class Demonstrated(NamedTuple):
    """The chosen completions as demonstrations."""

    logprobs: Tensor
    """[P, T]"""
    mask: Tensor
    mean_tokens: float
    """Of the chosen completions of the whole step."""


def _nll_token_mean(d: Demonstrated, *, coefficient: float = 0.0) -> Tensor:
    r"""The negative log-likelihood of chosen completions, every token weighing the same.

        NLL = -log pi(y_c) / mean |y_c|

    LaTeX: \mathrm{NLL} = -\log \pi_\theta(y_c) / \overline{|y_c|}
    """
    return row_sum(supervised_losses.nll_loss(d.logprobs, d.mask), d.mask) / d.mean_tokens


def _nll_sequence_mean(d: Demonstrated, *, coefficient: float = 0.0) -> Tensor:
    r"""The negative log-likelihood per token of chosen completions, every completion weighing the same.

        NLL = -log pi(y_c) / |y_c|

    LaTeX: \mathrm{NLL} = -\log \pi_\theta(y_c) / |y_c|
    """
    return row_mean(supervised_losses.nll_loss(d.logprobs, d.mask), d.mask)


NLLS: dict[str, Callable[..., Tensor]] = {"token_mean": _nll_token_mean, "sequence_mean": _nll_sequence_mean}


class Nll(Axis):
    """Supervised training on the chosen completions beside the preference (`sft` in TRL's losses; RPO)."""

    label, kinds, default = "nll", NLLS, "token_mean"
