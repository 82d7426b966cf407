"""From the host's memory to a device's, without waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, in order with what runs there; the host does not wait for it.

    Example:
        >>> import torch
        >>> sent(torch.ones(2), torch.device("meta")).device.type
        'meta'
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # a copy from other memory waits for all that runs on the device
    return tensor.to(device, non_blocking=True)
