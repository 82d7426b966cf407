"""Advantages by turn."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from atomrl.atoms import advantages, masks, shaping
from atomrl.atoms import returns as turns
from tests.parity.arranging import Values, every, raw_if_alone


def rows_of_trajectories(inputs: Values) -> tuple[Tensor, Tensor]:
    """[N, K] which row is turn k of each trajectory, -1 where there is none; and [N] the first of them."""
    names = inputs["trajectory_ids"]
    index = [(names == name).nonzero()[:, 0] for name in names.unique()]
    return torch.nn.utils.rnn.pad_sequence(index, batch_first=True, padding_value=-1), torch.stack(
        [i[0] for i in index]
    )


def relative(mode: str, eps: float, values: Tensor, ids: Tensor) -> Tensor:
    flat, names = values.flatten(), ids.flatten()
    if mode == "mean_std_norm":
        return advantages.group_zscore(flat, names, eps).reshape(values.shape)
    return advantages.group_mean_baseline(flat, names).reshape(values.shape)


def gigpo(inputs: Values, params: Values) -> Values:
    """Turns that are rows of their own there are laid one after the other, and taken apart again."""
    eps, mask = params["epsilon"], inputs["mask"]
    compare = partial(relative, params["mode"], eps)
    rows, first = rows_of_trajectories(inputs)
    there, width = rows >= 0, mask.shape[1]
    written = mask[rows] & there[..., None]
    numbers = torch.arange(rows.shape[1])[None, :, None].expand(written.shape)
    turn_ids = numbers.masked_fill(~written, -1).flatten(1)
    states = (inputs["states"] + 10_000 * inputs["group_ids"])[rows][..., None].expand(written.shape)
    earned = shaping.reward_at_last_token(inputs["turn_rewards"], mask)[rows]
    rewards = turns.turn_totals(earned.flatten(1), turn_ids)
    returns = turns.turn_returns(rewards, params["gamma"])
    by_state = compare(returns, turns.turn_states(states.flatten(1), turn_ids))
    scores, groups = masks.row_sum(inputs["token_level_rewards"], every(mask))[first], inputs["group_ids"][first]
    alone = scores / (1 + eps) if params["mode"] == "mean_std_norm" else scores
    episode = raw_if_alone(compare(scores, groups), alone, groups)
    credit = turns.per_turn_token(episode[:, None] + params["step_advantage_w"] * by_state, turn_ids)
    advantages = torch.zeros(mask.shape, dtype=credit.dtype)
    advantages[rows[there]] = credit.unflatten(1, (-1, width))[there]
    back = torch.zeros(len(mask), dtype=credit.dtype)
    back[rows[there]] = returns[there]
    return {"advantages": advantages, "step_returns": back}


def mt_grpo(inputs: Values, params: Values) -> Values:
    turn_ids, ids, eps = inputs["turn_ids"], inputs["group_ids"], params["epsilon"]
    first = inputs["turn_rewards"][:, None] * (turn_ids == 0) / (turn_ids == 0).sum(1, keepdim=True)
    rewards = turns.turn_totals(first, turn_ids)
    earned = relative("mean_std_norm", eps, rewards, turns.turn_numbers(ids, rewards))
    outcome = turns.at_last_turn(advantages.group_zscore(inputs["outcome_rewards"], ids, eps), rewards)
    credit = turns.turn_returns(params["turn_advantage_coef"] * earned + outcome)
    return {"advantages": turns.per_turn_token(credit, turn_ids)}


ADAPTERS = {"advantage.gigpo.verl_agent": gigpo, "advantage.mt_grpo.multi_turn_rl_agent": mt_grpo}
