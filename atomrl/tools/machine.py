"""This machine: what is installed, its hardware, and what a run with the default config will use.

All functions yield names and texts; a text that begins with `broken` is a fault. Environment variables are left out:
they may hold secrets.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

EXTRAS = {
    "peft": "adapters (model.lora)",
    "matplotlib": "curves.png, atomrl compare --plot",
    "tensorboard": "tracking.sinks=[tensorboard]",
    "wandb": "tracking.sinks=[wandb]",
    "reasoning-gym": "data.train=reasoning_gym:NAME",
    "math-verify": "the boxed reward",
    "pyarrow": "Parquet files",
    "bm25s": "atomrl data serve",
    "faiss-cpu": "atomrl data serve --encoder",
}
"""Optional packages and the features that need them."""
CORE = ("torch", "transformers", "tokenizers", "safetensors", "pydantic", "pyyaml", "rich", "jaxtyping", "numpy")


def installed() -> Iterator[tuple[str, str]]:
    """Yield versions of Python, AtomRL, and required and optional packages."""
    import platform

    from atomrl import __version__
    from atomrl.tracking.system_info import installed_version

    yield "python", platform.python_version()
    yield "atomrl", __version__
    for package in CORE:
        yield package, installed_version(package) or f"broken: not installed (pip install {package})"
    for package, purpose in EXTRAS.items():
        yield package, installed_version(package) or f"not installed (pip install {package}); for {purpose}"


def hardware() -> Iterator[tuple[str, str]]:
    """Yield CPU, instruction set, memory, GPUs and free disk space."""
    import torch

    from atomrl.common.memory import available_memory
    from atomrl.tracking.system_info import describe_system

    machine = describe_system()
    yield "cpu", f"{machine['cpu']}, {machine['cpus']} cores, torch uses {torch.get_num_threads()} threads"
    yield "instructions", torch.backends.cpu.get_cpu_capability()
    yield "memory", f"{machine['memory_gib']} GiB, {available_memory() / 2**30:.1f} GiB available"
    unused = Path("/proc/driver/nvidia/version").exists()
    none = f"found, but torch {torch.__version__} cannot use it: install a CUDA build" if unused else "none"
    yield "gpu", "; ".join(machine["gpus"]) or none
    yield "disk", f"{shutil.disk_usage(Path.cwd()).free / 2**30:.1f} GiB free here"


def chosen_defaults() -> Iterator[tuple[str, str]]:
    """Yield device, dtype, engine, trainer and kernels of a run with the default config, each with the reason."""
    from atomrl.engines.native.cpu_kernels import load_kernels
    from atomrl.models.loading import compute_dtype
    from atomrl.trainer.build import device_name

    device = device_name()
    dtype = str(compute_dtype("auto", device)).removeprefix("torch.")
    has = "has" if dtype == "bfloat16" else "has no"
    yield "device", device
    yield "dtype", f"{dtype} (model.dtype=auto: this {device} {has} bfloat16 instructions)"
    yield "engine", "vLLM on a GPU if it is installed; else native for Llama, Qwen2 and Qwen3, hf for other models"
    yield "trainer", "one process, AdamW on float32 weights"
    if device == "cuda":
        yield "kernels", "torch's (the C++ kernels are for CPUs)"
    elif load_kernels() is not None:
        yield "kernels", "the C++ kernels: they compile here"
    else:
        yield "kernels", "torch's: the C++ kernels do not compile here (install g++ for faster rollouts)"
