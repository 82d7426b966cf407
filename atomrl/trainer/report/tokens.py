"""Token records: which groups of a step are recorded, and their values per token."""

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b

import torch
from torch import Tensor

from atomrl.batches import RowBatch, TrainingBatch, flat_fields, select_rows

NARROW = {torch.int64: torch.int32, torch.float64: torch.float32}
"""dtype -> dtype in a record, which is wide enough for token ids and for all values of a step."""
LEFT_OUT = {"tokens", "recorded", "candidates", "state"}
"""Fields of a batch that are not recorded as they are."""


def mark_recorded(rows: RowBatch, wanted: float) -> RowBatch:
    """Select the groups whose tokens are recorded: set `recorded` to the number of the record's row, else -1.

    Prompts are chosen by a hash of their tokens, so the same prompts are recorded in every step.

    Args:
        wanted: below 1 the share of prompts; otherwise the number of groups, first those whose rewards differ, because
            only their tokens have advantages.

    Example:
        >>> groups = torch.tensor([0, 0, 1, 1])
        >>> rows = RowBatch(
        ...     tokens=torch.tensor([[5, 8], [5, 9], [6, 8], [6, 9]]), loss_mask=torch.tensor([[False, True]] * 4),
        ...     lengths=torch.full((4,), 2), prompt_lengths=torch.ones(4, dtype=torch.long), group_ids=groups,
        ...     rewards=torch.tensor([0.0, 0.0, 0.0, 1.0]), truncated=torch.zeros(4, dtype=torch.bool),
        ... )
        >>> mark_recorded(rows, 1).recorded
        tensor([-1, -1,  0,  1])
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
    selected = torch.isin(rows.group_ids, torch.tensor(chosen, dtype=torch.long))
    return replace(rows, recorded=(selected.cumsum(0) - 1).masked_fill(~selected, -1)) if chosen else rows


class TokenRecord:
    """Per-token values of the recorded rows of a step, from the last update in which each row took part.

    Attributes:
        state: state of the algorithm in that update (such as an adaptive KL coefficient).
    """

    def __init__(self) -> None:
        self.state: dict[str, float] = {}
        self._rows: dict[str, list[Tensor]] = {}
        self._tokens: dict[str, list[Tensor]] = {}
        self._prompts: dict[tuple[int, ...], int] = {}
        self._seen: set[int] = set()
        self._updates = 0

    def add(self, part: TrainingBatch, numbers: Mapping[str, Tensor]) -> None:
        """Add the values of an update.

        Args:
            part: the rows of the update.
            numbers: values from the back end (`protocols.TrainingBackend.token_numbers`).
        """
        update, self._updates = self._updates, self._updates + 1
        if part.recorded is None or not bool((part.recorded >= 0).any()):
            return
        batch = select_rows(part, (part.recorded >= 0).nonzero()[:, 0])
        assert batch.recorded is not None
        if self._seen & set(batch.recorded.tolist()):  # the next epoch over the rows replaces the last one
            self._rows, self._tokens, self._seen = {}, {}, set()
        self._seen |= set(batch.recorded.tolist())
        self.state = dict(batch.state)
        columns = torch.arange(batch.tokens.shape[1])
        inside = (columns >= batch.prompt_lengths[:, None]) & (columns < batch.lengths[:, None])
        values = {name: value for name, value in flat_fields(batch).items() if name not in LEFT_OUT}
        values |= {name: column[batch.recorded, : len(columns)] for name, column in numbers.items()}
        # With a single update per step there are no old log-probs: the policy's own equal them.
        trainer = values.get("logprobs") if values["old_logprobs"] is None else values["old_logprobs"]
        if batch.rollout.logprobs is not None and trainer is not None:
            values["gap"] = (trainer - batch.rollout.logprobs) * batch.loss_mask
        if "clipped" in values:
            values["clipped"] = values["clipped"] > 0
        values |= {"tokens": batch.tokens, "update": torch.full((batch.rows,), update)}
        values["prompt"] = torch.tensor([self._prompt(batch, row) for row in range(batch.rows)])
        for name, column in values.items():
            if isinstance(column, Tensor):
                by_token = column.shape == inside.shape
                column = column[inside] if by_token else column
                table = self._tokens if by_token else self._rows
                table.setdefault(name, []).append(column.to(NARROW.get(column.dtype, column.dtype)))

    def _prompt(self, batch: TrainingBatch, row: int) -> int:
        """Return the number of a row's prompt; each prompt is stored once."""
        prompt = tuple(batch.tokens[row, : int(batch.prompt_lengths[row])].tolist())
        return self._prompts.setdefault(prompt, len(self._prompts))

    def tensors(self) -> dict[str, Tensor]:
        """Return the record as tensors for a file; empty if nothing is recorded.

        `row/NAME` is [R, ...]. `token/NAME` is [N]: the tokens after the prompt, row by row. `prompt_tokens` has the
        tokens of all prompts, `prompt_sizes` their lengths.
        """
        if not self._rows:
            return {}
        tensors = {f"row/{name}": torch.cat(parts) for name, parts in self._rows.items()}
        tensors |= {f"token/{name}": torch.cat(parts) for name, parts in self._tokens.items()}
        tensors["prompt_tokens"] = torch.tensor([t for prompt in self._prompts for t in prompt], dtype=torch.int32)
        tensors["prompt_sizes"] = torch.tensor([len(prompt) for prompt in self._prompts], dtype=torch.int32)
        return tensors
