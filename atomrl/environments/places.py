"""The environment of the task `places`: a search by name, in this package's own table."""

from __future__ import annotations

from collections.abc import Generator

from atomrl.data.places import find
from atomrl.environments.search import action_of
from atomrl.episodes import Reply
from atomrl.types import Sample


def places(sample: Sample, *, cost: float = 0.05, empty: bool = False) -> Generator[Reply | None, str, float]:
    """An episode: `<search>` is answered with the document of the place, if there is one of that very name.

    Its outcome is 0 where the first `<answer>` is not the ground truth, or where the model writes neither, and
    otherwise 1 less what the searches cost.

        outcome = right * (1 - cost * searches)

    Args:
        sample: a problem of the task.
        cost: of a search, as a share of the reward.
        empty: find nothing, which shows what is known without searching.
    """
    searches, text = 0, (yield None)
    while (action := action_of(text))[0] == "search":
        searches += 1
        text = yield Reply(text=find("" if empty else action[1]), label="search")
    kind, answer = action
    right = kind == "answer" and answer == sample.ground_truth
    return float(right) * (1.0 - cost * searches)
