"""The data of a training step from the trajectory on: rows of tokens, as tensors.

    Trajectory -> RowBatch -> AdvantageBatch -> TrainingBatch

Axes: B rows (one per trajectory that is trained on, or several: `end_to_end`), T tokens, V vocabulary.

A token tensor is indexed by the token itself: `logprobs[b, t] = log p(tokens[b, t] | tokens[b, <t])`, and position
0 is always masked. Rows are right-padded, so a causal model needs no attention mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from atomrl.common.threads import sent
from atomrl.types import RaggedIds

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RowBatch:
    """Prompt and completion in one right-padded row.

    Example: prompt (5, 6), completion (7, 8, 9), padded to T=6:
        tokens    = [5, 6, 7, 8, 9, 0]
        loss_mask = [0, 0, 1, 1, 1, 0]
        lengths   = 5
    """

    tokens: Tensor
    """[B, T] int64."""
    loss_mask: Tensor
    """[B, T] bool: what the model wrote."""
    lengths: Tensor
    """[B] int64: tokens of the row without padding."""
    prompt_lengths: Tensor
    """[B] int64."""
    group_ids: Tensor
    """[B] int64: equal for completions of one prompt."""
    rewards: Tensor
    """[B] float32; 0 for demonstrations and preferences, which come from the data and earn nothing."""
    truncated: Tensor
    """[B] bool: it did not end by itself: cut at the limit on completions or on rows, or called off."""
    cut: Tensor | None = None
    """[B] bool: the row was cut at the limit on rows. None: it was not."""
    response_lengths: Tensor | None = None
    """[B] int64: tokens after the prompt as sampled, also where the row was cut. None: those of the row."""
    trajectory_index: Tensor | None = None
    """[B] int64: which of the step's trajectories the row is. Several rows are of one, in their order, where its
    model no longer saw all that had come before; each of its tokens is trained on in one of them."""
    recorded: Tensor | None = None
    """[B] int64: the row's number among those whose tokens are recorded; -1: they are not. None: no row's are."""
    staleness: Tensor | None = None
    """[B, T] int32: versions between the weights that wrote each token and the trainer's; 0 off the model's tokens."""
    token_rewards: Tensor | None = None
    """[B, T] float32 beside `rewards`: what an environment gave at a token. None: nothing."""
    turn_ids: Tensor | None = None
    """[B, T] int64: in which of the trajectory's turns, from 0, the model wrote the token; -1 where it did not. None:
    every row has one turn."""
    state_ids: Tensor | None = None
    """[B, T] int64: what the environment had last shown when the turn began, equal for equal tokens of a group and
    for no others; -1 where the model did not write the token. None: every row has one turn, after its prompt."""
    rollout_logprobs: Tensor | None = None
    """[B, T] float32, from the engine."""
    candidates: RaggedIds | None = None
    """Of [B, T]: the tokens that each token was drawn from, over which all log-probs then are."""
    old_logprobs: Tensor | None = None
    """[B, T] float32, from the trainer at the start of the step. None on a step with a single update, where they
    are the log-probs themselves."""
    ref_logprobs: Tensor | None = None
    """[B, T] float32, from the frozen reference."""
    teacher_logprobs: Tensor | None = None
    """[B, T] float32, from the teacher."""
    values: Tensor | None = None
    """[B, T] float32, from the critic."""
    scores: Tensor | None = None
    """[B] float32, from the reward model that is trained."""
    old_entropy: Tensor | None = None
    """[B, T] float32, nats of the trainer's distributions at the start of the step."""
    reward_parts: Tensor | None = None
    """[B, K, 2] float32: value (NaN where missing) and weight of each part of the reward."""
    baseline_rewards: Tensor | None = None
    """[B] float32: of the extra rollout of the row's prompt; NaN where missing."""
    labels: Tensor | None = None
    """[B] int64, of preferences: 1 chosen or good, -1 rejected or bad, 0 neither; None for rollouts."""
    pair_ids: Tensor | None = None
    """[B] int64, of preferences: equal for the chosen and the rejected row of a pair; -1 for rows of no pair."""
    pair_margins: Tensor | None = None
    """[B] float32, of preferences: by how much the data says that the chosen completion of the pair is better."""
    mismatched: Tensor | None = None
    """[B] bool, of preferences: a prompt with the completion of another one, which is scored and not trained on."""

    @property
    def rows(self) -> int:
        return int(self.tokens.shape[0])

    def unit_ids(self, unit: Literal["row", "group", "pair"]) -> Tensor | None:
        """[B] what a split keeps together has the same number; None where every row stands for itself.

        Args:
            unit: an algorithm's `row_unit`.
        """
        return {"row": None, "group": self.group_ids, "pair": self.pair_ids}[unit]

    @property
    def sampled_lengths(self) -> Tensor:
        """[B] int64: tokens after the prompt as sampled, whatever was cut off the row."""
        return self.lengths - self.prompt_lengths if self.response_lengths is None else self.response_lengths


@dataclass(frozen=True, kw_only=True)
class AdvantageBatch(RowBatch):
    """Rows with what an algorithm made of a whole step."""

    advantages: Tensor
    """[B, T] float32, 0 off the mask, no gradient."""
    returns: Tensor | None = None
    """[B, T] float32: what a critic is fitted to."""
    token_filter: Tensor | None = None
    """[B, T] bool: tokens that the algorithm chose out of the whole step."""
    rollout_is_weights: Tensor | None = None
    """[B, T] float32: importance weights against the rollout policy that take the whole step."""
    pair_ref_margins: Tensor | None = None
    """[B] float32: the reference's margin that a pair is compared with, where it is not the pair's own."""
    state: Mapping[str, float] = field(default_factory=dict)
    """What the algorithm keeps from step to step, as it is after this one (an adaptive KL coefficient)."""


@dataclass(frozen=True, kw_only=True)
class TrainingBatch(AdvantageBatch):
    """The rows of exactly one optimizer step, with their weights in the loss."""

    loss_weights: Tensor
    """[B, T] float32: the loss is `(loss_weights * per_token).sum()` over all micro-batches."""


Rows = TypeVar("Rows", bound=RowBatch)


def end_to_end(rows: Rows) -> Rows:
    """Trajectories as one row each: the rows of a trajectory one behind the other, and of what there is once for each
    row that of its first. So advantages and loss weights are a trajectory's, however many rows it has.

    Returns:
        The same rows where every trajectory has one.

    Example:
        >>> import torch
        >>> from tests.algorithms.batches import make_rows
        >>> rows = replace(make_rows(groups=1), trajectory_index=torch.tensor([0, 0, 1, 2]))
        >>> end_to_end(rows).rows, end_to_end(rows).lengths[0] == rows.lengths[:2].sum()
        (3, tensor(True))
    """
    laid = _laid(rows)
    if laid is None:
        return rows
    inside, places, first, lengths = laid
    changes: dict[str, Any] = {"lengths": lengths}
    for name, value in vars(rows).items():
        if name not in ("state", "lengths") and value is not None:
            if isinstance(value, RaggedIds):
                changes[name] = None
            elif value.dim() == 2:
                flat = value.new_zeros(len(lengths) * int(lengths.max()))
                changes[name] = flat.index_copy(0, places, value[inside]).view(len(lengths), -1)
            else:
                changes[name] = value[first]
    return replace(rows, **changes)


def taken_apart(whole: Tensor, rows: RowBatch) -> Tensor:
    """What there is of each token of `end_to_end(rows)`, as one of each token of the rows: [N, S] -> [B, T]; 0 in the
    padding."""
    laid = _laid(rows)
    if laid is None:
        return whole
    inside, places, _, _ = laid
    return whole.new_zeros(inside.shape).masked_scatter(inside, whole.flatten()[places])


ON_THE_HOST = frozenset({"labels", "pair_ids", "state"})
"""What a loss looks up on the host: it says how many rows of a kind there are, and a device would have to be asked."""


def moved(rows: Rows, device: torch.device) -> Rows:
    """Rows as a loss takes them: on the device, but for what is `ON_THE_HOST`."""
    changes: dict[str, Any] = {}
    for name, value in vars(rows).items():
        if isinstance(value, RaggedIds):
            changes[name] = RaggedIds(sent(value.counts, device), sent(value.ids, device))
        elif value is not None and name not in ON_THE_HOST:
            changes[name] = sent(value, device)
    return replace(rows, **changes)


def _laid(rows: RowBatch) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Where the tokens of rows are when each trajectory is laid end to end: [B, T] which are no padding; the place of
    each of those, flat; [N] the first row of each trajectory, and how long it then is. None: each has one row."""
    import torch

    if rows.trajectory_index is None:
        return None
    names, number = torch.unique(rows.trajectory_index, return_inverse=True)
    if len(names) == rows.rows:
        return None
    order, counts = number.argsort(stable=True), torch.bincount(number)
    first = order[counts.cumsum(0) - counts]
    before = rows.lengths[order].cumsum(0) - rows.lengths[order]
    starts = torch.empty_like(before).index_copy(0, order, before)
    lengths = torch.zeros_like(names).index_add(0, number, rows.lengths)
    columns = torch.arange(rows.tokens.shape[1])
    inside = columns < rows.lengths[:, None]
    places = number[:, None] * lengths.max() + (starts - starts[first][number])[:, None] + columns
    return inside, places[inside], first, lengths


def select_rows(batch: Rows, index: Tensor) -> Rows:
    """The rows at `index` ([N] int64), cut to the longest of them."""
    longest = int(batch.lengths[index].max()) if len(index) else 0
    changes: dict[str, Any] = {}
    for name, value in vars(batch).items():
        if isinstance(value, RaggedIds):
            changes[name] = value.select(index, longest)
        elif value is not None and name != "state":
            changes[name] = value[index, :longest] if value.dim() == 2 else value[index]
    return replace(batch, **changes)
