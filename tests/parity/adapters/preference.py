"""Losses of preferences and of reward models."""

from __future__ import annotations

import torch
from torch import Tensor

from atomrl.atoms import auxiliary_losses as supervised_losses
from atomrl.atoms import masks, policy_losses, preference_losses
from atomrl.atoms import policy_losses as reductions
from atomrl.atoms import preference_losses as preference_scores
from atomrl.atoms import preference_losses as unpaired_losses
from tests.parity.arranging import Values, every, fraction


def mean(values: Tensor) -> Tensor:
    return masks.masked_mean(values, every(values))


def trl_dpo(inputs: Values, params: Values) -> Values:
    shifted, unshifted = inputs["completion_mask"][:, 1:], inputs["completion_mask"]
    chosen_z, rejected_z, sums = trl_log_ratios(inputs, params, shifted)
    divergence = params.get("f_divergence_type", "reverse_kl")
    alpha = params.get("f_alpha_divergence_coef")
    alpha = 1.0 if alpha is None else float(alpha)
    scores = [preference_scores.f_divergence_score(z, divergence, alpha) for z in (chosen_z, rejected_z)]
    pairs = len(chosen_z)
    factors = []
    if params.get("use_weighting"):
        weights = preference_scores.wpo_weight(inputs["log_probs"], inputs["log_sum_sq_probs"], shifted)
        factors = [weights[:pairs, None], weights[pairs:, None]]
    lengths = unshifted.sum(1)
    total = torch.zeros((), dtype=chosen_z.dtype)
    names = params["loss_types"]
    for name, scale in zip(names, params.get("loss_weights") or [1.0] * len(names), strict=True):
        if name == "sft":
            nll = supervised_losses.nll_loss(inputs["log_probs"][:pairs], shifted[:pairs])
            losses = masks.masked_mean(nll, shifted[:pairs]).expand(pairs, 1)
        else:
            losses = trl_loss(name, params, (chosen_z, rejected_z), scores, sums, lengths)[:, None]
        weights = reductions.token_mean(every(losses))
        total = total + reductions.weighted_sum(losses, weights, *factors, scale=float(scale))
    rewards = [preference_scores.implicit_reward(z, float(params["beta"])) for z in (chosen_z, rejected_z)]
    metrics = {
        "rewards/chosen": mean(rewards[0]),
        "rewards/rejected": mean(rewards[1]),
        "rewards/accuracies": fraction(rewards[0] > rewards[1], every(rewards[0])),
        "rewards/margins": mean(rewards[0] - rewards[1]),
        "logps/chosen": mean(sums[0]),
        "logps/rejected": mean(sums[1]),
    }
    return {"loss": total, "metrics": metrics}


def trl_log_ratios(inputs: Values, params: Values, mask: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Log-ratios of chosen and rejected, and four sums: the policy's two, the reference's two."""
    pairs, alpha, sums = len(mask) // 2, params.get("ld_alpha"), []
    counts = mask.sum(1)
    shared = torch.minimum(counts[:pairs], counts[pairs:]).repeat(2)
    for name in ("log_probs", "ref_log_probs"):
        if alpha is None:
            rows = masks.row_sum(inputs[name], mask)
        else:
            rows = preference_scores.length_desensitised_logprob(inputs[name], mask, shared, float(alpha))
        sums += [rows[:pairs], rows[pairs:]]
    return sums[0] - sums[2], sums[1] - sums[3], sums


def trl_loss(
    name: str,
    params: Values,
    log_ratios: tuple[Tensor, Tensor],
    scores: list[Tensor],
    sums: list[Tensor],
    lengths: Tensor,
) -> Tensor:
    beta, smoothing = float(params["beta"]), float(params.get("label_smoothing", 0.0))
    margin = scores[0] - scores[1]
    of_margin = {
        "sigmoid": lambda d: preference_losses.dpo_loss(d, beta),
        "hinge": lambda d: preference_losses.hinge_preference_loss(d, beta),
        "exo_pair": lambda d: preference_losses.exo_loss(d, beta, smoothing),
        "robust": lambda d: preference_losses.robust_dpo_loss(d, beta, smoothing),
        "discopop": lambda d: preference_losses.discopop_loss(d, beta, float(params["discopop_tau"])),
    }
    of_pair = {
        "nca_pair": preference_losses.nca_loss,
        "bco_pair": preference_losses.bco_pair_loss,
        "sppo_hard": preference_losses.sppo_loss,
        "apo_zero": preference_losses.apo_zero_loss,
        "apo_down": preference_losses.apo_down_loss,
    }
    if name in of_margin:
        return of_margin[name](margin)
    if name in of_pair:
        return of_pair[name](*log_ratios, beta)
    if name in ("ipo", "sigmoid_norm"):
        pairs = len(margin)
        chosen = preference_scores.length_normalised(scores[0], lengths[:pairs])
        rejected = preference_scores.length_normalised(scores[1], lengths[pairs:])
        return (preference_losses.ipo_loss if name == "ipo" else preference_losses.dpo_loss)(chosen - rejected, beta)
    better, worse = (sums[0] - sums[1], sums[2] - sums[3]) if name == "aot" else log_ratios
    return preference_losses.dpo_loss(better.sort().values - worse.sort().values, beta, smoothing)


def openrlhf_dpo(inputs: Values, params: Values) -> Values:
    beta = float(params["beta"])
    chosen = inputs["chosen_log_probs"] - inputs["ref_chosen_log_probs"]
    rejected = inputs["rejected_log_probs"] - inputs["ref_rejected_log_probs"]
    if params["ipo"]:
        losses = preference_losses.ipo_loss(chosen - rejected, beta)
    else:
        losses = preference_losses.dpo_loss(chosen - rejected, beta, float(params.get("label_smoothing", 0.0)))
    return {
        "loss": mean(losses),
        "chosen_rewards": preference_scores.implicit_reward(chosen, beta),
        "rejected_rewards": preference_scores.implicit_reward(rejected, beta),
    }


def nemo_dpo(inputs: Values, params: Values) -> Values:
    log_probs, samples = inputs["log_probs"], inputs["sample_mask"]
    mask, pairs = inputs["token_mask"], samples[::2]
    gaps = policy_losses.token_log_ratio(log_probs, inputs["ref_log_probs"], mask)
    gather = masks.row_mean if params["average_log_probs"] else masks.row_sum
    rewards = gather(gaps, mask)
    chosen, rejected = rewards[::2], rewards[1::2]
    losses = preference_losses.dpo_loss(chosen - rejected, float(params["beta"]))
    weights = reductions.token_mean(pairs[:, None], total_tokens=float(samples.sum()) / 2 + 1e-8)
    nll = gather(supervised_losses.nll_loss(log_probs, mask), mask)[::2]

    def averaged(values: Tensor) -> Tensor:
        return reductions.weighted_sum(values[:, None], weights)

    preference, sft = averaged(losses), averaged(nll)
    total = float(params["preference_loss_weight"]) * preference + float(params["sft_loss_weight"]) * sft
    metrics = {
        "preference_loss": preference,
        "sft_loss": sft if float(params["sft_loss_weight"]) else 0.0,
        "accuracy": averaged((chosen > rejected).to(losses.dtype)),
        "rewards_chosen_mean": averaged(chosen),
        "rewards_rejected_mean": averaged(rejected),
    }
    return {"loss": total, "metrics": metrics}


def cpo(inputs: Values, params: Values) -> Values:
    beta, smoothing = float(params["beta"]), float(params.get("label_smoothing", 0.0))
    alpha, gamma = float(params.get("alpha", 0.0)), float(params.get("simpo_gamma", 0.0))
    chosen, rejected = (
        preference_scores.alpha_score(inputs[f"{side}_log_probs"], alpha) for side in ("chosen", "rejected")
    )
    margin, kind = chosen - rejected, params["loss_type"]
    if kind == "hinge":
        losses = preference_losses.hinge_preference_loss(margin, beta)
    elif kind == "ipo":
        losses = preference_losses.ipo_loss(margin, beta)
    else:
        losses = preference_losses.dpo_loss(margin, beta, smoothing, gamma if kind == "simpo" else 0.0)
    return {
        "losses": losses,
        "loss": mean(losses),
        "chosen_rewards": preference_scores.implicit_reward(chosen, beta),
        "rejected_rewards": preference_scores.implicit_reward(rejected, beta),
    }


def orpo(inputs: Values, params: Values) -> Values:
    beta = float(params["beta"])
    chosen, rejected = inputs["chosen_avg_log_probs"], inputs["rejected_avg_log_probs"]
    odds = preference_scores.log_odds_ratio(chosen, rejected)
    losses = preference_losses.odds_ratio_loss(odds)
    total = reductions.weighted_sum(losses[:, None], reductions.token_mean(every(losses)[:, None]), scale=beta)
    return {
        "per_pair": preference_scores.implicit_reward(-losses, beta),
        "or_loss": total,
        "objective": total,
        "chosen_rewards": preference_scores.implicit_reward(chosen, beta),
        "rejected_rewards": preference_scores.implicit_reward(rejected, beta),
        "mean_log_odds_ratio": -mean(losses),
        "mean_log_odds": mean(odds),
    }


def kto(inputs: Values, params: Values) -> Values:
    beta, labels = float(params["beta"]), inputs["labels"]
    log_ratio = inputs["log_probs"] - inputs["ref_log_probs"]
    reference = torch.zeros((), dtype=log_ratio.dtype)
    if params["loss_type"] == "kto":
        reference = unpaired_losses.kto_reference(inputs["kl_log_probs"] - inputs["ref_kl_log_probs"])
    losses = unpaired_losses.kto_loss(
        log_ratio,
        labels.to(log_ratio.dtype),
        reference,
        beta,
        float(params["desirable_weight"]),
        float(params["undesirable_weight"]),
    )
    rewards, good = preference_scores.implicit_reward(log_ratio, beta), labels > 0
    chosen, rejected = masks.masked_mean(rewards, good), masks.masked_mean(rewards, ~good)
    metrics = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
    return {"loss": mean(losses), "kl": reference, "metrics": metrics}


def bco(inputs: Values, params: Values) -> Values:
    """A run of batches, each with gradients of its own."""
    delta, count, beta, steps = torch.zeros(()), 1e-24, float(params["beta"]), []
    for batch in inputs["steps"]:
        given = {name: torch.tensor(values) for name, values in batch.items()}
        leaves = [given["chosen_log_probs"].requires_grad_(), given["rejected_log_probs"].requires_grad_()]
        chosen, rejected = (
            preference_scores.implicit_reward(leaf - given[f"ref_{side}_log_probs"], beta)
            for leaf, side in zip(leaves, ("chosen", "rejected"), strict=True)
        )
        rewards = torch.cat([chosen, rejected])
        delta, count = unpaired_losses.running_mean(delta, count, rewards)
        labels = torch.cat([torch.ones_like(chosen), torch.zeros_like(rejected)])
        weights = torch.ones_like(rewards)
        if "prob_desirable" in inputs:
            weights[len(chosen) :] = (inputs["prob_desirable"] / (1 - inputs["prob_desirable"] + 1e-8)).clamp(
                float(params["min_density_ratio"]), float(params["max_density_ratio"])
            )
        losses = unpaired_losses.bco_loss(rewards, labels, delta, weights)
        loss = mean(losses)
        gradients = torch.autograd.grad(loss, leaves)
        steps.append(
            {
                "losses": losses,
                "loss": loss,
                "delta": delta,
                "chosen_rewards": chosen,
                "rejected_rewards": rejected,
                "grad_chosen": gradients[0],
                "grad_rejected": gradients[1],
            }
        )
    return {"steps": steps}


def trl_reward_model(inputs: Values, params: Values) -> Values:
    chosen, rejected = inputs["chosen_rewards"], inputs["rejected_rewards"]
    loss = mean(preference_losses.bradley_terry_loss(chosen, rejected, inputs.get("margin")))
    if params.get("center_rewards_coefficient") is not None:
        centring = mean(preference_losses.reward_centring_loss(chosen, rejected))
        loss = loss + float(params["center_rewards_coefficient"]) * centring
    metrics = {"accuracy": fraction(chosen > rejected, every(chosen)), "margin": mean(chosen - rejected)}
    return {"loss": loss, "metrics": metrics}


def openrlhf_reward_model(inputs: Values, params: Values) -> Values:
    chosen, rejected = inputs["chosen_rewards"], inputs["rejected_rewards"]
    pairwise = preference_losses.bradley_terry_loss(chosen, rejected, inputs.get("margin"))
    return {"pairwise": mean(pairwise), "log_exp": mean(preference_losses.bradley_terry_loss(chosen, rejected))}


ADAPTERS = {
    "preference.dpo.trl": trl_dpo,
    "preference.dpo_f_divergence.trl": trl_dpo,
    "preference.dpo_wpo_ld.trl": trl_dpo,
    "preference.dpo.openrlhf": openrlhf_dpo,
    "preference.dpo.nemo_rl": nemo_dpo,
    "preference.cpo_simpo.trl": cpo,
    "preference.orpo.trl": orpo,
    "preference.kto.trl": kto,
    "preference.bco.trl": bco,
    "preference.reward_model.trl": trl_reward_model,
    "preference.reward_model.openrlhf": openrlhf_reward_model,
}
