"""Activation offloading: activations are in CPU memory between forward and backward pass.

Copies use pinned memory and the compute stream. So they are in order with the computation, and the CPU does not wait.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

LEAST_BYTES = 1 << 20
"""Smaller tensors are not offloaded."""
Kept = Tensor | tuple[torch.device, Tensor]

_active = False


@contextmanager
def offloading(active: bool = True) -> Iterator[None]:
    """Offload tensors that autograd saves inside the block to CPU memory, except for weights and small tensors.

    Gradients are bit-identical. With gradient checkpointing the input of each layer is offloaded, without it all
    activations.

    Args:
        active: False: do nothing.

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
    """Pack a saved tensor: copy it to the CPU, or detach it. Nested hooks call it too, as only the innermost run.

    Never returns the tensor itself: an operation that saves its own output would be in a reference cycle, and the graph
    of a failed forward pass would never be freed.
    """
    expanded = tensor.untyped_storage().nbytes() < tensor.nbytes
    weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
    if not _active or weight or tensor.nbytes < LEAST_BYTES or expanded:
        return tensor.detach()
    held = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    held.copy_(tensor, non_blocking=True)
    return tensor.device, held


def get(kept: Kept) -> Tensor:
    """Unpack what `put` returned."""
    if isinstance(kept, Tensor):
        return kept
    device, held = kept
    return held.to(device, non_blocking=True)
