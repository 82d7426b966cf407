"""Memory of this process."""

import torch

from atomrl.common.memory import process_memory
from atomrl.common.metrics import Max, Metrics


def memory_metrics() -> Metrics:
    """Return the memory of this process in GiB, under verl's metric names; no GPU sync.

    CPU memory is the current one. GPU memory, if a GPU is used, is the peak since the last call: allocated, reserved.

    Example:
        >>> memory_metrics()["perf/cpu_memory_used_gb"].value > 0
        True
    """
    sizes = {"perf/cpu_memory_used_gb": process_memory("VmRSS")}
    if torch.cuda.is_initialized():
        sizes["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated()
        sizes["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
    return {name: Max(size / 2**30) for name, size in sizes.items()}


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that GPU or CPU memory ran out.

    Example:
        >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
        True
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # cuBLAS has a message of its own for its workspace.
    signs = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
