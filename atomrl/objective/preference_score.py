"""The scores of completions, and the likelihood of the chosen ones: axes of a preference objective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from atomrl.atoms.masks import row_mean, row_sum
from atomrl.atoms.preference_scores import (
    Divergence,
    alpha_score,
    f_divergence_score,
    length_desensitised_logprob,
    length_normalised,
)
from atomrl.atoms.supervised_losses import nll_loss
from atomrl.objective.advantage_inputs import given
from atomrl.objective.choice import Choice, Formula, Setting

AnySign = Annotated[float, Field(allow_inf_nan=False)]
AtLeast0 = Annotated[AnySign, Field(ge=0)]


class PreferenceScore(Choice):
    """What is compared of two completions, [B]."""

    ld_alpha: AtLeast0 = 1.0
    """Below 1, what one completion is longer than the other counts less (LD-DPO)."""
    length_normalised: bool = False
    """Per token."""

    def sums(self, logprobs: Tensor, mask: Tensor, shared_length: Tensor) -> Tensor:
        """[B] log-probs of completions. `shared_length` [B]: tokens of the shorter completion of a pair."""
        if self.ld_alpha == 1:
            return row_sum(logprobs, mask)
        return length_desensitised_logprob(logprobs, mask, shared_length, self.ld_alpha)

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor, shared_length: Tensor) -> Tensor:
        raise NotImplementedError

    def equation(self) -> Formula:
        text, latex = self.text, self.latex
        if self.ld_alpha != 1:
            text += " (the longer one's surplus times alpha)"
            latex += r"\ \text{(the longer one's surplus times } \alpha)"
        for more in self.notes():
            text, latex = text + ",   " + more.text, latex + r",\ " + more.latex
        return Formula(text, latex)

    def notes(self) -> Iterator[Formula]:
        """What the fields make of the score."""
        if self.length_normalised:
            yield Formula("s <- s / |y|", r"s \leftarrow s / |y|")

    def used_atoms(self) -> tuple[Callable[..., Any], ...]:
        off = {length_desensitised_logprob} if self.ld_alpha == 1 else {row_sum}
        return tuple(atom for atom in self.atoms if atom not in off | self.unused_atoms())

    def unused_atoms(self) -> set[Callable[..., Any]]:
        """Those that the fields leave without effect."""
        return set() if self.length_normalised else {length_normalised}


class LogRatioScore(PreferenceScore):
    r"""The log-ratio to the reference, which holds the policy: the implicit reward is beta times it.

        s(y) = log pi(y) - log pi_ref(y)

    LaTeX: s(y) = \log \frac{\pi_\theta(y)}{\pi_{\mathrm{ref}}(y)}
    """

    type: Literal["log_ratio"] = "log_ratio"
    divergence: Divergence = "reverse_kl"
    """Another than the reverse KL is f-DPO."""
    alpha: AnySign = 1.0
    """Of `alpha_divergence`."""
    atoms = (row_sum, length_desensitised_logprob, f_divergence_score, length_normalised)
    needs = frozenset({"ref_logprobs"})

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor, shared_length: Tensor) -> Tensor:
        ratio = self.sums(logprobs, mask, shared_length) - self.sums(given(ref_logprobs), mask, shared_length)
        score = f_divergence_score(ratio, self.divergence, self.alpha)
        return length_normalised(score, mask.sum(1)) if self.length_normalised else score

    def notes(self) -> Iterator[Formula]:
        if self.divergence != "reverse_kl":
            yield Formula(f"s <- f'(exp(s)) of the {self.divergence}", r"s \leftarrow f'(e^s)")
        yield from super().notes()

    def unused_atoms(self) -> set[Callable[..., Any]]:
        return super().unused_atoms() | ({f_divergence_score} if self.divergence == "reverse_kl" else set())

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield "note: a frozen copy of the start is loaded as the reference (none with model.lora)"


class LogprobScore(PreferenceScore):
    r"""The log-prob itself: no reference is loaded, and none holds the policy.

        s(y) = log pi(y)

    LaTeX: s(y) = \log \pi_\theta(y)
    """

    type: Literal["logprob"] = "logprob"
    shape: AnySign = 0.0
    """Bends the log-prob (AlphaPO)."""
    atoms = (row_sum, length_desensitised_logprob, length_normalised, alpha_score)

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor, shared_length: Tensor) -> Tensor:
        score = self.sums(logprobs, mask, shared_length)
        return alpha_score(length_normalised(score, mask.sum(1)) if self.length_normalised else score, self.shape)

    def notes(self) -> Iterator[Formula]:
        yield from super().notes()
        if self.shape:
            yield Formula("s <- (1 - exp(-shape s)) / shape", r"s \leftarrow (1 - e^{-a s}) / a")

    def unused_atoms(self) -> set[Callable[..., Any]]:
        return super().unused_atoms() | (set() if self.shape else {alpha_score})

    def warnings(self, setting: Setting) -> Iterator[str]:
        if not self.length_normalised:
            yield "biased: a sum of log-probs is lower for a longer completion, whatever it says (length_normalised)"
        if not setting.axes["nll"].coefficient and not all(loss.bounded for loss in setting.axes["loss"]):
            yield "unstable: neither a reference nor a likelihood holds the policy; a small learning rate has to"


Score = Annotated[LogRatioScore | LogprobScore, Field(discriminator="type")]


class ChosenNll(Choice):
    """Supervised training on the chosen completions beside the preference (`sft` in TRL's losses; RPO)."""

    coefficient: AtLeast0 = 0.0

    def __call__(self, logprobs: Tensor, mask: Tensor, mean_tokens: float) -> Tensor:
        """Of chosen completions [P, T], whose mean length in the whole step is `mean_tokens` -> [P]."""
        raise NotImplementedError


class TokenMeanNll(ChosenNll):
    r"""The negative log-likelihood of chosen completions, every token weighing the same.

        NLL = -log pi(y_c) / mean |y_c|

    LaTeX: \mathrm{NLL} = -\log \pi_\theta(y_c) / \overline{|y_c|}
    """

    type: Literal["token_mean"] = "token_mean"
    atoms = (nll_loss, row_sum)

    def __call__(self, logprobs: Tensor, mask: Tensor, mean_tokens: float) -> Tensor:
        return row_sum(nll_loss(logprobs, mask), mask) / mean_tokens


class SequenceMeanNll(ChosenNll):
    r"""The negative log-likelihood per token of chosen completions, every completion weighing the same.

        NLL = -log pi(y_c) / |y_c|

    LaTeX: \mathrm{NLL} = -\log \pi_\theta(y_c) / |y_c|
    """

    type: Literal["sequence_mean"] = "sequence_mean"
    atoms = (nll_loss, row_mean)

    def __call__(self, logprobs: Tensor, mask: Tensor, mean_tokens: float) -> Tensor:
        return row_mean(nll_loss(logprobs, mask), mask)


Nll = Annotated[TokenMeanNll | SequenceMeanNll, Field(discriminator="type")]
