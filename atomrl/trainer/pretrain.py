"""Pretraining: training on plain text."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import numpy as np

from atomrl.algorithms.sft import PRETRAINING
from atomrl.batches import AdvantageBatch, RowBatch
from atomrl.common.files import model_identity
from atomrl.common.metrics import Metrics
from atomrl.config import ConfigError, PretrainConfig, RunConfig
from atomrl.data.files import DataError
from atomrl.data.packing import Example
from atomrl.data.token_folder import TOKENIZER, TokenFolder
from atomrl.data.token_folder import Split as TextSplit
from atomrl.data.tokenized import rows_from_tokens
from atomrl.engines.generation import generate
from atomrl.models.loading import load_tokenizer, resolve_folder
from atomrl.tracking.resuming import tokenizer_identity
from atomrl.trainer.base import OpenRun, PreparedRun
from atomrl.trainer.build import build_engine, context_tokens, model_path
from atomrl.trainer.loop import Evaluation, Training, is_due
from atomrl.trainer.offline import OfflineTraining, nll_per_token
from atomrl.trainer.report.stopwatch import Stopwatch
from atomrl.trainer.report.tokens import TokenRecord
from atomrl.types import Problem, Prompt, SamplingParams
from atomrl.weight_sync import InProcessTransfer

SEED_OF_VALIDATION = 0
"""Seed of the validation windows: the same in every run, so that losses can be compared."""


class PretrainRun(PreparedRun):
    """Pretraining on windows of text, with the loss on the validation split and sampled completions.

    The summary has `val_loss_before`, `val_loss_after` and `val_bits_per_byte_after`.
    """

    algorithm = PRETRAINING

    def __init__(self, config: RunConfig) -> None:
        if config.data.eval is not None:
            raise ConfigError("data.eval: the validation split is in the folder of data.train; remove the key")
        if config.train.max_row_tokens is not None:
            raise ConfigError("train.max_row_tokens: rows are windows of pretrain.window_tokens tokens; remove the key")
        self.config, self.settings = config, config.pretrain or PretrainConfig()
        if not isinstance(config.data.train, str):
            raise ConfigError("data.train: pretraining needs one folder written by `atomrl data prepare`")
        try:
            self.tokens = TokenFolder(config.data.train)
        except DataError as error:
            raise type(error)(f"data.train: {error}") from error
        for split in ("train", "val"):
            self.tokens.check_length(split, self.settings.window_tokens)
        self.tokenizer = self._check_tokenizer()
        self._check_context(config.gpt.max_tokens if config.gpt else context_tokens(model_path(config), config))

    @cached_property
    def identity(self) -> dict[str, str]:
        now = {"data (data.train)": self.tokens.identity, "tokenizer": tokenizer_identity(self.tokenizer)}
        if self.config.model.path is not None:
            now["model (model.path)"] = model_identity(resolve_folder(self.config.model.path))
        return now

    def describe_data(self) -> Sequence[str]:
        meta = self.tokens.meta
        return [f"{self.tokens.path}: {meta.train.tokens:,} tokens to train on, {meta.val.tokens:,} held out"]

    def describe_batch(self) -> Sequence[str]:
        return [describe_windows(self.config, self.tokens.meta.train.tokens)]

    def open(self, run: OpenRun, stack: ExitStack) -> Training:
        transfer = None
        if self.settings.sample_every_steps:
            engine = build_engine(run.config, run.start, self.tokenizer)
            stack.callback(engine.close)
            transfer = InProcessTransfer(run.trainer, engine, run.record.progress.note)
        return PretrainTraining(run, self, transfer)

    def sample_prompt(self) -> Prompt:
        """Return `pretrain.sample_prompt` as a prompt."""
        text = self.settings.sample_prompt
        problem = Problem(problem_id="sample", prompt=text, ground_truth=None, data_source="sample")
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return Prompt(prompt_id="sample", problem=problem, token_ids=ids)

    def _check_tokenizer(self) -> Any:
        """Return the model's tokenizer.

        Raises:
            ConfigError: it differs from the tokenizer of the prepared text.
        """
        config, tokens = self.config, self.tokens
        own = load_tokenizer(tokens.path / TOKENIZER)
        named = config.model.tokenizer or config.model.path
        if named is None:
            return own
        tokenizer = load_tokenizer(named, config.model.trust_remote_code)
        probe = own.decode(tokens.windows("val", 1, self.settings.window_tokens, 0, 0)[0].tolist())
        encoded = [each(probe, add_special_tokens=False)["input_ids"] for each in (own, tokenizer)]
        if own.get_vocab() != tokenizer.get_vocab() or encoded[0] != encoded[1]:
            raise ConfigError(
                f"the tokens in {tokens.path} were made with another tokenizer than {named} has "
                f"({tokens.meta.tokenizer}); prepare the text with it: atomrl data prepare FILE... --tokenizer {named} "
                "--out FOLDER"
            )
        return tokenizer

    def _check_context(self, context: int | None) -> None:
        """Check that windows and samples fit the model's context.

        Raises:
            ConfigError: one does not; the message names the key.
        """
        settings = self.settings
        if context is None:
            return
        if settings.window_tokens > context:
            where = "pretrain.gpt.max_tokens" if settings.gpt else f"the context of {self.config.model.path}"
            raise ConfigError(f"pretrain.window_tokens={settings.window_tokens} is longer than {where}, {context}")
        prompt = len(self.sample_prompt().token_ids)
        if settings.sample_every_steps and (not prompt or prompt + settings.sample_tokens > context):
            raise ConfigError(
                f"pretrain.sample_prompt has {prompt} tokens, which with "
                f"pretrain.sample_tokens={settings.sample_tokens} must be between 1 and {context}"
            )


class PretrainTraining(OfflineTraining):
    """`loop.Training` on windows of text.

    Args:
        run: with its trainer.
        prepared: the checked run.
        transfer: of the engine that samples; None: nothing is sampled.
    """

    def __init__(self, run: OpenRun, prepared: PretrainRun, transfer: InProcessTransfer | None) -> None:
        super().__init__(run, prepared.algorithm)
        self.prepared, self.settings, self.transfer = prepared, prepared.settings, transfer
        self.held_out = self._rows("val", self.settings.eval_windows, SEED_OF_VALIDATION, 0)

    def collect(self, step: int, watch: Stopwatch) -> RowBatch:
        return self._rows("train", self.run.config.items_per_step, self.run.config.seed, step)

    def report(
        self, step: int, batch: AdvantageBatch, updates: Sequence[Metrics], tokens: TokenRecord, watch: Stopwatch
    ) -> dict[str, float]:
        metrics = super().report(step, batch, updates, tokens, watch)
        if self.transfer is not None and (
            is_due(step, self.settings.sample_every_steps) or step == self.run.config.train.steps
        ):
            self.sample(step, self.transfer)
        return metrics

    def sample(self, step: int, transfer: InProcessTransfer) -> None:
        """Sample completions of `pretrain.sample_prompt`, and record them."""
        transfer(step)
        settings = self.settings
        sampling = SamplingParams(
            completions_per_prompt=settings.samples,
            max_completion_tokens=settings.sample_tokens,
            temperature=settings.sample_temperature,
            seed=self.run.config.seed,
            step=step,
        )
        drawn = generate(transfer.engine, [self.prepared.sample_prompt()], sampling)
        self.record.log_rollouts(step, drawn, {})
        self.record.progress.note(f"step {step}: sample: {drawn[0].text!r}")

    def evaluate(self) -> Evaluation:
        loss = nll_per_token(self.trainer, [self.held_out])
        figures = {"loss": loss, **self.prepared.tokens.bits("val", loss)}
        metrics, headline = ({f"val{mark}{name}": value for name, value in figures.items()} for mark in "/_")
        return Evaluation(metrics, headline)

    def _rows(self, split: TextSplit, count: int, seed: int, step: int) -> RowBatch:
        """Return windows as rows. All tokens are trained except the first, which nothing predicts."""
        size = self.settings.window_tokens
        windows = self.prepared.tokens.windows(split, count, size, seed, step)
        learned = np.arange(size) > 0
        return rows_from_tokens([[Example(window, learned)] for window in windows.numpy()])


def describe_windows(config: RunConfig, tokens: int | None = None) -> str:
    """Describe the size of a step and of the run; with the number of passes if `tokens` is given."""
    settings = config.pretrain or PretrainConfig()
    rows, window, steps = config.items_per_step, settings.window_tokens, config.train.steps
    total = rows * window * steps
    passes = "" if tokens is None else f" = {total / max(1, tokens):.2f} passes"
    return f"a step: {rows} windows x {window} tokens; the run: {steps} steps = {total:,} tokens{passes}"
