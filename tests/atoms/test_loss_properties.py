"""Properties of every policy loss: splits, order, padding and empty rows do not matter.

A loss here is what a trainer does: statistics and weights are taken over the whole step (`prepare`), then a number of
rows is given to the loss at a time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from atomrl.atoms import auxiliary_losses as supervised_losses
from atomrl.atoms import kl, policy_losses
from atomrl.atoms import policy_losses as importance_sampling
from atomrl.atoms import policy_losses as reductions
from atomrl.atoms import policy_losses as sequence_losses
from atomrl.atoms.advantages import per_token
from atomrl.atoms.auxiliary_losses import clipped_value_loss
from atomrl.atoms.masks import row_mean, row_sum
from atomrl.atoms.policy_losses import binary_kl, probability_change, trust_region_tokens
from atomrl.atoms.token_filters import (
    clip_covariance_tokens,
    high_entropy_tokens,
    highest_covariance_tokens,
    highest_entropy_tokens,
    token_covariance,
)

Step = dict[str, Tensor]
WEIGHTS = {
    "token_mean": reductions.token_mean,
    "sequence_mean": reductions.sequence_mean,
    "sequence_mean_count": lambda mask: reductions.sequence_mean(mask, total_rows=float(len(mask))),
    "constant_length": lambda mask: reductions.constant_length(mask, 7),
    "group_token_mean": lambda mask: reductions.group_token_mean(mask, torch.arange(len(mask)) % 3),
}


def ratio(step: Step, clamp: float | None = None) -> Tensor:
    return policy_losses.token_ratio(step["logprobs"], step["old_logprobs"], step["mask"], clamp)


def spread_ratio(step: Step, **options: float | bool) -> Tensor:
    arguments = step["logprobs"], step["old_logprobs"], step["mask"]
    return per_token(policy_losses.sequence_log_ratio(*arguments, **options), step["mask"]).exp()


def gmpo(step: Step) -> Tensor:
    log_ratio = policy_losses.token_log_ratio(step["logprobs"], step["old_logprobs"], step["mask"])
    clipped = sequence_losses.sequence_clipped_log_ratio(log_ratio, step["advantages"])
    advantages = row_mean(step["advantages"], step["mask"])
    return per_token(sequence_losses.geometric_mean_loss(clipped, advantages, step["mask"]), step["mask"])


def reinforce(step: Step, weights: Tensor | None = None) -> Tensor:
    return policy_losses.reinforce_loss(step["logprobs"], step["advantages"], step["mask"], weights)


def ppo(step: Step, **options: float) -> Tensor:
    return policy_losses.clipped_policy_loss(ratio(step), step["advantages"], 0.2, 0.28, **options)


def penalty(name: str) -> Callable[[Step], Tensor]:
    return lambda step: getattr(kl, name)(step["logprobs"], step["ref_logprobs"], step["mask"])


def clamped_k3(step: Step) -> Tensor:
    log_ratio = policy_losses.token_log_ratio(step["logprobs"], step["ref_logprobs"], step["mask"], clamp=0.4)
    return kl.k3_kl(log_ratio, torch.zeros_like(log_ratio), step["mask"]).clamp(max=0.3)


def vespo(step: Step) -> Tensor:
    log_ratio = policy_losses.token_log_ratio(step["logprobs"], step["old_logprobs"], step["mask"])
    phi = sequence_losses.vespo_weights(log_ratio, row_mean(step["advantages"], step["mask"]), step["mask"])
    return reinforce(step, per_token(phi, step["mask"]))


LOSSES: dict[str, Callable[[Step], Tensor]] = {
    "ppo": ppo,
    "dual_clip": lambda step: ppo(step, dual_clip=1.5),
    "two_sided": lambda step: ppo(step, ratio_cap=1.5),
    "clamped_ratio": lambda step: policy_losses.clipped_policy_loss(ratio(step, 0.3), step["advantages"]),
    "gspo": lambda step: policy_losses.clipped_policy_loss(spread_ratio(step), step["advantages"], 0.02, 0.03),
    "sequence_product": lambda step: policy_losses.clipped_policy_loss(
        spread_ratio(step, length_normalised=False, clamp=0.5), step["advantages"]
    ),
    "gspo_token": lambda step: policy_losses.clipped_policy_loss(
        policy_losses.sequence_token_log_ratio(step["logprobs"], step["old_logprobs"], step["mask"], 10.0).exp(),
        step["advantages"],
    ),
    "sapo": lambda step: policy_losses.sapo_loss(ratio(step), step["advantages"]),
    "reinforce": reinforce,
    "cispo": lambda step: policy_losses.cispo_loss(
        step["logprobs"], ratio(step), step["advantages"], step["mask"], 0.2, 0.28
    ),
    "gmpo": gmpo,
    "nll": lambda step: supervised_losses.nll_loss(step["logprobs"], step["mask"]),
    "dft": lambda step: supervised_losses.dft_loss(step["logprobs"], step["mask"]),
    "value": lambda step: clipped_value_loss(
        step["logprobs"], step["old_logprobs"], step["ref_logprobs"], step["mask"], 0.1
    ),
    "huber_value": lambda step: clipped_value_loss(
        step["logprobs"], step["old_logprobs"], step["ref_logprobs"], step["mask"], None, 0.2
    ),
    "k1": penalty("k1_kl"),
    "abs": penalty("abs_kl"),
    "k2": penalty("k2_kl"),
    "k3": penalty("k3_kl"),
    "k3_clamped": clamped_k3,
    "k3_weighted": lambda step: penalty("k3_kl")(step) * ratio(step),
    "k2_gradient": lambda step: kl.k2_gradient(
        penalty("k1_kl")(step), step["logprobs"], step["ref_logprobs"], step["mask"]
    ),
    "vespo": vespo,
}


def rollout_weights(step: Step) -> Tensor:
    log_ratio = importance_sampling.rollout_log_ratio(step["old_logprobs"], step["rollout_logprobs"], step["mask"])
    return importance_sampling.importance_weights(log_ratio, clamp=20.0)


def sequence_mask(step: Step) -> Tensor:
    log_ratio = importance_sampling.rollout_log_ratio(step["old_logprobs"], step["rollout_logprobs"], step["mask"])
    product = importance_sampling.importance_weights(row_sum(log_ratio, step["mask"]))
    return importance_sampling.within(product, 0.5, 2.0)[:, None].expand(step["mask"].shape)


def opsm(step: Step) -> Tensor:
    gaps = kl.k1_kl(step["rollout_logprobs"], step["logprobs"].detach(), step["mask"])
    return importance_sampling.off_policy_sequences(row_mean(gaps, step["mask"]), step["advantages"], 0.02)


def m2po(step: Step) -> Tensor:
    log_ratio = importance_sampling.rollout_log_ratio(step["old_logprobs"], step["rollout_logprobs"], step["mask"])
    return importance_sampling.second_moment_tokens(log_ratio, step["mask"], 0.05)


def dppo(divergence: Callable[[Step, Tensor], Tensor]) -> Callable[[Step], Tensor]:
    def keep(step: Step) -> Tensor:
        change = probability_change(step["logprobs"], step["old_logprobs"], step["mask"])
        return trust_region_tokens(change, divergence(step, change), step["advantages"], 0.02, 0.02)

    return keep


def covariance(step: Step) -> Tensor:
    return token_covariance(step["logprobs"], step["advantages"], step["mask"])


FACTORS: dict[str, Callable[[Step], Tensor]] = {
    "tis": lambda step: importance_sampling.truncated_weights(rollout_weights(step), 1.2),
    "icepop": lambda step: importance_sampling.masked_weights(rollout_weights(step), 0.8, 1.25),
    "normalised": lambda step: importance_sampling.normalised_weights(rollout_weights(step), step["mask"]),
    "sequence_mask": sequence_mask,
    "opsm": opsm,
    "m2po": m2po,
    "dppo_tv": dppo(lambda step, change: change.abs()),
    "dppo_kl": dppo(lambda step, change: binary_kl(step["logprobs"], step["old_logprobs"], step["mask"])),
    "high_entropy": lambda step: high_entropy_tokens(step["entropies"], step["mask"], 0.4),
    "entropy_budget": lambda step: highest_entropy_tokens(step["entropies"], step["mask"], 5),
    "clip_cov": lambda step: clip_covariance_tokens(covariance(step), step["mask"], step["mask"], 1.0, 0.05),
    "kl_cov": lambda step: highest_covariance_tokens(covariance(step), step["mask"], 0.3),
}


def a_step(seed: int = 0, rows: int = 6, tokens: int = 5) -> Step:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logprobs = -noise(rows, tokens).abs() - 0.1
    mask = torch.rand(rows, tokens, generator=generator) < 0.7
    mask[1] = False
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.3 * noise(rows, tokens),
        "ref_logprobs": logprobs + 0.5 * noise(rows, tokens),
        "rollout_logprobs": logprobs + 0.3 * noise(rows, tokens),
        "advantages": noise(rows, tokens).round(decimals=1),
        "entropies": noise(rows, tokens).abs(),
        "scores": noise(rows),
        "mask": mask,
    }


def prepared(step: Step, weights: str = "token_mean", factor: str | None = None) -> Step:
    """Everything that looks at the whole step, before any split."""
    ready = step | {"loss_weights": WEIGHTS[weights](step["mask"]).double()}
    return ready | ({"factor": FACTORS[factor](step)} if factor else {})


def run(loss: Callable[[Step], Tensor], step: Step, parts: list[list[int]]) -> tuple[float, Tensor]:
    """The loss and its gradient to the log-probs, summed over parts of the rows."""
    leaf = step["logprobs"].clone().requires_grad_()
    total = 0.0
    for part in parts:
        rows = {name: (leaf if name == "logprobs" else value)[part] for name, value in step.items()}
        factors = [rows["factor"]] if "factor" in rows else []
        value = reductions.weighted_sum(loss(rows), rows["loss_weights"], *factors)
        value.backward()
        total += value.item()
    assert leaf.grad is not None
    return total, leaf.grad


SPLITS = [[[0], [1], [2], [3], [4], [5]], [[0, 1, 2], [3, 4, 5]], [[5, 2], [1], [0, 3, 4]]]
WHOLE = [list(range(6))]
AXES = [(name, "token_mean", None) for name in LOSSES]
AXES += [("ppo", weights, None) for weights in WEIGHTS] + [("ppo", "sequence_mean", factor) for factor in FACTORS]


@pytest.mark.parametrize(("loss", "weights", "factor"), AXES)
def test_any_split_gives_the_same_gradient(loss, weights, factor):
    step = prepared(a_step(), weights, factor)
    value, gradient = run(LOSSES[loss], step, WHOLE)
    assert gradient.abs().max() > 0
    for parts in SPLITS:
        other, split = run(LOSSES[loss], step, parts)
        assert other == pytest.approx(value, abs=1e-12)
        torch.testing.assert_close(split, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("loss", "weights", "factor"), [item for item in AXES if item[1] != "group_token_mean"])
def test_the_order_of_rows_does_not_matter(loss, weights, factor):
    step, order = a_step(), torch.tensor([3, 0, 5, 1, 4, 2])
    value, gradient = run(LOSSES[loss], prepared(step, weights, factor), WHOLE)
    shuffled = prepared({name: item[order] for name, item in step.items()}, weights, factor)
    other, actual = run(LOSSES[loss], shuffled, WHOLE)
    assert other == pytest.approx(value, abs=1e-12)
    torch.testing.assert_close(actual, gradient[order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize(("loss", "weights", "factor"), AXES)
def test_garbage_off_the_mask_is_harmless(loss, weights, factor, garbage):
    clean = a_step()
    value, gradient = run(LOSSES[loss], prepared(clean, weights, factor), WHOLE)
    dirty = {
        name: item.masked_fill(~clean["mask"], garbage) if item.is_floating_point() and item.ndim == 2 else item
        for name, item in clean.items()
    }
    other, actual = run(LOSSES[loss], prepared(dirty, weights, factor), WHOLE)
    assert other == pytest.approx(value, abs=1e-12)
    assert (actual[~clean["mask"]] == 0).all()
    torch.testing.assert_close(actual, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("loss", "weights", "factor"), AXES)
def test_an_empty_step_has_a_finite_loss_and_no_gradient(loss, weights, factor):
    step = a_step()
    step["mask"] = torch.zeros_like(step["mask"])
    value, gradient = run(LOSSES[loss], prepared(step, weights, factor), SPLITS[1])
    assert value == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("weights", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("loss", LOSSES)
def test_empty_rows_change_nothing(loss, weights):
    """The reductions that drop them; the others say that they count rows."""
    step = a_step()
    kept = {name: item[[0, 2, 3, 4, 5]] for name, item in step.items()}
    value, gradient = run(LOSSES[loss], prepared(step, weights), WHOLE)
    other, actual = run(LOSSES[loss], prepared(kept, weights), [list(range(5))])
    assert other == pytest.approx(value, abs=1e-12)
    torch.testing.assert_close(actual, gradient[[0, 2, 3, 4, 5]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", ["ppo", "dual_clip", "gspo", "gspo_token", "reinforce", "cispo", "sapo", "gmpo"])
def test_no_advantage_no_gradient(loss):
    step = a_step()
    step["advantages"] = torch.zeros_like(step["advantages"])
    value, gradient = run(LOSSES[loss], prepared(step), WHOLE)
    assert value == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("loss", ["ppo", "dual_clip", "gspo", "gspo_token", "sapo", "cispo", "gmpo", "vespo"])
def test_on_policy_every_method_has_the_gradient_of_reinforce(loss):
    """At a ratio of 1 nothing is clipped, so methods differ by no more than a token's share in its row."""
    step = a_step()
    step["old_logprobs"] = step["logprobs"].clone()
    step["advantages"] = step["advantages"][:, :1].expand(step["mask"].shape)
    step["scores"] = step["advantages"][:, 0]
    _, gradient = run(LOSSES[loss], prepared(step), WHOLE)
    _, expected = run(reinforce, prepared(step), WHOLE)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_gspo_token_has_the_gradient_of_gspo_for_one_advantage_a_row():
    step = a_step()
    step["advantages"] = step["advantages"][:, :1].expand(step["mask"].shape)
    losses = [
        run(
            lambda rows, how=how: policy_losses.clipped_policy_loss(how(rows), rows["advantages"]),
            prepared(step),
            WHOLE,
        )
        for how in (
            spread_ratio,
            lambda rows: policy_losses.sequence_token_log_ratio(
                rows["logprobs"], rows["old_logprobs"], rows["mask"]
            ).exp(),
        )
    ]
    assert losses[0][0] == pytest.approx(losses[1][0])
    torch.testing.assert_close(losses[0][1], losses[1][1])


def test_weights_of_a_part_add_up_when_told_the_whole():
    mask = a_step()["mask"]
    counts = {"total_tokens": float(mask.sum())}
    split = torch.cat([reductions.token_mean(part, **counts) for part in mask.split(2)])
    torch.testing.assert_close(split, reductions.token_mean(mask))
    split = torch.cat([reductions.sequence_mean(part, total_rows=5.0) for part in mask.split(2)])
    torch.testing.assert_close(split, reductions.sequence_mean(mask))


def combinations(count: int) -> list[tuple[str, str, str]]:
    """Random points of the space that the axes span."""
    pick = random.Random(0).choice
    return [(pick(list(LOSSES)), pick(list(WEIGHTS)), pick(list(FACTORS))) for _ in range(count)]


@pytest.mark.parametrize(("loss", "weights", "factor"), combinations(60))
def test_any_combination_of_axes_is_the_same_split_and_padded(loss, weights, factor):
    """Any loss with any reduction and any correction or selection, and a KL penalty: split and padded."""
    clean = a_step(1)

    def objective(step: Step) -> Tensor:
        return LOSSES[loss](step) + 0.1 * LOSSES["k3"](step)

    value, gradient = run(objective, prepared(clean, weights, factor), WHOLE)
    assert math.isfinite(value) and torch.isfinite(gradient).all()
    dirty = {
        name: item.masked_fill(~clean["mask"], math.nan) if item.is_floating_point() and item.ndim == 2 else item
        for name, item in clean.items()
    }
    other, split = run(objective, prepared(dirty, weights, factor), SPLITS[2])
    assert other == pytest.approx(value, abs=1e-12)
    torch.testing.assert_close(split, gradient, rtol=0, atol=1e-12)
