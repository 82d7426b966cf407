"""Corrections of rollouts: importance weights, rejection, off-policy masks and their metrics."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomrl.atoms import kl, masks, policy_losses, token_filters
from atomrl.atoms import policy_losses as importance_sampling
from atomrl.atoms import policy_losses as reductions
from tests.parity.arranging import (
    SMALL,
    Values,
    clamped_kl,
    every,
    fraction,
    mean,
    row_mean,
    rows,
    thinned,
)

ESTIMATORS = {"k1": "k1_kl", "k2": "k2_kl", "k3": "k3_kl"}


def bounds_of(threshold: Any) -> tuple[float | None, float]:
    """verl's thresholds: a number, or "low_high"."""
    parts = [float(part) for part in str(threshold).split("_")]
    return (parts[0], parts[1]) if len(parts) == 2 else (None, parts[0])


def verl_weights_of(
    train: Tensor, rollout: Tensor, mask: Tensor, level: str, threshold: Any, normalise: bool
) -> tuple[Tensor, Tensor]:
    """The weights, and what they were before they were normalised; both 0 off the mask."""
    low, high = bounds_of(threshold)
    raw = raw_weights(train, rollout, mask, level)
    applied = (
        importance_sampling.truncated_weights(raw, high)
        if low is None
        else importance_sampling.masked_weights(raw, low, high)
    ).masked_fill(~mask, 0.0)
    if not normalise:
        return applied, applied
    weights = importance_sampling.normalised_weights(applied, mask, by_row=level == "sequence")
    if level == "token" and mean(applied, mask) > SMALL:
        weights = weights / thinned(mask.sum())
    return weights, applied


def mean_weight(weights: Tensor, mask: Tensor, by_row: bool) -> Tensor:
    average = masks.masked_mean(masks.row_mean(weights, mask), mask.any(1)) if by_row else mean(weights, mask)
    return torch.where(average > SMALL, average, 1.0)


def effective_sample_fraction(weights: Tensor, mask: Tensor) -> Tensor:
    """With verl's epsilons: on both counts and on the mean weight."""
    average, thin = mean(weights, mask), thinned(mask.sum())
    exact = masks.masked_mean(weights, mask).square() / masks.masked_mean(weights.square(), mask)
    return exact * ((average + SMALL) / masks.masked_mean(weights, mask)).square() / thin


def dropped_rows(keep: Tensor, mask: Tensor) -> Tensor:
    return (mask & ~keep).any(1)


def raw_weights(train: Tensor, rollout: Tensor, mask: Tensor, level: str) -> Tensor:
    if level == "token":
        log_ratio = importance_sampling.rollout_log_ratio(train, rollout, mask)
    else:
        log_ratio = rows(masks.row_sum(importance_sampling.rollout_log_ratio(train, rollout, mask), mask), mask)
    return importance_sampling.importance_weights(log_ratio, clamp=20.0)


def verl_weights(inputs: Values, params: Values) -> Values:
    train, rollout, mask = inputs["train_log_probs"], inputs["rollout_log_probs"], inputs["mask"]
    level, (low, high) = params["rollout_is"], bounds_of(params["threshold"])
    weights, applied = verl_weights_of(train, rollout, mask, level, params["threshold"], params["batch_normalize"])
    least = 1 / high if low is None else low
    raw = raw_weights(train, rollout, mask, level)
    sums = masks.row_sum(importance_sampling.rollout_log_ratio(train, rollout, mask), mask)
    if level == "token":
        highest, lowest = applied[mask].max(), applied[mask].min()
        above, below, among = raw > high, raw < least, mask
    else:
        highest = importance_sampling.importance_weights(sums.max(), clamp=20.0)
        lowest = importance_sampling.importance_weights(sums.min())
        products = importance_sampling.importance_weights(sums)
        above, below, among = products > high, products < least, every(sums)
    by_row = row_mean(applied, mask)
    raw_rows = row_mean(raw, mask)
    clamped = importance_sampling.truncated_weights(applied, high)
    metrics = {
        "rollout_is_mean": mean(applied, mask),
        "rollout_is_max": highest,
        "rollout_is_min": lowest,
        "rollout_is_ratio_fraction_high": fraction(above, among),
        "rollout_is_ratio_fraction_low": fraction(below, among),
        "rollout_is_std": (mean(clamped.square(), mask) - mean(clamped, mask).square()).clamp(min=0).sqrt(),
        "rollout_is_eff_sample_size": effective_sample_fraction(clamped, mask),
        "rollout_is_seq_mean": by_row.mean(),
        "rollout_is_seq_std": by_row.std() if len(by_row) > 1 else 0.0,
        "rollout_is_seq_max": by_row.max(),
        "rollout_is_seq_min": by_row.min(),
        "rollout_is_seq_max_deviation": (by_row - 1).abs().max(),
        "rollout_is_seq_fraction_high": fraction(raw_rows > high, every(raw_rows)),
        "rollout_is_seq_fraction_low": fraction(raw_rows < least, every(raw_rows)),
        "rollout_is_oob_ratio": fraction(~importance_sampling.within(raw, least, high), mask),
    }
    factor = mean_weight(applied, mask, by_row=level == "sequence")
    return {"weights": weights, "metrics": metrics | {"rollout_is_batch_norm_factor": factor}}


class Rule(NamedTuple):
    """One of verl's rejection options."""

    statistic: Tensor
    """[B, T], or [B] of a whole row."""
    tested: Tensor
    low: float
    high: float
    among: Tensor
    kept: Tensor
    """[B, T]"""


def rejection_rule(train: Tensor, rollout: Tensor, mask: Tensor, option: str, threshold: str) -> Rule:
    unit, estimator = option.rsplit("_", 1)
    values = clamped_kl(getattr(kl, ESTIMATORS[estimator]), rollout, train, mask, of_ratio=20.0)
    if unit == "token":
        statistic, among = values, mask
    else:
        among = mask.any(1)
        if unit == "seq_mean":
            statistic = row_mean(values, mask)
        else:
            statistic = {"seq_sum": masks.row_sum, "seq_max": masks.row_max}[unit](values, mask)
    low, high = bounds_of(threshold)
    low, tested = -math.inf if low is None else low, statistic
    if estimator == "k1":  # its bounds are on the ratio
        low = 1 / high if low == -math.inf else low
        tested = importance_sampling.importance_weights(statistic)
    inside = importance_sampling.within(tested, low, high)
    return Rule(statistic, tested, low, high, among, inside if unit == "token" else rows(inside, mask))


def rejection_rules(
    train: Tensor, rollout: Tensor, mask: Tensor, options: str, thresholds: Any
) -> tuple[Tensor, dict[str, Rule]]:
    """Return the tokens that all options keep, and those that each option keeps."""
    rules = {
        option: rejection_rule(train, rollout, mask, option, threshold)
        for option, threshold in zip(options.split(","), str(thresholds).split(","), strict=True)
    }
    keep = every(mask)
    for rule in rules.values():
        keep = keep & rule.kept
    return keep, rules


def rejection(inputs: Values, params: Values) -> Values:
    mask, metrics = inputs["mask"], {}
    keep, rules = rejection_rules(
        inputs["train_log_probs"], inputs["rollout_log_probs"], mask, params["rollout_rs"], params["threshold"]
    )
    for option, rule in rules.items():
        spread = rule.statistic if rule.statistic.ndim == 2 else rows(rule.statistic, mask)
        name = f"rollout_rs_{option}"
        metrics |= {
            f"{name}_mean": mean(spread, mask),
            f"{name}_max": rule.statistic[rule.among].max(),
            f"{name}_min": rule.statistic[rule.among].min(),
            f"{name}_fraction_high": fraction(rule.tested > rule.high, rule.among),
            f"{name}_fraction_low": fraction(rule.tested < rule.low, rule.among),
            f"{name}_masked_fraction": fraction(~rule.kept, mask),
            f"{name}_seq_masked_fraction": fraction(dropped_rows(rule.kept, mask), mask.any(1)),
        }
    dropped = dropped_rows(keep, mask)
    metrics |= {
        "rollout_rs_masked_fraction": fraction(~keep, mask),
        "rollout_rs_seq_masked_fraction": fraction(dropped, every(dropped)),
    }
    return {"new_mask": mask & keep, "metrics": metrics}


def offpolicy_metrics(inputs: Values, params: Values) -> Values:
    train, rollout, mask = inputs["train_log_probs"], inputs["rollout_log_probs"], inputs["mask"]
    log_ratio = importance_sampling.rollout_log_ratio(train, rollout, mask)
    means = {"train": row_mean(train, mask), "rollout": row_mean(rollout, mask)}
    gap = kl.k1_kl(means["rollout"][:, None], means["train"][:, None], every(mask[:, :1]))
    metrics = {
        "training_ppl": (-means["train"]).exp().mean(),
        "training_log_ppl": -means["train"].mean(),
        "rollout_ppl": (-means["rollout"]).exp().mean(),
        "rollout_log_ppl": -means["rollout"].mean(),
        "kl": mean(kl.k1_kl(rollout, train, mask), mask),
        "k3_kl": mean(kl.k3_kl(rollout, train, mask), mask),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": importance_sampling.importance_weights(gap).mean(),
        "chi2_token": mean(chi_square(log_ratio), mask),
        "chi2_seq": chi_square(masks.row_sum(log_ratio, mask)).mean(),
    }
    return {"metrics": metrics}


def chi_square(log_ratio: Tensor) -> Tensor:
    return importance_sampling.importance_weights(log_ratio, clamp=20.0).square() - 1


def importance_ratio(inputs: Values, params: Values) -> Values:
    mask, rollout = inputs["mask"], inputs["rollout_log_probs"]
    # A log-prob that the engine did not give (NaN) counts as a ratio of 1.
    log_ratio = importance_sampling.rollout_log_ratio(inputs["train_log_probs"], rollout, mask & ~rollout.isnan())
    level, action = params["mode"].split("_")
    if level == "sequence":
        log_ratio = masks.row_sum(log_ratio, mask)[:, None]
    weights = importance_sampling.importance_weights(log_ratio)
    low = 0.0 if params["clip_min"] is None else float(params["clip_min"])
    high = math.inf if params["clip_max"] is None else float(params["clip_max"])
    if action == "truncate":
        return {"ratio": importance_sampling.truncated_weights(weights, high, low)}
    return {"ratio": importance_sampling.masked_weights(weights, low, high)}


def opsm_trl(inputs: Values, params: Values) -> Values:
    return {"keep": trl_sequence_mask(inputs, float(params["off_policy_threshold"]))}


def trl_sequence_mask(inputs: Values, bound: float) -> Tensor:
    """[B, 1]. A log-prob that the engine did not give (NaN) adds 0 to the mean and counts in it."""
    sampled = inputs.get("sampling_log_probs", inputs.get("old_log_probs"))
    known = inputs["mask"] & ~sampled.isnan()
    gaps = kl.k1_kl(sampled, inputs["log_probs"].detach(), known)
    divergence = masks.row_mean(gaps, inputs["mask"])
    return importance_sampling.off_policy_sequences(divergence, inputs["advantages"][:, None], bound)


def opsm_slime(inputs: Values, params: Values) -> Values:
    mask = inputs["mask"]
    divergence = masks.row_mean(kl.k1_kl(inputs["old_log_probs"], inputs["log_probs"], mask), mask)
    keep = importance_sampling.off_policy_sequences(divergence, inputs["advantages"], float(params["opsm_delta"]))
    per_column = masks.row_max(reductions.sequence_mean(mask, total_rows=1.0), mask)
    return {
        "keep_mask": keep,
        "masked_sequence_count": reductions.weighted_sum((~keep).to(divergence.dtype), rows(per_column, mask)),
        "gspo_sequence_kl": rows(divergence, mask),
    }


def m2po(inputs: Values, params: Values) -> Values:
    log_ratio = importance_sampling.rollout_log_ratio(
        inputs["proximal_log_probs"], inputs["behaviour_log_probs"], inputs["mask"]
    )
    return {
        "new_mask": importance_sampling.second_moment_tokens(log_ratio, inputs["mask"], float(params["m2_threshold"]))
    }


def high_entropy(inputs: Values, params: Values) -> Values:
    keep = token_filters.high_entropy_tokens(inputs["entropies"], inputs["mask"], 1 - float(params["threshold"]))
    return {"entropy_mask": keep}


def off_policy_correction(inputs: Values, params: Values) -> list[Tensor]:
    """SkyRL's factors of a loss, as its `off_policy_correction` section asks for them."""
    if "rollout_log_probs" not in inputs:
        return []
    mask = inputs["mask"]
    log_ratio = importance_sampling.rollout_log_ratio(inputs["old_log_probs"], inputs["rollout_log_probs"], mask)
    weights = importance_sampling.importance_weights(log_ratio, clamp=20.0)
    product = importance_sampling.importance_weights(masks.row_sum(log_ratio, mask))
    factors: list[Tensor] = []
    if params.get("tis_ratio_type") == "token":
        factors.append(importance_sampling.truncated_weights(weights, float(params["token_tis_ratio_clip_high"])))
    if params.get("tis_ratio_type") == "sequence":
        truncated = importance_sampling.truncated_weights(product, float(params["sequence_tis_ratio_clip_high"]))
        factors.append(rows(truncated, mask))
    metric = params.get("sequence_mask_metric")
    if metric == "product":
        kept = importance_sampling.within(
            product, float(params["product_mask_low"]), float(params["product_mask_high"])
        )
        factors.append(rows(kept, mask))
    if metric == "geometric":
        mean = importance_sampling.importance_weights(masks.row_mean(log_ratio, mask))
        kept = importance_sampling.within(mean, float(params["geo_mask_low"]), float(params["geo_mask_high"]))
        factors.append(rows(kept, mask))
    token = [params.get(f"token_mask_is_threshold_{side}") for side in ("low", "high")]
    if None not in token:
        factors.append(importance_sampling.within(weights, *map(float, token)))
    outlier = [params.get(f"outlier_token_is_threshold_{side}") for side in ("low", "high")]
    if outlier != [None, None]:
        low, high = (
            (-math.inf if outlier[0] is None else float(outlier[0])),
            (math.inf if outlier[1] is None else float(outlier[1])),
        )
        inside = ~policy_losses.out_of_bounds(weights, low, high)
        factors.append(rows(~dropped_rows(inside, mask), mask))
    return factors


ADAPTERS = {
    "rollout_correction.weights.verl": verl_weights,
    "rollout_correction.rejection.verl": rejection,
    "rollout_correction.offpolicy_metrics.verl": offpolicy_metrics,
    "rollout_correction.importance_ratio.trl": importance_ratio,
    "off_policy.opsm.trl": opsm_trl,
    "off_policy.opsm_and_gspo_kl.slime": opsm_slime,
    "off_policy.m2po_mask.areal": m2po,
    "token_selection.high_entropy_mask.trl": high_entropy,
}
