"""Policy losses of OpenRLHF, NeMo-RL, AReaL, slime, ROLL and prime-rl."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from atomrl.atoms import (
    advantages as advantage_atoms,
)
from atomrl.atoms import kl, masks, policy_losses
from atomrl.atoms import policy_losses as importance_sampling
from atomrl.atoms import policy_losses as reductions
from atomrl.atoms import policy_losses as trust_region
from tests.parity.adapters.kl import weighted_kl
from tests.parity.arranging import (
    SMALL,
    Values,
    every,
    fraction,
    row_mean,
    rows,
    sequence_mean,
    thinned,
    token_sum,
    zero_as_negative,
)
from tests.parity.arranging import mean as thin_mean

KL = {"k1": "k1_kl", "k2": "k2_kl", "k3": "k3_kl"}


def number(value: Any, default: float | None = None) -> float | None:
    return default if value is None else float(value)


def per_token_result(loss: Tensor, mask: Tensor, **others: Any) -> Values:
    return {"per_token_loss": loss, "objective": masks.masked_sum(loss, mask), **others}


def slime_ppo(inputs: Values, params: Values) -> Values:
    advantages, mask = inputs["advantages"], inputs["mask"]
    ratio = policy_losses.token_ratio(inputs["log_probs"], inputs["old_log_probs"], mask)
    bounds = float(params["eps_clip"]), float(params["eps_clip_high"])
    dual = number(params.get("eps_clip_c"))
    loss = policy_losses.clipped_policy_loss(ratio, advantages, *bounds, dual_clip=dual)
    return per_token_result(loss, mask, clip_mask=policy_losses.clipped_tokens(ratio, advantages, *bounds))


def slime_cispo(inputs: Values, params: Values) -> Values:
    advantages, mask = inputs["advantages"], inputs["mask"]
    ratio = policy_losses.token_ratio(inputs["log_probs"], inputs["old_log_probs"], mask)
    low, high = float(params["eps_clip"]), float(params["eps_clip_high"])
    loss = policy_losses.cispo_loss(inputs["log_probs"], ratio, advantages, mask, low, high)
    return per_token_result(loss, mask, clip_mask=policy_losses.out_of_bounds(ratio, 1 - low, 1 + high))


def roll(inputs: Values, params: Values) -> Values:
    log_probs, old, advantages, mask = (inputs[k] for k in ("log_probs", "old_log_probs", "advantages", "mask"))
    ratio = policy_losses.token_ratio(log_probs, old, mask)
    variant = params["variant"]
    if variant == "topr":
        positive, negative = float(params["topr_positive_weight"]), float(params["topr_negative_weight"])
        weights = torch.where(
            inputs["scores"][:, None] > 0, positive, negative * importance_sampling.truncated_weights(ratio, 1.0)
        )
        loss = policy_losses.reinforce_loss(log_probs, advantages, mask, weights)
    elif variant == "kimi15":
        loss = policy_losses.reinforce_loss(log_probs, advantages, mask)
        loss = loss + float(params["kimi15_tau"]) * kl.k2_kl(log_probs, old, mask)
    elif variant == "tis":
        low, high = float(params["tis_lower_bound"]), float(params["tis_upper_bound"])
        weights = importance_sampling.truncated_weights(ratio, high, low)
        loss = policy_losses.reinforce_loss(log_probs, advantages, mask, weights)
    elif variant == "cispo":
        low, high = float(params["cispo_epsilon_low"]), float(params["cispo_epsilon_high"])
        loss = policy_losses.cispo_loss(log_probs, ratio, advantages, mask, low, high)
        if params["cispo_use_unified_mask"]:
            loss = loss.masked_fill(policy_losses.clipped_tokens(ratio, advantages, low, high), 0.0)
    else:
        clip = float(params["pg_clip"])
        loss = policy_losses.clipped_policy_loss(ratio, advantages, clip, clip, dual_clip=1 + 2 * clip)
    return per_token_result(loss, mask)


def openrlhf(inputs: Values, params: Values) -> Values:
    log_probs, old, advantages, mask = (inputs[k] for k in ("log_probs", "old_log_probs", "advantages", "mask"))
    bounds = float(params["clip_eps_low"]), float(params["clip_eps_high"])
    correction, rollout = params.get("is_correction"), inputs.get("rollout_log_probs")
    factors: list[Tensor] = []
    by_token = bool(params["token_level_loss"])
    if params["policy_loss_type"] == "gspo":
        ratio = rows(policy_losses.sequence_log_ratio(log_probs, rollout if correction else old, mask).exp(), mask)
        by_token = False
    else:
        ratio = policy_losses.token_ratio(log_probs, old, mask, clamp=20.0)
        if correction:
            factors = openrlhf_correction(old, rollout, mask, correction, params["is_threshold"])
    loss = policy_losses.clipped_policy_loss(ratio, advantages, *bounds, dual_clip=number(params.get("dual_clip")))
    weights = reductions.token_mean(mask) if by_token else sequence_mean(mask)
    metrics = {
        "loss": reductions.weighted_sum(loss, weights, *factors),
        "clip_ratio": fraction(policy_losses.clipped_tokens(ratio, advantages, *bounds), mask),
        "ppo_kl": masks.masked_mean(kl.k1_kl(old, log_probs, mask), mask),
    }
    if rollout is not None:
        metrics["vllm_kl"] = masks.masked_mean(kl.k1_kl(rollout, old, mask), mask)
    return metrics


def openrlhf_correction(old: Tensor, rollout: Tensor, mask: Tensor, kind: str, bounds: list[float]) -> list[Tensor]:
    low, high = map(float, bounds)
    log_ratio = importance_sampling.rollout_log_ratio(old, rollout, mask)
    weights = importance_sampling.importance_weights(log_ratio)
    if kind == "tis":
        return [importance_sampling.truncated_weights(weights, high, low)]
    if kind == "icepop":
        return [importance_sampling.masked_weights(weights, low, high)]
    means = importance_sampling.importance_weights(masks.row_mean(log_ratio, mask))
    return [weights, rows(importance_sampling.within(means, low, high), mask)]


def areal_ratio(inputs: Values, params: Values) -> tuple[Tensor, Tensor]:
    """The ratio and the advantages, both per token."""
    log_probs, old, advantages, mask = (inputs[k] for k in ("log_probs", "old_log_probs", "advantages", "mask"))
    if params["importance_sampling_level"] == "sequence":
        ratio = policy_losses.sequence_log_ratio(log_probs, old, mask).exp()
        return rows(ratio, mask), rows(masks.row_mean(advantages, mask), mask)
    return policy_losses.token_ratio(log_probs, old, mask), advantages


def areal_rejection(inputs: Values, options: Values) -> tuple[Tensor, Tensor]:
    """The weight of each token, and which tokens are within bounds."""
    old, rollout, mask = inputs["old_log_probs"], inputs["rollout_log_probs"], inputs["mask"]
    lowest = number(options.get("lower"), -math.inf)
    highest = number(options.get("upper"), math.inf)
    log_ratio = importance_sampling.rollout_log_ratio(old, rollout, mask)
    weights = importance_sampling.importance_weights(log_ratio)
    is_ratio, by_row = options["metric"] == "ratio", options["level"] == "sequence"
    statistic = log_ratio if is_ratio else getattr(kl, KL[options["metric"].removeprefix("kl_")])(old, rollout, mask)
    if by_row:
        gather = {"sum": masks.row_sum, "mean": masks.row_mean, "max": masks.row_max}[options["agg"]]
        statistic = rows(gather(statistic, mask), mask)
        if is_ratio:
            weights = rows(importance_sampling.importance_weights(masks.row_mean(log_ratio, mask)), mask)
    if is_ratio:
        statistic = importance_sampling.importance_weights(statistic)
    inside = importance_sampling.within(statistic, lowest, highest)
    if options["action"] == "clamp":
        bounded = importance_sampling.truncated_weights(weights, highest, max(lowest, 0.0))
        return torch.where(inside, weights, bounded), inside
    return weights.masked_fill(~inside, 0.0), inside


def areal(inputs: Values, params: Values) -> Values:
    mask = inputs["mask"]
    ratio, advantages = areal_ratio(inputs, params)
    low = float(params["eps_clip"])
    bounds = low, number(params.get("eps_clip_higher"), low)
    dual = number(params.get("c_clip"))
    loss = policy_losses.clipped_policy_loss(ratio, advantages, *bounds, dual_clip=dual)
    factors, metrics, kept = [], {}, mask
    if params.get("rejection_sampling"):
        options = params["rejection_sampling"]
        weights, inside = areal_rejection(inputs, options)
        kept = mask & inside if options["action"] == "mask" else mask
        metrics = {"behave_imp_weight": weights.masked_fill(~kept, 0.0), "filtered_fraction": fraction(~inside, mask)}
        factors = [weights]
    total = reductions.weighted_sum(loss, reductions.token_mean(mask), *factors)
    dual_clipped = torch.zeros_like(mask)
    if dual is not None:
        dual_clipped = (advantages < 0) & policy_losses.out_of_bounds(ratio.clamp(min=1 - low), -math.inf, dual)
    return metrics | {
        "loss": total,
        "clip_mask": policy_losses.clipped_tokens(ratio, advantages, *bounds) & kept,
        "dual_clip_mask": dual_clipped & kept,
    }


def areal_sapo(inputs: Values, params: Values) -> Values:
    ratio, advantages = areal_ratio(inputs, params)
    loss = policy_losses.sapo_loss(ratio, advantages, float(params["tau_pos"]), float(params["tau_neg"]))
    return {"loss": masks.masked_mean(loss, inputs["mask"])}


def within_both(change: Tensor, low: float, high: float) -> Tensor:
    """A trust region whose bounds hold whatever the advantage."""
    good = torch.ones_like(change)
    keep = [trust_region.trust_region_tokens(change, change.abs(), sign, low, high) for sign in (good, -good)]
    return keep[0] & keep[1]


def prime_rl(inputs: Values, params: Values) -> Values:
    log_probs, behaviour, mask = inputs["log_probs"], inputs["inference_log_probs"], inputs["mask"]
    change = trust_region.probability_change(log_probs, behaviour, mask)
    if params["loss"] == "default_loss_fn":
        low, high = float(params["dppo_mask_low"]), float(params["dppo_mask_high"])
        keep = trust_region.trust_region_tokens(change, change.abs(), zero_as_negative(inputs["advantages"]), low, high)
    elif params["loss"] == "ipo_loss_fn":
        keep = within_both(change, float(params["ipo_threshold"]), float(params["ipo_threshold"]))
    else:
        keep = within_both(change, params.get("dppo_mask_low", 0.2), math.inf)
    if params["loss"] == "ref_kl_loss_fn":
        advantages = kl.k1_kl(inputs["ref_log_probs"], log_probs.detach(), mask)
    else:
        advantages = inputs["advantages"]
    ratio = policy_losses.token_ratio(log_probs, behaviour, mask)
    loss = policy_losses.clipped_policy_loss(ratio, advantages, math.inf, math.inf)
    weights = token_sum(mask)
    policy = reductions.weighted_sum(loss, weights, keep, scale=float(params.get("adv_tau", 1.0)))
    pull = kl.k2_kl(log_probs, behaviour, mask)
    total = policy + reductions.weighted_sum(pull, weights, scale=2 * float(params.get("kl_tau", 1e-3)))
    return {"loss_sum": total, "objective": total}


def nemo_correction(inputs: Values, old: Tensor, mask: Tensor, params: Values) -> tuple[list[Tensor], Values]:
    """The factors of a loss, and their metrics."""
    sequence = bool(params["sequence_level_importance_ratios"])
    token_mask, counted = inputs["mask"], mask
    log_ratio = importance_sampling.rollout_log_ratio(old, inputs["generation_log_probs"], token_mask)
    per_unit = rows(masks.row_sum(log_ratio, token_mask), mask) if sequence else log_ratio
    weights = importance_sampling.importance_weights(per_unit)
    metrics: Values = {}
    kind = params["truncated_importance_sampling_type"]
    high = number(params.get("truncated_importance_sampling_ratio"))
    if params["use_importance_sampling_correction"] and kind is not None and high is not None:
        low = number(params.get("truncated_importance_sampling_ratio_min"), 0.0)
        inside = importance_sampling.within(weights, low, high)
        metrics["is_oob_ratio"] = fraction(~inside, counted, SMALL)
        if kind == "tis":
            weights = importance_sampling.truncated_weights(weights, high, low)
        elif kind == "icepop":
            weights = importance_sampling.masked_weights(weights, low, high)
        else:
            means = importance_sampling.importance_weights(row_mean(log_ratio, token_mask))
            kept = importance_sampling.within(means, low, high)
            metrics["is_oob_ratio"] = fraction(~kept, inputs["sample_mask"], SMALL)
            weights = weights.masked_fill(~rows(kept, mask), 0.0)
    metrics["sampling_importance_ratio"] = thin_mean(weights, counted)
    return ([weights] if params["use_importance_sampling_correction"] else []), metrics


def nemo_ratio(inputs: Values, params: Values) -> tuple[Tensor, Tensor]:
    """The ratio and the old log-probs it is taken to."""
    log_probs, token_mask = inputs["log_probs"], inputs["mask"]
    if params["force_on_policy_ratio"]:
        return policy_losses.token_ratio(log_probs, log_probs.detach(), token_mask), log_probs.detach()
    old = inputs["old_log_probs"]
    if params["sequence_level_importance_ratios"]:
        thin = policy_losses.sequence_log_ratio(log_probs, old, token_mask) * thinned(token_mask.sum(1))
        ratio = thin.exp()
        return advantage_atoms.per_token(ratio, every(token_mask)), old
    return policy_losses.token_ratio(log_probs, old, token_mask), old


def nemo_loss(inputs: Values, params: Values, ratio: Tensor) -> tuple[Tensor, Values]:
    log_probs, advantages, token_mask = inputs["log_probs"], inputs["advantages"], inputs["mask"]
    low, high = float(params["ratio_clip_min"]), float(params["ratio_clip_max"])
    if params["disable_ppo_ratio"]:  # the log-prob is put in the place of the ratio
        ratio = log_probs
    if params["disable_ppo_ratio"] or params["force_on_policy_ratio"]:
        low = high = math.inf
    clamped = importance_sampling.truncated_weights(ratio, 1 + high, 1 - low)
    named = {"probs_ratio": ratio, "probs_ratio_clamped": clamped}
    if params["use_cispo"]:
        return policy_losses.cispo_loss(log_probs, ratio, advantages, token_mask, low, high), named
    dual = number(params.get("ratio_clip_c"))
    return policy_losses.clipped_policy_loss(ratio, advantages, low, high, dual_clip=dual), named


def nemo_penalty(inputs: Values, params: Values) -> Tensor:
    log_probs, mask = inputs["log_probs"], inputs["mask"]
    behaviour = inputs["generation_log_probs"] if params["use_on_policy_kl_approximation"] else log_probs.detach()
    weight = policy_losses.token_ratio(log_probs, behaviour, mask)
    estimator = getattr(kl, KL[params["reference_policy_kl_type"]])
    return weighted_kl(estimator, log_probs, inputs["ref_log_probs"], mask, weight, 20.0, 10.0)


def jensen_shannon(log_probs: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """The distance of two policies from their mixture, by k3."""
    p, q = log_probs.masked_fill(~mask, 0.0), other.masked_fill(~mask, 0.0)
    mixture = torch.logaddexp(p, q) - math.log(2)
    return (kl.k3_kl(mixture, p, mask) + kl.k3_kl(mixture, q, mask)) / 2


def nemo_rl(inputs: Values, params: Values) -> Values:
    log_probs, generation, samples = inputs["log_probs"], inputs["generation_log_probs"], inputs["sample_mask"]
    mask = inputs["mask"] & samples[:, None]
    ratio, old = nemo_ratio(inputs, params)
    loss, named = nemo_loss(inputs, params, ratio)
    factors, metrics = nemo_correction(inputs, old, mask, params)
    if params["token_level_loss"]:
        weights = reductions.token_mean(mask, total_tokens=float(mask.sum()) + SMALL)
    else:
        weights = sequence_mean(mask, float(samples.sum()) + SMALL)
    total = reductions.weighted_sum(loss, weights, *factors)
    if float(params["reference_policy_kl_penalty"]):
        scale = float(params["reference_policy_kl_penalty"])
        total = total + reductions.weighted_sum(nemo_penalty(inputs, params), weights, scale=scale)
    good = mask & (inputs["rewards"] > 0)[:, None]
    nll = policy_losses.reinforce_loss(log_probs, torch.ones_like(log_probs), good)
    positive = thin_mean(nll, good)
    if float(params["positive_example_nll_weight"]):
        total = total + float(params["positive_example_nll_weight"]) * positive
    else:
        positive = torch.zeros(())

    def mean(values: Tensor) -> Tensor:
        return thin_mean(values.detach(), mask)

    estimator = getattr(kl, KL[params["reference_policy_kl_type"]])
    behaved = policy_losses.token_ratio(log_probs, generation, mask)
    entropy = policy_losses.reinforce_loss(log_probs, torch.ones_like(log_probs), mask, behaved)
    metrics |= {name: mean(values) for name, values in named.items()} | {
        "token_mult_prob_error": mean(importance_sampling.importance_weights(kl.abs_kl(generation, old, mask))),
        "gen_kl_error": mean(estimator(generation, old, mask)),
        "policy_kl_error": mean(estimator(old, generation, mask)),
        "js_divergence_error": mean(jensen_shannon(old, generation, mask)),
        "approx_entropy": mean(entropy),
        "positive_nll_loss": positive,
    }
    return {"loss": total, "metrics": metrics}


ADAPTERS = {
    "policy_loss.ppo.slime": slime_ppo,
    "policy_loss.cispo.slime": slime_cispo,
    "policy_loss.pg_variants.roll": roll,
    "policy_loss.policy_loss.openrlhf": openrlhf,
    "policy_loss.decoupled_ppo.areal": areal,
    "policy_loss.sapo.areal": areal_sapo,
    "policy_loss.trust_region.prime_rl": prime_rl,
    "policy_loss.clipped_pg.nemo_rl": nemo_rl,
}
