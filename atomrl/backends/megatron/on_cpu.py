"""Megatron on a CPU, for tests and small runs. Nothing here is used on GPUs.

Megatron allocates buffers on `cuda` or on `torch.cuda.current_device()`, calls `torch.cuda.synchronize()`, uses CUDA
streams for mixtures of experts, and compares dtypes by type name (`torch.cuda.FloatTensor`). All of this fails
without a GPU, so it is patched. The computation is the same.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

_all_to_all: Any = dist.all_to_all_single


class _NoGPU(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = kwargs | {"device": "cpu"}
        if func is Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.")
        return result


class _Stream:
    """A dummy CUDA stream and event: on a CPU every operation has finished."""

    def record_event(self) -> "_Stream":
        return self

    def synchronize(self) -> None:
        pass


_ONLY = _Stream()


def _all_to_all_single(*arguments: Any, **named: Any) -> Any:
    """Convert split sizes to lists, which Megatron does only on a GPU."""
    return _all_to_all(*arguments, **{key: v.tolist() if isinstance(v, Tensor) else v for key, v in named.items()})


@contextmanager
def _without_gpu() -> Iterator[None]:
    named: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda device=None: None,
        "Stream": lambda: _ONLY,
        "current_stream": lambda: _ONLY,
        "stream": lambda stream: nullcontext(),
    }
    exchange = mock.patch.object(dist, "all_to_all_single", _all_to_all_single)
    with mock.patch.multiple(torch.cuda, **named), exchange, _NoGPU():
        yield


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Context for calls of Megatron: on a CPU it patches the use of GPUs, on a GPU it does nothing.

    Example:
        >>> with on_device(torch.device("cpu")):
        ...     torch.zeros(1, device="cuda").type()
        'torch.cuda.FloatTensor'
    """
    return _without_gpu() if device.type == "cpu" else nullcontext()
