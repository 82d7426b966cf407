"""A few steps of a run in a process of their own, measured: seconds of each phase, lengths, rewards, most memory.

    python -m atomrl.trainer.probe FOLDER

reads FOLDER/request.json and writes FOLDER/result.json. Nothing else is left: the run stops before it saves anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atomrl.common.functions import search_in
from atomrl.config import ConfigError, RunConfig, build_config
from atomrl.models.memory import process_memory

REQUEST, RESULT = "request.json", "result.json"
FEWEST_STEPS = 3
"""Of a probe that ends by the clock; the first warms up and does not count."""
SHOWN = 6
"""Last lines of what a probe said that failed."""


@dataclass(frozen=True)
class Measured:
    """What a probe measured."""

    steps: tuple[Mapping[str, float], ...]
    """The metrics of each step."""
    peak_bytes: int
    """Of the GPU where there is one, else of the process."""
    random_weights: bool
    """The model's weights are not on this machine: lengths and rewards say nothing."""

    def mean(self, name: str) -> float:
        """A metric, on average over the steps but the first, which warms up; 0 where there is none."""
        rows = self.steps[1:] or self.steps
        values = [row[name] for row in rows if row.get(name) is not None]
        return sum(values) / len(values) if values else 0.0


class _Enough(Exception):
    """Raised after the last step: before a checkpoint is written."""


def measure(
    config: RunConfig, folder: Path | None, changes: Mapping[str, Any], enough_s: float = float("inf")
) -> Measured:
    """Run a config with some changes for `train.steps` steps, in a process of its own.

    Args:
        config: of any kind of run.
        folder: of the config's file, where its own rewards are; None where it is of no file.
        changes: a tree over the config's.
        enough_s: end sooner, after `FEWEST_STEPS`, once the steps that count took so many seconds: steps of
            milliseconds need many for a mean, and steps of minutes few.

    Raises:
        ConfigError: the steps failed; with the last that was said. Out of memory is named as such.
    """
    from atomrl.config import merge_trees

    with tempfile.TemporaryDirectory(prefix="atomrl-probe-") as place:
        quiet: dict[str, Any] = {
            "output_dir": place,
            "run_name": "probe",
            "eval": {"before": False, "after": False, "every_steps": 0},
            "checkpoint": {"every_steps": 0},
            "tracking": {"sinks": [], "save_rollouts": False, "tokens": 0, "log_completions": 0},
        }
        tree = merge_trees(merge_trees(config.to_tree(secrets=True), quiet), changes)
        tree["train"]["total_epochs"] = None
        request = {"config": tree, "folder": str(folder) if folder else None, "enough_s": enough_s}
        Path(place, REQUEST).write_text(json.dumps(request), encoding="utf-8")
        command = [
            sys.executable,
            "-P",
            "-m",
            "atomrl.trainer.probe",
            place,
        ]  # -P: no file beside the run hides a module
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        result = Path(place, RESULT)
        if not result.exists():
            said = [line for line in done.stderr.splitlines() if line.strip()][-SHOWN:]
            if done.returncode == -9 or any("out of memory" in line.lower() for line in said):
                raise ConfigError("the probe ran out of memory: so would the run (lower train.tokens_per_micro_batch)")
            raise ConfigError("\n  ".join(["the probe failed:", *said]))
        found = json.loads(result.read_text(encoding="utf-8"))
    return Measured(tuple(found["steps"]), found["peak_bytes"], found["random_weights"])


def main(place: Path) -> None:
    """The steps that `request.json` asks for."""
    import torch

    from atomrl.trainer import prepare_run

    request = json.loads((place / REQUEST).read_text(encoding="utf-8"))
    if request["folder"]:
        search_in(request["folder"])
    config = build_config(request["config"])
    steps: list[dict[str, float]] = []
    ended: list[float] = []
    random = config.model.path is not None and not has_weights(config.model.path)
    if random:
        config = config.model_copy(update={"model": with_random_weights(config, place / "model")})

    def keep(step: int, metrics: Mapping[str, float]) -> None:
        steps.append(dict(metrics))
        ended.append(time.monotonic())
        enough = len(ended) >= FEWEST_STEPS and ended[-1] - ended[0] >= request["enough_s"]
        if enough or step == config.train.steps:
            raise _Enough

    with suppress(_Enough):
        prepare_run(config).execute(callbacks=[keep])
    if torch.cuda.is_available():  # of which each step reports its own
        name = "perf/max_memory_allocated_gb"
        peak = int(max([row[name] for row in steps if name in row], default=0) * 2**30)
    else:
        peak = process_memory("VmHWM")
    found = {"steps": steps, "peak_bytes": peak, "random_weights": random}
    (place / RESULT).write_text(json.dumps(found), encoding="utf-8")


def has_weights(path: str) -> bool:
    """Whether a model's weights are on this machine."""
    from atomrl.models.loading import resolve_folder, stored_files

    try:
        return bool(stored_files(resolve_folder(path, weights=False)))
    except (ValueError, OSError):
        return False


def with_random_weights(config: RunConfig, folder: Path) -> Any:
    """The section `model` with a model of the same shape in `folder`, whose weights are random.

    Raises:
        ConfigError: not even its config.json and tokenizer are there.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from atomrl.models.loading import compute_dtype, load_tokenizer, model_config_only

    model, path = config.model, config.model.path
    assert path is not None
    shape = model_config_only(path, model.trust_remote_code)
    dtype = compute_dtype(model.dtype, "cuda" if torch.cuda.is_available() else "cpu")
    fresh = AutoModelForCausalLM.from_config(shape, trust_remote_code=model.trust_remote_code, dtype=dtype)
    fresh.save_pretrained(folder)
    load_tokenizer(model.tokenizer or path, model.trust_remote_code).save_pretrained(folder)
    return model.model_copy(update={"path": str(folder), "tokenizer": None})


def device_memory() -> tuple[int, str]:
    """What there is: of the GPU, or what this machine, or its container, has left."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory), torch.cuda.get_device_name(0)
    return available_memory(), "this machine"


CONTROL_GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Where the control groups of version 2 and 1 say what a container may take."""


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that a new process could take, by `/proc/meminfo` and the control group; all that this machine has where
    the system says neither."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError, ValueError, IndexError):
        found.append(int((root / "proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024)
    for place, limit, used, cached in CONTROL_GROUPS:
        group = root / place
        with suppress(OSError, ValueError, KeyError):  # there is none, or its limit is "max"
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            in_use = int((group / used).read_text()) - int(stat[cached])  # files in memory make room
            found.append(int((group / limit).read_text()) - in_use)
    return max(0, min(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
