"""Training on plain text: windows of tokens in place of rollouts, and the rest as in any run."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from atomrl.atoms.masks import masked_mean
from atomrl.loop.sync import Progress, RunRecord, Save, Schedule, before_updates, run_steps
from atomrl.metrics import values
from atomrl.protocols import Algorithm, TrainingBackend
from atomrl.stages import AdvantageBatch, RowBatch, TrainingBatch


def pretrain(
    trainer: TrainingBackend,
    algorithm: Algorithm,
    draw: Callable[[int], Tensor],
    after_step: Callable[[int], None],
    record: RunRecord,
    progress: Progress,
    save: Save,
    schedule: Schedule,
) -> bool:
    """Run the remaining steps, one optimizer step each.

    Args:
        algorithm: supervised training's.
        draw: step -> its windows, [B, T] token ids; a function of the step alone, so that a resumed run has the same.
        after_step: called with the step after its update: validation, samples.

    Returns:
        Whether the last step was reached (see `loop.sync.run_steps`).
    """

    def one_step(step: int) -> dict[str, float]:
        started = time.perf_counter()
        with before_updates():
            batch = training_batch(draw(step), algorithm)
        result = values(trainer.train_step(batch, algorithm))
        seconds, tokens = time.perf_counter() - started, float(batch.tokens.numel())
        result["train/loss"] = result.pop("sft/nll_per_token")
        result.pop("sft/loss")  # the same: all windows have one length
        after_step(step)
        timing = {"timing_s/step": seconds, "perf/total_num_tokens": tokens, "perf/throughput": tokens / seconds}
        return result | timing

    return run_steps(one_step, record, progress, save, schedule)


def window_rows(windows: Tensor) -> RowBatch:
    """Windows [B, T] as rows without a prompt: every token but the first is learned."""
    count, length = windows.shape
    mask = torch.ones_like(windows, dtype=torch.bool)
    mask[:, 0] = False  # nothing predicts it
    return RowBatch(
        tokens=windows,
        loss_mask=mask,
        lengths=torch.full((count,), length),
        prompt_lengths=torch.ones(count, dtype=torch.long),
        group_ids=torch.arange(count),
        rewards=torch.ones(count),
        truncated=torch.zeros(count, dtype=torch.bool),
    )


def training_batch(windows: Tensor, algorithm: Algorithm) -> TrainingBatch:
    """The windows of one optimizer step.

    Example:
        >>> from atomrl.algorithms.sft import SFT
        >>> training_batch(torch.tensor([[5, 6, 7]]), SFT).loss_weights
        tensor([[0.0000, 0.5000, 0.5000]])
    """
    rows = window_rows(windows)
    credited = AdvantageBatch(**vars(rows), advantages=rows.loss_mask.float())
    return TrainingBatch(**vars(credited), loss_weights=algorithm.weights(rows.loss_mask))


def validation_loss(trainer: TrainingBackend, windows: Tensor) -> float:
    """Mean negative log-likelihood of the windows' tokens but the first of each, in nats."""
    rows = trainer.annotate(window_rows(windows), frozenset({"old_logprobs"}))
    assert rows.old_logprobs is not None
    return -masked_mean(rows.old_logprobs.double(), rows.loss_mask).item()
