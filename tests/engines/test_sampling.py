"""Sampling: the counter-based generator, the inverse CDF, and the C++ kernel."""

from dataclasses import replace

import pytest
import torch

from atomrl.engines.generation import requests_of
from atomrl.engines.native.cpu_kernels import load_kernels
from atomrl.engines.sampling import inverse_cdf, sample, sample_candidates, uniforms
from atomrl.types import Problem, Prompt, SamplingParams

MASK = 2**64 - 1


def splitmix64(seed: int, position: int) -> int:
    """Steele, Lea, Flood 2014, in Python's integers."""
    x = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def seeds_of(count: int) -> torch.Tensor:
    prompt = Prompt(prompt_id="p", problem=Problem(problem_id="p", prompt="", ground_truth=""), token_ids=(1,))
    return torch.tensor([request.seed for request in requests_of(prompt, SamplingParams(completions_per_prompt=count))])


def test_splitmix_reference_values():
    assert splitmix64(1234567, 0) == 6457827717110365317  # published test vector of the generator
    assert splitmix64(1234567, 1) == 3203168211198807973


def test_uniforms_are_splitmix():
    seeds, positions = seeds_of(50), torch.arange(50) * 7
    expected = [
        ((splitmix64(seed, position) >> 12) + 0.5) * 2.0**-52
        for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    assert uniforms(seeds, positions).tolist() == expected


def test_uniforms_spread_over_seeds_and_over_positions():
    for draws in (uniforms(seeds_of(4000), torch.zeros(4000).long()), uniforms(seeds_of(1), torch.arange(4000))):
        counts = torch.histc(draws.float(), bins=20, min=0, max=1)
        assert float(((counts - 200) ** 2 / 200).sum()) < 19 + 5 * (2 * 19) ** 0.5


@pytest.mark.parametrize("width", [1, 3, 255, 256, 257, 1000])
def test_inverse_cdf_is_the_plain_search(width):
    generator = torch.Generator().manual_seed(width)
    weights = torch.rand(200, width, generator=generator, dtype=torch.float64)
    weights[:, ::3] = 0
    weights[:, -1] = 1e-3
    uniform = torch.rand(200, generator=generator, dtype=torch.float64)
    index, total = inverse_cdf(weights, uniform)
    plain = torch.searchsorted(weights.cumsum(-1), (uniform * weights.sum(-1))[:, None], right=True)[:, 0]
    assert torch.equal(index, plain)
    assert torch.allclose(total, weights.sum(-1))


def test_inverse_cdf_never_draws_a_zero_weight_at_the_ends():
    weights = torch.zeros(3, 600)
    weights[:, 100] = weights[:, 300] = 1.0
    ends = torch.tensor([2.0**-53, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert inverse_cdf(weights, ends)[0].tolist() == [100, 300, 300]


@pytest.mark.parametrize("width", [7, 102, 512, 1001, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_draws_what_pytorch_draws(width, dtype):
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("no C++ compiler")
    generator = torch.Generator().manual_seed(width)
    logits = (torch.randn(300, width, generator=generator) * 3).to(dtype)
    seeds, positions = seeds_of(300), torch.arange(300)
    for temperature in (0.7, 1.0):
        sampling = SamplingParams(temperature=temperature)
        tokens, logprobs = sample(logits, sampling, seeds, positions)
        kernel_tokens, kernel_logprobs = sample(logits, sampling, seeds, positions, kernels=kernels)
        assert (tokens == kernel_tokens).float().mean() > 0.99  # a draw at a boundary may fall either way
        same = tokens == kernel_tokens
        assert torch.allclose(logprobs[same], kernel_logprobs[same], atol=2e-6, rtol=1e-6)


def test_top_p_beyond_the_sorted_prefix():
    """A flat distribution over 2000 tokens needs more than the prefix that is sorted first."""
    logits = torch.linspace(0, 0.1, 2000).repeat(2000, 1)
    tokens, _ = sample(logits, SamplingParams(top_p=0.5), seeds_of(2000), torch.zeros(2000).long())
    kept = 2000 - int((logits[0].softmax(-1).flip(0).cumsum(0) < 0.5).sum()) - 1
    assert int(tokens.min()) >= kept
    assert int(tokens.min()) < kept + 20
    assert int(tokens.max()) > 1980


def test_banned_tokens_are_not_drawn_and_log_probs_do_not_change():
    logits = torch.tensor([[5.0, 1.0, 0.0]]).repeat(100, 1)
    banned = torch.tensor([[True, False, False]]).repeat(100, 1)
    tokens, logprobs = sample(logits, SamplingParams(), seeds_of(100), torch.zeros(100).long(), banned)
    assert set(tokens.tolist()) == {1, 2}
    assert torch.allclose(logprobs, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0])


CUTS = [
    {"top_p": 0.7}, {"top_k": 5}, {"top_p": 0.8, "top_k": 20}, {"top_k": 1}, {"min_p": 0.3}, {"min_p": 0.2, "top_k": 3},
]  # fmt: skip


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_same_tokens_are_drawn_with_their_candidates(cut):
    logits = 2 * torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    positions, banned = torch.zeros(300).long(), torch.zeros(300, 40, dtype=torch.bool)
    banned[:, 3] = True
    params = SamplingParams(temperature=0.8, logprobs_over="kept", **cut)
    tokens, logprobs, candidates = sample_candidates(logits, params, seeds_of(300), positions, banned)
    assert torch.equal(tokens, sample(logits, params, seeds_of(300), positions, banned)[0])
    assert len(candidates.ids) == candidates.counts.sum() and not (candidates.ids == 3).any()
    dense = torch.full((300, 40), -torch.inf)
    dense[torch.arange(300).repeat_interleave(candidates.counts), candidates.ids.long()] = 0.0
    expected = (logits / 0.8 + dense).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)
    greedy, logprobs, candidates = sample_candidates(logits, replace(params, temperature=0.0), seeds_of(300), positions)
    assert torch.equal(greedy, logits.argmax(-1)) and not logprobs.any()
    assert candidates.ids.tolist() == greedy.tolist()


def test_one_unsure_token_does_not_pad_the_rest():
    """Padded to the longest, the candidates of 256 x 640 tokens took 24 GB at a vocabulary of 151 thousand."""
    logits = torch.zeros(100, 2000)
    logits[1:, 7] = 50.0
    params = SamplingParams(top_p=0.90025, logprobs_over="kept")
    _, _, candidates = sample_candidates(logits, params, seeds_of(100), torch.zeros(100).long())
    assert candidates.counts.tolist() == [1801, *[1] * 99] and len(candidates.ids) == 1900
