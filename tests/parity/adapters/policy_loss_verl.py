"""verl's policy losses."""

from __future__ import annotations

import math

from torch import Tensor

from atomrl.atoms import kl, masks, policy_losses, token_filters
from atomrl.atoms import policy_losses as importance_sampling
from atomrl.atoms import policy_losses as reductions
from atomrl.atoms import policy_losses as sequence_losses
from atomrl.atoms import policy_losses as trust_region
from tests.parity.adapters.corrections import rejection_rules, verl_weights_of
from tests.parity.arranging import (
    Values,
    clamped_kl,
    every,
    fraction,
    row_mean,
    thinned,
    verl_weights,
    zero_as_negative,
)


def reduced(per_token: Tensor, inputs: Values, mode: str, *factors: Tensor) -> Tensor:
    given = [inputs["rollout_is_weights"]] if "rollout_is_weights" in inputs else []
    weights = verl_weights(mode, inputs["mask"])
    return reductions.weighted_sum(per_token, weights, *given, *factors)


def ppo_kl(inputs: Values, clamp: float | None = None) -> Tensor:
    old, new, mask = inputs["old_log_probs"], inputs["log_probs"], inputs["mask"]
    return masks.masked_mean(clamped_kl(kl.k1_kl, old, new.detach(), mask, of_ratio=clamp), mask)


def bounds(params: Values) -> dict[str, float]:
    return {"clip_low": float(params["clip_ratio_low"]), "clip_high": float(params["clip_ratio_high"])}


def vanilla(inputs: Values, params: Values) -> Values:
    advantages, mask, dual = inputs["advantages"], inputs["mask"], float(params["clip_ratio_c"])
    ratio = policy_losses.token_ratio(inputs["log_probs"], inputs["old_log_probs"], mask, clamp=20.0)
    loss = policy_losses.clipped_policy_loss(ratio, advantages, **bounds(params), dual_clip=dual)
    floor = 1 - bounds(params)["clip_low"]
    lower = (advantages < 0) & policy_losses.out_of_bounds(ratio.clamp(min=floor), -math.inf, dual)
    metrics = {
        "pg_clipfrac": fraction(policy_losses.clipped_tokens(ratio, advantages, **bounds(params)), mask),
        "pg_clipfrac_lower": fraction(lower, mask),
        "ppo_kl": ppo_kl(inputs, 20.0),
    }
    return {"loss": reduced(loss, inputs, params["loss_agg_mode"]), "metrics": metrics}


def gspo(inputs: Values, params: Values) -> Values:
    advantages, mask = inputs["advantages"], inputs["mask"]
    ratio = policy_losses.sequence_token_log_ratio(
        inputs["log_probs"], inputs["old_log_probs"], mask, ceiling=10.0
    ).exp()
    loss = policy_losses.clipped_policy_loss(ratio, advantages, **bounds(params))
    metrics = {
        "pg_clipfrac": fraction(policy_losses.clipped_tokens(ratio, advantages, **bounds(params)), mask),
        "pg_clipfrac_lower": 0.0,
        "ppo_kl": ppo_kl(inputs),
    }
    return {"loss": reduced(loss, inputs, "seq-mean-token-mean"), "metrics": metrics}


def sapo(inputs: Values, params: Values) -> Values:
    ratio = policy_losses.token_ratio(inputs["log_probs"], inputs["old_log_probs"], inputs["mask"], clamp=20.0)
    loss = policy_losses.sapo_loss(ratio, inputs["advantages"], float(params["tau_pos"]), float(params["tau_neg"]))
    metrics = {"pg_clipfrac": 0.0, "pg_clipfrac_lower": 0.0, "ppo_kl": ppo_kl(inputs, 20.0)}
    return {"loss": reduced(loss, inputs, "seq-mean-token-mean"), "metrics": metrics}


def cispo(inputs: Values, params: Values) -> Values:
    mask = inputs["mask"]
    ratio = policy_losses.token_ratio(inputs["log_probs"], inputs["old_log_probs"], mask, clamp=20.0)
    loss = policy_losses.cispo_loss(inputs["log_probs"], ratio, inputs["advantages"], mask, **bounds(params))
    low, high = 1 - bounds(params)["clip_low"], 1 + bounds(params)["clip_high"]
    metrics = {
        "pg_clipfrac": fraction(policy_losses.out_of_bounds(ratio, low, high), mask),
        "pg_clipfrac_lower": 0.0,
        "ppo_kl": ppo_kl(inputs, 20.0),
    }
    return {"loss": reduced(loss, inputs, params["loss_agg_mode"]), "metrics": metrics}


def gpg(inputs: Values, params: Values) -> Values:
    loss = policy_losses.reinforce_loss(inputs["log_probs"], inputs["advantages"], inputs["mask"])
    return {"loss": reduced(loss, inputs, params["loss_agg_mode"]), "metrics": {}}


def dro(inputs: Values, params: Values) -> Values:
    loss = policy_losses.reinforce_loss(inputs["log_probs"], inputs["advantages"], inputs["mask"])
    loss = loss + float(params["dro_beta"]) * kl.k2_kl(inputs["log_probs"], inputs["old_log_probs"], inputs["mask"])
    return {"loss": reduced(loss, inputs, params["loss_agg_mode"]), "metrics": {"ppo_kl": ppo_kl(inputs)}}


def clip_cov(inputs: Values, params: Values) -> Values:
    log_probs, advantages, mask = inputs["log_probs"], inputs["advantages"], inputs["mask"]
    ratio = policy_losses.token_ratio(log_probs, inputs["old_log_probs"], mask)
    loss = policy_losses.clipped_policy_loss(ratio, advantages, **bounds(params))
    keep = token_filters.clip_covariance_tokens(
        token_filters.token_covariance(log_probs, advantages, mask),
        ~policy_losses.clipped_tokens(ratio, advantages, **bounds(params)),
        mask,
        float(params["clip_cov_ratio"]),
        float(params["clip_cov_lb"]),
        float(params["clip_cov_ub"]),
    )
    metrics = {"pg_clipfrac": fraction(~keep, mask), "ppo_kl": ppo_kl(inputs)}
    return {"loss": reduced(loss, inputs, params["loss_agg_mode"], keep), "metrics": metrics}


def kl_cov(inputs: Values, params: Values) -> Values:
    log_probs, old, mask = inputs["log_probs"], inputs["old_log_probs"], inputs["mask"]
    ratio = policy_losses.token_ratio(log_probs, old, mask)
    loss = policy_losses.clipped_policy_loss(ratio, inputs["advantages"], math.inf, math.inf)
    covariance = token_filters.token_covariance(log_probs, inputs["advantages"], mask)
    picked = token_filters.highest_covariance_tokens(covariance, mask, float(params["kl_cov_ratio"]))
    distance = kl.abs_kl(log_probs, old, mask)
    mode = params["loss_agg_mode"]
    total = reduced(loss, inputs, mode) + float(params["ppo_kl_coef"]) * reduced(distance, inputs, mode, picked)
    return {"loss": total, "metrics": {"ppo_kl": masks.masked_mean(distance, mask)}}


def geo_mean(inputs: Values, params: Values) -> Values:
    advantages, mask = inputs["advantages"], inputs["mask"]
    log_ratio = policy_losses.token_log_ratio(inputs["log_probs"], inputs["old_log_probs"], mask)
    low, high = bounds(params).values()
    clipped = sequence_losses.sequence_clipped_log_ratio(log_ratio, advantages, low, high)
    thin = thinned(mask.sum(1))[:, None]
    loss = sequence_losses.geometric_mean_loss(clipped * thin, row_mean(advantages, mask), mask)[:, None]
    factors = []
    if "rollout_is_weights" in inputs:
        factors = [row_mean((inputs["rollout_is_weights"] + 1e-10).log(), mask).exp()[:, None]]
    outside = policy_losses.out_of_bounds(log_ratio, -low, high)
    metrics = {
        "pg_clipfrac": fraction(outside & (advantages > 0), mask),
        "pg_clipfrac_lower": fraction(outside & (advantages < 0), mask),
        "ppo_kl": ppo_kl(inputs),
    }
    row_weights = reductions.token_mean(every(loss))
    return {"loss": reductions.weighted_sum(loss, row_weights, *factors), "metrics": metrics}


def dppo(inputs: Values, params: Values, divergence: str) -> Values:
    log_probs, old, mask = inputs["log_probs"], inputs["old_log_probs"], inputs["mask"]
    cap = float(params["clip_ratio_c"])
    ratio = policy_losses.token_ratio(log_probs, old, mask, clamp=20.0)
    change = trust_region.probability_change(log_probs, old, mask)
    moved = change.abs() if divergence == "tv" else trust_region.binary_kl(log_probs, old, mask)
    low, high = bounds(params).values()
    keep = trust_region.trust_region_tokens(change, moved, zero_as_negative(inputs["advantages"]), low, high)
    weights = importance_sampling.truncated_weights(ratio, cap)
    loss = policy_losses.reinforce_loss(log_probs, inputs["advantages"], mask, weights)
    metrics = {
        "pg_clipfrac": fraction(~keep, mask),
        "pg_clipfrac_lower": fraction(policy_losses.out_of_bounds(ratio, -math.inf, cap) & keep, mask),
        "ppo_kl": ppo_kl(inputs, 20.0),
    }
    return {"loss": reduced(loss, inputs, params["loss_agg_mode"], keep), "metrics": metrics}


def bypass_mode(inputs: Values, params: Values) -> Values:
    train, rollout, mask = inputs["log_probs"].detach(), inputs["rollout_log_probs"], inputs["mask"]
    kept = {**inputs, "old_log_probs": rollout}
    factors, metrics = [], {}
    if params.get("rollout_is"):
        normalise = params.get("rollout_is_batch_normalize", False)
        weights, applied = verl_weights_of(
            train, rollout, mask, params["rollout_is"], params["rollout_is_threshold"], normalise
        )
        factors, metrics["rollout_is_mean"] = [weights], masks.masked_mean(applied, mask)
    if params.get("rollout_rs"):
        keep, _ = rejection_rules(train, rollout, mask, params["rollout_rs"], params["rollout_rs_threshold"])
        kept["mask"] = mask & keep
        metrics["rollout_rs_masked_fraction"] = fraction(~keep, mask)
    if params["loss_type"] == "ppo_clip":
        ours = vanilla(kept, params)
        return {"loss": ours["loss"], "metrics": metrics | ours["metrics"]}
    loss = policy_losses.reinforce_loss(inputs["log_probs"], inputs["advantages"], kept["mask"])
    return {
        "loss": reduced(loss, kept, params["loss_agg_mode"], *factors),
        "metrics": metrics | {"ppo_kl": ppo_kl(kept)},
    }


ADAPTERS = {
    "policy_loss.vanilla.verl": vanilla,
    "policy_loss.gspo.verl": gspo,
    "policy_loss.sapo.verl": sapo,
    "policy_loss.cispo.verl": cispo,
    "policy_loss.gpg.verl": gpg,
    "policy_loss.dro.verl": dro,
    "policy_loss.clip_cov.verl": clip_cov,
    "policy_loss.kl_cov.verl": kl_cov,
    "policy_loss.geo_mean.verl": geo_mean,
    "policy_loss.dppo_tv.verl": lambda inputs, params: dppo(inputs, params, "tv"),
    "policy_loss.dppo_kl.verl": lambda inputs, params: dppo(inputs, params, "kl"),
    "policy_loss.bypass_mode.verl": bypass_mode,
}
