"""What an update sees of the tokens of some rows, kept as it goes by: no second forward pass, and no second loss."""

from dataclasses import replace

import torch
from torch import Tensor

from atomrl.batches import TrainingBatch
from atomrl.devices import sent
from atomrl.protocols import Algorithm, ModelOutputs
from atomrl.training.collective import Collective


class WatchedTokens:
    """Numbers of the tokens of a batch's `recorded` rows.

    The loss is linear in its weights, so a token's part of it is its weight times the loss's derivative in that weight;
    this and the derivative in the log-probs come with the backward pass that is made anyhow.

    Args:
        batch: with `recorded`.
        device: of its micro-batches.
    """

    def __init__(self, batch: TrainingBatch, device: torch.device) -> None:
        assert batch.recorded is not None
        self.recorded, self.device = batch.recorded, device
        self.shape = int(batch.recorded.max()) + 1, batch.tokens.shape[1]
        self._kept: dict[str, Tensor] = {}

    def begin(self, micro: TrainingBatch, outputs: ModelOutputs) -> TrainingBatch:
        """The micro-batch as the loss is to take it."""
        if outputs.logprobs is not None and outputs.logprobs.requires_grad:
            outputs.logprobs.retain_grad()
        return replace(micro, loss_weights=micro.loss_weights.detach().requires_grad_())

    def end(self, index: Tensor, micro: TrainingBatch, outputs: ModelOutputs, algorithm: Algorithm) -> None:
        """Keep what there is after the backward pass.

        Args:
            index: the rows of the micro-batch in the batch; none where it only keeps other ranks company.
        """
        chosen = (self.recorded[index] >= 0).nonzero()[:, 0]
        places, rows = (sent(part, self.device) for part in (self.recorded[index][chosen], chosen))
        found = {**self._found(micro, outputs), **algorithm.by_token(outputs, micro)}
        for name, values in found.items():
            whole = self._kept.setdefault(name, torch.zeros(self.shape, device=self.device))
            if len(chosen):
                whole[places, : values.shape[1]] = values.detach()[rows].float()

    def _found(self, micro: TrainingBatch, outputs: ModelOutputs) -> dict[str, Tensor]:
        weights, logprobs, found = micro.loss_weights, outputs.logprobs, dict[str, Tensor]()
        assert logprobs is not None
        found["logprobs"] = logprobs
        found["gradient"] = torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad
        if weights.grad is not None:  # else the loss is not one by token
            found["loss"] = weights * weights.grad
        if outputs.entropy is not None:
            found["entropy"] = outputs.entropy
        return found

    def numbers(self, collective: Collective) -> dict[str, Tensor]:
        """Those of all ranks, by name, [R, T] in the order of the rows' numbers; of a pipeline the last has any."""
        nothing = torch.zeros(self.shape, device=self.device)
        names = collective.union(self._kept)
        if not names:
            return {}
        found = torch.stack([self._kept.get(name, nothing) for name in names])
        return dict(zip(names, collective.total(found).cpu(), strict=True))
