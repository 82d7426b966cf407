"""The recorded tokens of a step: what the update saw of each (`rollouts/step_N/tokens.safetensors`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atomrl.files import open_file
from atomrl.reading.lines import ReadError

TOKENS = "tokens.safetensors"
Column = NDArray[Any]
ROWS = {"trajectory_index", "group_ids", "lengths", "prompt_lengths", "prompt", "update"}
COLUMNS = {"tokens", "loss_mask", "advantages"}
"""What every record has of each row and of each token."""


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """Some groups of a step, whole: a column of each row, and one of each token after the prompt, row by row.

    Example:
        >>> table = load_run("runs/quickstart").tokens(10)  # doctest: +SKIP
        >>> table.rows["rewards"], table.tokens["advantages"][table.span(0)]  # doctest: +SKIP
    """

    step: int
    rows: dict[str, Column]
    """`trajectory_index` (the completion's line in `train.jsonl`), `group_ids`, `rewards`, `update`, ..."""
    tokens: dict[str, Column]
    """`tokens` (their ids), `loss_mask`, `advantages`, `logprobs`, `rollout_logprobs`, `gap` (the trainer's log-prob
    before the update less the engine's), `log_ratio`, `clipped`, `loss` (the token's part of it), `gradient` (of the
    loss in its log-prob), and, where the run had them, `entropy`, `ref_logprobs`, `values`, ..."""
    prompts: list[Column]
    """Token ids; `rows["prompt"]` says which."""
    state: dict[str, float]
    """Of the algorithm."""

    def __len__(self) -> int:
        return len(self.rows["lengths"])

    def span(self, row: int) -> slice:
        """Where the tokens of a row are."""
        sizes = self.rows["lengths"][: row + 1] - self.rows["prompt_lengths"][: row + 1]
        end = int(sizes.sum())
        return slice(end - int(sizes[-1]), end)

    def rows_of(self, place: int) -> list[int]:
        """The rows of a completion, by its line in `train.jsonl`: several where turns were dropped, none where its
        tokens are not recorded."""
        return [int(row) for row in np.flatnonzero(self.rows["trajectory_index"] == place)]

    def ref_gap(self) -> Column | None:
        """Of each token the log-prob less the reference's; None where there is no reference."""
        if "ref_logprobs" not in self.tokens or "logprobs" not in self.tokens:
            return None
        found: Column = (self.tokens["logprobs"] - self.tokens["ref_logprobs"]) * self.tokens["loss_mask"]
        return found


def read_tokens(path: Path) -> TokenTable | None:
    """The recorded tokens in a file; None where it is not there.

    Raises:
        ReadError: it is no such file, or is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        with open_file(path) as file:
            data = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ReadError(f"{path} cannot be read: {error.strerror}") from None
    try:
        size = int.from_bytes(data[:8], "little")
        about = json.loads(data[8 : 8 + size])["__metadata__"]
        arrays = load(data)
        sizes = np.cumsum(arrays["prompt_sizes"])[:-1]
        table = TokenTable(
            step=int(about["step"]),
            rows={name.removeprefix("row/"): value for name, value in arrays.items() if name.startswith("row/")},
            tokens={name.removeprefix("token/"): value for name, value in arrays.items() if name.startswith("token/")},
            prompts=np.split(arrays["prompt_tokens"], sizes),
            state=json.loads(about["state"]),
        )
        if missing := sorted((ROWS - table.rows.keys()) | (COLUMNS - table.tokens.keys())):
            raise ValueError(f"it lacks {', '.join(missing)}")
        total = table.span(len(table) - 1).stop
        if any(len(column) != total for column in table.tokens.values()):
            raise ValueError("its columns are not equally long")
        if any(len(column) != len(table) for column in table.rows.values()):
            raise ValueError("its rows are not equally many in all columns")
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ReadError(f"{path} holds no recorded tokens: {error}") from None
    return table


def recorded_steps(rollouts: Path) -> Iterator[int]:
    """The steps of which there are recorded tokens, in order."""
    for path in sorted(rollouts.glob(f"step_*[0-9]/{TOKENS}")):
        digits = path.parent.name.removeprefix("step_")
        if digits.isascii() and digits.isdigit():
            yield int(digits)
