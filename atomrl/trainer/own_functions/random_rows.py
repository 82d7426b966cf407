"""A batch of random numbers, for a trial of functions of an objective."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atomrl.batches import RowBatch
from atomrl.data.rows import to_rows
from atomrl.types import Problem, Segment, Trajectory

MAX_ROWS = 512
"""Maximum number of rows of a trial."""
MAX_TOKENS = 64
"""Maximum length of a completion of a trial."""
PROMPT_TOKENS = 4
REWARDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "between 0 and 1": lambda random: random,
    "0 and 1": lambda random: (torch.arange(len(random)) % 2).float(),
    "between -1 and 0": lambda random: -random,
}
"""Name of a kind of rewards -> function that makes them of uniform random numbers [B] in [0, 1)."""


def random_rows(
    groups: int,
    group_size: int,
    tokens: int = 4,
    rewards: Callable[[Tensor], Tensor] = REWARDS["between 0 and 1"],
    weights: Sequence[float] = (1.0,),
    turns: bool = False,
    baselines: bool = True,
) -> RowBatch:
    """Return the rows of a step with random log-probs, lengths and rewards; the same on every call.

    Args:
        groups: number of prompts.
        group_size: completions per prompt.
        tokens: length of the longest completion.
        rewards: a value of `REWARDS`.
        weights: weights of the parts of the reward.
        turns: completions have two turns, with a reward at the end of the first.
        baselines: with rewards of extra rollouts.
    """
    random = torch.Generator().manual_seed(0)
    count = groups * group_size
    outcomes = rewards(torch.rand(count, generator=random)).tolist()
    lengths = torch.randint(1, tokens + 1, (count,), generator=random).tolist()
    lengths[0] = tokens
    problem = Problem(problem_id="", prompt="", ground_truth=None)
    names = [f"part {number}" for number in range(len(weights))]
    trajectories = []
    for number, (reward, length) in enumerate(zip(outcomes, lengths, strict=True)):
        segments = [Segment(origin="prompt", token_ids=(1,) * PROMPT_TOKENS), _random_turn(length, random)]
        if turns:
            segments += [Segment(origin="environment", token_ids=(1,)), _random_turn(length, random)]
        trajectories.append(
            Trajectory(
                prompt_id=str(number // group_size), index=number % group_size, problem=problem,
                segments=tuple(segments), text="", finish_reason="stop", reward=reward,
                reward_parts=dict.fromkeys(names, reward),
                part_weights=dict(zip(names, weights, strict=True)), baseline_reward=0.5 if baselines else None,
                token_rewards=((PROMPT_TOKENS + length - 1, reward),) if turns else (),
            )
        )  # fmt: skip
    return to_rows(trajectories)


def _random_turn(length: int, random: torch.Generator) -> Segment:
    logprobs = tuple((torch.rand(length, generator=random) - 1).tolist())
    return Segment(origin="model", token_ids=(1,) * length, logprobs=logprobs, policy_version=0)


def with_inputs(rows: RowBatch, names: Iterable[str]) -> RowBatch:
    """Add random values for inputs that the back end computes (`ModelInput`).

    Values are in [-1, 0), entropies and squared probabilities in (0, 1], and 0 outside the loss mask.
    """
    random, changes = torch.Generator().manual_seed(1), dict[str, Any]()
    for name in sorted(names):
        numbers = torch.rand(rows.rows if name == "scores" else rows.tokens.shape, generator=random) - 1
        numbers = -numbers if name in ("old_entropy", "old_squared_probs") else numbers
        changes[name] = numbers if name == "scores" else numbers * rows.loss_mask
    return replace(rows, **changes)
