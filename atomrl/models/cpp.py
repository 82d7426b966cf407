"""Training's C++ kernels (`kernels.cpp`), and how C++ is built: on demand, once per machine, never required."""

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
from typing import Any

import torch
from torch import Tensor

_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-std=c++17")
_SOURCE = Path(__file__).with_name("kernels.cpp")
log = logging.getLogger(__name__)


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
    """Whether the kernels compute on this tensor: float32 on a CPU, not compiled, and they could be built."""
    on_cpu = x.dtype == torch.float32 and x.device.type == "cpu"
    return on_cpu and not torch.compiler.is_compiling() and _library() is not None


def _call(name: str, *arguments: Any) -> None:
    """Call a kernel; floats are passed as double, and the threads come last."""
    assert all(value.is_contiguous() for value in arguments if isinstance(value, Tensor)), name
    kinds = {int: ctypes.c_int64, float: ctypes.c_double, type(None): ctypes.c_void_p}
    values = [
        ctypes.c_void_p(value.data_ptr()) if isinstance(value, Tensor) else kinds[type(value)](value)
        for value in (*arguments, torch.get_num_threads())
    ]
    getattr(_library(), name)(*values)


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., H], weight [H] -> x contiguous, its norm, and 1 / rms [...]."""
    x, width = x.contiguous(), x.shape[-1]
    out, scale = torch.empty_like(x), x.new_empty(x.shape[:-1])
    _call("norm_forward", x, weight, out, scale, scale.numel(), width, eps)
    return x, out, scale


def norm_backward(x: Tensor, weight: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    grad_x, parts = torch.empty_like(x), x.new_zeros(torch.get_num_threads(), x.shape[-1])
    _call("norm_backward", x, weight, scale, grad.contiguous(), grad_x, parts, scale.numel(), x.shape[-1])
    return grad_x, parts.sum(0)


def swiglu_forward(both: Tensor) -> Tensor:
    """[..., 2 I], contiguous -> [..., I]."""
    width = both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], width)
    _call("swiglu_forward", both, out, out.numel() // width, width)
    return out


def swiglu_backward(both: Tensor, grad: Tensor) -> Tensor:
    """Gradient of both."""
    result = torch.empty_like(both)
    _call("swiglu_backward", both, grad.contiguous(), result, grad.numel() // grad.shape[-1], grad.shape[-1])
    return result


class StreamAttention(torch.autograd.Function):
    """`kernels.PackedAttention` with rotation, change of layout and softmax in C++."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, blocks: tuple[Any, ...], cos: Tensor, sin: Tensor, kv_heads: int) -> Tensor:
        """qkv [N, heads + 2 kv_heads, D]; blocks `shared_prefix.Block`; cos, sin [positions, D/2] -> [N, heads * D]."""
        qkv, (tokens, heads, size) = qkv.contiguous(), qkv.shape
        heads -= 2 * kv_heads
        out, saved, prompts = qkv.new_empty(tokens, heads * size), [], None
        for block in blocks:
            make = qkv.new_empty if block.even else qkv.new_zeros
            q = make(block.rows, heads, block.length, size)
            k, v = (make(block.rows, kv_heads, block.before + block.length, size) for _ in range(2))
            _move(block, qkv, 0, q, (cos, sin), size**-0.5)
            _move(block, qkv, heads, k, (cos, sin))
            _move(block, qkv, heads + kv_heads, v)
            prompts = prompts or (k, v)
            if block.before:
                for part, theirs in zip((k, v), prompts, strict=True):
                    part[:, :, : block.before] = theirs.index_select(0, block.prompts)
            q, k, v = (x.view(block.rows * kv_heads, -1, size) for x in (q, k, v))
            shares = torch.bmm(q, k.transpose(1, 2))
            _call("softmax_forward", shares, block.seen, block.rows, heads, block.length, block.before)
            mixed = torch.bmm(shares, v)
            _move(block, out, 0, mixed.view(block.rows, heads, block.length, size), back=True)
            saved += [q, k, v, shares]
        ctx.save_for_backward(cos, sin, *saved)
        ctx.blocks, ctx.shape = blocks, qkv.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin, *saved = ctx.saved_tensors
        grad, result = grad.contiguous(), grad.new_empty(ctx.shape)
        shared: list[tuple[Tensor, Tensor, Tensor]] = []
        for number, block in reversed(list(enumerate(ctx.blocks))):
            q, k, v, shares = saved[4 * number : 4 * number + 4]
            size, kv_heads = q.shape[2], len(q) // block.rows
            heads = ctx.shape[1] - 2 * kv_heads
            own = (grad.new_empty if block.even else grad.new_zeros)(q.shape)
            _move(block, grad, 0, own.view(block.rows, heads, -1, size))
            grad_v = torch.bmm(shares.transpose(1, 2), own)
            scores = torch.bmm(own, v.transpose(1, 2))
            _call("softmax_backward", shares, scores, block.rows * heads * block.length, block.length, block.before)
            grad_q, grad_k = torch.bmm(scores, k), torch.bmm(scores.transpose(1, 2), q)
            grad_k, grad_v = (x.view(block.rows, kv_heads, -1, size) for x in (grad_k, grad_v))
            if block.before:
                shared.append((block.prompts, grad_k[:, :, : block.before], grad_v[:, :, : block.before]))
            if number == 0:
                for owners, more_k, more_v in shared:
                    grad_k.index_add_(0, owners, more_k)
                    grad_v.index_add_(0, owners, more_v)
            _move(block, result, 0, grad_q.view(block.rows, heads, -1, size), (cos, sin), size**-0.5, back=True)
            _move(block, result, heads, grad_k, (cos, sin), back=True)
            _move(block, result, heads + kv_heads, grad_v, back=True)
        return result, None, None, None, None


def _move(
    block: Any,
    stream: Tensor,
    first: int,
    rows: Tensor,
    tables: tuple[Tensor | None, Tensor | None] = (None, None),
    factor: float = 1.0,
    back: bool = False,
) -> None:
    """Heads of the block's tokens, from the `first` on, into rows [R, heads, S, D], or back."""
    _, heads, slots, size = rows.shape
    stride = stream[0].numel()
    stream, skip = stream[block.start : block.stop], slots - block.length
    shape = (len(stream), stride, first * size, heads, size, block.length, slots, skip, int(back))
    _call("move_heads", stream, rows, block.slots, block.positions, *tables, *shape, factor)
