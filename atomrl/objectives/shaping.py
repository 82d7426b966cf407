"""Before the advantages: reward shaping, and filtering of groups (dynamic sampling)."""

from collections.abc import Iterator, Sequence
from typing import Self

import torch
from pydantic import FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator
from torch import Tensor

from atomrl.atoms import Formula
from atomrl.atoms.shaping import clipped_reward, repetition_penalty, soft_overlong_penalty
from atomrl.batches import RowBatch
from atomrl.objectives.choice import Atoms, Choice, Setting, default


class Shaping(Choice, type="penalties"):
    """Reward shaping: penalties for length and repetition, then bounds.

    `mask_truncated` is DAPO's overlong filtering: no loss on truncated completions. By default,
    `max_completion_tokens` is the rollout's, and `overlong_buffer_tokens` a fifth of it.
    """

    soft_overlong: bool = False
    max_completion_tokens: PositiveInt | None = None
    overlong_buffer_tokens: PositiveInt | None = None
    overlong_penalty: NonNegativeFloat = default(soft_overlong_penalty, "factor")
    repetition_ngram_tokens: NonNegativeInt = 0
    repetition_weight: NonNegativeFloat = 1.0
    lowest: FiniteFloat | None = None
    highest: FiniteFloat | None = None
    mask_truncated: bool = False

    def atoms(self) -> Atoms:
        overlong = (soft_overlong_penalty,) if self.soft_overlong else ()
        repeated = (repetition_penalty,) if self.repetition_ngram_tokens else ()
        return *overlong, *repeated, *((clipped_reward,) if self.bounded else ())

    @property
    def bounded(self) -> bool:
        """Rewards have a lower or an upper bound."""
        return self.lowest is not None or self.highest is not None

    @property
    def changes_rewards(self) -> bool:
        """Rewards may differ before and after shaping."""
        return self.soft_overlong or self.repetition_ngram_tokens > 0 or self.bounded

    @model_validator(mode="after")
    def _bounds_and_buffer(self) -> Self:
        if self.lowest is not None and self.highest is not None and self.lowest > self.highest:
            raise ValueError(f"lowest={self.lowest} is above highest={self.highest}")
        limit, buffer = self.max_completion_tokens, self.overlong_buffer_tokens
        if self.soft_overlong and limit and buffer and buffer > limit:
            raise ValueError(f"overlong_buffer_tokens={buffer} must be within 1 to max_completion_tokens={limit}")
        return self

    def __call__(self, rows: RowBatch) -> Tensor:
        """Rows of a step -> rewards [B]."""
        rewards, limit = rows.rewards, self.max_completion_tokens
        if self.soft_overlong:
            assert limit is not None, "`PolicyObjective.resolved` fills it in"
            buffer = self.overlong_buffer_tokens or max(1, limit // 5)
            penalty = soft_overlong_penalty(rows.sampled_lengths, limit, buffer, self.overlong_penalty)
            rewards = rewards + penalty.to(rewards)
        if self.repetition_ngram_tokens:
            ngram, weight = self.repetition_ngram_tokens, -self.repetition_weight
            rewards = rewards + repetition_penalty(rows.tokens, rows.loss_mask, ngram, weight).to(rewards)
        if self.bounded:
            low, high = (-torch.inf if self.lowest is None else self.lowest), self.highest
            rewards = clipped_reward(rewards, low, torch.inf if high is None else high)
        return rewards

    def where(self) -> tuple[Formula, ...]:
        terms = {"overlong": self.soft_overlong, "repetition": self.repetition_ngram_tokens}
        added = [name for name, on in terms.items() if on]
        text = " + ".join(["r_i", *(f"{name}_i" for name in added)])
        latex = " + ".join(["r_i", *(rf"p^{{\mathrm{{{name}}}}}_i" for name in added)])
        if self.bounded:
            text, latex = f"clip({text})", rf"\operatorname{{clip}}({latex})"
        lines = [Formula(f"r_i <- {text}", rf"r_i \leftarrow {latex}")] if self.changes_rewards else []
        if self.mask_truncated:
            lines.append(Formula("w_{i,t} = 0 where cut off", r"w_{i,t} = 0 \text{ where } o_i \text{ is cut off}"))
        return tuple(lines)

    def warnings(self, setting: Setting) -> Iterator[str]:
        if self.mask_truncated and self.soft_overlong:
            yield "partly without effect: completions cut off have no loss, so the penalty only moves baselines"


class MixedOutcomes(Choice, type="mixed_outcomes"):
    """Dynamic sampling: reject groups whose rewards, before shaping, are all equal, and sample others instead."""

    text = "over groups with min_group r < max_group r"
    latex = r"\text{over groups with } \min_{g} r < \max_{g} r"

    def __call__(self, rewards: Sequence[float]) -> bool:
        """Return True if a group with these rewards is trained on.

        Example:
            >>> accepts = MixedOutcomes()
            >>> accepts([0.0, 1.0]), accepts([1.0, 1.0]), accepts([1.0]), accepts([])
            (True, False, False, False)
        """
        return len(rewards) > 1 and min(rewards) < max(rewards)

    def warnings(self, setting: Setting) -> Iterator[str]:
        if setting.completions_per_prompt == 1:
            yield "no effect: groups of one are never mixed, so dynamic sampling would refuse all and stop the run"
        advantage = setting.axes.get("advantage")
        if advantage is not None and not advantage.group_baseline:
            yield f"biased: dynamic sampling leaves out groups that {advantage.type} would have learned from"


GroupFilter = MixedOutcomes
