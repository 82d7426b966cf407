"""Tensor parallelism: each layer's matrices are sharded over ranks that compute the same rows (PyTorch's DTensor).

Query, key, value, gate and up projections are sharded column-wise, so a rank has some of the heads and of the MLP's
inner dimension. The output projections are sharded row-wise, and their outputs are summed, as are the gradients of
the inputs of the others. Norms, embedding and output matrix are replicated. Of an adapter, the matrix on the sharded
side is sharded.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from atomrl.config import ConfigError
from atomrl.models.adapted import ADAPTER
from atomrl.models.gpt import Attention, Linear

STYLES: dict[str, Callable[[], ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
"""Styles of transformers' tensor-parallel plans that are supported."""
CUT_ADAPTER = {"colwise": "lora_B", "rowwise": "lora_A"}
"""The adapter matrix that is sharded like the weight beneath; the other one is replicated."""
PER_HEAD = "replicated_with_grad_allreduce"
"""Style of a per-head norm: its weight is replicated, and each rank computes the gradient of its own heads only."""
LAYERS = "layers.*."


def check_tensor(config: Any, ranks: int, path: object) -> dict[str, str]:
    """Return transformers' tensor-parallel plan of a layer, after checking that `ranks` ranks can share it.

    Args:
        config: transformers config.
        path: path of the model, for the message.

    Returns:
        {name of a module in a layer: style}.

    Raises:
        ConfigError: there is no plan, or it has other styles, misses weights of a sharded block, or names a module that
            a layer lacks; or attention heads, key-value heads or the MLP's width are not divisible by `ranks`.
    """
    full_plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    plan = {name.removeprefix(LAYERS): style for name, style in full_plan.items() if name.startswith(LAYERS)}
    other = {name: style for name, style in plan.items() if style not in (*STYLES, PER_HEAD)}
    why = f"shards {min(other)} as {other[min(other)]}" if other else "has no plan for it"
    if plan and not other:
        why = next((why for layer in _layers_of(config) if (why := _unplanned(layer, plan))), "")
    if why:
        raise ConfigError(
            f"backend.tensor: {path} ({config.model_type}) cannot be sharded: transformers {why}; leave it out"
        )
    heads = config.num_attention_heads
    widths = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "num_global_key_value_heads": getattr(config, "num_global_key_value_heads", None) or 0,
        "intermediate_size": config.intermediate_size,
    }
    for name, width in widths.items():
        if not isinstance(width, int) or width % ranks:
            raise ConfigError(f"backend.tensor={ranks} does not divide {name}={width} of {path}")
    return plan


def _layers_of(config: Any) -> nn.ModuleList:
    """Create the layers of a model on the meta device."""
    from transformers import AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(config)
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def _unplanned(layer: nn.Module, plan: Mapping[str, str]) -> str:
    """Return how plan and layer disagree; empty if they agree."""
    if missing := plan.keys() - dict(layer.named_modules()).keys():
        return f"names {min(missing)}, which a layer does not have"
    blocks = {name.partition(".")[0] for name in plan}
    weights = (name for name, _ in layer.named_parameters() if name.partition(".")[0] in blocks)
    left = [name for name in weights if name.rpartition(".")[0] not in plan]
    return f"does not say how to shard {left[0]}" if left else ""


def shard_layers(model: Any, mesh: DeviceMesh, path: object) -> list[nn.Module]:
    """Shard the layers of a model over a one-dimensional mesh, without communication: every rank has all weights.

    Args:
        model: a policy, critic or reward model.
        path: path of the model, for the message.

    Returns:
        Per-head norms, whose gradients have to be summed over ranks (`sum_parts`).

    Raises:
        ConfigError: as `check_tensor`.
    """
    plan = check_tensor(model.config, mesh.size(), path)
    inner: nn.Module = getattr(model, "inner", model)
    norms: list[nn.Module] = []
    for layer in next(module for module in inner.modules() if isinstance(module, nn.ModuleList)):
        _plain_linears(layer)
        for module in layer.modules():
            if isinstance(module, Attention):
                module.heads //= mesh.size()
                module.kv_heads //= mesh.size()
        norms += [layer.get_submodule(name) for name, style in plan.items() if style == PER_HEAD]
        cut = {name: style for name, style in plan.items() if style in STYLES}
        for name in [name for name in cut if hasattr(layer.get_submodule(name), "lora_A")]:
            style = cut.pop(name)
            cut |= {f"{name}.base_layer": style, f"{name}.{CUT_ADAPTER[style]}.{ADAPTER}": style}
        parallelize_module(layer, mesh, {name: STYLES[style]() for name, style in cut.items()}, src_data_rank=None)
    return norms


def sum_parts(norms: Iterable[nn.Module], mesh: DeviceMesh, device: torch.device) -> None:
    """All-reduce the gradients of per-head norms over the ranks of a mesh, once before an optimizer step.

    Args:
        norms: what `shard_layers` returned.
        device: device for the communication.
    """
    grads = [weight.grad for norm in norms for weight in norm.parameters() if weight.grad is not None]
    own: list[Tensor] = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    if own:
        flat = torch.cat([grad.flatten() for grad in own]).to(device)
        dist.all_reduce(flat, group=mesh.get_group())
        for grad, part in zip(own, flat.split([grad.numel() for grad in own]), strict=True):
            grad.copy_(part.view_as(grad))


def _plain_linears(layer: nn.Module) -> None:
    """Replace our `Linear` by PyTorch's, because ours are computed several at once, without module hooks."""
    for module in list(layer.modules()):
        for name, linear in list(module.named_children()):
            if type(linear) is Linear:
                plain = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
                plain.weight, plain.bias = linear.weight, linear.bias
                setattr(module, name, plain)
