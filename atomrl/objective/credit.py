"""The axes of credit: what happens to rewards, how they become advantages, and which groups count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomrl.atoms import baselines
from atomrl.atoms.advantages import (
    group_mean_baseline,
    group_zscore,
    leave_one_out_baseline,
    maxrl_advantage,
    per_token,
    raw_reward,
    standardised,
)
from atomrl.atoms.gae import discounted_returns, gae, length_adaptive_lambda
from atomrl.atoms.groups import group_std
from atomrl.atoms.kl import k1_kl
from atomrl.atoms.masks import row_sum
from atomrl.atoms.shaping import (
    clipped_reward,
    kl_penalised_reward,
    repetition_penalty,
    reward_at_last_token,
    soft_overlong_penalty,
    weighted_reward,
)
from atomrl.atoms.whiten import masked_whiten
from atomrl.objective.axis import AnySign, Axis, reads
from atomrl.stages import RowBatch


@dataclass(frozen=True)
class Scores:
    """What an advantage is made of: the rewards of a whole step, after shaping. The first two are enough for most."""

    rewards: Tensor
    """[B]"""
    group_ids: Tensor
    """[B]"""
    mask: Tensor | None = None
    """[B, T]"""
    kl_penalty: Tensor | None = None
    """[B, T] beta KL, where it is part of the reward."""
    parts: Tensor | None = None
    """[B, K, 2] each part's value (NaN where missing) and weight."""
    baseline_rewards: Tensor | None = None
    """[B] of the extra rollout of each row's prompt; NaN where missing."""
    values: Tensor | None = None
    """[B, T] of the critic."""
    old_logprobs: Tensor | None = None
    """[B, T] of the policy at the start of the step."""
    teacher_logprobs: Tensor | None = None
    """[B, T] of the teacher."""

    @property
    def totals(self) -> Tensor:
        """[B] rewards without the penalties for leaving the reference."""
        if self.kl_penalty is None:
            return self.rewards
        assert self.mask is not None
        return kl_penalised_reward(self.rewards[:, None], row_sum(self.kl_penalty, self.mask)[:, None], 1.0)[:, 0]

    @property
    def by_token(self) -> Tensor:
        """[B, T] the reward at the last token that the model wrote, less each token's penalty."""
        assert self.mask is not None
        rewards = reward_at_last_token(self.rewards, self.mask)
        return rewards if self.kl_penalty is None else kl_penalised_reward(rewards, self.kl_penalty, 1.0, self.mask)


class Credit(NamedTuple):
    """Advantages with what a critic is fitted to, both [B, T]."""

    advantages: Tensor
    returns: Tensor


def _raw(scores: Scores) -> Tensor:
    r"""The reward itself.

        A_i = r_i

    LaTeX: \hat A_i = r_i
    """
    return raw_reward(scores.totals, scores.group_ids)


def _grpo(scores: Scores, *, eps: float = 1e-6) -> Tensor:
    r"""Standardised within the group.

        A_i = (r_i - mean_group r) / (std_group r + eps)

    LaTeX: \hat A_i = \frac{r_i - \operatorname{mean}_{g(i)} r}{\operatorname{std}_{g(i)} r + \epsilon}
    """
    return group_zscore(scores.totals, scores.group_ids, eps)


def _grpo_no_std(scores: Scores) -> Tensor:
    r"""Centred within the group: Dr. GRPO.

        A_i = r_i - mean_group r

    LaTeX: \hat A_i = r_i - \operatorname{mean}_{g(i)} r
    """
    return group_mean_baseline(scores.totals, scores.group_ids)


def _rloo(scores: Scores) -> Tensor:
    r"""Minus the mean of the other completions of the group.

        A_i = r_i - mean_{j in group, j != i} r_j

    LaTeX: \hat A_i = r_i - \operatorname{mean}_{j \in g(i), j \neq i} r_j
    """
    return leave_one_out_baseline(scores.totals, scores.group_ids)


def _opo(scores: Scores) -> Tensor:
    r"""Minus the group's mean weighted by length.

        A_i = r_i - sum_j l_j r_j / sum_j l_j,   j in the group

    LaTeX: \hat A_i = r_i - \frac{\sum_{j \in g(i)} l_j r_j}{\sum_{j \in g(i)} l_j}
    """
    assert scores.mask is not None
    return baselines.length_weighted_baseline(scores.totals, scores.mask.sum(1), scores.group_ids)


def _gpg(scores: Scores, *, normaliser: float = 1.0) -> Tensor:
    r"""Centred within the group, and larger by as much as few completions of the batch earned a reward.

        A_i = alpha (r_i - mean_group r) / F,   alpha = B / |{j : r_j != 0}|

    LaTeX: \hat A_i = \frac{\alpha}{F} (r_i - \operatorname{mean}_{g(i)} r), \quad \alpha = B / |\{j : r_j \neq 0\}|
    """
    centred = group_mean_baseline(scores.totals, scores.group_ids)
    return baselines.rescaled_by_nonzero_rewards(centred, scores.totals, normaliser)


def _pass_at_k(scores: Scores, *, divide_by_std: bool = False, eps: float = 1e-6) -> Tensor:
    r"""The best completion alone has credit, by how much it beats the second best.

        A_i = r_i - max_{j != i} r_j   for the group's single best,   0 elsewhere

    LaTeX: \hat A_i = [r_i = \max_{g(i)} r]\,(r_i - \max_{j \in g(i), j \neq i} r_j)
    """
    advantages = baselines.best_minus_second(scores.totals, scores.group_ids)
    return standardised(advantages, group_std(scores.totals, scores.group_ids), eps) if divide_by_std else advantages


def _pass_at_k_analytic(scores: Scores, *, k: int = 4) -> Tensor:
    r"""How much better the best of k completions is for having this one among them, over all k-subsets S of the group.

        A_i = (mean_{S with i} R(S) - mean_S R(S)) / std_S R(S),   R(S) = max_{j in S} r_j

    LaTeX: \hat A_i = \frac{\operatorname{mean}_{S \ni i} R(S) - \operatorname{mean}_S R(S)}{\operatorname{std}_S R(S)},
        \quad R(S) = \max_{j \in S} r_j, \quad S \subseteq g(i), |S| = k
    """
    return baselines.best_of_k(scores.totals, scores.group_ids, k)


def _maxrl(scores: Scores, *, eps: float = 0.0) -> Tensor:
    r"""Deviation from the group's mean in units of that mean.

        A_i = (r_i - mean_group r) / (mean_group r + eps)

    LaTeX: \hat A_i = \frac{r_i - \operatorname{mean}_{g(i)} r}{\operatorname{mean}_{g(i)} r + \epsilon}
    """
    return maxrl_advantage(scores.totals, scores.group_ids, eps)


def _gdpo(scores: Scores, *, eps: float = 1e-4) -> Tensor:
    r"""Each part of the reward standardised within the group, then their weighted sum within the batch.

        A_i = zscore_batch( sum_k w_k zscore_group(r_k)_i )

    LaTeX: \hat A_i = \operatorname{zscore}_{B}\Big(\sum_k w_k \operatorname{zscore}_{g(i)} r_k\Big)
    """
    assert scores.parts is not None
    parts, weights = scores.parts.unbind(-1)
    columns = [group_zscore(part, scores.group_ids, eps, missing="nan") for part in parts.to(scores.rewards).T]
    total = weighted_reward(torch.stack(columns, 1), weights[0]) if len(parts) else scores.rewards
    return group_zscore(total, torch.zeros_like(scores.group_ids), eps)


def _remax(scores: Scores) -> Tensor:
    r"""Minus the reward of the prompt's greedy completion.

        A_i = r_i - r(greedy completion of the same prompt)

    LaTeX: \hat A_i = r_i - r(x_i, \arg\max \pi_\theta)
    """
    assert scores.mask is not None
    if scores.baseline_rewards is None:
        raise ValueError("algorithm.advantage: remax needs the rewards of greedy completions, which the loop draws")
    rewards = per_token(scores.totals, scores.mask)
    baseline = torch.where(scores.baseline_rewards.isnan(), scores.totals, scores.baseline_rewards)
    return baselines.return_minus_baseline(rewards, per_token(baseline, scores.mask), scores.mask)


_remax.extra_rollouts = {"temperature": 0.0, "completions_per_prompt": 1}  # type: ignore[attr-defined]


def _reinforce_pp(scores: Scores, *, gamma: float = 1.0, eps: float = 1e-8) -> Tensor:
    r"""The return of each token, standardised over all tokens of the batch.

        A_{i,t} = whiten_batch( sum_{s >= t} gamma^{s-t} r_{i,s} )

    LaTeX: \hat A_{i,t} = \operatorname{whiten}_B\Big(\sum_{s \ge t} \gamma^{s-t} r_{i,s}\Big)
    """
    assert scores.mask is not None
    return masked_whiten(discounted_returns(scores.by_token, scores.mask, gamma), scores.mask, eps=eps)


_reinforce_pp.by_token = True  # type: ignore[attr-defined]


def _reinforce_pp_baseline(scores: Scores, *, eps: float = 1e-8) -> Tensor:
    r"""Centred within the group, then standardised over all tokens of the batch.

        A_{i,t} = whiten_batch( r_i - mean_group r )

    LaTeX: \hat A_{i,t} = \operatorname{whiten}_B(r_i - \operatorname{mean}_{g(i)} r)
    """
    assert scores.mask is not None
    centred = group_mean_baseline(scores.totals, scores.group_ids)
    return masked_whiten(per_token(centred, scores.mask), scores.mask, eps=eps)


@reads("values")
def _gae(
    scores: Scores, *, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True, length_alpha: float | None = None
) -> Credit:
    r"""What turned out better than a critic expected, tokens that the model did not write left out.

        A_{i,t} = sum_{l >= 0} (gamma lam)^l delta_{i,t+l},   delta_{i,t} = r_{i,t} + gamma V_{i,t+1} - V_{i,t}

    With `length_alpha` lambda grows with a completion's length, 1 - 1 / (length_alpha |o_i|), in the place of `lam`.

    LaTeX: \hat A_{i,t} = \sum_{l \ge 0} (\gamma \lambda)^l \delta_{i,t+l}, \quad
        \delta_{i,t} = r_{i,t} + \gamma V_{i,t+1} - V_{i,t}
    """
    assert scores.mask is not None and scores.values is not None, "annotated, as `advantages_read` asks"
    horizon = lam if length_alpha is None else length_adaptive_lambda(scores.mask, length_alpha).to(scores.rewards)
    found = gae(scores.by_token, scores.values, scores.mask, gamma, horizon)
    advantages = found["advantages"]
    return Credit(masked_whiten(advantages, scores.mask) if whiten else advantages, found["returns"])


_gae.by_token = True  # type: ignore[attr-defined]


@reads("old_logprobs", "teacher_logprobs")
def _reverse_kl(scores: Scores) -> Tensor:
    r"""How much likelier the teacher finds the token than the policy that drew it; rewards have no part in it.

        A_{i,t} = - (log pi_old(a_t) - log p_teacher(a_t))

    LaTeX: \hat A_{i,t} = -\big(\log \pi_{\mathrm{old}}(a_{i,t}) - \log p_{\mathrm{teacher}}(a_{i,t})\big)
    """
    assert scores.mask is not None and scores.old_logprobs is not None and scores.teacher_logprobs is not None
    return -k1_kl(scores.old_logprobs, scores.teacher_logprobs, scores.mask)


def _none(scores: Scores) -> Tensor:
    """No credit: nothing is learned from rewards."""
    return torch.zeros_like(scores.rewards)


ADVANTAGES: dict[str, Callable[..., Tensor | Credit]] = {
    "grpo": _grpo,
    "grpo_no_std": _grpo_no_std,
    "raw": _raw,
    "rloo": _rloo,
    "reinforce_pp": _reinforce_pp,
    "reinforce_pp_baseline": _reinforce_pp_baseline,
    "remax": _remax,
    "opo": _opo,
    "gpg": _gpg,
    "gdpo": _gdpo,
    "pass_at_k": _pass_at_k,
    "pass_at_k_analytic": _pass_at_k_analytic,
    "maxrl": _maxrl,
    "gae": _gae,
    "reverse_kl": _reverse_kl,
    "none": _none,
}


class Advantage(Axis):
    """How rewards become credit: `Scores` -> [B] or [B, T], or a `Credit` where there is a critic."""

    label, kinds, default = "advantage", ADVANTAGES, "grpo"


def _shaped(
    rows: RowBatch,
    *,
    soft_overlong: bool = False,
    max_completion_tokens: int | None = None,
    overlong_buffer_tokens: int | None = None,
    overlong_penalty: float = 1.0,
    repetition_ngram_tokens: int = 0,
    repetition_weight: float = 1.0,
    lowest: AnySign | None = None,
    highest: AnySign | None = None,
    mask_truncated: bool = False,
) -> Tensor:
    """Penalties for length and repetition, then bounds."""
    rewards = rows.rewards
    if soft_overlong:
        if max_completion_tokens is None:
            raise ValueError("algorithm.shaping.max_completion_tokens: soft_overlong needs the limit it ends at")
        buffer = overlong_buffer_tokens or max(1, max_completion_tokens // 5)
        lengths = rows.lengths - rows.prompt_lengths
        penalty = soft_overlong_penalty(lengths, max_completion_tokens, buffer, overlong_penalty)
        rewards = rewards + penalty.to(rewards)
    if repetition_ngram_tokens:
        penalty = repetition_penalty(rows.tokens, rows.loss_mask, repetition_ngram_tokens, -repetition_weight)
        rewards = rewards + penalty.to(rewards)
    if lowest is not None or highest is not None:
        low, high = (-torch.inf if lowest is None else lowest), (torch.inf if highest is None else highest)
        rewards = clipped_reward(rewards, low, high)
    return rewards


class Shaping(Axis):
    """What happens to rewards first. `mask_truncated` is DAPO's overlong filtering: no loss on completions cut off.

    The buffer of `soft_overlong` is a fifth of `max_completion_tokens` unless given, and that is the rollout's.
    """

    label, kinds, default = "shaping", {"penalties": _shaped}, "penalties"


def _all_groups(rewards: Sequence[float]) -> bool:
    """Every group counts."""
    return True


def mixed_outcomes(rewards: Sequence[float]) -> bool:
    r"""Groups whose rewards are all equal have no advantage; the loop draws others in their place.

        min_group r < max_group r

    LaTeX: \min_{g} r < \max_{g} r

    Example:
        >>> mixed_outcomes([0.0, 1.0]), mixed_outcomes([1.0, 1.0]), mixed_outcomes([1.0]), mixed_outcomes([])
        (True, False, False, False)
    """
    return len(rewards) > 1 and min(rewards) < max(rewards)


class AcceptGroup(Axis):
    """Dynamic sampling: which groups, by their rewards before shaping, are trained on."""

    label, kinds, default = "accept_group", {"all": _all_groups, "mixed_outcomes": mixed_outcomes}, "all"


def with_shaping(rows: RowBatch, rewards: Tensor) -> Tensor | None:
    """The parts of the reward, with what shaping added as one more."""
    if rows.reward_parts is None:
        return None
    added = torch.stack([rewards - rows.rewards, torch.ones_like(rewards)], -1)[:, None].to(rows.reward_parts)
    return torch.cat([rows.reward_parts, added], 1) if bool(added[..., 0].any()) else rows.reward_parts


def extra_rollouts(advantage: Advantage) -> dict[str, Any] | None:
    """How completions are drawn that only serve as a baseline."""
    return getattr(advantage.function, "extra_rollouts", None)
