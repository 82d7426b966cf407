"""Loss aggregation, what the loss is a mean of: mask [B, T] and group ids [B] of an update -> weights [B, T]."""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import PositiveInt
from torch import Tensor

from atomrl.atoms import reductions
from atomrl.objectives.choice import Choice, Setting
from atomrl.protocols import RowUnit


class LossAggChoice(Choice):
    """What all aggregations have in common."""

    row_unit: ClassVar[RowUnit] = "row"
    """What a split into updates or micro-batches keeps together."""

    def __call__(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        return self.atom(mask, **self.settings)


def one_ratio_per_row(setting: Setting) -> bool:
    """Whether all tokens of a completion have the same loss."""
    return bool(setting.axes["ratio"].type == "sequence" or setting.axes["clip"].type == "gmpo")


class TokenMean(LossAggChoice, type="token_mean"):
    """The mean over all tokens of the optimizer step."""

    atom = staticmethod(reductions.token_mean)

    def warnings(self, setting: Setting) -> Iterator[str]:
        if one_ratio_per_row(setting):
            yield "biased: a completion's one ratio is counted once a token, so long completions weigh more"


class SequenceMean(LossAggChoice, type="sequence_mean"):
    """The mean over completions of their means over tokens."""

    atom = staticmethod(reductions.sequence_mean)

    def warnings(self, setting: Setting) -> Iterator[str]:
        if not one_ratio_per_row(setting):
            yield "biased: a sequence mean weighs a token of a long completion less, so long wrong answers cost little"


class ConstantLength(LossAggChoice, type="constant_length"):
    """The mean over completions of their sums over tokens divided by a constant: Dr. GRPO.

    `length` is in tokens, the rollout's limit unless given.
    """

    length: PositiveInt | None = None
    atom = staticmethod(reductions.constant_length)


class PromptMean(LossAggChoice, type="prompt_mean"):
    """The mean over prompts of their means over all tokens of their completions. A prompt's rows stay in one update."""

    row_unit = "group"
    made_of = (reductions.group_token_mean,)

    def __call__(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        return reductions.group_token_mean(mask, group_ids)


LossAgg = TokenMean | SequenceMean | ConstantLength | PromptMean
