"""Megatron's distributed optimizer: AdamW with moments and float32 masters sharded over data-parallel ranks."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atomrl.backends.megatron.gathering import WEIGHT, is_expert
from atomrl.backends.megatron.on_cpu import on_device
from atomrl.backends.optimizer import Optimizer
from atomrl.backends.shards import MOMENTS
from atomrl.config import TrainConfig


class MegatronOptimizer(Optimizer):
    """`Optimizer` of a model that is sharded by Megatron.

    Args:
        model: model wrapped in Megatron's `DistributedDataParallel`.
        name, train, peak, total_updates: arguments of `Optimizer`.
    """

    def __init__(self, name: str, model: Any, train: TrainConfig, peak: float, total_updates: int) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.name, self.train, self.peak, self.total_updates = name, train, peak, total_updates
        self.model, self.skipped_in_a_row, self.steps = model, 0, 0
        self.weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        weight = next(iter(self.weights.values()))
        self.device = weight.device
        settings = OptimizerConfig(
            optimizer="adam",
            lr=peak,
            weight_decay=train.weight_decay,
            adam_beta1=train.adam_beta1,
            adam_beta2=train.adam_beta2,
            adam_eps=train.adam_eps,
            bf16=weight.dtype == torch.bfloat16,
            params_dtype=weight.dtype,
            use_distributed_optimizer=True,
            clip_grad=train.max_grad_norm,
        )
        self.inner: Any = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)

        for adamw in (part.optimizer for part in self.inner.chained_optimizers):
            if isinstance(adamw, torch.optim.AdamW):  # without Apex and Transformer Engine
                for group in adamw.param_groups:
                    group["foreach"], group["fused"] = False, True

    def norm_clipped(self) -> float:
        """Clip the gradient of the full model, of which this rank has a part; return its norm before clipping."""
        with on_device(self.device):
            self.inner.prepare_grads()
            own = [grad for part in self.inner.chained_optimizers for grad in part.get_main_grads_for_grad_norm()]
        # Without Apex, Megatron's own norm syncs with the device once per weight.
        squared = torch.nn.utils.get_total_norm(own, foreach=True).to(self.device) ** 2
        dist.all_reduce(squared, group=self.inner.get_grad_stats_parallel_group())
        norm = math.sqrt(squared.item())
        weights = [weight for part in self.inner.chained_optimizers for weight in part.get_parameters()]
        grads = [weight.grad for weight in weights if weight.grad is not None]
        if norm > self.train.max_grad_norm and grads:
            torch._foreach_mul_(grads, self.train.max_grad_norm / (norm + 1e-6))
        return norm

    def apply(self, rate: float) -> None:
        """Step, and all-gather the updated weights over replicas."""
        for group in self.inner.param_groups:
            group["lr"], group["weight_decay"] = rate, self.train.weight_decay * group["wd_mult"]
        with on_device(self.device):
            self.inner.step_with_ready_grads()
        self.steps += 1

    def zero_grad(self) -> None:
        self.model.zero_grad_buffer()
        self.inner.zero_grad()

    def gather(self, weight: nn.Parameter) -> dict[str, Tensor]:
        """Gather a weight's float32 master and, after the first step, its moments over replicas. Collective."""
        kinds = [WEIGHT, *(MOMENTS if self.steps else ())]
        values = torch.zeros(len(kinds), weight.numel(), device=self.device)
        part = self._part(weight)
        if weight in part.model_param_gbuf_map:
            own, place = _own(part, weight)
            for kind, row in zip(kinds, values, strict=True):
                row[place] = own.detach() if kind == WEIGHT else part.optimizer.state[own][kind]
        dist.all_reduce(values, group=part.data_parallel_group)
        return dict(zip(kinds, values.unflatten(1, weight.shape), strict=True))

    @torch.no_grad()
    def set(self, weight: nn.Parameter, kind: str, tensor: Tensor) -> None:
        """Set a weight (and this rank's shard of its master), or this rank's shard of a moment."""
        if kind == WEIGHT:
            weight.copy_(tensor)
        part = self._part(weight)
        if weight in part.model_param_gbuf_map:
            own, place = _own(part, weight)
            shard = tensor.flatten()[place].to(self.device)
            if kind == WEIGHT:
                own.copy_(shard)
            else:
                part.optimizer.state[own][kind] = shard.clone()

    def reset(self, steps: int) -> None:
        """Clear the moments and set the step count."""
        self.steps = steps
        for part in self.inner.chained_optimizers:
            part.optimizer.state.clear()
            for group in part.optimizer.param_groups:
                if not isinstance(part.optimizer, torch.optim.AdamW):  # Apex and Transformer Engine count per group
                    group["step"] = steps
                    continue
                for own in group["params"] if steps else ():
                    part.optimizer.state[own]["step"] = torch.tensor(float(steps), device=self.device)

    def _part(self, weight: nn.Parameter) -> Any:
        """Return Megatron's optimizer of a weight; experts have their own."""
        return self.inner.chained_optimizers[-1 if is_expert(weight) else 0]


def _own(part: Any, weight: nn.Parameter) -> tuple[Tensor, slice]:
    """Return this rank's float32 shard of a weight, and its slice of the flattened weight."""
    group, place = part.model_param_group_index_map[weight]
    numbers = part._get_model_param_range_map(weight)["param"]
    return part.optimizer.param_groups[group]["params"][place], slice(numbers.start, numbers.end)
