"""Float32 masters with computation in another dtype."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from atomrl.models.offloading import Kept, get, put

Rounded = tuple[nn.Parameter, tuple[int, ...], tuple[int, ...], int]
"""A saved view of a rounded weight: its float32 master, and size, strides and offset of the view."""


def stays_float32(inner: Any, name: str) -> bool:
    """Return True if transformers keeps a weight in float32 in any dtype."""
    strict: set[str] = getattr(inner, "_keep_in_fp32_modules_strict", None) or set()
    return bool(strict & set(name.split(".")))


class Rounding:
    """Makes a model with float32 weights compute exactly like one loaded in `dtype`.

    While a layer runs, its weights are replaced by rounded ones. With autocast, residual stream and norms would be
    float32, and log-probs would differ from those of engine and reference by 0.01 nats on average. Autograd saves the
    float32 weights instead of rounded ones, and the backward pass rounds them again. So no rounded copy of the model is
    in memory.
    """

    def __init__(self, inner: Any, dtype: torch.dtype) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.dtype = dtype
        self.masters: dict[int, nn.Parameter] = {}
        """Float32 weights by the address of the rounded weight, while that exists."""
        unrounded = {name for name, _ in inner.named_parameters() if stays_float32(inner, name)}
        names = {id(module): name for name, module in inner.named_modules()}
        head = inner.get_output_embeddings()  # only `check` runs it, in float32
        head.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(module.weight.dtype),))
        layers = [module for module in inner.modules() if isinstance(module, GradientCheckpointingLayer)]
        rest = [[module] for module in inner.modules()]
        done = {id(head)}
        for unit, *modules in [[layer, *layer.modules()] for layer in layers or [inner.base_model]] + rest:
            slots = []
            for module in modules or [unit]:
                if id(module) in done:
                    continue
                done.add(id(module))
                if type(module) is nn.Embedding:  # round the rows that are looked up, not the full table
                    module.register_forward_hook(lambda module, inputs, output: output.to(dtype))
                    continue
                if isinstance(module, _ConvNd):  # a tower casts to its dtype, which is float32 outside
                    module.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(dtype),))
                own = [name for name, weight in module._parameters.items() if weight is not None]
                slots += [(module, name) for name in own if f"{names[id(module)]}.{name}" not in unrounded]
            if slots:
                self._round_while_running(unit, slots)

    def _round_while_running(self, unit: nn.Module, slots: list[tuple[nn.Module, str]]) -> None:
        def enter(*_: Any) -> None:
            for module, name in slots:
                master = cast(nn.Parameter, module._parameters[name])
                rounded = master.to(self.dtype)  # before the weight is removed, because memory may run out here
                del module._parameters[name]
                module.__dict__[name] = rounded
                self.masters[rounded.data_ptr()] = master

        def leave(*_: Any) -> None:
            for module, name in slots:
                if name in module.__dict__:
                    module._parameters[name] = self.masters.pop(module.__dict__.pop(name).data_ptr())

        unit.register_forward_pre_hook(enter)
        unit.register_forward_hook(leave, always_call=True)

    def saving_masters(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Make autograd save float32 weights instead of rounded ones inside the block."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, saved: Tensor) -> Kept | Rounded:
        master = self.masters.get(saved.untyped_storage().data_ptr())
        return put(saved) if master is None else (master, saved.size(), saved.stride(), int(saved.storage_offset()))

    def _unpack(self, packed: Kept | Rounded) -> Tensor:
        if isinstance(packed, Tensor) or len(packed) == 2:
            return get(packed)
        master, size, stride, offset = packed
        return master.detach().to(self.dtype).as_strided(size, stride, offset)
