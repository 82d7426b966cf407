"""What runs in the process of an actor, which never outlives the run."""

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
    """A process of its own, with an object whose methods are called from outside.

    Args:
        threads: that it computes with.
        gpus: whether it may see those that Ray gave it, or none.
        owner: the process that it ends with, as `identity` names it.
    """

    def __init__(self, threads: int, gpus: bool, owner: tuple[str, int]) -> None:
        end_with(owner)
        if not gpus:  # Ray shows all of them to who asked for none
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(threads)
        send_tensors_as_arrays()

    def make(self, build: Callable[[], Any]) -> int:
        """Build the object. Returns the id of this process."""
        self.inner = build()
        return os.getpid()

    def call(self, method: str, *args: Any) -> Any:
        """The result of a method of the object."""
        return getattr(self.inner, method)(*args)


def end_with(owner: tuple[str, int]) -> None:
    """Be killed when a process of this machine ends, and when Ray's on it does; leave signals of the terminal to it.

    Ray's processes see for themselves when the owner is on another machine.
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
    """Where a process id means something, and the id."""
    if sys.platform != "linux":
        return "", pid
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}", pid


def send_tensors_as_arrays() -> None:
    """Let Ray share the memory of tensors, as it does of numpy arrays; torch's own way copies them twice."""
    from ray.util import register_serializer

    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # what came is only read
    for kind in (Tensor, torch.nn.Parameter):
        register_serializer(kind, serializer=_to_array, deserializer=_from_array)


def _to_array(tensor: Tensor) -> tuple[Any, torch.dtype, tuple[int, ...]]:
    """As bytes, since numpy knows no bfloat16."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)


def _from_array(sent: tuple[Any, torch.dtype, tuple[int, ...]]) -> Tensor:
    array, dtype, shape = sent
    return torch.from_numpy(array).view(dtype).reshape(shape)
