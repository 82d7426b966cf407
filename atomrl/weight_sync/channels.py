"""Send weight updates to engines in other processes: by Ray's object store, files, or NCCL and gloo broadcasts.

`open_channel` returns the `WeightChannel` that `cluster.weight_transfer` names. A channel publishes an update and
returns a small `WeightReference`, which each engine's process opens. `ServerGroup` broadcasts to a server that joins
through torch.distributed.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from atomrl.cluster.ray_cluster import RayCluster
from atomrl.common.files import new_folder
from atomrl.models.lora import is_adapter
from atomrl.protocols import Adapter, WeightUpdate

log = logging.getLogger(__name__)


class WeightReference(Protocol):
    """A picklable reference to a published update, opened in the engine's process."""

    def open(self) -> WeightUpdate:
        """Return the update. Its tensors may be iterated once; copy those that you keep."""


class WeightChannel(Protocol):
    """Publishes weight updates to engines in other processes."""

    def publish(self, update: WeightUpdate, readers: int) -> WeightReference:
        """Publish an update for this number of engines. Earlier updates may be deleted."""

    def republish(self) -> WeightReference:
        """Publish the current state for one engine that restarts: the newest adapters, and the weights below them."""

    def close(self) -> None:
        """Delete the published updates."""


class TransferBroken(RuntimeError):
    """An update did not arrive completely. It can be sent again."""


def open_channel(cluster: RayCluster) -> WeightChannel:
    """Open the channel that `cluster.weight_transfer` names, for the actors of the role `rollout`."""
    config, ray = cluster.config, cluster.ray
    if config.weight_transfer == "files":
        assert config.weight_folder is not None, "the run has set it to its own folder"
        return FileChannel(Path(config.weight_folder).resolve())
    if config.weight_transfer == "collective":
        host = LOOPBACK if config.address is None else ray.util.get_node_ip_address()
        on_gpus = cluster.wanted["rollout"].gpus >= 1 and torch.cuda.is_available()  # this process is the sender
        return CollectiveChannel(host, "nccl" if on_gpus else "gloo", config.timeout_s)
    return ObjectStoreChannel(cluster.put)


# --------------------------------------------------------------------------------------------------------------------
# Shared memory: Ray's object store.


def adapters_of(parts: Mapping[str, Tensor]) -> dict[str, Adapter]:
    """Collect the adapters from tensors named as in `WeightUpdate.parts`. Their scale is 1, because B is scaled."""
    names = [name.removesuffix(".lora_A") for name in parts if name.endswith(".lora_A")]
    return {name: Adapter(parts[f"{name}.lora_A"], parts[f"{name}.lora_B"], 1.0) for name in names}


def update_of(version: int, publications: Iterable[Iterable[tuple[str, Tensor]]]) -> WeightUpdate:
    """Merge the tensors of several updates, oldest first: all weights, and the adapters of the last one."""
    tensors: dict[str, Tensor] = {}
    parts: dict[str, Tensor] = {}
    for publication in publications:
        parts = dict(publication)
        tensors |= {name: tensor for name, tensor in parts.items() if ".lora_" not in name}
    return WeightUpdate(version, tensors.items(), adapters_of(parts))


class ObjectStoreChannel:
    """Weights in Ray's object store. All processes of a machine share one copy; other machines fetch one.

    Args:
        put: function that stores an object and returns its reference (`RayCluster.put`).
    """

    def __init__(self, put: Callable[[Any], Any]) -> None:
        self.put, self.version = put, 0
        self.published: tuple[Any, ...] = ()
        """References to the last full update and, if adapters were sent since, to the newest of these."""

    def publish(self, update: WeightUpdate, readers: int) -> ObjectStoreReference:
        """Copy the update into the store."""
        tensors = list(update.tensors)
        # Released before `put`, so that the store need not hold two updates at once.
        self.published = () if tensors else self.published[:1]
        parts = WeightUpdate(update.version, tensors, update.adapters).parts()
        new = self.put(dict(parts))
        self.version, self.published = update.version, (*self.published, new)
        return ObjectStoreReference(self.version, (new,))

    def republish(self) -> ObjectStoreReference:
        """Return a reference to the same objects."""
        return ObjectStoreReference(self.version, self.published)

    def close(self) -> None:
        """Release the objects."""
        self.published = ()


@dataclass(frozen=True)
class ObjectStoreReference:
    """References to objects in Ray's store, oldest first."""

    version: int
    objects: tuple[Any, ...]

    def open(self) -> WeightUpdate:
        """Return the update. Its tensors are read-only views of the store's shared memory."""
        import ray

        return update_of(self.version, (ray.get(reference).items() for reference in self.objects))


# --------------------------------------------------------------------------------------------------------------------
# Files: for any engine, on any machine that shares the folder.

WEIGHTS, ADAPTERS = "model.safetensors", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write_update(update: WeightUpdate, folder: Path) -> None:
    """Write an update in Hugging Face format: weights to `model.safetensors`, adapters as peft writes them.

    Args:
        update: weights, adapters or both.
        folder: an existing empty folder.

    Example:
        >>> import torch
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     write_update(WeightUpdate(1, [("model.norm.weight", torch.ones(3))]), Path(folder))
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['model.safetensors']
    """
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in update.tensors:
        # safetensors refuses tensors that share memory, such as a tied head.
        is_tied = tensor.data_ptr() in seen
        tensors[name] = tensor.detach().clone() if is_tied else tensor.detach().contiguous()
        seen.add(tensor.data_ptr())
    if tensors:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    if update.adapters:
        write_adapters(update.adapters, folder)


def write_adapters(adapters: Mapping[str, Adapter], folder: Path) -> None:
    """Write adapters in peft's format; create the folder if needed.

    The scale is multiplied into B, because engines apply one scale (`lora_alpha / r`, here 1) to all layers.
    """
    folder.mkdir(exist_ok=True)
    (rank,) = {len(adapter.a) for adapter in adapters.values()}
    tensors = {
        f"{_PREFIX}{name.removesuffix('.weight')}.{part}.weight": tensor.detach().contiguous()
        for name, adapter in adapters.items()
        for part, tensor in (("lora_A", adapter.a), ("lora_B", adapter.b * adapter.scale))
    }
    save_file(tensors, folder / ADAPTERS, metadata={"format": "pt"})
    targets = sorted({name.split(".")[-2] for name in adapters})
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "bias": "none"}), encoding="utf-8")


class FileChannel:
    """Weights as safetensors files. They are written to a temporary folder and renamed, so readers never see partial
    files. Older updates are deleted.

    Args:
        folder: shared by all engines. Updates of an earlier channel in it are deleted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.version = folder, 0, 0
        self.published: tuple[Path, ...] = ()
        folder.mkdir(parents=True, exist_ok=True)
        self._remove_others()

    def _remove_others(self) -> None:
        for path in [*self.folder.glob("weights-*"), *self.folder.glob(".weights-*")]:
            if path not in self.published:
                shutil.rmtree(path)

    def publish(self, update: WeightUpdate, readers: int) -> FileReference:
        """Write the update."""
        tensors = list(update.tensors)
        self.count += 1
        new = self.folder / f"weights-{update.version}-{self.count}"
        with new_folder(new) as aside:
            write_update(replace(update, tensors=tensors), aside)
        self.version, self.published = update.version, (new,) if tensors else (*self.published[:1], new)
        self._remove_others()
        return FileReference(self.version, (new,))

    def republish(self) -> FileReference:
        """Return a reference to the same files."""
        return FileReference(self.version, self.published)

    def close(self) -> None:
        """Delete the files."""
        self.published = ()
        self._remove_others()


@dataclass(frozen=True)
class FileReference:
    """Folders written by `write_update`, oldest first."""

    version: int
    folders: tuple[Path, ...]

    def open(self) -> WeightUpdate:
        """Load the weights of the oldest folder and the adapters of the newest."""
        weights, adapters = self.folders[0] / WEIGHTS, self.folders[-1] / ADAPTERS
        parts = load_file(adapters) if adapters.exists() else {}
        named = {}
        for name, tensor in parts.items():
            layer, _, part = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
            named[f"{layer}.weight.{part}"] = tensor
        tensors = load_file(weights).items() if weights.exists() else ()
        return WeightUpdate(self.version, tensors, adapters_of(named))


# --------------------------------------------------------------------------------------------------------------------
# Broadcasts from the trainer to all engines: NCCL between GPUs, gloo between CPUs (torch.distributed).

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
