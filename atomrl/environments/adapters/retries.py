"""Reasoning-gym's problems with several tries."""

from collections.abc import Generator

from atomrl.episodes import Reply, Role
from atomrl.rewards.tasks import reasoning_gym
from atomrl.types import Sample


def play(sample: Sample, *, tries: int = 3, role: Role = "user") -> Generator[Reply | None, str, float]:
    """A problem of a generator `reasoning_gym:NAME`: a wrong answer is told so, until the tries are used up.

    The outcome is the task's own score of the last answer.
    """
    text = yield None
    for left in range(tries - 1, -1, -1):
        (score,) = reasoning_gym([sample.prompt], [text], [sample.columns["reasoning_gym"]])
        if score >= 1 or not left:
            break
        said = f"That is not right (score {score:.2f}). Try again, with the answer in <answer> and </answer>."
        text = yield Reply(text=said, role=role, label="retry")
    return score
