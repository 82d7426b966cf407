"""`PreparedRun`, the base class of all kinds of run: set-up, checkpoints and summary around `loop.fit`."""

import hashlib
import json
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from atomrl.cluster.ray_cluster import RayCluster
from atomrl.common.files import model_identity
from atomrl.common.hangs import phase
from atomrl.common.launchers import launched, unmet_request
from atomrl.common.memory import readable
from atomrl.common.threads import adaptive_threads
from atomrl.config import RunConfig
from atomrl.data.curriculum import PromptStream
from atomrl.data.hub import pinned
from atomrl.data.image_reader import ImageReader
from atomrl.data.images import ImageStore
from atomrl.data.processor import DataProcessor
from atomrl.models.loading import resolve_folder
from atomrl.protocols import Algorithm, TrainingBackend
from atomrl.tracking.checkpoint_format import PROGRESS, check_sharded, record_from
from atomrl.tracking.reading.lines import read_metrics
from atomrl.tracking.recorder import Recorder
from atomrl.tracking.resuming import tokenizer_identity
from atomrl.tracking.run_directory import RunDirectory
from atomrl.trainer.build import build_trainer, device_name, in_actors, rank_total, starting_model, with_settings
from atomrl.trainer.checks.config import check_ranks
from atomrl.trainer.cluster import open_cluster
from atomrl.trainer.cluster_report import describe_cluster
from atomrl.trainer.loop import Callback, Progress, Training, fit
from atomrl.trainer.memory import memory_estimate, rank_choices
from atomrl.trainer.report.metrics import why_no_update
from atomrl.types import Problem

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a run is executed.

    Args:
        resume: continue from the newest checkpoint of the run, whose folder must exist.
        allow_changes: resume although config, data, tokenizer or model differ.
        callbacks: called after each step.
        wording: rewrites the doctor's findings, which name config keys, for the terminal.
        header: lines for the terminal: the first when the folder exists, the others when models are loaded, so that an
            error stands alone.
        settings: overrides of the config's sections for the trainer alone.
    """

    resume: bool = False
    allow_changes: bool = False
    callbacks: Sequence[Callback] = ()
    wording: Callable[[str], str] = str
    header: Sequence[str] = ()
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run with its folder and its trainer, which `PreparedRun.open` adds the parts of a kind of run to."""

    config: RunConfig
    directory: RunDirectory
    cluster: RayCluster | None
    start: str
    """Folder or hub name of the model that training starts from."""
    trainer: TrainingBackend
    record: Recorder
    progress: Progress
    """At the newest checkpoint; at the beginning for a new run."""

    def note(self, line: str) -> None:
        """Log a line, and write it to the run's log file."""
        log.info(line)
        self.directory.log_file.note(line)

    def save(self, folder: Path, progress: Progress) -> Callable[[], None] | None:
        """Write a checkpoint (`loop.Save`)."""
        written = self.trainer.save(folder)
        (folder / PROGRESS).write_text(json.dumps(asdict(progress), indent=1) + "\n", encoding="utf-8")
        return written

    def evaluate(self, training: Training, step: int) -> None:
        """Evaluate the current weights, and record the result under a step."""
        with phase("eval"):
            result = training.evaluate()
        if result is not None:
            self.record.log_evaluation(step, result.metrics, result.rows)
            self.progress.evaluations[str(step)] = result.headline

    def finish(self, done: bool, seconds: float, totals: Mapping[str, float]) -> dict[str, Any]:
        """Write and return the summary: `accuracy_before`, `accuracy_after`, ..., `wall_s`."""
        progress, directory = self.progress, self.directory
        before = progress.evaluations.get("0", {})
        after = progress.evaluations.get(str(progress.step), {}) if progress.step else {}
        summary = {
            "run": str(directory.path),
            "finished": done,
            "steps": progress.step,
            "updates": progress.updates,
            "seed": self.config.seed,
            "wall_s": round(seconds, 2),
            **{f"{name}_before": value for name, value in before.items()},
            **{f"{name}_after": value for name, value in after.items()},
            **totals,
            "model": str(directory.path / "model") if progress.step else None,
        }
        directory.finish(summary)
        if done and not progress.updates:
            log.warning(
                "none of the %d steps made an update (%s): %s is the initial model",
                progress.step, why_no_update(read_metrics(directory.path / "metrics.jsonl")), summary["model"],
            )  # fmt: skip
        return summary


class PreparedRun(ABC):
    """A run whose config, data, tokenizer and rewards are checked. No weights are loaded, and nothing is written.

    Raises:
        ConfigError, DataError, ValueError: on construction: what is wrong, where, and what to do.
    """

    config: RunConfig
    tokenizer: Any
    algorithm: Algorithm
    given: Mapping[str, Any] | None = None
    """The keys of the config as it was loaded."""
    images: ImageStore | None = None
    """Pictures of the data; None: the model reads text alone."""
    problems: Sequence[Problem] = ()
    """Rows to train on; none where the data are plain text."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, str]:
        """Hashes of data, prompts, tokenizer and models, which the config only names."""

    @abstractmethod
    def describe_data(self) -> Sequence[str]:
        """Describe training and held-out data, for a dry run."""

    @abstractmethod
    def describe_batch(self) -> Sequence[str]:
        """Describe the size of a step and of the run, for a dry run."""

    def describe(self) -> Sequence[tuple[str, Sequence[str]]]:
        """Return the sections of a dry run: titles with their lines."""
        sections = [("data", self.describe_data()), ("batch", self.describe_batch())]
        if self.config.cluster is not None:
            sections.append(("cluster", describe_cluster(self.config, self.algorithm)))
        return [*sections, *memory_sections(self.config, self.algorithm)]

    @property
    def ranks(self) -> int:
        """Number of training processes."""
        return rank_total(self.config)

    def describe_ranks(self) -> str:
        """Return `ranks_line`, with its title."""
        return f"ranks: {ranks_line(self.config)}"

    @property
    def function_sources(self) -> Mapping[str, str]:
        """Source code of the user's functions, by their names in the config."""
        return {}

    def describe_resumption(self, allow_changes: bool) -> list[str]:
        """Return what resuming the run would print; nothing is changed.

        Raises:
            ConfigError: it cannot be resumed.
        """
        return RunDirectory.check_resume(self._pinned(), allow_changes, self.identity)

    def _pinned(self) -> RunConfig:
        """Return the config with hub data sets at the commit that was read."""
        data = self.config.data
        pins = {"train": pinned(data.train), "eval": pinned(data.eval)}
        return self.config.model_copy(update={"data": data.model_copy(update=pins)})

    @property
    def image_reader(self) -> ImageReader | None:
        """Reader of the pictures; None: the data have none."""
        return self.images.reader if self.images else None

    @abstractmethod
    def open(self, run: OpenRun, stack: ExitStack) -> Training:
        """Open what the steps need beside the trainer, and return it for `fit`. The stack closes it."""

    def execute(self, options: Options = Options()) -> dict[str, Any]:
        """Train to the last step, or to a stop request.

        Returns:
            The contents of the run's `summary.json`.
        """
        started = time.perf_counter()
        # The folder's lock is released last: whoever waits for it finds all files complete.
        with ExitStack() as folder, ExitStack() as stack:
            run = self._open_run(options, folder, stack)
            config, earlier_s = run.config, run.progress.wall_s
            training = self.open(run, stack)
            say(options.header[1:])
            done = fit(training, config, run.progress, run.save, partial(run.evaluate, training), options.callbacks)
            if done and config.eval.after:
                run.directory.keep_best()  # the last checkpoint was written before the last evaluation
            stack.close()
            return run.finish(done, earlier_s + time.perf_counter() - started, training.totals())

    def _open_run(self, options: Options, folder: ExitStack, stack: ExitStack) -> OpenRun:
        """Create the folder, or open it to resume, and start the trainer."""
        config = self._pinned()
        cluster = open_cluster(config, self.algorithm, stack)  # fails before a folder is made
        directory = folder.enter_context(
            RunDirectory.create(config, options.resume, options.allow_changes, self.identity)
        )
        say(options.header[:1])
        directory.write_functions(self.function_sources)
        if self.images is not None:
            self.images.write()
            for line in self.images.describe():
                log.info(line)
                directory.log_file.note(line)
        stack.enter_context(adaptive_threads(self.ranks == 1 and device_name(config.model.device) == "cpu"))

        newest = directory.checkpoint_folder(directory.first_step - 1) if directory.first_step > 1 else None
        stored = json.loads((newest / PROGRESS).read_text(encoding="utf-8")) if newest else {}
        if newest and config.backend is not None:
            check_sharded(newest)  # before ranks are started and models are loaded
        progress = record_from(Progress, stored, (newest or directory.path) / PROGRESS)

        start = starting_model(config, self.tokenizer, directory)
        trainer = build_trainer(
            with_settings(config, options.settings),
            self.algorithm,
            start,
            cluster=cluster,
            given=self.given,
            tokenizer=self.tokenizer,
            images=self.image_reader,
        )
        stack.callback(trainer.close)
        if newest:
            trainer.load(newest)
        record = stack.enter_context(Recorder(config, directory, options.wording))
        return OpenRun(
            config=config,
            directory=directory,
            cluster=cluster,
            start=start,
            trainer=trainer,
            record=record,
            progress=progress,
        )


def ranks_line(config: RunConfig) -> str:
    """Describe how many processes train and who starts them. Warns if a launcher was requested with another number."""
    ranks = rank_total(config)
    if request := unmet_request(ranks):
        log.warning(request)
    who = "Ray actors" if in_actors(config) else "started by a launcher" if launched() else "started by this run"
    return f"{ranks}{f', {who}' if ranks > 1 else ''}"


def memory_sections(config: RunConfig, algorithm: Algorithm) -> list[tuple[str, Sequence[str]]]:
    """Return the sections on ranks and memory of a dry run, from shapes alone; none for a model made from scratch."""
    if config.gpt is not None:
        return []
    ranks = rank_total(config)
    parts = memory_estimate(config, algorithm, ranks)
    also = ", which also samples" if config.kind == "rl" else ""
    of_one = [f"memory is for the first rank{also}"] if ranks > 1 else []
    sections: list[tuple[str, Sequence[str]]] = [
        ("ranks", [ranks_line(config), *of_one]),
        ("memory", [f"{name:<20}{readable(size)}" for name, size in parts.items()]),
    ]
    if config.backend is None:
        return sections
    choices = rank_choices(config, algorithm, ranks, check=lambda to: check_ranks(to, algorithm))
    lines = [f"{name:<36}{readable(device)}" for name, (device, _) in choices.items()]
    return [*sections, ("choices", ["total with one setting changed:", *lines])]


def say(lines: Sequence[str]) -> None:
    """Print lines on stderr: stdout has only the summary."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def identity(stream: PromptStream, processor: DataProcessor, model: str | Path) -> dict[str, str]:
    """Return hashes of what a config only names: problems, the first prompt (chat template, system prompt), tokenizer,
    model."""
    first = [prompt.token_ids for prompt in processor.to_prompts([("0", stream.problems[0])])]
    return {
        "data (data.train)": stream.fingerprint,
        "prompts (chat template, system prompt)": hashlib.sha256(repr(tuple(first)).encode()).hexdigest(),
        "tokenizer (model.tokenizer, or beside model.path)": tokenizer_identity(processor.tokenizer),
        "model (model.path)": model_identity(resolve_folder(model)),
    }
