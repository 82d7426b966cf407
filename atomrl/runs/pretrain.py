"""`atomrl pretrain`: training on plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

from atomrl.algorithms.sft import PRETRAINING
from atomrl.config import ConfigError, RunConfig
from atomrl.data.tokens import TOKENIZER, TokenFolder
from atomrl.loop.supervised import nll_per_token, pretrain_step, window_rows
from atomrl.loop.sync import Progress
from atomrl.models.gpt import new_gpt
from atomrl.models.loading import load_tokenizer, resolve_folder, save_model
from atomrl.protocols import TrainingBackend
from atomrl.rollout.generate import generate
from atomrl.runs.base import Run, Steps
from atomrl.runs.build import build_engine, context_tokens, given_data_schedule, model_path
from atomrl.runs.describe import memory
from atomrl.tracking.recorder import Recorder
from atomrl.tracking.resume import model_identity, tokenizer_identity
from atomrl.tracking.run_directory import FRESH_MODEL, RunDirectory
from atomrl.types import Prompt, Sample, SamplingParams
from atomrl.weights import InProcessTransfer

SEED_OF_VALIDATION = 0
"""Every evaluation of every run looks at the same windows, so that losses compare."""


class PretrainRun(Run):
    """Windows of text in the place of rollouts; the loss on the validation split, and samples.

    The summary has `val_loss_before`, `val_loss_after` and `val_bits_per_byte_after`.
    """

    def __init__(self, config: RunConfig) -> None:
        if config.pretrain is None:
            raise ConfigError("pretrain: the section is required (`pretrain: {gpt: {}}` is enough)")
        if config.data.eval is not None:
            raise ConfigError("data.eval: the validation split is in the folder that data.train names; remove the key")
        self.config, self.settings = config, config.pretrain
        self.algorithm = PRETRAINING
        if not isinstance(config.data.train, str):
            raise ConfigError("data.train: pretraining takes one folder of `atomrl data prepare`")
        self.tokens = TokenFolder(config.data.train)
        for split in ("train", "val"):
            self.tokens.check_length(split, self.settings.window_tokens)
        self.tokenizer = self._check_tokenizer()
        context = self.settings.gpt.max_tokens if self.settings.gpt else context_tokens(model_path(config), config)
        self._check_context(context)
        self.schedule = given_data_schedule(config)

    @cached_property
    def identity(self) -> dict[str, str]:
        now = {"data (data.train)": self.tokens.identity, "tokenizer": tokenizer_identity(self.tokenizer)}
        if self.config.model.path is not None:
            now["model (model.path)"] = model_identity(resolve_folder(self.config.model.path))
        return now

    def describe(self) -> Sequence[tuple[str, Sequence[str]]]:
        rows, window, steps = self.schedule.prompts_per_step, self.settings.window_tokens, self.schedule.steps
        meta = self.tokens.meta
        total = rows * window * steps
        text = f"{self.tokens.path}: {meta.train.tokens:,} tokens to train on, {meta.val.tokens:,} held out"
        arithmetic = f"a step: {rows} windows x {window} tokens; the run: {steps} steps = {total:,} tokens"
        passes = f" = {total / max(1, meta.train.tokens):.2f} passes"
        sections = [("data", [text]), ("batch", [arithmetic + passes])]
        return sections + ([] if self.settings.gpt else [("memory", memory(self.config, self.algorithm))])

    def starting_model(self, directory: RunDirectory) -> str:
        """`model.path`, or a fresh GPT in the run's folder; the one there when the run goes on.

        Raises:
            ConfigError: transformers would not load the tokenizer of such a folder as it is.
        """
        shape, folder, tokenizer = self.settings.gpt, directory.path / FRESH_MODEL, self.tokenizer
        if shape is None:
            return model_path(self.config)
        if directory.first_step == 1 or not folder.exists():
            fresh_model(self.config, shape.model_dump(), tokenizer, str(folder))
            if load_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
                raise ConfigError(
                    f"pretrain.gpt.family={shape.family}: transformers replaces the tokenizer of such a model by one "
                    "of its own kind; take family llama"
                )
        return str(folder)

    @contextmanager
    def open(self, trainer: TrainingBackend, record: Recorder, progress: Progress) -> Iterator[Steps]:
        config, settings = self.config, self.settings
        held_out = self.tokens.windows("val", settings.eval_windows, settings.window_tokens, SEED_OF_VALIDATION, 0)
        with ExitStack() as stack:
            sample = None
            if settings.sample_every_steps:
                path = settings.gpt and str(record.directory.path / FRESH_MODEL)
                engine = build_engine(path or model_path(config), self.tokenizer, config.rollout, config.model)
                stack.callback(engine.close)
                transfer = InProcessTransfer(trainer, engine)

                def sample(step: int) -> None:
                    transfer(step)
                    drawn = generate(engine, [self._prompt()], self._sampling(step))
                    record.log_rollouts(step, drawn, {})
                    record.progress.note(f"step {step}: sample: {drawn[0].text!r}")

            def step(number: int) -> dict[str, float]:
                windows = self.tokens.windows(
                    "train", self.schedule.prompts_per_step, settings.window_tokens, config.seed, number
                )
                metrics = pretrain_step(trainer, self.algorithm, windows)
                last = number == self.schedule.steps
                if sample is not None and (number % settings.sample_every_steps == 0 or last):
                    sample(number)
                return metrics

            def evaluate(number: int) -> None:
                loss = nll_per_token(trainer, [window_rows(held_out)])
                figures = {"loss": loss, **self.tokens.bits("val", loss)}
                record.log_evaluation(number, {f"val/{name}": value for name, value in figures.items()}, [])
                progress.evaluations[str(number)] = {f"val_{name}": value for name, value in figures.items()}

            yield Steps(step, evaluate)

    def _prompt(self) -> Prompt:
        text = self.settings.sample_prompt
        sample = Sample(sample_id="sample", prompt=text, ground_truth=None, data_source="sample")
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return Prompt(prompt_id="sample", sample=sample, token_ids=ids)

    def _sampling(self, step: int) -> SamplingParams:
        return SamplingParams(
            completions_per_prompt=self.settings.samples,
            max_completion_tokens=self.settings.sample_tokens,
            temperature=self.settings.sample_temperature,
            seed=self.config.seed,
            step=step,
        )

    def _check_tokenizer(self) -> Any:
        """The tokenizer of the model.

        Raises:
            ConfigError: it makes other tokens of a text than the one that the tokens were made with.
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
                f"{named} has another tokenizer than the tokens in {tokens.path} were made with "
                f"({tokens.meta.tokenizer}); prepare the text with it: atomrl data prepare FILE... --tokenizer {named} "
                "--out FOLDER"
            )
        return tokenizer

    def _check_context(self, context: int | None) -> None:
        """Whether windows and samples fit the model's context.

        Raises:
            ConfigError: one does not, and which key says so.
        """
        settings = self.settings
        if context is None:
            return
        if settings.window_tokens > context:
            where = "pretrain.gpt.max_tokens" if settings.gpt else f"the context of {self.config.model.path}"
            raise ConfigError(f"pretrain.window_tokens={settings.window_tokens} is longer than {where}, {context}")
        prompt = len(self._prompt().token_ids)
        if settings.sample_every_steps and (not prompt or prompt + settings.sample_tokens > context):
            raise ConfigError(
                f"pretrain.sample_prompt has {prompt} tokens, which with "
                f"pretrain.sample_tokens={settings.sample_tokens} must be between 1 and {context}"
            )


def fresh_model(config: RunConfig, shape: dict[str, Any], tokenizer: Any, folder: str) -> None:
    """Write a GPT with fresh weights for a tokenizer."""
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    save_model(new_gpt(vocab_size=len(tokenizer), **shape, **special, seed=config.seed), tokenizer, folder)
