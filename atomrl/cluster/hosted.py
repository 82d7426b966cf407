"""`Hosted`: the Ray actor of a role, whose process never outlives the run."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_PR_SET_PDEATHSIG = 1


class Hosted:
    """The Ray actor class: hosts one object and calls its methods.

    Args:
        threads: number of torch threads.
        gpus: keep the GPUs that Ray made visible; False hides all.
        owner: `identity` of the process of the run. The actor ends when that process ends.
    """

    def __init__(self, threads: int, gpus: bool, owner: tuple[str, int]) -> None:
        end_with(owner)
        if not gpus:  # Ray hides no GPU from an actor that requested none
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(threads)
        send_tensors_as_arrays()

    def make(self, build: Callable[[], Any]) -> int:
        """Build the hosted object and return the process id."""
        self.inner = build()
        return os.getpid()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the hosted object."""
        return getattr(self.inner, method)(*args)


def end_with(owner: tuple[str, int]) -> None:
    """Kill this process when the owner ends (if it is on this machine) or the raylet ends; ignore SIGINT and SIGHUP.

    If the owner is on another machine, Ray detects its end.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # Ray's raylet is the parent
    machine, pid = owner
    if identity(pid)[0] != machine:
        return
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def identity(pid: int) -> tuple[str, int]:
    """Return (boot id and PID namespace, process id): it identifies a process across machines and containers."""
    if sys.platform != "linux":
        return "", pid
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}", pid


def send_tensors_as_arrays() -> None:
    """Serialize tensors as NumPy arrays, whose memory Ray shares; the default serialization copies them twice."""
    from ray.util import register_serializer

    # Received tensors are never written to.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    for kind in (Tensor, torch.nn.Parameter):
        register_serializer(kind, serializer=_tensor_to_array, deserializer=_tensor_from_array)


def _tensor_to_array(tensor: Tensor) -> tuple[Any, torch.dtype, tuple[int, ...]]:
    """Return (bytes, dtype, shape). NumPy has no bfloat16."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)


def _tensor_from_array(sent: tuple[Any, torch.dtype, tuple[int, ...]]) -> Tensor:
    array, dtype, shape = sent
    return torch.from_numpy(array).view(dtype).reshape(shape)
