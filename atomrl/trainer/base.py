"""A run of any kind: what is checked before weights are loaded, and the course that all kinds take."""

import hashlib
import json
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from atomrl.backends.base import check_shards
from atomrl.backends.group import RankFailed, RankLost, RankOutOfMemory
from atomrl.cluster.ray_cluster import RayCluster
from atomrl.common.files import model_identity
from atomrl.common.processes import HangWatch, launched, phase, unmet_request
from atomrl.common.threads import adapting
from atomrl.config import RunConfig
from atomrl.data.files import pinned
from atomrl.data.problems import DataProcessor, PromptStream
from atomrl.models.loading import resolve_folder
from atomrl.protocols import Algorithm, TrainingBackend
from atomrl.tracking.checkpoints import tokenizer_identity
from atomrl.tracking.recorder import Recorder
from atomrl.tracking.run_directory import RunDirectory
from atomrl.trainer.build import (
    ENGINES,
    build_trainer,
    device_name,
    in_actors,
    rank_total,
    starting_model,
    with_settings,
)
from atomrl.trainer.checks import check_ranks
from atomrl.trainer.cluster import describe_cluster, open_cluster
from atomrl.trainer.loop import Callback, Progress, Training, fit
from atomrl.trainer.memory import memory_estimate, rank_choices

# --------------------------------------------------------------------------------------------------------------------
# The watch over what a run does in its own process.


def hang_watch(config: RunConfig) -> HangWatch:
    """Ends the process where it makes no progress for `train.timeout_s`, or, where the run waits for others, for the
    longest of their time-outs if that is longer: those name whom they waited for."""
    engine = f"the engine ({config.rollout.engine})"
    names = {
        "gen": engine,
        "wait": f"{engine} or a reward",
        "reward": "a reward",
        "sync_weights": f"handing the weights to {engine}",
        "pool": "the rollout pool",
        "eval": f"evaluation, by {engine} or a reward," if config.kind == "rl" else "evaluation",
    }
    limits = {"train.timeout_s": config.train.timeout_s}
    for section in ("cluster", "backend", "asynchronous", "environment"):
        if (settings := getattr(config, section)) is not None:
            limits[f"{section}.timeout_s"] = settings.timeout_s
    if config.rollout.source == "pool":
        limits["pool.timeout_s"] = config.pool.timeout_s
    if (kind := ENGINES.get(config.rollout.engine)) is not None and kind.server:
        limits["rollout.server_timeout_s"] = config.rollout.server_timeout_s
    for use in [*config.reward.functions, *config.reward.by_data_source.values()]:
        limits[f"timeout_s of the reward {use.function}"] = use.timeout_s
    longest = max(limits, key=lambda name: limits[name])
    return HangWatch(limits[longest], names, longest)


log = logging.getLogger(__name__)
STATE = "progress.json"
"""File in each checkpoint with the progress of the run."""


class Evaluation(NamedTuple):
    """Result of an evaluation on held-out data."""

    metrics: Mapping[str, float]
    headline: dict[str, float]
    """The figures that the summary shows."""
    rows: Sequence[Mapping[str, Any]] = ()
    """One for each completion or sample."""


class PreparedRun(ABC):
    """A run whose config, data, tokenizer and rewards are checked. No weights are loaded, and nothing is written.

    Raises:
        ConfigError, DataError, ValueError: on construction: what is wrong, where, and what to do.
    """

    config: RunConfig
    tokenizer: Any
    algorithm: Algorithm
    # These are there from `open` on.
    start: str
    """The folder or hub name of the policy that training starts from."""
    cluster: RayCluster | None
    trainer: TrainingBackend
    record: Recorder
    progress: Progress

    @property
    @abstractmethod
    def identity(self) -> dict[str, str]:
        """Hashes of what the config only names: data, prompts, tokenizer, models."""

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
        """Processes that train."""
        return rank_total(self.config)

    def describe_ranks(self) -> str:
        """Return `ranks_line`, with its title."""
        return f"ranks: {ranks_line(self.config)}"

    @abstractmethod
    def open(self, stack: ExitStack) -> Training:
        """Open what the steps need beside the trainer (the stack closes it), and return what `fit` calls."""

    @property
    def function_sources(self) -> Mapping[str, str]:
        """The source of each of the user's functions, by the name that the config has for it."""
        return {}

    def totals(self) -> dict[str, float]:
        """Return what the run has consumed beside time, for the summary."""
        return {}

    @abstractmethod
    def evaluate(self) -> Evaluation | None:
        """Evaluate on what is held out, if anything is."""

    def execute(
        self,
        resume: bool = False,
        allow_changes: bool = False,
        callbacks: Sequence[Callback] = (),
        wording: Callable[[str], str] = str,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        header: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Run to the end, or to a stop request.

        Args:
            resume: go on from the newest checkpoint of the run, whose folder must exist.
            allow_changes: resume although config, data, tokenizer or model differ.
            callbacks: called after each step.
            wording: how a finding of the doctor, which names keys of the config, is said on the terminal.
            settings: of the trainer, by section, in place of those of the config.
            header: lines for the terminal: the first once the folder is there, the others when models are loaded, so
                that an error stands alone.

        Returns:
            What is in the run's `summary.json`.
        """
        started = time.perf_counter()
        data = self.config.data
        read = {"train": pinned(data.train), "eval": pinned(data.eval)}
        self.config = config = self.config.model_copy(update={"data": data.model_copy(update=read)})
        with ExitStack() as ending:  # the folder is let go of last: who waits for its lock finds all there is
            with ExitStack() as stack:
                self.cluster = open_cluster(config, self.algorithm, stack)  # before there is a folder
                directory = ending.enter_context(RunDirectory.create(config, resume, allow_changes, self.identity))
                say(header[:1])
                directory.write_functions(self.function_sources)
                stack.enter_context(adapting(self.ranks == 1 and device_name(config.model.device) == "cpu"))
                done, earlier_s = self._course(directory, stack, callbacks, wording, settings or {}, header[1:])
            return self._finish(directory, done, earlier_s + time.perf_counter() - started)

    def _course(
        self,
        directory: RunDirectory,
        stack: ExitStack,
        callbacks: Sequence[Callback],
        wording: Callable[[str], str],
        settings: Mapping[str, Mapping[str, Any]],
        header: Sequence[str],
    ) -> tuple[bool, float]:
        """Build or restore everything and train; return whether the last step was done, and the seconds of earlier
        attempts. The stack closes all but the run folder."""
        config = self.config
        newest = directory.checkpoint_folder(directory.first_step - 1) if directory.first_step > 1 else None
        stored = json.loads((newest / STATE).read_text(encoding="utf-8")) if newest else {}
        if newest and config.backend is not None:
            check_shards(newest)  # before ranks are started, and models loaded
        self.progress = progress = Progress(**stored)
        earlier_s = progress.wall_s
        self.start = starting_model(config, self.tokenizer, directory)
        mine = with_settings(config, settings)
        self.trainer = trainer = build_trainer(mine, self.algorithm, self.start, self.tokenizer, self.cluster)
        stack.callback(trainer.close)
        if newest:
            trainer.load(newest)
        self.record = stack.enter_context(Recorder(config, directory, wording))
        training = self.open(stack)
        say(header)

        def save(folder: Path, progress: Progress) -> Callable[[], None] | None:
            written = trainer.save(folder)
            (folder / STATE).write_text(json.dumps(asdict(progress), indent=1) + "\n", encoding="utf-8")
            return written

        done = fit(training, config, progress, save, self._evaluate, callbacks)
        if done and config.eval.after:
            directory.keep_best()  # the last checkpoint was written before the last evaluation
        return done, earlier_s

    def _evaluate(self, number: int) -> None:
        """Evaluate after this many steps, and record what is found."""
        with phase("eval"):
            found = self.evaluate()
        if found is not None:
            self.record.log_evaluation(number, found.metrics, found.rows)
            self.progress.evaluations[str(number)] = found.headline

    def _finish(self, directory: RunDirectory, done: bool, seconds: float) -> dict[str, Any]:
        """Write and return the summary: `accuracy_before`, `accuracy_after`, ..., `wall_s`."""
        progress = self.progress
        before = progress.evaluations.get("0", {})
        after = progress.evaluations.get(str(progress.step), {}) if progress.step else {}
        graded = progress.graded  # found out after the first evaluation, where that had nothing but zeros
        summary = {
            "run": str(directory.path),
            "finished": done,
            "steps": progress.step,
            "updates": progress.updates,
            "seed": self.config.seed,
            "wall_s": round(seconds, 2),
            **{f"{name}_before": value for name, value in before.items() if not (graded and name == "accuracy")},
            **{f"{name}_after": value for name, value in after.items()},
            **self.totals(),
            "model": str(directory.path / "model") if progress.step else None,
        }
        directory.finish(summary)
        if done and not progress.updates:
            log.warning(
                "none of the %d steps made an update (each gradient was 0 or not finite, or there was no row): "
                "%s is the model that the run started from",
                progress.step, summary["model"],
            )  # fmt: skip
        return summary


def ranks_line(config: RunConfig) -> str:
    """Describe how many processes train and who starts them. Warns if a launcher was asked for another number."""
    ranks = rank_total(config)
    if request := unmet_request(ranks):
        log.warning(request)
    who = "Ray actors" if in_actors(config) else "started by a launcher" if launched() else "started by this run"
    return f"{ranks}{f', {who}' if ranks > 1 else ''}"


def memory_sections(config: RunConfig, algorithm: Algorithm) -> list[tuple[str, Sequence[str]]]:
    """The sections of a dry run on ranks and memory, from shapes alone; none of a fresh model."""
    if config.gpt is not None:
        return []
    ranks = rank_total(config)
    parts = memory_estimate(config, algorithm, ranks)
    also = ", which also draws" if config.kind == "rl" else ""
    of_one = [f"what follows is the memory of the first{also}"] if ranks > 1 else []
    sections: list[tuple[str, Sequence[str]]] = [
        ("ranks", [ranks_line(config), *of_one]),
        ("memory", [f"{name:<20}{readable(size)}" for name, size in parts.items()]),
    ]
    if config.backend is None:
        return sections
    choices = rank_choices(config, algorithm, ranks, check=lambda to: check_ranks(to, algorithm))
    lines = [f"{name:<36}{readable(device)}" for name, (device, _) in choices.items()]
    return [*sections, ("choices", ["what that total would be with one setting changed:", *lines])]


def say(lines: Sequence[str]) -> None:
    """Print lines for people: standard output has the summary alone."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def identity(stream: PromptStream, processor: DataProcessor, model: str | Path) -> dict[str, str]:
    """Hashes of what a config only names: the problems, the prompt made of the first of them (chat template, system
    prompt), tokenizer and model."""
    first = [prompt.token_ids for prompt in processor.to_prompts([("0", stream.samples[0])])]
    return {
        "data (data.train)": stream.fingerprint,
        "prompts (chat template, system prompt)": hashlib.sha256(repr(tuple(first)).encode()).hexdigest(),
        "tokenizer (model.tokenizer, or beside model.path)": tokenizer_identity(processor.tokenizer),
        "model (model.path)": model_identity(resolve_folder(model)),
    }


def readable(size: int) -> str:
    """Bytes for people.

    Example:
        >>> readable(3 * 2**29), readable(2**20)
        ('    1.50 GiB', '    1.00 MiB')
    """
    return f"{size / 2**30:8.2f} GiB" if size >= 2**30 else f"{size / 2**20:8.2f} MiB"


# --------------------------------------------------------------------------------------------------------------------
# A run of several ranks goes on after one of them is lost: with a new group, from the newest checkpoint.


def run_to_end(
    run: PreparedRun, prepare: Callable[[], PreparedRun], resume: bool = False, **given: Any
) -> dict[str, Any]:
    """`PreparedRun.execute`, again from the newest checkpoint where a rank died, stood still or ran out of memory.

    The steps since that checkpoint are made once more and are the same to the last bit. After too little memory all
    ranks take smaller micro-batches, or compute layers twice: the gradient is the same sum in more parts.

    Args:
        run: made, and not executed.
        prepare: makes it anew.
        resume, given: as `PreparedRun.execute` takes them.

    Returns:
        As it does.

    Raises:
        RankFailed: it happened more often than `backend.restarts` allows, or a launcher has started the ranks; and
            what else `PreparedRun.execute` raises.
    """
    done, settings = 0, dict[str, dict[str, object]]()
    while True:
        try:
            return run.execute(resume, settings=settings, **given)
        except (RankLost, RankOutOfMemory) as error:
            backend = run.config.backend
            if backend is None or launched() is not None or done >= backend.restarts:
                raise
            reason: RankFailed = error
            if isinstance(error, RankOutOfMemory):
                if error.tokens is None:
                    settings["model"] = {"gradient_checkpointing": True}
                else:
                    settings["train"] = {"tokens_per_micro_batch": error.tokens}
        done, resume = done + 1, True
        flat = {f"{section}.{key}": value for section, keys in settings.items() for key, value in keys.items()}
        named = [f"{key}={json.dumps(value)}" for key, value in flat.items()]
        log.warning(
            "%s: a new group of ranks goes on from the newest checkpoint%s (%d of backend.restarts=%d)",
            reason, f", with {' '.join(named)}" if named else "", done, backend.restarts,
        )  # fmt: skip
        del reason  # and with it the tensors that its traceback holds
        run = prepare()
