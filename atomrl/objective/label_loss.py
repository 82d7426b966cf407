"""Preference losses of completions that are labelled good or bad one by one: the same axis as those of pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor

from atomrl.atoms.preference_scores import implicit_reward
from atomrl.atoms.unpaired_losses import bco_loss, kto_loss, kto_reference, running_mean
from atomrl.objective.preference_loss import PreferenceLoss
from atomrl.objective.preference_score import AtLeast0

REFERENCE, COUNT = "reference", "reference_count"
"""In an algorithm's state: what scores are compared with, and how many of them it is the mean of."""


class LabelLoss(PreferenceLoss):
    """The loss of completions that are good (1) or bad (0) by themselves: scores, labels [N], reference [] -> [N]."""

    unpaired = anchored = True
    paired = False
    needs_mismatched: ClassVar[bool] = False
    """Whether prompts with the completions of other prompts are scored beside those that are trained on."""

    def __call__(self, scores: Tensor, desirable: Tensor, reference: Tensor) -> Tensor:
        raise NotImplementedError

    def measure(self, scores: Tensor, mismatched: Tensor, state: Mapping[str, float]) -> dict[str, float]:
        """The state with what the scores of a whole step, and of its mismatched rows, say of the reference point."""
        return {**state}


class WeightedLabelLoss(LabelLoss):
    """KTO's loss, with weights of good and of bad completions."""

    desirable_weight: AtLeast0 = 1.0
    undesirable_weight: AtLeast0 = 1.0

    def __call__(self, scores: Tensor, desirable: Tensor, reference: Tensor) -> Tensor:
        return kto_loss(scores, desirable, reference, **self.settings)


class ApoZeroUnpairedLoss(WeightedLabelLoss):
    r"""KTO with a reference point of 0.

        L = w (1 - sigmoid(beta s)) if good, w (1 - sigmoid(-beta s)) if bad

    LaTeX: L = w_y \big(1 - \sigma(\pm\beta s)\big)
    """

    type: Literal["apo_zero_unpaired"] = "apo_zero_unpaired"


class KtoLoss(WeightedLabelLoss):
    r"""Good completions above a reference point, the KL as completions of other prompts tell it, and bad ones below.

        L = w (1 - sigmoid(beta (s - z_0))) if good, w (1 - sigmoid(beta (z_0 - s))) if bad,   z_0 = max(0, mean s')

    LaTeX: L = w_y \big(1 - \sigma(\pm\beta (s - z_0))\big), \quad z_0 = \max\big(0, \overline{s'}\big)
    """

    type: Literal["kto"] = "kto"
    needs = frozenset({"old_logprobs", "ref_logprobs"})
    needs_mismatched = True

    def measure(self, scores: Tensor, mismatched: Tensor, state: Mapping[str, float]) -> dict[str, float]:
        if not len(mismatched):
            raise ValueError("kto needs rows of prompts with completions of other prompts (`mismatched`)")
        return {**state, REFERENCE: kto_reference(mismatched).item()}


class BcoLoss(LabelLoss):
    r"""A binary classifier: good completions above the running mean of rewards, bad ones below.

        L = -log sigmoid(beta s - delta) if good, -log sigmoid(delta - beta s) if bad,   delta = running mean of beta s

    LaTeX: L = -\log \sigma\big(\pm(\beta s - \delta)\big), \quad \delta = \text{running mean of } \beta s
    """

    type: Literal["bco"] = "bco"
    needs = frozenset({"old_logprobs", "ref_logprobs"})

    def __call__(self, scores: Tensor, desirable: Tensor, reference: Tensor) -> Tensor:
        return bco_loss(implicit_reward(scores, self.beta), desirable, reference)

    def measure(self, scores: Tensor, mismatched: Tensor, state: Mapping[str, float]) -> dict[str, float]:
        if not len(scores):
            return {**state}
        rewards = implicit_reward(scores, self.beta)
        before = rewards.new_tensor(state.get(REFERENCE, 0.0))
        mean, count = running_mean(before, state.get(COUNT, 0.0), rewards)
        return {**state, REFERENCE: mean.item(), COUNT: float(count)}


LabelLosses = ApoZeroUnpairedLoss | KtoLoss | BcoLoss
