"""Whitening, reward shaping and dynamic sampling."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from atomrl.atoms import advantages as groups
from atomrl.atoms import masks, shaping
from atomrl.atoms import masks as whiten
from tests.parity.adapters.returns import thinly_whitened
from tests.parity.arranging import Values, group_sizes, thin_moments


def whitened(inputs: Values, params: Values) -> Values:
    values, mask = inputs["values"], inputs["mask"]
    return {"whitened": whiten.masked_whiten(values, mask, shift_mean=params["shift_mean"])}


def whitened_trl(inputs: Values, params: Values) -> Values:
    values, mask = inputs["values"], inputs["mask"]
    moments = {"mean": masks.masked_mean(values, mask), "var": whiten.masked_variance(values, mask)}
    return whitened(inputs, params) | moments


def whitened_verl(inputs: Values, params: Values) -> Values:
    values, mask = inputs["values"], inputs["mask"]
    centre, variance = thin_moments(values, mask)
    white = thinly_whitened(values, mask)
    if not params["shift_mean"]:
        white = (white + centre).masked_fill(~mask, 0.0)
    return {"whitened": white, "mean": centre, "var": variance}


def normalised_rows(inputs: Values, params: Values) -> Values:
    """A biased variance of at least eps, by row or by column."""
    values, mask = inputs["values"].double(), inputs["mask"]
    if params["dim"] == 0:
        values, mask = values.T, mask.T
    deviations = values - masks.row_mean(values, mask)[:, None]
    variance = masks.row_mean(deviations.square(), mask).clamp(min=params["eps"])
    result = (deviations / variance.sqrt()[:, None]).masked_fill(~mask, 0.0)
    return {"normalized": result.T if params["dim"] == 0 else result}


def normalised_std_eps(inputs: Values, params: Values) -> Values:
    """eps is added to the standard deviation."""
    values, mask = inputs["values"].double(), inputs["mask"]
    variance, count = whiten.masked_variance(values, mask), mask.sum()
    if not params["unbiased"]:
        variance = variance * (count - 1) / count.clamp(min=1)
    white = (values - masks.masked_mean(values, mask)) / (variance.sqrt() + params["eps"])
    return {"normalized": white.masked_fill(~mask, 0.0)}


def limits(params: Values) -> dict[str, int]:
    return {"max_completion_tokens": params["max_response_length"], "buffer_tokens": params["overlong_buffer_len"]}


def overlong(capped: bool, inputs: Values, params: Values) -> Values:
    rewards, lengths, factor = inputs["base_rewards"], inputs["lengths"], params["penalty_factor"]
    limit, buffer = limits(params).values()
    if not capped:  # the same slope, over a buffer in which every length is
        wider = 1 + int(lengths.max()) // buffer
        limit, buffer, factor = limit + (wider - 1) * buffer, wider * buffer, wider * factor
    penalty = shaping.soft_overlong_penalty(lengths, limit, buffer, factor)
    parts = torch.stack([rewards, penalty.to(rewards.dtype)], 1)
    return {"overlong_reward": penalty, "total_reward": shaping.weighted_reward(parts, torch.ones(2))}


def pays(inputs: Values, params: Values) -> Tensor:
    limit, buffer = limits(params).values()
    return inputs["lengths"] > limit - buffer


def overlong_counted(inputs: Values, params: Values) -> Values:
    return overlong(True, inputs, params) | {"num_penalized": pays(inputs, params).sum()}


def overlong_placed(inputs: Values, params: Values) -> Values:
    return overlong(False, inputs, params) | {
        "is_overlong": pays(inputs, params),
        "reward_token_index": inputs["lengths"] - 1,
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
    instead = rewards * coefficient if coefficient >= 0 else coefficient
    penalty = torch.where(truncated, instead - rewards, 0.0)
    total = shaping.weighted_reward(torch.stack([rewards, penalty], 1), torch.ones(2))
    return {"total_reward": total, "num_truncated": truncated.sum()}


def flat(ragged: list[Tensor] | Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Rewards [B], group ids [B], and where each group begins."""
    rows = list(ragged)
    sizes = torch.tensor([len(row) for row in rows])
    firsts = (sizes.cumsum(0) - sizes).tolist()
    return torch.cat(rows), torch.repeat_interleave(torch.arange(len(rows)), sizes), firsts


def keep_groups_verl(inputs: Values, params: Values) -> Values:
    rewards, group_ids, firsts = flat(inputs["groups"])
    keep = (groups.group_std(rewards.double(), group_ids) > 0) | (group_sizes(group_ids) == 1)
    return {"keep": keep[firsts]}


def keep_groups_slime(inputs: Values, params: Values) -> Values:
    rewards, group_ids, firsts = flat(inputs["groups"])
    return {"keep": (groups.group_std(rewards.double(), group_ids) > 1e-6)[firsts]}


def mean_inside(rewards: Tensor, group_ids: Tensor, low: float, high: float) -> Tensor:
    mean = groups.group_mean(rewards.double(), group_ids)
    return (mean > low) & (mean < high)


def keep_groups_in_range(inputs: Values, params: Values) -> Values:
    rewards, group_ids, firsts = flat(inputs["groups"])
    return {"keep": mean_inside(rewards, group_ids, *params["range"])[firsts]}


def difficulty_mask(inputs: Values, params: Values) -> Values:
    group_ids = torch.arange(len(inputs["scores"])) // params["n_sample"]
    bounds = (params["low_threshold"], params["high_threshold"])
    return {"keep": mean_inside(inputs["scores"], group_ids, *bounds)}


ADAPTERS = {
    "whiten.masked_whiten.verl": whitened_verl,
    "whiten.masked_whiten.trl": whitened_trl,
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
    "dynamic_sampling.filter.verl": keep_groups_verl,
    "dynamic_sampling.filter.slime": keep_groups_slime,
    "dynamic_sampling.filter.openrlhf": keep_groups_in_range,
    "dynamic_sampling.difficulty_mask.roll": difficulty_mask,
}
