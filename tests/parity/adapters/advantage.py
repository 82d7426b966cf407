"""Advantage estimators with baselines."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from atomrl.atoms import advantages, kl, masks, shaping
from atomrl.atoms import advantages as baselines
from atomrl.atoms import advantages as groups
from atomrl.atoms import masks as whiten
from atomrl.atoms import returns as gae
from tests.parity.adapters.returns import (
    clamped_k3,
    mask_with_last_column,
    returns_by_turn,
    stepped_gae,
    stepped_returns,
    thinly_whitened,
)
from tests.parity.arranging import (
    SMALL,
    Values,
    every,
    group_sizes,
    raw_if_alone,
)


def consecutive(rows: int, size: int) -> Tensor:
    return torch.arange(rows) // size


def one_group(values: Tensor) -> Tensor:
    return torch.zeros(len(values), dtype=torch.int64)


def by_token(scalar: Tensor, mask: Tensor) -> Values:
    """Most peers spread one number per completion over its tokens, and call the same thing the return."""
    spread = advantages.per_token(scalar, mask)
    return {"advantages": spread, "returns": spread}


# Group baselines of verl and SkyRL: rewards per token, summed over all columns.


def score(inputs: Values) -> Tensor:
    rewards = inputs["token_level_rewards"]
    return masks.row_sum(rewards, every(rewards))


def centred_or_raw(scores: Tensor, ids: Tensor) -> Tensor:
    return raw_if_alone(advantages.group_mean_baseline(scores, ids), scores, ids)


def zscore_or_raw(scores: Tensor, ids: Tensor, eps: float) -> Tensor:
    alone = advantages.standardised(scores, torch.ones_like(scores), eps)
    return raw_if_alone(advantages.group_zscore(scores, ids, eps), alone, ids)


def grpo_by_token(inputs: Values, params: Values) -> Values:
    scores, ids = score(inputs), inputs["group_ids"]
    scalar = zscore_or_raw(scores, ids, params["epsilon"]) if params["norm_by_std"] else centred_or_raw(scores, ids)
    return by_token(scalar, inputs["mask"])


def rloo_by_token(raw: bool, inputs: Values, params: Values) -> Values:
    scores, ids = score(inputs), inputs["group_ids"]
    scalar = advantages.leave_one_out_baseline(scores, ids)
    return by_token(raw_if_alone(scalar, scores, ids) if raw else scalar, inputs["mask"])


def passk_by_token(inputs: Values, params: Values) -> Values:
    scores, ids = score(inputs), inputs["group_ids"]
    scalar = baselines.best_minus_second(scores, ids)
    if params["norm_by_std"]:
        scalar = advantages.standardised(scalar, groups.group_std(scores, ids), eps=params["epsilon"])
    return by_token(scalar, inputs["mask"])


def opo_by_token(inputs: Values, params: Values) -> Values:
    scores, ids = score(inputs), inputs["group_ids"]
    scalar = baselines.length_weighted_baseline(scores, inputs["mask"].sum(1), ids)
    return by_token(raw_if_alone(scalar, scores, ids), inputs["mask"])


def gpg_by_token(inputs: Values, params: Values) -> Values:
    scores = score(inputs)
    centred = centred_or_raw(scores, inputs["group_ids"])
    return by_token(baselines.rescaled_by_share(centred, scores != 0, params["f_norm"]), inputs["mask"])


def maxrl_by_token(inputs: Values, params: Values) -> Values:
    scores, ids, eps = score(inputs).double(), inputs["group_ids"], params["epsilon"]
    average = groups.group_mean(scores, ids)
    # It divides by a mean that is not above 0 too.
    divided = advantages.group_mean_baseline(scores, ids) / (average + eps)
    scalar = torch.where(average > 0, advantages.maxrl_advantage(scores, ids, eps), divided)
    return by_token(raw_if_alone(scalar, scores, ids), inputs["mask"])


def remax(inputs: Values, params: Values) -> Values:
    mask = inputs["mask"]
    returns = stepped_returns(inputs["token_level_rewards"], mask)
    greedy = inputs["reward_baselines"][:, None].expand_as(returns)
    return {"returns": returns, "advantages": baselines.return_minus_baseline(returns, greedy, mask)}


def optimal_token(by_token: bool, inputs: Values, params: Values) -> Values:
    mask, weights = inputs["mask"], inputs.get("rollout_is_weights")
    returns = stepped_returns(inputs["token_level_rewards"], mask)
    energy = baselines.cumulative_score_norm(inputs["old_log_probs"], inputs["sum_pi_squared"], mask, weights)
    baseline = baselines.optimal_token_baseline(
        returns,
        energy,
        mask,
        inputs["group_ids"],
        eps=params["epsilon"],
        by_token=by_token,
        zero_tail=params["handle_zero_tail"],
    )
    return {"returns": returns, "advantages": baselines.return_minus_baseline(returns, baseline, mask)}


def reinforce_plus_plus_verl(inputs: Values, params: Values) -> Values:
    mask = inputs["mask"]
    returns = gae.discounted_returns(inputs["token_level_rewards"], mask, params["gamma"])
    return {"returns": returns, "advantages": thinly_whitened(returns, mask)}


def reinforce_plus_plus_skyrl(inputs: Values, params: Values) -> Values:
    mask = inputs["mask"]
    returns = returns_by_turn(inputs["token_level_rewards"], mask, params["gamma"])
    return {"returns": returns, "advantages": whiten.masked_whiten(returns, mask)}


def reinforce_plus_plus_baseline(inputs: Values, params: Values) -> Values:
    mask = inputs["mask"]
    scalar = centred_or_raw(score(inputs), inputs["group_ids"])
    white = thinly_whitened(advantages.per_token(scalar, mask), mask)
    return {"advantages": white, "returns": white}


def gdpo_by_token(inputs: Values, params: Values) -> Values:
    ids, mask = inputs["group_ids"], inputs["mask"]
    standard = partial(zscore_or_raw, eps=params["epsilon"]) if params["norm_by_std"] else centred_or_raw
    parts = torch.stack([standard(part, ids) for part in inputs["reward_components"]], 1)
    total = shaping.weighted_reward(parts, weights_of(params["weights"], parts))
    return {"advantages": thinly_whitened(advantages.per_token(total, mask), mask)}


def weights_of(weights: Any, parts: Tensor) -> Tensor:
    return torch.ones(parts.shape[1]) if weights is None else torch.tensor(weights, dtype=parts.dtype)


# TRL: several reward functions, each of which may have nothing to say.


def trl_reward(inputs: Values, params: Values) -> tuple[Tensor, Tensor]:
    parts = inputs["rewards_per_func"]
    rewards = shaping.weighted_reward(parts, weights_of(params["reward_weights"], parts))
    return rewards, consecutive(len(rewards), params["num_generations"])


def grpo_trl(inputs: Values, params: Values) -> Values:
    rewards, ids = trl_reward(inputs, params)
    centred = advantages.group_mean_baseline(rewards, ids)
    if params["scale_rewards"] == "none":
        return {"advantages": centred}
    std = groups.group_std(rewards, ids if params["scale_rewards"] == "group" else one_group(rewards))
    return {"advantages": advantages.standardised(centred, std, eps=params["epsilon"])}


def gdpo_trl(inputs: Values, params: Values) -> Values:
    parts, eps = inputs["rewards_per_func"], params["epsilon"]
    ids = consecutive(len(parts), params["num_generations"])
    parts = torch.stack([advantages.group_zscore(part, ids, eps=eps, missing="nan") for part in parts.T], 1)
    total = shaping.weighted_reward(parts, weights_of(params["reward_weights"], parts))
    return {"advantages": advantages.group_zscore(total, one_group(total), eps=eps)}


def rloo_trl(inputs: Values, params: Values) -> Values:
    rewards, ids = trl_reward(inputs, params)
    mask = inputs["mask"]
    if params["reward_clip_range"] is not None:
        rewards = shaping.clipped_reward(rewards, *params["reward_clip_range"])
    divergence = masks.row_sum(kl.k1_kl(inputs["log_probs"], inputs["ref_log_probs"], mask), mask)
    # One column: the KL of the whole completion.
    rewards = shaping.kl_penalised_reward(rewards[:, None], divergence[:, None], params["beta"])[:, 0]
    if not params["normalize_advantages"]:
        return {"advantages": advantages.leave_one_out_baseline(rewards, ids)}
    centred = advantages.leave_one_out_baseline(rewards, ids, missing="nan")
    return {"advantages": advantages.group_zscore(centred, one_group(centred), eps=params["epsilon"])}


# NeMo-RL, prime-rl, AReaL and ROLL: one reward per completion.


def leave_one_out_std(rewards: Tensor, ids: Tensor) -> Tensor:
    """Standard deviation of the other completions; 0 in a group of two."""
    exact, count = rewards.double(), group_sizes(ids)
    everyone = groups.group_std(exact, ids).square() * (count - 1)
    others = everyone - advantages.group_mean_baseline(exact, ids).square() * count / (count - 1).clamp(min=1)
    # The difference of equal numbers is rounding error, not spread.
    others = others.masked_fill((others < 1e-12 * everyone) | (count < 3), 0.0)
    return (others / (count - 2).clamp(min=1)).sqrt().to(rewards.dtype)


def leave_one_out_zscore(rewards: Tensor, ids: Tensor, eps: float) -> Tensor:
    centred = advantages.leave_one_out_baseline(rewards, ids)
    return advantages.standardised(centred, leave_one_out_std(rewards, ids), eps=eps)


def grpo_nemo_rl(inputs: Values, params: Values) -> Values:
    rewards, ids = inputs["rewards"], inputs["group_ids"]
    if params["leave_one_out"]:
        baseline, std = groups.leave_one_out_mean(rewards, ids), leave_one_out_std(rewards, ids)
        centred = advantages.leave_one_out_baseline(rewards, ids)
    else:
        baseline, std = groups.group_mean(rewards, ids), groups.group_std(rewards, ids)
        centred = advantages.group_mean_baseline(rewards, ids)
    if params["normalize"]:
        centred = advantages.standardised(centred, std, eps=params["epsilon"])
    return {"advantages": centred, "baseline": baseline, "std": std}


def gdpo_nemo_rl(inputs: Values, params: Values) -> Values:
    ids, eps = inputs["group_ids"], params["epsilon"]
    standard = leave_one_out_zscore if params["leave_one_out"] else advantages.group_zscore
    parts = torch.stack([standard(part, ids, eps=eps) for part in inputs["reward_components"]], 1)
    total = shaping.weighted_reward(parts, weights_of(params["weights"], parts))
    return {"advantages": advantages.group_zscore(total, one_group(total), eps=0.0)}


def raw_nemo_rl(inputs: Values, params: Values) -> Values:
    rewards, mask = inputs["rewards"], inputs["mask"]
    spread = advantages.per_token(advantages.raw_reward(rewards, one_group(rewards)), every(mask))
    return {"advantages": floor_whitened(spread, mask) if params["normalize_advantages"] else spread}


def floor_whitened(values: Tensor, mask: Tensor) -> Tensor:
    """OpenRLHF's and NeMo-RL's: a biased variance of at least 1e-8, and the same map of what is off the mask."""
    exact, count = values.double(), mask.sum()
    variance = whiten.masked_variance(exact, mask) * (count - 1) / count.clamp(min=1)
    return ((exact - masks.masked_mean(exact, mask)) / variance.clamp(min=SMALL).sqrt()).to(values.dtype)


def reinforce_plus_plus_nemo_rl(inputs: Values, params: Values) -> Values:
    mask = inputs["mask"]
    scalar = inputs["rewards"]
    if params["minus_baseline"]:
        scalar = advantages.group_mean_baseline(scalar, inputs["group_ids"])
    spread = advantages.per_token(scalar, every(mask))
    if params["kl_coef"] > 0:
        spread = shaping.kl_penalised_reward(spread, clamped_k3(inputs, every(mask)), params["kl_coef"])
    return {"advantages": floor_whitened(spread, mask)}


def reinforce_plus_plus_slime(inputs: Values, params: Values) -> Values:
    rewards, divergence, mask, beta = inputs["rewards"], inputs["kl"], inputs["mask"], params["kl_coef"]
    placed = shaping.reward_at_last_token(rewards, mask)
    penalised = shaping.kl_penalised_reward(placed, divergence, beta, mask)
    spread = advantages.per_token(rewards, every(mask))
    return {
        "returns": stepped_returns(penalised, mask, params["gamma"]),
        "baseline_advantages": shaping.kl_penalised_reward(spread, divergence, beta),
    }


def grpo_or_maxrl_prime_rl(inputs: Values, params: Values) -> Values:
    estimator = {"grpo": advantages.group_mean_baseline, "max_rl": advantages.maxrl_advantage}[params["estimator"]]
    return {"advantages": estimator(inputs["rewards"], one_group(inputs["rewards"]))}


def level_ids(level: str | None, rewards: Tensor, size: int) -> Tensor:
    return consecutive(len(rewards), size) if level == "group" else one_group(rewards)


def normalised_areal(inputs: Values, params: Values) -> Values:
    rewards, size, level = inputs["rewards"], params["group_size"], params["mean_level"]
    ids = level_ids(level, rewards, size)
    if level is None:
        centred = advantages.raw_reward(rewards, ids)
    elif params["leave_one_out"]:
        centred = raw_if_alone(advantages.leave_one_out_baseline(rewards, ids), rewards, ids)
    else:
        centred = advantages.group_mean_baseline(rewards, ids)
    if params["std_level"] is None:
        return {"normalized": centred}
    scale_ids = level_ids(params["std_level"], rewards, size)
    # About the baseline, which need not be the mean of the group that shares a scale.
    count = group_sizes(scale_ids)
    squares = groups.group_mean(centred.double().square(), scale_ids) * count
    std = (squares / (count - int(params["std_unbiased"])).clamp(min=1)).sqrt().to(centred.dtype)
    return {"normalized": advantages.standardised(centred, std, eps=params["eps"])}


def normalised_roll(inputs: Values, params: Values) -> Values:
    rewards, size = inputs["rewards"], params["n_sample"]
    ids = level_ids(params["norm_mean_type"], rewards, size)
    baseline = advantages.raw_reward if params["norm_mean_type"] is None else advantages.group_mean_baseline
    centred = baseline(rewards, ids)
    if params["norm_std_type"] is None:
        return {"normalized": centred}
    std = groups.group_std(rewards, level_ids(params["norm_std_type"], rewards, size))
    return {"normalized": advantages.standardised(centred, std, eps=params["epsilon"])}


# OpenRLHF: one function for all of its estimators.


def openrlhf_baseline(estimator: str, rewards: Tensor, ids: Tensor) -> Tensor:
    if estimator == "group_norm":
        return advantages.group_zscore(rewards, ids, eps=1e-9)
    if estimator == "rloo":
        return advantages.leave_one_out_baseline(rewards, ids)
    centred = estimator in {"reinforce_baseline", "dr_grpo"}
    return (advantages.group_mean_baseline if centred else advantages.raw_reward)(rewards, ids)


def pipeline_openrlhf(inputs: Values, params: Values) -> Values:
    rewards, mask, estimator = inputs["rewards"], inputs["mask"], params["estimator"]
    shaped = openrlhf_baseline(estimator, rewards, consecutive(len(rewards), params["n_samples_per_prompt"]))
    if params["reward_clip_range"] is not None:
        shaped = shaping.clipped_reward(shaped, *params["reward_clip_range"])
    placed = shaping.reward_at_last_token(shaped, mask_with_last_column(mask))
    penalised = shaping.kl_penalised_reward(placed, inputs["kl"], params["kl_coef"])
    if estimator == "gae":
        result = stepped_gae(penalised, inputs["values"], mask, params)
        credit, returns = result["advantages"], result["returns"]
    else:
        credit = returns = stepped_returns(penalised, mask, params["gamma"])
    if estimator in {"gae", "reinforce", "reinforce_baseline"}:
        credit = credit - masks.masked_mean(credit, mask) if params["no_std_norm"] else floor_whitened(credit, mask)
    return {"advantages": credit, "returns": returns}


ADAPTERS = {
    "advantage.grpo.verl": grpo_by_token,
    "advantage.grpo_vectorized.verl": grpo_by_token,
    "advantage.grpo.skyrl": grpo_by_token,
    "advantage.grpo.trl": grpo_trl,
    "advantage.grpo.nemo_rl": grpo_nemo_rl,
    "advantage.grpo_passk.verl": passk_by_token,
    "advantage.rloo.verl": partial(rloo_by_token, True),
    "advantage.rloo_vectorized.verl": partial(rloo_by_token, False),
    "advantage.rloo.skyrl": partial(rloo_by_token, False),
    "advantage.rloo.trl": rloo_trl,
    "advantage.opo.verl": opo_by_token,
    "advantage.gpg.verl": gpg_by_token,
    "advantage.maxrl.skyrl": maxrl_by_token,
    "advantage.group_mean_and_maxrl.prime_rl": grpo_or_maxrl_prime_rl,
    "advantage.remax.verl": remax,
    "advantage.optimal_token_baseline.verl": partial(optimal_token, False),
    "advantage.tir_optimal_token_baseline.verl": partial(optimal_token, True),
    "advantage.reinforce_plus_plus.verl": reinforce_plus_plus_verl,
    "advantage.reinforce_plus_plus.skyrl": reinforce_plus_plus_skyrl,
    "advantage.reinforce_plus_plus.nemo_rl": reinforce_plus_plus_nemo_rl,
    "advantage.reinforce_plus_plus.slime": reinforce_plus_plus_slime,
    "advantage.reinforce_plus_plus_baseline.verl": reinforce_plus_plus_baseline,
    "advantage.gdpo.verl": gdpo_by_token,
    "advantage.gdpo.trl": gdpo_trl,
    "advantage.gdpo.nemo_rl": gdpo_nemo_rl,
    "advantage.raw.nemo_rl": raw_nemo_rl,
    "advantage.normalization.areal": normalised_areal,
    "advantage.reward_norm.roll": normalised_roll,
    "advantage.pipeline.openrlhf": pipeline_openrlhf,
}
