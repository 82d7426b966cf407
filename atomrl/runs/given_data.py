"""SFT, preferences and reward models: training on rows that are given and not drawn."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from atomrl.algorithms.reward_model import RewardModelObjective
from atomrl.algorithms.sft import SFT
from atomrl.batches import RowBatch
from atomrl.config import ConfigError, PreferenceConfig, RunConfig, SftConfig
from atomrl.data.completions import demonstration_reader, preference_reader
from atomrl.data.generators import task_words
from atomrl.data.problems import DataError
from atomrl.data.processor import DataProcessor, read_system_prompt
from atomrl.data.sources import COMPLETIONS, LoadReport, load_samples
from atomrl.data.stream import PromptStream
from atomrl.data.tokenized import TokenizedSamples
from atomrl.loop.preferences import evaluate_preferences
from atomrl.loop.supervised import EVAL_SAMPLES, nll_per_token, supervised_step
from atomrl.loop.sync import before_updates
from atomrl.models.loading import base_path, model_config_only, resolve_folder
from atomrl.models.reward_model import Reader
from atomrl.models.tokenizer import make_tokenizer
from atomrl.objective import PreferenceObjective
from atomrl.objective.advantage_inputs import given
from atomrl.rollout.stopping import eos_token_ids
from atomrl.runs.base import Evaluation, PreparedRun, identity
from atomrl.runs.build import context_tokens, model_path, policy_tokenizer, started, with_steps
from atomrl.runs.checks import check_held_out

Split = Literal["train", "eval"]


class GivenDataRun(PreparedRun):
    """Completions that the data have: a step draws `train.rows_per_update` samples, and makes one optimizer step.

    Args:
        config: of the run.
        tokenizer: of the model.
        context: samples with a row of more tokens are left out; None: no limit.
    """

    items: Literal["demonstrations", "preferences"]
    """What a sample is called."""
    mismatched = False
    """Whether a step also needs the completions of other prompts."""
    reader: Reader | None = None
    """Reads prompt and completion, where the model may read something else than the policy's tokens."""

    def __init__(self, config: RunConfig, tokenizer: Any, context: int | None) -> None:
        self.config, self.tokenizer, self.context = config, tokenizer, context
        self.processor = DataProcessor(tokenizer, config.data, today=started(config))
        self.held_out = self._tokenized("eval") if config.data.eval is not None else None  # most often the smaller
        self.train = self._tokenized("train")
        check_held_out(config, self.train.samples, self.held_out.samples if self.held_out else [])
        self.config = with_steps(config, len(self.train.samples))
        self.stream = PromptStream(self.train.samples, seed=config.seed, shuffle=config.data.shuffle)

    @abstractmethod
    def load(self, split: Split) -> LoadReport:
        """The samples of a split."""

    @abstractmethod
    def metrics(self, held_out: TokenizedSamples) -> tuple[dict[str, float], Sequence[Mapping[str, Any]]]:
        """The metrics of an evaluation, `eval/NAME`, and a line for each sample, if there is something to say of it."""

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
        held_out = len(self.held_out.samples) if self.held_out else 0
        return [f"{len(self.train.samples)} {self.items} to train on, {held_out} held out"]

    def describe_batch(self) -> Sequence[str]:
        rows, steps, items = self.config.items_per_step, self.config.train.steps, len(self.train.samples)
        return [
            f"a step: {rows} {self.items} in one optimizer step; the run: {steps} steps = "
            f"{steps * rows / items:.2f} passes over {items}"
        ]

    def open(self, stack: ExitStack) -> None:
        self.stream.position = self.progress.position

    def step(self, number: int) -> dict[str, float]:
        with before_updates():
            rows = self.train.rows(self.stream.take(self.config.items_per_step), mismatched=self.mismatched)
        metrics = supervised_step(self.trainer, self.algorithm, rows, self.progress.algorithm_state)
        self.progress.position = self.stream.position
        return metrics

    def evaluate(self) -> Evaluation | None:
        if self.held_out is None:
            return None
        metrics, lines = self.metrics(self.held_out)
        return Evaluation(metrics, {name.removeprefix("eval/"): value for name, value in metrics.items()}, lines)


class SupervisedRun(GivenDataRun):
    """Demonstrations; with `sft.gpt`, of a model and a tokenizer made from scratch. The held-out loss is
    `eval/nll_per_token`."""

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
        return load_samples(data, split, self.config.seed, read, "demonstrate")

    def metrics(self, held_out: TokenizedSamples) -> tuple[dict[str, float], Sequence[Mapping[str, Any]]]:
        return {"eval/nll_per_token": nll_per_token(self.trainer, held_out.batches(EVAL_SAMPLES))}, []


class PreferenceRun(GivenDataRun):
    """Pairs, or completions that are labelled one by one: DPO and its family, KTO, ORPO, SimPO, CPO."""

    items = "preferences"
    takes_labels = False
    """Whether completions that are labelled by themselves will do."""

    def __init__(self, config: RunConfig) -> None:
        assert isinstance(config.algorithm, PreferenceObjective), "the kind of run is chosen by the algorithm"
        objective = config.algorithm.model_copy(update={"report_entropy": config.train.report_entropy})
        self.algorithm = self.objective = objective
        self.mismatched, self.takes_labels = objective.needs_mismatched, objective.unpaired
        super().__init__(config, policy_tokenizer(config), context_tokens(model_path(config), config))

    def load(self, split: Split) -> LoadReport:
        config = self.config
        read = preference_reader(config.data.prompt_field, config.preference or PreferenceConfig())
        report = load_samples(config.data, split, config.seed, read, "pair")
        for sample in report.samples if not self.takes_labels else ():
            if len(sample.columns.get(COMPLETIONS, (0, 0))) == 1:
                raise DataError(
                    f"{sample.sample_id}: a completion with a label of its own, and {config.algorithm.name} needs "
                    "pairs (chosen and rejected); algorithm.name=kto and bco take labels"
                )
        return report

    def metrics(self, held_out: TokenizedSamples) -> tuple[dict[str, float], Sequence[Mapping[str, Any]]]:
        return evaluate_preferences(held_out, self.scores)

    def scores(self, rows: RowBatch) -> dict[str, Tensor]:
        """Scores of rows by name, each [B]; `reward` is the one that is trained."""
        return self.objective.row_scores(self.trainer.forward_only(rows, self.objective.needs | {"old_logprobs"}))


class RewardModelRun(PreferenceRun):
    """A reward model from pairs. It starts from a causal language model, or from a sequence classifier with its own
    tokenizer, and learns to read pairs as it will read rollouts (`models.reward_model`)."""

    def __init__(self, config: RunConfig) -> None:
        assert isinstance(config.algorithm, RewardModelObjective), "the kind of run is chosen by the algorithm"
        self.algorithm = config.algorithm
        if config.model.lora is not None:
            raise ConfigError("model.lora: reward models are trained whole; leave it out")
        path, tokenizer = model_path(config), policy_tokenizer(config)
        shape = model_config_only(path, config.model.trust_remote_code)
        self.reader = Reader(tokenizer, shape, path)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(self.reader.pad_token_id(shape))  # as it is saved
        if read_system_prompt(config.data) is not None and (self.reader.has_template or self.reader.makes_pairs):
            raise ConfigError(
                "data.system_prompt: as a reward, this model will read the conversations of the data without it; "
                "leave it out, or put it into the data"
            )
        if config.data.chat_template_kwargs:
            raise ConfigError(
                "data.chat_template_kwargs: as a reward, this model will read conversations without them; remove them"
            )
        GivenDataRun.__init__(self, config, tokenizer, self.reader.limit)

    def scores(self, rows: RowBatch) -> dict[str, Tensor]:
        return {"reward": given(self.trainer.forward_only(rows, frozenset({"scores"})).scores)}
