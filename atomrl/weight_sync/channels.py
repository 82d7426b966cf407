"""Ways for weights to travel to engines in other processes."""

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


class WeightReference(Protocol):
    """Where an update lies; small, can be pickled, opened in the process of the engine."""

    def open(self) -> WeightUpdate:
        """The update. Its tensors are to be read once, and copied by whoever keeps them."""


class WeightChannel(Protocol):
    """Brings an update to engines in other processes."""

    def publish(self, update: WeightUpdate, readers: int) -> WeightReference:
        """Lay out an update for so many engines; what was laid out before may go."""

    def again(self) -> WeightReference:
        """All that an engine must have by now, the weights beneath adapters too, for one that starts again."""

    def close(self) -> None:
        """Remove what is laid out."""


class TransferBroken(RuntimeError):
    """An update did not arrive whole; it can be sent again."""


def adapters_of(parts: Mapping[str, Tensor]) -> dict[str, Adapter]:
    """The adapters among parts that are named as in `WeightUpdate.parts`; their scale is in B."""
    names = [name.removesuffix(".lora_A") for name in parts if name.endswith(".lora_A")]
    return {name: Adapter(parts[f"{name}.lora_A"], parts[f"{name}.lora_B"], 1.0) for name in names}


def update_of(version: int, publications: Iterable[Iterable[tuple[str, Tensor]]]) -> WeightUpdate:
    """An update from the parts of several, oldest first: the weights of all, and the adapters of the last."""
    tensors: dict[str, Tensor] = {}
    parts: dict[str, Tensor] = {}
    for publication in publications:
        parts = dict(publication)
        tensors |= {name: tensor for name, tensor in parts.items() if ".lora_" not in name}
    return WeightUpdate(version, tensors.items(), adapters_of(parts))


class ObjectStoreChannel:
    """Shared memory: Ray's object store, where all processes of a machine read one copy, and other machines fetch one.

    Args:
        put: what puts into the store, with tensors as arrays (`cluster.hosted`).
    """

    def __init__(self, put: Callable[[Any], Any]) -> None:
        self.put, self.version = put, 0
        self.kept: tuple[Any, ...] = ()

    def publish(self, update: WeightUpdate, readers: int) -> ObjectStoreReference:
        """Copy the update into the store."""
        tensors = list(update.tensors)
        self.kept = () if tensors else self.kept[:1]  # the store has room for the next where the last has gone
        parts = WeightUpdate(update.version, tensors, update.adapters).parts()
        new = self.put(dict(parts))
        self.version, self.kept = update.version, (*self.kept, new)
        return ObjectStoreReference(self.version, (new,))

    def again(self) -> ObjectStoreReference:
        """The same objects."""
        return ObjectStoreReference(self.version, self.kept)

    def close(self) -> None:
        """Let the store forget them."""
        self.kept = ()


@dataclass(frozen=True)
class ObjectStoreReference:
    """Objects in Ray's store, oldest first."""

    version: int
    objects: tuple[Any, ...]

    def open(self) -> WeightUpdate:
        """Tensors over the store's own memory, which may only be read."""
        import ray

        return update_of(self.version, (ray.get(found).items() for found in self.objects))


# --------------------------------------------------------------------------------------------------------------------
# Weights by files: any engine, on any machine that sees the folder.

WEIGHTS, ADAPTERS = "model.safetensors", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write_update(update: WeightUpdate, folder: Path) -> None:
    """Write an update as engines read it: `model.safetensors` under the published names, where it brings weights, and
    adapters as peft writes them, where it brings some.

    Args:
        update: to write.
        folder: is there, and empty.

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
        # A file may not have one memory under two names, as those of a tied head.
        again = tensor.data_ptr() in seen
        tensors[name] = tensor.detach().clone() if again else tensor.detach().contiguous()
        seen.add(tensor.data_ptr())
    if tensors:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    if update.adapters:
        write_adapters(update.adapters, folder)


def write_adapters(adapters: Mapping[str, Adapter], folder: Path) -> None:
    """Write adapters as peft does, into a folder that is there or not. Their scale is in B, since engines know one
    scale for all."""
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
    """Safetensors files in a folder: written aside and renamed, so that what is there is whole, and removed when the
    next are there.

    Args:
        folder: that all engines see; what an earlier channel left there is removed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.version = folder, 0, 0
        self.kept: tuple[Path, ...] = ()
        folder.mkdir(parents=True, exist_ok=True)
        self._remove_others()

    def _remove_others(self) -> None:
        for found in [*self.folder.glob("weights-*"), *self.folder.glob(".weights-*")]:
            if found not in self.kept:
                shutil.rmtree(found)

    def publish(self, update: WeightUpdate, readers: int) -> FileReference:
        """Write the update."""
        tensors = list(update.tensors)
        self.count += 1
        new = self.folder / f"weights-{update.version}-{self.count}"
        with new_folder(new) as aside:
            write_update(replace(update, tensors=tensors), aside)
        self.version, self.kept = update.version, (new,) if tensors else (*self.kept[:1], new)
        self._remove_others()
        return FileReference(self.version, (new,))

    def again(self) -> FileReference:
        """The same files."""
        return FileReference(self.version, self.kept)

    def close(self) -> None:
        """Remove the files."""
        self.kept = ()
        self._remove_others()


@dataclass(frozen=True)
class FileReference:
    """Folders that `write_update` has filled, oldest first."""

    version: int
    folders: tuple[Path, ...]

    def open(self) -> WeightUpdate:
        """The weights that the oldest folder has, and the adapters of the newest."""
        weights, adapters = self.folders[0] / WEIGHTS, self.folders[-1] / ADAPTERS
        parts = load_file(adapters) if adapters.exists() else {}
        named = {}
        for name, tensor in parts.items():
            layer, _, part = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
            named[f"{layer}.weight.{part}"] = tensor
        tensors = load_file(weights).items() if weights.exists() else ()
        return WeightUpdate(self.version, tensors, adapters_of(named))


# --------------------------------------------------------------------------------------------------------------------
# Weights by a broadcast from the trainer to all engines: NCCL between GPUs, gloo between CPUs (torch.distributed).

log = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
Part = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor on its way."""
_joined: dict[str, Any] = {}
"""The group that this process reads from, by its name."""


def _join(store: Any, name: str, rank: int, size: int, backend: str, host: str, timeout: timedelta) -> Any:
    """A group of its own, beside whatever groups the process is in; waits until all are there."""
    prefixed = c10d.PrefixStore(name, store)
    if backend == "nccl":
        on_gpu = c10d.ProcessGroupNCCL.Options()
        on_gpu._timeout = timeout
        return c10d.ProcessGroupNCCL(prefixed, rank, size, on_gpu)
    gloo: Any = c10d.ProcessGroupGloo  # its type stubs lack the options
    options = gloo._Options()
    options._timeout, options._devices = timeout, [gloo.create_device(hostname=host)]
    return gloo(prefixed, rank, size, options)


def _broadcast(group: Any, tensor: Tensor) -> None:
    options = c10d.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()


def open_store(host: str, timeout: timedelta) -> tuple[Any, int]:
    """A store at an address, and its port there; nothing listens on any other address."""
    listener = socket.socket()
    listener.bind((host, 0))
    listener.listen()
    port = listener.getsockname()[1]
    store = c10d.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )
    return store, port


class ServerGroup:
    """The sender's end of a group whose other members are the ranks of a server, which joins by torch.distributed.

    What has to wait for the server is done on a thread, and given as a future; it fails where the server has gone.

    Args:
        host: of this process, at which the server reaches it.
        device: from which is sent: by gloo from the CPU, else by NCCL.
        ranks: of the server.
        timeout_s: of the making of the group, and of a broadcast.
    """

    _numbers = itertools.count()

    def __init__(self, host: str, device: str, ranks: int, timeout_s: float) -> None:
        self.host, self.ranks, self.timeout = host, ranks, timedelta(seconds=timeout_s)
        self.device, self.backend = torch.device(device), "gloo" if device == "cpu" else "nccl"
        self.name = f"atomrl-{os.getpid()}-{next(self._numbers)}"
        self.store, self.port = open_store(host, self.timeout)
        self.group: Any = None

    def join(self) -> Future[None]:
        """Wait for the server's ranks."""
        # Where `init_process_group` and its like put the keys of a group of this name.
        name = f"{self.name}/{self.name}//{self.device.type}/"

        def wait() -> None:
            self.group = _join(self.store, name, 0, self.ranks + 1, self.backend, self.host, self.timeout)

        return _on_thread(wait)

    def send(self, tensors: Iterable[Tensor]) -> Future[None]:
        """Broadcast tensors, one after the other."""

        def broadcast() -> None:
            for tensor in tensors:
                _broadcast(self.group, tensor.to(self.device))

        return _on_thread(broadcast)


def _on_thread(work: Callable[[], None]) -> Future[None]:
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
    """Broadcasts each update from the trainer to all engines at once.

    The group stays from update to update. When a member dies, the others' broadcast ends with an error (at once, or
    within the time-out where it hangs), the group is given up, and each engine that lacks the update gets it by a group
    of its own; the next update makes a new one. For that, and for engines that start again, the update is kept in the
    trainer's memory on the CPU.

    Args:
        host: of the trainer, at which the engines reach it. Nothing listens on any other address.
        backend: `gloo`, or `nccl` where trainer and engines have GPUs of their own.
        timeout_s: of a broadcast, and of the making of a group.
    """

    def __init__(self, host: str, backend: str, timeout_s: float) -> None:
        self.host, self.backend, self.timeout_s = host, backend, timeout_s
        self.store, self.port = open_store(host, timedelta(seconds=timeout_s))
        self.groups = 0
        self.group: tuple[str, Any, int] | None = None
        """Name, group and number of readers, while it works."""
        self.sender: Thread | None = None
        self.version = 0
        self.kept: dict[str, Tensor] = {}
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        """From which is sent."""

    def publish(self, update: WeightUpdate, readers: int) -> CollectiveReference:
        """Begin to broadcast; it ends when all readers have opened the reference, or one fails."""
        parts = {name: tensor.detach() for name, tensor in update.parts()}
        base = {name: tensor for name, tensor in self.kept.items() if ".lora_" not in name}
        whole = any(".lora_" not in name for name in parts)
        self.version = update.version
        if self.backend == "nccl":  # the trainer's, where that is in this process
            self.device = next((tensor.device for tensor in parts.values() if tensor.is_cuda), self.device)
        self.kept = ({} if whole else base) | {name: tensor.to("cpu", copy=True) for name, tensor in parts.items()}
        return self._send(parts, readers)

    def again(self) -> CollectiveReference:
        """Begin to send what is kept to one engine."""
        self.group = None  # the one that was has lost a member
        reference = self._send(self.kept, 1)
        self.group = None
        return reference

    def _send(self, parts: dict[str, Tensor], readers: int) -> CollectiveReference:
        if self.sender is not None:
            self.sender.join()
        if self.group is None or self.group[2] != readers:
            self.groups += 1
            self.group = (f"weights-{self.groups}", None, readers)
        # Adapters first: an update has them all when its first tensor is read.
        ordered = dict(sorted(parts.items(), key=lambda part: ".lora_" not in part[0]))
        self.sender = Thread(target=self._run, args=(self.group, ordered.values()), daemon=True)
        self.sender.start()
        shapes = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered.items())
        name = self.group[0]
        return CollectiveReference(
            self.version, shapes, (self.host, self.port), name, readers + 1, self.backend, self.timeout_s
        )

    def _run(self, group: tuple[str, Any, int], tensors: Iterable[Tensor]) -> None:
        name, members, readers = group
        try:
            if members is None:
                timeout = timedelta(seconds=self.timeout_s)
                members = _join(self.store, name, 0, readers + 1, self.backend, self.host, timeout)
                if self.group is group:
                    self.group = (name, members, readers)
            for tensor in tensors:
                _broadcast(members, tensor.to(self.device).contiguous())
        except RuntimeError as error:
            log.warning("a broadcast of weights failed: %s", str(error).partition("\n")[0])
            self.group = None

    def close(self) -> None:
        """Leave the group."""
        self.group, self.kept = None, {}
        del self.store


@dataclass(frozen=True)
class CollectiveReference:
    """A broadcast that waits for its readers."""

    version: int
    parts: tuple[Part, ...]
    address: tuple[str, int]
    group: str
    size: int
    backend: str
    timeout_s: float

    def open(self) -> WeightUpdate:
        """The update, whose tensors arrive as they are read.

        Raises:
            TransferBroken: it ended before all had come; reading its tensors may raise it too.
        """
        adapters = [part for part in self.parts if is_adapter(part[0])]
        tensors = self._receive(self.parts[len(adapters) :])
        return WeightUpdate(self.version, tensors, adapters_of(dict(self._receive(adapters))))

    def _receive(self, parts: Iterable[Part]) -> Iterator[tuple[str, Tensor]]:
        device = torch.device("cuda" if self.backend == "nccl" else "cpu")
        try:
            for name, dtype, shape in parts:
                tensor = torch.empty(shape, dtype=dtype, device=device)
                _broadcast(self._members(), tensor)
                yield name, tensor
        except RuntimeError as error:
            _joined.clear()
            raise TransferBroken(f"the broadcast of weights of version {self.version} broke off: {error}") from None

    def _members(self) -> Any:
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


# --------------------------------------------------------------------------------------------------------------------
# The ways by which weights travel to engines in other processes, by the config's names.


def open_channel(cluster: RayCluster) -> WeightChannel:
    """The channel of `cluster.weight_transfer`, which the actors of the role `rollout` read."""
    config, ray = cluster.config, cluster.ray
    if config.weight_transfer == "files":
        assert config.weight_folder is not None, "a run puts its own folder there"
        return FileChannel(Path(config.weight_folder).resolve())
    if config.weight_transfer == "collective":
        host = LOOPBACK if config.address is None else ray.util.get_node_ip_address()
        on_gpus = cluster.wanted["rollout"].gpus >= 1 and torch.cuda.is_available()  # this process is the sender
        return CollectiveChannel(host, "nccl" if on_gpus else "gloo", config.timeout_s)
    return ObjectStoreChannel(cluster.put)
