"""A run of any kind: what is checked before weights are loaded, and the course that all kinds take."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from atomrl.config import RunConfig
from atomrl.loop.recovery import open_run, saver
from atomrl.loop.sync import Progress, Schedule, run_steps
from atomrl.protocols import Algorithm, TrainingBackend
from atomrl.runs.build import device_name
from atomrl.runs.checks import needs_teacher
from atomrl.tracking.recorder import Recorder
from atomrl.tracking.run_directory import RunDirectory
from atomrl.training.local import LocalBackend

Callback = Callable[[int, Mapping[str, float]], None]
"""Called after each step with its number and metrics."""


@dataclass(frozen=True)
class Steps:
    """What a run does between opening and closing."""

    step: Callable[[int], dict[str, float]]
    """Step number -> metrics."""
    evaluate: Callable[[int], None]
    """Evaluates on what is held out, where there is any, after this many steps, and records the result."""


class Run(ABC):
    """A run whose config, data, tokenizer and rewards are checked. No weights are loaded, and nothing is written.

    Raises:
        ConfigError, DataError, ValueError: on construction: what is wrong, where, and what to do.
    """

    config: RunConfig
    tokenizer: Any
    algorithm: Algorithm
    schedule: Schedule
    temperature = 1.0
    """At which log-probs are taken: that of sampling in reinforcement learning, 1 elsewhere."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, str]:
        """Hashes of what the config only names: data, prompts, tokenizer, models."""

    @abstractmethod
    def describe(self) -> Sequence[tuple[str, Sequence[str]]]:
        """What a dry run prints of this kind: titles with their lines."""

    @abstractmethod
    def starting_model(self, directory: RunDirectory) -> str:
        """The folder or hub name that training starts from; a fresh model is made in the run's folder."""

    @abstractmethod
    def open(self, trainer: TrainingBackend, record: Recorder, progress: Progress) -> AbstractContextManager[Steps]:
        """The steps, with all that they need opened around them."""

    def execute(
        self,
        resume: bool = False,
        allow_changes: bool = False,
        callbacks: Sequence[Callback] = (),
        wording: Callable[[str], str] = str,
    ) -> dict[str, Any]:
        """Run to the end, or to a stop request.

        Args:
            resume: go on from the newest checkpoint of the run, whose folder must exist.
            allow_changes: resume although config, data, tokenizer or model differ.
            callbacks: called after each step.
            wording: how a finding of the doctor, which names keys of the config, is said on the terminal.

        Returns:
            What is in the run's `summary.json`.
        """
        started = time.perf_counter()
        directory, progress = open_run(self.config, resume, self.identity, allow_changes)
        earlier_s = progress.wall_s
        with ExitStack() as stack:
            trainer = self.build_trainer(self.starting_model(directory))
            stack.callback(trainer.close)
            if progress.step:
                trainer.load(directory.checkpoint_folder(progress.step))
            record = stack.enter_context(Recorder(self.config, directory, wording))
            steps = stack.enter_context(self.open(trainer, record, progress))
            if not progress.step and self.config.eval.before:
                steps.evaluate(0)

            def one_step(step: int) -> dict[str, float]:
                metrics = steps.step(step)
                every = self.schedule.eval_every_steps
                if every and step % every == 0 and step < self.schedule.steps:
                    steps.evaluate(step)
                for callback in callbacks:
                    callback(step, metrics)
                return metrics

            done = run_steps(one_step, record, progress, saver(trainer), self.schedule)
            if done and self.config.eval.after:
                steps.evaluate(progress.step)
        return self._finish(directory, progress, done, earlier_s + time.perf_counter() - started)

    def build_trainer(self, path: str) -> TrainingBackend:
        """The training back end, with the models that the algorithm needs beside the policy."""
        config, algorithm, schedule = self.config, self.algorithm, self.schedule
        return LocalBackend(
            config.model.model_copy(update={"path": path}),
            config.train,
            total_updates=schedule.steps * schedule.updates_per_epoch * schedule.epochs_per_step,
            tokenizer=self.tokenizer,
            device=device_name(config.model.device),
            temperature=self.temperature,
            needs_reference="ref_logprobs" in algorithm.needs,
            forward_mode=algorithm.update is not None,
            scores="scores" in algorithm.outputs,
            critic=config.critic if "values" in algorithm.needs else None,
            teacher=config.teacher.path if config.teacher and needs_teacher(algorithm) else None,
            seed=config.seed,
        )

    def _finish(self, directory: RunDirectory, progress: Progress, done: bool, seconds: float) -> dict[str, Any]:
        """Write and return the summary: `accuracy_before`, `accuracy_after`, ..., `wall_s`."""
        before = progress.evaluations.get("0", {})
        after = progress.evaluations.get(str(progress.step), {}) if progress.step else {}
        summary = {
            "run": str(directory.path),
            "finished": done,
            "steps": progress.step,
            "seed": self.config.seed,
            "wall_s": round(seconds, 2),
            **{f"{name}_before": value for name, value in before.items()},
            **{f"{name}_after": value for name, value in after.items()},
            "model": str(directory.path / "model") if progress.step else None,
        }
        directory.finish(summary)
        return summary
