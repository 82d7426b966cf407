"""SFT, preferences and reward models: runs that train on a data set and sample no completions."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from atomrl.algorithms.reward_model import RewardModelObjective
from atomrl.algorithms.sft import SFT
from atomrl.atoms.masks import masked_sum
from atomrl.batches import AdvantageBatch, RowBatch
from atomrl.common.metrics import Metrics
from atomrl.config import ConfigError, PreferenceConfig, RunConfig, SftConfig
from atomrl.data.files import DataError
from atomrl.data.given import demonstration_reader, preference_reader
from atomrl.data.messages import COMPLETIONS
from atomrl.data.problems import LoadReport, load_problems
from atomrl.data.processor import DataProcessor, read_system_prompt
from atomrl.data.prompt_stream import PromptStream
from atomrl.data.tasks import task_words
from atomrl.data.tokenized import TokenizedSamples
from atomrl.engines.stop_rule import eos_token_ids
from atomrl.models.loading import base_path, model_config_only, resolve_folder
from atomrl.models.reward_model import Reader
from atomrl.models.tokenizer import make_tokenizer
from atomrl.objectives import PreferenceObjective
from atomrl.objectives.choice import not_none
from atomrl.protocols import Algorithm, TrainingBackend
from atomrl.tracking.recorder import Recorder
from atomrl.trainer.base import OpenRun, PreparedRun, identity
from atomrl.trainer.build import (
    context_tokens,
    image_reader,
    image_store,
    model_path,
    policy_tokenizer,
    started,
    with_steps,
)
from atomrl.trainer.checks.data import check_held_out, check_images
from atomrl.trainer.evaluate_preferences import evaluate_preferences
from atomrl.trainer.loop import Evaluation, Training
from atomrl.trainer.report.metrics import update_metrics
from atomrl.trainer.report.stopwatch import Stopwatch
from atomrl.trainer.report.tokens import TokenRecord

Split = Literal["train", "eval"]
HeldOutMetrics = tuple[dict[str, float], Sequence[Mapping[str, Any]]]
EVAL_SAMPLES = 64
"""Held-out samples in a forward pass of their own."""


class OfflineTraining(Training):
    """Base class of `loop.Training` on a data set, with one optimizer step per step."""

    def __init__(self, run: OpenRun, algorithm: Algorithm) -> None:
        self.run, self._algorithm = run, algorithm

    @property
    def trainer(self) -> TrainingBackend:
        return self.run.trainer

    @property
    def algorithm(self) -> Algorithm:
        return self._algorithm

    @property
    def record(self) -> Recorder:
        return self.run.record

    def updating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sync_weights(self, step: int, watch: Stopwatch) -> None:
        """No engine needs the weights."""

    def report(
        self, step: int, batch: AdvantageBatch, updates: Sequence[Metrics], tokens: TokenRecord, watch: Stopwatch
    ) -> dict[str, float]:
        return watch.metrics(int(batch.lengths.sum())) | update_metrics(updates)

    def totals(self) -> dict[str, float]:
        return {}


class CompletionRun(PreparedRun):
    """Base class of runs on completions: demonstrations or preferences, `train.rows_per_update` samples per step.

    Args:
        config: of the run.
        tokenizer: of the model.
        context: maximum tokens of a row; samples with longer rows are dropped. None: no limit.
    """

    items: Literal["demonstrations", "preferences"]
    """Name of the samples in messages."""
    mismatched = False
    """True if a step also needs completions of other prompts."""
    reader: Reader | None = None
    """Reads prompt and completion for models that may have a tokenizer of their own (reward models)."""

    def __init__(self, config: RunConfig, tokenizer: Any, context: int | None) -> None:
        self.config, self.tokenizer, self.context = config, tokenizer, context
        reader = None if config.gpt is not None else image_reader(config, model_path(config))
        self.images = image_store(config, reader)
        self.processor = DataProcessor(tokenizer, config.data, today=started(config), images=reader)
        self.held_out = (
            self._tokenized("eval") if config.data.eval is not None else None
        )  # usually the smaller one, so its errors come sooner
        self.train = self._tokenized("train")
        self.problems = self.train.problems
        check_held_out(config, self.train.problems, self.held_out.problems if self.held_out else [])
        check_images(config, self.images, self.algorithm, config.model.path)
        self.config = with_steps(config, len(self.train.units))
        self.stream = PromptStream(self.train.units, seed=config.seed, shuffle=config.data.shuffle)

    @abstractmethod
    def load(self, split: Split) -> LoadReport:
        """Load the samples of a split."""

    @abstractmethod
    def metrics(self, trainer: TrainingBackend, held_out: TokenizedSamples) -> HeldOutMetrics:
        """Return the metrics `eval/NAME` of an evaluation, and a row per sample to record, if any."""

    def _tokenized(self, split: Split) -> TokenizedSamples:
        return TokenizedSamples(
            self.load(split),
            self.processor,
            self.items,
            seed=self.config.seed,
            limit=self.context,
            max_row_tokens=self.config.train.max_row_tokens,
            read=self.reader.row if self.reader else None,
            stops=() if self.config.gpt is not None else self._stops(),
            train_on=self.config.sft.train_on if self.config.sft else "completions",
            packing=self.config.sft.packing if self.config.sft else None,
        )

    def _stops(self) -> tuple[int, ...]:
        path = model_path(self.config)
        shape = model_config_only(path, self.config.model.trust_remote_code)
        return eos_token_ids(str(resolve_folder(base_path(path), weights=False)), shape, self.tokenizer)

    @cached_property
    def identity(self) -> dict[str, str]:
        if self.config.gpt is not None:
            return {"data (data.train)": self.stream.fingerprint}
        return identity(self.stream, self.processor, model_path(self.config))

    def describe_data(self) -> Sequence[str]:
        held_out = len(self.held_out.problems) if self.held_out else 0
        pictures = self.images.describe() if self.images is not None else []
        return [f"{len(self.train.problems)} {self.items} to train on, {held_out} held out", *pictures]

    def describe_batch(self) -> Sequence[str]:
        rows, steps, items = self.config.items_per_step, self.config.train.steps, len(self.train.units)
        if self.train.units is not self.train.problems:
            size = self.config.train.max_row_tokens
            packed = f"{len(self.train.problems)} demonstrations are packed into {items} blocks of {size} tokens"
            return [f"{packed}; a step: {rows} blocks; the run: {steps} steps = {steps * rows / items:.2f} passes"]
        return [
            f"a step: {rows} {self.items} in one optimizer step; the run: {steps} steps = "
            f"{steps * rows / items:.2f} passes over {items}"
        ]

    def open(self, run: OpenRun, stack: ExitStack) -> Training:
        self.stream.position = run.progress.position
        return CompletionTraining(run, self)


class CompletionTraining(OfflineTraining):
    """`loop.Training` on completions."""

    def __init__(self, run: OpenRun, prepared: CompletionRun) -> None:
        super().__init__(run, prepared.algorithm)
        self.prepared = prepared

    def collect(self, step: int, watch: Stopwatch) -> RowBatch:
        prepared = self.prepared
        return prepared.train.rows(prepared.stream.take(self.run.config.items_per_step), mismatched=prepared.mismatched)

    def report(
        self, step: int, batch: AdvantageBatch, updates: Sequence[Metrics], tokens: TokenRecord, watch: Stopwatch
    ) -> dict[str, float]:
        self.run.progress.position = self.prepared.stream.position
        return super().report(step, batch, updates, tokens, watch)

    def evaluate(self) -> Evaluation | None:
        if self.prepared.held_out is None:
            return None
        metrics, lines = self.prepared.metrics(self.trainer, self.prepared.held_out)
        return Evaluation(metrics, {name.removeprefix("eval/"): value for name, value in metrics.items()}, lines)


class SupervisedRun(CompletionRun):
    """SFT on demonstrations; with `sft.gpt`, of a model and a tokenizer made from scratch.

    The held-out loss is `eval/nll_per_token`.
    """

    items = "demonstrations"
    algorithm = SFT

    def __init__(self, config: RunConfig) -> None:
        self.settings = config.sft or SftConfig()
        if config.gpt is not None:
            super().__init__(config, make_tokenizer(task_words(config.data.train)), config.gpt.max_tokens)
        else:
            super().__init__(config, policy_tokenizer(config), context_tokens(model_path(config), config))

    def load(self, split: Split) -> LoadReport:
        data = self.config.data
        read = demonstration_reader(data.prompt_field, self.settings.completion_field)
        return load_problems(data, split, self.config.seed, read, "demonstrate", self.images)

    def metrics(self, trainer: TrainingBackend, held_out: TokenizedSamples) -> HeldOutMetrics:
        return {"eval/nll_per_token": nll_per_token(trainer, held_out.batches(EVAL_SAMPLES))}, []


class PreferenceRun(CompletionRun):
    """Preference optimization on pairs (DPO and its variants, ORPO, SimPO, CPO) or single labels (KTO, BCO)."""

    items = "preferences"
    takes_labels = False
    """True if the algorithm accepts single completions with a label."""

    def __init__(self, config: RunConfig) -> None:
        assert isinstance(config.algorithm, PreferenceObjective), "the kind of run is chosen by the algorithm"
        objective = config.algorithm.model_copy(update={"report_entropy": config.train.report_entropy})
        self.algorithm = self.objective = objective
        self.mismatched, self.takes_labels = objective.needs_mismatched, objective.unpaired
        super().__init__(config, policy_tokenizer(config), context_tokens(model_path(config), config))

    def load(self, split: Split) -> LoadReport:
        config = self.config
        read = preference_reader(config.data.prompt_field, config.preference or PreferenceConfig())
        report = load_problems(config.data, split, config.seed, read, "pair", self.images)
        for problem in report.problems if not self.takes_labels else ():
            if len(problem.columns.get(COMPLETIONS, (0, 0))) == 1:
                raise DataError(
                    f"{problem.problem_id}: a completion with a label, but {config.algorithm.name} needs "
                    "pairs (chosen and rejected); for labels use algorithm.name=kto or bco"
                )
        return report

    def metrics(self, trainer: TrainingBackend, held_out: TokenizedSamples) -> HeldOutMetrics:
        return evaluate_preferences(held_out, partial(self.scores, trainer))

    def scores(self, trainer: TrainingBackend, rows: RowBatch) -> dict[str, Tensor]:
        """Compute scores [B] of rows by name; `reward` is the one that is trained."""
        return self.objective.row_scores(trainer.forward_only(rows, self.objective.needs | {"old_logprobs"}))


class RewardModelRun(PreferenceRun):
    """Training of a reward model on pairs, from a causal language model or a sequence classifier.

    It reads pairs in the format in which it will read rollouts (`models.reward_model`).
    """

    def __init__(self, config: RunConfig) -> None:
        assert isinstance(config.algorithm, RewardModelObjective), "the kind of run is chosen by the algorithm"
        self.algorithm = config.algorithm
        path, tokenizer = model_path(config), policy_tokenizer(config)
        shape = model_config_only(path, config.model.trust_remote_code)
        self.reader = Reader(tokenizer, shape, path, config.data.chat_template == "messages_only")
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(self.reader.pad_token_id(shape))  # as it is saved
        if read_system_prompt(config.data) is not None and (self.reader.has_template or self.reader.makes_pairs):
            raise ConfigError(
                "data.system_prompt: as a reward, this model reads conversations without it; "
                "remove it, or put it into the data"
            )
        if config.data.chat_template_kwargs:
            raise ConfigError(
                "data.chat_template_kwargs: as a reward, this model reads conversations without them; remove them"
            )
        CompletionRun.__init__(self, config, tokenizer, self.reader.limit)

    def scores(self, trainer: TrainingBackend, rows: RowBatch) -> dict[str, Tensor]:
        return {"reward": not_none(trainer.forward_only(rows, frozenset({"scores"})).scores)}


def nll_per_token(trainer: TrainingBackend, batches: Iterable[RowBatch]) -> float:
    """Return the mean negative log-likelihood of the trained tokens, in nats; every token has the same weight."""
    total, tokens = 0.0, 0
    for rows in batches:
        scored = trainer.forward_only(rows, frozenset({"old_logprobs"}))
        total -= masked_sum(not_none(scored.old_logprobs).double(), rows.loss_mask).item()
        tokens += int(rows.loss_mask.sum())
    return total / max(1, tokens) if tokens else torch.nan
