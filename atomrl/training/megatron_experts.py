"""How evenly tokens are spread over the experts of a mixture."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from atomrl.batches import RowBatch
from atomrl.devices import sent
from atomrl.metrics import Mean, Metrics
from atomrl.models.shared_prefix import Stream

Routing = Callable[..., tuple[Tensor, Tensor]]


def _logits(router: Any, x: Tensor) -> Tensor:
    """In float32, as Megatron's own, which without Transformer Engine asks for what it has not imported."""
    return F.linear(x.float(), router.weight.float())


class Balance:
    """Counts which experts the layers of a stage choose for the tokens that a loss depends on.

    Those are a row's up to the last one that is masked; no prompt is shared, so the split of rows changes nothing.

    Args:
        layers: Megatron's, of this stage.
        total: layers of the model.
        experts: of a layer.
    """

    def __init__(self, layers: Sequence[Any], total: int, experts: int) -> None:
        self._sums = torch.zeros(total, 2, experts, device=layers[0].mlp.router.weight.device)
        self._counted: Tensor | None = None
        for layer in layers:
            router = layer.mlp.router
            router.gating = partial(_logits, router)
            router.routing = partial(self._route, router.routing, layer.layer_number - 1)

    def begin(self, micro: RowBatch, stream: Stream, padding: tuple[int, int], rank: int, tensor: int) -> None:
        """Count from here on, where there is a gradient: this tensor-parallel rank's part of a stream."""
        if not torch.is_grad_enabled():
            return
        width = micro.tokens.shape[1]
        ends = sent((micro.loss_mask * torch.arange(width)).amax(1), stream.positions.device)
        there = stream.positions < ends[stream.source // (width + 1)]
        self._counted = F.pad(there, padding).chunk(tensor)[rank].float()

    def end(self) -> None:
        """Count no more: layers that are computed again were counted before."""
        self._counted = None

    def _route(self, routing: Routing, layer: int, logits: Tensor, **named: Any) -> Any:
        probs, chosen = routing(logits, **named)
        if self._counted is not None:
            wanted = logits.detach().view(chosen.shape).float().softmax(-1)
            self._sums[layer] += torch.stack([self._counted @ chosen.float(), self._counted @ wanted])
        return probs, chosen

    def metrics(self) -> Metrics:
        """Of all ranks since the last call, the mean over layers.

        With f_e the share of choices that are expert e's, p_e its mean probability over all experts, and E experts:

            moe/load_balancing_loss = E sum_e f_e p_e                     1: balanced (Switch Transformer)
            moe/max_load            = E max_e f_e                         1: balanced
            moe/idle_experts        = share of experts without a token

        All ranks call it.
        """
        dist.all_reduce(self._sums)
        chosen, wanted = self._sums.unbind(1)
        f, p = (sums / sums.sum(1, keepdim=True).clamp(min=1e-9) for sums in (chosen, wanted))
        experts = chosen.shape[1]
        found: Metrics = {
            "moe/load_balancing_loss": Mean((f * p).sum(1).mean() * experts),
            "moe/max_load": Mean(f.amax(1).mean() * experts),
            "moe/idle_experts": Mean((chosen == 0).float().mean()),
        }
        self._sums.zero_()
        return found
