"""Updates that replace the optimizer's step of the policy: a natural-gradient step within a trust region."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from atomrl.atoms import natural_gradient as steps
from atomrl.atoms.kl import distribution_kl
from atomrl.batches import TrainingBatch
from atomrl.common.metrics import Count, Mean, Metrics, merge
from atomrl.objectives.advantage import given
from atomrl.objectives.choice import Choice
from atomrl.protocols import Algorithm, Forward, Output, UpdateOutput

DISTRIBUTIONS: frozenset[Output] = frozenset({"distributions"})


class TrustRegion(Choice, type="trust_region"):
    """TRPO: the natural gradient's step, the longest whose measured KL from the policy before it is within the bound.

    `kl_bound` is in nats per token, over the whole vocabulary and weighted as the loss is; `damping` is added to the
    Fisher matrix's diagonal. It takes no learning rate, and keeps nothing from one step to the next.
    """

    text = (
        "theta <- theta + ratio^j sqrt(2 kl_bound / x^T F x) x, (F + damping I) x = grad L,   KL(pi_before || pi) <= "
        "kl_bound"
    )
    latex = (
        r"\theta \leftarrow \theta + \alpha^j \sqrt{\tfrac{2 \delta}{x^\top F x}}\, x, \quad (F + \lambda I)\, x = "
        r"\nabla_\theta L, \quad \mathrm{KL}(\pi_{\mathrm{before}} \Vert \pi_\theta) \le \delta"
    )
    kl_bound: PositiveFloat = 0.01
    cg_iterations: PositiveInt = 10
    damping: NonNegativeFloat = 0.1
    backtracks: NonNegativeInt = 10
    backtrack_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.8
    made_of = (
        steps.flat, distribution_kl, steps.fisher_vector_product, steps.conjugate_gradient, steps.natural_step,
        steps.line_search,
    )  # fmt: skip

    def __call__(
        self,
        algorithm: Algorithm,
        parameters: Sequence[Tensor],
        micro_batches: Sequence[TrainingBatch],
        outputs: Forward,
    ) -> UpdateOutput:
        """`protocols.Update`: the parameters are changed in place, or stay as they are bit for bit."""
        wanted = algorithm.outputs - {"values"}
        loss, gradient, metrics, micros = _gradient(algorithm, parameters, micro_batches, outputs, wanted)
        norm = float(gradient.norm())
        metrics |= {"actor/kl_bound": Mean(self.kl_bound)} | _of_step(0.0, 0.0, False, 0.0)  # until there is a step
        if not norm < float("inf"):
            return UpdateOutput(metrics | {"actor/skipped_updates": Count()}, finite=False)
        metrics["actor/grad_norm"] = Mean(norm)
        if norm == 0:
            return UpdateOutput(metrics | {"actor/empty_updates": Count()})
        # The share of each trained token in the mean KL is that of its loss weight; all of them add up to 1.
        weights = [micro.loss_weights[micro.loss_mask] for micro in micros]
        total = sum(float(part.sum(dtype=torch.float64)) for part in weights)
        start, states = steps.flat(parameters), [part / total for part in weights]

        def fisher(vector: Tensor) -> Tensor:
            total = torch.zeros_like(vector)
            for micro, weights in zip(micros, states, strict=True):

                def distributions(forward: bool, micro: TrainingBatch = micro) -> Tensor:
                    return given(outputs(micro, DISTRIBUTIONS, plain=forward).distributions).logprobs()

                total += steps.fisher_vector_product(distributions, weights, parameters, vector)
            return total

        def damped(vector: Tensor) -> Tensor:
            return fisher(vector).add_(vector, alpha=self.damping)

        solution, residual = steps.conjugate_gradient(damped, -gradient, self.cg_iterations)
        metrics["actor/cg_residual"] = Mean(residual)
        longest = steps.natural_step(solution, fisher, self.kl_bound)
        if longest is None:
            return UpdateOutput(metrics)

        @torch.no_grad()
        def measure(scale: float) -> tuple[float, float]:
            kl, gain = 0.0, loss
            for micro, weights in zip(micros, states, strict=True):
                # Both distributions are made anew for each micro-batch: those of a whole batch would fill the memory.
                assign(parameters, start)
                before = given(outputs(micro, DISTRIBUTIONS).distributions).logprobs()
                assign(parameters, start + scale * longest)
                after = outputs(micro, wanted | DISTRIBUTIONS)
                kls = distribution_kl(before, given(after.distributions).logprobs())
                kl += float((weights * kls).sum(dtype=torch.float64))
                gain -= float(algorithm.loss(after, micro).loss)
            return kl, gain

        scale = 0.0
        try:
            result = steps.line_search(measure, self.kl_bound, self.backtracks, self.backtrack_ratio)
            scale = result["scale"]
        finally:  # memory may run out on the way: the weights are then those of before
            assign(parameters, start + scale * longest if scale else start)
        return UpdateOutput(metrics | _of_step(result["kl"], result["gain"], scale > 0, result["backtracks"]))


@torch.no_grad()
def assign(parameters: Sequence[Tensor], vector: Tensor) -> None:
    """Write a vector into the parameters, in place: `assign(p, flat(p))` changes no bit."""
    for parameter, part in zip(parameters, steps.parts(parameters, vector), strict=True):
        parameter.copy_(part)


def _of_step(kl: float, gain: float, accepted: bool, backtracks: float) -> Metrics:
    return {
        "actor/kl": Mean(kl),
        "actor/surrogate_gain": Mean(gain),
        "actor/accepted": Mean(float(accepted)),
        "actor/backtracks": Mean(float(backtracks)),
    }


def _gradient(
    algorithm: Algorithm,
    parameters: Sequence[Tensor],
    micro_batches: Sequence[TrainingBatch],
    outputs: Forward,
    wanted: frozenset[Output],
) -> tuple[float, Tensor, Metrics, list[TrainingBatch]]:
    """The surrogate's value and gradient, its metrics, and the rows with the log-probs that it is a ratio to."""
    total, loss, metrics, micros = torch.zeros_like(steps.flat(parameters)), 0.0, [], []
    for micro in micro_batches:
        found = outputs(micro, wanted)
        if micro.old_logprobs is None:
            micro = replace(micro, old_logprobs=given(found.logprobs).detach())
        result = algorithm.loss(found, micro)
        total += steps.flat_gradient(result.loss, parameters)
        loss += result.loss.item()
        metrics.append(result.metrics)
        micros.append(micro)
    return loss, total, merge(metrics), micros
