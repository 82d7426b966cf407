"""KL estimators, their coefficient, and the KL in the reward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from atomrl.atoms import kl, masks, policy_losses, shaping
from tests.parity.adapters.returns import mask_with_last_column
from tests.parity.arranging import Values, clamped_kl, every, row_mean

ESTIMATORS = {
    **dict.fromkeys(["kl", "k1"], "k1_kl"),
    "abs": "abs_kl",
    **dict.fromkeys(["mse", "k2"], "k2_kl"),
    **dict.fromkeys(["k3", "low_var_kl"], "k3_kl"),
}


def estimate(name: str, log_probs: Tensor, ref: Tensor, mask: Tensor | None = None, **limits: Any) -> Tensor:
    return clamped_kl(
        getattr(kl, ESTIMATORS[name]), log_probs, ref, every(log_probs) if mask is None else mask, **limits
    )


def result(values: Tensor) -> Values:
    return {"kl": values, "objective": masks.masked_sum(values, every(values))}


def clamps(name: str) -> dict[str, float]:
    """verl and SkyRL clamp k3 alone."""
    return {"of_ratio": 20.0, "of_result": 10.0} if ESTIMATORS[name] == "k3_kl" else {}


def verl(inputs: Values, params: Values) -> Values:
    name = params["kl_penalty"].removesuffix("+")
    log_probs, ref = inputs["log_probs"], inputs["ref_log_probs"]
    values = estimate(name, log_probs, ref, **clamps(name))
    if params["kl_penalty"].endswith("+"):
        values = kl.k2_gradient(values, log_probs, ref, every(values))
    return result(values)


def skyrl(inputs: Values, params: Values) -> Values:
    name = params["kl_estimator_type"]
    return result(estimate(name, inputs["log_probs"], inputs["ref_log_probs"], **clamps(name)))


def openrlhf(inputs: Values, params: Values) -> Values:
    log_probs, ref = inputs["log_probs"], inputs["ref_log_probs"]
    return result(estimate(params["kl_estimator"], log_probs, ref, of_result=10.0))


def areal(inputs: Values, params: Values) -> Values:
    clamp = 10.0 if params["apply_clamp"] else None
    log_probs, ref = inputs["log_probs"], inputs["ref_log_probs"]
    return {"kl": estimate(params["kl_estimator"], log_probs, ref, of_result=clamp)}


def slime(inputs: Values, params: Values) -> Values:
    name, log_probs = params["kl_loss_type"], inputs["log_probs"]
    values = estimate(name, log_probs, inputs["ref_log_probs"])
    if params["importance_weighted"]:
        values = values * policy_losses.token_ratio(log_probs, inputs["old_log_probs"], every(log_probs))
    return result(values.clamp(-10.0, 10.0) if name == "low_var_kl" else values)


def roll(inputs: Values, params: Values) -> Values:
    name = params["kl_penalty"]
    if name == "full":
        return {"kl": kl.distribution_kl(*(inputs[key].log_softmax(-1) for key in ("logits", "ref_logits")))}
    clamp = 10.0 if name == "k3" else None
    return {"kl": estimate(name, inputs["log_probs"], inputs["ref_log_probs"], of_result=clamp)}


def nemo_rl(inputs: Values, params: Values) -> Values:
    log_probs, ref, mask = inputs["log_probs"], inputs["ref_log_probs"], every(inputs["log_probs"])
    of_ratio, of_result = (
        None if params[name] is None else float(params[name]) for name in ("input_clamp", "output_clamp")
    )
    weight = None
    if params["score_function_weight"]:
        weight = policy_losses.token_ratio(log_probs, log_probs.detach(), mask)
    estimator = getattr(kl, ESTIMATORS[params["kl_type"]])
    return result(weighted_kl(estimator, log_probs, ref, mask, weight, of_ratio, of_result))


def weighted_kl(
    estimator: Any,
    log_probs: Tensor,
    ref: Tensor,
    mask: Tensor,
    weight: Tensor | None,
    of_ratio: float | None,
    of_result: float | None,
) -> Tensor:
    """NeMo-RL's: a token beyond the bound of the ratio has no gradient, nor has its weight."""
    values = clamped_kl(estimator, log_probs, ref, mask, of_ratio=of_ratio)
    if weight is not None:
        if of_ratio is not None:
            beyond = policy_losses.token_log_ratio(log_probs, ref, mask).abs() > of_ratio
            weight = torch.where(beyond, weight.detach(), weight)
        values = values * weight
    return values if of_result is None else values.clamp(-of_result, of_result)


def controller(inputs: Values, params: Values) -> Values:
    coefficients: dict[str, list[float]] = {"adaptive": [], "fixed": []}
    for name, horizon in (("adaptive", float(params["horizon"])), ("fixed", math.inf)):
        coefficient = float(params["init_kl_coef"])
        for current, samples in zip(inputs["current_kl"].tolist(), inputs["n_steps"].tolist(), strict=True):
            coefficient = kl.adaptive_coefficient(
                coefficient, float(current), float(params["target_kl"]), horizon, float(samples)
            )
            coefficients[name].append(coefficient)
    return {name: exact(values) for name, values in coefficients.items()}


def exact(value: float | list[float]) -> Tensor:
    """Python's numbers are float64, whatever the default."""
    return torch.tensor(value, dtype=torch.float64)


def verl_reward(inputs: Values, params: Values) -> Values:
    mask, name, coefficient = inputs["mask"], params["kl_penalty"], float(params["kl_coef"])
    values = estimate(name, inputs["log_probs"], inputs["ref_log_probs"], mask, **clamps(name))
    by_row = row_mean(values, mask)
    current = masks.masked_mean(by_row, every(by_row)).item()
    following = kl.adaptive_coefficient(
        coefficient, current, float(params["target_kl"]), float(params["horizon"]), float(len(mask))
    )
    return {
        "token_level_rewards": shaping.kl_penalised_reward(inputs["token_level_scores"], values, coefficient),
        "current_kl": exact(current),
        "new_kl_coef": exact(following),
    }


def openrlhf_reward(inputs: Values, params: Values) -> Values:
    rewards = inputs["rewards"]
    if params["reward_clip_range"]:
        rewards = shaping.clipped_reward(rewards, *map(float, params["reward_clip_range"]))
    placed = shaping.reward_at_last_token(rewards, mask_with_last_column(inputs["mask"]))
    return {"token_rewards": shaping.kl_penalised_reward(placed, inputs["kl"], float(params["kl_coef"]))}


ADAPTERS = {
    "kl.kl_penalty.verl": verl,
    "kl.compute_approx_kl.skyrl": skyrl,
    "kl.compute_approx_kl.openrlhf": openrlhf,
    "kl.compute_approx_kl.areal": areal,
    "kl.compute_approx_kl.slime": slime,
    "kl.compute_approx_kl.roll": roll,
    "kl.calculate_kl.nemo_rl": nemo_rl,
    "kl.controller.verl": controller,
    "kl.reward_penalty.verl": verl_reward,
    "kl.reward_penalty.openrlhf": openrlhf_reward,
}
