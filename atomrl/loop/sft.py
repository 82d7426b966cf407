"""Supervised training: demonstrations in place of rollouts, and the rest as in any run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atomrl.loop.report import Stopwatch, update_metrics
from atomrl.loop.sync import Progress, RunRecord, Save, Schedule, learn, run_steps
from atomrl.protocols import Algorithm, TrainingBackend
from atomrl.stages import Completion, PromptBatch, RewardBatch


def supervise(
    trainer: TrainingBackend,
    algorithm: Algorithm,
    draw: Callable[[int], RewardBatch],
    record: RunRecord,
    progress: Progress,
    save: Save,
    schedule: Schedule,
) -> bool:
    """Run the remaining steps on batches that are drawn, not sampled.

    Args:
        draw: number of prompts -> their completions with rewards (`demonstration_batch` for supervised training).
        schedule: `prompts_per_step` is how many are drawn.

    Returns:
        Whether the last step was reached (see `loop.sync.run_steps`).
    """

    def one_step(step: int) -> dict[str, float]:
        watch = Stopwatch()
        drawn = draw(schedule.prompts_per_step)
        _, results = learn(trainer, algorithm, drawn, schedule, step, watch)
        return update_metrics(results) | watch.metrics(drawn)

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
