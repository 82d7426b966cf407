"""Megatron's distributed optimizer: AdamW whose moments, and float32 weights, are shared by the copies of a model."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atomrl.config import TrainConfig
from atomrl.training.megatron_cpu import on_device
from atomrl.training.megatron_shares import WEIGHT, is_expert
from atomrl.training.optimizer import Optimizer
from atomrl.training.shards import MOMENTS


class MegatronOptimizer(Optimizer):
    """As `Optimizer`, of a model in parts.

    Args:
        model: wrapped in Megatron's `DistributedDataParallel`.
        name, train, peak, total_updates: as of `Optimizer`.
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
        """Of the gradient of the whole model, of which this rank has a part."""
        with on_device(self.device):
            self.inner.prepare_grads()
            own = [grad for part in self.inner.chained_optimizers for grad in part.get_main_grads_for_grad_norm()]
        # Megatron's own norm, without Apex, reads one number for each weight from the device.
        squared = torch.nn.utils.get_total_norm(own, foreach=True).to(self.device) ** 2
        dist.all_reduce(squared, group=self.inner.get_grad_stats_parallel_group())
        norm = math.sqrt(squared.item())
        weights = [weight for part in self.inner.chained_optimizers for weight in part.get_parameters()]
        grads = [weight.grad for weight in weights if weight.grad is not None]
        if norm > self.train.max_grad_norm and grads:
            torch._foreach_mul_(grads, self.train.max_grad_norm / (norm + 1e-6))
        return norm

    def apply(self, rate: float) -> None:
        """Step; then each copy of the model has all weights again."""
        for group in self.inner.param_groups:
            group["lr"], group["weight_decay"] = rate, self.train.weight_decay * group["wd_mult"]
        with on_device(self.device):
            self.inner.step_with_ready_grads()
        self.steps += 1

    def zero_grad(self) -> None:
        self.model.zero_grad_buffer()
        self.inner.zero_grad()

    def whole(self, weight: nn.Parameter) -> dict[str, Tensor]:
        """A weight in float32 and, once it was stepped, its moments, of the parts that the copies have; collective."""
        kinds = [WEIGHT, *(MOMENTS if self.steps else ())]
        found = torch.zeros(len(kinds), weight.numel(), device=self.device)
        part = self._part(weight)
        if weight in part.model_param_gbuf_map:
            own, place = _own(part, weight)
            for kind, row in zip(kinds, found, strict=True):
                row[place] = own.detach() if kind == WEIGHT else part.optimizer.state[own][kind]
        dist.all_reduce(found, group=part.data_parallel_group)
        return dict(zip(kinds, found.unflatten(1, weight.shape), strict=True))

    @torch.no_grad()
    def take(self, weight: nn.Parameter, kind: str, tensor: Tensor) -> None:
        """Go on with a weight or a moment, of which this rank has a part."""
        if kind == WEIGHT:
            weight.copy_(tensor)
        part = self._part(weight)
        if weight in part.model_param_gbuf_map:
            own, place = _own(part, weight)
            mine = tensor.flatten()[place].to(self.device)
            if kind == WEIGHT:
                own.copy_(mine)
            else:
                part.optimizer.state[own][kind] = mine.clone()

    def begin_at(self, steps: int) -> None:
        """Forget the moments; so many steps were made."""
        self.steps = steps
        for part in self.inner.chained_optimizers:
            part.optimizer.state.clear()
            for group in part.optimizer.param_groups:
                if not isinstance(part.optimizer, torch.optim.AdamW):  # Apex's and Transformer Engine's count so
                    group["step"] = steps
                    continue
                for own in group["params"] if steps else ():
                    part.optimizer.state[own]["step"] = torch.tensor(float(steps), device=self.device)

    def _part(self, weight: nn.Parameter) -> Any:
        """Megatron's optimizer of a weight: experts have one of their own."""
        return self.inner.chained_optimizers[-1 if is_expert(weight) else 0]


def _own(part: Any, weight: nn.Parameter) -> tuple[Tensor, slice]:
    """This rank's float32 part of a weight, and the slice of the flat weight that it is."""
    group, place = part.model_param_group_index_map[weight]
    numbers = part._get_model_param_range_map(weight)["param"]
    return part.optimizer.param_groups[group]["params"][place], slice(numbers.start, numbers.end)
