"""The folder of one run.

runs/NAME/
  config.yaml      the resolved config
  env.json         versions, hardware, commit, command; never environment variables
  metrics.jsonl    one flat JSON object a line, each with "step": pd.read_json(path, lines=True)
  findings.jsonl   what the doctor found, if it did
  rollouts/step_000010/{train,eval}.jsonl   one completion a line
  checkpoints/step_000010/                  complete or absent, see `checkpoints.py`
  summary.json, curves.png                  at the end
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError, RunConfig, dump_config, read_yaml
from atomrl.doctor.findings import Finding
from atomrl.stages import RewardBatch
from atomrl.tracking.checkpoints import checkpoint_fault, step_folder, step_folders, writing_checkpoint
from atomrl.tracking.environment import describe_environment

FINDINGS = "findings.jsonl"
FRESH_MODEL = "fresh_model"
"""In a run that starts from a model made for it: that model."""
STARTED = {"config.yaml", "env.json", FRESH_MODEL}
"""What a run has written that ended before its first step: such a folder is used again."""


class RunDirectory:
    """Writes a run's folder. Make it with `RunDirectory.create`.

    Attributes:
        path: the folder.
        first_step: the step to do next: 1, or the one after the checkpoint that is resumed.
    """

    def __init__(self, path: Path, *, keep: int = 2) -> None:
        self.path = path
        self.keep = keep
        self.first_step = 1

    @classmethod
    def create(cls, config: RunConfig, resume: bool = False) -> RunDirectory:
        """Open `output_dir/run_name`: a new folder, or with `resume` an existing one.

        Resuming cuts metrics and rollouts that are later than the newest whole checkpoint (all of them if there is
        none), and prints what differs between the config then and now.

        Raises:
            ConfigError: the folder exists and `resume` is not set, or the other way round.
        """
        run = cls(config.run_dir, keep=config.checkpoint.keep)
        if resume:
            run._reopen(config)
            return run
        if run.path.exists() and {path.name for path in run.path.iterdir()} - STARTED:
            raise ConfigError(
                f"the run {run.path} exists already. Continue it with --resume, or start another with "
                f"run_name=NEW_NAME (or delete the folder)"
            )
        run.path.mkdir(parents=True, exist_ok=True)
        _write(run.path / "config.yaml", dump_config(config))
        _write_json(run.path / "env.json", describe_environment())
        return run

    def _reopen(self, config: RunConfig) -> None:
        if not (self.path / "config.yaml").is_file():
            raise ConfigError(f"there is no run to resume in {self.path}; start it without --resume")
        changes = config_changes(read_yaml(self.path / "config.yaml"), config)
        for line in changes:
            print(f"resume: {line}", file=sys.stderr)
        newest = self.latest_checkpoint()
        done = step_of_checkpoint(newest) if newest else None
        self.first_step = 1 if done is None else done + 1
        self._cut_after(-1 if done is None else done)
        _write(self.path / "config.yaml", dump_config(config))
        environment = json.loads((self.path / "env.json").read_text(encoding="utf-8"))
        attempt = {"first_step": self.first_step, "config_changes": changes, **describe_environment()}
        environment["resumed"] = [*environment.get("resumed", []), attempt]
        _write_json(self.path / "env.json", environment)

    def _cut_after(self, step: int) -> None:
        path = self.path / "metrics.jsonl"
        if path.exists():
            kept = [row for row in read_metrics(path) if row["step"] <= step]
            _write(path, "".join(json.dumps(row) + "\n" for row in kept))
        for folder_step, folder in step_folders(self.path / "rollouts"):
            if folder_step > step:
                shutil.rmtree(folder)
        for folder_step, folder in step_folders(self.path / "checkpoints"):
            if folder_step > step:  # a damaged one: it must not count among those that are kept
                shutil.rmtree(folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Append one line to `metrics.jsonl`, and return it. NaN and infinities, which JSON lacks, become null."""
        row: dict[str, Any] = {"step": int(step)}
        for name, value in metrics.items():
            number = float(value)
            row[name] = (value if isinstance(value, int) else number) if math.isfinite(number) else None
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return row

    def write_findings(self, findings: Iterable[Finding]) -> None:
        """What the doctor has found so far; no file where it is nothing."""
        path, rows = self.path / FINDINGS, [asdict(finding) | {"page": finding.page} for finding in findings]
        write_jsonl(path, rows) if rows else path.unlink(missing_ok=True)

    def log_rollouts(
        self,
        step: int,
        rewarded: RewardBatch,
        advantages: Mapping[tuple[int, int], float] | None = None,
        split: str = "train",
    ) -> list[dict[str, Any]]:
        """Write `rollouts/step_NNNNNN/SPLIT.jsonl`, one completion a line, and return its rows (`rollout_rows`)."""
        rows = rollout_rows(step, rewarded, advantages or {})
        self.write_rows(step, rows, split)
        return rows

    def write_rows(self, step: int, rows: Iterable[Mapping[str, Any]], split: str) -> Path:
        """Write any rows as `rollouts/step_NNNNNN/SPLIT.jsonl`, in place of an earlier file."""
        path = self.path / "rollouts" / step_folder(step) / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, rows)
        return path

    def checkpoint_folder(self, step: int) -> Path:
        """Where the checkpoint of a step is, or will be."""
        return self.path / "checkpoints" / step_folder(step)

    def checkpoint(self, step: int) -> AbstractContextManager[Path]:
        """`with run.checkpoint(step) as folder:` save into `folder`; it is renamed into place when all is written."""
        return writing_checkpoint(self.path / "checkpoints", step, self.keep)

    def latest_checkpoint(self) -> Path | None:
        """The newest checkpoint whose files are all as they were written; damaged ones are named on stderr."""
        for _, folder in reversed(step_folders(self.path / "checkpoints")):
            fault = checkpoint_fault(folder)
            if fault is None:
                return folder
            print(f"checkpoint {folder} is damaged and is passed over: {fault}", file=sys.stderr)
        return None

    def link_model(self, checkpoint: Path) -> Path:
        """Let `model` in the run's folder be this checkpoint, so that a later command need not know its step."""
        link, aside = self.path / "model", self.path / ".model.partial"
        aside.unlink(missing_ok=True)
        aside.symlink_to(checkpoint.relative_to(self.path), target_is_directory=True)
        aside.replace(link)
        return link

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, and `curves.png` where matplotlib is installed."""
        _write_json(self.path / "summary.json", dict(summary))
        from atomrl.tracking.curves import draw_curves

        try:
            draw_curves(self.path)
        except ImportError as error:
            print(error, file=sys.stderr)


def step_of_checkpoint(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(folder.name.removeprefix("step_"))


def rollout_rows(step: int, rewarded: RewardBatch, advantages: Mapping[tuple[int, int], float]) -> list[dict[str, Any]]:
    """One JSON-ready dict per completion.

    Args:
        advantages: by (prompt, completion); what was not trained on has none and is written as null.
    """
    rows = []
    for p, sample in enumerate(rewarded.samples):
        for g, completion in enumerate(rewarded.completions[p]):
            reward = rewarded.rewards[p][g]
            rows.append(
                {
                    "step": step,
                    "prompt_id": rewarded.prompt_ids[p],
                    "completion_index": g,
                    "data_source": sample.data_source,
                    "prompt": sample.prompt if isinstance(sample.prompt, str) else list(sample.prompt),
                    "ground_truth": sample.ground_truth,
                    "completion": completion.text,
                    "prompt_tokens": len(rewarded.prompt_token_ids[p]),
                    "completion_tokens": len(completion.token_ids),
                    "token_ids": list(completion.token_ids),
                    "reward": reward,
                    "reward_parts": {name: part[p][g] for name, part in rewarded.reward_parts.items()},
                    "advantage": advantages.get((p, g)),
                    "finish_reason": completion.finish_reason,
                    "policy_version": rewarded.policy_version,
                }
            )
    return rows


def config_changes(before: Mapping[str, Any], now: RunConfig) -> list[str]:
    """What differs between a stored config tree and a config: `train.steps: 100 -> 200`."""
    old, new = flat_tree(before), flat_tree(now.model_dump(mode="json"))
    keys = [*old, *(key for key in new if key not in old)]
    return [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]


def flat_tree(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict with dotted keys.

    Example:
        >>> flat_tree({"a": {"b": 1}, "c": [2]})
        {'a.b': 1, 'c': [2]}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, Mapping) and value
        flat.update(flat_tree(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value})
    return flat


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`; a last line that a kill tore is left out.

    Raises:
        ConfigError: a line before the last is not JSON.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise ConfigError(f"{path}:{number} is not JSON; repair or remove that line") from None
    return rows


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line; a value that JSON has no form for is written as its text."""
    _write(path, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))


def _write_json(path: Path, value: Any) -> None:
    _write(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def _write(path: Path, text: str) -> None:
    """Written aside and renamed, so that a kill leaves the old file or the new one."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
