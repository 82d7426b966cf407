"""Axes of a preference objective: score of a completion, loss of pairs or of labelled completions, NLL."""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from atomrl.atoms import Formula
from atomrl.atoms import preference_losses as losses
from atomrl.atoms.auxiliary_losses import nll_loss
from atomrl.atoms.masks import row_mean, row_sum
from atomrl.atoms.preference_losses import (
    bco_loss,
    implicit_reward,
    kto_loss,
    kto_reference,
    log_odds_ratio,
    running_mean,
)
from atomrl.batches import RowBatch
from atomrl.common.threads import to_device
from atomrl.objectives.choice import Atoms, Choice, Setting, default, not_none

# --------------------------------------------------------------------------------------------------------------------
# Score: log-probs [B, T] of rows -> [B].

AnySign = Annotated[float, Field(allow_inf_nan=False)]
AtLeast0 = Annotated[AnySign, Field(ge=0)]


class PreferenceScore(Choice):
    """Base class of scores: log-probs [B, T] of rows -> one number per completion [B]."""

    ld_alpha: AtLeast0 = 1.0
    """Weight of the tokens beyond the length of the pair's shorter completion (LD-DPO)."""
    length_normalised: bool = False
    """Divide by the number of tokens."""

    def atoms(self) -> Atoms:
        sums = row_sum if self.ld_alpha == 1 else losses.length_desensitised_logprob
        return (sums, losses.length_normalised) if self.length_normalised else (sums,)

    def sums(self, logprobs: Tensor | None, rows: RowBatch) -> Tensor:
        """Return the sums of log-probs over trained tokens [B], with `ld_alpha`."""
        mask = rows.loss_mask
        if self.ld_alpha == 1 or rows.pair_ids is None:
            return row_sum(not_none(logprobs), mask)
        shared = shared_lengths(mask, to_device(rows.pair_ids, mask.device))
        return losses.length_desensitised_logprob(not_none(logprobs), mask, shared, self.ld_alpha)

    def where(self) -> tuple[Formula, ...]:
        lines = []
        if self.ld_alpha != 1:
            surplus = "tokens beyond the shorter completion's length count"
            lines.append(Formula(f"{surplus} alpha", rf"\text{{{surplus} }} \alpha"))
        if self.length_normalised:
            lines.append(Formula("s <- s / |y|", r"s \leftarrow s / |y|"))
        return tuple(lines)


class LogRatioScore(PreferenceScore, type="log_ratio"):
    """Log-ratio to the reference, as in DPO: beta times it is the implicit reward."""

    text = "s(y) = log pi(y) - log pi_ref(y)"
    latex = r"s(y) = \log \frac{\pi_\theta(y)}{\pi_{\mathrm{ref}}(y)}"
    divergence: losses.Divergence = "reverse_kl"
    """Divergence of f-DPO; reverse_kl is DPO."""
    alpha: AnySign = default(losses.f_divergence_score, "alpha")
    """Parameter of `alpha_divergence`."""
    needs = frozenset({"ref_logprobs"})

    def atoms(self) -> Atoms:
        return super().atoms() if self.divergence == "reverse_kl" else (*super().atoms(), losses.f_divergence_score)

    def __call__(self, logprobs: Tensor | None, rows: RowBatch) -> Tensor:
        ratio = self.sums(logprobs, rows) - self.sums(rows.ref_logprobs, rows)
        score = losses.f_divergence_score(ratio, self.divergence, self.alpha)
        return losses.length_normalised(score, rows.loss_mask.sum(1)) if self.length_normalised else score

    def where(self) -> tuple[Formula, ...]:
        transform = Formula(f"s <- f'(exp(s)) of the {self.divergence}", r"s \leftarrow f'(e^s)")
        return super().where() if self.divergence == "reverse_kl" else (transform, *super().where())

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield "note: a frozen copy of the start is loaded as the reference (none with model.lora)"


class LogprobScore(PreferenceScore, type="logprob"):
    """Log-prob, as in SimPO and CPO: no reference is loaded, and none bounds the policy."""

    text = "s(y) = log pi(y)"
    latex = r"s(y) = \log \pi_\theta(y)"
    shape: AnySign = 0.0
    """Shape parameter of AlphaPO; 0 leaves the log-prob as it is."""

    def atoms(self) -> Atoms:
        return (*super().atoms(), losses.alpha_score) if self.shape else super().atoms()

    def __call__(self, logprobs: Tensor | None, rows: RowBatch) -> Tensor:
        score = self.sums(logprobs, rows)
        return losses.alpha_score(
            losses.length_normalised(score, rows.loss_mask.sum(1)) if self.length_normalised else score, self.shape
        )

    def where(self) -> tuple[Formula, ...]:
        transform = Formula("s <- (1 - exp(-shape s)) / shape", r"s \leftarrow (1 - e^{-a s}) / a")
        return (*super().where(), transform) if self.shape else super().where()

    def warnings(self, setting: Setting) -> Iterator[str]:
        if not self.length_normalised:
            yield "biased: the sum of log-probs is lower for longer completions (use length_normalised)"
        if not setting.axes["nll"].coefficient and not all(loss.bounded for loss in setting.axes["loss"]):
            yield "unstable: no reference or likelihood term constrains the policy; use a small learning rate"


Score = LogRatioScore | LogprobScore


# --------------------------------------------------------------------------------------------------------------------
# NLL of chosen completions: log-probs and mask [P, T], and their mean length in the whole step -> [P].


class ChosenNll(Choice):
    """Supervised loss on the chosen completions, added to the preference loss (`sft` in TRL's losses; RPO)."""

    coefficient: AtLeast0 = 0.0


class TokenMeanNll(ChosenNll, type="token_mean"):
    """Negative log-likelihood of chosen completions; every token has the same weight."""

    text = "NLL = -log pi(y_c) / mean |y_c|"
    latex = r"\mathrm{NLL} = -\log \pi_\theta(y_c) / \overline{|y_c|}"
    made_of = (nll_loss, row_sum)

    def __call__(self, logprobs: Tensor, mask: Tensor, mean_tokens: float) -> Tensor:
        return row_sum(nll_loss(logprobs, mask), mask) / mean_tokens


class SequenceMeanNll(ChosenNll, type="sequence_mean"):
    """Negative log-likelihood per token of chosen completions; every completion has the same weight."""

    text = "NLL = -log pi(y_c) / |y_c|"
    latex = r"\mathrm{NLL} = -\log \pi_\theta(y_c) / |y_c|"
    made_of = (nll_loss, row_mean)

    def __call__(self, logprobs: Tensor, mask: Tensor, mean_tokens: float) -> Tensor:
        return row_mean(nll_loss(logprobs, mask), mask)


Nll = TokenMeanNll | SequenceMeanNll


# --------------------------------------------------------------------------------------------------------------------
# Labels and pairs, over all rows of a step.


def row_keys(rows: RowBatch) -> Tensor:
    """Hash the tokens of each row -> [B] int64, to break ties independently of the order of rows."""
    multipliers = torch.randint(2**62, (rows.tokens.shape[1],), generator=torch.Generator().manual_seed(0))
    inside = torch.arange(rows.tokens.shape[1]) < rows.lengths[:, None]
    return ((rows.tokens + 1) * multipliers).masked_fill(~inside, 0).sum(1)  # int64 wraps around


def labels_of(rows: RowBatch) -> Tensor:
    """Return labels [B]: 1 for a chosen or good completion, -1 for a rejected or bad one, else 0.

    Labels come from the data, or from rewards (`best_and_worst`). Rows without a trained token get 0.
    """
    if rows.preference.labels is None:
        return best_and_worst(rows)
    return rows.preference.labels.masked_fill(~rows.loss_mask.any(1), 0)


def best_and_worst(rows: RowBatch) -> Tensor:
    """Label each group's completions by reward -> [B]: 1 for the highest, -1 for the lowest, else 0.

    Token rewards count. Groups with equal rewards get 0.

    Example:
        >>> rows = RowBatch(
        ...     tokens=torch.tensor([[5, 7], [5, 8], [5, 9]]), loss_mask=torch.tensor([[False, True]] * 3),
        ...     lengths=torch.full((3,), 2), prompt_lengths=torch.ones(3, dtype=torch.long),
        ...     group_ids=torch.zeros(3, dtype=torch.long), rewards=torch.tensor([0.0, 2.0, 1.0]),
        ...     truncated=torch.zeros(3, dtype=torch.bool),
        ... )
        >>> best_and_worst(rows).tolist()
        [-1, 1, 0]
    """
    labels = torch.zeros(rows.rows, dtype=torch.long)
    by_token = rows.rollout.token_rewards
    totals = rows.rewards if by_token is None else rows.rewards + by_token.sum(1)
    order = row_keys(rows).argsort(stable=True)
    order = order[rows.loss_mask.any(1)[order]]
    for group in torch.unique(rows.group_ids):
        index = order[rows.group_ids[order] == group]
        rewards = totals[index]
        if len(index) > 1 and rewards.max() > rewards.min():
            labels[index[rewards.argmax()]] = 1
            labels[index[rewards.argmin()]] = -1
    return labels


def complete(labels: Tensor, pair_ids: Tensor) -> Tensor:
    """Set the labels of rows to 0 whose pair has no other row.

    Example:
        >>> complete(torch.tensor([1, -1, 1, 1]), torch.tensor([4, 4, 5, -1])).tolist()
        [1, -1, 0, 0]
    """
    both = torch.isin(pair_ids, pair_ids[labels == 1]) & torch.isin(pair_ids, pair_ids[labels == -1])
    return labels.masked_fill(~both | (pair_ids < 0), 0)


def pair_rows(labels: Tensor, pair_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices [P] of the chosen and of the rejected rows of each pair, sorted by pair id.

    Example:
        >>> pair_rows(torch.tensor([-1, 1, 0, 1, -1]), torch.tensor([7, 7, 7, 3, 3]))
        (tensor([3, 1]), tensor([4, 0]))
    """
    chosen, rejected = ((labels == label).nonzero()[:, 0] for label in (1, -1))
    chosen, rejected = (index[pair_ids[index].argsort(stable=True)] for index in (chosen, rejected))
    return chosen, rejected


def shared_lengths(mask: Tensor, pair_ids: Tensor) -> Tensor:
    """[B] tokens of the shorter completion of a row's pair."""
    counts = mask.sum(1)
    same = pair_ids[:, None] == pair_ids[None]
    if not len(counts):
        return counts
    return counts[None].expand(len(counts), -1).masked_fill(~same, mask.shape[1]).amin(1)


def ranked(values: Tensor, index: Tensor, keys: Tensor) -> Tensor:
    """Return the permutation of `index` that sorts its values in ascending order; ties by the rows' keys."""
    by_key = keys[index].argsort(stable=True)
    return by_key[values[by_key].argsort(stable=True)]


# --------------------------------------------------------------------------------------------------------------------
# Losses.

REFERENCE, COUNT = "reference", "reference_count"
"""Keys in an algorithm's state: reference point of the scores, and number of scores in its running mean."""


class PreferenceLoss(Choice):
    """Base class of preference losses, of pairs or of labelled completions."""

    beta: AtLeast0 = default(losses.dpo_loss, "beta")
    """Inverse temperature of the implicit reward."""
    weight: AtLeast0 = 1.0
    """Weight in the sum of several losses."""

    unpaired: ClassVar[bool] = False
    """It takes single labelled completions; pairs are split into these."""
    ranked: ClassVar[bool] = False
    """It matches completions by rank in the whole step."""
    paired: ClassVar[bool] = True
    """It compares the two completions of a pair, so `ld_alpha` is defined."""
    anchored: ClassVar[bool] = False
    """It has a target for the chosen score itself, not only for the margin."""
    bounded: ClassVar[bool] = False
    """It does not decrease beyond some margin."""
    shifted: ClassVar[bool] = False
    """It takes the running mean of rewards as a further argument."""

    def measure(self, scores: Tensor, mismatched: Tensor, state: Mapping[str, float]) -> dict[str, float]:
        """Return the state with the reference point updated from a step's scores, and those of mismatched rows."""
        return {**state}

    def refusal(self, score: PreferenceScore) -> str | None:
        """Return the reason why the loss cannot be combined with a score; None if it can."""
        if score.ld_alpha != 1 and not self.paired:
            return f"ld_alpha: {self.type} has no pairs, and so no shared length"
        if (self.unpaired or self.ranked) and not isinstance(score, LogRatioScore):
            return f"{self.type} needs a reference; score must be log_ratio"
        return None

    def warnings(self, setting: Setting) -> Iterator[str]:
        if self.beta == 0:
            yield "no effect: with beta=0 scores are ignored"
        if self.ranked:
            yield "note: ranks are computed per step, so the loss depends on its pairs (train.rows_per_update)"


class PairLoss(PreferenceLoss):
    """Loss of the margin of a pair: chosen and rejected scores [P] -> [P]."""

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return self.atom(chosen - rejected, **self.settings)


class ScoreLoss(PreferenceLoss):
    """Loss of both scores of a pair: chosen and rejected scores [P] -> [P]."""


class SmoothedLoss(PairLoss):
    """Loss of a pair whose label is wrong at an assumed rate."""

    label_smoothing: AtLeast0 = default(losses.dpo_loss, "label_smoothing")

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        if self.label_smoothing == 0.5:
            yield "no effect: with label_smoothing=0.5 a preference is as likely as its opposite: no signal"
        if self.label_smoothing > 0.5:
            yield "biased: label_smoothing above 0.5 treats most preferences as wrong, and learns the opposite"


class SigmoidLoss(SmoothedLoss, type="sigmoid"):
    """DPO: logistic loss of the margin; with label smoothing e cDPO, with a target margin gamma SimPO."""

    target_margin: AtLeast0 = default(losses.dpo_loss, "target_margin")
    atom = staticmethod(losses.dpo_loss)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        score: PreferenceScore = setting.axes["score"]
        if self.target_margin and isinstance(score, LogRatioScore):
            yield "note: target_margin is from SimPO, for log-probs; with a reference it adds to the reference's margin"
        if score.length_normalised and 0 < self.beta < 1:
            yield "partly without effect: margins per token and beta are small; typical beta: 2 (SimPO) to 5 (Tulu 3)"


class RobustLoss(SmoothedLoss, type="robust"):
    """Robust DPO: unbiased if labels are flipped at a known rate e."""

    label_smoothing: Annotated[AtLeast0, Field(lt=0.5)] = 0.1
    atom = staticmethod(losses.robust_dpo_loss)


class HingeLoss(PairLoss, type="hinge"):
    """Hinge loss: 0 beyond a margin of 1 / beta."""

    bounded = True
    atom = staticmethod(losses.hinge_preference_loss)


class IpoLoss(PairLoss, type="ipo"):
    """IPO: squared distance of the margin from 1 / (2 beta)."""

    bounded = True
    atom = staticmethod(losses.ipo_loss)


class ExoPairLoss(SmoothedLoss, type="exo_pair"):
    """EXO: reverse KL of the model's preference from the smoothed label."""

    label_smoothing: Annotated[AnySign, Field(gt=0, lt=1)] = default(losses.exo_loss, "label_smoothing")
    atom = staticmethod(losses.exo_loss)


class NcaPairLoss(ScoreLoss, type="nca_pair"):
    """NCA, noise-contrastive alignment: also raises the chosen completion's likelihood itself."""

    anchored = True
    atom = staticmethod(losses.nca_loss)


class BcoPairLoss(ScoreLoss, type="bco_pair"):
    """BCO of pairs: a binary classifier of each completion."""

    anchored = True
    atom = staticmethod(losses.bco_pair_loss)


class BcoPairShiftLoss(PairLoss, type="bco_pair_shift"):
    """BCO of pairs with a reward shift, the running mean of rewards: MPO's quality loss."""

    text = "L = -log sigmoid(beta s_c - delta) - log sigmoid(delta - beta s_r),   delta = running mean of beta s"
    latex = (
        r"L = -\log \sigma(\beta s_c - \delta) - \log \sigma(\delta - \beta s_r), \quad \delta = \text{running mean "
        r"of } \beta s"
    )
    needs = frozenset({"old_logprobs", "ref_logprobs"})
    anchored = shifted = True
    made_of = (implicit_reward, bco_loss, running_mean)

    def __call__(self, chosen: Tensor, rejected: Tensor, shift: Tensor | None = None) -> Tensor:
        delta = chosen.new_zeros(()) if shift is None else shift
        rewards = (implicit_reward(scores, self.beta) for scores in (chosen, rejected))
        better, worse = (
            bco_loss(each, torch.full_like(each, good), delta) for each, good in zip(rewards, (1.0, 0.0), strict=True)
        )
        return better + worse

    def measure(self, scores: Tensor, mismatched: Tensor, state: Mapping[str, float]) -> dict[str, float]:
        return _with_running_reward(implicit_reward(scores, self.beta), state)


def _with_running_reward(rewards: Tensor, state: Mapping[str, float]) -> dict[str, float]:
    """Return the state with the running mean of rewards updated by those of a step."""
    if not len(rewards):
        return {**state}
    mean, count = running_mean(rewards.new_tensor(state.get(REFERENCE, 0.0)), state.get(COUNT, 0.0), rewards)
    return {**state, REFERENCE: mean.item(), COUNT: float(count)}


class SppoHardLoss(ScoreLoss, type="sppo_hard"):
    """SPPO with hard labels: a target for each score."""

    anchored = bounded = True
    atom = staticmethod(losses.sppo_loss)


class RankedLoss(SmoothedLoss):
    """Logistic loss of scores or margins of the same rank in the whole step."""

    needs = frozenset({"old_logprobs", "ref_logprobs"})
    ranked = True
    atom = staticmethod(losses.dpo_loss)


class AotLoss(RankedLoss, type="aot"):
    """AOT: the policy's margins against the reference's margins of the same rank in the whole step."""

    text = (
        "L = -(1 - e) log sigmoid(beta D_k) - e log sigmoid(-beta D_k),   D_k = policy margin_(k) - reference "
        "margin_(k)"
    )
    latex = (
        r"L = -(1 - e) \log \sigma(\beta D_{(k)}) - e \log \sigma(-\beta D_{(k)}), \quad D_{(k)} = m^\theta_{(k)} - "
        r"m^{\mathrm{ref}}_{(k)}"
    )

    def refusal(self, score: PreferenceScore) -> str | None:
        if isinstance(score, LogRatioScore) and (score.divergence != "reverse_kl" or score.length_normalised):
            return "aot ranks sums of log-ratios: use reverse_kl, without length_normalised"
        return super().refusal(score)


class AotUnpairedLoss(RankedLoss, type="aot_unpaired"):
    """Unpaired AOT: chosen scores against rejected scores of the same rank in the whole step."""

    text = "L = -(1 - e) log sigmoid(beta D_k) - e log sigmoid(-beta D_k),   D_k = s_c(k) - s_r(k)"
    latex = (
        r"L = -(1 - e) \log \sigma(\beta D_{(k)}) - e \log \sigma(-\beta D_{(k)}), \quad D_{(k)} = s_{c,(k)} - "
        r"s_{r,(k)}"
    )
    paired = False


class ApoZeroLoss(ScoreLoss, type="apo_zero"):
    """APO-zero: chosen up, rejected down; for models worse than the chosen completions."""

    anchored = True
    atom = staticmethod(losses.apo_zero_loss)


class ApoDownLoss(ScoreLoss, type="apo_down"):
    """APO-down: both down, rejected more; for models better than the chosen completions."""

    atom = staticmethod(losses.apo_down_loss)


class DiscopopLoss(PairLoss, type="discopop"):
    """DiscoPOP: a blend of the logistic and the exponential loss, discovered by search."""

    tau: Annotated[AnySign, Field(gt=0)] = default(losses.discopop_loss, "tau")
    atom = staticmethod(losses.discopop_loss)


class OddsRatioLoss(PairLoss, type="odds_ratio"):
    """ORPO: logistic loss of the log-odds ratio of mean log-probs."""

    text = "L = -beta log sigmoid(log odds(s_c) - log odds(s_r)),   odds(s) = exp(s) / (1 - exp(s))"
    latex = r"L = -\beta \log \sigma\Big(\log \frac{e^{s_c}}{1 - e^{s_c}} - \log \frac{e^{s_r}}{1 - e^{s_r}}\Big)"
    anchored = True
    made_of = (log_odds_ratio, losses.odds_ratio_loss)

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return self.beta * losses.odds_ratio_loss(log_odds_ratio(chosen, rejected))

    def refusal(self, score: PreferenceScore) -> str | None:
        if not isinstance(score, LogprobScore) or not score.length_normalised:
            return "odds_ratio needs mean log-probs: {type: logprob, length_normalised: true}"
        return None


class LabelLoss(PreferenceLoss):
    """Loss of completions labelled good (1) or bad (0): scores, labels [N], reference [] -> [N]."""

    unpaired = anchored = True
    paired = False
    needs_mismatched: ClassVar[bool] = False
    """It also scores prompts with completions of other prompts."""


class WeightedLabelLoss(LabelLoss):
    """KTO's loss, with weights of good and of bad completions."""

    desirable_weight: AtLeast0 = default(kto_loss, "desirable_weight")
    undesirable_weight: AtLeast0 = default(kto_loss, "undesirable_weight")
    atom = staticmethod(kto_loss)


class ApoZeroUnpairedLoss(WeightedLabelLoss, type="apo_zero_unpaired"):
    """Unpaired APO-zero: KTO with a reference point of 0."""

    text = "L = w (1 - sigmoid(beta s)) if good, w (1 - sigmoid(-beta s)) if bad"
    latex = r"L = w_y \big(1 - \sigma(\pm\beta s)\big)"


class KtoLoss(WeightedLabelLoss, type="kto"):
    """KTO: good completions above a reference point (the KL, estimated from mismatched completions), bad ones below."""

    text = (
        "L = w (1 - sigmoid(beta (s - z_0))) if good, w (1 - sigmoid(beta (z_0 - s))) if bad,   z_0 = max(0, mean s')"
    )
    latex = r"L = w_y \big(1 - \sigma(\pm\beta (s - z_0))\big), \quad z_0 = \max\big(0, \overline{s'}\big)"
    needs = frozenset({"old_logprobs", "ref_logprobs"})
    needs_mismatched = True
    made_of = (kto_reference, kto_loss)

    def measure(self, scores: Tensor, mismatched: Tensor, state: Mapping[str, float]) -> dict[str, float]:
        if not len(mismatched):
            raise ValueError("kto needs rows of prompts with completions of other prompts (`mismatched`)")
        return {**state, REFERENCE: kto_reference(mismatched).item()}


class BcoLoss(LabelLoss, type="bco"):
    """BCO: a binary classifier, good completions above the running mean of rewards, bad ones below."""

    text = (
        "L = -log sigmoid(beta s - delta) if good, -log sigmoid(delta - beta s) if bad,   delta = running mean of "
        "beta s"
    )
    latex = r"L = -\log \sigma\big(\pm(\beta s - \delta)\big), \quad \delta = \text{running mean of } \beta s"
    needs = frozenset({"old_logprobs", "ref_logprobs"})
    made_of = (implicit_reward, bco_loss, running_mean)

    def __call__(self, scores: Tensor, desirable: Tensor, reference: Tensor) -> Tensor:
        return bco_loss(implicit_reward(scores, self.beta), desirable, reference)

    def measure(self, scores: Tensor, mismatched: Tensor, state: Mapping[str, float]) -> dict[str, float]:
        return _with_running_reward(implicit_reward(scores, self.beta), state)


MarginLosses = SigmoidLoss | RobustLoss | HingeLoss | IpoLoss | ExoPairLoss | DiscopopLoss | OddsRatioLoss
ScoreLosses = NcaPairLoss | BcoPairLoss | BcoPairShiftLoss | SppoHardLoss | ApoZeroLoss | ApoDownLoss
RankedLosses = AotLoss | AotUnpairedLoss
LabelLosses = ApoZeroUnpairedLoss | KtoLoss | BcoLoss
PreferenceLosses = MarginLosses | ScoreLosses | RankedLosses | LabelLosses
