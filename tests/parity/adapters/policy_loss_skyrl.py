"""SkyRL's policy losses: sums over the mask, as the average is already in the advantages."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atomrl.atoms import kl, policy_losses, token_filters
from atomrl.atoms import policy_losses as reductions
from atomrl.atoms import policy_losses as trust_region
from tests.parity.adapters.corrections import off_policy_correction
from tests.parity.arranging import Values, fraction, token_sum


def summed(per_token: Tensor, mask: Tensor, *factors: Tensor, scale: float = 1.0) -> Tensor:
    return reductions.weighted_sum(per_token, token_sum(mask), *factors, scale=scale)


def bounds(params: Values) -> tuple[float, float]:
    return float(params["eps_clip_low"]), float(params["eps_clip_high"])


def clipped_loss(inputs: Values, params: Values) -> tuple[Tensor, Tensor]:
    ratio = policy_losses.token_ratio(inputs["log_probs"], inputs["old_log_probs"], inputs["mask"], clamp=20.0)
    dual = float(params["clip_ratio_c"]) if params.get("policy_loss_type", "dual_clip") == "dual_clip" else None
    loss = policy_losses.clipped_policy_loss(ratio, inputs["advantages"], *bounds(params), dual_clip=dual)
    return loss, policy_losses.clipped_tokens(ratio, inputs["advantages"], *bounds(params))


def ppo(inputs: Values, params: Values) -> Values:
    loss, clipped = clipped_loss(inputs, params)
    factors = off_policy_correction(inputs, params)
    total = summed(loss, inputs["mask"], *factors)
    return {"loss": total, "metrics": {"clip_ratio": fraction(clipped, inputs["mask"])}}


def reduction_weights(params: Values, mask: Tensor) -> Tensor:
    """`loss_reduction`."""
    mode = params["loss_reduction"]
    if mode == "token_mean":
        return reductions.token_mean(mask)
    if mode == "sequence_mean":
        return reductions.sequence_mean(mask, total_rows=float(len(mask)))
    if mode == "seq_mean_token_sum_norm":
        return reductions.constant_length(mask, int(params["max_seq_len"]))
    parts = slices(params, len(mask))
    ids = torch.cat([torch.full((end - start,), index) for index, (start, end) in enumerate(parts)])
    at = torch.cat([torch.arange(start, end) for start, end in parts])
    weights = reductions.group_token_mean(mask[at], ids)
    return torch.zeros(mask.shape).index_copy(0, at, weights)


def slices(params: Values, count: int) -> list[tuple[int, int]]:
    """Rows of each prompt, or of each micro-batch; what is left over after whole micro-batches has no weight."""
    if params["loss_reduction"] == "prompt_mean":
        return [(start, end) for start, end in params["prompt_boundaries"]]
    size = int(params["micro_batch_size"])
    return [(start, start + size) for start in range(0, count - size + 1, size)]


def ppo_with_reduction(inputs: Values, params: Values) -> Values:
    mask = inputs["mask"]
    loss, clipped = clipped_loss(inputs, params)
    weights = reduction_weights(params, mask)
    return {
        "loss": reductions.weighted_sum(loss, weights),
        "metrics": {"clip_ratio": fraction(clipped, mask)},
    }


def row_scale(params: Values, mask: Tensor) -> Tensor:
    """Return the factor of each row's advantages, also off the mask and for rows without a token."""
    mode, lengths, count = params["loss_reduction"], mask.sum(1), len(mask)
    if mode == "token_mean":
        return 1 / lengths.sum().clamp(min=1).expand(count)
    if mode == "sequence_mean":
        return 1 / (count * lengths.clamp(min=1))
    if mode == "seq_mean_token_sum_norm":
        return torch.full((count,), 1 / (count * int(params["max_seq_len"])))
    scale, parts = torch.zeros(count), slices(params, count)
    for start, end in parts:
        scale[start:end] = 1 / (len(parts) * lengths[start:end].sum().clamp(min=1))
    return scale


def loss_reduction(inputs: Values, params: Values) -> Values:
    advantages, mask = inputs["advantages"], inputs["mask"]
    weights = reduction_weights(params, mask)
    return {
        "scaled_advantages": advantages * row_scale(params, mask)[:, None],
        "summed": reductions.weighted_sum(advantages, weights),
    }


def gspo(inputs: Values, params: Values) -> Values:
    mask = inputs["mask"]
    ratio = policy_losses.sequence_token_log_ratio(
        inputs["log_probs"], inputs["old_log_probs"], mask, ceiling=10.0
    ).exp()
    loss = policy_losses.clipped_policy_loss(ratio, inputs["advantages"], *bounds(params))
    clipped = policy_losses.clipped_tokens(ratio, inputs["advantages"], *bounds(params))
    return {"loss": summed(loss, mask), "metrics": {"clip_ratio": fraction(clipped, mask)}}


def sapo(inputs: Values, params: Values) -> Values:
    ratio = policy_losses.token_ratio(inputs["log_probs"], inputs["old_log_probs"], inputs["mask"], clamp=20.0)
    loss = policy_losses.sapo_loss(ratio, inputs["advantages"], float(params["tau_pos"]), float(params["tau_neg"]))
    return {"loss": summed(loss, inputs["mask"]), "metrics": {}}


def cispo(inputs: Values, params: Values) -> Values:
    mask, advantages = inputs["mask"], inputs["advantages"]
    anchor = inputs["rollout_log_probs" if params["cispo_anchor"] == "rollout" else "old_log_probs"]
    ratio = policy_losses.token_ratio(inputs["log_probs"], anchor, mask, clamp=20.0).detach()
    low, high = float(params["cispo_eps_clip_low"]), float(params["cispo_eps_clip_high"])
    loss = policy_losses.cispo_loss(inputs["log_probs"], ratio, advantages, mask, low, high)
    clamped = policy_losses.cispo_loss(-torch.ones_like(ratio), ratio, torch.ones_like(ratio), mask, low, high)
    metrics = {
        "clip_ratio": fraction(policy_losses.out_of_bounds(ratio, 1 - low, 1 + high), mask),
        "cispo/ratio_mean": fraction(ratio, mask),
        "cispo/ratio_clamped_mean": fraction(clamped, mask),
        "cispo/ratio_max": ratio[mask].max(),
        "cispo/ratio_min": ratio[mask].min(),
    }
    return {"loss": summed(loss, mask), "metrics": metrics}


def rollout_is(inputs: Values, params: Values) -> Values:
    mask, (low, high) = inputs["mask"], bounds(params)
    ratio = policy_losses.token_ratio(inputs["log_probs"], inputs["rollout_log_probs"], mask, clamp=20.0)
    inside = (ratio > 1 - low) & (ratio < 1 + high)
    loss = policy_losses.reinforce_loss(inputs["log_probs"], inputs["advantages"], mask, ratio)
    return {"loss": summed(loss, mask, inside), "metrics": {"clip_ratio": fraction(~inside, mask)}}


def dppo(inputs: Values, params: Values) -> Values:
    log_probs, mask = inputs["log_probs"], inputs["mask"]
    behaviour = inputs.get("rollout_log_probs", inputs["old_log_probs"])
    ratio = policy_losses.token_ratio(log_probs, behaviour, mask, clamp=20.0)
    change = trust_region.probability_change(log_probs, behaviour, mask)
    tv = params["dppo_type"] == "binary_tv"
    moved = change.abs() if tv else trust_region.binary_kl(log_probs, behaviour, mask)
    low, high = float(params["delta_low"]), float(params["delta_high"])
    keep = trust_region.trust_region_tokens(change, moved, inputs["advantages"], low, high)
    loss = policy_losses.clipped_policy_loss(ratio, inputs["advantages"], math.inf, math.inf)
    return {"loss": summed(loss, mask, keep), "metrics": {"clip_ratio": fraction(~keep, mask)}}


def clip_cov(inputs: Values, params: Values) -> Values:
    log_probs, advantages, mask = inputs["log_probs"], inputs["advantages"], inputs["mask"]
    ratio = policy_losses.token_ratio(log_probs, inputs["old_log_probs"], mask)
    loss = policy_losses.clipped_policy_loss(ratio, advantages, *bounds(params))
    keep = token_filters.clip_covariance_tokens(
        token_filters.token_covariance(log_probs, advantages, mask),
        ~policy_losses.clipped_tokens(ratio, advantages, *bounds(params)),
        mask,
        float(params["clip_ratio"]),
        float(params["clip_cov_lb"]),
        float(params["clip_cov_ub"]),
    )
    return {"loss": summed(loss, mask, keep), "metrics": {"clip_ratio": fraction(~keep, mask)}}


def kl_cov(inputs: Values, params: Values) -> Values:
    log_probs, advantages, old, mask = (inputs[k] for k in ("log_probs", "advantages", "old_log_probs", "mask"))
    loss = policy_losses.clipped_policy_loss(
        policy_losses.token_ratio(log_probs, old, mask), advantages, math.inf, math.inf
    )
    covariance = token_filters.token_covariance(log_probs, advantages, mask)
    picked = token_filters.highest_covariance_tokens(covariance, mask, float(params["kl_cov_frac"]))
    penalty = summed(kl.abs_kl(log_probs, old, mask), mask, picked, scale=float(params["ppo_kl_coef"]))
    return {"loss": summed(loss, mask) + penalty, "metrics": {}}


ADAPTERS = {
    "policy_loss.ppo.skyrl": ppo,
    "policy_loss.ppo_with_reduction.skyrl": ppo_with_reduction,
    "policy_loss.gspo.skyrl": gspo,
    "policy_loss.sapo.skyrl": sapo,
    "policy_loss.cispo.skyrl": cispo,
    "policy_loss.rollout_is.skyrl": rollout_is,
    "policy_loss.dppo.skyrl": dppo,
    "policy_loss.clip_cov.skyrl": clip_cov,
    "policy_loss.kl_cov.skyrl": kl_cov,
    "aggregation.loss_reduction.skyrl": loss_reduction,
}
