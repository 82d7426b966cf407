"""TRL's policy losses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from atomrl.atoms import auxiliary_losses as value_losses
from atomrl.atoms import kl, masks, policy_losses, token_filters
from atomrl.atoms import policy_losses as importance_sampling
from atomrl.atoms import policy_losses as reductions
from atomrl.atoms import policy_losses as sequence_losses
from tests.parity.adapters.corrections import trl_sequence_mask
from tests.parity.arranging import Values, every, fraction, rows


def weights_and_scale(params: Values, mask: Tensor) -> tuple[Tensor, float]:
    accumulated = float(params.get("gradient_accumulation_steps", 1))
    kind = params["loss_type"]
    if kind in ("dapo", "cispo", "vespo"):
        total = max(float(params["num_items_in_batch"]), 1.0)
        scale = float(params.get("steps_per_generation", 1)) / accumulated
        return reductions.token_mean(mask, total_tokens=total), scale
    if kind == "bnpo":
        return reductions.token_mean(mask), 1 / accumulated
    if kind in ("dr_grpo", "luspo"):
        length = int(params["max_completion_length"]) if kind == "dr_grpo" else 1
        return reductions.constant_length(mask, length), 1 / accumulated
    return reductions.sequence_mean(mask, total_rows=float(len(mask))), 1 / accumulated


def ratio_of(inputs: Values, level: str) -> Tensor:
    """[B, T], or [B, 1] at sequence level."""
    arguments = inputs["log_probs"], inputs["old_log_probs"], inputs["mask"]
    if level == "sequence":
        return policy_losses.sequence_log_ratio(*arguments).exp()[:, None]
    return (
        policy_losses.token_ratio(*arguments)
        if level == "token"
        else policy_losses.sequence_token_log_ratio(*arguments).exp()
    )


def per_token(inputs: Values, params: Values) -> tuple[Tensor, Values]:
    """The loss per token and the metrics."""
    kind, mask, log_probs = params["loss_type"], inputs["mask"], inputs["log_probs"]
    spread = rows(inputs["advantages"], mask)
    if kind == "vespo":
        phi = sequence_losses.vespo_weights(
            policy_losses.token_log_ratio(log_probs, inputs["old_log_probs"], mask),
            inputs["advantages"],
            mask,
            inputs.get("importance_sampling_ratio") if params.get("importance_sampling_correction") else None,
            *(float(params[name]) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")),
        )
        loss = policy_losses.reinforce_loss(log_probs, spread, mask, rows(phi, mask))
        return loss, {"vespo/phi_seq_mean": phi.mean()}
    ratio = ratio_of(inputs, params["importance_sampling_level"])
    advantages = inputs["advantages"][:, None].expand(ratio.shape)
    low, high = float(params["epsilon_low"]), float(params["epsilon_high"])
    if kind == "cispo":
        # `epsilon_high` is the cap itself and may be below 1, which is no CISPO clip range.
        cut = policy_losses.out_of_bounds(ratio, -math.inf, high) & (advantages > 0)
        weights = importance_sampling.truncated_weights(ratio, high)
        loss = policy_losses.reinforce_loss(log_probs, spread, mask, weights)
        return loss, {"cispo_clip_ratio": fraction(cut, mask)}
    if kind == "sapo":
        return policy_losses.sapo_loss(ratio, advantages, float(params["tau_pos"]), float(params["tau_neg"])), {}
    delta = None if params.get("delta") is None else float(params["delta"])
    loss = policy_losses.clipped_policy_loss(ratio, advantages, low, high, ratio_cap=delta)
    capped = ratio if delta is None else importance_sampling.truncated_weights(ratio, delta)
    among = mask if ratio.shape == mask.shape else every(ratio)
    return loss.expand(mask.shape), clip_metrics(capped, advantages, among, low, high)


def clip_metrics(ratio: Tensor, advantages: Tensor, among: Tensor, low: float, high: float) -> Values:
    bounds = {"low": (low, math.inf), "high": (math.inf, high), "region": (low, high)}
    return {
        f"clip_ratio/{name}_mean": fraction(policy_losses.clipped_tokens(ratio, advantages, *bound), among)
        for name, bound in bounds.items()
    }


def factors_of(inputs: Values, params: Values) -> tuple[list[Tensor], Tensor]:
    """Return the factor of each token's loss, and the tokens of the entropy bonus."""
    mask, factors = inputs["mask"], []
    if params.get("off_policy_mask_threshold") is not None:
        keep = trl_sequence_mask(inputs, float(params["off_policy_mask_threshold"]))
        factors.append(keep.expand(mask.shape))
    selected = mask
    if params.get("top_entropy_quantile", 1.0) < 1.0:
        quantile = float(params["top_entropy_quantile"])
        selected = token_filters.high_entropy_tokens(inputs["entropies"].float(), mask, quantile)
        factors.append(selected)
    if params.get("importance_sampling_correction") and params["loss_type"] != "vespo":
        factors.append(inputs["importance_sampling_ratio"].expand(mask.shape))
    return factors, selected


def grpo_trainer(inputs: Values, params: Values) -> Values:
    mask, log_probs = inputs["mask"], inputs["log_probs"]
    loss, metrics = per_token(inputs, params)
    factors, selected = factors_of(inputs, params)
    weights, scale = weights_and_scale(params, mask)
    total = reductions.weighted_sum(loss, weights, *factors, scale=scale)
    if float(params.get("beta", 0.0)):
        penalty = kl.k3_kl(log_probs, inputs["ref_log_probs"], mask)
        if params.get("use_bias_correction_kl"):
            ratio = ratio_of(inputs, params["importance_sampling_level"]).expand(mask.shape)
            penalty = penalty * ratio.masked_fill(~mask, 0.0)
        total = total + float(params["beta"]) * reductions.weighted_sum(penalty, weights, scale=scale)
        metrics = metrics | {"kl": masks.masked_mean(penalty, mask)}
    # Logged before it is divided by the number of accumulated micro-batches.
    metrics = metrics | {"policy_loss": total if params["loss_type"] in ("dapo", "cispo", "vespo") else total / scale}
    if float(params.get("entropy_coef", 0.0)):
        accumulated = float(params.get("gradient_accumulation_steps", 1))
        bonus = reductions.token_mean(selected)
        total = total - reductions.weighted_sum(
            inputs["entropies"], bonus, scale=float(params["entropy_coef"]) / accumulated
        )
    return {"loss": total, "metrics": metrics}


def gmpo(inputs: Values, params: Values) -> Values:
    mask, row_advantages = inputs["mask"], inputs["advantages"]
    advantages = rows(row_advantages, mask)
    log_ratio = policy_losses.token_log_ratio(inputs["log_probs"], inputs["old_log_probs"], mask)
    low, high = float(params["epsilon_low"]), float(params["epsilon_high"])
    clipped = sequence_losses.sequence_clipped_log_ratio(log_ratio, advantages, low, high)
    loss = sequence_losses.geometric_mean_loss(clipped, row_advantages, mask)
    total, metrics = masks.masked_mean(loss, every(loss)), {}
    if float(params.get("beta", 0.0)):
        weights = reductions.sequence_mean(mask, total_rows=float(len(mask)))
        penalty = kl.k3_kl(inputs["log_probs"], inputs["ref_log_probs"], mask)
        total = total + reductions.weighted_sum(penalty, weights, scale=float(params["beta"]))
        metrics = {"kl": masks.masked_mean(penalty, mask)}
    sides = {
        "low": policy_losses.out_of_bounds(log_ratio, -low, math.inf) & (advantages < 0),
        "high": policy_losses.out_of_bounds(log_ratio, -math.inf, high) & (advantages > 0),
    }
    sides["region"] = sides["low"] | sides["high"]
    metrics |= {f"clip_ratio/{side}_mean": fraction(flags, mask) for side, flags in sides.items()}
    return {"loss": total, "metrics": metrics}


def rloo(inputs: Values, params: Values) -> Values:
    advantages = inputs["advantages"][:, None]
    arguments = inputs["log_probs"], inputs["old_log_probs"], inputs["mask"]
    ratio = policy_losses.sequence_log_ratio(*arguments, length_normalised=False).exp()[:, None]
    low, high = float(params["epsilon_low"]), float(params["epsilon_high"])
    loss = policy_losses.clipped_policy_loss(ratio, advantages, low, high)
    metrics = clip_metrics(ratio, advantages, every(ratio), low, high)
    return {"loss": masks.masked_mean(loss, every(loss)), "metrics": metrics}


def up_to(last: Tensor, like: Tensor) -> Tensor:
    return torch.arange(like.shape[1]) <= last[:, None]


def ppo_with_value(inputs: Values, params: Values) -> Values:
    last: Any = inputs["last_token_index"]
    mask, value_mask = up_to(last, inputs["log_probs"]), up_to(last + 1, inputs["value_predictions"])
    ratio = policy_losses.token_ratio(inputs["log_probs"], inputs["old_log_probs"], mask)
    clip, value_clip = float(params["cliprange"]), float(params["cliprange_value"])
    policy = masks.masked_mean(policy_losses.clipped_policy_loss(ratio, inputs["advantages"], clip, clip), mask)
    arguments = inputs["value_predictions"], inputs["old_values"], inputs["returns"], value_mask, value_clip
    value = masks.masked_mean(value_losses.clipped_value_loss(*arguments), value_mask)
    clipped = fraction(value_losses.clipped_values(*arguments), value_mask)
    return {
        "loss": policy + float(params["vf_coef"]) * value,
        "policy_loss": policy,
        "value_loss": value,
        "metrics": {"value_clip_frac": clipped},
    }


ADAPTERS = {
    "policy_loss.ppo_family.trl": grpo_trainer,
    "policy_loss.gspo.trl": grpo_trainer,
    "policy_loss.gspo_token.trl": grpo_trainer,
    "policy_loss.cispo.trl": grpo_trainer,
    "policy_loss.sapo.trl": grpo_trainer,
    "policy_loss.luspo.trl": grpo_trainer,
    "policy_loss.vespo.trl": grpo_trainer,
    "policy_loss.modifiers.trl": grpo_trainer,
    "policy_loss.gmpo.trl": gmpo,
    "policy_loss.rloo_sequence_ppo.trl": rloo,
    "policy_loss.ppo_with_value.trl": ppo_with_value,
}
