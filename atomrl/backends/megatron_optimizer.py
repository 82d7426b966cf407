"""Megatron's distributed optimizer: AdamW with moments and float32 masters sharded over data-parallel ranks."""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atomrl.backends.checkpoints import MOMENTS, ShardReader, read_whole
from atomrl.backends.group import Ranks
from atomrl.backends.megatron_layout import Key, cut, join_parts, published_names
from atomrl.backends.megatron_model import Stage, on_device
from atomrl.backends.optimizer import Optimizer
from atomrl.config import TrainConfig
from atomrl.models.lora import is_adapter

# --------------------------------------------------------------------------------------------------------------------
# Gather and load sharded weights by their published names. A weight is gathered on some ranks, and one of them keeps
# it. So no rank has a full model, except rank 0 when it asks for one.

Tensors = Callable[[nn.Parameter], Mapping[str, Tensor]]
"""Returns tensors of a parameter by kind: `weight`, and the moments."""
Weights = Mapping[Key, nn.Parameter]
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a full model's weights, by published name."""
WEIGHT = "weight"


def is_expert(weight: nn.Parameter) -> bool:
    """Return True for the weight of an expert with expert parallelism."""
    return not getattr(weight, "allreduce", True)


def holders(weight: nn.Parameter) -> tuple[int, int, int]:
    """Return this rank's index among the ranks with a part of a weight, their number, and the number of parts."""
    from megatron.core import parallel_state

    if is_expert(weight):
        group = parallel_state.get_expert_data_parallel_group()
        return group.rank(), group.size(), 1
    copies, parts = parallel_state.get_data_parallel_group(), parallel_state.get_tensor_model_parallel_group()
    return copies.rank() * parts.size() + parts.rank(), copies.size() * parts.size(), parts.size()


def shares(stage: Stage, weights: Weights, tensors: Tensors, spread: bool) -> Iterator[dict[str, Tensor]]:
    """Gather each weight in turn; yield those that this rank keeps. Collective over the ranks of a stage.

    Args:
        tensors: returns tensors with the weight's shape, the same on all replicas.
        spread: distribute the gathered weights over the ranks that have them; False: the first rank keeps all.

    Yields:
        Full tensors by `KIND/PUBLISHED NAME`, on the device; empty if another rank keeps them.
    """
    for number, (key, weight) in enumerate(weights.items()):
        index, count, parts = holders(weight)
        full: dict[str, Tensor] = {}
        if not stage.repeats(key) and (spread or index < parts):
            for kind, tensor in tensors(weight).items():
                pieces = [tensor]
                if parts > 1:
                    pieces = [torch.empty_like(tensor) for _ in range(parts)]
                    dist.all_gather(pieces, tensor.contiguous(), group=stage.group)
                if index == (number % count if spread else 0):
                    full |= {f"{kind}/{name}": part for name, part in join_parts(*key, pieces, stage.spec).items()}
        yield full


def on_first_rank(stage: Stage, ranks: Ranks, shapes: Shapes, adapters_alone: bool = False) -> dict[str, Tensor] | None:
    """Gather all weights, or those of adapters, to rank 0's CPU memory, one at a time; None on other ranks. Collective.

    Args:
        shapes: shapes of the full model.

    Returns:
        Weights by published name.
    """
    weights = stage.trained_weights() if adapters_alone else stage.named_weights()
    own_names = [
        [] if stage.repeats(key) or holders(weight)[0] else published_names(*key, stage.spec.tied_head)
        for key, weight in weights.items()
    ]
    # Rank 0 has to know who sends which weight in each round: the names of every rank, by number of the weight.
    plan: list[list[list[str]]] = [[] for _ in range(ranks.world)]
    dist.all_gather_object(plan, own_names, ranks.host)
    first = next(iter(weights.values()))
    own = shares(stage, weights, lambda weight: {WEIGHT: weight.detach()}, spread=False)
    gathered: dict[str, Tensor] = {}
    for number in range(max(map(len, plan))):
        share = next(own, {})
        if ranks.rank:
            for tensor in share.values():
                dist.send(tensor.contiguous(), 0)
            continue
        gathered |= {key.removeprefix(f"{WEIGHT}/"): tensor.cpu() for key, tensor in share.items()}
        for rank, names in enumerate(plan[1:], 1):
            for name in names[number] if number < len(names) else ():
                dtype = torch.float32 if is_adapter(name) else first.dtype
                received = torch.empty(shapes[name], dtype=dtype, device=first.device)
                dist.recv(received, rank)
                gathered[name] = received.cpu()
    return None if ranks.rank else gathered


def parts_from(
    reader: ShardReader, role: str, kind: str, stage: Stage, shapes: Shapes
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Read this rank's parts of weights or moments from a checkpoint of any parallel sizes, one layer at a time.

    Args:
        reader: reader of the checkpoint.
        kind: `weight`, or one of the moments.

    Yields:
        (parameter, this rank's part of the tensor).
    """
    for _, group in groupby(stage.trained_weights().items(), lambda item: item[0][1]):
        weights = list(group)
        names = {name for key, _ in weights for name in published_names(*key, stage.spec.tied_head)}
        prefix = f"{role}/{kind}/"
        read = read_whole({prefix + name: shapes[name] for name in sorted(names)}, reader)
        full = {key.removeprefix(prefix): tensor for key, tensor in read.items()}
        for key, weight in weights:
            yield weight, cut(*key, full.__getitem__, stage.spec, stage.rank, stage.tensor)


# --------------------------------------------------------------------------------------------------------------------
# The optimizer.


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
