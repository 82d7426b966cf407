"""Token filters: which tokens the policy term is taken over, chosen over all rows of a step."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt
from torch import Tensor

from atomrl.atoms import token_filters
from atomrl.atoms.kl import abs_kl
from atomrl.objectives.advantage import given
from atomrl.objectives.choice import Atoms, Choice, Custom, Setting
from atomrl.objectives.clip import PolicyInputs

Fraction = Annotated[float, Field(ge=0, le=1)]


class FilterInputs(NamedTuple):
    """The inputs of a filter: all rows of a step, [B, T] each, on the CPU. Numbers are float32.

    Those that may be None are there where `reads` (of a custom filter) or `needs` names them.
    """

    mask: Tensor
    """Bool: the tokens that are trained, all of which the model wrote."""
    advantages: Tensor
    """Of each token."""
    old_logprobs: Tensor | None
    """log pi_old of each token in nats, of the policy at the start of the step."""
    old_entropy: Tensor | None
    """Entropy of the distribution that the token was drawn from, at the start of the step, in nats."""
    generator: torch.Generator
    """For random choices, which then are the same in whatever order the rows are and when a run is resumed."""


class TokenFilterChoice(Choice):
    """What all filters have in common: `FilterInputs` -> [B, T] bool, before any split."""

    adds: ClassVar[bool] = False
    """Whether it is a penalty on the chosen tokens, and drops none."""

    def use(self, loss: Tensor, chosen: Tensor, inputs: PolicyInputs) -> Tensor:
        """What it does to the loss per token."""
        return loss.masked_fill(~chosen, 0.0)


class _Share(TokenFilterChoice):
    """A fraction of the step's tokens, or a number of them."""

    fraction: Fraction = 0.2
    tokens: NonNegativeInt | None = None

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield "note: the loss is still divided by all tokens, so the gradient is that much smaller"


class HighEntropy(_Share, type="high_entropy"):
    """High-entropy tokens: the fraction at which the old policy was least sure, or a number of them."""

    text = "[H_{i,t} >= quantile_{1 - fraction}(H)]"
    latex = r"\mathbb{1}[H_{i,t} \ge \operatorname{quantile}_{1-\rho}(H)]"
    needs = frozenset({"old_entropy"})

    def atoms(self) -> Atoms:
        by_share, by_count = token_filters.high_entropy_tokens, token_filters.highest_entropy_tokens
        return (by_share if self.tokens is None else by_count,)

    def __call__(self, inputs: FilterInputs) -> Tensor:
        if self.tokens is not None:
            return token_filters.highest_entropy_tokens(given(inputs.old_entropy), inputs.mask, self.tokens)
        return token_filters.high_entropy_tokens(given(inputs.old_entropy), inputs.mask, self.fraction)


class RandomTokens(_Share, type="random"):
    """Random tokens, as many: the control of `high_entropy`."""

    text = "[t in a random sample]"
    latex = r"\mathbb{1}[t \in \text{random sample}]"
    made_of = (token_filters.random_tokens,)

    def __call__(self, inputs: FilterInputs) -> Tensor:
        count = round(self.fraction * int(inputs.mask.sum())) if self.tokens is None else self.tokens
        return token_filters.random_tokens(inputs.mask, count, inputs.generator)


class ClipCov(TokenFilterChoice, type="clip_cov"):
    """Clip-Cov: all but some tokens, at random, of high covariance between advantage and log-prob."""

    text = (
        "[t not in a random sample of {t : low < cov_t < high}],   cov_t = (A_t - mean A)(log pi_old - mean log "
        "pi_old)"
    )
    latex = r"\mathbb{1}[t \notin \text{sample of } \{t : c_l < \operatorname{cov}_t < c_h\}]"
    fraction: Fraction = 2e-4
    low: NonNegativeFloat = 1.0
    high: NonNegativeFloat = 5.0
    needs = frozenset({"old_logprobs"})
    made_of = (token_filters.token_covariance, token_filters.clip_covariance_tokens)

    def __call__(self, inputs: FilterInputs) -> Tensor:
        mask = inputs.mask
        covariance = token_filters.token_covariance(given(inputs.old_logprobs), inputs.advantages, mask)
        return token_filters.clip_covariance_tokens(
            covariance, mask, mask, self.fraction, self.low, self.high, inputs.generator
        )


class KLCov(TokenFilterChoice, type="kl_cov"):
    """KL-Cov: a KL penalty on the tokens of highest covariance between advantage and log-prob; all are kept."""

    text = "coefficient [t in the highest covariances] |log pi - log pi_old|"
    latex = r"c\,\mathbb{1}[t \in \text{top } \operatorname{cov}]\,|\log \pi_\theta - \log \pi_{\mathrm{old}}|"
    fraction: Fraction = 2e-3
    coefficient: NonNegativeFloat = 1.0
    needs = frozenset({"old_logprobs"})
    adds = True
    made_of = (token_filters.token_covariance, token_filters.highest_covariance_tokens, abs_kl)

    def __call__(self, inputs: FilterInputs) -> Tensor:
        covariance = token_filters.token_covariance(given(inputs.old_logprobs), inputs.advantages, inputs.mask)
        return token_filters.highest_covariance_tokens(covariance, inputs.mask, self.fraction)

    def use(self, loss: Tensor, chosen: Tensor, inputs: PolicyInputs) -> Tensor:
        distance = abs_kl(inputs.logprobs, inputs.old_logprobs, inputs.mask)
        return loss + self.coefficient * distance.masked_fill(~chosen, 0.0)


class CustomFilter(Custom, TokenFilterChoice, type="custom"):
    """Your own function: `FilterInputs` -> [B, T] bool."""

    inputs = FilterInputs

    def check(self, found: Any, inputs: FilterInputs) -> None:
        self.check_tensor(found, (inputs.mask,), "bool")


TokenFilter = HighEntropy | RandomTokens | ClipCov | KLCov | CustomFilter
