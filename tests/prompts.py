"""Prompts for engines, and what trajectories say, for tests and benchmarks of rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from atomrl.types import Problem, Prompt, Trajectory


def prompts_of(*rows: Sequence[int], ids: Sequence[str] | None = None) -> list[Prompt]:
    """Prompts of these tokens, named p0, p1, ..."""
    names = ids or [f"p{index}" for index in range(len(rows))]
    return [
        Prompt(prompt_id=name, problem=Problem(problem_id=name, prompt="", ground_truth=""), token_ids=tuple(row))
        for name, row in zip(names, rows, strict=True)
    ]


def response(trajectory: Trajectory) -> tuple[int, ...]:
    """The tokens after the prompt."""
    return trajectory.token_ids[trajectory.prompt_tokens :]


def logprobs_of(trajectory: Trajectory) -> list[float]:
    """Return the tokens that the model wrote."""
    return [value for segment in trajectory.segments for value in segment.logprobs or ()]
