"""Training on preferences from a config, of whatever model: what `atomrl dpo` and reward modelling have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from atomrl.assembly import build_trainer, closing_all, context_tokens, finish, make_schedule, model_path
from atomrl.config import ConfigError, RunConfig
from atomrl.data.pairs import load_preferences, scored_completions
from atomrl.data.problems import DataError
from atomrl.data.processor import DataProcessor
from atomrl.data.stream import PromptStream
from atomrl.loop.preferences import (
    Draw,
    evaluate_preferences,
    preference_drawer,
)
from atomrl.loop.recovery import identity, open_run, saver
from atomrl.loop.sft import fitting_samples, supervise
from atomrl.models.loading import load_tokenizer
from atomrl.models.reward_model import Reader
from atomrl.protocols import Algorithm, TrainingBackend
from atomrl.stages import RewardBatch, RowBatch, Sample
from atomrl.tracking.recorder import Recorder

PAIRS_PER_UPDATE = 64
TOO_LONG = (
    "{over} of {total} preferences are longer than {limit} tokens (the longest, with its prompt: {longest}, {sample})"
)
RowScores = Callable[[TrainingBackend, RowBatch], dict[str, Tensor]]
"""Scores of rows by name, each [B]; `reward` is the one that is trained."""


def train_on_preferences(
    config: RunConfig,
    resume: bool,
    allow_changes: bool,
    *,
    algorithm: Algorithm,
    scores: RowScores,
    takes_single: bool = False,
    add: Callable[[RewardBatch], RewardBatch] | None = None,
    reader: Reader | None = None,
) -> dict[str, Any]:
    """The run of any model that is trained on preferences.

    Args:
        config: with a `preference` section.
        resume, allow_changes: as in `train`.
        algorithm: what is trained.
        scores: how held-out completions are judged.
        takes_single: also trains on completions that are labelled one by one.
        add: what a step's batch needs beside the completions drawn.
        reader: makes whole rows of prompts and completions, where the model has its own way to read them.
    """
    started = time.perf_counter()
    if config.preference is None:
        raise ConfigError("preference: the section is required (an empty one is enough: `preference: {}`)")
    train = load_preferences(config.data, config.preference, "train", config.seed).samples
    held_out = load_preferences(config.data, config.preference, "eval", config.seed).samples
    if not takes_single:
        refuse_single([*train, *held_out], config)
    path = model_path(config)
    tokenizer = load_tokenizer(config.model.tokenizer or path, config.model.trust_remote_code)
    processor = DataProcessor(tokenizer, config.data)
    rows = config.train.rows_per_update or PAIRS_PER_UPDATE
    context = reader.limit if reader else context_tokens(path, config)
    schedule = replace(make_schedule(config), prompts_per_step=rows, updates_per_epoch=1, epochs_per_step=1)
    if context is not None:
        schedule = replace(schedule, max_row_tokens=min(context, schedule.max_row_tokens or context))
    draw_train, train = _usable(train, "train", processor, reader, context, config)
    draw_eval, held_out = _usable(held_out, "eval", processor, reader, context, config)
    stream = PromptStream(train, seed=config.seed, shuffle=config.data.shuffle)
    now = identity(stream, processor, path)
    run, progress = open_run(config, resume, now, allow_changes)
    earlier_s = progress.wall_s
    trainer = build_trainer(config, path, tokenizer, schedule, algorithm)

    def draw(count: int) -> RewardBatch:
        batch = draw_train(stream.take(count))
        progress.position = stream.position
        return add(batch) if add else batch

    with closing_all(trainer), Recorder(config, run) as record:

        def evaluate_now(step: int) -> None:
            if held_out:
                metrics, lines = evaluate_preferences(
                    held_out, draw_eval, lambda rows: scores(trainer, rows), schedule.max_row_tokens
                )
                record.log_evaluation(step, metrics, lines)
                names = ("preference_accuracy", "preference_margin", "logprob_accuracy")
                progress.evaluations[str(step)] = {
                    name: metrics[f"eval/{name}"] for name in names if f"eval/{name}" in metrics
                }

        if progress.step:
            trainer.load(run.checkpoint_folder(progress.step))
            stream.position = progress.position
        elif config.eval.before:
            evaluate_now(0)
        done = supervise(trainer, algorithm, draw, record, progress, saver(trainer, now), schedule, evaluate_now)
        if done and config.eval.after:
            evaluate_now(progress.step)
    return finish(run, config, progress, done, earlier_s + time.perf_counter() - started)


def refuse_single(samples: list[Sample], config: RunConfig) -> None:
    """Raise DataError where a row of a file is labelled by itself."""
    for sample in samples:
        if len(sample.columns.get("scored_completions", (0, 0))) == 1:
            raise DataError(
                f"{sample.sample_id}: a completion with a label of its own, and {config.algorithm.name} needs pairs "
                "(chosen and rejected); algorithm.name=kto and bco take labels"
            )


def _usable(
    samples: list[Sample],
    split: str,
    processor: DataProcessor,
    reader: Reader | None,
    context: int | None,
    config: RunConfig,
) -> tuple[Draw, list[Sample]]:
    """The samples that fit, and what draws their completions."""
    source = config.data.train if split == "train" else config.data.eval
    draw = preference_drawer(processor, scored_completions(source or ""), config.seed)
    if reader is not None:
        draw = reader.reading(draw)
    kept, _ = processor.filter_overlong(samples)
    if context is None or not kept:
        return draw, kept
    complaint = f"data.{split}: {TOO_LONG}"
    return draw, fitting_samples(kept, draw, context, complaint, "take a model with a longer context, or shorter data")
