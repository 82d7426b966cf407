"""Per-token records of an update, without a second forward pass or a second loss."""

from dataclasses import replace

import torch
from torch import Tensor

from atomrl.backends.collective import Collective
from atomrl.batches import TrainingBatch
from atomrl.common.threads import to_device
from atomrl.protocols import LossOutput, ModelOutputs


class TokenRecorder:
    """Records per-token values of a batch's `recorded` rows during the update's own passes.

    The loss is linear in its weights, so a token's part of the loss is its weight times the derivative with respect to
    that weight. The backward pass of the update computes this derivative and the one with respect to the log-probs.

    Args:
        batch: a batch with `recorded`.
        device: device of its micro-batches.
    """

    def __init__(self, batch: TrainingBatch, device: torch.device) -> None:
        assert batch.recorded is not None
        self.recorded, self.device = batch.recorded, device
        self.shape = int(batch.recorded.max()) + 1, batch.tokens.shape[1]
        self._values: dict[str, Tensor] = {}

    def before_loss(self, micro: TrainingBatch, outputs: ModelOutputs) -> TrainingBatch:
        """Return the micro-batch with loss weights that require a gradient, and retain the gradient of log-probs."""
        if outputs.logprobs is not None and outputs.logprobs.requires_grad:
            outputs.logprobs.retain_grad()
        return replace(micro, loss_weights=micro.loss_weights.detach().requires_grad_())

    def after_backward(self, index: Tensor, micro: TrainingBatch, outputs: ModelOutputs, result: LossOutput) -> None:
        """Record the values of a micro-batch.

        Args:
            index: indices of its rows in the batch; empty if the micro-batch only fills up this rank's share.
            result: its loss, after the backward pass.
        """
        chosen = (self.recorded[index] >= 0).nonzero()[:, 0]
        places, rows = (to_device(part, self.device) for part in (self.recorded[index][chosen], chosen))
        for name, values in (_token_values(micro, outputs) | dict(result.by_token)).items():
            recorded = self._values.setdefault(name, torch.zeros(self.shape, device=self.device))
            if len(chosen):
                recorded[places, : values.shape[1]] = values.detach()[rows].float()

    def gather(self, collective: Collective) -> dict[str, Tensor]:
        """Return the values of all ranks by name, [R, T] in the order of `recorded`.

        With pipeline parallelism only the last stage has recorded any.
        """
        names = collective.union(self._values)
        if not names:
            return {}
        empty = torch.zeros(self.shape, device=self.device)
        values = torch.stack([self._values.get(name, empty) for name in names])
        return dict(zip(names, collective.total(values).cpu(), strict=True))


def _token_values(micro: TrainingBatch, outputs: ModelOutputs) -> dict[str, Tensor]:
    """Return log-probs, their gradient, the loss and the entropy of each token, [B, T] each."""
    weights, logprobs = micro.loss_weights, outputs.logprobs
    assert logprobs is not None
    gradient = torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad
    values = {"logprobs": logprobs, "gradient": gradient}
    if weights.grad is not None:  # None: the loss is not a sum over tokens
        values["loss"] = weights * weights.grad
    if outputs.entropy is not None:
        values["entropy"] = outputs.entropy
    return values
