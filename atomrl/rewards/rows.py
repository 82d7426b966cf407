"""The completions of a batch, flattened to one row each, and what a reward function gets of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from atomrl.stages import RolloutBatch, Sample


@dataclass(frozen=True)
class Rows:
    """One element per completion in every list, in the order of the batch."""

    rollouts: RolloutBatch
    places: list[tuple[int, int]]
    """(prompt, completion) of each row."""
    columns: dict[str, list[Any]]

    @classmethod
    def of(cls, rollouts: RolloutBatch) -> Rows:
        """All completions. A column that some samples lack is None for them."""
        places = [(p, g) for p, group in enumerate(rollouts.completions) for g in range(len(group))]
        names = dict.fromkeys(name for sample in rollouts.samples for name in sample.columns)
        samples = [rollouts.samples[p] for p, _ in places]
        columns: dict[str, list[Any]] = {name: [sample.columns.get(name) for sample in samples] for name in names}
        columns["ground_truth"] = [sample.ground_truth for sample in samples]
        columns["data_source"] = [sample.data_source for sample in samples]
        columns["completion_tokens"] = [len(rollouts.completions[p][g].token_ids) for p, g in places]
        return cls(rollouts, places, columns)

    def sample(self, row: int) -> Sample:
        return self.rollouts.samples[self.places[row][0]]

    def text(self, row: int) -> str:
        p, g = self.places[row]
        return self.rollouts.completions[p][g].text

    def name(self, row: int) -> str:
        """How a message names a row."""
        return f"sample {self.sample(row).sample_id!r}, completion {self.places[row][1]}: {self.text(row)[:200]!r}"

    def payload(self, rows: Sequence[int]) -> dict[str, Any]:
        """What a function of columns gets of some rows: lists of its own, so that none can disturb another's."""
        prompts = [self.sample(row).prompt for row in rows]
        return {
            "prompts": [p if isinstance(p, str) else [dict(message) for message in p] for p in prompts],
            "completions": [self.text(row) for row in rows],
            "columns": {name: [values[row] for row in rows] for name, values in self.columns.items()},
            "seed": self._seed(rows[0]),
        }

    def batch_payload(self, rows: Sequence[int]) -> dict[str, Any]:
        """What a reward of whole batches gets of some rows: the batch without the others."""
        kept: dict[int, list[int]] = {}
        for p, g in (self.places[row] for row in rows):
            kept.setdefault(p, []).append(g)
        by_prompt = ("samples", "prompt_ids", "prompt_token_ids")
        changes: dict[str, Any] = {name: tuple(getattr(self.rollouts, name)[p] for p in kept) for name in by_prompt}
        changes["completions"] = tuple(tuple(self.rollouts.completions[p][g] for g in kept[p]) for p in kept)
        plain = {item.name: getattr(self.rollouts, item.name) for item in fields(RolloutBatch)}
        return {"rollouts": replace(RolloutBatch(**plain), **changes), "seed": self._seed(rows[0])}

    def _seed(self, row: int) -> int:
        p, g = self.places[row]
        key = f"{self.rollouts.prompt_ids[p]}/{g}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little")
