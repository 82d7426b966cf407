"""Memory of this process and of this machine."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

CONTROL_GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Folder and files with a container's memory limit and usage, of control groups version 2 and 1."""


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that a new process can allocate, by `/proc/meminfo` and the container's memory limit.

    If the system reports neither, it is all physical memory.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError, ValueError, IndexError):
        limits.append(int((root / "proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024)
    for place, limit, used, cached in CONTROL_GROUPS:
        group = root / place
        with suppress(OSError, ValueError, KeyError):  # no such group, or its limit is "max"
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            in_use = int((group / used).read_text()) - int(stat[cached])  # the page cache can be evicted
            limits.append(int((group / limit).read_text()) - in_use)
    return max(0, min(limits))


def process_memory(which: Literal["VmRSS", "VmHWM"]) -> int:
    """Return the resident memory of this process in bytes: current (VmRSS) or peak (VmHWM); without Linux the peak."""
    try:
        [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which)]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def readable(size: int) -> str:
    """Format a number of bytes.

    Example:
        >>> readable(3 * 2**29), readable(2**20)
        ('    1.50 GiB', '    1.00 MiB')
    """
    return f"{size / 2**30:8.2f} GiB" if size >= 2**30 else f"{size / 2**20:8.2f} MiB"
