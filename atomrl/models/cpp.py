"""Training's C++ kernels (`kernels.cpp`), and how C++ is built: on demand, once per machine, never required."""

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

_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-std=c++17")
_SOURCE = Path(__file__).with_name("kernels.cpp")
_HEADER = Path(__file__).with_name("vectors.h")  # of all sources
log = logging.getLogger(__name__)


def _cpu() -> str:
    """What `-march=native` depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return "\n".join([platform.machine(), platform.processor(), *named])


def build(source: Path, compiler: str, folder: Path) -> Path:
    """Compile `source` into `folder`, under a name that changes with source, header, flags, compiler and CPU.

    Two processes may build at once: each writes its own file, and renaming it is atomic.

    Raises:
        subprocess.CalledProcessError: the compiler failed; OSError: the folder cannot be written.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    parts = repr((source.read_bytes(), _HEADER.read_bytes(), _FLAGS, version, _cpu())).encode()
    library = folder / f"{source.stem}-{hashlib.blake2b(parts, digest_size=12).hexdigest()}.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            subprocess.run([compiler, *_FLAGS, str(source), "-o", str(made)], capture_output=True, check=True)
            os.replace(made, library)
    return library


def load_library(source: Path, what: str) -> ctypes.CDLL | None:
    """Build and load `source`, or None where that cannot be; a log line of `what` says which, and why.

    It is kept in `$XDG_CACHE_HOME/atomrl` (by default `~/.cache/atomrl`).
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        log.warning("%s: no C++ compiler (g++, or CXX), so it runs in PyTorch alone, more slowly", what)
        return None
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atomrl"
    try:
        library = ctypes.CDLL(str(build(source, compiler, folder)))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else error
        log.warning("%s: PyTorch alone, more slowly; the C++ kernels failed: %s", what, reason)
        return None
    log.info("%s: with the C++ kernels %s", what, library._name)
    return library


@cache
def _library() -> ctypes.CDLL | None:
    return load_library(_SOURCE, "training")


def usable(x: Tensor) -> bool:
    """Whether the kernels compute on this tensor: float32 or bfloat16 on a CPU, not compiled, and there is a build."""
    on_cpu = x.dtype in (torch.float32, torch.bfloat16) and x.device.type == "cpu"
    return on_cpu and not torch.compiler.is_compiling() and _library() is not None


@cache
def _kernel(name: str, dtype: torch.dtype) -> Any:
    pointer = ctypes.c_void_p.in_dll(cast(ctypes.CDLL, _library()), f"{name}_{str(dtype).removeprefix('torch.')}")
    return ctypes.CFUNCTYPE(None)(cast(int, pointer.value))


def call(name: str, first: Tensor, *others: Any) -> None:
    """Call a kernel of the dtype of its first argument; floats are passed as double, and the threads come last."""
    arguments = first, *others
    assert all(value.is_contiguous() for value in arguments if isinstance(value, Tensor)), name
    kinds = {int: ctypes.c_int64, float: ctypes.c_double, type(None): ctypes.c_void_p}
    values = [
        ctypes.c_void_p(value.data_ptr()) if isinstance(value, Tensor) else kinds[type(value)](value)
        for value in (*arguments, torch.get_num_threads())
    ]
    _kernel(name, first.dtype)(*values)
