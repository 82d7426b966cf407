"""Reductions, clips and KL estimators, by hand."""

import math

import pytest
import torch

from atomrl.atoms.kl import k1_kl, k2_kl, k3_kl
from atomrl.atoms.masks import masked_mean, masked_sum
from atomrl.atoms.policy_losses import (
    clipped_policy_loss,
    clipped_tokens,
    constant_length,
    sequence_mean,
    token_log_ratio,
    token_mean,
    token_ratio,
)

MASK = torch.tensor([[False, True, True, False], [False, True, False, False], [False] * 4])


def test_reductions_by_hand():
    assert token_mean(MASK)[0].tolist() == pytest.approx([0, 1 / 3, 1 / 3, 0])
    assert sequence_mean(MASK)[0].tolist() == pytest.approx([0, 1 / 4, 1 / 4, 0])
    assert sequence_mean(MASK)[1].tolist() == pytest.approx([0, 1 / 2, 0, 0])
    assert constant_length(MASK, 10)[1].tolist() == pytest.approx([0, 1 / 30, 0, 0])


@pytest.mark.parametrize("weights", [token_mean, sequence_mean])
def test_weights_sum_to_one_and_to_zero_for_an_empty_mask(weights):
    assert weights(MASK).sum().item() == pytest.approx(1.0)
    assert weights(torch.zeros(2, 3, dtype=torch.bool)).sum().item() == 0
    assert (weights(MASK)[~MASK] == 0).all()


def test_constant_length_refuses_zero():
    with pytest.raises(ValueError, match="length"):
        constant_length(MASK, 0)


def test_garbage_off_the_mask_is_harmless_forward_and_backward():
    for garbage in (math.nan, math.inf, -math.inf, 1e30):
        logprobs = torch.full((3, 4), -1.0)
        logprobs[~MASK] = garbage
        logprobs.requires_grad_()
        old = torch.full((3, 4), -1.5)
        ratio = token_ratio(logprobs, old, MASK)
        loss = (token_mean(MASK) * clipped_policy_loss(ratio, MASK.float(), 0.2, 1.0)).sum()
        loss = loss + masked_sum(k3_kl(logprobs, old, MASK), MASK) + masked_mean(logprobs, MASK)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(logprobs.grad[MASK]).all()
        assert (logprobs.grad[~MASK] == 0).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 1.0, -1.1, -1.0),
        (1.5, 1.0, -1.28, 0.0),  # too high, and the advantage pulls further: clipped
        (1.5, -1.0, 1.5, 1.0),  # too high, and the advantage pulls back: not clipped
        (0.5, -1.0, 0.8, 0.0),
        (0.5, 1.0, -0.5, -1.0),
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipping_by_hand(ratio, advantage, loss, gradient):
    ratio, advantage = torch.tensor([[ratio]], requires_grad=True), torch.tensor([[advantage]])
    result = clipped_policy_loss(ratio, advantage, 0.2, 0.28)
    result.sum().backward()
    assert result.item() == pytest.approx(loss)
    assert ratio.grad.item() == pytest.approx(gradient)
    assert clipped_tokens(ratio, advantage, 0.2, 0.28).item() == (gradient == 0.0 and advantage.item() != 0)


def test_infinite_bounds_are_no_clip():
    ratio = torch.tensor([[9.0, 0.01]])
    loss = clipped_policy_loss(ratio, torch.tensor([[1.0, -1.0]]), math.inf, math.inf)
    torch.testing.assert_close(loss, torch.tensor([[-9.0, 0.01]]))


def test_negative_bounds_are_refused():
    with pytest.raises(ValueError, match="clip"):
        clipped_policy_loss(torch.ones(1, 1), torch.ones(1, 1), -0.1, 0.2)


def test_kl_estimators_estimate_the_divergence():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.3, 0.3])
    tokens = torch.multinomial(p, 200_000, replacement=True, generator=generator)
    logprobs, ref = p.log()[tokens][None], q.log()[tokens][None]
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    exact = (p * (p / q).log()).sum().item()
    assert k1_kl(logprobs, ref, mask).mean().item() == pytest.approx(exact, rel=0.1)
    assert k3_kl(logprobs, ref, mask).mean().item() == pytest.approx(exact, rel=0.05)
    assert k2_kl(logprobs, ref, mask).mean().item() == pytest.approx(exact, rel=0.1)
    assert (k3_kl(logprobs, ref, mask) >= 0).all()
    assert token_log_ratio(logprobs, logprobs, mask).abs().max() == 0
