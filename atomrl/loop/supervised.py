"""Training on rows that come from data: demonstrations, preferences, windows of text."""

from collections.abc import Iterable

import torch

from atomrl.atoms.masks import masked_sum
from atomrl.batches import RowBatch
from atomrl.loop.report import Stopwatch, update_metrics
from atomrl.loop.sync import learn
from atomrl.objective.advantage_inputs import given
from atomrl.protocols import Algorithm, TrainingBackend

EVAL_SAMPLES = 64
"""Held-out samples in a forward pass of their own."""


def supervised_step(
    trainer: TrainingBackend, algorithm: Algorithm, rows: RowBatch, state: dict[str, float]
) -> dict[str, float]:
    """One optimizer step on rows. `state` becomes the algorithm's after it.

    Returns:
        The metrics of the update, `timing_s/*`, and how many tokens it had.
    """
    watch = Stopwatch()
    _, results = learn(trainer, algorithm, rows, state, watch)
    return watch.metrics(int(rows.lengths.sum())) | update_metrics(results)


def nll_per_token(trainer: TrainingBackend, batches: Iterable[RowBatch]) -> float:
    """Mean negative log-likelihood of the rows' trained tokens, in nats; every token weighs the same."""
    total, tokens = 0.0, 0
    for rows in batches:
        scored = trainer.forward_only(rows, frozenset({"old_logprobs"}))
        total -= masked_sum(given(scored.old_logprobs).double(), rows.loss_mask).item()
        tokens += int(rows.loss_mask.sum())
    return total / max(1, tokens) if tokens else torch.nan
