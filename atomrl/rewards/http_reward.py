"""The reward `http`: scores from the user's own service."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from atomrl.rewards.calling import columns_of
from atomrl.rewards.errors import RewardStop
from atomrl.rewards.service import RetryableError, RewardService, Url
from atomrl.types import Trajectory

VERSION = 1
"""Version of the request format in docs/guides/rewards.md."""


class HttpReward(RewardService):
    """The reward `http`: sends batches of completions to a service that returns their scores.

    The request is JSON: `{"version": 1, "prompts": [...], "completions": [...], "columns": {NAME: [...]}}`, each list
    with one element per completion. The reply is `{"scores": [...]}` in the same order; `{"rewards": [...]}`
    (OpenRLHF) or a plain list are accepted too. A score is a number, null for no score, or an object with `score`,
    whose other numbers are logged (verl).
    """

    url: Url
    batch_size: int = Field(32, ge=1)
    """Completions per request."""

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
        answers = self.gather([self._scores(trajectories[batch], columns, batch) for batch in batches])
        scores: list[Any] = []
        for batch, answer in zip(batches, answers, strict=True):
            failed = isinstance(answer, Exception)
            scores += [answer] * len(trajectories[batch]) if failed else answer
        return scores

    async def _scores(
        self, items: Sequence[Trajectory], columns: Mapping[str, Sequence[Any]], batch: slice
    ) -> Sequence[Any]:
        """Request the scores of one batch: `items`, with the slice `batch` of the columns."""

        def parse_scores(answer: Any) -> Sequence[Any]:
            scores = answer.get("rewards", answer.get("scores")) if isinstance(answer, dict) else answer
            if not isinstance(scores, list):
                message = f'{self.url}: the answer must be {{"scores": [...]}}, not {repr(answer)[:100]}'
                raise RetryableError(message, served=True, fault="invalid")
            if len(scores) != len(items):
                message = f"{self.url}: it returned {len(scores)} scores for {len(items)} completions"
                raise RetryableError(message, served=True, fault="invalid")
            return scores

        body = {
            "version": VERSION,
            "prompts": [item.problem.prompt for item in items],
            "completions": [item.turn for item in items],
            "columns": {name: values[batch] for name, values in columns.items()},
        }
        return await self.post(body, parse_scores)
