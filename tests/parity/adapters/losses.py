"""Aggregation, value losses, supervised losses, log-probs and entropies."""

from __future__ import annotations

import torch
from torch import Tensor

from atomrl.atoms import auxiliary_losses as supervised_losses
from atomrl.atoms import auxiliary_losses as value_losses
from atomrl.atoms import logprobs, masks
from atomrl.atoms import policy_losses as reductions
from tests.parity.arranging import (
    SMALL,
    Values,
    every,
    fraction,
    sequence_mean,
    verl_weights,
    written_rows,
)


def number(value: float | None) -> float | None:
    return None if value is None else float(value)


def verl_aggregation(inputs: Values, params: Values) -> Values:
    losses, mask = inputs["per_token_loss"], inputs["mask"]
    mode, rows = params["loss_agg_mode"], number(params.get("global_batch_size"))
    tokens = number(params.get("batch_num_tokens")) if mode == "token-mean" else 1.0
    if mode in ("token-mean", "token-sum"):
        weights = reductions.token_mean(mask, total_tokens=tokens)
    elif mode == "seq-mean-token-mean":
        weights = sequence_mean(mask, rows)
    else:
        length = 1
        if mode == "seq-mean-token-sum-norm":
            length = int(params.get("loss_scale_factor") or mask.shape[1])
        weights = reductions.constant_length(mask, length, written_rows(mask) if rows is None else rows)
    return {"loss": reductions.weighted_sum(losses, weights, scale=float(params.get("dp_size", 1)))}


def openrlhf_aggregation(inputs: Values, params: Values) -> Values:
    losses, mask, scale = inputs["per_token_loss"], inputs["mask"], float(params.get("dp_size", 1))
    if params["token_level_loss"]:
        total = number(params.get("batch_num_tokens"))
        weights = reductions.token_mean(mask, total_tokens=total)
    else:
        weights = sequence_mean(mask, number(params.get("global_batch_size")))
    return {"loss": reductions.weighted_sum(losses, weights, scale=scale)}


def roll_aggregation(inputs: Values, params: Values) -> Values:
    losses, mask, mode = inputs["per_token_loss"], inputs["mask"], params["loss_agg_mode"]
    rows = len(mask) + SMALL
    if mode == "token-mean":  # the mask is counted and not applied
        weights = reductions.token_mean(every(losses), total_tokens=max(1.0, float(mask.sum())))
    elif mode == "seq-mean-token-mean":
        weights = sequence_mean(mask, rows)
    elif mode == "seq-mean-token-sum":
        weights = reductions.constant_length(mask, 1, total_rows=rows)
    else:
        weights = reductions.constant_length(mask, mask.shape[1], total_rows=1.0)
    return {"loss": reductions.weighted_sum(losses, weights)}


def value(inputs: Values, clip: float | None, huber_delta: float | None = None) -> Tensor:
    arguments = inputs["value_predictions"], inputs["old_values"], inputs["returns"], inputs["mask"]
    return value_losses.clipped_value_loss(*arguments, clip, huber_delta)


def value_clip_fraction(inputs: Values, clip: float | None, eps: float) -> Tensor | float:
    if clip is None:
        return 0.0
    arguments = inputs["value_predictions"], inputs["old_values"], inputs["returns"], inputs["mask"]
    return fraction(value_losses.clipped_values(*arguments, clip), inputs["mask"], eps)


def verl_value(inputs: Values, params: Values) -> Values:
    clip = float(params["cliprange_value"])
    losses = value(inputs, clip)
    weights = verl_weights(params["loss_agg_mode"], inputs["mask"])
    return {
        "loss": reductions.weighted_sum(losses, weights),
        "clip_frac": value_clip_fraction(inputs, clip, eps=1e-8),
    }


def openrlhf_value(inputs: Values, params: Values) -> Values:
    losses, mask = value(inputs, number(params.get("clip_eps"))), inputs["mask"]
    weights = reductions.token_mean(mask) if params["token_level_loss"] else sequence_mean(mask)
    return {"loss": reductions.weighted_sum(losses, weights)}


def skyrl_value(inputs: Values, params: Values) -> Values:
    losses = value(inputs, number(params.get("value_clip")))
    weights = reductions.sequence_mean(inputs["mask"], total_rows=float(len(losses)))
    return {"loss": reductions.weighted_sum(losses, weights)}


def nemo_value(inputs: Values, params: Values) -> Values:
    clip = number(params.get("cliprange"))
    losses = value(inputs, clip)
    weights = reductions.token_mean(inputs["mask"], total_tokens=float(inputs["mask"].sum()) + SMALL)
    return {
        "loss": reductions.weighted_sum(losses, weights, scale=float(params["scale"])),
        "clip_frac": value_clip_fraction(inputs, clip, eps=1e-8),
    }


def areal_value(inputs: Values, params: Values) -> Values:
    delta = {"mse": None, "huber": float(params["huber_delta"])}[params["loss_fn_type"]]
    losses = value(inputs, number(params.get("value_eps_clip")), delta)
    return {"loss": masks.masked_mean(losses, inputs["mask"])}


def openrlhf_sft(inputs: Values, params: Values) -> Values:
    losses = supervised_losses.nll_loss(inputs["log_probs"], inputs["mask"])
    weights = reductions.token_mean(inputs["mask"]) if params["token_level_loss"] else sequence_mean(inputs["mask"])
    return {"loss": reductions.weighted_sum(losses, weights)}


def trl_sft(inputs: Values, params: Values) -> Values:
    atom = {"nll": supervised_losses.nll_loss, "dft": supervised_losses.dft_loss}[params["loss_type"]]
    losses, given = atom(inputs["log_probs"], inputs["mask"]), params.get("num_items_in_batch")
    total = None if given is None else max(float(given), 1.0)
    weights = reductions.token_mean(inputs["mask"], total_tokens=total)
    return {"loss": reductions.weighted_sum(losses, weights)}


def entropy_and_logprobs(inputs: Values, params: Values) -> Values:
    logits, weights = inputs["logits"], inputs["weights"]
    entropy, chosen = logprobs.token_entropy(logits), logprobs.token_logprobs(logits, inputs["token_ids"])
    return {
        "entropy": entropy,
        "log_probs": chosen,
        "sum_pi_squared": ((2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1)).exp(),
        "objective": {
            "weighted_entropy": reductions.weighted_sum(entropy, weights),
            "weighted_log_probs": reductions.weighted_sum(chosen, weights),
        },
    }


def entropy_loss(inputs: Values, params: Values) -> Values:
    entropy = logprobs.token_entropy(inputs["logits"])
    weights = verl_weights(params["loss_agg_mode"], inputs["mask"])
    return {"entropy_loss": reductions.weighted_sum(entropy, weights)}


def selective_log_softmax(inputs: Values, params: Values) -> Values:
    chosen = logprobs.token_logprobs(inputs["logits"], inputs["token_ids"], float(params["temperature"]))
    return {"log_probs": torch.where(inputs["row_mask"], chosen, 0.0)}


ADAPTERS = {
    "aggregation.agg_loss.verl": verl_aggregation,
    "aggregation.agg_loss.roll": roll_aggregation,
    "aggregation.aggregate_loss.openrlhf": openrlhf_aggregation,
    "value_loss.clipped.verl": verl_value,
    "value_loss.clipped.openrlhf": openrlhf_value,
    "value_loss.clipped.skyrl": skyrl_value,
    "value_loss.clipped.nemo_rl": nemo_value,
    "value_loss.clipped.areal": areal_value,
    "sft.nll.openrlhf": openrlhf_sft,
    "sft.nll_dft.trl": trl_sft,
    "logits.entropy_logprob.verl": entropy_and_logprobs,
    "logits.entropy_loss.verl": entropy_loss,
    "logits.selective_log_softmax.trl": selective_log_softmax,
}
