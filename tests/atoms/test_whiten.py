"""Mean, variance and whitening under a mask, by hand."""

import math

import pytest
import torch

from atomrl.atoms.masks import masked_variance, masked_whiten

MASK = torch.tensor([[True, True, False, True], [True, False, False, False], [False] * 4])


def test_mean_and_variance_under_the_mask():
    values = torch.randn(3, 4, dtype=torch.float64)
    white = masked_whiten(values, MASK, eps=0.0)[MASK]
    assert white.mean().item() == pytest.approx(0, abs=1e-12)
    assert white.var().item() == pytest.approx(1)
    kept = masked_whiten(values, MASK, shift_mean=False)[MASK]
    assert kept.mean().item() == pytest.approx(values[MASK].mean().item())


def test_where_eps_goes():
    values, mask = torch.tensor([[1.0, 3.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    assert masked_whiten(values, mask, eps=2.0)[0, 1].item() == pytest.approx(1 / 2)  # deviation 1, variance 2


def test_variance_by_hand():
    values, mask = torch.tensor([[1.0, 3.0, 8.0]]), torch.tensor([[True, True, False]])
    assert masked_variance(values, mask).item() == pytest.approx(2.0)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1e30])
def test_garbage_off_the_mask_is_harmless(garbage):
    values = torch.randn(3, 4)
    clean, dirty = (masked_whiten(values.where(MASK, off), MASK) for off in (0.0, garbage))
    assert torch.equal(clean, dirty)
    assert (clean[~MASK] == 0).all()


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_nothing_to_divide_by(eps):
    one, none = torch.tensor([[True, False]]), torch.zeros(1, 2, dtype=torch.bool)
    values = torch.tensor([[5.0, 7.0]])
    for mask in (one, none):
        assert masked_whiten(values, mask, eps=eps).tolist() == [[0.0, 0.0]]
    equal = torch.full((2, 3), 0.1)
    assert masked_whiten(equal, torch.ones(2, 3, dtype=torch.bool)).abs().max().item() < 1e-6


def test_the_order_of_rows_does_not_matter():
    values, order = torch.randn(3, 4, dtype=torch.float64), torch.tensor([2, 0, 1])
    torch.testing.assert_close(masked_whiten(values, MASK)[order], masked_whiten(values[order], MASK[order]))


def test_bad_values_are_refused():
    with pytest.raises(ValueError, match="eps"):
        masked_whiten(torch.zeros(3, 4), MASK, eps=-1.0)
