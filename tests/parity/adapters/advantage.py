"""Advantages: from rewards to what each token is credited with."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from atomrl.atoms import advantages, baselines, gae, groups, kl, masks, shaping, whiten

Values = dict[str, Any]
SMALL = 1e-8


def consecutive(rows: int, size: int) -> Tensor:
    return torch.arange(rows) // size


def one_group(values: Tensor) -> Tensor:
    return torch.zeros(len(values), dtype=torch.int64)


def everywhere(mask: Tensor) -> Tensor:
    return torch.ones_like(mask)


def by_token(scalar: Tensor, mask: Tensor) -> Values:
    """Most peers spread one number per completion over its tokens, and call the same thing the return."""
    spread = advantages.per_token(scalar, mask)
    return {"advantages": spread, "returns": spread}


# Group baselines of verl and SkyRL: rewards per token, summed over all columns.


def score(inputs: Values) -> Tensor:
    return shaping.sequence_reward(inputs["token_level_rewards"])


def grpo_by_token(inputs: Values, params: Values) -> Values:
    scores, ids = score(inputs), inputs["group_ids"]
    if params["norm_by_std"]:
        scalar = advantages.group_zscore(scores, ids, eps=params["epsilon"], group_of_one="raw")
    else:
        scalar = advantages.group_mean_baseline(scores, ids, group_of_one="raw")
    return by_token(scalar, inputs["mask"])


def rloo_by_token(group_of_one: Any, inputs: Values, params: Values) -> Values:
    scalar = advantages.leave_one_out_baseline(score(inputs), inputs["group_ids"], group_of_one=group_of_one)
    return by_token(scalar, inputs["mask"])


def passk_by_token(inputs: Values, params: Values) -> Values:
    scores, ids = score(inputs), inputs["group_ids"]
    scalar = baselines.best_minus_second(scores, ids)
    if params["norm_by_std"]:
        scalar = advantages.standardised(scalar, groups.group_std(scores, ids), eps=params["epsilon"])
    return by_token(scalar, inputs["mask"])


def opo_by_token(inputs: Values, params: Values) -> Values:
    lengths = inputs["mask"].sum(1)
    scalar = baselines.length_weighted_baseline(score(inputs), lengths, inputs["group_ids"], group_of_one="raw")
    return by_token(scalar, inputs["mask"])


def gpg_by_token(inputs: Values, params: Values) -> Values:
    scores = score(inputs)
    centred = advantages.group_mean_baseline(scores, inputs["group_ids"], group_of_one="raw")
    return by_token(baselines.rescaled_by_nonzero_rewards(centred, scores, params["f_norm"]), inputs["mask"])


def maxrl_by_token(inputs: Values, params: Values) -> Values:
    scalar = advantages.maxrl_advantage(
        score(inputs), inputs["group_ids"], eps=params["epsilon"], nonpositive_mean="divide", group_of_one="raw"
    )
    return by_token(scalar, inputs["mask"])


def remax(inputs: Values, params: Values) -> Values:
    mask = inputs["mask"]
    returns = gae.discounted_returns(inputs["token_level_rewards"], mask, observation="zero_step")
    greedy = inputs["reward_baselines"][:, None].expand_as(returns)
    return {"returns": returns, "advantages": baselines.return_minus_baseline(returns, greedy, mask)}


def optimal_token(position: Any, inputs: Values, params: Values) -> Values:
    mask, weights = inputs["mask"], inputs.get("rollout_is_weights")
    returns = gae.discounted_returns(inputs["token_level_rewards"], mask, observation="zero_step")
    energy = baselines.cumulative_score_norm(inputs["old_log_probs"], inputs["sum_pi_squared"], mask, weights)
    baseline = baselines.optimal_token_baseline(
        returns,
        energy,
        mask,
        inputs["group_ids"],
        eps=params["epsilon"],
        position=position,
        zero_tail=params["handle_zero_tail"],
    )
    return {"returns": returns, "advantages": baselines.return_minus_baseline(returns, baseline, mask)}


def reinforce_plus_plus(observation: Any, count_eps: float, inputs: Values, params: Values) -> Values:
    mask = inputs["mask"]
    returns = gae.discounted_returns(inputs["token_level_rewards"], mask, params["gamma"], observation)
    return {"returns": returns, "advantages": whiten.masked_whiten(returns, mask, count_eps=count_eps)}


def reinforce_plus_plus_baseline(inputs: Values, params: Values) -> Values:
    mask = inputs["mask"]
    scalar = advantages.group_mean_baseline(score(inputs), inputs["group_ids"], group_of_one="raw")
    white = whiten.masked_whiten(advantages.per_token(scalar, mask), mask, count_eps=SMALL)
    return {"advantages": white, "returns": white}


def gdpo_by_token(inputs: Values, params: Values) -> Values:
    ids, mask = inputs["group_ids"], inputs["mask"]
    if params["norm_by_std"]:
        standard = partial(advantages.group_zscore, eps=params["epsilon"], group_of_one="raw")
    else:
        standard = partial(advantages.group_mean_baseline, group_of_one="raw")
    parts = torch.stack([standard(part, ids) for part in inputs["reward_components"]], 1)
    total = shaping.weighted_reward(parts, weights_of(params["weights"], parts))
    return {"advantages": whiten.masked_whiten(advantages.per_token(total, mask), mask, count_eps=SMALL)}


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


def gae_trl(inputs: Values, params: Values) -> Values:
    last, values = inputs["last_token_index"][:, None], inputs["values"]
    columns = torch.arange(values.shape[1])
    mask, one_more = columns <= last, columns <= last + 1
    estimator = {"k1": kl.k1_kl, "k3": kl.k3_kl}[params["kl_estimator"]]
    divergence = estimator(inputs["log_probs"], inputs["ref_log_probs"], mask)
    placed = shaping.reward_at_last_token(inputs["scores"], mask, one_past=True)
    rewards = shaping.kl_penalised_reward(placed, divergence, params["kl_coef"])
    if params["whiten_rewards"]:
        rewards = whiten.masked_whiten(rewards, one_more, shift_mean=False)
    result = gae.gae(rewards, values, one_more, params["gamma"], params["lam"], observation="zero_step")
    white = whiten.masked_whiten(result["advantages"], mask)
    return {"rewards": rewards, "advantages": white, "returns": result["returns"]}


# GAE.


def gae_whitened(observation: Any, count_eps: float, inputs: Values, params: Values) -> Values:
    rewards, values, mask = inputs["token_level_rewards"], inputs["values"], inputs["mask"]
    result = gae.gae(rewards, values, mask, params["gamma"], params["lam"], observation)
    white = whiten.masked_whiten(result["advantages"], mask, count_eps=count_eps)
    return {"advantages": white, "returns": result["returns"]}


def gae_plain(inputs: Values, params: Values) -> Values:
    rewards, values = inputs["token_level_rewards"], inputs["values"]
    mask = inputs.get("mask", torch.ones_like(values, dtype=torch.bool))
    return dict(gae.gae(rewards, values, mask, params["gamma"], params["lam"], observation="zero_step"))


def clamped_k3(inputs: Values, mask: Tensor) -> Tensor:
    return kl.k3_kl(inputs["log_probs"], inputs["ref_log_probs"], mask, input_clamp=20.0, output_clamp=10.0)


def gae_decoupled(inputs: Values, params: Values) -> Values:
    values, mask, gamma, lam = inputs["values"], inputs["mask"], params["gamma"], params["lam"]
    rewards = shaping.reward_at_last_token(inputs["rewards"], mask)
    if params["kl_coef"] > 0:
        rewards = shaping.kl_penalised_reward(rewards, clamped_k3(inputs, mask), params["kl_coef"])
    of_values = lam if params["lam_value"] is None else params["lam_value"]
    of_policy = lam if params["lam_policy"] is None else params["lam_policy"]
    if params["length_adaptive_alpha"] > 0:
        of_policy = gae.length_adaptive_lambda(mask, params["length_adaptive_alpha"]).to(values.dtype)
    credit = gae.gae(rewards, values, mask, gamma, of_policy)["advantages"]
    if params["normalize_advantages"]:
        credit = whiten.masked_whiten(credit, mask, count_eps=SMALL)
    return {"advantages": credit, "returns": gae.gae(rewards, values, mask, gamma, of_values)["returns"]}


# NeMo-RL, prime-rl, AReaL and ROLL: one reward per completion.


def leave_one_out_zscore(rewards: Tensor, ids: Tensor, eps: float) -> Tensor:
    centred = advantages.leave_one_out_baseline(rewards, ids)
    return advantages.standardised(centred, groups.leave_one_out_std(rewards, ids), eps=eps)


def grpo_nemo_rl(inputs: Values, params: Values) -> Values:
    rewards, ids = inputs["rewards"], inputs["group_ids"]
    if params["leave_one_out"]:
        baseline, std = groups.leave_one_out_mean(rewards, ids), groups.leave_one_out_std(rewards, ids)
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
    spread = advantages.per_token(advantages.raw_reward(rewards, one_group(rewards)), everywhere(mask))
    return {"advantages": floor_whitened(spread, mask) if params["normalize_advantages"] else spread}


def floor_whitened(values: Tensor, mask: Tensor) -> Tensor:
    return whiten.masked_whiten(values, mask, unbiased=False, eps=SMALL, eps_role="floor", keep_off_mask=True)


def reinforce_plus_plus_nemo_rl(inputs: Values, params: Values) -> Values:
    mask = inputs["mask"]
    scalar = inputs["rewards"]
    if params["minus_baseline"]:
        scalar = advantages.group_mean_baseline(scalar, inputs["group_ids"])
    spread = advantages.per_token(scalar, everywhere(mask))
    if params["kl_coef"] > 0:
        spread = shaping.kl_penalised_reward(spread, clamped_k3(inputs, everywhere(mask)), params["kl_coef"])
    return {"advantages": floor_whitened(spread, mask)}


def reinforce_plus_plus_slime(inputs: Values, params: Values) -> Values:
    rewards, divergence, mask, beta = inputs["rewards"], inputs["kl"], inputs["mask"], params["kl_coef"]
    placed = shaping.reward_at_last_token(rewards, mask)
    penalised = shaping.kl_penalised_reward(placed, divergence, beta, mask)
    spread = advantages.per_token(rewards, everywhere(mask))
    return {
        "returns": gae.discounted_returns(penalised, mask, params["gamma"], observation="zero_step"),
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
        centred = advantages.leave_one_out_baseline(rewards, ids, group_of_one="raw")
    else:
        centred = advantages.group_mean_baseline(rewards, ids)
    if params["std_level"] is None:
        return {"normalized": centred}
    scale_ids = level_ids(params["std_level"], rewards, size)
    std = groups.group_root_mean_square(centred, scale_ids, params["std_unbiased"])
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
    placed = shaping.reward_at_last_token(shaped, mask, empty_row="last_column")
    penalised = shaping.kl_penalised_reward(placed, inputs["kl"], params["kl_coef"])
    if estimator == "gae":
        result = gae.gae(penalised, inputs["values"], mask, params["gamma"], params["lam"], observation="zero_step")
        credit, returns = result["advantages"], result["returns"]
    else:
        credit = returns = gae.discounted_returns(penalised, mask, params["gamma"], observation="zero_step")
    if estimator in {"gae", "reinforce", "reinforce_baseline"}:
        if params["no_std_norm"]:
            credit = whiten.masked_mean_baseline(credit, mask, keep_off_mask=True)
        else:
            credit = floor_whitened(credit, mask)
    return {"advantages": credit, "returns": returns}


ADAPTERS = {
    "advantage.grpo.verl": grpo_by_token,
    "advantage.grpo_vectorized.verl": grpo_by_token,
    "advantage.grpo.skyrl": grpo_by_token,
    "advantage.grpo.trl": grpo_trl,
    "advantage.grpo.nemo_rl": grpo_nemo_rl,
    "advantage.grpo_passk.verl": passk_by_token,
    "advantage.rloo.verl": partial(rloo_by_token, "raw"),
    "advantage.rloo_vectorized.verl": partial(rloo_by_token, "zero"),
    "advantage.rloo.skyrl": partial(rloo_by_token, "zero"),
    "advantage.rloo.trl": rloo_trl,
    "advantage.opo.verl": opo_by_token,
    "advantage.gpg.verl": gpg_by_token,
    "advantage.maxrl.skyrl": maxrl_by_token,
    "advantage.group_mean_and_maxrl.prime_rl": grpo_or_maxrl_prime_rl,
    "advantage.remax.verl": remax,
    "advantage.optimal_token_baseline.verl": partial(optimal_token, "column"),
    "advantage.tir_optimal_token_baseline.verl": partial(optimal_token, "token"),
    "advantage.reinforce_plus_plus.verl": partial(reinforce_plus_plus, "skip", SMALL),
    "advantage.reinforce_plus_plus.skyrl": partial(reinforce_plus_plus, "reset", 0.0),
    "advantage.reinforce_plus_plus.nemo_rl": reinforce_plus_plus_nemo_rl,
    "advantage.reinforce_plus_plus.slime": reinforce_plus_plus_slime,
    "advantage.reinforce_plus_plus_baseline.verl": reinforce_plus_plus_baseline,
    "advantage.gdpo.verl": gdpo_by_token,
    "advantage.gdpo.trl": gdpo_trl,
    "advantage.gdpo.nemo_rl": gdpo_nemo_rl,
    "advantage.raw.nemo_rl": raw_nemo_rl,
    "advantage.normalization.areal": normalised_areal,
    "advantage.reward_norm.roll": normalised_roll,
    "advantage.gae.verl": partial(gae_whitened, "skip", SMALL),
    "advantage.gae.skyrl": partial(gae_whitened, "leak", 0.0),
    "advantage.gae.openrlhf": gae_plain,
    "advantage.gae_unmasked.slime": gae_plain,
    "advantage.gae_decoupled.nemo_rl": gae_decoupled,
    "advantage.gae_ppo_pipeline.trl": gae_trl,
    "advantage.pipeline.openrlhf": pipeline_openrlhf,
}
