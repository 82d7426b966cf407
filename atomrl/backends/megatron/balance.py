"""Balance the load of experts: the number of tokens that each one gets."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from atomrl.batches import RowBatch
from atomrl.common.devices import to_device
from atomrl.common.metrics import Mean, Metrics
from atomrl.models.stream import Stream

Routing = Callable[..., tuple[Tensor, Tensor]]


def _logits(router: Any, x: Tensor) -> Tensor:
    """Router logits in float32. Megatron's own code for this fails without Transformer Engine."""
    return F.linear(x.float(), router.weight.float())


class Balance:
    """Counts the tokens of each expert in the layers of a stage.

    Counted are tokens that the loss depends on: those of a row up to its last masked one. Prompts are not shared with
    experts, so the counts do not depend on the split into micro-batches.

    Args:
        layers: Megatron's layers of this stage.
        total: number of layers of the full model.
        experts: number of experts per layer.
    """

    def __init__(self, layers: Sequence[Any], total: int, experts: int) -> None:
        self._sums = torch.zeros(total, 2, experts, device=layers[0].mlp.router.weight.device)
        self._counted: Tensor | None = None
        for layer in layers:
            router = layer.mlp.router
            router.gating = partial(_logits, router)
            router.routing = partial(self._route, router.routing, layer.layer_number - 1)

    def begin(self, micro: RowBatch, stream: Stream, padding: tuple[int, int], rank: int, tensor: int) -> None:
        """Start counting this tensor-parallel rank's tokens of a stream; only in passes with gradient."""
        if not torch.is_grad_enabled():
            return
        width = micro.tokens.shape[1]
        ends = to_device((micro.loss_mask * torch.arange(width)).amax(1), stream.positions.device)
        counted = stream.positions < ends[stream.source // (width + 1)]
        self._counted = F.pad(counted, padding).chunk(tensor)[rank].float()

    def end(self) -> None:
        """Stop counting, because checkpointed layers are recomputed in the backward pass."""
        self._counted = None

    def _route(self, routing: Routing, layer: int, logits: Tensor, **named: Any) -> Any:
        probs, chosen = routing(logits, **named)
        if self._counted is not None:
            wanted = logits.detach().view(chosen.shape).float().softmax(-1)
            self._sums[layer] += torch.stack([self._counted @ chosen.float(), self._counted @ wanted])
        return probs, chosen

    def metrics(self) -> Metrics:
        """Return metrics of all ranks since the last call, averaged over layers. Collective.

        With f_e the share of tokens routed to expert e, p_e its mean router probability, and E experts:

            moe/load_balancing_loss = E sum_e f_e p_e                     1: balanced (Switch Transformer)
            moe/max_load            = E max_e f_e                         1: balanced
            moe/idle_experts        = share of experts without a token
        """
        dist.all_reduce(self._sums)
        chosen, wanted = self._sums.unbind(1)
        f, p = (sums / sums.sum(1, keepdim=True).clamp(min=1e-9) for sums in (chosen, wanted))
        experts = chosen.shape[1]
        metrics: Metrics = {
            "moe/load_balancing_loss": Mean((f * p).sum(1).mean() * experts),
            "moe/max_load": Mean(f.amax(1).mean() * experts),
            "moe/idle_experts": Mean((chosen == 0).float().mean()),
        }
        self._sums.zero_()
        return metrics
