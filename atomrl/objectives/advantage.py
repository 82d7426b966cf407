"""Advantage estimators: rewards of a whole step -> advantages per completion or per token.

To add one: write a class here with its equation, and add it to one of the unions at the end that make up `Advantage`
(docs/guides/add_an_algorithm.md lists the other files). A function of your own needs neither:
`advantage: {type: custom, function: "my_module:my_advantage"}`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from atomrl.atoms import Formula, advantages
from atomrl.atoms.advantages import group_mean_baseline, group_std, group_zscore, per_token
from atomrl.atoms.kl import k1_kl
from atomrl.atoms.masks import masked_whiten, row_sum
from atomrl.atoms.returns import (
    at_last_turn,
    discounted_returns,
    gae,
    last_turn,
    length_adaptive_lambda,
    per_turn_token,
    turn_numbers,
    turn_returns,
    turn_states,
    turn_totals,
)
from atomrl.atoms.shaping import (
    clipped_reward,
    kl_penalised_reward,
    repetition_penalty,
    reward_at_last_token,
    soft_overlong_penalty,
    weighted_reward,
)
from atomrl.batches import RowBatch
from atomrl.objectives.choice import Atoms, Choice, Custom, Setting, default, not_none

# --------------------------------------------------------------------------------------------------------------------
# Before the advantages: reward shaping, and filtering of groups (dynamic sampling).


class Shaping(Choice, type="penalties"):
    """Reward shaping: penalties for length and repetition, then bounds."""

    text = ""
    soft_overlong: bool = False
    """Penalize long completions, growing over the last tokens before the limit (DAPO)."""
    max_completion_tokens: PositiveInt | None = None
    """The limit; null: the rollout's."""
    overlong_buffer_tokens: PositiveInt | None = None
    """Tokens before the limit at which the penalty starts; null: a fifth of the limit."""
    overlong_penalty: NonNegativeFloat = default(soft_overlong_penalty, "factor")
    """Penalty at the limit."""
    repetition_ngram_tokens: NonNegativeInt = 0
    """Size of the n-grams whose repetition is penalized; 0: no penalty."""
    repetition_weight: NonNegativeFloat = 1.0
    """Maximum penalty for repetition."""
    lowest: FiniteFloat | None = None
    """Lower bound of the reward."""
    highest: FiniteFloat | None = None
    """Upper bound of the reward."""
    mask_truncated: bool = False
    """No loss on truncated completions (DAPO's overlong filtering)."""

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
            yield "no effect: groups of one are never mixed, so dynamic sampling would reject all and stop the run"
        advantage = setting.axes.get("advantage")
        if advantage is not None and not advantage.group_baseline:
            yield f"biased: dynamic sampling drops groups that {advantage.type} could learn from"


GroupFilter = MixedOutcomes


Discount = Annotated[float, Field(ge=0, le=1)]

# --------------------------------------------------------------------------------------------------------------------
# Inputs and results.


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an advantage: all rows of a step that have a reward, after shaping, on the CPU.

    Most estimators need only the first two. A row is a completion; completions of one prompt need not be adjacent, and
    those whose reward failed are missing. Numbers are float32, ids int64, without gradient. Log-probs are in nats,
    indexed by the token itself, and 0 off the mask. Fields that `reads` of a custom advantage can name are None
    otherwise.
    """

    rewards: Tensor
    """[B] weighted sum of the rewards of each completion."""
    group_ids: Tensor
    """[B] equal for completions of one prompt."""
    mask: Tensor | None = None
    """[B, T] bool: tokens written by the model."""
    token_rewards: Tensor | None = None
    """[B, T] an environment's rewards at tokens, in addition to `rewards`. None if it returned none."""
    turn_ids: Tensor | None = None
    """[B, T] turn of each token, from 0; -1 off the model's tokens. None if every row has one turn."""
    state_ids: Tensor | None = None
    """[B, T] state at the start of the token's turn: equal if the environment's last observation was the same; -1 off
    the model's tokens. None if every row has one turn."""
    kl_penalty: Tensor | None = None
    """[B, T] beta KL of each token. None unless `kl.apply_to` is `reward`."""
    parts: Tensor | None = None
    """[B, K, 2] value (NaN where missing) and weight of each of the K parts of the reward."""
    baseline_rewards: Tensor | None = None
    """[B] reward of the extra rollout of each row's prompt (ReMax); NaN where missing. None without extra rollouts."""
    values: Tensor | None = None
    """[B, T] the critic's values before each token, in reward units."""
    old_logprobs: Tensor | None = None
    """[B, T] log-probs of the policy at the start of the step."""
    old_entropy: Tensor | None = None
    """[B, T] entropy in nats of the distribution that the token was sampled from, at the start of the step."""
    old_squared_probs: Tensor | None = None
    """[B, T] sum over the vocabulary of the squared probabilities at the token, at the start of the step."""
    ref_logprobs: Tensor | None = None
    """[B, T] log-probs of the frozen reference."""
    teacher_logprobs: Tensor | None = None
    """[B, T] log-probs of the teacher."""

    @property
    def totals(self) -> Tensor:
        """[B] reward of the whole completion: outcome and token rewards, minus its KL penalty."""
        rewards = self.rewards if self.token_rewards is None else self.rewards + self.token_rewards.sum(1)
        if self.kl_penalty is None:
            return rewards
        return kl_penalised_reward(rewards[:, None], row_sum(self.kl_penalty, not_none(self.mask))[:, None], 1.0)[:, 0]

    @property
    def by_token(self) -> Tensor:
        """[B, T] outcome at the model's last token, plus token rewards, minus each token's KL penalty."""
        return self._with_token_rewards(reward_at_last_token(self.rewards, not_none(self.mask)))

    @property
    def beside_outcome(self) -> Tensor:
        """[B, T] token rewards minus each token's KL penalty, without the outcome."""
        return self._with_token_rewards(torch.zeros_like(not_none(self.mask), dtype=self.rewards.dtype))

    def _with_token_rewards(self, rewards: Tensor) -> Tensor:
        mask = not_none(self.mask)
        if self.token_rewards is not None:
            rewards = rewards + on_written_tokens(self.token_rewards, mask)
        return rewards if self.kl_penalty is None else kl_penalised_reward(rewards, self.kl_penalty, 1.0, mask)

    @property
    def turns(self) -> Tensor:
        """[B, T] turn of each trained token, -1 elsewhere."""
        mask = not_none(self.mask)
        turn_ids = torch.zeros_like(mask, dtype=torch.long) if self.turn_ids is None else self.turn_ids
        return turn_ids.masked_fill(~mask, -1)

    @property
    def states(self) -> Tensor:
        """[B, T] state at the start of each token's turn; the group if every row has one turn."""
        mask = not_none(self.mask)
        state_ids = self.group_ids[:, None].expand_as(mask) if self.state_ids is None else self.state_ids
        return state_ids.masked_fill(~mask, -1)


class AdvantagesAndReturns(NamedTuple):
    """Advantages, and the critic's targets, [B, T] each."""

    advantages: Tensor
    returns: Tensor


def on_written_tokens(rewards: Tensor, mask: Tensor) -> Tensor:
    """Move token rewards [B, T] to tokens of the model.

    A reward at a token of the environment moves to the model's last token before it, or to the model's first token if
    there is none.

    Example:
        >>> mask = torch.tensor([[False, True, False, True]])
        >>> on_written_tokens(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), mask)
        tensor([[0., 6., 0., 4.]])
    """
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    last = positions.masked_fill(~mask, -1).cummax(1).values
    target = torch.where(last < 0, mask.int().argmax(1, keepdim=True), last)
    return torch.zeros_like(rewards).scatter_add(1, target, rewards) * mask


class AdvantageChoice(Choice):
    """Base class of advantages: `AdvantageInputs` -> [B] or [B, T], or `AdvantagesAndReturns`."""

    uses_token_rewards: ClassVar[bool] = False
    """It uses rewards per token."""
    group_baseline: ClassVar[bool] = False
    """It compares a completion with the others of its prompt."""
    extra_rollouts: ClassVar[Mapping[str, Any] | None] = None
    """Sampling parameters of additional completions that serve as a baseline only."""

    def warnings(self, setting: Setting) -> Iterator[str]:
        if self.group_baseline and setting.completions_per_prompt == 1:
            name = self.type
            yield f"no effect: one completion per prompt cannot be compared; {name} is always 0"

    def discount_warning(self, gamma: float, setting: Setting) -> Iterator[str]:
        """Warn if the discount of the first token is below 0.1."""
        left = gamma**setting.max_completion_tokens
        if left < 0.1:
            tokens = setting.max_completion_tokens
            yield f"biased: with gamma={gamma} a reward after {tokens} tokens is {left:.1g} at the first"


# --------------------------------------------------------------------------------------------------------------------
# Advantages per turn of a multi-turn episode. With a single turn per row, all of these are group baselines.


class TurnAdvantageChoice(AdvantageChoice):
    """Base class: values relative to a group, of completions or of turns."""

    divide_by_std: bool = True
    eps: NonNegativeFloat = default(group_zscore, "eps")
    group_baseline = True

    def atoms(self) -> Atoms:
        return (*self.made_of, group_zscore if self.divide_by_std else group_mean_baseline)

    def relative(self, values: Tensor, ids: Tensor) -> Tensor:
        """Return values of any shape (NaN where missing) minus the mean of their group, divided by its deviation."""
        flat, names = values.flatten(), ids.flatten()
        result = group_zscore(flat, names, self.eps) if self.divide_by_std else group_mean_baseline(flat, names)
        return result.reshape(values.shape)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        if self.divide_by_std:
            yield "biased: dividing by a group's std gives more weight to groups that nearly always or never succeed"

    def where(self) -> tuple[Formula, ...]:
        text, latex = "rel_g x = x - mean_g x", r"\operatorname{rel}_g x = x - \operatorname{mean}_g x"
        if self.divide_by_std:
            text = "rel_g x = (x - mean_g x) / (std_g x + eps)"
            latex = r"\operatorname{rel}_g x = \frac{x - \operatorname{mean}_g x}{\operatorname{std}_g x + \epsilon}"
        return (Formula(text, latex),)


class TurnGRPOAdvantage(TurnAdvantageChoice, type="turn_grpo"):
    """MT-GRPO: the reward of a turn relative to that of the group's turns of the same number, and what comes after.

    `r_{i,k}` is what the environment gave turn k (0 where it gave nothing), `r_i` the outcome, K the last turn.

    Paper: arXiv:2505.11821, whose rollouts all have the same number of turns, the last of which earns the outcome
    alone. Here a turn is compared with those of the group's completions that got as far.
    """

    text = "A_{i,k} = sum_{l=k}^K gamma^{l-k} rel_{group, l} r_{i,l} + gamma^{K-k} rel_group r_i"
    latex = (
        r"\hat A_{i,k} = \sum_{l=k}^{K_i} \gamma^{l-k} \operatorname{rel}_{g(i), l} r_{i,l} + \gamma^{K_i-k} "
        r"\operatorname{rel}_{g(i)} r_i"
    )
    gamma: Discount = default(turn_returns, "gamma")
    made_of = (turn_totals, turn_numbers, at_last_turn, turn_returns, per_turn_token)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        turn_ids = inputs.turns
        rewards = turn_totals(inputs.beside_outcome, turn_ids)
        earned = self.relative(rewards, turn_numbers(inputs.group_ids, rewards))
        outcome = at_last_turn(self.relative(inputs.rewards, inputs.group_ids), rewards)
        return per_turn_token(turn_returns(earned + outcome, self.gamma), turn_ids)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        if self.divide_by_std:
            effect = "a small one (a cost of each search) weighs as much as the outcome"
            yield f"unstable: rewards of a turn are divided by the std over turns of that number, so {effect}"


class GiGPOAdvantage(TurnAdvantageChoice, type="gigpo"):
    """GiGPO: the whole episode relative to its group, and each turn relative to those that began in the same state.

    A state is what the environment showed last, and before that the prompt; turns of one completion that begin in the
    same state are compared too. `R_i` is all that the episode earned, `G_{i,k}` what it earned from turn k on.

    Paper: arXiv:2505.10978, equations 3 to 8; F_norm is the deviation, or 1 with `divide_by_std: false`.
    """

    text = "A_{i,k} = rel_group R_i + omega rel_{group, state} G_{i,k},   G_{i,k} = sum_{l >= k} gamma^{l-k} r_{i,l}"
    latex = (
        r"\hat A_{i,k} = \operatorname{rel}_{g(i)} R_i + \omega \operatorname{rel}_{g(i), s(i,k)} G_{i,k}, \quad "
        r"G_{i,k} = \sum_{l \ge k} \gamma^{l-k} r_{i,l}"
    )
    gamma: Discount = 0.95
    omega: NonNegativeFloat = 1.0
    made_of = (reward_at_last_token, turn_totals, turn_returns, turn_states, per_turn_token)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        turn_ids = inputs.turns
        returns = turn_returns(turn_totals(inputs.by_token, turn_ids), self.gamma)
        by_state = self.relative(returns, turn_states(inputs.states, turn_ids))
        episode = self.relative(inputs.totals, inputs.group_ids)
        return per_turn_token(episode[:, None] + self.omega * by_state, turn_ids)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        if self.omega == 0:
            yield "no effect: with omega=0 gigpo is grpo, whatever the states are"


class LastTurnAdvantage(TurnAdvantageChoice, type="last_turn"):
    """Advantage of the last turn only; earlier turns are not trained."""

    text = "A_{i,t} = rel_group R_i [t in the last turn]"
    latex = r"\hat A_{i,t} = \operatorname{rel}_{g(i)} R_i\,\mathbb{1}[k(t) = K_i]"
    made_of = (last_turn, per_token)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        return per_token(self.relative(inputs.totals, inputs.group_ids), last_turn(inputs.turns))

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        yield "biased: turns before the last are not trained, so tool calls stay unchanged or drift"


TurnAdvantage = TurnGRPOAdvantage | GiGPOAdvantage | LastTurnAdvantage


# --------------------------------------------------------------------------------------------------------------------
# Advantages per completion.


class GroupAdvantage(AdvantageChoice):
    """Base class: one atom of rewards and group ids."""

    group_baseline = True

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        return self.atom(inputs.totals, inputs.group_ids, **self.settings)


class RawAdvantage(GroupAdvantage, type="raw"):
    """REINFORCE: the reward itself, without a baseline."""

    atom = staticmethod(advantages.raw_reward)
    group_baseline = False


class GRPOAdvantage(GroupAdvantage, type="grpo"):
    """GRPO: the reward standardised within the group."""

    eps: NonNegativeFloat = default(group_zscore, "eps")
    atom = staticmethod(group_zscore)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        yield "biased: dividing by the group's std gives more weight to prompts that are nearly always or never solved"


class GRPONoStdAdvantage(GroupAdvantage, type="grpo_no_std"):
    """Dr. GRPO: the reward minus the group's mean."""

    atom = staticmethod(advantages.group_mean_baseline)


class GRPOBatchStdAdvantage(AdvantageChoice, type="grpo_batch_std"):
    """GRPO with batch scale: the reward minus the group's mean, divided by the deviation of all rewards of the step.

    Lite PPO, arXiv:2508.08221; TRL's `scale_rewards="batch"`.
    """

    text = "A_i = (r_i - mean_group r) / (std_batch r + eps)"
    latex = r"\hat A_i = \frac{r_i - \operatorname{mean}_{g(i)} r}{\operatorname{std}_B r + \epsilon}"
    eps: NonNegativeFloat = 1e-4
    group_baseline = True
    made_of = (advantages.group_mean_baseline, group_std, advantages.standardised)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        rewards = inputs.totals.double()
        centred = advantages.group_mean_baseline(rewards, inputs.group_ids)
        scaled = advantages.standardised(centred, group_std(rewards, torch.zeros_like(inputs.group_ids)), self.eps)
        return scaled.to(inputs.totals.dtype)


class RLOOAdvantage(GroupAdvantage, type="rloo"):
    """RLOO: the reward minus the mean of the other completions of the group."""

    atom = staticmethod(advantages.leave_one_out_baseline)


class OPOAdvantage(AdvantageChoice, type="opo"):
    """OPO: the reward minus the group's mean, weighted by length."""

    group_baseline = True
    atom = staticmethod(advantages.length_weighted_baseline)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        return self.atom(inputs.totals, not_none(inputs.mask).sum(1), inputs.group_ids)


class GPGAdvantage(AdvantageChoice, type="gpg"):
    """GPG: the reward minus the group's mean, rescaled by alpha to make up for groups without a gradient.

    `alpha: paper` counts the completions of groups whose rewards are not all equal; `verl` those whose reward is not 0.
    """

    text = "A_i = alpha (r_i - mean_group r) / F"
    latex = r"\hat A_i = \frac{\alpha}{F} (r_i - \operatorname{mean}_{g(i)} r)"
    alpha: Literal["paper", "verl"] = "paper"
    normaliser: Annotated[float, Field(gt=0)] = default(advantages.rescaled_by_share, "normaliser")
    group_baseline = True
    made_of = (advantages.group_mean_baseline, group_std, advantages.rescaled_by_share)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        rewards, group_ids = inputs.totals, inputs.group_ids
        centred = advantages.group_mean_baseline(rewards, group_ids)
        counted = group_std(rewards.double(), group_ids) > 0 if self.alpha == "paper" else rewards != 0
        return advantages.rescaled_by_share(centred, counted, self.normaliser)

    def where(self) -> tuple[Formula, ...]:
        counted, latex = "B / |{j : r_j != 0}|", r"\frac{B}{|\{j : r_j \neq 0\}|}"
        if self.alpha == "paper":
            counted = "B / (B - |{j : all rewards of j's group equal}|)"
            latex = r"\frac{B}{B - |\{j : \operatorname{std}_{g(j)} r = 0\}|}"
        return (Formula(f"alpha = {counted}", rf"\alpha = {latex}"),)


class PassAtKAdvantage(AdvantageChoice, type="pass_at_k"):
    """Pass@k: only the group's best completion, by its distance from the second best."""

    text = "A_i = r_i - max_{j != i} r_j   for the group's single best,   0 elsewhere"
    latex = r"\hat A_i = [r_i = \max_{g(i)} r]\,(r_i - \max_{j \in g(i), j \neq i} r_j)"
    divide_by_std: bool = False
    eps: NonNegativeFloat = default(advantages.standardised, "eps")
    group_baseline = True

    def atoms(self) -> Atoms:
        scaled = (group_std, advantages.standardised) if self.divide_by_std else ()
        return advantages.best_minus_second, *scaled

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        best = advantages.best_minus_second(inputs.totals, inputs.group_ids)
        std = group_std(inputs.totals, inputs.group_ids)
        return advantages.standardised(best, std, self.eps) if self.divide_by_std else best


class PassAtKAnalyticAdvantage(GroupAdvantage, type="pass_at_k_analytic"):
    """Pass@k training: a completion's marginal contribution to the expected best of k, over all k-subsets S."""

    k: PositiveInt = 4
    atom = staticmethod(advantages.best_of_k)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        n = setting.completions_per_prompt
        if 1 < n <= self.k:
            yield f"no effect: with k={self.k} of {n} completions per prompt every subset has the same best"


class MaxRLAdvantage(GroupAdvantage, type="maxrl"):
    """MaxRL: deviation from the group's mean in units of that mean."""

    eps: NonNegativeFloat = default(advantages.maxrl_advantage, "eps")
    atom = staticmethod(advantages.maxrl_advantage)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        shaping = setting.axes["shaping"]
        if shaping.soft_overlong or shaping.repetition_ngram_tokens:
            yield "biased: maxrl divides by the mean reward, which penalties may bring to 0 or below (group dropped)"


class GDPOAdvantage(AdvantageChoice, type="gdpo"):
    """GDPO: each part of the reward standardised within the group, then their weighted sum within the batch."""

    text = "A_i = zscore_batch( sum_k w_k zscore_group(r_k)_i )"
    latex = r"\hat A_i = \operatorname{zscore}_{B}\Big(\sum_k w_k \operatorname{zscore}_{g(i)} r_k\Big)"
    eps: NonNegativeFloat = 1e-4
    group_baseline = True
    made_of = (group_zscore, weighted_reward)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        if inputs.parts is None:
            raise ValueError("algorithm.advantage: gdpo needs the parts of the reward, but these rows have none")
        parts, weights = inputs.parts.unbind(-1)
        columns = [group_zscore(part, inputs.group_ids, self.eps, missing="nan") for part in parts.to(inputs.rewards).T]
        total = weighted_reward(torch.stack(columns, 1), weights[0]) if len(parts) else inputs.rewards
        return group_zscore(total, torch.zeros_like(inputs.group_ids), self.eps)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        if setting.reward_parts == 1:
            yield "no effect: gdpo with one reward is grpo, standardised over the batch once more"


class ReMaxAdvantage(AdvantageChoice, type="remax"):
    """ReMax: the reward minus that of the prompt's greedy completion."""

    text = "A_i = r_i - r(greedy completion of the same prompt)"
    latex = r"\hat A_i = r_i - r(x_i, \arg\max \pi_\theta)"
    extra_rollouts: ClassVar[Mapping[str, Any]] = {"temperature": 0.0, "completions_per_prompt": 1}
    made_of = (per_token, advantages.return_minus_baseline)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        mask, totals = not_none(inputs.mask), inputs.totals
        if inputs.baseline_rewards is None:
            raise ValueError("algorithm.advantage: remax needs the rewards of greedy completions")
        baseline = torch.where(inputs.baseline_rewards.isnan(), totals, inputs.baseline_rewards)
        return advantages.return_minus_baseline(per_token(totals, mask), per_token(baseline, mask), mask)


class OptimalTokenBaselineAdvantage(AdvantageChoice, type="optimal_token_baseline"):
    """OTB: the reward to go of each token minus a baseline per position of the group's completions.

    Completions count by their realized energy up to the position. Positions count tokens that the model wrote.
    """

    text = "A_{i,t} = G_{i,t} - b_t,   b_t = sum_{j in group} G_{j,t} W_{j,t} / sum_{j in group} W_{j,t}"
    latex = (
        r"\hat A_{i,t} = G_{i,t} - \frac{\sum_{j \in g(i)} G_{j,t} W_{j,t}}{\sum_{j \in g(i)} W_{j,t}}, \quad "
        r"W_{i,t} = \sum_{u \le t} \big(1 - 2 \pi_{\mathrm{old}}(a_{i,u}) + \textstyle\sum_v \pi_{\mathrm{old}}(v)^2"
        r"\big)"
    )
    eps: NonNegativeFloat = default(advantages.optimal_token_baseline, "eps")
    zero_tail: bool = default(advantages.optimal_token_baseline, "zero_tail")
    """The tail of a completion that is longer than all others of its group has a baseline of 0."""
    group_baseline = True
    uses_token_rewards = True
    needs = frozenset({"old_logprobs", "old_squared_probs"})
    made_of = (
        reward_at_last_token, discounted_returns, advantages.cumulative_score_norm, advantages.optimal_token_baseline,
        advantages.return_minus_baseline,
    )  # fmt: skip

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        mask = not_none(inputs.mask)
        returns = discounted_returns(inputs.by_token, mask)
        energy = advantages.cumulative_score_norm(
            not_none(inputs.old_logprobs), not_none(inputs.old_squared_probs), mask
        )
        baseline = advantages.optimal_token_baseline(
            returns, energy, mask, inputs.group_ids, self.eps, by_token=True, zero_tail=self.zero_tail
        )
        return advantages.return_minus_baseline(returns, baseline, mask)

    def where(self) -> tuple[Formula, ...]:
        energy = "W_{i,t} = sum_{u <= t} (1 - 2 pi_old(a_u) + sum_v pi_old(v)^2),   G_{i,t} = sum_{s >= t} r_{i,s}"
        return (Formula(energy, r"G_{i,t} = \sum_{s \ge t} r_{i,s}"),)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from super().warnings(setting)
        if setting.logprobs_over == "kept":
            yield "biased: the squared probabilities are over the whole vocabulary, the log-probs over the kept tokens"


class ReinforcePPAdvantage(AdvantageChoice, type="reinforce_pp"):
    """REINFORCE++: the return of each token, whitened over all tokens of the batch."""

    text = "A_{i,t} = whiten_batch( sum_{s >= t} gamma^{s-t} r_{i,s} )"
    latex = r"\hat A_{i,t} = \operatorname{whiten}_B\Big(\sum_{s \ge t} \gamma^{s-t} r_{i,s}\Big)"
    gamma: Discount = default(discounted_returns, "gamma")
    eps: NonNegativeFloat = default(masked_whiten, "eps")
    uses_token_rewards = True
    made_of = (reward_at_last_token, discounted_returns, masked_whiten)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        mask = not_none(inputs.mask)
        return masked_whiten(discounted_returns(inputs.by_token, mask, self.gamma), mask, eps=self.eps)

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from self.discount_warning(self.gamma, setting)


class ReinforcePPBaselineAdvantage(AdvantageChoice, type="reinforce_pp_baseline"):
    """REINFORCE++-baseline: the reward minus the group's mean, whitened over all tokens of the batch."""

    text = "A_{i,t} = whiten_batch( r_i - mean_group r )"
    latex = r"\hat A_{i,t} = \operatorname{whiten}_B(r_i - \operatorname{mean}_{g(i)} r)"
    eps: NonNegativeFloat = default(masked_whiten, "eps")
    group_baseline = True
    made_of = (advantages.group_mean_baseline, per_token, masked_whiten)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        mask = not_none(inputs.mask)
        centred = advantages.group_mean_baseline(inputs.totals, inputs.group_ids)
        return masked_whiten(per_token(centred, mask), mask, eps=self.eps)


class GAEAdvantage(AdvantageChoice, type="gae"):
    """GAE: generalised advantage estimation with a critic; tokens that the model did not write are skipped.

    With `length_alpha`, lambda grows with a completion's length: 1 - 1 / (length_alpha |o_i|) instead of `lam`.
    """

    text = "A_{i,t} = sum_{l >= 0} (gamma lam)^l delta_{i,t+l},   delta_{i,t} = r_{i,t} + gamma V_{i,t+1} - V_{i,t}"
    latex = (
        r"\hat A_{i,t} = \sum_{l \ge 0} (\gamma \lambda)^l \delta_{i,t+l}, \quad \delta_{i,t} = r_{i,t} + \gamma "
        r"V_{i,t+1} - V_{i,t}"
    )
    gamma: Discount = default(gae, "gamma")
    lam: Discount = default(gae, "lam")
    whiten: bool = True
    length_alpha: PositiveFloat | None = None
    needs = frozenset({"values"})
    uses_token_rewards = True

    def atoms(self) -> Atoms:
        adaptive = (length_adaptive_lambda,) if self.length_alpha else ()
        return reward_at_last_token, *adaptive, gae, *((masked_whiten,) if self.whiten else ())

    def __call__(self, inputs: AdvantageInputs) -> AdvantagesAndReturns:
        mask, alpha = not_none(inputs.mask), self.length_alpha
        lam = self.lam if alpha is None else length_adaptive_lambda(mask, alpha).to(inputs.rewards)
        result = gae(inputs.by_token, not_none(inputs.values), mask, self.gamma, lam)
        own = result["advantages"]
        return AdvantagesAndReturns(masked_whiten(own, mask) if self.whiten else own, result["returns"])

    def where(self) -> tuple[Formula, ...]:
        whitened = Formula("A <- whiten_batch(A)", r"\hat A \leftarrow \operatorname{whiten}_B(\hat A)")
        return (whitened,) if self.whiten else ()

    def warnings(self, setting: Setting) -> Iterator[str]:
        yield from self.discount_warning(self.gamma, setting)
        tokens = setting.max_completion_tokens
        weight = self.lam**tokens
        if self.length_alpha is None and weight < 0.01:
            share = f"at the first of {tokens} tokens the reward itself weighs {weight:.1g}"
            yield f"biased: with lam={self.lam} {share}, the rest depends on the critic (length_alpha fixes it)"


class ReverseKLAdvantage(AdvantageChoice, type="reverse_kl"):
    """On-policy distillation: minus the reverse KL to the teacher on each sampled token; rewards are not used."""

    text = "A_{i,t} = - (log pi_old(a_t) - log p_teacher(a_t))"
    latex = r"\hat A_{i,t} = -\big(\log \pi_{\mathrm{old}}(a_{i,t}) - \log p_{\mathrm{teacher}}(a_{i,t})\big)"
    needs = frozenset({"old_logprobs", "teacher_logprobs"})
    made_of = (k1_kl,)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        return -k1_kl(not_none(inputs.old_logprobs), not_none(inputs.teacher_logprobs), not_none(inputs.mask))


class NoAdvantage(AdvantageChoice, type="none"):
    """None: rewards are not used for training."""

    text = ""

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        return torch.zeros_like(inputs.rewards)

    def warnings(self, setting: Setting) -> Iterator[str]:
        if not setting.axes["distillation"].coefficient:
            yield "no effect: advantage none ignores rewards, and distillation is off"


class CustomAdvantage(Custom, AdvantageChoice, type="custom"):
    """A user's function: `AdvantageInputs` -> [B] or [B, T], or `AdvantagesAndReturns` if it reads `values`."""

    text = "A = "
    latex = r"\hat A = "
    inputs = AdvantageInputs

    def check(self, result: Any, inputs: AdvantageInputs) -> None:
        mask, with_returns = not_none(inputs.mask), isinstance(result, AdvantagesAndReturns)
        if with_returns != ("values" in self.reads) or (isinstance(result, tuple) and not with_returns):
            valid = (
                "AdvantagesAndReturns(advantages, returns), as it reads values"
                if "values" in self.reads
                else "advantages alone, as it reads no values (reads: [values])"
            )
            raise ValueError(f"{self.shown} must return {valid}, but returned {type(result).__name__}")
        advantages, returns = result if with_returns else (result, None)
        self.check_tensor(advantages, (inputs.rewards, mask), "number", "advantages" if with_returns else "")
        if returns is not None:
            self.check_tensor(returns, (mask,), "float", "returns")
        for name, tensor in (("advantages", advantages), ("returns", returns)):
            if tensor is not None and not tensor[mask.any(1) if tensor.dim() == 1 else mask].isfinite().all():
                raise ValueError(f"{self.shown} returned non-finite {name}")


Plain = RawAdvantage | NoAdvantage
Centred = GRPONoStdAdvantage | RLOOAdvantage | OPOAdvantage | GPGAdvantage | ReMaxAdvantage
Scaled = GRPOAdvantage | GRPOBatchStdAdvantage | MaxRLAdvantage | GDPOAdvantage
PassAtK = PassAtKAdvantage | PassAtKAnalyticAdvantage
ByToken = OptimalTokenBaselineAdvantage | ReinforcePPAdvantage | ReinforcePPBaselineAdvantage | GAEAdvantage
ByTeacher = ReverseKLAdvantage
Advantage = Plain | Centred | Scaled | PassAtK | ByToken | ByTeacher | TurnAdvantage | CustomAdvantage
