"""Activations in the CPU's memory between the forward and the backward pass.

Copies are made from and to pinned memory, on the stream that computes: in order with it, and the host does not wait.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

LEAST_BYTES = 1 << 20
"""What is smaller is not worth a copy."""
Kept = Tensor | tuple[torch.device, Tensor]

_active = False


@contextmanager
def offloading(active: bool = True) -> Iterator[None]:
    """Within it, what autograd keeps for the backward pass lies in the CPU's memory, but for weights and small things.

    Gradients are the same to the last bit. With checkpointing that is the input of each layer, without it all that a
    layer keeps.

    Args:
        active: False changes nothing.

    Example:
        >>> x = torch.ones(1024, 1024, requires_grad=True)
        >>> with offloading():
        ...     y = (x * x).exp()
        >>> bool((torch.autograd.grad(y.sum(), x)[0] == 2 * x * (x * x).exp()).all())
        True
    """
    global _active
    before = _active
    if not active:
        yield
        return
    _active = True
    try:
        with torch.autograd.graph.saved_tensors_hooks(put, get):
            yield
    finally:
        _active = before


def put(tensor: Tensor) -> Kept:
    """What is kept in the place of a tensor; called by hooks within these too, since the innermost alone are called.

    Never the tensor itself: an operation that saves its own result would hold itself through it, and the graph of a
    forward pass that fails would never be freed.
    """
    expanded = tensor.untyped_storage().nbytes() < tensor.nbytes
    weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
    if not _active or weight or tensor.nbytes < LEAST_BYTES or expanded:
        return tensor.detach()
    held = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    held.copy_(tensor, non_blocking=True)
    return tensor.device, held


def get(kept: Kept) -> Tensor:
    """The tensor that `put` was given."""
    if isinstance(kept, Tensor):
        return kept
    device, held = kept
    return held.to(device, non_blocking=True)
