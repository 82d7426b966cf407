"""Builds and loads the C++ kernel of `decode_attention.cpp`, on demand and once per machine."""

from __future__ import annotations

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

_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-std=c++17")
_SOURCE = Path(__file__).with_name("decode_attention.cpp")
logger = logging.getLogger(__name__)


_ADDRESSES = (
    *("qkv", "out", "q_norm", "k_norm", "keys", "values", "prompt_keys", "prompt_values", "cosine", "sine"),
    *("slots", "groups", "prompt_lengths", "lengths"),
)
_SIZES = (
    *("rows", "heads", "kv_heads", "head_dim", "blocks", "prompt_blocks", "threads"),
    *("act_bf16", "cache_bf16"),
)


class KernelArgs(ctypes.Structure):
    """`Args` of decode_attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _ADDRESSES),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("eps", ctypes.c_double),
    )


def _cpu() -> str:
    """What `-march=native` depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return "\n".join([platform.machine(), platform.processor(), *named])


def build(source: Path, compiler: str, folder: Path) -> Path:
    """Compile `source` into `folder`, under a name that changes with source, flags, compiler and CPU.

    Two processes may build at once: each writes its own file, and renaming it is atomic.

    Raises:
        subprocess.CalledProcessError: the compiler failed; OSError: the folder cannot be written.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    key = hashlib.blake2b(digest_size=12)
    for part in (source.read_bytes(), " ".join(_FLAGS).encode(), version, _cpu().encode()):
        key.update(hashlib.blake2b(part).digest())
    library = folder / f"{source.stem}-{key.hexdigest()}.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            subprocess.run([compiler, *_FLAGS, str(source), "-o", str(made)], capture_output=True, check=True)
            os.replace(made, library)
    return library


@cache
def load_kernel() -> ctypes.CDLL | None:
    """The kernel, or None where it cannot be built; a log line says which, and why.

    It is kept in `$XDG_CACHE_HOME/atomrl` (by default `~/.cache/atomrl`).
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        logger.warning("native rollout: no C++ compiler (g++, or CXX), so attention runs in PyTorch, more slowly")
        return None
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atomrl"
    try:
        library = ctypes.CDLL(str(build(_SOURCE, compiler, folder)))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else error
        logger.warning("native rollout: attention runs in PyTorch, more slowly; no C++ kernel: %s", reason)
        return None
    library.decode_attention.argtypes = [ctypes.POINTER(KernelArgs)]
    library.decode_attention.restype = None
    logger.info("native rollout: attention runs in the C++ kernel %s", library._name)
    return library
