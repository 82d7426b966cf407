"""Gather and load sharded weights by their published names.

A weight is gathered on some ranks, and one of them keeps it. So no rank has a full model, except rank 0 when it asks
for one.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atomrl.backends.group import Ranks
from atomrl.backends.megatron.layout import Key, cut, join_parts, published_names
from atomrl.backends.megatron.model import Stage
from atomrl.backends.shards import ShardReader, read_whole
from atomrl.models.lora import is_adapter

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
