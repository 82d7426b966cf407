"""Broadcasts from the trainer to all engines: NCCL between GPUs, gloo between CPUs (torch.distributed)."""

from __future__ import annotations

import itertools
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from atomrl.models.lora import is_adapter
from atomrl.protocols import WeightUpdate
from atomrl.weight_sync.channel import TransferBroken
from atomrl.weight_sync.object_store import adapters_of

log = logging.getLogger(__name__)


LOOPBACK = "127.0.0.1"
Part = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor that is broadcast."""
_joined: dict[str, Any] = {}
"""Process group that this process receives from, by name. At most one."""


def _join(store: Any, name: str, rank: int, size: int, backend: str, host: str, timeout: timedelta) -> Any:
    """Create a process group independent of the default one. Blocks until all members have joined."""
    prefixed = c10d.PrefixStore(name, store)
    if backend == "nccl":
        on_gpu = c10d.ProcessGroupNCCL.Options()
        on_gpu._timeout = timeout
        return c10d.ProcessGroupNCCL(prefixed, rank, size, on_gpu)
    gloo: Any = c10d.ProcessGroupGloo  # its type stubs lack `_Options`
    options = gloo._Options()
    options._timeout, options._devices = timeout, [gloo.create_device(hostname=host)]
    return gloo(prefixed, rank, size, options)


def _broadcast(group: Any, tensor: Tensor) -> None:
    """Broadcast a tensor from rank 0, in place for the others."""
    options = c10d.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()


def open_store(host: str, timeout: timedelta) -> tuple[Any, int]:
    """Open a TCPStore that listens on one address only, and return it with its port.

    A TCPStore given a port listens on all addresses, so it gets a socket that is already bound.
    """
    listener = socket.socket()
    listener.bind((host, 0))
    listener.listen()
    port = listener.getsockname()[1]
    store = c10d.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )
    return store, port


class ServerGroup:
    """The sender's side of a process group with the ranks of an inference server (which uses torch.distributed).

    `join` and `send` run on a thread and return futures, which fail with TransferBroken if the server is gone.

    Args:
        host: address of this process that the server can reach.
        device: source of the tensors; `cpu` uses gloo, others NCCL.
        ranks: number of ranks of the server.
        timeout_s: time limit for creating the group, and for a broadcast.
    """

    _numbers = itertools.count()

    def __init__(self, host: str, device: str, ranks: int, timeout_s: float) -> None:
        self.host, self.ranks, self.timeout = host, ranks, timedelta(seconds=timeout_s)
        self.device, self.backend = torch.device(device), "gloo" if device == "cpu" else "nccl"
        self.name = f"atomrl-{os.getpid()}-{next(self._numbers)}"
        self.store, self.port = open_store(host, self.timeout)
        self.group: Any = None

    def join(self) -> Future[None]:
        """Create the group; the future completes when all ranks of the server have joined."""
        # The store prefix that torch.distributed uses for a group of this name.
        name = f"{self.name}/{self.name}//{self.device.type}/"

        def wait() -> None:
            self.group = _join(self.store, name, 0, self.ranks + 1, self.backend, self.host, self.timeout)

        return _on_thread(wait)

    def send(self, tensors: Iterable[Tensor]) -> Future[None]:
        """Broadcast tensors one after the other."""

        def broadcast() -> None:
            for tensor in tensors:
                _broadcast(self.group, tensor.to(self.device))

        return _on_thread(broadcast)


def _on_thread(work: Callable[[], None]) -> Future[None]:
    """Run a function on a thread. Its RuntimeError becomes TransferBroken."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except RuntimeError as error:
            done.set_exception(TransferBroken(str(error).partition("\n")[0]))

    Thread(target=run, daemon=True).start()
    return done


class CollectiveChannel:
    """Broadcast each update from the trainer to all engines at once.

    The process group is reused for all updates. If a member dies, the broadcast fails for the others (at once, or after
    the time-out if the member hangs). The group is then dropped, and each engine without the update receives it through
    a group of its own. The next update creates a new group. For this, and for engines that restart, the channel keeps a
    copy of the update on the CPU.

    Args:
        host: address of the trainer that the engines can reach. Nothing listens on any other address.
        backend: `gloo`, or `nccl` if trainer and engines have separate GPUs.
        timeout_s: time limit for a broadcast, and for creating a group.
    """

    def __init__(self, host: str, backend: str, timeout_s: float) -> None:
        self.host, self.backend, self.timeout_s = host, backend, timeout_s
        self.store, self.port = open_store(host, timedelta(seconds=timeout_s))
        self.groups = 0
        self.group: tuple[str, Any, int] | None = None
        """Name, process group (None until it is created) and number of readers. None after a failure."""
        self.sender: Thread | None = None
        self.version = 0
        self.published: dict[str, Tensor] = {}
        """CPU copies of the current weights and adapters."""
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        """Device that tensors are sent from."""

    def publish(self, update: WeightUpdate, readers: int) -> CollectiveReference:
        """Start to broadcast on a thread. It ends when all readers have read the update, or one fails."""
        parts = {name: tensor.detach() for name, tensor in update.parts()}
        base = {name: tensor for name, tensor in self.published.items() if ".lora_" not in name}
        has_weights = any(".lora_" not in name for name in parts)
        self.version = update.version
        if self.backend == "nccl":  # the trainer's device, if the trainer is in this process
            self.device = next((tensor.device for tensor in parts.values() if tensor.is_cuda), self.device)
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in parts.items()}
        self.published = ({} if has_weights else base) | copies
        return self._send(parts, readers)

    def republish(self) -> CollectiveReference:
        """Start to send the current weights and adapters to one engine."""
        self.group = None  # the old group has lost a member
        reference = self._send(self.published, 1)
        self.group = None
        return reference

    def _send(self, parts: dict[str, Tensor], readers: int) -> CollectiveReference:
        if self.sender is not None:
            self.sender.join()
        if self.group is None or self.group[2] != readers:
            self.groups += 1
            self.group = (f"weights-{self.groups}", None, readers)
        # Adapters first: the receiver's `WeightUpdate` needs them all before the first of the lazily read tensors.
        ordered = dict(sorted(parts.items(), key=lambda part: ".lora_" not in part[0]))
        self.sender = Thread(target=self._run, args=(self.group, ordered.values()), daemon=True)
        self.sender.start()
        shapes = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered.items())
        name = self.group[0]
        return CollectiveReference(
            self.version, shapes, (self.host, self.port), name, readers + 1, self.backend, self.timeout_s
        )

    def _run(self, group: tuple[str, Any, int], tensors: Iterable[Tensor]) -> None:
        """Create the group if needed, and broadcast tensors (on the sender's thread)."""
        name, process_group, readers = group
        try:
            if process_group is None:
                timeout = timedelta(seconds=self.timeout_s)
                process_group = _join(self.store, name, 0, readers + 1, self.backend, self.host, timeout)
                if self.group is group:
                    self.group = (name, process_group, readers)
            for tensor in tensors:
                _broadcast(process_group, tensor.to(self.device).contiguous())
        except RuntimeError as error:
            log.warning("a broadcast of weights failed: %s", str(error).partition("\n")[0])
            self.group = None

    def close(self) -> None:
        """Leave the group."""
        self.group, self.published = None, {}
        del self.store


@dataclass(frozen=True)
class CollectiveReference:
    """A broadcast that waits for its readers to join."""

    version: int
    parts: tuple[Part, ...]
    address: tuple[str, int]
    group: str
    size: int
    backend: str
    timeout_s: float

    def open(self) -> WeightUpdate:
        """Return the update; its tensors are received as they are iterated.

        Raises:
            TransferBroken: the broadcast failed. Iterating over the tensors may raise it too.
        """
        adapters = [part for part in self.parts if is_adapter(part[0])]
        tensors = self._receive(self.parts[len(adapters) :])
        return WeightUpdate(self.version, tensors, adapters_of(dict(self._receive(adapters))))

    def _receive(self, parts: Iterable[Part]) -> Iterator[tuple[str, Tensor]]:
        device = torch.device("cuda" if self.backend == "nccl" else "cpu")
        try:
            for name, dtype, shape in parts:
                tensor = torch.empty(shape, dtype=dtype, device=device)
                _broadcast(self._process_group(), tensor)
                yield name, tensor
        except RuntimeError as error:
            _joined.clear()
            raise TransferBroken(
                f"the broadcast of weights of version {self.version} was interrupted: {error}"
            ) from None

    def _process_group(self) -> Any:
        """Return the process group; join it the first time."""
        if self.group not in _joined:
            _joined.clear()
            timeout, host = timedelta(seconds=self.timeout_s), LOOPBACK
            store = c10d.TCPStore(*self.address, is_master=False, wait_for_workers=False, timeout=timeout)
            if self.address[0] != LOOPBACK:
                import ray

                host = ray.util.get_node_ip_address()
            rank = store.add(f"{self.group}/rank", 1)
            _joined[self.group] = _join(store, self.group, rank, self.size, self.backend, host, timeout)
        return _joined[self.group]
