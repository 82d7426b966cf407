"""The reward of `quickstart_python.yaml`."""

from typing import Any

from atomrl.rewards.verifiable import exact_match

COST = 0.1
"""Cost of a program, as a share of the reward."""


def right_at_a_cost(prompts: list[Any], completions: list[str], ground_truth: list[Any], **columns: Any) -> list[float]:
    """Return 1 for a right answer, minus 10% for each program that was run; 0 for a wrong answer."""
    right = exact_match(prompts, completions, ground_truth)
    return [score * (1.0 - COST * text.count("</python>")) for score, text in zip(right, completions, strict=True)]
