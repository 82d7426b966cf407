"""A device that counts how often the host waits for it: `meta` tensors that have their numbers after all.

Every operator is computed on the CPU by the numbers inside. What a GPU would have to be asked for (a copy to the host,
a shape made of numbers, a copy to the device that waits) is counted with the place in the package that asks.
"""

import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

PACKAGE = str(Path(__file__).parents[2] / "atomrl")
DEVICE = torch.device("meta")
aten = torch.ops.aten
SIZED = {aten.repeat_interleave.Tensor}
"""Operators that wait for numbers unless they are told the size of their output."""


class OnDevice(Tensor):
    """A tensor of the device; `numbers` are on the CPU."""

    __slots__ = ["numbers"]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "OnDevice":
        return Tensor._make_wrapper_subclass(
            cls, numbers.shape, numbers.stride(), numbers.storage_offset(), dtype=numbers.dtype, device=DEVICE
        )

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def tolist(self) -> Any:
        return self.cpu().tolist()  # PyTorch's own refuses subclasses

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{operation} outside of a CountedDevice")


class CountedDevice(TorchDispatchMode):
    """Within it there is the device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
        there = [part for part in given if isinstance(part, OnDevice)]
        wanted = kwargs.get("device")
        makes = wanted is not None and torch.device(wanted).type == DEVICE.type
        if not there and not makes:
            return operation(*args, **kwargs)
        if makes:
            kwargs = kwargs | {"device": torch.device("cpu")}
        to_host = wanted is not None and not makes
        if self._waits(operation, args, kwargs, given, there, to_host):
            self.waits[_place(operation)] += 1
        plain_args, plain_kwargs = tree_map_only(OnDevice, lambda part: part.numbers, (args, kwargs))
        with torch.utils._python_dispatch._disable_current_modes():
            result = operation(*plain_args, **plain_kwargs)
            if operation in (aten._to_copy.default,) and makes and result is plain_args[0]:
                result = result.clone()
        if to_host or operation is aten._local_scalar_dense.default:
            return result
        if operation is aten.copy_.default and not isinstance(args[0], OnDevice):
            return args[0]
        wrapped = tree_map_only(Tensor, OnDevice, result)
        return return_and_correct_aliasing(operation, args, kwargs, wrapped) if there else wrapped

    @staticmethod
    def _waits(operation: Any, args: Any, kwargs: Any, given: list[Tensor], there: list[Tensor], to_host: bool) -> bool:
        if operation is aten._to_copy.default:
            return to_host or (not there and not kwargs.get("non_blocking"))
        if operation is aten.copy_.default:
            crosses = isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice)
            return crosses and not (
                isinstance(args[0], OnDevice) and (args[1].dim() == 0 or kwargs.get("non_blocking"))
            )
        mixed = [part for part in given if not isinstance(part, OnDevice) and part.dim() > 0]
        assert not there or not mixed, f"{operation}: a tensor of the host beside one of the device"
        if operation.overloadpacket in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            return any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1])
        if operation in SIZED:
            return kwargs.get("output_size") is None
        tags = operation.tags
        return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def _place(operation: Any) -> str:
    """The innermost line of the package that is at work."""
    own = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
    where = f"{Path(own[-1].filename).relative_to(PACKAGE)}:{own[-1].lineno}" if own else "elsewhere"
    return f"{where} {operation}"


def allow_fused(monkeypatch: Any) -> None:
    """Let PyTorch's fused and foreach operators take tensors of the device."""
    devices = [*_foreach_utils._get_foreach_kernels_supported_devices(), DEVICE.type]
    monkeypatch.setattr(_foreach_utils, "_get_foreach_kernels_supported_devices", lambda: devices)
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", lambda weight: None)
