"""What a run ran on: versions, hardware, commit, command. Environment variables are never recorded."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("atomrl", "torch", "transformers", "tokenizers", "safetensors", "peft", "numpy", "reasoning-gym", "vllm")
_SECRET = re.compile(r"(?i)([\w.-]*(?:token|secret|password|passwd|api[_-]?key)(?:=|\s+))(\S+)|(?<=://)[^/@\s]+(?=@)")


def describe_environment() -> dict[str, Any]:
    """Versions, hardware, git commit (of the current folder, if any) and the command, as JSON-ready values."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": redact(sys.argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _versions(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": _cpu_name(),
        "memory_gib": _memory_gib(),
        "gpus": _gpus(),
        "git": _git(),
    }


def redact(arguments: Sequence[str]) -> str:
    """A command line without the values that look like secrets.

    Example:
        >>> redact(["atomrl", "train", "c.yaml", "x.api_key=abc", "https://me:pw@host/x"])
        'atomrl train c.yaml x.api_key=[redacted] https://[redacted]@host/x'
    """
    return _SECRET.sub(lambda match: (match.group(1) or "") + "[redacted]", shlex.join(arguments))


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    match = re.search(r"model name\s*:\s*(.+)", text)
    return match.group(1).strip() if match else platform.processor()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, ValueError):
        return None


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")  # a run has imported it; a tool that reads this module need not
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _git() -> dict[str, Any] | None:
    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
