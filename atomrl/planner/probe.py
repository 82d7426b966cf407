"""Run a few steps in a separate process and measure seconds by phase, lengths, rewards and peak memory.

    python -m atomrl.planner.probe FOLDER

reads FOLDER/request.json and writes FOLDER/result.json. The run stops before it saves anything.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atomrl.common.functions import search_in, searched
from atomrl.common.memory import process_memory
from atomrl.config import ConfigError, RunConfig, load_config, merge_trees
from atomrl.models.loading import compute_dtype, load_tokenizer, model_config_only, resolve_folder, stored_files
from atomrl.models.shapes import auto_class
from atomrl.trainer import prepare_run

REQUEST, RESULT = "request.json", "result.json"
FEWEST_STEPS = 3
"""Minimum number of steps of a probe with a time limit; the first is a warm-up."""
SHOWN = 6
"""Number of trailing stderr lines of a failed probe that the error shows."""


@dataclass(frozen=True)
class ProbeResult:
    """Measurements of a probe."""

    steps: tuple[Mapping[str, float], ...]
    """The metrics of each step."""
    peak_bytes: int
    """Peak memory of the GPU, or of the process if there is none."""
    random_weights: bool
    """The model's weights are not on this machine, so lengths and rewards are meaningless."""

    def mean(self, name: str) -> float:
        """Return the mean of a metric over the steps, without the first (warm-up); 0 if no step has it."""
        rows = self.steps[1:] or self.steps
        values = [row[name] for row in rows if row.get(name) is not None]
        return sum(values) / len(values) if values else 0.0


class _StopProbe(Exception):
    """Raised after the last step, before a checkpoint is written."""


def measure(config: RunConfig, changes: Mapping[str, Any], enough_s: float = float("inf")) -> ProbeResult:
    """Run a config with some changes for `train.steps` steps, in a separate process.

    Args:
        config: config of any kind of run.
        changes: tree that is merged over the config's.
        enough_s: end earlier, but not before `FEWEST_STEPS`, once the steps after the first took so many seconds.
            A mean over steps of milliseconds needs many of them, one over steps of minutes few.

    Raises:
        ConfigError: the steps failed; the message has the last lines of stderr. Out of memory has its own message.
    """
    with tempfile.TemporaryDirectory(prefix="atomrl-probe-") as place:
        no_output: dict[str, Any] = {
            "output_dir": place,
            "run_name": "probe",
            "eval": {"before": False, "after": False, "every_steps": 0},
            "checkpoint": {"every_steps": 0},
            "tracking": {"sinks": [], "save_rollouts": False, "tokens": 0, "log_completions": 0},
        }
        tree = merge_trees(merge_trees(config.to_tree(secrets=True), no_output), changes)
        tree["train"]["total_epochs"] = None
        request = {"config": tree, "folders": searched(), "enough_s": enough_s}
        Path(place, REQUEST).write_text(json.dumps(request), encoding="utf-8")
        # -P: a file in the current folder must not shadow a module
        command = [sys.executable, "-P", "-m", "atomrl.planner.probe", place]
        process = subprocess.run(command, capture_output=True, text=True, errors="replace")
        result = Path(place, RESULT)
        if not result.exists():
            lines = [line for line in process.stderr.splitlines() if line.strip()][-SHOWN:]
            if process.returncode == -9 or any("out of memory" in line.lower() for line in lines):
                raise ConfigError(
                    "the probe ran out of memory, and so would the run; lower train.tokens_per_micro_batch"
                )
            raise ConfigError("\n  ".join(["the probe failed:", *lines]))
        tree = json.loads(result.read_text(encoding="utf-8"))
    return ProbeResult(tuple(tree["steps"]), tree["peak_bytes"], tree["random_weights"])


def main(place: Path) -> None:
    """Run the steps that `request.json` in `place` asks for, and write `result.json`."""
    request = json.loads((place / REQUEST).read_text(encoding="utf-8"))
    for folder in request["folders"]:  # of the user's own functions
        search_in(folder)
    config = load_config(request["config"])
    steps: list[dict[str, float]] = []
    end_times: list[float] = []
    random = config.model.path is not None and not has_weights(config.model.path)
    if random:
        config = config.model_copy(update={"model": with_random_weights(config, place / "model")})

    def after_step(step: int, metrics: Mapping[str, float]) -> None:
        steps.append(dict(metrics))
        end_times.append(time.monotonic())
        enough = len(end_times) >= FEWEST_STEPS and end_times[-1] - end_times[0] >= request["enough_s"]
        if enough or step == config.train.steps:
            raise _StopProbe

    with suppress(_StopProbe):
        prepare_run(config).execute(callbacks=[after_step])
    if torch.cuda.is_available():  # each step reports its own peak
        name = "perf/max_memory_allocated_gb"
        peak = int(max([row[name] for row in steps if name in row], default=0) * 2**30)
    else:
        peak = process_memory("VmHWM")
    result = {"steps": steps, "peak_bytes": peak, "random_weights": random}
    (place / RESULT).write_text(json.dumps(result), encoding="utf-8")


def has_weights(path: str) -> bool:
    """True if a model's weights are on this machine."""
    try:
        return bool(stored_files(resolve_folder(path, weights=False)))
    except (ValueError, OSError):
        return False


def with_random_weights(config: RunConfig, folder: Path) -> Any:
    """Write a model of the same shape with random weights to `folder`; return the section `model` that loads it.

    Raises:
        ConfigError: the model's config.json or tokenizer is not available either.
    """
    model, path = config.model, config.model.path
    assert path is not None
    shape = model_config_only(path, model.trust_remote_code)
    dtype = compute_dtype(model.dtype, "cuda" if torch.cuda.is_available() else "cpu")
    fresh = auto_class(shape).from_config(shape, trust_remote_code=model.trust_remote_code, dtype=dtype)
    fresh.save_pretrained(folder)
    load_tokenizer(model.tokenizer or path, model.trust_remote_code).save_pretrained(folder)
    return model.model_copy(update={"path": str(folder), "tokenizer": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
