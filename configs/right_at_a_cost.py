"""The reward of `quickstart_python.yaml`."""

from typing import Any

from atomrl.rewards.verifiable import exact_match

COST = 0.1
"""Of a program, as a share of the reward."""


def right_at_a_cost(prompts: list[Any], completions: list[str], ground_truth: list[Any], **columns: Any) -> list[float]:
    """A right answer earns 1, less 10% for each program that was run for it; a wrong one nothing."""
    right = exact_match(prompts, completions, ground_truth)
    return [score * (1.0 - COST * text.count("</python>")) for score, text in zip(right, completions, strict=True)]
