"""The system that a run is on (versions, hardware, commit, command), and the error that ended it, as the run's folder
records them.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import traceback
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from atomrl.common.functions import searched
from atomrl.common.redaction import redact_command, without_secret_values

PACKAGES = ("atomrl", "torch", "transformers", "tokenizers", "safetensors", "peft", "numpy", "reasoning-gym", "vllm")


def describe_system() -> dict[str, Any]:
    """Return versions, hardware, git commit (of the working directory, if any) and command, as JSON-ready values."""
    import torch  # slow, and the command line imports this module for other commands too

    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": redact_command(sys.argv),
        "folder": os.getcwd(),
        "functions_in": searched(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := installed_version(name))},
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu": _cpu_name(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "git": _git(),
    }


def describe_failure(error: BaseException) -> dict[str, str]:
    """Return an error's message, location, time and traceback, with secrets redacted."""
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "error": without_secret_values("".join(traceback.format_exception_only(error)).strip()),
        "where": f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "",
        "traceback": without_secret_values("".join(traceback.format_exception(error))),
    }


def installed_version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*:\s*(.+)", path.read_text(encoding="utf-8")) if path.is_file() else None
    return match.group(1).strip() if match else platform.processor()


def _git() -> dict[str, Any] | None:
    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
