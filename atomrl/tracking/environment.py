"""What a run ran on: versions, hardware, commit, command. Environment variables are never recorded."""

import os
import platform
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError
from atomrl.functions import searched

PACKAGES = ("atomrl", "torch", "transformers", "tokenizers", "safetensors", "peft", "numpy", "reasoning-gym", "vllm")
_WORDS = r"token|secret|password|passwd|credential|api[_-]?key"
_SECRET = re.compile(
    rf"(?i)([\w.-]*(?:{_WORDS})['\"]?(?:\s*[=:]\s*|\s+))([^\s,}}]+)"  # by its name
    r"|(?<=://)[^/@\s]+(?=@)"  # in a URL
    r"|\b(?:hf_|sk-|gh[pousr]_|glpat-|xox[abpr]-)[\w-]{16,}|\bAKIA[0-9A-Z]{16}\b"  # by its form
)
MIN_SECRET = 8
"""Characters of a secret; shorter values of variables with such names are switches and numbers."""
_of_config: set[str] = set()


def hide(secrets: Iterable[str]) -> None:
    """Leave these out of texts too (`without_secrets`): those that a config holds."""
    _of_config.update(value for value in secrets if len(value) >= MIN_SECRET)


def describe_environment() -> dict[str, Any]:
    """Versions, hardware, git commit (of the current folder, if any) and the command, as JSON-ready values."""
    import torch  # not above: the command line reads this module before it is needed

    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": redact(sys.argv),
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
    """What ended a run: the error, where it was raised, when, and its traceback, without what looks like a secret."""
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "error": redacted("".join(traceback.format_exception_only(error)).strip()),
        "where": f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "",
        "traceback": redacted("".join(traceback.format_exception(error))),
    }


def installed_version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def redact(arguments: Sequence[str]) -> str:
    """A command line without the values that look like secrets.

    Example:
        >>> redact(["atomrl", "train", "c.yaml", "x.api_key=abc", "https://me:pw@host/x"])
        'atomrl train c.yaml x.api_key=[redacted] https://[redacted]@host/x'
        >>> redact(["atomrl", "sft", "rollout.stop_token_ids=[2]", "--hub", "hf_abcdefghijklmnopqrst"])
        "atomrl train 'rollout.stop_token_ids=[2]' --hub [redacted]"
    """
    return redacted(shlex.join(arguments))


def redacted(text: str) -> str:
    """A text without the values that look like secrets."""
    return _SECRET.sub(lambda match: (match.group(1) or "") + "[redacted]", without_secrets(text))


def without_secrets(text: str) -> str:
    """A text without the values of the environment variables that hold secrets, and without those of a config."""
    for value in sorted([*secret_variables().values(), *_of_config], key=len, reverse=True):
        text = text.replace(value, "[redacted]")
    return text


def secret_variables() -> dict[str, str]:
    """The environment variables that hold secrets, by their names."""
    named = re.compile(rf"(?i)(?:{_WORDS}|[_-]key)s?(?:$|_)")
    return {name: value for name, value in os.environ.items() if named.search(name) and len(value) >= MIN_SECRET}


def refuse_secrets(config_text: str) -> None:
    """A config is written to the run's folder and sent to trackers, so it must hold no secret of the environment.

    Raises:
        ConfigError: it does, as when a shell wrote `$API_KEY` into an override.
    """
    for name, value in secret_variables().items():
        if value in config_text:
            raise ConfigError(
                f"the config holds the value of the environment variable {name}, and a config is written to the run's "
                "folder. Leave it out, and let the code that needs it read the variable"
            )


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
