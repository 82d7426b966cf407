"""Weights of a model in parts by their published names: what each rank keeps of them on their way out, and takes back.

A weight is whole on some ranks for a moment, and one of these keeps it. So no rank has a whole model, but rank 0 where
it asks for one.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atomrl.models.lora import is_adapter
from atomrl.training.group import Ranks
from atomrl.training.megatron_model import Stage
from atomrl.training.megatron_weights import Key, cut, joined, published_names
from atomrl.training.shards import ShardReader, read_whole

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
