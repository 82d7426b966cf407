"""Token sampling: temperature, top-k, top-p and banned tokens, with a counter-based random number per token.

A draw depends on the logits, the completion's seed and the position alone.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from atomrl.engines.native.cpu_kernels import Kernels
from atomrl.types import RaggedIds, SamplingParams

_CHUNK = 256
"""Width of the chunks of `inverse_cdf`."""
_TOP_P_PREFIX = 512
"""Tokens that top-p sorts before it falls back to the whole vocabulary."""
_STEP = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number


def seed_at(seed: int, position: int) -> int:
    """Shift a seed: the result draws from position 0 on what `seed` draws from `position` on. Signed 64-bit.

    Example:
        >>> later = uniforms(torch.tensor([7]), torch.tensor([5]))
        >>> bool(uniforms(torch.tensor([seed_at(7, 5)]), torch.tensor([0])) == later)
        True
    """
    return (seed + position * _STEP + 2**63) % 2**64 - 2**63


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return one uniform number in (0, 1) per seed and position: [N] int64, [N] int64 -> [N] float64.

    SplitMix64 (Steele et al. 2014): the position-th output of the generator that starts at the seed.

    Example:
        >>> bool((uniforms(torch.tensor([7, 7]), torch.tensor([0, 1])).diff() != 0).all())
        True
    """
    x = seeds + (positions + 1) * _STEP
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return (((x >> 12) & 0xFFFFFFFFFFFFF).double() + 0.5) * 2.0**-52


def inverse_cdf(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample an index in proportion to weights; returns it and the sum of the weights.

    Two levels: the chunk in which the cumulative sum passes `uniform` times the sum, then the index within it. Weights
    of 0 are never sampled. [N, V] non-negative, [N] float64 in (0, 1) -> [N] int64, [N] float64.

    Example:
        >>> inverse_cdf(torch.tensor([[1.0, 0.0, 3.0]]), torch.tensor([0.3], dtype=torch.float64))[0]
        tensor([2])
    """
    rows, width = weights.shape
    chunk = min(_CHUNK, width)
    chunks = F.pad(weights, (0, -width % chunk)).view(rows, -1, chunk)
    cumulated = chunks.sum(-1).double().cumsum(-1)
    total = cumulated[:, -1:]
    # Just below the sum, so that rounding cannot push the target past the last positive weight.
    target = torch.minimum(uniform[:, None] * total, total * (1 - 2.0**-50))
    place = (cumulated <= target).sum(-1, keepdim=True)
    before = cumulated.gather(-1, (place - 1).clamp(min=0)) * (place > 0)
    inside = chunks[torch.arange(rows, device=weights.device), place[:, 0]].cumsum(-1, dtype=torch.float64)
    rest = torch.minimum(target - before, inside[:, -1:] * (1 - 2.0**-50))
    index = place * chunk + (inside <= rest).sum(-1, keepdim=True)
    return index[:, 0], total[:, 0]


def sample(
    logits: Tensor,
    sampling: SamplingParams,
    seeds: Tensor,
    positions: Tensor,
    banned: Tensor | None = None,
    kernels: Kernels | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one token per row, with its log-prob over the whole vocabulary at the sampling temperature.

    Args:
        logits: [N, V].
        seeds: [N] int64, one per completion.
        positions: [N] int64, tokens that the completion has.
        banned: [N, V] bool, tokens that are never sampled (log-probs do not change).
        kernels: C++ kernels, used for sampling without top-k, top-p and banned tokens.

    Returns:
        Tokens [N] int64 and log-probs [N] float32.
    """
    plain = banned is None and not sampling.cuts
    if kernels is not None and plain and sampling.temperature > 0:
        return kernels.sample(logits, seeds, positions, sampling.temperature)
    scores = logits.float()
    if sampling.temperature not in (0, 1):
        scores = scores / sampling.temperature
    allowed = scores if banned is None else scores.masked_fill(banned, -torch.inf)
    if sampling.temperature == 0 or sampling.top_k == 1:
        tokens = allowed.argmax(-1)
        return tokens, scores.gather(-1, tokens[:, None])[:, 0] - scores.logsumexp(-1)
    uniform = uniforms(seeds, positions)
    peak = scores.amax(-1, keepdim=True)
    if plain:
        tokens, total = inverse_cdf((scores - peak).exp_(), uniform)
        log_total = total.log().float() + peak[:, 0]
    else:
        log_total = scores.logsumexp(-1)
        values, order = _cut(allowed, sampling.top_k, sampling.top_p, sampling.min_p)
        place, _ = inverse_cdf((values - allowed.amax(-1, keepdim=True)).exp(), uniform)
        tokens = place if order is None else order.gather(-1, place[:, None])[:, 0]
    return tokens, scores.gather(-1, tokens[:, None])[:, 0] - log_total


def sample_candidates(
    logits: Tensor, sampling: SamplingParams, seeds: Tensor, positions: Tensor, banned: Tensor | None = None
) -> tuple[Tensor, Tensor, RaggedIds]:
    """Sample as `sample`, but return log-probs over the candidates that top-k and top-p keep, and these candidates.

    Args:
        logits, sampling, seeds, positions, banned: as in `sample`, with top-k, top-p or temperature 0.

    Returns:
        Tokens [N] int64, log-probs [N] float32, and the candidates of each row, most likely first.
    """
    scores = logits.float() if sampling.temperature in (0, 1) else logits.float() / sampling.temperature
    allowed = scores if banned is None else scores.masked_fill(banned, -torch.inf)
    greedy = sampling.temperature == 0
    values, order = _cut(
        allowed, 1 if greedy else sampling.top_k, 1.0 if greedy else sampling.top_p, 0.0 if greedy else sampling.min_p
    )
    assert order is not None, "SamplingParams rejects log-probs over candidates if no tokens are cut"
    place, _ = inverse_cdf((values - values[:, :1]).exp(), uniforms(seeds, positions))
    inside = values > -torch.inf
    logprobs = values.gather(-1, place[:, None])[:, 0] - values.logsumexp(-1)
    candidates = RaggedIds(inside.sum(-1, dtype=torch.int32), order[inside].int())
    return order.gather(-1, place[:, None])[:, 0], logprobs, candidates


def _cut(scores: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor | None]:
    """Apply min-p, top-k, then top-p.

    Returns scores with -inf for removed tokens, and the token of each column if they are sorted. Top-p keeps the
    smallest prefix whose probability, among the top k, reaches it.
    """
    width = scores.shape[-1]
    if min_p:
        scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) + math.log(min_p), -torch.inf)
    elif not top_k and top_p >= 1:
        return scores, None
    counts = [min(top_k, width)] if top_k else [min(_TOP_P_PREFIX, width), width]
    # Without top-k, sort the whole vocabulary only if its best few hundred do not reach top_p or min_p. The check
    # synchronizes with the GPU, which costs far less than sorting 150,000 numbers per row and holding them twice.
    for count in counts:
        values, order = scores.topk(count, dim=-1)
        cumulated = (values - (values if top_k else scores).logsumexp(-1, keepdim=True)).exp().cumsum(-1)
        if count == counts[-1] or bool(((cumulated[:, -1] >= top_p) | values[:, -1].isneginf()).all()):
            break
    if top_p < 1:
        values = values.masked_fill(F.pad(cumulated[:, :-1], (1, 0)) >= top_p, -torch.inf)
    return values, order
