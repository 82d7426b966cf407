"""Per-token records of a step's update (`rollouts/step_N/tokens.safetensors`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atomrl.common.files import open_file
from atomrl.tracking.reading.lines import ReadError, loads

IMAGES = "inputs/images"
"""Folder of a run's pictures."""
TOKENS = "tokens.safetensors"
Column = NDArray[Any]
ROWS = {"trajectory_index", "group_ids", "lengths", "prompt_lengths", "prompt", "update"}
COLUMNS = {"tokens", "loss_mask", "advantages"}
"""Required columns, per row and per token."""
MAX_DIGITS = 15
"""Maximum number of digits of a step; larger numbers do not fit into the index."""


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """Recorded tokens of some groups of a step: columns per row, and columns per token after the prompt, row by row.

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
    """Token ids, indexed by `rows["prompt"]`."""
    state: dict[str, float]
    """State of the algorithm, such as an adaptive KL coefficient."""

    def __len__(self) -> int:
        return len(self.rows["lengths"])

    def span(self, row: int) -> slice:
        """Return the slice of a row in the token columns."""
        sizes = self.rows["lengths"][: row + 1] - self.rows["prompt_lengths"][: row + 1]
        end = int(sizes.sum())
        return slice(end - int(sizes[-1]), end)

    def rows_of(self, place: int) -> list[int]:
        """Return the rows of a completion, by its line in `train.jsonl`: several if turns were dropped, none if its
        tokens were not recorded."""
        return [int(row) for row in np.flatnonzero(self.rows["trajectory_index"] == place)]

    def ref_gap(self) -> Column | None:
        """Return log-prob minus reference log-prob per token; None without a reference."""
        if "ref_logprobs" not in self.tokens or "logprobs" not in self.tokens:
            return None
        gap: Column = (self.tokens["logprobs"] - self.tokens["ref_logprobs"]) * self.tokens["loss_mask"]
        return gap


def read_tokens(path: Path) -> TokenTable | None:
    """Read recorded tokens from a file; None if it does not exist.

    Raises:
        ReadError: the file has another format, or is damaged.
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
        # safetensors: the size of a JSON header, the header, the arrays. `load` does not return the metadata.
        size = int.from_bytes(data[:8], "little")
        metadata = loads(data[8 : 8 + size])["__metadata__"]
        arrays = load(data)
        sizes = np.cumsum(arrays["prompt_sizes"])[:-1]
        table = TokenTable(
            step=int(path.parent.name.removeprefix("step_")),
            rows={name.removeprefix("row/"): value for name, value in arrays.items() if name.startswith("row/")},
            tokens={name.removeprefix("token/"): value for name, value in arrays.items() if name.startswith("token/")},
            prompts=np.split(arrays["prompt_tokens"], sizes),
            state=loads(metadata["state"]),
        )
        if missing := sorted((ROWS - table.rows.keys()) | (COLUMNS - table.tokens.keys())):
            raise ValueError(f"missing: {', '.join(missing)}")
        # A file of another version may be readable and still have columns that do not match.
        total = table.span(len(table) - 1).stop
        if any(len(column) != total for column in table.tokens.values()):
            raise ValueError("columns of different length")
        if any(len(column) != len(table) for column in table.rows.values()):
            raise ValueError("columns with different numbers of rows")
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ReadError(f"{path} has no recorded tokens: {error}") from None
    return table


def recorded_steps(rollouts: Path) -> Iterator[int]:
    """Yield the steps that have recorded tokens, in order."""
    for path in sorted(rollouts.glob(f"step_*[0-9]/{TOKENS}")):
        digits = path.parent.name.removeprefix("step_")
        if digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS:
            yield int(digits)
