"""The reward `http`: scores from a service of the user's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from atomrl.rewards.calling import columns_of
from atomrl.rewards.errors import RewardStop
from atomrl.rewards.service import Again, RewardService, Url
from atomrl.types import Trajectory

VERSION = 1
"""Of the request that docs/guides/rewards.md describes."""


class HttpReward(RewardService):
    """The reward `http`: asks a service for the scores of batches of completions.

    The request is JSON: `{"version": 1, "prompts": [...], "completions": [...], "columns": {NAME: [...]}}`, each list
    with one element per completion. The answer is `{"scores": [...]}`, in the same order; `{"rewards": [...]}`
    (OpenRLHF) or the list alone will do. A score is a number, null for none, or an object with `score`, whose other
    numbers are logged (verl).
    """

    url: Url
    batch_size: int = Field(32, ge=1)
    """Completions in a request."""

    @property
    def endpoint(self) -> str:
        return self.url

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Any]:
        columns = columns_of(trajectories)
        for name, values in columns.items():
            try:
                json.dumps(values, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise RewardStop(f"reward 'http': the column {name!r} cannot be sent as JSON: {error}") from None
        starts = range(0, len(trajectories), self.batch_size)
        batches = [slice(start, start + self.batch_size) for start in starts]
        answers = self.together([self._scores(trajectories[batch], columns, batch) for batch in batches])
        scores: list[Any] = []
        for batch, answer in zip(batches, answers, strict=True):
            failed = isinstance(answer, Exception)
            scores += [answer] * len(trajectories[batch]) if failed else answer
        return scores

    async def _scores(
        self, items: Sequence[Trajectory], columns: Mapping[str, Sequence[Any]], batch: slice
    ) -> Sequence[Any]:
        """Of one batch."""

        def listed(answer: Any) -> Sequence[Any]:
            found = answer
            if isinstance(answer, dict):
                found = answer.get("rewards", answer.get("scores"))
            if not isinstance(found, list):
                shown = repr(answer)[:100]
                message = f'{self.url}: the answer must be {{"scores": [...]}}, not {shown}'
                raise Again(message, served=True, fault="invalid")
            if len(found) != len(items):
                message = f"{self.url}: it returned {len(found)} scores for {len(items)} completions"
                raise Again(message, served=True, fault="invalid")
            return found

        body = {
            "version": VERSION,
            "prompts": [item.sample.prompt for item in items],
            "completions": [item.turn for item in items],
            "columns": {name: values[batch] for name, values in columns.items()},
        }
        return await self.post(body, listed)
