"""Asynchronous copies to a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device asynchronously, in the order of its current stream.

    Example:
        >>> import torch
        >>> to_device(torch.ones(2), torch.device("meta")).device.type
        'meta'
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # a copy from other memory waits for all that runs on the device
    return tensor.to(device, non_blocking=True)
