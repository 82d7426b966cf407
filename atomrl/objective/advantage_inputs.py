"""What advantages are made of: rewards of a whole step, by completion and by token."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from atomrl.atoms.masks import row_sum
from atomrl.atoms.shaping import kl_penalised_reward, reward_at_last_token
from atomrl.objective.choice import Choice, Setting

Found = TypeVar("Found")


@dataclass(frozen=True)
class AdvantageInputs:
    """The inputs of an advantage: all rows of a step that have a reward, after shaping, on the CPU. The first two are
    enough for most.

    A row is a completion; those of one prompt need not be neighbours, and a group lacks those whose reward failed.
    Numbers are float32, ids int64; log-probs are in nats, each of the token itself, and 0 off the mask. No gradient is
    kept. Those that `reads` can name are None elsewhere.
    """

    rewards: Tensor
    """[B] the weighted sum of the rewards of each completion."""
    group_ids: Tensor
    """[B] equal for completions of one prompt."""
    mask: Tensor | None = None
    """[B, T] bool: the tokens that the model wrote."""
    token_rewards: Tensor | None = None
    """[B, T] rewards that an environment gave at a token, beside `rewards`. None: it gave none."""
    turn_ids: Tensor | None = None
    """[B, T] the turn that each token is of, from 0; -1 off the model's. None: every row has one turn."""
    state_ids: Tensor | None = None
    """[B, T] the state in which the token's turn began: equal where the environment had last shown the same; -1 off
    the model's tokens. None: every row has one turn."""
    kl_penalty: Tensor | None = None
    """[B, T] beta KL of each token. None unless `kl.apply_to` is `reward`."""
    parts: Tensor | None = None
    """[B, K, 2] value (NaN where missing) and weight of each of the K parts of the reward."""
    baseline_rewards: Tensor | None = None
    """[B] the reward of the extra rollout of each row's prompt (ReMax); NaN where missing. None: there is none."""
    values: Tensor | None = None
    """[B, T] the critic's, before each token, in units of the reward."""
    old_logprobs: Tensor | None = None
    """[B, T] of the policy at the start of the step."""
    old_entropy: Tensor | None = None
    """[B, T] entropy of the distribution that the token was drawn from, at the start of the step, in nats."""
    ref_logprobs: Tensor | None = None
    """[B, T] of the frozen reference."""
    teacher_logprobs: Tensor | None = None
    """[B, T] of the teacher."""

    @property
    def totals(self) -> Tensor:
        """[B] the reward of the whole completion: outcome and token rewards, less the penalties for leaving the
        reference."""
        rewards = self.rewards if self.token_rewards is None else self.rewards + self.token_rewards.sum(1)
        if self.kl_penalty is None:
            return rewards
        return kl_penalised_reward(rewards[:, None], row_sum(self.kl_penalty, given(self.mask))[:, None], 1.0)[:, 0]

    @property
    def by_token(self) -> Tensor:
        """[B, T] the outcome at the last token that the model wrote, and token rewards, less each token's penalty."""
        return self._with_token_rewards(reward_at_last_token(self.rewards, given(self.mask)))

    @property
    def beside_outcome(self) -> Tensor:
        """[B, T] token rewards, less each token's penalty."""
        return self._with_token_rewards(torch.zeros_like(given(self.mask), dtype=self.rewards.dtype))

    def _with_token_rewards(self, rewards: Tensor) -> Tensor:
        mask = given(self.mask)
        if self.token_rewards is not None:
            rewards = rewards + on_written_tokens(self.token_rewards, mask)
        return rewards if self.kl_penalty is None else kl_penalised_reward(rewards, self.kl_penalty, 1.0, mask)

    @property
    def turns(self) -> Tensor:
        """[B, T] the turn of each token that is trained, -1 elsewhere."""
        mask = given(self.mask)
        turn_ids = torch.zeros_like(mask, dtype=torch.long) if self.turn_ids is None else self.turn_ids
        return turn_ids.masked_fill(~mask, -1)

    @property
    def states(self) -> Tensor:
        """[B, T] the state in which each token's turn began; where every row has one turn, its group."""
        mask = given(self.mask)
        state_ids = self.group_ids[:, None].expand_as(mask) if self.state_ids is None else self.state_ids
        return state_ids.masked_fill(~mask, -1)


class AdvantagesAndReturns(NamedTuple):
    """Advantages with what a critic is fitted to, both [B, T]."""

    advantages: Tensor
    returns: Tensor


def given(found: Found | None) -> Found:
    """What `needs` asks for is there."""
    assert found is not None, "the back end computes what `needs` names"
    return found


def on_written_tokens(rewards: Tensor, mask: Tensor) -> Tensor:
    """Token rewards [B, T] on tokens of the model alone: one at a token of the environment goes to the model's last
    token before it, and one before the model's first token to that.

    Example:
        >>> mask = torch.tensor([[False, True, False, True]])
        >>> on_written_tokens(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), mask)
        tensor([[0., 6., 0., 4.]])
    """
    places = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    last = places.masked_fill(~mask, -1).cummax(1).values
    target = torch.where(last < 0, mask.int().argmax(1, keepdim=True), last)
    return torch.zeros_like(rewards).scatter_add(1, target, rewards) * mask


class AdvantageChoice(Choice):
    """What all advantages have in common."""

    by_token: ClassVar[bool] = False
    """Whether it is made of rewards by token."""
    group_baseline: ClassVar[bool] = False
    """Whether a completion is compared with the others of its prompt."""
    extra_rollouts: ClassVar[Mapping[str, Any] | None] = None
    """Completions that only serve as a baseline, as changes of the sampling parameters."""

    def warnings(self, setting: Setting) -> Iterator[str]:
        if self.group_baseline and setting.completions_per_prompt == 1:
            what = self.type
            yield f"no effect: one completion per prompt has nothing to be compared with; {what} is always 0"

    def discounted_away(self, gamma: float, setting: Setting) -> Iterator[str]:
        """Whether a discount leaves the first token anything."""
        left = gamma**setting.max_completion_tokens
        if left < 0.1:
            tokens = setting.max_completion_tokens
            yield f"biased: with gamma={gamma} a reward after {tokens} tokens is {left:.1g} at the first"
