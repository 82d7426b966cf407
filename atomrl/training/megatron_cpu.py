"""Megatron on a CPU, for tests and small runs: it names GPUs where it would take whatever there is.

Nothing here is used where there is a GPU. Megatron allocates its buffers on `cuda` by name or on
`torch.cuda.current_device()`, waits by `torch.cuda.synchronize()`, and tells a weight's dtype by a type's name
(`torch.cuda.FloatTensor`), all of which fail without a GPU; what it computes is the same.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
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


@contextmanager
def _without_gpu() -> Iterator[None]:
    here = mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu"))
    wait = mock.patch.object(torch.cuda, "synchronize", lambda device=None: None)
    with here, wait, _NoGPU():
        yield


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """What Megatron is called within: on a GPU as it is, on a CPU with the names of GPUs put right.

    Example:
        >>> with on_device(torch.device("cpu")):
        ...     torch.zeros(1, device="cuda").type()
        'torch.cuda.FloatTensor'
    """
    return _without_gpu() if device.type == "cpu" else nullcontext()
