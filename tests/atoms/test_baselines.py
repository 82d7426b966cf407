"""Baselines, best-of-k and length weights against their definitions."""

import itertools
import math
import statistics

import pytest
import torch

from atomrl.atoms import advantages
from atomrl.atoms import advantages as baselines
from atomrl.atoms.advantages import group_mean_baseline
from atomrl.objectives import AdvantageInputs
from atomrl.objectives.advantage import GPGAdvantage

IDS = torch.tensor([0, 0, 0, 1])


def slow_token_baseline(returns, energy, mask, ids, eps, by_token, zero_tail):
    """The definition, one token at a time."""
    lengths = mask.sum(1).tolist()
    place = (mask.cumsum(1) - 1) if by_token else torch.arange(mask.shape[1]).expand(mask.shape)
    result = torch.zeros_like(returns)
    for i, t in mask.nonzero().tolist():
        group = [j for j in range(len(ids)) if ids[j] == ids[i] and (not by_token or lengths[j] > 0)]
        others = [lengths[j] for j in group if j != i]
        if not others or (zero_tail and lengths[i] > max(others) and place[i, t] >= max(others)):
            continue
        cells = [(j, u) for j, u in mask.nonzero().tolist() if j in group and place[j, u] == place[i, t]]
        total = sum(energy[j, u].item() for j, u in cells)
        result[i, t] = sum(energy[j, u].item() * returns[j, u].item() for j, u in cells) / (total + eps)
    return result


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_optimal_token_baseline_is_its_definition(by_token, zero_tail, seed):
    torch.manual_seed(seed)
    returns, energy = torch.randn(6, 5, dtype=torch.float64), torch.rand(6, 5, dtype=torch.float64)
    mask, ids = torch.rand(6, 5) < 0.6, torch.tensor([0, 0, 0, 1, 1, 2])
    mask[1] = False
    arguments = (returns, energy, mask, ids, 1e-8, by_token, zero_tail)
    torch.testing.assert_close(baselines.optimal_token_baseline(*arguments), slow_token_baseline(*arguments))


def test_the_score_of_a_token_is_the_gradient_of_its_logprob():
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([1, 0, 6, 3])
    logprobs = logits.log_softmax(1).gather(1, tokens[:, None])[:, 0]
    norms = torch.stack([torch.autograd.grad(lp, logits, retain_graph=True)[0].square().sum() for lp in logprobs])
    squares = logits.softmax(1).square().sum(1)
    mask = torch.ones(1, 4, dtype=torch.bool)
    ours = baselines.cumulative_score_norm(logprobs[None], squares[None], mask)
    torch.testing.assert_close(ours[0], norms.cumsum(0))
    half = torch.full((1, 4), 0.5, dtype=torch.float64)
    ours = baselines.cumulative_score_norm(logprobs[None], squares[None], mask, half)
    torch.testing.assert_close(ours[0], norms.cumsum(0) / 4)


def test_best_minus_second_by_hand():
    rewards = torch.tensor([0.2, 0.9, 0.5, 7.0])
    assert baselines.best_minus_second(rewards, IDS).tolist() == pytest.approx([0, 0.4, 0, 0])
    assert baselines.best_minus_second(torch.tensor([0.9, 0.9, 0.5, 7.0]), IDS).tolist() == [0, 0, 0, 0]


def slow_best_of_k(rewards: list[float], k: int) -> list[float]:
    """Every subset in turn."""
    subsets = list(itertools.combinations(range(len(rewards)), k))
    best = [max(rewards[j] for j in subset) for subset in subsets]
    mean, std = statistics.fmean(best), statistics.pstdev(best)
    own = [[b for b, subset in zip(best, subsets, strict=True) if i in subset] for i in range(len(rewards))]
    return [(statistics.fmean(group) - mean) / std if std else 0.0 for group in own]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("binary", [True, False])
def test_best_of_k_is_the_enumeration_of_all_subsets(k, binary):
    generator = torch.Generator().manual_seed(k)
    rewards = torch.rand(18, generator=generator, dtype=torch.float64)
    rewards = (rewards < 0.3).double() if binary else (4 * rewards).round()  # with ties
    ids = torch.tensor([0, 1, 2])[torch.randperm(18, generator=generator) % 3]
    actual = baselines.best_of_k(rewards, ids, k)
    for group in range(3):
        expected = slow_best_of_k(rewards[ids == group].tolist(), k)
        assert actual[ids == group].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("n", "right", "k"), [(8, 1, 4), (8, 3, 4), (32, 5, 4), (16, 2, 8)])
def test_best_of_k_has_the_papers_closed_form(n, right, k):
    wrong, comb = n - right, math.comb
    mean = 1 - comb(wrong, k) / comb(n, k)
    std = math.sqrt(mean * (1 - mean))
    good, bad = (1 - mean) / std, (1 - mean - comb(wrong - 1, k - 1) / comb(n - 1, k - 1)) / std
    rewards = torch.tensor([1.0] * right + [0.0] * wrong)
    actual = baselines.best_of_k(rewards, torch.zeros(n, dtype=torch.long), k)
    assert actual.tolist() == pytest.approx([good] * right + [bad] * wrong, abs=1e-6)


def test_best_of_k_has_no_signal_where_every_subset_has_the_same_best():
    ids = torch.zeros(4, dtype=torch.long)
    for rewards, k in (([0.3] * 4, 2), ([0.3, 0.1, 0.3, 0.3], 2), ([1.0, 0.0, 0.5, 0.2], 4), ([1.0, 0.0, 0.5, 0.2], 9)):
        assert not baselines.best_of_k(torch.tensor(rewards), ids, k).any()
    with pytest.raises(ValueError, match="k=0"):
        baselines.best_of_k(torch.ones(4), ids, 0)


def test_length_weighted_by_hand():
    rewards, lengths = torch.tensor([1.0, 0.0, 0.0, 5.0]), torch.tensor([2, 1, 1, 3])
    ours = baselines.length_weighted_baseline(rewards, lengths, IDS)
    assert ours.tolist() == pytest.approx([0.5, -0.5, -0.5, 0.0])
    same = torch.full((4,), 3, dtype=torch.long)
    torch.testing.assert_close(
        baselines.length_weighted_baseline(rewards, same, IDS), advantages.group_mean_baseline(rewards, IDS)
    )
    assert baselines.length_weighted_baseline(rewards, same * 0, IDS).tolist() == [0.0] * 4


def test_rescaled_by_share_by_hand():
    ours = baselines.rescaled_by_share(torch.ones(4), torch.tensor([1.0, 0, 0, 0]) != 0, normaliser=2.0)
    assert ours.tolist() == [2.0] * 4
    assert baselines.rescaled_by_share(torch.zeros(4), torch.zeros(4) != 0).tolist() == [0.0] * 4
    with pytest.raises(ValueError, match="normaliser"):
        baselines.rescaled_by_share(torch.ones(1), torch.ones(1) != 0, 0.0)


@pytest.mark.parametrize(
    ("wrong", "verl"), [(0.0, 8 / 7), (-1.0, 1.0)], ids=["wrong answers earn 0", "wrong answers earn -1"]
)
def test_gpg_in_the_paper_and_in_verl(wrong, verl):
    """Four groups of two, one of them mixed: the paper's alpha is 4, whatever a wrong answer earns and however many
    are right; verl's depends on both."""
    ids = torch.arange(8) // 2
    mostly_right = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, wrong])
    mostly_wrong = torch.tensor([wrong, wrong, wrong, wrong, wrong, wrong, wrong, 1.0])
    for rewards, theirs in ((mostly_right, verl), (mostly_wrong, 8.0 if wrong == 0 else 1.0)):
        centred = group_mean_baseline(rewards, ids)
        assert torch.equal(GPGAdvantage()(AdvantageInputs(rewards, ids)), 4 * centred)
        ours = GPGAdvantage(alpha="verl")(AdvantageInputs(rewards, ids))
        torch.testing.assert_close(ours, theirs * centred, check_dtype=False)


def test_gpg_by_groups_of_any_size():
    ids, rewards = torch.tensor([5, 5, 5, 2, 2, 9]), torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    ours = GPGAdvantage(normaliser=2.0)(AdvantageInputs(rewards, ids))
    torch.testing.assert_close(ours, group_mean_baseline(rewards, ids), check_dtype=False)  # 6 / 3, halved
    assert GPGAdvantage()(AdvantageInputs(torch.ones(6), ids)).tolist() == [0.0] * 6


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8, -7.3])
def test_equal_rewards_and_single_completions_give_exactly_zero(value):
    rewards, ids = torch.tensor([value] * 7 + [2.0]), torch.tensor([0] * 7 + [1])
    assert baselines.best_minus_second(rewards, ids).tolist() == [0.0] * 8
    assert baselines.length_weighted_baseline(rewards, torch.arange(8), ids).tolist() == [0.0] * 8


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1e30])
def test_garbage_off_the_mask_is_harmless(garbage):
    mask = torch.tensor([[True, False, True], [True, True, False], [False] * 3])
    ids, numbers = torch.zeros(3, dtype=torch.long), torch.rand(3, 3)

    def credit(dirty):
        returns, logprobs, squares = (
            numbers.where(mask, dirty),
            (-numbers).where(mask, dirty),
            numbers.where(mask, dirty),
        )
        energy = baselines.cumulative_score_norm(logprobs, squares, mask)
        baseline = baselines.optimal_token_baseline(returns, energy, mask, ids)
        return baselines.return_minus_baseline(returns, baseline, mask)

    assert torch.equal(credit(garbage), credit(0.0))
    assert (credit(garbage)[~mask] == 0).all()


def test_baselines_of_no_rows_are_empty():
    nothing, ids = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    assert baselines.best_minus_second(nothing, ids).shape == (0,)
    assert baselines.length_weighted_baseline(nothing, ids, ids).shape == (0,)
