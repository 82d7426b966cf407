import math

import pytest
import torch

from atomrl.atoms.whiten import masked_mean_baseline, masked_variance, masked_whiten, row_whiten

MASK = torch.tensor([[True, True, False, True], [True, False, False, False], [False] * 4])


def test_mean_and_variance_under_the_mask():
    values = torch.randn(3, 4, dtype=torch.float64)
    white = masked_whiten(values, MASK, eps=0.0)[MASK]
    assert white.mean().item() == pytest.approx(0, abs=1e-12)
    assert white.var().item() == pytest.approx(1)
    assert masked_whiten(values, MASK, unbiased=False, eps=0.0)[MASK].var(correction=0).item() == pytest.approx(1)
    kept = masked_whiten(values, MASK, shift_mean=False)[MASK]
    assert kept.mean().item() == pytest.approx(values[MASK].mean().item())
    assert masked_mean_baseline(values, MASK)[MASK].mean().item() == pytest.approx(0, abs=1e-12)


def test_where_eps_goes():
    values, mask = torch.tensor([[1.0, 3.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    first = {
        role: masked_whiten(values, mask, unbiased=False, eps=3.0, eps_role=role)[0, 1].item()
        for role in ("variance", "std", "floor")
    }  # deviation 1, biased variance 1
    assert first == pytest.approx({"variance": 1 / 2, "std": 1 / 4, "floor": 1 / 3**0.5})


def test_variance_by_hand():
    values, mask = torch.tensor([[1.0, 3.0, 8.0]]), torch.tensor([[True, True, False]])
    assert masked_variance(values, mask).item() == pytest.approx(2.0)
    assert masked_variance(values, mask, unbiased=False).item() == pytest.approx(1.0)
    # mean 4 / 4, deviations 0 and 2, their squares' mean 4 / 4, times 2 / 1
    assert masked_variance(values, mask, count_eps=2.0).item() == pytest.approx(2.0)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1e30])
@pytest.mark.parametrize("atom", [masked_whiten, masked_mean_baseline, row_whiten])
def test_what_is_off_the_mask_is_harmless(atom, garbage):
    values = torch.randn(3, 4)
    clean, dirty = atom(values.where(MASK, 0.0), MASK), atom(values.where(MASK, garbage), MASK)
    assert torch.equal(clean, dirty)
    assert (clean[~MASK] == 0).all()


@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("role", ["variance", "std", "floor"])
def test_nothing_to_divide_by(role, eps):
    one, none = torch.tensor([[True, False]]), torch.zeros(1, 2, dtype=torch.bool)
    values = torch.tensor([[5.0, 7.0]])
    for mask in (one, none):
        for atom in (masked_whiten, row_whiten):
            assert atom(values, mask, eps=eps, eps_role=role).tolist() == [[0.0, 0.0]]
    equal = torch.full((2, 3), 0.1)
    assert masked_whiten(equal, torch.ones(2, 3, dtype=torch.bool)).abs().max().item() < 1e-6


def test_rows_are_whitened_apart():
    values = torch.tensor([[1.0, 3.0], [10.0, 30.0]])
    torch.testing.assert_close(
        row_whiten(values, torch.ones(2, 2, dtype=torch.bool)), torch.tensor([[-1.0, 1.0], [-1.0, 1.0]])
    )


def test_the_order_of_rows_does_not_matter():
    values, order = torch.randn(3, 4, dtype=torch.float64), torch.tensor([2, 0, 1])
    torch.testing.assert_close(masked_whiten(values, MASK)[order], masked_whiten(values[order], MASK[order]))


def test_bad_values_are_refused():
    with pytest.raises(ValueError, match="eps"):
        masked_whiten(torch.zeros(3, 4), MASK, eps=-1.0)
    with pytest.raises(Exception, match="eps_role"):
        row_whiten(torch.zeros(3, 4), MASK, eps_role="sqrt")
