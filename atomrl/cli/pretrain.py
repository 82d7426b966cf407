"""Train a model on plain text: a fresh GPT, or one that is there already.

atomrl data prepare input.txt --tokenizer char --out data/shakespeare
atomrl pretrain configs/pretrain_shakespeare_char.yaml
atomrl pretrain configs/pretrain_shakespeare_char.yaml --resume
"""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atomrl.cli.door import add_config_arguments, add_resume_arguments, config_from, join_overrides
from atomrl.cli.running import run_to_the_end

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atomrl.config import RunConfig
    from atomrl.data.tokens import TokenFolder
    from atomrl.stages import RewardBatch
    from atomrl.tracking.recorder import Recorder
    from atomrl.tracking.run_directory import RunDirectory

prepare = join_overrides
log = logging.getLogger(__name__)
SEED_OF_VALIDATION = 0
"""Every evaluation of every run looks at the same windows, so that losses compare."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_resume_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    return run_to_the_end("pretrain", config_from(arguments), arguments, pretrain)


def pretrain(config: RunConfig, resume: bool = False, allow_changes: bool = False) -> dict[str, Any]:
    """`atomrl pretrain`: from a config to a summary (`val_loss_before`, `val_loss_after`, `val_bits_per_byte_after`).

    Config, tokens and tokenizer are checked before weights are made or loaded.

    Raises:
        ConfigError, DataError: what is wrong, where, and what to do.
    """
    from atomrl import assembly
    from atomrl.algorithms.sft import SFT
    from atomrl.config import RolloutConfig
    from atomrl.data.tokens import TokenFolder
    from atomrl.loop import pretrain as loop
    from atomrl.loop.recovery import open_run, saver
    from atomrl.tracking.recorder import Recorder

    started = time.perf_counter()
    settings = checked(config)
    tokens = TokenFolder(config.data.train)
    for split in ("train", "val"):
        tokens.check_length(split, settings.window_tokens)
    tokenizer, now = tokenizer_of(config, tokens)
    check_context(config, tokenizer)
    count = config.train.rows_per_update or 64
    schedule = replace(assembly.make_schedule(config), updates_per_epoch=1, epochs_per_step=1)
    run, progress = open_run(config, resume, now, allow_changes)
    earlier_s = progress.wall_s
    path = starting_model(config, run, tokenizer)
    at_temperature_1 = config.model_copy(update={"rollout": RolloutConfig()})
    trainer = assembly.build_trainer(at_temperature_1, path, tokenizer, schedule, SFT)
    engine = sampler(config, path, tokenizer)
    held_out = tokens.windows("val", settings.eval_windows, settings.window_tokens, SEED_OF_VALIDATION, 0)
    with assembly.closing_all(trainer, *([engine] if engine else [])), Recorder(config, run) as record:

        def evaluate(step: int) -> None:
            loss = loop.validation_loss(trainer, held_out)
            progress.evaluations[str(step)] = report(record, step, loss, tokens.bits("val", loss))

        def after_step(step: int) -> None:
            last = step == schedule.steps
            if config.eval.every_steps and step % config.eval.every_steps == 0 and not last:
                evaluate(step)
            if engine is not None and (step % settings.sample_every_steps == 0 or last):
                engine.load_weights(trainer.weights(), version=step)
                drawn = samples(config, engine, tokenizer, step)
                record.log_rollouts(step, drawn)
                record.progress.note(f"step {step}: sample: {drawn.completions[0][0].text!r}")

        if progress.step:
            trainer.load(run.checkpoint_folder(progress.step))
        elif config.eval.before:
            evaluate(0)
        done = loop.pretrain(
            trainer,
            SFT,
            lambda step: tokens.windows("train", count, settings.window_tokens, config.seed, step),
            after_step,
            record,
            progress,
            saver(trainer, now),
            schedule,
        )
        if done and config.eval.after:
            evaluate(progress.step)
    return assembly.finish(run, config, progress, done, earlier_s + time.perf_counter() - started)


def checked(config: RunConfig) -> Any:
    """The section `pretrain`, where the rest of the config can go with it."""
    from atomrl.config import ConfigError

    if config.pretrain is None:
        raise ConfigError("pretrain: the section is required by `atomrl pretrain` (`pretrain: {gpt: {}}` is enough)")
    if config.data.eval is not None:
        raise ConfigError("data.eval: the validation split is in the folder that data.train names; remove the key")
    return config.pretrain


def tokenizer_of(config: RunConfig, tokens: TokenFolder) -> tuple[Any, dict[str, str]]:
    """The tokenizer of the model, and hashes of what the run trains on.

    Raises:
        ConfigError: it makes other tokens of a text than the one that the tokens were made with.
    """
    from atomrl.config import ConfigError
    from atomrl.data.tokens import TOKENIZER
    from atomrl.models.loading import load_tokenizer, resolve_folder
    from atomrl.tracking.resume import model_identity, tokenizer_identity

    own = tokenizer = load_tokenizer(tokens.path / TOKENIZER)
    named = config.model.tokenizer or config.model.path
    if named is not None:
        tokenizer = load_tokenizer(named, config.model.trust_remote_code)
        probe = own.decode(tokens.windows("val", 1, config.pretrain.window_tokens, 0, 0)[0].tolist())
        encoded = [each(probe, add_special_tokens=False)["input_ids"] for each in (own, tokenizer)]
        if own.get_vocab() != tokenizer.get_vocab() or encoded[0] != encoded[1]:
            raise ConfigError(
                f"{named} has another tokenizer than the tokens in {tokens.path} were made with "
                f"({tokens.meta.tokenizer}); prepare the text with it: atomrl data prepare FILE... --tokenizer {named} "
                "--out FOLDER"
            )
    now = {"data (data.train)": tokens.identity, "tokenizer": tokenizer_identity(tokenizer)}
    if config.model.path is not None:
        now["model (model.path)"] = model_identity(resolve_folder(config.model.path))
    return tokenizer, now


def check_context(config: RunConfig, tokenizer: Any) -> None:
    """Whether windows and samples fit the model's context.

    Raises:
        ConfigError: one does not, and which key says so.
    """
    from atomrl.assembly import context_tokens
    from atomrl.config import ConfigError

    settings = config.pretrain
    context = settings.gpt.max_tokens if settings.gpt else context_tokens(config.model.path, config)
    if context is None:
        return
    if settings.window_tokens > context:
        where = "pretrain.gpt.max_tokens" if settings.gpt else f"the context of {config.model.path}"
        raise ConfigError(f"pretrain.window_tokens={settings.window_tokens} is longer than {where}, {context}")
    prompt = len(tokenizer(settings.sample_prompt, add_special_tokens=False)["input_ids"])
    if settings.sample_every_steps and (not prompt or prompt + settings.sample_tokens > context):
        raise ConfigError(
            f"pretrain.sample_prompt has {prompt} tokens, which with pretrain.sample_tokens={settings.sample_tokens} "
            f"must be between 1 and {context}"
        )


def starting_model(config: RunConfig, run: RunDirectory, tokenizer: Any) -> str:
    """`model.path`, or a fresh GPT in the run's folder; the one there when the run goes on.

    Raises:
        ConfigError: transformers would not load the tokenizer of such a folder as it is.
    """
    from atomrl.assembly import model_path
    from atomrl.config import ConfigError
    from atomrl.models.gpt import new_gpt
    from atomrl.models.loading import load_tokenizer, save_model
    from atomrl.tracking.run_directory import FRESH_MODEL

    shape, folder = config.pretrain.gpt, run.path / FRESH_MODEL
    if shape is None:
        return model_path(config)
    if run.first_step == 1 or not folder.exists():
        special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        model = new_gpt(vocab_size=len(tokenizer), **shape.model_dump(), **special, seed=config.seed)
        save_model(model, tokenizer, folder)
        if load_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                f"pretrain.gpt.family={shape.family}: transformers replaces the tokenizer of such a model by one of "
                "its own kind; take family llama"
            )
    return str(folder)


def sampler(config: RunConfig, path: str, tokenizer: Any) -> Any:
    """The engine that writes samples, where any are wanted."""
    from atomrl.assembly import build_engine

    assert config.pretrain is not None
    if not config.pretrain.sample_every_steps:
        return None
    return build_engine(config.rollout.engine, path, tokenizer, config.model.dtype, config.rollout, config.model)


def report(record: Recorder, step: int, loss: float, bits: Mapping[str, float]) -> dict[str, float]:
    """A line of its own in `metrics.jsonl` and on the terminal; the same figures for the run's summary."""
    figures = {"val/loss": loss, **{f"val/{name}": value for name, value in bits.items()}}
    record.directory.log(step, figures)
    record.sinks.log_now(figures, step)
    record.progress.note(f"step {step}: " + "  ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    return {name.replace("/", "_"): value for name, value in figures.items()}


def samples(config: RunConfig, engine: Any, tokenizer: Any, step: int) -> RewardBatch:
    """What the model writes after `pretrain.sample_prompt`, without rewards."""
    from atomrl.stages import PromptBatch, RewardBatch, Sample, SamplingParams

    settings = config.pretrain
    assert settings is not None
    sampling = SamplingParams(
        completions_per_prompt=settings.samples,
        max_completion_tokens=settings.sample_tokens,
        temperature=settings.sample_temperature,
        seed=config.seed,
        step=step,
    )
    prompt = tuple(tokenizer(settings.sample_prompt, add_special_tokens=False)["input_ids"])
    sample = Sample(sample_id="sample", prompt=settings.sample_prompt, ground_truth=None, data_source="sample")
    batch = PromptBatch(samples=(sample,), prompt_ids=("sample",), prompt_token_ids=(prompt,))
    rollouts = engine.generate(batch, sampling)
    return RewardBatch(**vars(rollouts), rewards=((None,) * settings.samples,), reward_parts={})
