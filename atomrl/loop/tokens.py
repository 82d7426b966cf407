"""Which groups of a step have their tokens recorded, and what is recorded of them."""

from collections.abc import Mapping
from dataclasses import fields, replace
from hashlib import blake2b

import torch
from torch import Tensor

from atomrl.batches import RowBatch, TrainingBatch, select_rows

NARROW = {torch.int64: torch.int32, torch.float64: torch.float32}
"""Of a record: no token id and no number of a step needs more."""
LEFT_OUT = {"tokens", "recorded", "candidates", "state"}
"""Fields of a batch that are not kept as they are."""


def marked(rows: RowBatch, wanted: float) -> RowBatch:
    """The rows, with those of whole groups marked as recorded: below 1 of a share of all prompts, which are the same
    ones in every step; from 1 on of so many groups, before others those whose rewards differ, as no token of another
    moves the weights by its reward. Prompts are chosen by a hash of their tokens.

    Example:
        >>> from tests.algorithms.batches import make_rows
        >>> marked(make_rows(groups=3), 1).recorded.tolist().count(-1)
        8
    """
    if not wanted or not rows.rows:
        return rows
    first: dict[int, float] = {}
    rewards: dict[int, set[float]] = {}
    for index, (group, reward) in enumerate(zip(rows.group_ids.tolist(), rows.rewards.tolist(), strict=True)):
        rewards.setdefault(group, set()).add(reward)
        if group not in first:
            prompt = rows.tokens[index, : int(rows.prompt_lengths[index])].tolist()
            digest = blake2b(repr(prompt).encode(), digest_size=8).digest()
            first[group] = int.from_bytes(digest) / 2**64
    lowest = sorted(first, key=lambda group: (len(rewards[group]) == 1, first[group]))
    chosen = [group for group in lowest if first[group] < wanted] if wanted < 1 else lowest[: int(wanted)]
    mine = torch.isin(rows.group_ids, torch.tensor(chosen, dtype=torch.long))
    return replace(rows, recorded=(mine.cumsum(0) - 1).masked_fill(~mine, -1)) if chosen else rows


class TokenRecord:
    """The tokens of the recorded rows of a step, each as the last update that it was in saw it.

    Attributes:
        state: of the algorithm in that update, by name (an adaptive KL coefficient).
    """

    def __init__(self) -> None:
        self.state: dict[str, float] = {}
        self._rows: dict[str, list[Tensor]] = {}
        self._tokens: dict[str, list[Tensor]] = {}
        self._prompts: dict[tuple[int, ...], int] = {}
        self._seen: set[int] = set()
        self._updates = 0

    def add(self, part: TrainingBatch, numbers: Mapping[str, Tensor]) -> None:
        """What there is of an update.

        Args:
            part: its rows.
            numbers: of the back end (`protocols.TrainingBackend.token_numbers`).
        """
        update, self._updates = self._updates, self._updates + 1
        if part.recorded is None or not bool((part.recorded >= 0).any()):
            return
        batch = select_rows(part, (part.recorded >= 0).nonzero()[:, 0])
        assert batch.recorded is not None
        if self._seen & set(batch.recorded.tolist()):  # the next pass over the rows
            self._rows, self._tokens, self._seen = {}, {}, set()
        self._seen |= set(batch.recorded.tolist())
        self.state = dict(batch.state)
        columns = torch.arange(batch.tokens.shape[1])
        inside = (columns >= batch.prompt_lengths[:, None]) & (columns < batch.lengths[:, None])
        found = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name not in LEFT_OUT}
        found |= {name: values[batch.recorded, : len(columns)] for name, values in numbers.items()}
        if batch.rollout_logprobs is not None and (old := found["old_logprobs"]) is not None:
            found["gap"] = (old - batch.rollout_logprobs) * batch.loss_mask
        elif batch.rollout_logprobs is not None and "logprobs" in found:
            found["gap"] = (found["logprobs"] - batch.rollout_logprobs) * batch.loss_mask
        if "clipped" in found:
            found["clipped"] = found["clipped"] > 0
        found |= {"tokens": batch.tokens, "update": torch.full((batch.rows,), update)}
        found["prompt"] = torch.tensor([self._prompt(batch, row) for row in range(batch.rows)])
        for name, values in found.items():
            if isinstance(values, Tensor):
                by_token = values.shape == inside.shape
                kept = values[inside] if by_token else values
                table = self._tokens if by_token else self._rows
                table.setdefault(name, []).append(kept.to(NARROW.get(kept.dtype, kept.dtype)))

    def _prompt(self, batch: TrainingBatch, row: int) -> int:
        """The number of a row's prompt, which is kept once."""
        prompt = tuple(batch.tokens[row, : int(batch.prompt_lengths[row])].tolist())
        return self._prompts.setdefault(prompt, len(self._prompts))

    def tensors(self) -> dict[str, Tensor]:
        """As a file has them: `row/NAME` [R, ...] and `token/NAME` [N], the tokens after the prompt row by row;
        `prompt_tokens` of all prompts, and how many are of each. Nothing where nothing is recorded."""
        if not self._rows:
            return {}
        found = {f"row/{name}": torch.cat(parts) for name, parts in self._rows.items()}
        found |= {f"token/{name}": torch.cat(parts) for name, parts in self._tokens.items()}
        found["prompt_tokens"] = torch.tensor([t for prompt in self._prompts for t in prompt], dtype=torch.int32)
        found["prompt_sizes"] = torch.tensor([len(prompt) for prompt in self._prompts], dtype=torch.int32)
        return found
