"""The C++ kernels of `kernels.cpp`."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from atomrl.models.kernel_library import load_library

_SOURCE = Path(__file__).with_name("kernels.cpp")
_TENSORS = "qkv out q_norm k_norm keys values prompt_keys prompt_values cosine sine slots groups prompt_lengths lengths"
_SIZES = "rows heads kv_heads head_dim blocks prompt_blocks threads act_bf16 cache_bf16"


class KernelArgs(ctypes.Structure):
    """`struct Args` of kernels.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _TENSORS.split()),
        *((name, ctypes.c_int64) for name in _SIZES.split()),
        ("eps", ctypes.c_double),
    )


class Kernels:
    """The functions of kernels.cpp on contiguous CPU tensors, float32 or bfloat16, with PyTorch's number of threads."""

    def __init__(self, library: ctypes.CDLL):
        address, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        self.attention = library.decode_attention
        """Decode attention with a `KernelArgs`; see kernels.cpp."""
        self._norm = library.rms_norm
        self._silu_mul, self._sample = library.silu_mul, library.sample
        self.attention.argtypes = [ctypes.POINTER(KernelArgs)]
        self._norm.argtypes = [address] * 3 + [size] * 2 + [real] + [size] * 2
        self._silu_mul.argtypes = [address] * 2 + [size] * 4
        self._sample.argtypes = [address] * 5 + [size] * 2 + [real] + [size] * 2
        for function in (self.attention, self._norm, self._silu_mul, self._sample):
            function.restype = None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm: [N, H], [H] -> [N, H]."""
        out, (rows, width) = torch.empty_like(x), x.shape
        ends = (torch.get_num_threads(), x.dtype == torch.bfloat16)
        self._norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps, *ends)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: [N, 2 * I] -> [N, I]."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        ends = (torch.get_num_threads(), out.dtype == torch.bfloat16)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width, *ends)
        return out

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """`atomrl.engines.sampling.sample` without top-k and top-p, for temperature > 0."""
        (rows, width), seeds, positions = logits.shape, seeds.contiguous(), positions.contiguous()
        tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        addresses = [tensor.data_ptr() for tensor in (logits, seeds, positions, tokens, logprobs)]
        ends = (torch.get_num_threads(), logits.dtype == torch.bfloat16)
        self._sample(*addresses, rows, width, temperature, *ends)
        return tokens, logprobs


@cache
def load_kernels() -> Kernels | None:
    """Build and load the kernels; None if they cannot be built. Logs which, and why."""
    library = load_library(_SOURCE, "native rollout")
    return None if library is None else Kernels(library)
