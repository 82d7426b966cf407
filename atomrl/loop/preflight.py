"""Whether a run can make any update: what can be said before it begins."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from atomrl.config import ConfigError, RunConfig
from atomrl.data.rows import to_rows
from atomrl.protocols import Algorithm
from atomrl.types import Sample, Segment, Trajectory

log = logging.getLogger(__name__)
ENOUGH = 8
"""Completions of a prompt with which every algorithm has something to compare."""


def check_row_limit(prompt_tokens: Sequence[int], max_row_tokens: int | None) -> None:
    """That rows have room for completions; a warning where some have none.

    Args:
        prompt_tokens: the length of every prompt.
        max_row_tokens: `train.max_row_tokens`.

    Raises:
        ConfigError: no row has.
    """
    over = sum(tokens >= max_row_tokens for tokens in prompt_tokens) if max_row_tokens is not None else 0
    if not over:
        return
    if over == len(prompt_tokens):
        raise ConfigError(
            f"train.max_row_tokens={max_row_tokens}: every prompt has at least as many tokens "
            f"({min(prompt_tokens)} to {max(prompt_tokens)}), so no completion would be trained on; raise it above "
            "prompt and completion together"
        )
    log.warning(
        "train.max_row_tokens=%d: %d of %d prompts have at least as many tokens; their completions are not trained on",
        max_row_tokens, over, len(prompt_tokens),
    )  # fmt: skip


def check_group_size(algorithm: Algorithm, completions_per_prompt: int) -> None:
    """That groups of this size give an advantage that is not 0 throughout.

    The algorithm is asked: its advantages of rows with random rewards and inputs, once with this many completions of a
    prompt and, where all are 0, once with `ENOUGH`. (Both are 0 where the loss does not need advantages.)

    Raises:
        ConfigError: they do not.
        ValueError: the algorithm refuses groups of this size itself.
    """
    if not _advantages(algorithm, completions_per_prompt).any() and _advantages(algorithm, ENOUGH).any():
        raise ConfigError(
            f"rollout.completions_per_prompt={completions_per_prompt}: {algorithm.name} compares the completions of a "
            "prompt with each other, and in groups of this size every advantage would be 0 and nothing would be "
            "learned; take more, or an algorithm.advantage that does not compare"
        )


def check_temperature(config: RunConfig) -> None:
    """A warning where the completions of a prompt are bound to be one and the same."""
    rollout = config.rollout
    if rollout.temperature == 0 and rollout.completions_per_prompt > 1 and config.environment is None:
        log.warning(
            "rollout.temperature=0: all %d completions of a prompt will be the same, so that none is better than "
            "another; take rollout.temperature=1",
            rollout.completions_per_prompt,
        )


def _advantages(algorithm: Algorithm, members: int, groups: int = 4) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    sample = Sample(sample_id="", prompt="", ground_truth=None)
    segments = (Segment(origin="prompt", token_ids=(1, 1)), Segment(origin="model", token_ids=(1,) * 4))
    drawn = [
        Trajectory(
            prompt_id=str(group), index=index, sample=sample, segments=segments, text="", finish_reason="stop",
            reward=reward, reward_parts={"": reward}, part_weights={"": 1.0}, baseline_reward=baseline,
        )
        for group in range(groups)
        for index in range(members)
        for reward, baseline in [torch.rand(2, generator=random).tolist()]
    ]  # fmt: skip
    rows = to_rows(drawn)
    inputs: dict[str, Any] = {
        name: torch.rand(rows.rows, generator=random)
        if name == "scores"
        else (torch.rand(rows.tokens.shape, generator=random) - 1) * rows.loss_mask
        for name in (*algorithm.advantage_inputs, "rollout_logprobs")
    }
    return algorithm.advantages(replace(rows, **inputs)).advantages
