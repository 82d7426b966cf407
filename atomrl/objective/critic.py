"""The axes of what is learned beside the surrogate: a critic's values, and a bonus for entropy.

A critic is there where the advantage reads `values`; its weights and its optimizer are its own, so that the value
loss and the policy's terms share no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from atomrl.atoms.logprobs import fused_token_logprobs
from atomrl.atoms.reductions import weighted_sum
from atomrl.atoms.value_losses import clipped_value_loss, clipped_values
from atomrl.metrics import Mean, Metrics, Sum
from atomrl.objective.axis import Axis
from atomrl.stages import TrainingBatch


class Predictions(NamedTuple):
    """What a value loss sees, all [B, T]."""

    values: Tensor
    old_values: Tensor
    returns: Tensor
    mask: Tensor


def _clipped(p: Predictions, *, coefficient: float = 1.0, clip: float = 0.2) -> tuple[Tensor, Tensor]:
    r"""Half the squared error, no gradient to a value that has moved `clip` towards its return or past it.

        max((v - R)^2, (clip(v, V - clip, V + clip) - R)^2) / 2

    LaTeX: \tfrac12 \max\big((v_{i,t} - R_{i,t})^2, (\operatorname{clip}(v_{i,t}, V_{i,t} - \epsilon_v, V_{i,t} +
        \epsilon_v) - R_{i,t})^2\big)
    """
    return clipped_value_loss(*p, clip), clipped_values(*(item.detach() for item in p), clip)


def _squared(p: Predictions, *, coefficient: float = 1.0) -> tuple[Tensor, Tensor]:
    r"""Half the squared error.

        (v - R)^2 / 2

    LaTeX: \tfrac12 (v_{i,t} - R_{i,t})^2
    """
    return clipped_value_loss(*p, None), torch.zeros_like(p.mask)


VALUE_LOSSES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"clipped": _clipped, "squared": _squared}


class Value(Axis):
    """What the critic's prediction costs: `Predictions` -> loss per token, and where a clip acts. The coefficient
    multiplies it. Without an advantage that reads `values` there is no critic."""

    label, kinds, default = "value", VALUE_LOSSES, "clipped"

    def loss(self, values: Tensor | None, batch: TrainingBatch) -> tuple[Tensor, Metrics]:
        """The critic's loss on one micro-batch: a weighted sum, with the weights of the policy's.

        Args:
            values: of the forward pass, with gradient.
            batch: rows of an optimizer step, with the values of the start of the step and the returns.
        """
        assert values is not None and batch.values is not None and batch.returns is not None, "as `needs` asks"
        mask = batch.loss_mask
        per_token_loss, clipped = self(Predictions(values, batch.values, batch.returns, mask))
        loss = weighted_sum(per_token_loss, batch.loss_weights)
        tokens = float(mask.sum())
        metrics: Metrics = {
            "critic/vf_loss": Sum(loss.item()),
            "critic/vf_clipfrac": Mean(float((clipped & mask).sum()), tokens),
            "critic/vpred_mean": Mean(values.detach().masked_fill(~mask, 0.0).sum().item(), tokens),
        }
        return self.coefficient * loss, metrics


def _bonus(entropy: Tensor, *, coefficient: float = 0.0) -> Tensor:
    r"""The entropy of the distribution that each token was drawn from.

        H_{i,t} = - sum_v pi(v) log pi(v)

    LaTeX: \mathcal{H}_{i,t} = -\sum_v \pi_\theta(v) \log \pi_\theta(v)
    """
    return entropy


_bonus.atoms = (fused_token_logprobs,)  # type: ignore[attr-defined]


class Entropy(Axis):
    """A bonus for distributions that are not sure: [B, T] nats of the forward pass, in the loss with minus the
    coefficient."""

    label, kinds, default = "entropy", {"bonus": _bonus}, "bonus"

    def loss(self, entropy: Tensor | None, batch: TrainingBatch) -> tuple[Tensor, Metrics]:
        """What the bonus adds to the loss of one micro-batch.

        Args:
            entropy: of the forward pass, with gradient.
            batch: rows of an optimizer step.
        """
        assert entropy is not None, "the back end gives what `outputs` names"
        mean = weighted_sum(self(entropy), batch.loss_weights)
        return -self.coefficient * mean, {"actor/entropy_loss": Sum(mean.item())}
