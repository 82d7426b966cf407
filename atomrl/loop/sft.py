"""Supervised training: demonstrations in place of rollouts, and the rest as in any run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from atomrl.loop.report import Stopwatch, update_metrics
from atomrl.loop.sync import Progress, RunRecord, Save, Schedule, before_updates, learn, run_steps
from atomrl.protocols import Algorithm, TrainingBackend
from atomrl.stages import Completion, PromptBatch, RewardBatch, Sample

log = logging.getLogger(__name__)


def supervise(
    trainer: TrainingBackend,
    algorithm: Algorithm,
    draw: Callable[[int], RewardBatch],
    record: RunRecord,
    progress: Progress,
    save: Save,
    schedule: Schedule,
    evaluate: Callable[[int], object] | None = None,
) -> bool:
    """Run the remaining steps on batches that are drawn, not sampled.

    Args:
        draw: number of prompts -> their completions with rewards (`demonstration_batch` for supervised training).
        schedule: `prompts_per_step` is how many are drawn.
        evaluate: called after every `eval_every_steps` steps but the last, with the step.

    Returns:
        Whether the last step was reached (see `loop.sync.run_steps`).
    """
    algorithm.state.update(progress.algorithm_state)

    def one_step(step: int) -> dict[str, float]:
        watch = Stopwatch()
        with before_updates():
            drawn = draw(schedule.prompts_per_step)
        _, results = learn(trainer, algorithm, drawn, schedule, step, watch)
        metrics = update_metrics(results) | watch.metrics(drawn)
        if evaluate and schedule.eval_every_steps and step % schedule.eval_every_steps == 0 and step < schedule.steps:
            evaluate(step)
        progress.algorithm_state = dict(algorithm.state)
        return metrics

    return run_steps(one_step, record, progress, save, schedule)


def demonstration_batch(prompts: PromptBatch, completions: Sequence[tuple[int, ...]]) -> RewardBatch:
    """Demonstrations as if they had been sampled, one for each prompt, with a reward of 1."""
    groups = tuple(
        (Completion(token_ids=tokens, text="", logprobs=None, finish_reason="stop"),) for tokens in completions
    )
    ones = tuple((1.0,) for _ in completions)
    return RewardBatch(**vars(prompts), completions=groups, policy_version=0, rewards=ones, reward_parts={})


def demonstration_tokens(texts: Sequence[str], tokenizer: Any) -> list[tuple[int, ...]]:
    """Token ids of demonstrations, each ended by the end-of-sequence token.

    Raises:
        ValueError: the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-sequence token, so a model could not learn to stop")
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [(*tokens, tokenizer.eos_token_id) for tokens in encoded]


def fitting_samples(
    samples: Sequence[Sample],
    draw: Callable[[Sequence[tuple[str, Sample]]], RewardBatch],
    max_tokens: int,
    complaint: str,
    advice: str,
) -> list[Sample]:
    """The samples of which every row, as drawn in the first epoch, has at most so many tokens.

    Args:
        draw: (prompt id, sample) -> their completions.
        complaint: what to say of those left out, with the fields `over`, `total`, `limit`, `longest` and `sample`.
        advice: what to do where none is left.

    Raises:
        ValueError: none is.
    """
    batch = draw([(f"0:{sample.sample_id}", sample) for sample in samples])
    lengths = [
        len(prompt) + max(len(completion.token_ids) for completion in group)
        for prompt, group in zip(batch.prompt_token_ids, batch.completions, strict=True)
    ]
    kept = [sample for sample, length in zip(samples, lengths, strict=True) if length <= max_tokens]
    if len(kept) < len(samples):
        longest = max(range(len(samples)), key=lengths.__getitem__)
        message = complaint.format(
            over=len(samples) - len(kept),
            total=len(samples),
            limit=max_tokens,
            longest=lengths[longest],
            sample=samples[longest].sample_id,
        )
        if not kept:
            raise ValueError(f"{message}; {advice}")
        log.warning("%s and are left out", message)
    return kept
