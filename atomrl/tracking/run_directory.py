"""`RunDirectory` writes the folder of a run.

runs/NAME/
  config.yaml      the resolved config
  env.json         versions, hardware, commit, command; never environment variables
  metrics.jsonl    one flat JSON object a line, each with "step": pd.read_json(path, lines=True)
  findings.jsonl   findings of the doctor, if there are any
  log.txt          messages with times; a resumed run appends to it
  rollouts/step_000010/{train,eval}.jsonl   one completion a line
  rollouts/step_000010/tokens.safetensors   per-token records of some groups (`tracking.tokens`)
  checkpoints/step_000010/                  complete or absent, see `checkpoints.py`
  model, best                               links to the newest checkpoint, and to the best (`checkpoint.keep_best`)
  summary.json, curves.png                  at the end
  failure.json     instead of a summary, if an error ended the run
  .lock                                     held by the process that writes the run
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from atomrl.common.errors import nearest
from atomrl.common.files import flush_to_disk, write_bytes, write_jsonl
from atomrl.common.redaction import register_secrets, without_secrets
from atomrl.common.secrets import mask_secrets, refuse_secrets
from atomrl.config import CheckpointConfig, ConfigError, RunConfig, dump_config, read_yaml
from atomrl.tracking import checkpoints
from atomrl.tracking.checkpoints import disk_full_named, step_folder, step_folders
from atomrl.tracking.doctor.findings import EVALUATED, Finding, is_evaluation
from atomrl.tracking.durable import write_durably, write_json_durably
from atomrl.tracking.reading.lines import read_mapping, read_metrics
from atomrl.tracking.reading.lock import LOCK, Locked, acquire_lock, lock_owner, release_lock, same_folder
from atomrl.tracking.reading.run import FUNCTIONS
from atomrl.tracking.reading.state import FAILURE, LOG
from atomrl.tracking.reading.token_records import TOKENS
from atomrl.tracking.resuming import config_changes, stopping_changes
from atomrl.tracking.run_log import RunLog
from atomrl.tracking.system_info import describe_failure, describe_system
from atomrl.types import Episode, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


FINDINGS = "findings.jsonl"
FRESH_MODEL = "fresh_model"
"""Subfolder with a randomly initialized model that the run starts from."""
PUBLISHED_WEIGHTS = "published"
"""Subfolder with the newest weights of a run that trains from a pool, for the processes that fill it."""
MAX_NAME = 200
"""Maximum length of a function's file name; file systems allow 255 bytes."""
STARTED = {
    "config.yaml",
    "env.json",
    "inputs",
    "prompt_lengths.train",
    "prompt_lengths.eval",
    "rollouts",
    FUNCTIONS,
    FAILURE,
    FRESH_MODEL,
    PUBLISHED_WEIGHTS,
    LOCK,
    LOG,
}
"""Files that are written before the first step. A folder with nothing else is reused."""
LAST_BITS = ("threads", "cpu", "gpus", "packages")
"""Parts of the environment that may change the order of floating-point sums."""


class _Resumption(NamedTuple):
    """A run as it is continued."""

    done: int
    """Step of the newest checkpoint; -1: there is none."""
    environment: dict[str, Any]
    """The run's `env.json`."""
    changes: list[str]
    """Differences of the config, and of what it names."""
    lines: list[str]
    """These, and where the run continues, for people."""


class RunDirectory:
    """Writes a run's folder. Create it with `RunDirectory.create`. As a context manager it records the error that ends
    the run, and releases the folder's lock.

    Attributes:
        path: the folder.
        first_step: the first step of this attempt: 1, or the one after the resumed checkpoint.
    """

    def __init__(self, path: Path, settings: CheckpointConfig) -> None:
        self.path = path
        self.settings = settings
        self.first_step = 1
        self._lock: tuple[int, int] | None = None
        self.log_file = RunLog(path / LOG, self._is_here)

    @classmethod
    def create(
        cls,
        config: RunConfig,
        resume: bool = False,
        allow_changes: bool = False,
        identity: Mapping[str, str] = MappingProxyType({}),
    ) -> Self:
        """Open `output_dir/run_name`: a new folder, or with `resume` an existing one.

        Resuming removes metrics and rollouts after the newest intact checkpoint (all of them if none was written yet),
        and prints the changes of the config. The folder is locked until the context or the process ends.

        Args:
            allow_changes: resume despite changes outside of `checkpoints.HARMLESS`.
            identity: hashes of what the config names by path (data, tokenizer, model), compared on resumption.

        Raises:
            ConfigError: the run exists and `resume` is not set, or the other way round; another process writes it;
                config or identity differ; no checkpoint is intact, one cannot be read, or it is of a newer version;
                or the config contains a secret of the environment. Nothing is changed then.
        """
        run = cls(config.run_dir, config.checkpoint)
        has_config = run._check_there(config, resume)
        register_secrets(config.secrets)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run._lock = acquire_lock(run.path)
        except Locked as other:
            raise run._is_written(other) from None
        except OSError as error:
            raise ConfigError(f"cannot write to {run.path} (output_dir/run_name): {error.strerror}") from error
        try:
            environment = describe_system() | {"identity": dict(identity)}
            if resume and has_config:
                environment = run._reopen(config, allow_changes, environment)
            (run.path / FAILURE).unlink(missing_ok=True)
            write_json_durably(run.path / "env.json", environment)
            # Written last: after a kill before this line the run can be resumed again.
            write_durably(run.path / "config.yaml", dump_config(config))
            run.log_file.note(environment.get("resumed", [environment])[-1]["command"])
        except BaseException:
            release_lock(run.path)
            raise
        return run

    @classmethod
    def check_resume(cls, config: RunConfig, allow_changes: bool, identity: Mapping[str, str]) -> list[str]:
        """Return what a resumed run would print (see `create`). Nothing is changed.

        Raises:
            ConfigError: as `create` with `resume`.
        """
        run = cls(config.run_dir, config.checkpoint)
        if not run._check_there(config, resume=True):
            return [f"{run.path} begins: it has no config yet"]
        if process := lock_owner(run.path):
            raise run._is_written(f"process {process}")
        return run._compare(config, allow_changes, describe_system() | {"identity": dict(identity)}).lines

    def _check_there(self, config: RunConfig, resume: bool) -> bool:
        """Check that there is a run if it is to be resumed, and none if not; return whether the folder has a config."""
        refuse_secrets(dump_config(config))
        has_config, begun = (self.path / "config.yaml").is_file(), is_begun(self.path)
        if resume and not has_config and (begun or not self.path.is_dir() or not any(self.path.iterdir())):
            raise ConfigError(f"no run to resume in {self.path}; start it without --resume")
        if begun and not resume:
            raise ConfigError(
                f"the run {self.path} already exists. Continue it with --resume, or start another with "
                f"run_name=NEW_NAME (or delete the folder)"
            )
        return has_config

    def _is_written(self, other: object) -> ConfigError:
        return ConfigError(
            f"another process ({other}) is writing the run {self.path}: wait for it, stop it, or use another run_name"
        )

    def __enter__(self) -> Self:
        self.log_file.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.log_file.__exit__()
        try:
            if error is not None:
                failure = describe_failure(error)
                if self._is_here():  # else the error would be written to a folder that is not the run's
                    self.log_file.note(f"ended by an error\n{failure['traceback']}")
                    write_json_durably(self.path / FAILURE, failure)
        finally:
            release_lock(self.path)

    def _reopen(self, config: RunConfig, allow_changes: bool, now: dict[str, Any]) -> dict[str, Any]:
        """Go back to the newest checkpoint. Each change is atomic and idempotent, so a kill leaves a resumable run.

        Args:
            now: the environment of this attempt.

        Returns:
            The environment of the start, with that of each attempt in `resumed`.
        """
        found = self._compare(config, allow_changes, now)
        self.first_step = max(found.done, 0) + 1
        for line in found.lines:
            print(f"resume: {line}", file=sys.stderr)
            self.log_file.note(f"resume: {line}")
        checkpoints.clear_leftovers(self.path / "checkpoints")
        self._cut_after(found.done, finished=found.done >= config.train.steps)
        attempt = {"first_step": self.first_step, "config_changes": found.changes, **now}
        return found.environment | {"resumed": [*found.environment.get("resumed", []), attempt]}

    def _compare(self, config: RunConfig, allow_changes: bool, now: dict[str, Any]) -> _Resumption:
        """Find the newest checkpoint, and compare a run with what is to continue it; nothing is changed."""
        newest, unread = self.latest_checkpoint(), list[str]()
        environment = read_mapping(self.path / "env.json", unread)
        attempts = environment.get("resumed", [])
        before = now | (attempts[-1] if attempts else environment)
        changes = config_changes(read_yaml(self.path / "config.yaml"), config)
        others = [
            f"{name}: changed since the run was started"
            for name, value in now["identity"].items()
            if before["identity"].get(name, value) != value
        ]
        stopping = [*stopping_changes(changes, config), *others]
        if stopping and not allow_changes:
            raise ConfigError(
                f"cannot resume {self.path}, because these differ:\n  "
                + "\n  ".join(stopping)
                + "\nRevert the changes, start another run with run_name=NEW_NAME, or continue with --allow-changes"
            )
        done = newest[0] if newest else -1
        last_bits = [name for name in LAST_BITS if newest and before[name] != now[name]]
        lines = [*changes, *others, *unread]
        lines += [f"{self.path} continues " + (f"after step {done}" if newest else "from the start: no checkpoint")]
        lines += [f"{name}: {before[name]} -> {now[name]}; results may differ in the last bits" for name in last_bits]
        return _Resumption(done, environment, [*changes, *others], lines)

    def _cut_after(self, step: int, finished: bool) -> None:
        """Remove what was written after a step. If the run was `finished`, remove the last evaluation too: it is
        repeated."""
        path = self.path / "metrics.jsonl"
        rows = [row for row in read_metrics(path) if row["step"] <= step]
        rows = [row for row in rows if not (finished and row["step"] == step and is_evaluation(row))]
        if path.exists():
            write_durably(path, "".join(json.dumps(row) + "\n" for row in rows))
        for folder_step, folder in step_folders(self.path / "rollouts"):
            if folder_step > step:
                shutil.rmtree(folder)
        for folder_step, folder in step_folders(self.path / "checkpoints"):
            if folder_step > step:  # damaged: it must not count towards checkpoint.keep
                checkpoints.set_damaged_aside(folder)
        (self.path / "summary.json").unlink(missing_ok=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Append a row to `metrics.jsonl` and return it. NaN and infinities become null."""
        self.check_here()
        row = {"step": step} | {name: _or_null(value) for name, value in metrics.items()}
        path = self.path / "metrics.jsonl"
        with disk_full_named(self.path, f"the metrics of step {step} were not written"), path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row

    def write_functions(self, sources: Mapping[str, str]) -> None:
        """Write the source of each of the user's functions to `functions/NAME.py`, with secrets redacted."""
        for name, text in sources.items():
            stem = re.sub(r"[^\w.-]+", "_", name)[-MAX_NAME:].strip("._")
            write_durably(self.path / FUNCTIONS / f"{stem}.py", without_secrets(str(mask_secrets(text))))

    def write_findings(self, findings: Iterable[Finding]) -> None:
        """Write `findings.jsonl`; no file without findings."""
        path, rows = self.path / FINDINGS, [asdict(finding) | {"page": finding.page} for finding in findings]
        self._write_rows(rows, path) if rows else path.unlink(missing_ok=True)

    def write_rows(self, step: int, rows: Iterable[Mapping[str, Any]], split: str) -> None:
        """Write `rollouts/step_NNNNNN/SPLIT.jsonl`, one row a line; replaces an existing file."""
        self._write_rows(rows, self.path / "rollouts" / step_folder(step) / f"{split}.jsonl")

    def write_tokens(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, float]) -> None:
        """Write `rollouts/step_NNNNNN/tokens.safetensors`; replaces an existing file."""
        from safetensors.torch import save

        self.check_here()
        path = self.path / "rollouts" / step_folder(step) / TOKENS
        # A single entry, since safetensors writes several in a random order: equal runs write the same bytes.
        metadata = {"state": json.dumps(dict(state), sort_keys=True)}
        with disk_full_named(path.parent, f"{path.name} was not written"):
            write_bytes(path, save(dict(tensors), metadata))

    def check_here(self) -> None:
        """Check that the run's path still names its folder.

        Raises:
            FileNotFoundError: the folder was renamed, deleted or replaced while the run was training.
        """
        if not self._is_here():
            raise FileNotFoundError(
                f"{self.path} is not the folder of this run anymore: it was renamed, deleted or replaced while the run "
                "was training. Nothing more is written. If it was renamed, rename it back and continue with --resume"
            )

    def _is_here(self) -> bool:
        return self._lock is None or same_folder(self.path, self._lock)

    def _write_rows(self, rows: Iterable[Mapping[str, Any]], path: Path) -> None:
        self.check_here()
        with disk_full_named(path.parent, f"{path.name} was not written"):
            write_jsonl(rows, path, lenient=True)

    def checkpoint_folder(self, step: int) -> Path:
        """Return the path of a step's checkpoint, which need not exist yet."""
        return self.path / "checkpoints" / step_folder(step)

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """Save a checkpoint: write into the yielded folder, which is renamed into place at the end.

        Then updates the links `model` and `best`, and removes checkpoints beyond `checkpoint.keep` and `keep_best`.
        """
        root, metrics = self.path / "checkpoints", self.path / "metrics.jsonl"
        self.check_here()
        with checkpoints.writing_checkpoint(root, step) as folder:
            yield folder
            self.check_here()
            if metrics.exists():  # resuming from this checkpoint needs the rows up to its step
                flush_to_disk(metrics)
        shutil.rmtree(root / f"{step_folder(step)}.damaged", ignore_errors=True)
        self._link("model", self.checkpoint_folder(step))
        self.keep_best()

    def keep_best(self) -> None:
        """Update the link `best` from the metrics so far, and remove checkpoints that are neither best nor newest."""
        if (best := self._best_step()) is not None:
            self._link("best", self.checkpoint_folder(best))
        checkpoints.keep_checkpoints(self.path / "checkpoints", self.settings.keep, also={best})

    def _best_step(self) -> int | None:
        """Return the step of the checkpoint with the best `checkpoint.keep_best`, the later one of equals."""
        name = self.settings.keep_best
        if name is None:
            return None
        rows = read_metrics(self.path / "metrics.jsonl")
        value = {row["step"]: row[name] for row in rows if row.get(name) is not None}
        if not value and any(is_evaluation(row) == name.startswith(EVALUATED) for row in rows):
            near = nearest(name, {key for row in rows for key in row})
            hint = f"; did you mean {near!r}?" if near else ""
            log.warning("checkpoint.keep_best: no step has the metric %r so far%s", name, hint)
        sign = 1 if self.settings.best_is == "max" else -1
        candidates = [step for step, _ in step_folders(self.path / "checkpoints") if step in value]
        return max(candidates, key=lambda step: (sign * value[step], step), default=None)

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Return step and folder of the newest intact checkpoint, or None if none was written yet; damaged ones are
        reported on stderr.

        Raises:
            ConfigError: checkpoints were written, and none of them is intact; one cannot be read; or a newer version
                of the package wrote it.
        """
        root = self.path / "checkpoints"
        try:
            for step, folder in reversed(step_folders(root)):
                fault = checkpoints.checkpoint_fault(folder)
                if fault is None:
                    return step, folder
                print(f"skipping corrupted checkpoint {folder}: {fault}", file=sys.stderr)
            written = root.is_dir() and any(path.name.startswith("step_") for path in root.iterdir())
        except OSError as error:
            raise ConfigError(
                f"{error.filename or root} cannot be read ({error.strerror}), so that the checkpoints of {self.path} "
                "cannot be checked. Nothing was changed: mend the access or the disk, and try again. If it stays "
                "unreadable, move the checkpoint's folder away, to continue from an earlier one"
            ) from error
        if written or any(os.path.lexists(self.path / link) for link in ("model", "best")):
            raise ConfigError(
                f"no checkpoint of {self.path} is intact, so there is nothing to continue from. Nothing was changed: "
                "put the missing or damaged files back, or start another run with run_name=NEW_NAME"
            )
        return None

    def _link(self, name: str, checkpoint: Path) -> None:
        """Point a symbolic link in the run's folder to a checkpoint, so that commands need not know the step.

        A folder in its place, which a copy of the run that follows links leaves, is renamed.
        """
        place, aside = self.path / name, self.path / f".{name}.partial"
        if place.is_dir() and not place.is_symlink():
            place.rename(self.path / f"{name}_copied_{time.time_ns()}")
        aside.unlink(missing_ok=True)
        aside.symlink_to(checkpoint.relative_to(self.path), target_is_directory=True)
        aside.replace(place)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, and `curves.png` if matplotlib is installed."""
        self.check_here()
        write_json_durably(self.path / "summary.json", dict(summary))
        self.log_file.note(f"summary: {json.dumps(dict(summary), default=str)}")
        from atomrl.tracking.reading.plots import draw_curves

        try:
            draw_curves(self.path)
        except ImportError as error:
            print(error, file=sys.stderr)


def is_begun(folder: Path) -> bool:
    """Return whether a run in this folder has reached its first step."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return any(not name.endswith(".partial") for name in names - STARTED)


def rollout_rows(
    step: int, trajectories: Sequence[Trajectory], advantages: Mapping[int, float]
) -> list[dict[str, Any]]:
    """Return one JSON-ready dict per trajectory, the rows of `rollouts/`.

    `images`, also in the turns of an episode, are names of files in `inputs/images` of the run. `reward` is the
    total, with the rewards of turns; `reward_parts` are those of the outcome. `policy_versions` are the weight versions
    that sampled its tokens, `policy_version` the newest of them. With an environment there is an `episode`: its turns
    (text, reply, reward, labels, seconds) and how it ended.

    Args:
        advantages: by index in `trajectories`; null for what was not trained on.
    """
    rows = []
    for index, item in enumerate(trajectories):
        written = [segment for segment in item.segments if segment.origin != "prompt"]
        pictures = [image.name for image in item.problem.images]
        versions = sorted({v for segment in written if (v := segment.policy_version) is not None})
        rows.append(
            {
                "step": step,
                "prompt_id": item.prompt_id,
                "completion_index": item.index,
                "data_source": item.problem.data_source,
                "prompt": item.problem.prompt if isinstance(item.problem.prompt, str) else list(item.problem.prompt),
                "ground_truth": item.problem.ground_truth,
                "completion": item.text,
                "prompt_tokens": item.prompt_tokens,
                "completion_tokens": item.response_tokens,
                "token_ids": [token for segment in written for token in segment.token_ids],
                "reward": item.total_reward,
                "reward_parts": dict(item.reward_parts),
                "reward_failures": {f.reward: f"{f.kind}: {f.message}" for f in item.reward_failures},
                "advantage": advantages.get(index),
                "finish_reason": item.finish_reason,
                "policy_version": versions[-1] if versions else None,
                "policy_versions": versions,
                **({"images": pictures} if pictures else {}),
                **({"opening": item.opening} if item.opening else {}),
                **({} if item.baseline_reward is None else {"baseline_reward": _or_null(item.baseline_reward)}),
                **({} if item.episode is None else {"episode": _episode_row(item.episode)}),
            }
        )
    return rows


def _episode_row(episode: Episode) -> dict[str, Any]:
    """Return an episode as JSON has it, its pictures by their names; without keys for them if it has none."""
    row = asdict(episode)
    for part, key, images in (
        (row, "opening_images", episode.opening_images),
        *((part, "images", turn.images) for part, turn in zip(row["turns"], episode.turns, strict=True)),
    ):
        del part[key]
        part |= {key: [image.name for image in images]} if images else {}
    return row


def _or_null(value: float) -> float | None:
    """Return None for NaN and infinities, which JSON lacks."""
    return value if math.isfinite(value) else None
