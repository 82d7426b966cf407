"""The folder of one run.

runs/NAME/
  config.yaml      the resolved config
  env.json         versions, hardware, commit, command; never environment variables
  metrics.jsonl    one flat JSON object a line, each with "step": pd.read_json(path, lines=True)
  findings.jsonl   what the doctor found, if it did
  log.txt          what it said, appended to where it is resumed
  rollouts/step_000010/{train,eval}.jsonl   one completion a line
  rollouts/step_000010/tokens.safetensors   the numbers of every token of some groups (`tracking.tokens`)
  checkpoints/step_000010/                  complete or absent, see `checkpoints.py`
  model, best                               links to the newest checkpoint, and to the best (`checkpoint.keep_best`)
  summary.json, curves.png                  at the end
  failure.json     in place of them, where an error ended the run: which, where and when
  .lock                                     held by the process that writes the run
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from atomrl.common.errors import nearest
from atomrl.common.files import flush_to_disk, write_bytes, write_jsonl, write_text
from atomrl.common.functions import searched
from atomrl.common.secrets import left_out
from atomrl.config import CheckpointConfig, ConfigError, RunConfig, dump_config, read_yaml
from atomrl.tracking import checkpoints
from atomrl.tracking.checkpoints import config_changes, disk_full_named, step_folder, step_folders, stopping_changes
from atomrl.tracking.doctor.findings import EVALUATED, Finding, is_evaluation
from atomrl.tracking.reading.lines import LOCK, Locked, hold, let_go, read_metrics
from atomrl.tracking.reading.rollouts import TOKENS
from atomrl.tracking.reading.run import FAILURE, FUNCTIONS, LOG
from atomrl.types import Trajectory

if TYPE_CHECKING:
    from torch import Tensor


# --------------------------------------------------------------------------------------------------------------------
# What a run ran on: versions, hardware, commit, command. Environment variables are never recorded.

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
        >>> redact(["atomrl", "train", "rollout.stop_token_ids=[2]", "--hub", "hf_abcdefghijklmnopqrst"])
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


# --------------------------------------------------------------------------------------------------------------------
# What a run says, kept in its folder.


class RunLog(logging.Handler):
    """What a run says, appended to a file as plain text, each with the time; a context in which warnings are added too.

    A file that cannot be written, as on a full disk, ends no run.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self.path = path

    def note(self, text: str) -> None:
        """Add a text; the values of the environment's secrets are left out."""
        text = without_secrets(text).rstrip()
        with suppress(OSError), self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def emit(self, record: logging.LogRecord) -> None:
        """Add a warning. It is on the terminal too, as it is where no handler is set."""
        self.note(f"{record.levelname.lower()}: {record.getMessage()}")
        own = logging.getLogger("atomrl").handlers
        if logging.lastResort and not logging.getLogger().handlers and all(isinstance(one, RunLog) for one in own):
            logging.lastResort.handle(record)

    def __enter__(self) -> Self:
        logging.getLogger("atomrl").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("atomrl").removeHandler(self)


FINDINGS = "findings.jsonl"
FRESH_MODEL = "fresh_model"
"""In a run that starts from a model made for it: that model."""
PUBLISHED_WEIGHTS = "published"
"""Of a run that trains from a pool: its newest weights, for those who fill it."""
MAX_NAME = 200
"""Bytes of a file's name are 255 at most, and a function may be in a long path."""
STARTED = {
    "config.yaml",
    "env.json",
    "inputs",
    "rollouts",
    FUNCTIONS,
    FAILURE,
    FRESH_MODEL,
    PUBLISHED_WEIGHTS,
    LOCK,
    LOG,
}
"""What a run has written that ended before its first step: such a folder is used again."""


LAST_BITS = ("threads", "cpu", "gpus", "packages")
"""Of the environment: what may change the order in which numbers are added up."""
log = logging.getLogger(__name__)


class RunDirectory:
    """Writes a run's folder. Make it with `RunDirectory.create`; as a context manager it writes down the error that
    ends the run, and lets go of the folder's lock.

    Attributes:
        path: the folder.
        first_step: the step to do next: 1, or the one after the checkpoint that is resumed.
    """

    def __init__(self, path: Path, settings: CheckpointConfig) -> None:
        self.path = path
        self.settings = settings
        self.first_step = 1
        self.log_file = RunLog(path / LOG)

    @classmethod
    def create(
        cls,
        config: RunConfig,
        resume: bool = False,
        allow_changes: bool = False,
        identity: Mapping[str, str] = MappingProxyType({}),
    ) -> Self:
        """Open `output_dir/run_name`: a new folder, or with `resume` an existing one.

        Resuming cuts metrics and rollouts that are later than the newest whole checkpoint (all of them if there is
        none), and prints what differs between the config then and now. The folder is locked until the process ends, or
        leaves the context.

        Args:
            allow_changes: resume although something differs that decides the run (`resume.HARMLESS` does not).
            identity: hashes of what the config only names (data, tokenizer, model), compared when the run is resumed.

        Raises:
            ConfigError: the folder exists and `resume` is not set, or the other way round; another process writes
                it; config or identity differ; or the config holds a secret of the environment.
        """
        refuse_secrets(dump_config(config))
        hide(config.secrets)
        run = cls(config.run_dir, config.checkpoint)
        there, begun = (run.path / "config.yaml").is_file(), is_begun(run.path)
        if resume and not there and (begun or not run.path.is_dir() or not any(run.path.iterdir())):
            raise ConfigError(f"there is no run to resume in {run.path}; start it without --resume")
        if begun and not resume:
            raise ConfigError(
                f"the run {run.path} exists already. Continue it with --resume, or start another with "
                f"run_name=NEW_NAME (or delete the folder)"
            )
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            hold(run.path)
        except Locked as other:
            raise ConfigError(
                f"another process ({other}) is writing the run {run.path}: let it end or stop it, or take another "
                "run_name"
            ) from None
        except OSError as error:
            raise ConfigError(f"the run cannot write in {run.path} (output_dir/run_name): {error.strerror}") from error
        try:
            environment = describe_environment() | {"identity": dict(identity)}
            if resume and there:
                environment = run._reopen(config, allow_changes, environment)
            (run.path / FAILURE).unlink(missing_ok=True)
            _write_json(run.path / "env.json", environment)
            # Last, because what it says is then true: a kill before needs no more than to resume again.
            _write(run.path / "config.yaml", dump_config(config))
            run.log_file.note(environment.get("resumed", [environment])[-1]["command"])
        except BaseException:
            let_go(run.path)
            raise
        return run

    def __enter__(self) -> Self:
        self.log_file.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.log_file.__exit__()
        try:
            if error is not None:
                failure = describe_failure(error)
                self.log_file.note(f"ended by an error\n{failure['traceback']}")
                _write_json(self.path / FAILURE, failure)
        finally:
            let_go(self.path)

    def _reopen(self, config: RunConfig, allow_changes: bool, now: dict[str, Any]) -> dict[str, Any]:
        """Go back to the newest checkpoint. Every change is made whole or not at all, and once made is left alone by
        the next.

        Args:
            now: the environment of this attempt.

        Returns:
            The environment of the start, with those of all attempts.
        """
        checkpoints.clear_leftovers(self.path / "checkpoints")
        newest, stored = self.latest_checkpoint(), self.path / "env.json"
        environment = json.loads(stored.read_text(encoding="utf-8")) if stored.is_file() else {}
        attempts = environment.get("resumed", [])
        before = now | (attempts[-1] if attempts else environment)
        changes = config_changes(read_yaml(self.path / "config.yaml"), config)
        others = [
            f"{name}: not what the run was started with"
            for name, value in now["identity"].items()
            if before["identity"].get(name, value) != value
        ]
        stopping = [*stopping_changes(changes, config), *others]
        if newest and stopping and not allow_changes:  # without a checkpoint all is done anew, nothing can be mixed
            raise ConfigError(
                f"{self.path} cannot be resumed as it is, because this differs:\n  "
                + "\n  ".join(stopping)
                + "\nPut it back; or start another run with run_name=NEW_NAME; or go on with it: --allow-changes"
            )
        done = newest[0] if newest else -1
        self.first_step = max(done, 0) + 1
        last_bits = [name for name in LAST_BITS if newest and before[name] != now[name]]
        said = [*changes, *others]
        said += [f"{self.path} goes on " + (f"after step {done}" if newest else "from the start: no checkpoint")]
        said += [f"{name}: {before[name]} -> {now[name]}; the last bits of results may differ" for name in last_bits]
        for line in said:
            print(f"resume: {line}", file=sys.stderr)
            self.log_file.note(f"resume: {line}")
        self._cut_after(done, finished=done >= config.train.steps)
        attempt = {"first_step": self.first_step, "config_changes": [*changes, *others], **now}
        return environment | {"resumed": [*attempts, attempt]}

    def _cut_after(self, step: int, finished: bool) -> None:
        """Remove what is later than a step; where that was the last one, also its evaluation, which is done again."""
        path = self.path / "metrics.jsonl"
        rows = [row for row in read_metrics(path) if row["step"] <= step]
        kept = [row for row in rows if not (finished and row["step"] == step and is_evaluation(row))]
        if path.exists():
            _write(path, "".join(json.dumps(row) + "\n" for row in kept))
        for folder_step, folder in step_folders(self.path / "rollouts"):
            if folder_step > step:
                shutil.rmtree(folder)
        for folder_step, folder in step_folders(self.path / "checkpoints"):
            if folder_step > step:  # a damaged one: it must not count among those that are kept
                checkpoints.set_damaged_aside(folder)
        (self.path / "summary.json").unlink(missing_ok=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Append one line to `metrics.jsonl`, and return it. NaN and infinities, which JSON lacks, become null."""
        row = {"step": step} | {name: _or_null(value) for name, value in metrics.items()}
        path = self.path / "metrics.jsonl"
        with disk_full_named(self.path, f"the metrics of step {step} were not written"), path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row

    def write_functions(self, sources: Mapping[str, str]) -> None:
        """Write `functions/NAME.py`: the source of each of the user's functions, without secrets."""
        for name, text in sources.items():
            stem = re.sub(r"[^\w.-]+", "_", name)[-MAX_NAME:].strip("._")
            _write(self.path / FUNCTIONS / f"{stem}.py", without_secrets(str(left_out(text))))

    def write_findings(self, findings: Iterable[Finding]) -> None:
        """What the doctor has found so far; no file where it is nothing."""
        path, rows = self.path / FINDINGS, [asdict(finding) | {"page": finding.page} for finding in findings]
        self._write_rows(rows, path) if rows else path.unlink(missing_ok=True)

    def write_rows(self, step: int, rows: Iterable[Mapping[str, Any]], split: str) -> None:
        """Write `rollouts/step_NNNNNN/SPLIT.jsonl`, one row a line, in place of an earlier file."""
        self._write_rows(rows, self.path / "rollouts" / step_folder(step) / f"{split}.jsonl")

    def write_tokens(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, float]) -> None:
        """Write `rollouts/step_NNNNNN/tokens.safetensors`, in place of an earlier file."""
        from safetensors.torch import save

        path = self.path / "rollouts" / step_folder(step) / TOKENS
        about = {"step": str(step), "state": json.dumps(dict(state))}
        with disk_full_named(path.parent, f"{path.name} was not written"):
            write_bytes(path, save(dict(tensors), about))

    def _write_rows(self, rows: Iterable[Mapping[str, Any]], path: Path) -> None:
        with disk_full_named(path.parent, f"{path.name} was not written"):
            write_jsonl(rows, path, lenient=True)

    def checkpoint_folder(self, step: int) -> Path:
        """Where the checkpoint of a step is, or will be."""
        return self.path / "checkpoints" / step_folder(step)

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """`with run.checkpoint(step) as folder:` save into `folder`; it is renamed into place when all is written.

        Then `model` and `best` are set, and what `checkpoint.keep` and `keep_best` do not keep is removed.
        """
        root, metrics = self.path / "checkpoints", self.path / "metrics.jsonl"
        with checkpoints.writing_checkpoint(root, step) as folder:
            yield folder
            if metrics.exists():  # the rows up to this step are part of what a checkpoint promises
                flush_to_disk(metrics)
        shutil.rmtree(root / f"{step_folder(step)}.damaged", ignore_errors=True)
        self._link("model", self.checkpoint_folder(step))
        self.keep_best()

    def keep_best(self) -> None:
        """Set `best` by the metrics so far, and remove the checkpoints that are neither it nor among the newest."""
        if (best := self._best_step()) is not None:
            self._link("best", self.checkpoint_folder(best))
        checkpoints.keep_checkpoints(self.path / "checkpoints", self.settings.keep, also={best})

    def _best_step(self) -> int | None:
        """Of the checkpoints, the one whose step has the best `checkpoint.keep_best`; the later of equals."""
        name = self.settings.keep_best
        if name is None:
            return None
        rows = read_metrics(self.path / "metrics.jsonl")
        value = {row["step"]: row[name] for row in rows if row.get(name) is not None}
        if not value and any(is_evaluation(row) == name.startswith(EVALUATED) for row in rows):
            near = nearest(name, {key for row in rows for key in row})
            hint = f"; did you mean {near!r}?" if near else ""
            log.warning("checkpoint.keep_best: no step has had the metric %r so far%s", name, hint)
        sign = 1 if self.settings.best_is == "max" else -1
        candidates = [step for step, _ in step_folders(self.path / "checkpoints") if step in value]
        return max(candidates, key=lambda step: (sign * value[step], step), default=None)

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Step and folder of the newest checkpoint whose files are all as they were written; damaged ones are named on
        stderr."""
        for step, folder in reversed(step_folders(self.path / "checkpoints")):
            fault = checkpoints.checkpoint_fault(folder)
            if fault is None:
                return step, folder
            print(f"checkpoint {folder} is damaged and is passed over: {fault}", file=sys.stderr)
        return None

    def _link(self, name: str, checkpoint: Path) -> None:
        """A link in the run's folder, so that a later command need not know the step."""
        aside = self.path / f".{name}.partial"
        aside.unlink(missing_ok=True)
        aside.symlink_to(checkpoint.relative_to(self.path), target_is_directory=True)
        aside.replace(self.path / name)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, and `curves.png` where matplotlib is installed."""
        _write_json(self.path / "summary.json", dict(summary))
        self.log_file.note(f"summary: {json.dumps(dict(summary), default=str)}")
        from atomrl.tracking.reading.comparison import draw_curves

        try:
            draw_curves(self.path)
        except ImportError as error:
            print(error, file=sys.stderr)


def is_begun(folder: Path) -> bool:
    """Whether a run got as far there as its first step."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return any(not name.endswith(".partial") for name in names - STARTED)


def rollout_rows(
    step: int, trajectories: Sequence[Trajectory], advantages: Mapping[int, float]
) -> list[dict[str, Any]]:
    """One JSON-ready dict per trajectory.

    `reward` is all that the trajectory earned, turns included; `reward_parts` are of the outcome alone.
    `policy_version` is that of the newest weights that wrote a token of it, `policy_versions` are all. With an
    environment there is an `episode`: its turns (who wrote what, reward, labels, seconds) and how it ended.

    Args:
        advantages: by the trajectory's index; what was not trained on has none and is written as null.
    """
    rows = []
    for index, item in enumerate(trajectories):
        written = [segment for segment in item.segments if segment.origin != "prompt"]
        versions = sorted({v for segment in written if (v := segment.policy_version) is not None})
        rows.append(
            {
                "step": step,
                "prompt_id": item.prompt_id,
                "completion_index": item.index,
                "data_source": item.sample.data_source,
                "prompt": item.sample.prompt if isinstance(item.sample.prompt, str) else list(item.sample.prompt),
                "ground_truth": item.sample.ground_truth,
                "completion": item.text,
                "prompt_tokens": item.prompt_tokens,
                "completion_tokens": item.response_tokens,
                "token_ids": [token for segment in written for token in segment.token_ids],
                "reward": item.earned,
                "reward_parts": dict(item.reward_parts),
                "reward_failures": {f.reward: f"{f.kind}: {f.message}" for f in item.reward_failures},
                "advantage": advantages.get(index),
                "finish_reason": item.finish_reason,
                "policy_version": versions[-1] if versions else None,
                "policy_versions": versions,
                **({"opening": item.opening} if item.opening else {}),
                **({} if item.baseline_reward is None else {"baseline_reward": _or_null(item.baseline_reward)}),
                **({} if item.episode is None else {"episode": asdict(item.episode)}),
            }
        )
    return rows


def _or_null(value: float) -> float | None:
    """A number as JSON has it."""
    return value if math.isfinite(value) else None


def _write_json(path: Path, value: Any) -> None:
    _write(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def _write(path: Path, text: str) -> None:
    with disk_full_named(path.parent, f"{path.name} was not written"):
        write_text(path, text, flush=True)
