"""Kernels of a decoder layer with hand-written backward passes, and the C++ library for CPUs.

Autograd's own versions read and write large tensors several times more often, which on a CPU costs as much as the
matrix products. On a CPU, norm and SwiGLU run in C++ if it can be built. `tests/models/test_kernels.py` compares each
with the plain formula and finite differences.

Hand-written backward passes support no forward-mode or double differentiation. Inside `plain_formulas()` a decoder uses
PyTorch operations instead, which do.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

# --------------------------------------------------------------------------------------------------------------------
# Training's C++ kernels (`kernels.cpp`). They are built on demand, once per machine, and never required.

_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-std=c++17")
_SOURCE = Path(__file__).with_name("kernels.cpp")
_HEADER = Path(__file__).with_name("vectors.h")  # included by all sources
log = logging.getLogger(__name__)


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


# --------------------------------------------------------------------------------------------------------------------
# Switches: plain operations, and weights rounded once.

_NORM_PARTS = 32
"""Partial sums of a norm's weight gradient: a fixed number, so that results do not depend on the number of threads."""
_plain = False
_rounded: dict[tuple[int, ...], tuple[list[int], Tensor]] | None = None
_places: Mapping[tuple[int, ...], Tensor] = {}


@contextmanager
def plain_formulas() -> Iterator[None]:
    """Make models compute by operations with all modes of differentiation inside the block; slower, the same values.

    `GPT` then does without kernels, shared prompts and compiled layers; transformers models without fused attention.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    global _plain
    before, _plain = _plain, True
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _plain = before


def are_plain() -> bool:
    """Return True inside `plain_formulas`, and inside `torch.compile`, which fuses plain operations itself."""
    return _plain or torch.compiler.is_compiling()


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Call `function.apply`, with a type for its result."""
    return cast(Tensor, function.apply(*arguments))


def stacked(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate matrices of the same width, or vectors, in this dtype."""
    converted = [tensor.to(dtype) for tensor in tensors]
    return converted[0] if len(converted) == 1 else torch.cat(converted)


@contextmanager
def round_once(places: Mapping[tuple[int, ...], Tensor] | None = None) -> Iterator[None]:
    """Round weights to the compute dtype once for all micro-batches inside the block, instead of at each use.

    This takes the memory of a rounded copy of the decoder's linear weights.

    Args:
        places: addresses of concatenated weights -> memory for them in the compute dtype; others get their own.
    """
    global _rounded, _places
    before, _rounded, _places = (_rounded, _places), {}, places or {}
    try:
        yield
    finally:
        _rounded, _places = before


def rounded(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate weights in the compute dtype; cached inside `round_once` until a weight changes."""
    if _rounded is None or tensors[0].dtype == dtype:  # without rounding, a cached copy is not worth its memory
        return stacked(tensors, dtype)
    # Keyed by address: saved-tensor hooks return other tensor objects in the backward pass.
    key, versions = tuple(tensor.data_ptr() for tensor in tensors), [tensor._version for tensor in tensors]
    if key not in _rounded or _rounded[key][0] != versions:
        place = _places.get(key)
        if place is None or place.dtype != dtype:
            place = stacked(tensors, dtype)
        else:
            for part, tensor in zip(place.split([len(tensor) for tensor in tensors]), tensors, strict=True):
                part.copy_(tensor)
        _rounded[key] = versions, place
    return _rounded[key][1]


# --------------------------------------------------------------------------------------------------------------------
# The kernels.


class FusedLinear(torch.autograd.Function):
    """Several linear layers as one product, with weights rounded to the dtype of x.

    Autograd would save the concatenated and rounded weights: a copy of most of the model, also with FSDP, which gathers
    one layer at a time. This saves the weights themselves, and concatenates and rounds them again in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor) -> Tensor:
        """x [..., H]; `count` weights [out, H], then their biases, if any -> [..., sum of out]."""
        ctx.save_for_backward(x, *parameters)
        ctx.count = count
        weights, biases = parameters[:count], parameters[count:]
        return F.linear(x, rounded(weights, x.dtype), stacked(biases, x.dtype) if biases else None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        weights, biases = parameters[: ctx.count], parameters[ctx.count :]
        sizes = [len(weight) for weight in weights]
        grad_x = grad @ rounded(weights, grad.dtype) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return grad_x, None, *(None for _ in parameters)
        grads = grad.flatten(0, -2)
        weight_grads = (grads.T @ x.flatten(0, -2)).split(sizes)
        bias_grads = grads.sum(0).split(sizes) if biases else ()
        own = [part.to(p.dtype) for part, p in zip((*weight_grads, *bias_grads), parameters, strict=True)]
        return grad_x, None, *own


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, with the mean square in float32 or wider.

    Example:
        >>> rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), 0.0)
        tensor([0.8485, 1.1314])
    """
    if are_plain():
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)
    if x.device.type == "cpu":
        return apply(RMSNormFunction, x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def swiglu(both: Tensor) -> Tensor:
    """Compute silu(gate) * up from gate and up concatenated, [..., 2 I] -> [..., I]."""
    if are_plain():
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up
    return apply(SwiGLUFunction, both)


class RMSNormFunction(torch.autograd.Function):
    """y = x r w with r = 1 / sqrt(mean(x^2) + eps); statistics in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.fast = usable(x)
        if ctx.fast:
            x, scale = x.contiguous(), x.new_empty(x.shape[:-1], dtype=torch.float32)
            normed = torch.empty_like(x)
            call("norm_forward", x, weight, normed, scale, scale.numel(), x.shape[-1], eps)
        else:
            wide = torch.promote_types(x.dtype, torch.float32)
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
            scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            normed = (x * scale).mul_(weight).to(x.dtype)
        ctx.save_for_backward(x, weight, scale)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        if ctx.fast:
            grad_x, parts = torch.empty_like(x), scale.new_zeros(_NORM_PARTS, x.shape[-1])
            sizes = scale.numel(), x.shape[-1], _NORM_PARTS
            call("norm_backward", x, weight, scale, grad.contiguous(), grad_x, parts, *sizes)
            return grad_x, parts.sum(0).to(weight.dtype), None
        normed = x * scale
        along = grad * normed
        grad_weight = along.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        mean = (along @ weight.to(along.dtype)).unsqueeze_(-1).div_(x.shape[-1])
        grad_x = (grad * weight.to(scale.dtype)).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


class SwiGLUFunction(torch.autograd.Function):
    """silu(gate) * up, from gate and up concatenated."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        ctx.fast = usable(both) and both.is_contiguous()
        gate, up = both.chunk(2, dim=-1)
        if not ctx.fast:
            return F.silu(gate).mul_(up)
        out = both.new_empty(gate.shape)
        call("swiglu_forward", both, out, out.numel() // out.shape[-1], out.shape[-1])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        result = torch.empty_like(both)
        if ctx.fast:
            call("swiglu_backward", both, grad.contiguous(), result, grad.numel() // grad.shape[-1], grad.shape[-1])
            return result
        gate, up = both.chunk(2, dim=-1)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        torch.mul(F.silu(gate), grad, out=grad_up)
        return result
