"""Megatron's distributed optimizer: AdamW whose moments, and float32 weights, are shared by the copies of a model."""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atomrl.backends.checkpoints import MOMENTS, ShardReader, read_whole
from atomrl.backends.group import Ranks
from atomrl.backends.megatron_layout import Key, cut, joined, published_names
from atomrl.backends.megatron_model import Stage, on_device
from atomrl.backends.optimizer import Optimizer
from atomrl.config import TrainConfig
from atomrl.models.lora import is_adapter

# --------------------------------------------------------------------------------------------------------------------
# Weights of a model in parts by their published names: what each rank keeps of them on their way out, and takes back.
#
# A weight is whole on some ranks for a moment, and one of these keeps it. So no rank has a whole model, but rank 0
# where it asks for one.

Tensors = Callable[[nn.Parameter], Mapping[str, Tensor]]
"""Of a weight of this rank, by what they are: itself, its moments."""
Weights = Mapping[Key, nn.Parameter]
Shapes = Mapping[str, tuple[int, ...]]
"""Of a whole model's weights, by published name."""
WEIGHT = "weight"


def is_expert(weight: nn.Parameter) -> bool:
    """Whether a weight is of an expert that not all ranks have."""
    return not getattr(weight, "allreduce", True)


def holders(weight: nn.Parameter) -> tuple[int, int, int]:
    """This rank's place among those that have parts of a weight, their number, and how many make it whole."""
    from megatron.core import parallel_state

    if is_expert(weight):
        group = parallel_state.get_expert_data_parallel_group()
        return group.rank(), group.size(), 1
    copies, parts = parallel_state.get_data_parallel_group(), parallel_state.get_tensor_model_parallel_group()
    return copies.rank() * parts.size() + parts.rank(), copies.size() * parts.size(), parts.size()


def shares(stage: Stage, weights: Weights, tensors: Tensors, spread: bool) -> Iterator[dict[str, Tensor]]:
    """What this rank keeps of each of these weights, one after the other; all ranks of the stage come along.

    Args:
        tensors: of the weight's shape, and the same on all copies of the model.
        spread: whether those that have a weight at hand keep one in turn; else the first of them keeps all.

    Yields:
        Whole tensors by `KIND/PUBLISHED NAME`, on the device; none where another rank keeps them.
    """
    for number, (key, weight) in enumerate(weights.items()):
        place, places, parts = holders(weight)
        found: dict[str, Tensor] = {}
        if not stage.repeats(key) and (spread or place < parts):
            for kind, tensor in tensors(weight).items():
                pieces = [tensor]
                if parts > 1:
                    pieces = [torch.empty_like(tensor) for _ in range(parts)]
                    dist.all_gather(pieces, tensor.contiguous(), group=stage.group)
                if place == (number % places if spread else 0):
                    found |= {f"{kind}/{name}": whole for name, whole in joined(*key, pieces, stage.spec).items()}
        yield found


def on_first_rank(stage: Stage, ranks: Ranks, shapes: Shapes, adapters_alone: bool = False) -> dict[str, Tensor] | None:
    """All weights, or those of adapters, by published name in the CPU's memory of rank 0, gathered one by one; None on
    other ranks."""
    weights = stage.trained_weights() if adapters_alone else stage.named_weights()
    mine = [
        [] if stage.repeats(key) or holders(weight)[0] else published_names(*key, stage.spec.tied_head)
        for key, weight in weights.items()
    ]
    plan: list[list[list[str]]] = [[] for _ in range(ranks.world)]
    dist.all_gather_object(plan, mine, ranks.host)
    first = next(iter(weights.values()))
    own, found = shares(stage, weights, lambda weight: {WEIGHT: weight.detach()}, spread=False), dict[str, Tensor]()
    for number in range(max(map(len, plan))):
        here = next(own, {})
        for tensor in here.values() if ranks.rank else ():
            dist.send(tensor.contiguous(), 0)
        if ranks.rank:
            continue
        found |= {key.removeprefix(f"{WEIGHT}/"): tensor.cpu() for key, tensor in here.items()}
        for rank, names in enumerate(plan[1:], 1):
            for name in names[number] if number < len(names) else ():
                dtype = torch.float32 if is_adapter(name) else first.dtype
                received = torch.empty(shapes[name], dtype=dtype, device=first.device)
                dist.recv(received, rank)
                found[name] = received.cpu()
    return None if ranks.rank else found


def parts_from(
    reader: ShardReader, role: str, kind: str, stage: Stage, shapes: Shapes
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """This rank's parts of what a checkpoint has, whatever ranks wrote it; a layer is in memory at a time.

    Args:
        reader: of the checkpoint.
        kind: `weight`, or one of the moments.
    """
    for _, group in groupby(stage.trained_weights().items(), lambda item: item[0][1]):
        weights = list(group)
        names = {name for key, _ in weights for name in published_names(*key, stage.spec.tied_head)}
        prefix = f"{role}/{kind}/"
        read = read_whole({prefix + name: shapes[name] for name in sorted(names)}, reader)
        whole = {key.removeprefix(prefix): tensor for key, tensor in read.items()}
        for key, weight in weights:
            yield weight, cut(*key, whole.__getitem__, stage.spec, stage.rank, stage.tensor)


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
