"""`atomrl sft`: training on demonstrations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal

from atomrl.algorithms.sft import SFT
from atomrl.config import ConfigError, RunConfig
from atomrl.data.demonstrations import load_demonstrations
from atomrl.data.generators import task_words
from atomrl.data.processor import DataProcessor
from atomrl.data.stream import PromptStream
from atomrl.data.tokenized import TokenizedSamples
from atomrl.loop.recovery import identity
from atomrl.loop.supervised import EVAL_SAMPLES, nll_per_token, supervised_step
from atomrl.loop.sync import Progress, before_updates
from atomrl.models.loading import load_tokenizer
from atomrl.models.tokenizer import make_tokenizer
from atomrl.protocols import TrainingBackend
from atomrl.runs.base import Run, Steps
from atomrl.runs.build import context_tokens, given_data_schedule, model_path, with_steps
from atomrl.runs.describe import given_data_arithmetic, memory
from atomrl.runs.pretrain import fresh_model
from atomrl.tracking.recorder import Recorder
from atomrl.tracking.run_directory import FRESH_MODEL, RunDirectory


class SupervisedRun(Run):
    """Demonstrations; with `sft.gpt`, of a model and a tokenizer made from scratch.

    A step draws `train.rows_per_update` of them. The held-out loss is `eval/nll_per_token`.
    """

    def __init__(self, config: RunConfig) -> None:
        if config.sft is None:
            raise ConfigError("sft: the section is required (an empty one is enough: `sft: {}`)")
        self.config, self.settings = config, config.sft
        self.algorithm = SFT
        self.tokenizer, self.context = self._tokenizer()
        self.processor = DataProcessor(self.tokenizer, config.data)
        self.schedule = given_data_schedule(config)
        train, held_out = self._tokenized("train"), self._tokenized("eval")
        assert train is not None, "data.train is required"
        self.train, self.held_out = train, held_out
        self.config = with_steps(config, len(self.train.samples), self.schedule.prompts_per_step)
        self.schedule = given_data_schedule(self.config)
        self.stream = PromptStream(self.train.samples, seed=config.seed, shuffle=config.data.shuffle)

    def _tokenizer(self) -> tuple[Any, int | None]:
        """The tokenizer, and the longest row that the model takes."""
        if self.settings.gpt is not None:
            return make_tokenizer(task_words(self.config.data.train)), self.settings.gpt.max_tokens
        path, model = model_path(self.config), self.config.model
        tokenizer = load_tokenizer(model.tokenizer or path, model.trust_remote_code, path)
        return tokenizer, context_tokens(path, self.config)

    def _tokenized(self, split: Literal["train", "eval"]) -> TokenizedSamples | None:
        config = self.config
        if split == "eval" and config.data.eval is None:
            return None
        return TokenizedSamples(
            load_demonstrations(config.data, self.settings.completion_field, split, config.seed),
            self.processor,
            "demonstrations",
            seed=config.seed,
            limit=self.context,
            max_row_tokens=config.train.max_row_tokens,
        )

    @cached_property
    def identity(self) -> dict[str, str]:
        if self.settings.gpt is not None:
            return {"data (data.train)": self.stream.fingerprint}
        return identity(self.stream, self.processor, model_path(self.config))

    def describe(self) -> Sequence[tuple[str, Sequence[str]]]:
        held_out = len(self.held_out.samples) if self.held_out else 0
        sections = [
            ("data", [f"{len(self.train.samples)} demonstrations to train on, {held_out} held out"]),
            ("batch", [given_data_arithmetic("demonstrations", self.schedule, len(self.train.samples))]),
        ]
        return sections + ([] if self.settings.gpt else [("memory", memory(self.config, self.algorithm))])

    def starting_model(self, directory: RunDirectory) -> str:
        """`model.path`, or a fresh GPT in the run's folder; the one there when the run goes on."""
        folder = directory.path / FRESH_MODEL
        if self.settings.gpt is None:
            return model_path(self.config)
        if directory.first_step == 1 or not folder.exists():
            fresh_model(self.config, self.settings.gpt.model_dump(), self.tokenizer, str(folder))
        return str(folder)

    @contextmanager
    def open(self, trainer: TrainingBackend, record: Recorder, progress: Progress) -> Iterator[Steps]:
        self.stream.position = progress.position

        def step(number: int) -> dict[str, float]:
            with before_updates():
                rows = self.train.rows(self.stream.take(self.schedule.prompts_per_step))
            metrics = supervised_step(trainer, self.algorithm, rows, progress.algorithm_state)
            progress.position = self.stream.position
            return metrics

        def evaluate(number: int) -> None:
            if self.held_out is not None:
                loss = nll_per_token(trainer, self.held_out.batches(EVAL_SAMPLES))
                record.log_evaluation(number, {"eval/nll_per_token": loss}, [])
                progress.evaluations[str(number)] = {"nll_per_token": loss}

        yield Steps(step, evaluate)
