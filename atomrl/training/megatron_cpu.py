"""Megatron on a CPU, for tests and small runs: it names GPUs where it would take whatever there is.

Nothing here is used where there is a GPU. Megatron allocates its buffers on `cuda` by name or on
`torch.cuda.current_device()`, waits by `torch.cuda.synchronize()`, has streams for mixtures of experts, and tells a
weight's dtype by a type's name (`torch.cuda.FloatTensor`), all of which fail without a GPU; what it computes is the
same.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _NoGPU(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = kwargs | {"device": "cpu"}
        if func is Tensor.cuda:
            return args[0]
        found = func(*args, **kwargs)
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return found.replace("torch.", "torch.cuda.")
        return found


class _Stream:
    """A stand-in for a CUDA stream and its events: everything has happened when the next line is reached."""

    def record_event(self) -> "_Stream":
        return self

    def synchronize(self) -> None:
        pass


_ONLY = _Stream()
_all_to_all: Any = dist.all_to_all_single


def _all_to_all_single(*given: Any, **named: Any) -> Any:
    """With sizes as numbers, which Megatron fetches from a GPU."""
    return _all_to_all(*given, **{key: v.tolist() if isinstance(v, Tensor) else v for key, v in named.items()})


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
    """What Megatron is called within: on a GPU as it is, on a CPU with the names of GPUs put right.

    Example:
        >>> with on_device(torch.device("cpu")):
        ...     torch.zeros(1, device="cuda").type()
        'torch.cuda.FloatTensor'
    """
    return _without_gpu() if device.type == "cpu" else nullcontext()
