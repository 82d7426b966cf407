"""Log-probs and entropies of tokens, from logits or straight from hidden states.

`fused_token_logprobs` computes log-probs from hidden states in chunks of tokens, so the [N, V] logits are never
materialized at once. `row_logprobs` applies it to the masked positions of right-padded rows; the shift of positions by
one (a token's log-prob comes from the position before it) happens there and nowhere else.
"""

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from atomrl.atoms import atom
from atomrl.atoms.masks import Mask, PerPosition, PerToken, Vocabulary
from atomrl.common.devices import to_device

log = logging.getLogger(__name__)
CHUNK_ELEMENTS = 2**25
"""Logits per chunk on a CPU: 128 MB in float32."""
CHUNK_ELEMENTS_ON_GPU = 2**26
"""Logits per chunk on a GPU: 256 MB in float32. Each chunk reads the output matrix and updates its gradient again, so
smaller chunks are slower."""
VOCABULARY_BLOCK = 2**15
"""Rows of the output matrix whose gradient is accumulated at a time."""


@atom("z = W h")
def head_logits(hidden: Float[Tensor, "*batch H"], head_weight: Float[Tensor, "V H"]) -> Vocabulary:
    """Logits `hidden @ head_weight.T`, accumulated and returned in float32 or wider.

    A bfloat16 logit of 20 is off by up to 0.06, and so is every log-prob computed from it. bfloat16 inputs with float32
    accumulation do not have this error.

    Args:
        hidden: final hidden states.
        head_weight: output matrix; cast to the dtype of `hidden`.

    Returns:
        Float32 (float64 for float64), differentiable in both.

    Example:
        >>> head_logits(torch.ones(1, 2, dtype=torch.bfloat16), torch.tensor([[1.0, 2**-9]]))
        tensor([[1.0020]])
    """
    head = head_weight.to(hidden.dtype)
    if hidden.dtype.itemsize > 2:
        return F.linear(hidden, head)
    if hidden.is_cuda and not torch.is_grad_enabled():
        wide: Tensor = torch.mm(hidden.flatten(0, -2), head.T, out_dtype=torch.float32)
        return wide.view(*hidden.shape[:-1], len(head))
    return bfloat16_matmul(hidden, head.T) if hidden.dtype == torch.bfloat16 else hidden.float() @ head.float().T


def bfloat16_matmul(left: Float[Tensor, "*batch H"], right: Float[Tensor, "H V"]) -> Vocabulary:
    """Matrix product of bfloat16 values on a CPU, with float32 accumulation and a float32 result.

    With `fp32_precision = "bf16"`, oneDNN multiplies float32 matrices with the CPU's bfloat16 instructions. This is
    exact for values that bfloat16 can represent, and takes a quarter to two thirds of the time of a float32 product.

    Args:
        left: values that bfloat16 can represent, in bfloat16 or float32.
        right: values that bfloat16 can represent, in bfloat16 or float32.

    Returns:
        Float32, differentiable in both.

    Example:
        >>> bfloat16_matmul(torch.ones(1, 2, dtype=torch.bfloat16), torch.tensor([[1.0], [2**-9]]))
        tensor([[1.0020]])
    """
    with _products_of_bfloat16():
        return left.float() @ right.float()


@contextmanager
def _products_of_bfloat16() -> Iterator[None]:
    settings: Any = getattr(torch.backends.mkldnn, "matmul", None)  # torch 2.9 and newer
    if settings is None:
        yield
        return
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


@atom("log p(x) = z_x - log sum_v exp(z_v),   z = logits / temperature")
def token_logprobs(logits: Vocabulary, tokens: Int[Tensor, "*batch"], temperature: float = 1.0) -> PerPosition:
    """Log-probability of each token under its own logits.

    Args:
        logits: of the distribution that each token was drawn from; no shift happens here.
        tokens: token ids.
        temperature: above 0.

    Returns:
        Natural log-probabilities, in float32 or wider.

    Raises:
        ValueError: the temperature is not above 0.

    Example:
        >>> token_logprobs(torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 0]))
        tensor([-0.6931, -0.3133])
    """
    scaled = _wide(logits) / _positive(temperature)
    return scaled.gather(-1, tokens[..., None])[..., 0] - scaled.logsumexp(-1)


@atom("H = - sum_v p_v log p_v,   p = softmax(logits / temperature)")
def token_entropy(logits: Vocabulary, temperature: float = 1.0) -> PerPosition:
    """Entropy of each distribution.

    Returns:
        Nats, in float32 or wider.

    Example:
        >>> token_entropy(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
        tensor([0.6931, 0.5822])
    """
    logprobs = F.log_softmax(_wide(logits) / _positive(temperature), dim=-1)
    return -(logprobs.exp() * logprobs).sum(-1)


@atom("d log p(x) / dz_v = [v = x] - p_v        d H / dz_v = -p_v (log p_v + H)")
def fused_token_logprobs(
    hidden: Float[Tensor, "N H"],
    head_weight: Float[Tensor, "V H"],
    tokens: Int[Tensor, " N"],
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    with_entropy: bool = False,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """`token_logprobs` and `token_entropy` of `hidden @ head_weight.T`, without materializing the [N, V] logits.

    The forward pass keeps one number per token. The backward pass recomputes the logits of each chunk (a single chunk
    is kept instead), and accumulates the chunk's gradient of the output matrix in place.

    Args:
        hidden: final hidden states, as in `head_logits`.
        head_weight: the output matrix; its gradient is in its own dtype.
        tokens: token ids.
        temperature: above 0; divides the logits.
        chunk_tokens: tokens whose logits are held at a time; None holds about 32 million logits, on a GPU 64 million.
        with_entropy: compute the entropy too.

    Returns:
        Log-probs in float32 (float64 for float64), and the entropy or None. Both have gradients.

    Raises:
        ValueError: the temperature is not above 0, or `chunk_tokens` is below 1.

    Example:
        >>> hidden, head = torch.eye(2), torch.eye(3, 2)
        >>> fused_token_logprobs(hidden, head, torch.tensor([0, 2]), with_entropy=True)
        (tensor([-0.5514, -1.5514]), tensor([0.9753, 0.9753]))
    """
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1")
    chunk = chunk_tokens or chunk_size(head_weight)
    arguments = hidden, head_weight, tokens, _positive(temperature), chunk, with_entropy
    logprobs, entropy = _Fused.apply(*arguments)  # type: ignore[no-untyped-call]  # torch has no types for it
    return logprobs, entropy if with_entropy else None


@atom(
    "log p(x) = z_x - log sum_{v kept} exp(z_v),   z = hidden @ head_weight.T / temperature",
    paper="the sampling mask of DeepSeek-V3.2, arXiv:2512.02556",
)
def kept_token_logprobs(
    hidden: Float[Tensor, "N H"],
    head_weight: Float[Tensor, "V H"],
    tokens: Int[Tensor, " N"],
    candidate_ids: Int[Tensor, " M"],
    candidate_counts: Int[Tensor, " N"],
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    with_entropy: bool = False,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """Log-probs and entropies of the distribution that top-p and top-k sample from: over the kept tokens alone.

    Differs from `fused_token_logprobs`: which tokens were kept is a constant, also in the gradient. Memory is for the M
    logits that were kept in all, however unevenly, and for a chunk of [N, V].

    Args:
        hidden: what the output matrix multiplies.
        head_weight: the output matrix; its gradient is in its own dtype.
        tokens: token ids.
        candidate_ids: the tokens that each token was drawn from, itself among them, token after token.
        candidate_counts: how many each token has; they add up to M. On the host, it waits for no device.
        temperature: above 0; divides the logits.
        chunk_tokens: as in `fused_token_logprobs`.
        with_entropy: compute the entropy too.

    Returns:
        Log-probs in float32 (float64 for float64), -inf for a token that is not among its own; and the entropy or None.

    Raises:
        ValueError: the temperature is not above 0, or the counts do not add up.

    Example: the first token was drawn from 0 and 2, the second from 2 alone
        >>> hidden, head, tokens = torch.eye(2), torch.eye(3, 2), torch.tensor([0, 2])
        >>> kept_token_logprobs(hidden, head, tokens, torch.tensor([0, 2, 2]), torch.tensor([2, 1]))[0]
        tensor([-0.3133,  0.0000])
    """
    chunk = chunk_tokens or chunk_size(head_weight)
    parts = chunks(len(tokens), chunk)
    sizes = torch.stack([candidate_counts[part].sum() for part in parts]).tolist() if parts else []
    if sum(sizes) != len(candidate_ids):
        raise ValueError(f"candidate_counts add up to {sum(sizes)}, but there are {len(candidate_ids)} candidate_ids")
    # The M candidates of all tokens lie end to end; `rows` [M] is the token that each belongs to. Softmax by segment:
    # maximum, sum of exponentials and the drawn token's own logit are scattered to [N].
    positions = torch.arange(len(tokens), device=tokens.device)
    rows = positions.repeat_interleave(to_device(candidate_counts, tokens.device), output_size=len(candidate_ids))
    ids = candidate_ids.long()
    arguments = hidden, head_weight, ids, rows, sizes, chunk
    selected: Tensor = _SelectedLogits.apply(*arguments)  # type: ignore[no-untyped-call]  # torch has no types for it
    scaled = selected / _positive(temperature)
    largest = scaled.new_full((len(tokens),), -torch.inf).index_reduce(0, rows, scaled.detach(), "amax")
    weights = (scaled - largest[rows]).exp()
    total = scaled.new_zeros(len(tokens)).index_add(0, rows, weights)
    log_norm = largest + total.log()
    drawn = ids == tokens[rows]
    own = torch.zeros_like(total).index_add(0, rows, scaled.masked_fill(~drawn, 0.0))
    is_candidate = torch.zeros_like(positions).index_add(0, rows, drawn.long()) > 0
    logprobs = torch.where(is_candidate, own - log_norm, -torch.inf)
    if not with_entropy:
        return logprobs, None
    return logprobs, log_norm - torch.zeros_like(total).index_add(0, rows, weights * scaled) / total


class _SelectedLogits(torch.autograd.Function):
    """Gather M of the [N, V] logits, at (`rows`, `ids`), computing the logits one chunk of rows at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, rows: Tensor, sizes: list[int], chunk: int
    ) -> Tensor:
        head = weight.to(hidden.dtype)
        selected = hidden.new_empty(len(ids), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for part, inside in _with_candidates(len(hidden), chunk, sizes):
            selected[inside] = head_logits(hidden[part], head)[rows[inside] - part.start, ids[inside]]
        ctx.save_for_backward(hidden, weight, ids, rows)
        ctx.sizes, ctx.chunk = sizes, chunk
        return selected

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        hidden, weight, ids, rows = ctx.saved_tensors
        head = weight.to(hidden.dtype)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for part, inside in _with_candidates(len(hidden), ctx.chunk, ctx.sizes):
            delta = grad.new_zeros(part.stop - part.start, len(weight))
            delta.index_put_((rows[inside] - part.start, ids[inside]), grad[inside], accumulate=True)
            delta = delta.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(delta, head, out=grad_hidden[part])
            if grad_weight is not None:
                add_outer_products(grad_weight, delta, hidden[part])
        return grad_hidden, grad_weight, None, None, None, None


def _with_candidates(total: int, chunk: int, sizes: list[int]) -> list[tuple[slice, slice]]:
    """Slices of the chunks of tokens, each with the slice of its candidates."""
    ends = list(itertools.accumulate(sizes))
    inside = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return list(zip(chunks(total, chunk), inside, strict=True))


def chunk_size(head_weight: Tensor) -> int:
    """Number of tokens whose logits are held in memory at once.

    Args:
        head_weight: the output matrix, [V, D].

    Returns:
        Tokens of a chunk: as many as `CHUNK_ELEMENTS` logits (on a GPU `CHUNK_ELEMENTS_ON_GPU`), at least 16.

    Example:
        >>> chunk_size(torch.zeros(2**20, 1))
        32
    """
    most = CHUNK_ELEMENTS if head_weight.device.type == "cpu" else CHUNK_ELEMENTS_ON_GPU
    return max(16, most // len(head_weight))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, chunk: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        head = weight.to(hidden.dtype)
        logprobs, log_norm, entropy = (torch.empty(len(tokens), dtype=wide, device=hidden.device) for _ in range(3))
        keep = any(ctx.needs_input_grad[:2]) and len(tokens) <= chunk
        kept = total = None
        compiled = gpu_function(chunk_logprobs, hidden)
        for part in chunks(len(tokens), chunk):
            if compiled is not None:
                logits = head_logits(hidden[part], head)
                logprobs[part], log_norm[part], chunk_entropy = compiled(
                    logits, tokens[part], temperature, with_entropy
                )
                if with_entropy:
                    entropy[part] = chunk_entropy
                kept = logits if keep else None
                continue
            # Not compiled: in place where the logits are not needed again, so a chunk exists once (twice with entropy).
            scaled = _scaled_logits(hidden[part], head, temperature)
            picked = scaled.gather(1, tokens[part, None])[:, 0]
            largest = scaled.amax(1)
            shares = torch.sub(scaled, largest[:, None], out=scaled if not with_entropy else None).exp_()
            total = shares.sum(1)
            log_norm[part] = largest + total.log()
            logprobs[part] = picked - log_norm[part]
            if with_entropy:
                entropy[part] = log_norm[part] - shares.mul_(scaled).sum(1) / total
            kept = scaled if keep else None  # without entropy: the exponentials, not yet divided by `total`
            del scaled, shares
        ctx.save_for_backward(hidden, weight, tokens, log_norm, entropy if with_entropy else None, kept, total)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, tokens, log_norm, entropy, kept, total = ctx.saved_tensors
        if entropy is None:
            grad_entropy = None
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 6
        head = weight.to(hidden.dtype)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        compiled = gpu_function(chunk_logit_gradient, hidden)
        for part in chunks(len(tokens), ctx.chunk):
            if compiled is not None:
                logits = head_logits(hidden[part], head) if kept is None else kept
                slices = [None if each is None else each[part] for each in (grad_logprobs, entropy, grad_entropy)]
                delta = compiled(logits, tokens[part], log_norm[part], *slices, ctx.temperature, hidden.dtype)
                del logits
                _add_products(delta, head, hidden, part, grad_hidden, grad_weight)
                del delta
                continue
            # delta: the gradient of the scaled logits, from softmax probabilities p = exp(z - log_norm):
            # grad_logprobs ([v = x] - p_v) - grad_entropy p_v (log p_v + H). The [v = x] part is added last.
            if kept is not None and entropy is None and grad_logprobs is not None:
                delta = kept * (-grad_logprobs / total)[:, None]
            else:
                scaled = _scaled_logits(hidden[part], head, ctx.temperature) if kept is None else kept
                delta = torch.sub(scaled, log_norm[part, None], out=scaled if kept is None else None)
                if grad_entropy is None:
                    assert grad_logprobs is not None
                    delta.exp_().mul_(-grad_logprobs[part, None])
                else:
                    shares = delta.exp()
                    delta.add_(entropy[part, None]).mul_(-grad_entropy[part, None])
                    if grad_logprobs is not None:
                        delta.sub_(grad_logprobs[part, None])
                    delta.mul_(shares)
                    del shares
                del scaled
            if grad_logprobs is not None:
                delta.scatter_add_(1, tokens[part, None], grad_logprobs[part, None])
            if ctx.temperature != 1.0:
                delta.div_(ctx.temperature)
            delta = delta.to(hidden.dtype)
            _add_products(delta, head, hidden, part, grad_hidden, grad_weight)
            del delta
        return grad_hidden, grad_weight, None, None, None, None


def chunk_logprobs(
    logits: Float[Tensor, "N V"], tokens: Int[Tensor, " N"], temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-prob of each token, log-sum-exp, and entropy or None: [N] each, from float32 logits.

    Written for `torch.compile`, which fuses it into kernels that read the logits a few times and write no [N, V].
    """
    scaled = logits / temperature
    log_norm = scaled.logsumexp(1)
    logprobs = scaled.gather(1, tokens[:, None])[:, 0] - log_norm
    if not with_entropy:
        return logprobs, log_norm, None
    return logprobs, log_norm, log_norm - ((scaled - log_norm[:, None]).exp() * scaled).sum(1)


def chunk_logit_gradient(
    logits: Float[Tensor, "N V"],
    tokens: Int[Tensor, " N"],
    log_norm: Float[Tensor, " N"],
    grad_logprobs: Float[Tensor, " N"] | None,
    entropy: Float[Tensor, " N"] | None,
    grad_entropy: Float[Tensor, " N"] | None,
    temperature: float,
    dtype: torch.dtype,
) -> Float[Tensor, "N V"]:
    """Gradient of the logits from the gradients of the results of `chunk_logprobs`; cast to `dtype` once, at the end.

    Written for `torch.compile`: one kernel, which reads the logits once and writes the gradient once.
    """
    logs = logits / temperature - log_norm[:, None]
    factor = torch.zeros_like(log_norm) if grad_logprobs is None else grad_logprobs
    weight = -factor[:, None]
    if entropy is not None and grad_entropy is not None:
        weight = weight - grad_entropy[:, None] * (logs + entropy[:, None])
    drawn = torch.arange(logits.shape[1], device=logits.device) == tokens[:, None]
    delta = torch.where(drawn, factor[:, None], 0.0) + logs.exp() * weight
    return (delta / temperature).to(dtype)


def gpu_function(function: Callable[..., Any], tensor: Tensor) -> Callable[..., Any] | None:
    """Return the compiled function if the tensor is on a GPU; None on a CPU, where chunks are computed in place."""
    return _compiled(function) if tensor.is_cuda else None


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for any number of tokens. Without Triton or its compiler: warn, and return it as it is."""
    if find_spec("triton") is None:
        log.warning("log-probs are not compiled and are slower, without Triton (pip install triton)")
        return function
    from torch._dynamo.exc import BackendCompilerFailed  # takes a second, so only where something is compiled
    from torch._inductor.exc import InductorError

    compiled, working = torch.compile(function, dynamic=True), [True]

    def call(*arguments: Any) -> Any:
        if working[0]:
            try:
                return compiled(*arguments)
            except (BackendCompilerFailed, InductorError) as error:
                working[0] = False
                reason = str(error).partition("\n")[0]
                log.warning("log-probs are not compiled and are slower: %s", reason)
        return function(*arguments)

    return call


def _add_products(
    delta: Tensor, head: Tensor, hidden: Tensor, part: slice, grad_hidden: Tensor | None, grad_weight: Tensor | None
) -> None:
    """Write a chunk's gradient of `hidden`, and accumulate its gradient of the output matrix."""
    if grad_hidden is not None:
        torch.mm(delta, head, out=grad_hidden[part])
    if grad_weight is not None:
        add_outer_products(grad_weight, delta, hidden[part])


def add_outer_products(total: Tensor, delta: Tensor, hidden: Tensor) -> None:
    """total += delta.T @ hidden, by blocks of the vocabulary where the dtypes differ."""
    if total.dtype == hidden.dtype:
        total.addmm_(delta.T, hidden)
        return
    if hidden.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, delta.T, hidden, out_dtype=torch.float32, out=total)
        return
    for block in chunks(len(total), VOCABULARY_BLOCK):
        total[block] += delta[:, block].T @ hidden


def _scaled_logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    logits = head_logits(hidden, head)
    return logits if temperature == 1.0 else logits.div_(temperature)


def chunks(total: int, size: int) -> list[slice]:
    """Split the indices up to `total` into slices of at most `size`.

    Example:
        >>> chunks(5, 2)
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


@atom("logprobs[b, t] = log p(tokens[b, t] | tokens[b, <t]), from hidden[b, t-1]; 0 where the mask is false")
def row_logprobs(
    hidden: Float[Tensor, "B T H"] | Float[Tensor, "N H"],
    head_weight: Float[Tensor, "V H"],
    tokens: Int[Tensor, "B T"],
    loss_mask: Mask,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    with_entropy: bool = False,
    candidate_ids: Int[Tensor, " M"] | None = None,
    candidate_counts: Int[Tensor, "B T"] | None = None,
) -> tuple[PerToken, PerToken | None]:
    """Log-probs of the masked tokens of rows, indexed by the token itself.

    This is the only place that shifts positions by one. Only masked positions are computed; position 0 has no context
    and is always 0. Pass tokens, mask and candidates on the CPU: their count is then read without a GPU sync.

    Args:
        hidden: after the final norm, of every token of the rows; or only at the positions before a masked token.
        head_weight: output matrix.
        tokens: token ids of the rows.
        loss_mask: True where a log-prob is needed.
        temperature: sampling temperature.
        chunk_tokens: as in `fused_token_logprobs`.
        with_entropy: also return the entropy of each distribution.
        candidate_ids: the tokens that top-p and top-k kept at each position, end to end; log-probs and entropies are
            then over these (`kept_token_logprobs`). None: over the whole vocabulary.
        candidate_counts: number of candidates of each position; 0 where nothing was sampled.

    Returns:
        Log-probs in nats, and entropies or None; both 0 off the mask.

    Example:
        >>> hidden = torch.zeros(1, 3, 4)
        >>> row_logprobs(hidden, torch.ones(2, 4), torch.tensor([[0, 1, 1]]), torch.tensor([[False, False, True]]))[0]
        tensor([[ 0.0000,  0.0000, -0.6931]])
    """
    rows, length = tokens.shape
    mask = loss_mask.clone()
    mask[:, 0] = False
    index = mask.flatten().nonzero()[:, 0]
    own, positions = to_device(tokens.flatten()[index], hidden.device), to_device(index, hidden.device)
    if hidden.dim() == 3:
        hidden = hidden.reshape(rows * length, -1).index_select(0, positions - 1)
    if candidate_ids is None or candidate_counts is None:
        logprobs, entropy = fused_token_logprobs(hidden, head_weight, own, temperature, chunk_tokens, with_entropy)
    else:
        # The mask may leave out sampled tokens, so drop their candidates.
        needed = mask.flatten().repeat_interleave(candidate_counts.flatten(), output_size=len(candidate_ids))
        ids, counts = to_device(candidate_ids[needed], hidden.device), candidate_counts.flatten()[index]
        settings = temperature, chunk_tokens, with_entropy
        logprobs, entropy = kept_token_logprobs(hidden, head_weight, own, ids, counts, *settings)

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(rows * length).index_copy(0, positions, values).view(rows, length)

    return spread(logprobs), None if entropy is None else spread(entropy)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _positive(temperature: float) -> float:
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0 (for greedy log-probs use 1)")
    return float(temperature)
