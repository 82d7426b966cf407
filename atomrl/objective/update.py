"""The axis of the step: the optimizer's, or a natural-gradient step within a trust region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomrl.atoms.kl import distribution_kl
from atomrl.atoms.natural_gradient import (
    conjugate_gradient,
    fisher_vector_product,
    flat,
    line_search,
    natural_step,
    parts,
)
from atomrl.metrics import Count, Mean, Metrics, merge
from atomrl.objective.axis import Axis
from atomrl.protocols import Forward, LossOutput, ModelOutputs, Output
from atomrl.stages import TrainingBatch

DISTRIBUTIONS: frozenset[Output] = frozenset({"distributions"})


class Step(NamedTuple):
    """What an update sees: one optimizer step's rows in micro-batches, and the policy at its start."""

    loss: Callable[[ModelOutputs, TrainingBatch], LossOutput]
    wanted: frozenset[Output]
    """What the loss reads of the policy's forward pass."""
    parameters: Sequence[Tensor]
    micro_batches: Sequence[TrainingBatch]
    outputs: Forward


def _optimizer(step: Step) -> Metrics:
    """The back end's optimizer, at its learning rate."""
    raise AssertionError("an objective with this choice has no update of its own")


def _trust_region(
    step: Step,
    *,
    kl_bound: float = 0.01,
    cg_iterations: int = 10,
    damping: float = 0.1,
    backtracks: int = 10,
    backtrack_ratio: float = 0.8,
) -> Metrics:
    r"""The natural gradient's step, the longest whose measured KL from the policy before it is within the bound.

        theta + ratio^j sqrt(2 kl_bound / x^T F x) x,   (F + damping I) x = grad L,   KL(pi_before || pi) <= kl_bound

    LaTeX: \theta + \alpha^j \sqrt{\tfrac{2 \delta}{x^\top F x}}\, x, \quad (F + \lambda I)\, x = \nabla_\theta L, \quad
        \mathrm{KL}(\pi_{\mathrm{before}} \Vert \pi_\theta) \le \delta
    """
    loss, gradient, metrics, micros = _gradient(step)
    norm = float(gradient.norm())
    metrics |= {"actor/kl_bound": Mean(kl_bound)}
    if not norm < float("inf"):
        return metrics | _no_step() | {"actor/skipped_updates": Count()}
    metrics["actor/grad_norm"] = Mean(norm)
    if norm == 0:
        return metrics | _no_step() | {"actor/empty_updates": Count()}
    start, states = flat(step.parameters), _state_weights(micros)

    def fisher(vector: Tensor) -> Tensor:
        total = torch.zeros_like(vector)
        for micro, weights in zip(micros, states, strict=True):

            def distributions(forward: bool, micro: TrainingBatch = micro) -> Tensor:
                return _given(step.outputs(micro, DISTRIBUTIONS, plain=forward).distributions)

            total += fisher_vector_product(distributions, weights, step.parameters, vector)
        return total

    found = conjugate_gradient(lambda v: fisher(v).add_(v, alpha=damping), -gradient, cg_iterations)
    metrics["actor/cg_residual"] = Mean(found["residual"])
    longest = natural_step(found["solution"], fisher, kl_bound)
    if longest is None:
        return metrics | _no_step()

    @torch.no_grad()
    def measure(scale: float) -> tuple[float, float]:
        kl, gain = 0.0, loss
        for micro, weights in zip(micros, states, strict=True):
            # Both distributions are made anew for each micro-batch: those of a whole batch would fill the memory.
            assign(step.parameters, start)
            before = _given(step.outputs(micro, DISTRIBUTIONS).distributions)
            assign(step.parameters, start + scale * longest)
            after = step.outputs(micro, step.wanted | DISTRIBUTIONS)
            kl += float((weights * distribution_kl(before, _given(after.distributions))).sum(dtype=torch.float64))
            gain -= float(step.loss(after, micro).loss)
        return kl, gain

    scale = 0.0
    try:
        result = line_search(measure, kl_bound, backtracks, backtrack_ratio)
        scale = result["scale"]
    finally:  # memory may run out on the way: the weights are then those of before
        assign(step.parameters, start + scale * longest if scale else start)
    return metrics | {
        "actor/kl": Mean(result["kl"]),
        "actor/surrogate_gain": Mean(result["gain"]),
        "actor/accepted": Mean(float(scale > 0)),
        "actor/backtracks": Mean(float(result["backtracks"])),
    }


@torch.no_grad()
def assign(parameters: Sequence[Tensor], vector: Tensor) -> None:
    """Write a vector into the parameters, in place: `assign(p, flat(p))` changes no bit."""
    for parameter, part in zip(parameters, parts(parameters, vector), strict=True):
        parameter.copy_(part)


def _no_step() -> Metrics:
    """What there is to say where no direction could be found."""
    return {name: Mean(0.0) for name in ("actor/kl", "actor/surrogate_gain", "actor/accepted", "actor/backtracks")}


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "the back end gives what is asked for"
    return tensor


def _gradient(step: Step) -> tuple[float, Tensor, Metrics, list[TrainingBatch]]:
    """The surrogate's value and gradient, its metrics, and the rows with the log-probs that it is a ratio to."""
    total, loss, metrics, micros = torch.zeros_like(flat(step.parameters)), 0.0, [], []
    for micro in step.micro_batches:
        outputs = step.outputs(micro, step.wanted)
        if micro.old_logprobs is None:
            micro = replace(micro, old_logprobs=_given(outputs.logprobs).detach())
        result = step.loss(outputs, micro)
        found = torch.autograd.grad(result.loss, step.parameters, allow_unused=True)
        total += flat([torch.zeros_like(p) if g is None else g for p, g in zip(step.parameters, found, strict=True)])
        loss += result.loss.item()
        metrics.append(result.metrics)
        micros.append(micro)
    return loss, total, merge(metrics), micros


def _state_weights(micros: Sequence[TrainingBatch]) -> list[Tensor]:
    """The share of each trained token in the mean KL: that of its loss weight, and all of them add up to 1."""
    weights = []
    for micro in micros:
        trained = micro.loss_mask.clone()
        trained[:, 0] = False
        weights.append(micro.loss_weights[trained])
    total = sum(float(part.sum(dtype=torch.float64)) for part in weights)
    return [part / total for part in weights]


UPDATES: dict[str, Callable[..., Metrics]] = {"optimizer": _optimizer, "trust_region": _trust_region}


class Update(Axis):
    """How the gradient becomes a step: `Step` -> metrics, with the parameters changed in place.

    `kl_bound` is in nats per token, over the whole vocabulary and weighted as the loss is; `damping` is added to the
    Fisher matrix's diagonal. A trust region takes no learning rate, and its step keeps nothing from one to the next.

    Raises:
        ValueError: also where a trust region has no room, or its search no steps.
    """

    label, kinds, default = "update", UPDATES, "optimizer"

    def __init__(self, type: str | None = None, **parameters: Any) -> None:
        super().__init__(type, **parameters)
        if self.type != "trust_region":
            return
        for name in ("kl_bound", "cg_iterations"):
            if not self.parameters[name] > 0:
                raise ValueError(f"algorithm.update.{name}={self.parameters[name]} must be above 0")
        if not 0 < self.parameters["backtrack_ratio"] < 1:
            raise ValueError(f"algorithm.update.backtrack_ratio={self.parameters['backtrack_ratio']} must be in (0, 1)")
