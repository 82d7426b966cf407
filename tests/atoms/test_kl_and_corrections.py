"""KL coefficients, importance weights and choices of tokens against slow definitions of them."""

from __future__ import annotations

import math

import pytest
import torch

from atomrl.atoms import kl, token_filters
from atomrl.atoms import policy_losses as importance_sampling
from atomrl.atoms import preference_losses as preference_scores
from atomrl.atoms import preference_losses as unpaired_losses
from atomrl.atoms.auxiliary_losses import clipped_value_loss, clipped_values, generalised_jsd
from atomrl.atoms.masks import masked_mean, row_max, row_mean, row_sum
from atomrl.atoms.policy_losses import binary_kl, probability_change, token_log_ratio, token_mean, weighted_sum
from atomrl.atoms.preference_losses import bradley_terry_loss, dpo_loss, exo_loss, robust_dpo_loss

MASK = torch.tensor([[True, True, False], [False, True, True], [False, False, False]])


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("horizon", [100.0, 10_000.0])
def test_the_adaptive_controller_equals_a_slow_loop(horizon):
    """Ziegler et al. (2019), section 2.2: e = clip((KL - target) / target, -0.2, 0.2), beta <- beta (1 + K e n)."""
    target, samples = 6.0, 32.0
    ours = slow = 0.2
    for current in [0.0, 3.0, 5.9, 6.0, 6.1, 7.0, 60.0, 6e9, 0.5] * 20:
        error = (current - target) / target
        if error > 0.2:
            error = 0.2
        elif error < -0.2:
            error = -0.2
        slow = slow + slow * (1 / horizon) * error * samples
        ours = kl.adaptive_coefficient(ours, current, target, horizon, samples)
        assert ours == pytest.approx(slow, rel=1e-12)
        assert ours > 0


def test_the_controller_holds_a_system_at_its_target():
    """A made-up policy whose KL falls as the coefficient rises: KL = 1 / beta."""
    coefficient = 0.01
    for _ in range(2000):
        coefficient = kl.adaptive_coefficient(coefficient, 1 / coefficient, 5.0, 1000.0, 64.0)
    assert 1 / coefficient == pytest.approx(5.0, rel=1e-3)


def test_the_controller_refuses_what_it_cannot_divide_by():
    for target, horizon in [(0.0, 1.0), (math.nan, 1.0), (1.0, 0.0)]:
        with pytest.raises(ValueError, match="above 0"):
            kl.adaptive_coefficient(0.1, 1.0, target, horizon, 1.0)


def test_an_infinite_horizon_fixes_the_coefficient():
    assert kl.adaptive_coefficient(0.1, 99.0, 1.0, math.inf, 64.0) == 0.1


def test_a_clamped_estimate_is_that_of_a_clamped_ratio():
    """As the module says: the bounds of verl, SkyRL and NeMo-RL stop the gradient and nothing else."""
    logprobs = torch.tensor([[-1.0, -30.0]], dtype=torch.float64, requires_grad=True)
    ref, mask = torch.full((1, 2), -1.5, dtype=torch.float64), torch.tensor([[True, True]])
    log_ratio = token_log_ratio(logprobs, ref, mask, clamp=20.0)
    clamped = kl.k3_kl(log_ratio, torch.zeros_like(log_ratio), mask).clamp(max=10.0)
    clamped.sum().backward()
    assert clamped[0, 0].item() == pytest.approx(kl.k3_kl(logprobs, ref, mask)[0, 0].item(), rel=1e-12)
    assert clamped[0, 1] == 10.0
    assert logprobs.grad[0, 0] != 0 and logprobs.grad[0, 1] == 0


def test_a_weighted_estimate_has_the_gradient_of_the_kl():
    """d KL(p || q) by the score function: E[ratio * k3] over the samples, against the derivative of the sum itself."""
    logits = values(0, 5).requires_grad_()
    q = values(1, 5).log_softmax(0)
    exact = kl.distribution_kl(logits.log_softmax(0), q)
    (expected,) = torch.autograd.grad(exact, logits)
    p = logits.log_softmax(0)
    mask = torch.ones(1, 5, dtype=torch.bool)
    ratio = (p - p.detach()).exp()[None]
    for estimator in (kl.k1_kl, kl.k3_kl):
        estimate = (p.detach().exp() * (ratio * estimator(p[None], q[None], mask))[0]).sum()
        assert estimate.item() == pytest.approx(exact.item())
        (gradient,) = torch.autograd.grad(estimate, logits, retain_graph=True)
        torch.testing.assert_close(gradient, expected)
    surrogate = kl.k2_gradient(kl.k1_kl(p[None], q[None], mask), p[None], q[None], mask)[0]
    (gradient,) = torch.autograd.grad((p.detach().exp() * surrogate).sum(), logits)
    torch.testing.assert_close(gradient, expected)


def test_a_distribution_with_zeros_has_a_finite_kl():
    p = torch.tensor([1.0, 0.0]).log().requires_grad_()
    divergence = kl.distribution_kl(p, torch.tensor([0.5, 0.5]).log())
    assert divergence.item() == pytest.approx(math.log(2))


def test_rows_by_hand():
    x = torch.tensor([[1.0, 3.0, math.nan], [math.inf, -2.0, -4.0], [math.nan] * 3])
    assert row_sum(x, MASK).tolist() == [4.0, -6.0, 0.0]
    assert row_mean(x, MASK).tolist() == [2.0, -3.0, 0.0]
    assert row_max(x, MASK).tolist() == [3.0, -2.0, 0.0]
    assert masked_mean(x, MASK).item() == -0.5


def test_second_moment_tokens_equal_dropping_one_at_a_time():
    for seed, bound in [(0, 0.3), (1, 0.05), (2, 1e-9), (3, 100.0)]:
        gaps = values(seed, 4, 6)
        mask = values(seed + 9, 4, 6) > -0.3
        kept = mask.clone()
        while kept.sum() > 1 and gaps[kept].square().mean() >= bound:
            worst = gaps.square().masked_fill(~kept, -1).argmax()
            kept.view(-1)[worst] = False
        assert torch.equal(importance_sampling.second_moment_tokens(gaps, mask, bound), kept)
    assert not importance_sampling.second_moment_tokens(gaps, torch.zeros_like(mask), 1.0).any()


def test_importance_weights_correct_an_average():
    """Samples of mu, weighted, give the mean under pi."""
    mu, pi, reward = torch.tensor([0.6, 0.4]), torch.tensor([0.3, 0.7]), torch.tensor([1.0, 3.0])
    mask = torch.ones(1, 2, dtype=torch.bool)
    weights = importance_sampling.importance_weights(
        importance_sampling.rollout_log_ratio(pi.log()[None], mu.log()[None], mask)
    )
    assert (mu * weights[0] * reward).sum().item() == pytest.approx((pi * reward).sum().item())


def test_a_missing_rollout_logprob_is_seen():
    old, rollout, mask = torch.zeros(1, 2), torch.tensor([[math.nan, 0.0]]), torch.ones(1, 2, dtype=torch.bool)
    assert importance_sampling.rollout_log_ratio(old, rollout, mask).isnan().any()
    assert not importance_sampling.within(importance_sampling.rollout_log_ratio(old, rollout, mask))[0, 0]


def test_normalised_weights_have_a_mean_of_one():
    weights = values(0, 3, 3).exp()
    assert masked_mean(importance_sampling.normalised_weights(weights, MASK), MASK).item() == pytest.approx(1)
    by_row = importance_sampling.normalised_weights(weights, MASK, by_row=True)
    assert row_mean(by_row, MASK)[:2].mean().item() == pytest.approx(1)
    zeros = torch.zeros(3, 3)
    assert torch.equal(importance_sampling.normalised_weights(zeros, MASK), zeros)


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.5, 0.77, 1.0])
def test_the_entropy_quantile_is_that_of_torch(fraction):
    entropies, mask = values(0, 8, 9).abs(), values(1, 8, 9) > -1
    threshold = torch.quantile(entropies[mask], 1 - fraction)
    keep = token_filters.high_entropy_tokens(entropies, mask, fraction)
    assert torch.equal(keep, (entropies >= threshold) & mask)
    assert not token_filters.high_entropy_tokens(entropies, torch.zeros_like(mask), fraction).any()


def test_budgets_are_kept():
    entropies, mask = values(0, 8, 9).abs(), values(1, 8, 9) > -1
    chosen = token_filters.highest_entropy_tokens(entropies, mask, 10)
    assert chosen.sum() == 10 and not (chosen & ~mask).any()
    assert entropies[chosen].min() >= entropies[mask & ~chosen].max()
    generator = torch.Generator().manual_seed(0)
    draws = [token_filters.random_tokens(mask, 10, generator) for _ in range(200)]
    assert all(draw.sum() == 10 and not (draw & ~mask).any() for draw in draws)
    frequency = torch.stack(draws).double().mean(0)[mask]
    assert (frequency - 10 / mask.sum()).abs().max() < 0.15
    assert torch.equal(token_filters.random_tokens(mask, 10**9), mask)
    with pytest.raises(ValueError, match="between 0 and 1"):
        token_filters.high_entropy_tokens(entropies, mask, 1.2)


def test_covariance_rules_drop_tokens_within_their_bounds():
    covariance = torch.tensor([[0.0, 2.0, 3.0, 9.0, 4.0]])
    every = torch.ones(1, 5, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    dropped = set()
    for _ in range(50):
        keep = token_filters.clip_covariance_tokens(covariance, every, every, 0.2, 1.0, 5.0, generator)
        assert (~keep).sum() == 1
        dropped.add((~keep).nonzero()[0, 1].item())
    assert dropped == {1, 2, 4}
    picked = token_filters.highest_covariance_tokens(covariance, every, 0.4)
    assert picked.tolist() == [[False, False, False, True, True]]


@pytest.mark.parametrize("advantage", [0.0, 0.3, -0.7])
def test_equal_advantages_have_no_covariance(advantage):
    mask = torch.rand(8, 40, generator=torch.Generator().manual_seed(0)) < 0.8
    logprobs = -torch.rand(8, 40, generator=torch.Generator().manual_seed(1))
    covariance = token_filters.token_covariance(logprobs, torch.full((8, 40), advantage), mask)
    assert not covariance.any() and not token_filters.highest_covariance_tokens(covariance, mask, 0.4).any()


def test_value_clipping_by_hand():
    v = torch.tensor([[0.5, 0.5, 0.1, -0.5]], requires_grad=True)
    old, returns, mask = (
        torch.zeros(1, 4),
        torch.tensor([[1.0, 0.0, 1.0, math.nan]]),
        torch.tensor([[1, 1, 1, 0]]).bool(),
    )
    loss = clipped_value_loss(v, old, returns, mask, clip=0.2)
    loss.sum().backward()
    assert loss[0].tolist() == pytest.approx([0.32, 0.125, 0.405, 0.0])
    assert v.grad[0].tolist() == pytest.approx([0.0, 0.5, -0.9, 0.0])
    assert clipped_values(v, old, returns, mask, 0.2).tolist() == [[True, False, False, False]]


def test_preference_losses_at_their_optimum():
    """With labels that are wrong at a rate e, cDPO and EXO are least where sigmoid(beta D) = 1 - e."""
    e = 0.1
    best = torch.tensor([math.log((1 - e) / e) / 0.1], dtype=torch.float64, requires_grad=True)
    for loss in (dpo_loss(best, 0.1, e), exo_loss(best, 0.1, e)):
        (gradient,) = torch.autograd.grad(loss.sum(), best)
        assert gradient.item() == pytest.approx(0, abs=1e-12)


def test_robust_dpo_is_unbiased_under_flipped_labels():
    margin, e = values(0, 50), 0.2
    noisy = (1 - e) * robust_dpo_loss(margin, 0.5, e) + e * robust_dpo_loss(-margin, 0.5, e)
    torch.testing.assert_close(noisy, dpo_loss(margin, 0.5))
    with pytest.raises(ValueError, match="must be at least 0"):
        robust_dpo_loss(margin, 0.5, 0.5)
    with pytest.raises(ValueError, match="between 0 and 1"):
        exo_loss(margin, 0.5, 0.0)


def test_extreme_preferences_stay_finite():
    margin = torch.tensor([-1e4, 1e4], dtype=torch.float64, requires_grad=True)
    total = dpo_loss(margin).sum() + bradley_terry_loss(margin, -margin).sum() + exo_loss(margin).sum()
    total.backward()
    assert torch.isfinite(total) and torch.isfinite(margin.grad).all()


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"])
def test_f_divergence_scores_are_zero_at_the_reference_with_slope(divergence):
    z = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    score = preference_scores.f_divergence_score(z, divergence, 0.5)
    score.sum().backward()
    assert score.item() == pytest.approx(0)
    assert z.grad.item() == pytest.approx(0.5 if divergence == "js_divergence" else 1)


def test_the_running_mean_is_that_of_all_values():
    x, mean, count = values(0, 12), torch.zeros((), dtype=torch.float64), 0.0
    for part in x.split([5, 3, 4]):
        mean, count = unpaired_losses.running_mean(mean, count, part)
    assert mean.item() == pytest.approx(x.mean().item()) and count == 12


def test_the_jensen_shannon_family_has_the_kls_at_its_ends():
    student, teacher = values(0, 3, 5).requires_grad_(), values(1, 3, 5)
    forward = generalised_jsd(student, teacher, 0.0)
    torch.testing.assert_close(forward, kl.distribution_kl(teacher.log_softmax(-1), student.log_softmax(-1)))
    reverse = generalised_jsd(student, teacher, 1.0)
    torch.testing.assert_close(reverse, kl.distribution_kl(student.log_softmax(-1), teacher.log_softmax(-1)))
    torch.testing.assert_close(generalised_jsd(student, teacher, 1e-9) / 1e-9, forward, rtol=1e-6, atol=0)
    assert (generalised_jsd(teacher, teacher, 0.3).abs() < 1e-12).all()
    with pytest.raises(ValueError, match="between 0 and 1"):
        generalised_jsd(student, teacher, 1.5)


def test_a_factor_that_is_nan_off_the_mask_is_harmless():
    leaf = torch.full((1, 2), -1.0, requires_grad=True)
    mask, nan = torch.tensor([[True, False]]), torch.tensor([[2.0, math.nan]])
    estimate = kl.k3_kl(leaf, leaf.detach() - 0.5, mask)
    loss = weighted_sum(estimate, token_mean(mask), nan)
    loss.backward()
    assert loss.item() == pytest.approx(2 * (math.exp(-0.5) - 0.5))
    assert leaf.grad[0, 1] == 0 and torch.isfinite(leaf.grad[0, 0])


def test_divergences_are_zero_off_the_mask():
    nan, mask = torch.tensor([[math.nan, -1.0]]), torch.tensor([[False, True]])
    assert probability_change(nan, nan - 1, mask)[0, 0] == 0
    assert binary_kl(nan, nan - 1, mask)[0, 0] == 0
    assert binary_kl(nan, nan - 1, mask)[0, 1] > 0
