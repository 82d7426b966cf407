"""Whether a run can make any update: what can be said before it begins."""

import logging
from collections.abc import Sequence

from atomrl.config import ConfigError, RunConfig
from atomrl.loop.trial import made_up_rows, with_inputs
from atomrl.objective import PolicyObjective
from atomrl.objective.choice import Custom
from atomrl.protocols import Algorithm

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
    if _learns(algorithm, completions_per_prompt) is False and _learns(algorithm, ENOUGH):
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


def _learns(algorithm: Algorithm, members: int) -> bool | None:
    """Whether groups of this size have an advantage that is not 0. None: a function of the user's takes no such groups,
    or no such numbers."""
    own = isinstance(algorithm, PolicyObjective) and isinstance(algorithm.advantage, Custom)
    rows = with_inputs(made_up_rows(groups=4, members=members), algorithm.advantage_inputs)
    try:
        return bool(algorithm.advantages(rows).advantages.any())
    except Exception:
        if own:  # `check_own_functions` has called it as the run will
            return None
        raise
