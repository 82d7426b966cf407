"""`atomrl dpo` and `atomrl reward-model`: training on preferences."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Literal

from torch import Tensor

from atomrl.algorithms.reward_model import RewardModelObjective
from atomrl.config import ConfigError, PreferenceConfig, RunConfig
from atomrl.data.pairs import load_preferences
from atomrl.data.problems import DataError
from atomrl.data.processor import DataProcessor, read_system_prompt
from atomrl.data.sources import COMPLETIONS
from atomrl.data.stream import PromptStream
from atomrl.data.tokenized import TokenizedSamples
from atomrl.loop.preferences import evaluate_preferences, headline
from atomrl.loop.recovery import identity
from atomrl.loop.supervised import supervised_step
from atomrl.loop.sync import Progress, before_updates
from atomrl.models.loading import load_tokenizer, model_config_only
from atomrl.models.reward_model import Reader
from atomrl.objective import PreferenceObjective
from atomrl.protocols import TrainingBackend
from atomrl.runs.base import Run, Steps
from atomrl.runs.build import context_tokens, given_data_schedule, model_path, with_steps
from atomrl.runs.describe import given_data_arithmetic, memory
from atomrl.tracking.recorder import Recorder
from atomrl.tracking.run_directory import RunDirectory
from atomrl.types import RowBatch


class _GivenPreferences(Run):
    """A model that is trained on preferences: pairs, or completions that are labelled one by one.

    A step draws `train.rows_per_update` of them.
    """

    mismatched = False
    """Whether a step also needs the completions of other prompts."""
    takes_labels = False
    """Whether completions that are labelled by themselves will do."""

    def prepare(self, config: RunConfig, path: str, reader: Reader | None = None) -> None:
        """Load and tokenize the data."""
        self.config, self.path = config, path
        model = config.model
        self.tokenizer = load_tokenizer(model.tokenizer or path, model.trust_remote_code, path)
        self.processor = DataProcessor(self.tokenizer, config.data)
        self.context = reader.limit if reader else context_tokens(path, config)
        self.schedule = given_data_schedule(config)
        train, self.held_out = self._tokenized("train", reader), self._tokenized("eval", reader)
        assert train is not None, "data.train is required"
        self.train = train
        self.config = with_steps(config, len(train.samples), self.schedule.prompts_per_step)
        self.schedule = given_data_schedule(self.config)
        self.stream = PromptStream(train.samples, seed=config.seed, shuffle=config.data.shuffle)

    def _tokenized(self, split: Literal["train", "eval"], reader: Reader | None) -> TokenizedSamples | None:
        config = self.config
        if split == "eval" and config.data.eval is None:
            return None
        report = load_preferences(config.data, config.preference or PreferenceConfig(), split, config.seed)
        for sample in report.samples if not self.takes_labels else ():
            if len(sample.columns.get(COMPLETIONS, (0, 0))) == 1:
                raise DataError(
                    f"{sample.sample_id}: a completion with a label of its own, and {config.algorithm.name} needs "
                    "pairs (chosen and rejected); algorithm.name=kto and bco take labels"
                )
        return TokenizedSamples(
            report,
            self.processor,
            "preferences",
            seed=config.seed,
            limit=self.context,
            max_row_tokens=config.train.max_row_tokens,
            read=reader.row if reader else None,
        )

    @abstractmethod
    def scores(self, trainer: TrainingBackend, rows: RowBatch) -> dict[str, Tensor]:
        """Scores of rows by name, each [B]; `reward` is the one that is trained."""

    @cached_property
    def identity(self) -> dict[str, str]:
        return identity(self.stream, self.processor, self.path)

    def describe(self) -> Sequence[tuple[str, Sequence[str]]]:
        held_out = len(self.held_out.samples) if self.held_out else 0
        return [
            ("data", [f"{len(self.train.samples)} preferences to train on, {held_out} held out"]),
            ("batch", [given_data_arithmetic("preferences", self.schedule, len(self.train.samples))]),
            ("memory", memory(self.config, self.algorithm)),
        ]

    def starting_model(self, directory: RunDirectory) -> str:
        return self.path

    @contextmanager
    def open(self, trainer: TrainingBackend, record: Recorder, progress: Progress) -> Iterator[Steps]:
        self.stream.position = progress.position

        def step(number: int) -> dict[str, float]:
            with before_updates():
                rows = self.train.rows(self.stream.take(self.schedule.prompts_per_step), mismatched=self.mismatched)
            metrics = supervised_step(trainer, self.algorithm, rows, progress.algorithm_state)
            progress.position = self.stream.position
            return metrics

        def evaluate(number: int) -> None:
            if self.held_out is not None:
                metrics, lines = evaluate_preferences(self.held_out, lambda rows: self.scores(trainer, rows))
                record.log_evaluation(number, metrics, lines)
                progress.evaluations[str(number)] = headline(metrics)

        yield Steps(step, evaluate)


class PreferenceRun(_GivenPreferences):
    """DPO and its family, KTO, ORPO, SimPO, CPO."""

    def __init__(self, config: RunConfig) -> None:
        objective = config.algorithm
        assert isinstance(objective, PreferenceObjective), "the kind of run is chosen by the algorithm"
        self.objective = objective.model_copy(update={"report_entropy": config.train.report_entropy})
        self.algorithm = self.objective
        self.mismatched, self.takes_labels = objective.needs_mismatched, objective.unpaired
        self.prepare(config, model_path(config))

    def scores(self, trainer: TrainingBackend, rows: RowBatch) -> dict[str, Tensor]:
        return self.objective.row_scores(trainer.forward_only(rows, self.objective.needs | {"old_logprobs"}))


class RewardModelRun(_GivenPreferences):
    """A reward model from pairs. It starts from a causal language model, or from a sequence classifier with its own
    tokenizer, and learns to read pairs as it will read rollouts (`models.reward_model`)."""

    def __init__(self, config: RunConfig) -> None:
        assert isinstance(config.algorithm, RewardModelObjective), "the kind of run is chosen by the algorithm"
        self.algorithm = config.algorithm
        if config.model.lora is not None:
            raise ConfigError("model.lora: reward models are trained whole; leave it out")
        path, trusted = model_path(config), config.model.trust_remote_code
        tokenizer = load_tokenizer(config.model.tokenizer or path, trusted, path)
        reader = Reader(tokenizer, model_config_only(path, trusted), path)
        if read_system_prompt(config.data) is not None and not reader.reads_tokens:
            raise ConfigError(
                "data.system_prompt: as a reward, this model will read the conversations of the data without it; "
                "leave it out, or put it into the data"
            )
        self.prepare(config, path, reader)

    def scores(self, trainer: TrainingBackend, rows: RowBatch) -> dict[str, Tensor]:
        found = trainer.forward_only(rows, frozenset({"scores"})).scores
        assert found is not None
        return {"reward": found}
