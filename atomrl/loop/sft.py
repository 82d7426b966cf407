"""Supervised training: demonstrations in place of rollouts, and the rest as in any run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from atomrl.algorithms.sft import SFT
from atomrl.data.rows import to_rows, to_training_batches
from atomrl.loop.report import update_metrics
from atomrl.loop.sync import Progress, RunRecord, save_when_due, stop_request
from atomrl.protocols import TrainingBackend
from atomrl.stages import Completion, PromptBatch, RewardBatch

Demonstrations = Callable[[int], tuple[PromptBatch, Sequence[tuple[int, ...]]]]
"""Rows to draw -> prompts and the completion's token ids for each of them."""


def demonstration_batch(prompts: PromptBatch, completions: Sequence[tuple[int, ...]]) -> RewardBatch:
    """Demonstrations as if they had been sampled, each with a reward of 1."""
    groups = tuple(
        (Completion(token_ids=tokens, text="", logprobs=None, finish_reason="stop"),) for tokens in completions
    )
    ones = tuple((1.0,) for _ in completions)
    return RewardBatch(**vars(prompts), completions=groups, policy_version=0, rewards=ones, reward_parts={})


def supervise(
    trainer: TrainingBackend,
    draw: Demonstrations,
    record: RunRecord,
    progress: Progress,
    *,
    steps: int,
    rows_per_step: int,
    save_every_steps: int,
    position: Callable[[], int],
    save: Callable[[Path, Progress], None],
    max_row_tokens: int | None = None,
) -> bool:
    """Run the remaining steps, one update each. Returns whether the last one was reached (see `loop.sync.train`)."""
    saved = progress.step
    with stop_request() as stopped:
        while progress.step < steps and not stopped():
            started = time.perf_counter()
            step = progress.step + 1
            rows = to_rows(demonstration_batch(*draw(rows_per_step)), max_row_tokens)
            batches = to_training_batches(SFT.advantages(rows), SFT, updates=1, epochs=1, seed=0, step=step)
            metrics = update_metrics([trainer.train_step(batch, SFT) for batch in batches])
            seconds = time.perf_counter() - started
            metrics |= {"timing_s/step": seconds, "perf/throughput": float(rows.lengths.sum()) / seconds}
            progress.step, progress.position = step, position()
            progress.wall_s += seconds
            record.log(step, metrics)
            saved = save_when_due(record, progress, save, saved, save_every_steps)
    save_when_due(record, progress, save, saved, 1)
    return progress.step >= steps


def demonstration_tokens(texts: Sequence[str], tokenizer: Any) -> list[tuple[int, ...]]:
    """Token ids of demonstrations, each ended by the end-of-sequence token.

    Raises:
        ValueError: the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-sequence token, so a model could not learn to stop")
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [(*tokens, tokenizer.eos_token_id) for tokens in encoded]
