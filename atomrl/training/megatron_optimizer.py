"""Megatron's distributed optimizer: AdamW whose moments, and float32 weights, are shared by the copies of a model."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atomrl.config import TrainConfig
from atomrl.training.megatron_cpu import on_device
from atomrl.training.optimizer import Optimizer


class MegatronOptimizer(Optimizer):
    """As `Optimizer`, of a model in parts.

    Args:
        model: wrapped in Megatron's `DistributedDataParallel`.
        name, train, peak, total_updates: as of `Optimizer`.
    """

    def __init__(self, name: str, model: Any, train: TrainConfig, peak: float, total_updates: int) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.name, self.train, self.peak, self.total_updates = name, train, peak, total_updates
        self.model, self.skipped_in_a_row = model, 0
        self.weights = dict(model.named_parameters())
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

        adamw = self.inner.chained_optimizers[0].optimizer
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
        grads = [weight.grad for weight in self._own() if weight.grad is not None]
        if norm > self.train.max_grad_norm and grads:
            torch._foreach_mul_(grads, self.train.max_grad_norm / (norm + 1e-6))
        return norm

    def apply(self, rate: float) -> None:
        """Step; then each copy of the model has all weights again."""
        for group in self.inner.param_groups:
            group["lr"], group["weight_decay"] = rate, self.train.weight_decay * group["wd_mult"]
        with on_device(self.device):
            self.inner.step_with_ready_grads()

    def zero_grad(self) -> None:
        self.model.zero_grad_buffer()
        self.inner.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """This rank's part: weights, and by their place among its own the float32 weights and moments."""
        found = {f"weight/{name}": weight.detach() for name, weight in self.weights.items()}
        for place, weight in enumerate(self._own()):
            found[f"main/{place}"] = weight.detach()
            found |= {f"{key}/{place}": value for key, value in self._states()[weight].items()}
        return {name: tensor.contiguous().clone() for name, tensor in found.items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor], device: torch.device) -> None:
        own = self._own()
        self._states().clear()
        for key, value in state.items():
            kind, _, name = key.partition("/")
            if kind == "weight":
                self.weights[name].copy_(value)
            elif kind == "main":
                own[int(name)].copy_(value)
            else:
                self._states()[own[int(name)]][kind] = value.to(device)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of this rank's weights, which tell whether a state is of this model, and cut in this way."""
        return {f"weight/{name}": tuple(weight.shape) for name, weight in self.weights.items()}

    def _own(self) -> list[Tensor]:
        return list(self.inner.get_parameters())

    def _states(self) -> Any:
        return self.inner.chained_optimizers[0].optimizer.state
