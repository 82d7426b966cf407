"""Returns and GAE, and what else is by token: whitening, the place of a reward, the KL in it."""

from __future__ import annotations

import torch
from torch import Tensor

from atomrl.atoms import kl, shaping
from atomrl.atoms import masks as whiten
from atomrl.atoms import returns as gae
from tests.parity.arranging import SMALL, Values, clamped_kl, every, thin_moments


def clamped_k3(inputs: Values, mask: Tensor) -> Tensor:
    return clamped_kl(kl.k3_kl, inputs["log_probs"], inputs["ref_log_probs"], mask, of_ratio=20.0, of_result=10.0)


def stepped(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """OpenRLHF's and slime's gaps: steps without reward and value, each of which discounts once more."""
    return values.masked_fill(~mask, 0.0), every(mask)


def stepped_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    return gae.discounted_returns(*stepped(rewards, mask), gamma)


def returns_by_turn(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """SkyRL's: an observation ends the episode, so that later reward never reaches earlier turns."""
    begins = mask & ~torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], 1)
    turn = begins.cumsum(1)
    parts = [gae.discounted_returns(rewards, mask & (turn == k), gamma) for k in range(1, int(turn.max()) + 1)]
    return torch.stack(parts).sum(0) if parts else torch.zeros_like(rewards)


def thinly_whitened(values: Tensor, mask: Tensor) -> Tensor:
    """Whitening with verl's epsilon on the count."""
    exact = values.double()
    centre, variance = thin_moments(exact, mask)
    return ((exact - centre) / (variance + SMALL).sqrt()).masked_fill(~mask, 0.0).to(values.dtype)


def gae_trl(inputs: Values, params: Values) -> Values:
    last, values = inputs["last_token_index"][:, None], inputs["values"]
    columns = torch.arange(values.shape[1])
    mask, one_more = columns <= last, columns <= last + 1
    estimator = {"k1": kl.k1_kl, "k3": kl.k3_kl}[params["kl_estimator"]]
    divergence = estimator(inputs["log_probs"], inputs["ref_log_probs"], mask)
    placed = shaping.reward_at_last_token(inputs["scores"], one_more)
    rewards = shaping.kl_penalised_reward(placed, divergence, params["kl_coef"])
    if params["whiten_rewards"]:
        rewards = whiten.masked_whiten(rewards, one_more, shift_mean=False)
    result = stepped_gae(rewards, values, one_more, params)
    white = whiten.masked_whiten(result["advantages"], mask)
    return {"rewards": rewards, "advantages": white, "returns": result["returns"]}


def stepped_gae(rewards: Tensor, values: Tensor, mask: Tensor, params: Values) -> Values:
    (rewards, steps), (values, _) = stepped(rewards, mask), stepped(values, mask)
    return dict(gae.gae(rewards, values, steps, params["gamma"], params["lam"]))


def gae_verl(inputs: Values, params: Values) -> Values:
    mask = inputs["mask"]
    result = gae.gae(inputs["token_level_rewards"], inputs["values"], mask, params["gamma"], params["lam"])
    return {"advantages": thinly_whitened(result["advantages"], mask), "returns": result["returns"]}


def gae_skyrl(inputs: Values, params: Values) -> Values:
    """Every column is a step, with whatever reward and value stand there."""
    rewards, values = inputs["token_level_rewards"], inputs["values"]
    result = gae.gae(rewards, values, every(values), params["gamma"], params["lam"])
    white = whiten.masked_whiten(result["advantages"], inputs["mask"])
    return {"advantages": white, "returns": result["returns"]}


def gae_plain(inputs: Values, params: Values) -> Values:
    rewards, values = inputs["token_level_rewards"], inputs["values"]
    return stepped_gae(rewards, values, inputs.get("mask", every(values)), params)


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
        credit = thinly_whitened(credit, mask)
    return {"advantages": credit, "returns": gae.gae(rewards, values, mask, gamma, of_values)["returns"]}


def mask_with_last_column(mask: Tensor) -> Tensor:
    """OpenRLHF puts the reward of a row without a token into the last column."""
    last = torch.arange(mask.shape[1]) == mask.shape[1] - 1
    return mask | (~mask.any(1)[:, None] & last)


ADAPTERS = {
    "advantage.gae.verl": gae_verl,
    "advantage.gae.skyrl": gae_skyrl,
    "advantage.gae.openrlhf": gae_plain,
    "advantage.gae_unmasked.slime": gae_plain,
    "advantage.gae_decoupled.nemo_rl": gae_decoupled,
    "advantage.gae_ppo_pipeline.trl": gae_trl,
}
