"""Data types of a training step from the trajectory on: rows of tokens, as padded tensors.

    Trajectory -> RowBatch -> AdvantageBatch -> TrainingBatch

Axes: B rows (one per trained trajectory; several if its context was cut in between, see `concat_turns`), T tokens,
V vocabulary.

A token tensor is indexed by the token itself: `logprobs[b, t] = log p(tokens[b, t] | tokens[b, <t])`, and position
0 is always masked. Rows are right-padded, so a causal model needs no attention mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from atomrl.common.devices import to_device
from atomrl.types import Image, RaggedIds

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class RowImages:
    """The pictures of each row, in the order of their tokens: references, as pixels would take gigabytes."""

    rows: tuple[tuple[Image, ...], ...]
    """[B]"""

    @classmethod
    def of(cls, rows: Iterable[tuple[Image, ...]]) -> RowImages | None:
        """Return the pictures of rows; None if no row has any."""
        images = tuple(rows)
        return cls(images) if any(images) else None

    def select(self, index: Tensor) -> RowImages:
        """Select the rows at `index`."""
        return RowImages(tuple(self.rows[row] for row in index.tolist()))


@dataclass(frozen=True, kw_only=True)
class RolloutFields:
    """Fields that only rollouts have; those that a run does not need are None."""

    logprobs: Tensor | None = None
    """[B, T] float32, from the engine."""
    candidates: RaggedIds | None = None
    """Candidates [B, T] that each token was sampled from; all log-probs are then normalized over them."""
    response_lengths: Tensor | None = None
    """[B] int64: tokens after the prompt as sampled, before any truncation of the row. None: those of the row."""
    staleness: Tensor | None = None
    """[B, T] int32: weight versions between sampling and training of each token; 0 off the model's tokens."""
    token_rewards: Tensor | None = None
    """[B, T] float32: rewards of turns, at their last token, in addition to `rewards`. None: there are none."""
    turn_ids: Tensor | None = None
    """[B, T] int64: index of the turn in which the model wrote the token; -1 elsewhere. None: every row has one
    turn."""
    state_ids: Tensor | None = None
    """[B, T] int64: id of the environment's last output before the turn; the same id within a group means the same
    tokens (GiGPO's anchor state). -1 off the model's tokens. None: every row has one turn, after its prompt."""
    reward_parts: Tensor | None = None
    """[B, K, 2] float32: value (NaN if missing) and weight of each reward function."""
    baseline_rewards: Tensor | None = None
    """[B] float32: reward of the prompt's extra rollouts (`Trajectory.baseline_reward`); NaN if missing."""


@dataclass(frozen=True, kw_only=True)
class PreferenceFields:
    """Fields that only preferences have, of a data set or from the rewards of rollouts; those not needed are None."""

    labels: Tensor | None = None
    """[B] int64: 1 chosen or good, -1 rejected or bad, 0 neither. None: there are none yet, only rewards."""
    pair_ids: Tensor | None = None
    """[B] int64: equal for the chosen and the rejected row of a pair; -1 without a pair. None: no pairs."""
    margins: Tensor | None = None
    """[B] float32: annotated margin by which the chosen completion of the pair is better."""
    mismatched: Tensor | None = None
    """[B] bool: a prompt with the completion of another prompt (KTO's KL term), which is scored and not trained on."""


@dataclass(frozen=True, kw_only=True)
class RowBatch:
    """Rows of prompt and completion, padded on the right. Inputs that an algorithm does not need are None.

    Example: prompt (5, 6), completion (7, 8, 9), padded to T=6:
        tokens    = [5, 6, 7, 8, 9, 0]
        loss_mask = [0, 0, 1, 1, 1, 0]
        lengths   = 5
    """

    tokens: Tensor
    """[B, T] int64."""
    loss_mask: Tensor
    """[B, T] bool: True on tokens that the model wrote."""
    lengths: Tensor
    """[B] int64: tokens of the row without padding."""
    prompt_lengths: Tensor
    """[B] int64."""
    group_ids: Tensor
    """[B] int64: equal for completions of one prompt."""
    rewards: Tensor
    """[B] float32; 0 for demonstrations and preferences."""
    truncated: Tensor
    """[B] bool: the completion was truncated (at the limit on completions or on rows) or aborted."""
    cut: Tensor | None = None
    """[B] bool: the row was truncated to `train.max_row_tokens`. None: no row was."""
    trajectory_index: Tensor | None = None
    """[B] int64: index of the row's trajectory in the step. A trajectory has several rows, in order, if earlier turns
    were dropped from the model's context; each of its tokens is trained on in exactly one row."""
    recorded: Tensor | None = None
    """[B] int64: index of the row among those whose tokens are recorded; -1: not recorded. None: no row is."""
    images: RowImages | None = None
    """Pictures of the rows; None: no row has any."""
    rollout: RolloutFields = field(default_factory=RolloutFields)
    """Fields of sampled rows; all None for rows of a data set."""
    preference: PreferenceFields = field(default_factory=PreferenceFields)
    """Labels and pairs; all None for other rows. Online preference optimization sets them from rewards."""
    old_logprobs: Tensor | None = None
    """[B, T] float32, from the trainer at the start of the step. None in a step with a single update, where the
    policy's own log-probs, detached, are the old ones."""
    ref_logprobs: Tensor | None = None
    """[B, T] float32, from the frozen reference."""
    teacher_logprobs: Tensor | None = None
    """[B, T] float32, from the teacher."""
    values: Tensor | None = None
    """[B, T] float32, from the critic."""
    scores: Tensor | None = None
    """[B] float32, from the reward model that is trained."""
    old_entropy: Tensor | None = None
    """[B, T] float32: entropy in nats of the trainer's distributions at the start of the step."""
    old_squared_probs: Tensor | None = None
    """[B, T] float32: sum over the vocabulary of the trainer's squared probabilities at the start of the step."""

    @property
    def rows(self) -> int:
        return int(self.tokens.shape[0])

    def unit_ids(self, unit: Literal["row", "group", "pair"]) -> Tensor | None:
        """Return ids [B] of the units that a split into batches keeps together; None: every row is a unit.

        Args:
            unit: an algorithm's `row_unit`.
        """
        return {"row": None, "group": self.group_ids, "pair": self.pair_ids}[unit]

    @property
    def pair_ids(self) -> Tensor | None:
        """[B] int64: equal for the two rows of a pair; None without pairs (`PreferenceFields.pair_ids`)."""
        return self.preference.pair_ids

    @property
    def sampled_lengths(self) -> Tensor:
        """[B] int64: tokens after the prompt as sampled, before any truncation of the row."""
        sampled = self.rollout.response_lengths
        return self.lengths - self.prompt_lengths if sampled is None else sampled


@dataclass(frozen=True, kw_only=True)
class AdvantageBatch(RowBatch):
    """The rows of a whole step with their advantages."""

    advantages: Tensor
    """[B, T] float32, 0 off the mask, no gradient."""
    returns: Tensor | None = None
    """[B, T] float32: targets of the critic."""
    token_filter: Tensor | None = None
    """[B, T] bool: tokens that a filter over the whole step keeps in the loss."""
    rollout_is_weights: Tensor | None = None
    """[B, T] float32: importance weights against the rollout policy that need the whole step."""
    pair_ref_margins: Tensor | None = None
    """[B] float32: reference margin to compare each pair with, if it is not the pair's own (AOT sorts them)."""
    state: Mapping[str, float] = field(default_factory=dict)
    """State of the algorithm after this step, such as an adaptive KL coefficient."""


@dataclass(frozen=True, kw_only=True)
class TrainingBatch(AdvantageBatch):
    """The rows of one optimizer step with their loss weights."""

    loss_weights: Tensor
    """[B, T] float32: the loss is `(loss_weights * per_token).sum()` over all micro-batches."""


Rows = TypeVar("Rows", bound=RowBatch)
Fields = TypeVar("Fields", bound="RowBatch | RolloutFields | PreferenceFields")


def map_fields(rows: Fields, change: Callable[[str, Any], Any]) -> Fields:
    """Return the rows with `change(name, value)` for each tensor, those of `rollout` and `preference` included.

    Args:
        change: receives a `Tensor`, `RaggedIds` or `RowImages`, never None.
    """
    changes: dict[str, Any] = {}
    for name, value in vars(rows).items():
        if isinstance(value, RolloutFields | PreferenceFields):
            changes[name] = map_fields(value, change)
        elif value is not None and name != "state":
            changes[name] = change(name, value)
    return replace(rows, **changes)


_FLAT_NAMES = {"logprobs": "rollout_logprobs", "margins": "pair_margins"}
"""Names of nested fields that would be ambiguous without `rollout` or `preference` -> their flat name."""


def flat_fields(rows: RowBatch) -> dict[str, Any]:
    """Return the fields by name, with those of `rollout` and `preference` beside the others. Token records use it.

    The names are unchanged, except `rollout_logprobs` and `pair_margins`. `rows_from_fields` is the inverse.
    """
    flat = dict(vars(rows))
    nested = vars(flat.pop("rollout")) | vars(flat.pop("preference"))
    return flat | {_FLAT_NAMES.get(name, name): value for name, value in nested.items()}


def rows_from_fields(flat: Mapping[str, Any]) -> RowBatch:
    """Return rows with the fields that `flat_fields` names. Names that rows do not have are ignored.

    Example:
        >>> fields = {"tokens": torch.tensor([[5, 7]]), "rollout_logprobs": torch.zeros(1, 2)}
        >>> fields |= {"loss_mask": torch.tensor([[False, True]]), "truncated": torch.tensor([False])}
        >>> fields |= {"lengths": torch.tensor([2]), "prompt_lengths": torch.tensor([1])}
        >>> rows = rows_from_fields(fields | {"group_ids": torch.tensor([0]), "rewards": torch.tensor([1.0])})
        >>> rows.rollout.logprobs is fields["rollout_logprobs"]
        True
    """

    def known(kind: type) -> dict[str, Any]:
        names = {field.name: _FLAT_NAMES.get(field.name, field.name) for field in fields(kind)}
        return {name: flat[flat_name] for name, flat_name in names.items() if flat_name in flat}

    rollout, preference = RolloutFields(**known(RolloutFields)), PreferenceFields(**known(PreferenceFields))
    return RowBatch(**known(RowBatch), rollout=rollout, preference=preference)


def concat_turns(rows: Rows) -> Rows:
    """Concatenate the rows of each trajectory into one row: [B, T] -> [N, S].

    Advantages and loss weights are computed on the result, so that they do not depend on how many rows a trajectory
    has. Fields with one value per row take that of the trajectory's first row. `split_turns` is the inverse.

    Returns:
        `rows` itself if every trajectory has one row.

    Example:
        >>> tokens = torch.tensor([[5, 7, 8], [5, 9, 0], [6, 9, 0]])
        >>> rows = RowBatch(
        ...     tokens=tokens, loss_mask=tokens > 6, lengths=torch.tensor([3, 2, 2]), group_ids=torch.tensor([0, 0, 1]),
        ...     prompt_lengths=torch.ones(3, dtype=torch.long), rewards=torch.tensor([1.0, 1.0, 0.0]),
        ...     truncated=torch.zeros(3, dtype=torch.bool), trajectory_index=torch.tensor([0, 0, 1]),
        ... )
        >>> concat_turns(rows).tokens
        tensor([[5, 7, 8, 5, 9],
                [6, 9, 0, 0, 0]])
    """
    layout = _layout(rows)
    if layout is None:
        return rows
    inside, positions, first, lengths = layout

    def concatenated(name: str, value: Any) -> Any:
        if isinstance(value, RaggedIds):
            return None
        if isinstance(value, RowImages):
            return value.select(first)
        if value.dim() == 2:
            flat = value.new_zeros(len(lengths) * int(lengths.max()))
            return flat.index_copy(0, positions, value[inside]).view(len(lengths), -1)
        return value[first]

    return replace(map_fields(rows, concatenated), lengths=lengths)


def split_turns(whole: Tensor, rows: RowBatch) -> Tensor:
    """Split per-token values of `concat_turns(rows)` back into the rows: [N, S] -> [B, T], 0 in the padding."""
    layout = _layout(rows)
    if layout is None:
        return whole
    inside, positions, _, _ = layout
    return whole.new_zeros(inside.shape).masked_scatter(inside, whole.flatten()[positions])


def _layout(rows: RowBatch) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Compute where each token of `rows` goes in the concatenated rows [N, S] of its trajectory.

    Returns:
        None if every trajectory has one row; else
        `inside` [B, T] bool: tokens that are not padding.
        `positions` [inside.sum()]: index of each of these tokens in the flattened [N * S].
        `first` [N]: the first row of each trajectory.
        `lengths` [N]: tokens of each trajectory.
    """
    import torch

    if rows.trajectory_index is None:
        return None
    trajectories, number = torch.unique(rows.trajectory_index, return_inverse=True)
    if len(trajectories) == rows.rows:
        return None
    order, counts = number.argsort(stable=True), torch.bincount(number)
    first = order[counts.cumsum(0) - counts]
    # Start of each row: the tokens of all rows before it in trajectory order, less those before its trajectory.
    before = rows.lengths[order].cumsum(0) - rows.lengths[order]
    starts = torch.empty_like(before).index_copy(0, order, before)
    lengths = torch.zeros_like(trajectories).index_add(0, number, rows.lengths)
    columns = torch.arange(rows.tokens.shape[1])
    inside = columns < rows.lengths[:, None]
    positions = number[:, None] * lengths.max() + (starts - starts[first][number])[:, None] + columns
    return inside, positions[inside], first, lengths


ON_THE_HOST = frozenset({"labels", "pair_ids"})
"""Fields that stay on the CPU: a loss counts rows with them, and reading them from the GPU would force a sync."""


def batch_to_device(rows: Rows, device: torch.device) -> Rows:
    """Copy the rows to a device without waiting, except the fields in `ON_THE_HOST`."""

    def copied(name: str, value: Any) -> Any:
        if isinstance(value, RaggedIds):
            return RaggedIds(to_device(value.counts, device), to_device(value.ids, device))
        return value if name in ON_THE_HOST or isinstance(value, RowImages) else to_device(value, device)

    return map_fields(rows, copied)


def select_rows(batch: Rows, index: Tensor) -> Rows:
    """Select the rows at `index` ([N] int64), truncated to the longest of them."""
    longest = int(batch.lengths[index].max()) if len(index) else 0

    def selected(name: str, value: Any) -> Any:
        if isinstance(value, RaggedIds):
            return value.select(index, longest)
        if isinstance(value, RowImages):
            return value.select(index)
        return value[index, :longest] if value.dim() == 2 else value[index]

    return map_fields(batch, selected)


# --------------------------------------------------------------------------------------------------------------------
# Split rows into micro-batches by a token budget.


def micro_batches(
    lengths: Tensor,
    group_ids: Tensor | None,
    tokens_per_micro_batch: int,
    rows_per_micro_batch: int | None = None,
    ranks: int = 1,
) -> list[Tensor]:
    """Split rows of similar length into micro-batches within a budget of padded tokens.

    A row (or group) that exceeds the budget by itself is its own micro-batch. For several ranks the number of
    micro-batches is a multiple of theirs, and all are of similar size, so that no rank waits for one with more of them;
    there are fewer if there are fewer rows (or groups) than ranks.

    Args:
        lengths: [B] tokens of each row.
        group_ids: [B]; rows with the same id stay together. None: rows are independent.
        tokens_per_micro_batch: maximum number of rows times the longest of them.
        rows_per_micro_batch: maximum number of rows; None: no limit.
        ranks: data-parallel ranks that share the micro-batches.

    Returns:
        Row indices of each micro-batch, longest rows first; every row once.

    Example:
        >>> micro_batches(torch.tensor([2, 9, 3, 8]), None, tokens_per_micro_batch=18)
        [tensor([1, 3]), tensor([2, 0])]
        >>> micro_batches(torch.tensor([8, 4, 4, 2, 2, 2]), None, tokens_per_micro_batch=99, ranks=2)
        [tensor([0, 1]), tensor([2, 3, 4, 5])]
    """
    import torch

    sizes = lengths.tolist()
    units: dict[int, list[int]] = {}
    for row, unit in enumerate(range(len(sizes)) if group_ids is None else group_ids.tolist()):
        units.setdefault(unit, []).append(row)
    ordered = sorted(units.values(), key=lambda rows: -max(sizes[row] for row in rows))
    most_rows = rows_per_micro_batch or len(sizes)

    def split(budget: int) -> list[list[int]]:
        batches: list[list[int]] = []
        longest = 0
        for rows in ordered:
            together = len(batches[-1]) + len(rows) if batches else 0
            if not batches or together * longest > budget or together > most_rows:
                batches.append(list(rows))
                longest = max(sizes[row] for row in rows)  # of the whole micro-batch: later ones are shorter
            else:
                batches[-1] += rows
        return batches

    low = high = tokens_per_micro_batch
    if ranks > 1:  # search the smallest budget with no more micro-batches than the next multiple of the ranks
        wanted, low = -(-len(split(high)) // ranks) * ranks, 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(split(middle)) <= wanted else (middle + 1, high)
    return [torch.tensor(batch) for batch in split(high)]


def padded_tokens(lengths: Tensor, index: Tensor) -> int:
    """Return the padded tokens of the rows at `index`: their number times the longest of them.

    Example:
        >>> padded_tokens(torch.tensor([2, 9, 3, 8]), torch.tensor([0, 3]))
        16
    """
    return len(index) * int(lengths[index].max())


def group_pieces(
    lengths: Tensor, group_ids: Tensor, tokens_per_micro_batch: int, rows_per_micro_batch: int | None = None
) -> Tensor:
    """Keep the rows of a group together as far as the budget allows, because a shared prompt is computed once.

    Args:
        lengths: [B] tokens of each row.
        group_ids: [B] group of each row.
        tokens_per_micro_batch: maximum number of rows times the longest of them.
        rows_per_micro_batch: maximum number of rows; None: no limit.

    Returns:
        [B] piece ids: the same for rows to keep together. A group over the budget is split into equal pieces.

    Example:
        >>> group_pieces(torch.tensor([5, 5, 5, 5, 2, 2]), torch.tensor([7, 7, 7, 7, 8, 8]), 10)
        tensor([0, 0, 1, 1, 2, 2])
    """
    import torch

    pieces, number = torch.empty_like(group_ids), 0
    for group in sorted(set(group_ids.tolist())):
        rows = (group_ids == group).nonzero()[:, 0]
        rows = rows[lengths[rows].argsort(descending=True, stable=True)]
        most = max(1, min(tokens_per_micro_batch // max(1, int(lengths[rows[0]])), rows_per_micro_batch or len(rows)))
        parts = -(-len(rows) // most)
        pieces[rows] = number + torch.arange(len(rows)) // -(-len(rows) // parts)
        number += parts
    return pieces


def zero_weight_row(rows: Rows) -> Rows:
    """Return the first row with loss mask and loss weights 0, for a rank that has no rows left."""
    import torch

    row = select_rows(rows, torch.tensor([0]))
    off: dict[str, Any] = {
        name: torch.zeros_like(getattr(row, name)) for name in ("loss_mask", "loss_weights") if hasattr(row, name)
    }
    return replace(row, **off)
