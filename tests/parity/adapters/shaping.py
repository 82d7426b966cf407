"""Whitening, reward shaping and dynamic sampling."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from atomrl.atoms import groups, masks, shaping, whiten

Values = dict[str, Any]


def whitened(inputs: Values, params: Values) -> Values:
    values, mask = inputs["values"], inputs["mask"]
    return {"whitened": whiten.masked_whiten(values, mask, shift_mean=params["shift_mean"])}


def whitened_with_moments(count_eps: float, inputs: Values, params: Values) -> Values:
    values, mask = inputs["values"], inputs["mask"]
    return {
        "whitened": whiten.masked_whiten(values, mask, shift_mean=params["shift_mean"], count_eps=count_eps),
        "mean": masks.masked_mean(values, mask, eps=count_eps),
        "var": whiten.masked_variance(values, mask, count_eps=count_eps),
    }


def normalised_rows(inputs: Values, params: Values) -> Values:
    values, mask = inputs["values"], inputs["mask"]
    if params["dim"] == 0:
        values, mask = values.T, mask.T
    result = whiten.row_whiten(values, mask, eps=params["eps"])
    return {"normalized": result.T if params["dim"] == 0 else result}


def normalised_std_eps(inputs: Values, params: Values) -> Values:
    values, mask = inputs["values"], inputs["mask"]
    unbiased, eps = params["unbiased"], params["eps"]
    return {"normalized": whiten.masked_whiten(values, mask, unbiased=unbiased, eps=eps, eps_role="std")}


def limits(params: Values) -> dict[str, int]:
    return {"max_completion_tokens": params["max_response_length"], "buffer_tokens": params["overlong_buffer_len"]}


def overlong(capped: bool, inputs: Values, params: Values) -> Values:
    rewards, factor = inputs["base_rewards"], params["penalty_factor"]
    penalty = shaping.soft_overlong_penalty(inputs["lengths"], **limits(params), factor=factor, capped=capped)
    parts = torch.stack([rewards, penalty.to(rewards.dtype)], 1)
    return {"overlong_reward": penalty, "total_reward": shaping.weighted_reward(parts, torch.ones(2))}


def overlong_counted(inputs: Values, params: Values) -> Values:
    pays = shaping.in_overlong_buffer(inputs["lengths"], **limits(params))
    return overlong(True, inputs, params) | {"num_penalized": pays.sum()}


def overlong_placed(inputs: Values, params: Values) -> Values:
    lengths = inputs["lengths"]
    written = torch.arange(int(lengths.max())) < lengths[:, None]
    return overlong(False, inputs, params) | {
        "is_overlong": shaping.in_overlong_buffer(lengths, **limits(params)),
        "reward_token_index": shaping.last_token_index(written),
    }


def soft_overlong(inputs: Values, params: Values) -> Values:
    limit, buffer = params["max_completion_len"], params["soft_punish_cache"]
    return {"penalty": shaping.soft_overlong_penalty(inputs["lengths"], limit, buffer)}


def repetition(inputs: Values, params: Values) -> Values:
    rows = [torch.as_tensor(row) for row in inputs["completion_ids"]]
    tokens = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], batch_first=True)
    penalty = shaping.repetition_penalty(tokens, mask, params["ngram_size"], params["max_penalty"])
    return {"penalty": penalty}


def stop_properly(inputs: Values, params: Values) -> Values:
    rewards, truncated, coefficient = (
        inputs["base_rewards"],
        inputs["truncated"],
        params["stop_properly_penalty_coef"],
    )
    change = shaping.truncated_scaled if coefficient >= 0 else shaping.truncated_replaced
    return {"total_reward": change(rewards, truncated, coefficient), "num_truncated": truncated.sum()}


def flat(ragged: Any) -> tuple[Tensor, Tensor, list[int]]:
    """Rewards [B], group ids [B], and where each group begins."""
    rows = list(ragged)
    sizes = torch.tensor([len(row) for row in rows])
    firsts = (sizes.cumsum(0) - sizes).tolist()
    return torch.cat(rows), torch.repeat_interleave(torch.arange(len(rows)), sizes), firsts


def keep_groups_with_spread(min_std: float, group_of_one: Any, inputs: Values, params: Values) -> Values:
    rewards, group_ids, firsts = flat(inputs["groups"])
    keep = groups.groups_with_spread(rewards, group_ids, min_std=min_std, group_of_one=group_of_one)
    return {"keep": keep[firsts]}


def keep_groups_in_range(inputs: Values, params: Values) -> Values:
    rewards, group_ids, firsts = flat(inputs["groups"])
    return {"keep": groups.groups_with_mean_inside(rewards, group_ids, *params["range"])[firsts]}


def difficulty_mask(inputs: Values, params: Values) -> Values:
    group_ids = torch.arange(len(inputs["scores"])) // params["n_sample"]
    bounds = (params["low_threshold"], params["high_threshold"])
    return {"keep": groups.groups_with_mean_inside(inputs["scores"], group_ids, *bounds)}


ADAPTERS = {
    "whiten.masked_whiten.verl": partial(whitened_with_moments, 1e-8),
    "whiten.masked_whiten.trl": partial(whitened_with_moments, 0.0),
    "whiten.masked_whiten.slime": whitened,
    "whiten.masked_normalize_row.openrlhf": normalised_rows,
    "whiten.masked_normalization.areal": normalised_std_eps,
    "reward_shaping.overlong.verl": overlong_placed,
    "reward_shaping.overlong.nemo_rl": partial(overlong, False),
    "reward_shaping.overlong.areal": partial(overlong, False),
    "reward_shaping.overlong.openrlhf": overlong_counted,
    "reward_shaping.soft_overlong_punishment.trl": soft_overlong,
    "reward_shaping.repetition_penalty.trl": repetition,
    "reward_shaping.stop_properly.openrlhf": stop_properly,
    "dynamic_sampling.filter.verl": partial(keep_groups_with_spread, 0.0, "keep"),
    "dynamic_sampling.filter.slime": partial(keep_groups_with_spread, 1e-6, "drop"),
    "dynamic_sampling.filter.openrlhf": keep_groups_in_range,
    "dynamic_sampling.difficulty_mask.roll": difficulty_mask,
}
