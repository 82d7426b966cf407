"""Tensor parallel: each layer's matrices cut over ranks that compute the same rows (PyTorch's DTensor).

Queries, keys, values, gate and up are cut by outputs, so that a rank has some of the heads and of the MLP's inner
numbers; the output projections are cut by inputs, and what they give is summed, as are the gradients of what goes into
the others. Norms, embedding and output matrix are on every rank. Of adapters the matrix is cut that is on the cut side.
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
"""By transformers' names: cut by outputs, and by inputs."""
CUT_ADAPTER = {"colwise": "lora_B", "rowwise": "lora_A"}
"""Of the two matrices of an adapter the one that is cut like the matrix that it adds to; the other is on every rank."""
PER_HEAD = "replicated_with_grad_allreduce"
"""A norm of each head: every rank has its weight, and the gradient of its own heads alone."""
LAYERS = "layers.*."


def check_tensor(config: Any, ranks: int, path: object) -> dict[str, str]:
    """That so many ranks can share a model's layers.

    Args:
        config: of transformers.
        path: of the model, for the message.

    Returns:
        How each linear layer of a layer is cut, and which norms are of heads, by transformers' own plan.

    Raises:
        ConfigError: there is no plan, or one with more than these; it leaves out weights between matrices that are cut,
            or names what a layer lacks; heads, heads of keys or the MLP's width do not divide.
    """
    found: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    plan = {name.removeprefix(LAYERS): style for name, style in found.items() if name.startswith(LAYERS)}
    other = {name: style for name, style in plan.items() if style not in (*STYLES, PER_HEAD)}
    why = f"cuts {min(other)} as {other[min(other)]}" if other else "has no plan for it"
    if plan and not other:
        why = next((why for layer in _layers_of(config) if (why := _unplanned(layer, plan))), "")
    if why:
        raise ConfigError(
            f"backend.tensor: {path} ({config.model_type}) cannot be cut: transformers {why}; leave it out"
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
    """As transformers makes them, without memory for weights."""
    from transformers import AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(config)
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def _unplanned(layer: nn.Module, plan: Mapping[str, str]) -> str:
    """What a plan has not of a layer, or the layer not of it; empty: nothing."""
    there = dict(layer.named_modules())
    if missing := plan.keys() - there.keys():
        return f"names {min(missing)}, which a layer lacks"
    blocks = {name.partition(".")[0] for name in plan}
    weights = (name for name, _ in layer.named_parameters() if name.partition(".")[0] in blocks)
    left = [name for name in weights if name.rpartition(".")[0] not in plan]
    return f"does not say what becomes of {left[0]}" if left else ""


def cut_layers(model: Any, mesh: DeviceMesh, path: object) -> list[nn.Module]:
    """Cut the layers of a model over a mesh of one dimension, without communication: every rank has all of it.

    Args:
        model: a policy, critic or reward model.
        path: for the message.

    Returns:
        Norms of heads, whose gradients a backward pass leaves as parts (`sum_parts`).

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
    """Sum the gradients of norms of heads over the ranks that share layers, once before a step: each has those of its
    own heads.

    Args:
        norms: `cut_layers` of a model, after a backward pass.
        device: which the ranks communicate on.
    """
    grads = [weight.grad for norm in norms for weight in norm.parameters() if weight.grad is not None]
    own: list[Tensor] = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    if own:
        every = torch.cat([grad.flatten() for grad in own]).to(device)
        dist.all_reduce(every, group=mesh.get_group())
        for grad, part in zip(own, every.split([grad.numel() for grad in own]), strict=True):
            grad.copy_(part.view_as(grad))


def _plain_linears(layer: nn.Module) -> None:
    """PyTorch's linear layers in the place of ours, which compute several in one product and look for no hooks."""
    for module in list(layer.modules()):
        for name, linear in list(module.named_children()):
            if type(linear) is Linear:
                plain = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
                plain.weight, plain.bias = linear.weight, linear.bias
                setattr(module, name, plain)
