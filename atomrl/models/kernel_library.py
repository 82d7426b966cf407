"""Training's C++ kernels (`kernels.cpp`). They are built on demand, once per machine, and never required."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

log = logging.getLogger(__name__)


_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-std=c++17")
_SOURCE = Path(__file__).with_name("kernels.cpp")
_HEADER = Path(__file__).with_name("vectors.h")  # included by all sources


def _cpu() -> str:
    """Return a description of the CPU, which `-march=native` depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return "\n".join([platform.machine(), platform.processor(), *named])


def build(source: Path, compiler: str, folder: Path) -> Path:
    """Compile `source` into `folder`; the file name has a hash of source, header, flags, compiler and CPU.

    Two processes may build at once: each writes its own file, and the rename is atomic.

    Raises:
        subprocess.CalledProcessError: the compiler failed; OSError: the folder cannot be written.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    parts = repr((source.read_bytes(), _HEADER.read_bytes(), _FLAGS, version, _cpu())).encode()
    library = folder / f"{source.stem}-{hashlib.blake2b(parts, digest_size=12).hexdigest()}.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            compiled = Path(scratch) / library.name
            subprocess.run([compiler, *_FLAGS, str(source), "-o", str(compiled)], capture_output=True, check=True)
            os.replace(compiled, library)
    return library


def load_library(source: Path, what: str) -> ctypes.CDLL | None:
    """Build and load a C++ library; None with a warning if it cannot be built.

    It is cached in `$XDG_CACHE_HOME/atomrl` (default: `~/.cache/atomrl`).

    Args:
        source: C++ file.
        what: what uses it, for log messages.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        log.warning("%s: no C++ compiler (g++, or CXX), using plain PyTorch, which is slower", what)
        return None
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atomrl"
    try:
        library = ctypes.CDLL(str(build(source, compiler, folder)))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else error
        log.warning("%s: the C++ kernels failed, using plain PyTorch, which is slower: %s", what, reason)
        return None
    log.info("%s: using the C++ kernels %s", what, library._name)
    return library


@cache
def _library() -> ctypes.CDLL | None:
    return load_library(_SOURCE, "training")


def usable(x: Tensor) -> bool:
    """Return True if the C++ kernels support a tensor: float32 or bfloat16 on a CPU, outside of `torch.compile`."""
    on_cpu = x.dtype in (torch.float32, torch.bfloat16) and x.device.type == "cpu"
    return on_cpu and not torch.compiler.is_compiling() and _library() is not None


@cache
def _kernel(name: str, dtype: torch.dtype) -> Any:
    pointer = ctypes.c_void_p.in_dll(cast(ctypes.CDLL, _library()), f"{name}_{str(dtype).removeprefix('torch.')}")
    return ctypes.CFUNCTYPE(None)(cast(int, pointer.value))


def call(name: str, first: Tensor, *others: Any) -> None:
    """Call the kernel for the dtype of its first argument; floats are passed as double, the thread count comes last.

    Tensors are contiguous; the first may be columns of a wider matrix, for a kernel that takes its stride.
    """
    arguments = first, *others
    assert first.stride(-1) == 1 and all(v.is_contiguous() for v in others if isinstance(v, Tensor)), name
    kinds = {int: ctypes.c_int64, float: ctypes.c_double, type(None): ctypes.c_void_p}
    values = [
        ctypes.c_void_p(value.data_ptr()) if isinstance(value, Tensor) else kinds[type(value)](value)
        for value in (*arguments, torch.get_num_threads())
    ]
    _kernel(name, first.dtype)(*values)
