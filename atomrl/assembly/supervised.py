"""Supervised training from a config: `atomrl sft`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from atomrl.algorithms.sft import SFT
from atomrl.assembly import build_trainer, closing_all, context_tokens, finish, make_schedule, model_path
from atomrl.config import ConfigError, RunConfig
from atomrl.data.generators import find_demonstrator, is_generator, task_words
from atomrl.data.processor import DataProcessor
from atomrl.data.sources import load_samples
from atomrl.data.stream import PromptStream
from atomrl.loop.recovery import identity, open_run, saver
from atomrl.loop.sft import demonstration_batch, demonstration_tokens, fitting_samples, supervise
from atomrl.models.gpt import new_gpt
from atomrl.models.loading import load_tokenizer, save_model
from atomrl.models.tokenizer import make_tokenizer
from atomrl.stages import RewardBatch, Sample
from atomrl.tracking.recorder import Recorder
from atomrl.tracking.run_directory import FRESH_MODEL, RunDirectory

TOO_LONG = (
    "{over} of {total} demonstrations do not fit the model's context of {limit} tokens (the longest, with its prompt: "
    "{longest} tokens, {sample})"
)
ADVICE = "take a model with a longer context (sft.gpt.max_tokens), or shorter data"


def sft(config: RunConfig, resume: bool = False, allow_changes: bool = False) -> dict[str, Any]:
    """`atomrl sft`: supervised training on demonstrations; with `sft.gpt`, of a model made from scratch.

    A step draws `train.rows_per_update` demonstrations. Otherwise as `train`.
    """
    started = time.perf_counter()
    if config.sft is None:
        raise ConfigError("sft: the section is required by `atomrl sft` (an empty one is enough: `sft: {}`)")
    report = load_samples(config.data, "train", config.seed)
    demonstrate = demonstrator(config)
    for sample in report.samples[:1]:
        demonstrate(sample, random.Random(0))  # a missing field shows now
    rows = config.train.rows_per_update or 64
    schedule = replace(make_schedule(config), prompts_per_step=rows, updates_per_epoch=1, epochs_per_step=1)
    if config.sft.gpt:
        now = {"data (data.train)": PromptStream(report.samples).fingerprint}
        run, progress = open_run(config, resume, now, allow_changes)
        path = fresh_model(config, run)
    else:
        path = model_path(config)
    tokenizer = load_tokenizer(config.model.tokenizer or path, config.model.trust_remote_code)
    processor = DataProcessor(tokenizer, config.data)
    kept, _ = processor.filter_overlong(report.samples)

    def demonstrations(items: Sequence[tuple[str, Sample]]) -> RewardBatch:
        texts = [demonstrate(sample, random.Random(f"{config.seed}/{prompt_id}")) for prompt_id, sample in items]
        return demonstration_batch(processor.to_prompt_batch(items), demonstration_tokens(texts, tokenizer))

    context = context_tokens(path, config)
    if context is not None:
        kept = fitting_samples(kept, demonstrations, context, TOO_LONG, ADVICE)
        schedule = replace(schedule, max_row_tokens=min(context, schedule.max_row_tokens or context))
    stream = PromptStream(kept, seed=config.seed, shuffle=config.data.shuffle)
    if not config.sft.gpt:
        now = identity(stream, processor, path)
        run, progress = open_run(config, resume, now, allow_changes)
    earlier_s = progress.wall_s
    trainer = build_trainer(config, path, tokenizer, schedule, SFT)

    def draw(count: int) -> RewardBatch:
        batch = demonstrations(stream.take(count))
        progress.position = stream.position
        return batch

    with closing_all(trainer), Recorder(config, run) as record:
        if progress.step:
            trainer.load(run.checkpoint_folder(progress.step))
            stream.position = progress.position
        done = supervise(trainer, SFT, draw, record, progress, saver(trainer, now), schedule)
    return finish(run, config, progress, done, earlier_s + time.perf_counter() - started)


def demonstrator(config: RunConfig) -> Callable[[Sample, random.Random], str]:
    """What a sample's demonstration is: a generator's own, or a field of the row.

    Raises:
        ConfigError: the generator writes none, or the row has no such field.
    """
    assert config.sft is not None
    source, field = config.data.train, config.sft.completion_field
    if is_generator(source):
        own = find_demonstrator(source)
        return lambda sample, rng: own(rng, {**sample.columns, "ground_truth": sample.ground_truth})

    def from_field(sample: Sample, rng: random.Random) -> str:
        text = sample.columns.get(field)
        if not isinstance(text, str) or not text:
            raise ConfigError(f"{sample.sample_id}: sft.completion_field {field!r} holds no text")
        return text

    return from_field


def fresh_model(config: RunConfig, run: RunDirectory) -> str:
    """A GPT with fresh weights and a tokenizer for the task, in the run's folder; the one there when it goes on."""
    folder = run.path / FRESH_MODEL
    if run.first_step == 1 or not folder.exists():
        assert config.sft is not None and config.sft.gpt is not None
        tokenizer = make_tokenizer(task_words(config.data.train))
        model = new_gpt(
            vocab_size=len(tokenizer),
            **config.sft.gpt.model_dump(),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            seed=config.seed,
        )
        save_model(model, tokenizer, folder)
    return str(folder)
