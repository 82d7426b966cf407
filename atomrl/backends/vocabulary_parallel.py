"""Vocabulary parallelism: log-probs when each rank has the output matrix's rows of a part of the vocabulary."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atomrl.atoms.logprobs import chunk_size, head_logits
from atomrl.common.devices import to_device


def parallel_row_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    tokens: Tensor,
    wanted: Tensor,
    first: int,
    temperature: float,
    group: Any,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs and entropies from an output matrix sharded over the vocabulary.

    Same results as `atoms.logprobs.row_logprobs`. A rank holds only its part of the logits of one chunk of tokens. The
    ranks exchange three numbers per token, and in the backward pass the gradient of `hidden`.

    Args:
        hidden: [n, H] state before each wanted token, row by row; the same on all ranks.
        head_weight: [V', H] rows of this rank's part of the vocabulary.
        tokens: [B, T] token ids in the full vocabulary, on the CPU to avoid a sync.
        wanted: [B, T] bool, False in the first column; on the CPU.
        first: id of this rank's first token.
        group: process group of the ranks that share the vocabulary.

    Returns:
        Log-probs and entropies (None without `with_entropy`), [B, T] float32, the same on all ranks; 0 where not
        wanted.
    """
    chunk = chunk_tokens or chunk_size(head_weight)
    own, places = (
        to_device(part, hidden.device) for part in (tokens[wanted] - first, wanted.flatten().nonzero()[:, 0])
    )
    arguments = hidden, head_weight, own, temperature, group, chunk, with_entropy
    logprobs, entropy = _Parallel.apply(*arguments)  # type: ignore[no-untyped-call]  # torch has no types for it

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(wanted.numel()).index_copy(0, places, values).view(wanted.shape)

    return spread(logprobs), spread(entropy) if with_entropy else None


def _logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    logits = head_logits(hidden, head)
    return logits if temperature == 1.0 else logits / temperature


class _Parallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, own: Tensor, temperature: float, group: Any, chunk: int, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        head, chunks = weight.to(hidden.dtype), []
        here = (own >= 0) & (own < len(weight))
        place = own.clamp(0, len(weight) - 1)
        for part in _parts(len(own), chunk):
            # Log-softmax over all ranks: the maximum, then the sum of exponentials, the token's own logit (from the
            # rank that has it), and for the entropy the sum of exp(logit) * logit.
            scaled = _logits(hidden[part], head, temperature)
            largest = scaled.amax(1)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            shares = (scaled - largest[:, None]).exp_()
            picked = scaled.gather(1, place[part, None])[:, 0] * here[part]
            sums = torch.stack([shares.sum(1), picked, shares.mul_(scaled).sum(1) if entropy else picked])
            dist.all_reduce(sums, group=group)
            log_norm = largest + sums[0].log()
            chunks.append(torch.stack([sums[1] - log_norm, log_norm - sums[2] / sums[0], log_norm]))
        logprobs, entropies, log_norms = torch.cat(chunks, dim=1) if chunks else hidden.new_zeros(3, 0)
        ctx.save_for_backward(hidden, weight, place, here, log_norms, entropies)
        ctx.settings = temperature, group, chunk, entropy
        return logprobs.clone(), entropies.clone()

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        hidden, weight, place, here, log_norms, entropies = ctx.saved_tensors
        temperature, group, chunk, with_entropy = ctx.settings
        head = weight.to(hidden.dtype)
        trained = ctx.needs_input_grad[1]  # False with adapters
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight) if trained else None
        for part in _parts(len(place), chunk):
            # Gradient of the logits: d logprob_y = 1[y] - p, d entropy = -p (log p + H), from recomputed log p.
            logs = _logits(hidden[part], head, temperature).sub_(log_norms[part, None])
            delta = logs.exp()
            if with_entropy:
                delta *= -grad_logprobs[part, None] - grad_entropy[part, None] * (logs + entropies[part, None])
            else:
                delta *= -grad_logprobs[part, None]
            delta.scatter_add_(1, place[part, None], (grad_logprobs[part] * here[part])[:, None])
            delta = delta.div_(temperature).to(hidden.dtype)
            torch.mm(delta, head, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += delta.T @ hidden[part]
        dist.all_reduce(grad_hidden, group=group)
        return grad_hidden, grad_weight, None, None, None, None, None


def whole_rows(weight: Tensor, group: Any) -> Tensor:
    """All-gather rows [V', H], equally many per rank, into [V, H]; each rank gets the gradient of its rows."""
    rows: Tensor = _WholeRows.apply(weight, group)  # type: ignore[no-untyped-call]  # torch has no types for it
    return rows


class _WholeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(weight) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, weight.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def _parts(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
