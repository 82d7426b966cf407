"""The scores of completions, and the likelihood of the chosen ones: axes of a preference objective."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from torch import Tensor

from atomrl.atoms import preference_scores as scores
from atomrl.atoms.masks import row_mean, row_sum
from atomrl.atoms.supervised_losses import nll_loss
from atomrl.batches import RowBatch
from atomrl.devices import sent
from atomrl.objective.advantage_inputs import given
from atomrl.objective.choice import Atoms, Choice, Formula, Setting
from atomrl.objective.pairing import shared_lengths

AnySign = Annotated[float, Field(allow_inf_nan=False)]
AtLeast0 = Annotated[AnySign, Field(ge=0)]


class PreferenceScore(Choice):
    """What is compared of two completions: log-probs [B, T] of rows -> [B]."""

    ld_alpha: AtLeast0 = 1.0
    """Below 1, what one completion is longer than the other counts less (LD-DPO)."""
    length_normalised: bool = False
    """Per token."""

    def atoms(self) -> Atoms:
        sums = row_sum if self.ld_alpha == 1 else scores.length_desensitised_logprob
        return (sums, scores.length_normalised) if self.length_normalised else (sums,)

    def sums(self, logprobs: Tensor | None, rows: RowBatch) -> Tensor:
        """[B] log-probs of the rows' trained tokens, as the score counts them."""
        mask = rows.loss_mask
        if self.ld_alpha == 1 or rows.pair_ids is None:
            return row_sum(given(logprobs), mask)
        shared = shared_lengths(mask, sent(rows.pair_ids, mask.device))
        return scores.length_desensitised_logprob(given(logprobs), mask, shared, self.ld_alpha)

    def where(self) -> tuple[Formula, ...]:
        lines = []
        if self.ld_alpha != 1:
            surplus = "tokens beyond the shorter completion's length count"
            lines.append(Formula(f"{surplus} alpha", rf"\text{{{surplus} }} \alpha"))
        if self.length_normalised:
            lines.append(Formula("s <- s / |y|", r"s \leftarrow s / |y|"))
        return tuple(lines)


class LogRatioScore(PreferenceScore, type="log_ratio"):
    r"""The log-ratio to the reference, which holds the policy: the implicit reward is beta times it.

        s(y) = log pi(y) - log pi_ref(y)

    LaTeX: s(y) = \log \frac{\pi_\theta(y)}{\pi_{\mathrm{ref}}(y)}
    """

    divergence: scores.Divergence = "reverse_kl"
    """Another than the reverse KL is f-DPO."""
    alpha: AnySign = 1.0
    """Of `alpha_divergence`."""
    needs = frozenset({"ref_logprobs"})

    def atoms(self) -> Atoms:
        return super().atoms() if self.divergence == "reverse_kl" else (*super().atoms(), scores.f_divergence_score)

    def __call__(self, logprobs: Tensor | None, rows: RowBatch) -> Tensor:
        ratio = self.sums(logprobs, rows) - self.sums(rows.ref_logprobs, rows)
        score = scores.f_divergence_score(ratio, self.divergence, self.alpha)
        return scores.length_normalised(score, rows.loss_mask.sum(1)) if self.length_normalised else score

    def where(self) -> tuple[Formula, ...]:
        bent = Formula(f"s <- f'(exp(s)) of the {self.divergence}", r"s \leftarrow f'(e^s)")
        return super().where() if self.divergence == "reverse_kl" else (bent, *super().where())

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield "note: a frozen copy of the start is loaded as the reference (none with model.lora)"


class LogprobScore(PreferenceScore, type="logprob"):
    r"""The log-prob itself: no reference is loaded, and none holds the policy.

        s(y) = log pi(y)

    LaTeX: s(y) = \log \pi_\theta(y)
    """

    shape: AnySign = 0.0
    """Bends the log-prob (AlphaPO)."""

    def atoms(self) -> Atoms:
        return (*super().atoms(), scores.alpha_score) if self.shape else super().atoms()

    def __call__(self, logprobs: Tensor | None, rows: RowBatch) -> Tensor:
        score = self.sums(logprobs, rows)
        return scores.alpha_score(
            scores.length_normalised(score, rows.loss_mask.sum(1)) if self.length_normalised else score, self.shape
        )

    def where(self) -> tuple[Formula, ...]:
        bent = Formula("s <- (1 - exp(-shape s)) / shape", r"s \leftarrow (1 - e^{-a s}) / a")
        return (*super().where(), bent) if self.shape else super().where()

    def warnings(self, setting: Setting) -> Iterator[str]:
        if not self.length_normalised:
            yield "biased: a sum of log-probs is lower for a longer completion, whatever it says (length_normalised)"
        if not setting.axes["nll"].coefficient and not all(loss.bounded for loss in setting.axes["loss"]):
            yield "unstable: neither a reference nor a likelihood holds the policy; a small learning rate has to"


Score = LogRatioScore | LogprobScore


class ChosenNll(Choice):
    """Supervised training on the chosen completions beside the preference (`sft` in TRL's losses; RPO).

    Log-probs and mask [P, T], and the mean length of chosen completions in the whole step -> [P].
    """

    coefficient: AtLeast0 = 0.0


class TokenMeanNll(ChosenNll, type="token_mean"):
    r"""The negative log-likelihood of chosen completions, every token weighing the same.

        NLL = -log pi(y_c) / mean |y_c|

    LaTeX: \mathrm{NLL} = -\log \pi_\theta(y_c) / \overline{|y_c|}
    """

    made_of = (nll_loss, row_sum)

    def __call__(self, logprobs: Tensor, mask: Tensor, mean_tokens: float) -> Tensor:
        return row_sum(nll_loss(logprobs, mask), mask) / mean_tokens


class SequenceMeanNll(ChosenNll, type="sequence_mean"):
    r"""The negative log-likelihood per token of chosen completions, every completion weighing the same.

        NLL = -log pi(y_c) / |y_c|

    LaTeX: \mathrm{NLL} = -\log \pi_\theta(y_c) / |y_c|
    """

    made_of = (nll_loss, row_mean)

    def __call__(self, logprobs: Tensor, mask: Tensor, mean_tokens: float) -> Tensor:
        return row_mean(nll_loss(logprobs, mask), mask)


Nll = TokenMeanNll | SequenceMeanNll
