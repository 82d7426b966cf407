"""What a reward function gets of trajectories: lists with one element for each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from atomrl.rewards.calling import Style
from atomrl.types import Trajectory


class RewardInputs:
    """The columns of some trajectories, in their order.

    Attributes:
        columns: a column that some samples lack is None for them.
    """

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self.trajectories = trajectories
        samples = [item.sample for item in trajectories]
        names = dict.fromkeys(name for sample in samples for name in sample.columns)
        self.columns: dict[str, list[Any]] = {name: [item.columns.get(name) for item in samples] for name in names}
        self.columns["ground_truth"] = [sample.ground_truth for sample in samples]
        self.columns["data_source"] = [sample.data_source for sample in samples]
        self.columns["completion_tokens"] = [item.response_tokens for item in trajectories]

    def name(self, row: int) -> str:
        """How a message names a trajectory."""
        item = self.trajectories[row]
        return f"sample {item.sample.sample_id!r}, completion {item.index}: {item.text[:200]!r}"

    def payload(self, rows: Sequence[int], style: Style) -> dict[str, Any]:
        """What a reward gets of some rows: lists of its own, so that none can disturb another's."""
        items = [self.trajectories[row] for row in rows]
        key = items[0].trajectory_id.encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little")
        if style == "trajectories":
            return {"trajectories": items, "seed": seed}
        prompts = [item.sample.prompt for item in items]
        return {
            "prompts": [p if isinstance(p, str) else [dict(message) for message in p] for p in prompts],
            "completions": [item.text for item in items],
            "columns": {name: [values[row] for row in rows] for name, values in self.columns.items()},
            "seed": seed,
        }
