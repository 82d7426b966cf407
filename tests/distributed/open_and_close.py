"""Open an engine, draw with it and close it, again and again, and print what is there after each time.

python -m tests.distributed.open_and_close ENGINE MODEL TIMES
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import tempfile
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from transformers import AutoTokenizer

from atomrl.cluster.ray_cluster import RayCluster
from atomrl.config import ClusterConfig
from atomrl.engines.generation import generate
from atomrl.engines.native.engine import NativeEngine
from atomrl.engines.replicas import ReplicatedEngine
from atomrl.engines.requests import EngineOptions
from atomrl.engines.sglang import SGLangEngine
from atomrl.engines.vllm import VLLMEngine
from atomrl.engines.vllm_server import VLLMServerEngine
from atomrl.models.loading import read_weights
from atomrl.protocols import WeightUpdate
from atomrl.types import SamplingParams
from tests.prompts import prompts_of

KINDS = {"native": NativeEngine, "vllm": VLLMEngine, "vllm-server": VLLMServerEngine, "sglang": SGLangEngine}
_OWN_NAME = re.compile(r"/tmp/atomrl-run-.*/session_[^/]*|_?[0-9a-f]*\d{4,}")
SETTLE_S = 10.0
"""For what ends by itself, such as processes of Ray that have been told to."""


def opened(kind: str, path: str):
    """An engine of a kind."""
    options = EngineOptions(torch.float32, "cpu", max_concurrent_completions=8)
    return KINDS[kind].from_pretrained(path, AutoTokenizer.from_pretrained(path), options)


def use(engine, path: str) -> None:
    """New weights, and some tokens."""
    weights = [(name, tensor) for name, tensor in read_weights(path) if name in engine.weight_shapes()]
    engine.update_weights(WeightUpdate(version=1, tensors=weights))
    engine.weight_hashes()
    generate(engine, prompts_of((5, 6, 7)), SamplingParams(completions_per_prompt=2, max_completion_tokens=4))


def cycle(kind: str, path: str) -> None:
    """Once: `replicas` and `collective` are two actors, by two ways of weights, and `vllm-actor` is one with vLLM."""
    if kind in KINDS:
        with closing(opened(kind, path)) as engine:
            use(engine, path)
        return
    way = "collective" if kind == "collective" else "shared_memory"
    count, inner = (1, "vllm") if kind == "vllm-actor" else (2, "native")
    resources = {"rollout": {"num_cpus": 0.1}}
    config = ClusterConfig(replicas=count, resources=resources, weight_transfer=way, timeout_s=300)
    with (
        closing(RayCluster(config, ["rollout"])) as cluster,
        closing(ReplicatedEngine(partial(opened, inner, path), cluster)) as engine,
    ):
        use(engine, path)


def children() -> set[int]:
    """Processes beneath this one, and those that it started which have another parent by now."""
    parents, marked = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text().rpartition(")")[2].split()[1]
            own = f"OPEN_AND_CLOSE={os.getpid()}\0".encode() in (stat.parent / "environ").read_bytes()
        except OSError:
            continue
        parents[int(stat.parent.name)], marked[int(stat.parent.name)] = int(parent), own
    pids = {pid for pid, own in marked.items() if own} | {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids - {os.getpid()}


def names(folder: Path, pattern: str = "*") -> set[str]:
    return {str(path) for path in folder.glob(pattern)}


def mapped_by_others() -> str:
    """Return the shared memory that other processes of this machine have mapped."""
    mapped = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped += [line for line in maps.read_text().splitlines() if "/dev/shm/" in line]
        except OSError:
            continue
    return "\n".join(mapped)


def there() -> dict[str, list[str]]:
    """Return children, threads and open files of this process, and the contents of the folders."""
    gc.collect()
    files = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            files.append(os.readlink(link))
        except OSError:
            continue
    shared, folders = names(Path("/dev/shm")), names(Path(tempfile.gettempdir()))
    others = mapped_by_others() if shared else ""
    return {
        "processes": sorted(name_of(pid) for pid in children()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "native threads": native_threads(),
        "files": sorted(_OWN_NAME.sub("...", name.partition(":[")[0]) for name in files),
        "folders": sorted(folders | names(Path("/tmp"), f"atomrl-*{os.getpid()}*")),
        "shared memory": sorted(name for name in shared if name not in others and "/sem.mp-" not in name),
    }


def native_threads() -> list[str]:
    """The names of this process's, as the system has them."""
    threads = []
    for comm in Path("/proc/self/task").glob("*/comm"):
        try:
            threads.append(comm.read_text().strip())
        except OSError:  # ended in between
            continue
    return sorted(threads)


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:100]
    except OSError:
        return ""


def settled(before: dict[str, list[str]] | None) -> dict[str, list[str]]:
    """Return the state once it equals `before`, or after a time limit."""
    end = time.monotonic() + SETTLE_S
    while (state := there()) != before and time.monotonic() < end:
        time.sleep(0.2)
    return state


def main() -> None:
    kind, path, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
    state = None
    for _ in range(times):
        cycle(kind, path)
        state = settled(state)
        print("THERE " + json.dumps(state), flush=True)


if __name__ == "__main__":
    os.environ["OPEN_AND_CLOSE"] = str(os.getpid())
    main()
