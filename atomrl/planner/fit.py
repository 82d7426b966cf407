"""Changes of a config that save memory, and the search for those with which a run fits a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from atomrl.config import ConfigError, RunConfig, load_config, merge_trees
from atomrl.models.decoder_spec import FAMILIES
from atomrl.models.known_shapes import known_shapes, planning_shape
from atomrl.models.memory import count_parameters
from atomrl.planner.plan import Plan

FEWEST_CONCURRENT, LEAST_COMPLETION = 8, 256
"""Lower limits of `find_fitting`: concurrent completions, and tokens of a completion."""

SLOWER = 1.1
"""Fewer changes of training are preferred if the step is at most this many times slower than the fastest."""


@dataclass(frozen=True)
class Trade:
    """A change of the config that saves memory, and its price."""

    changes: Mapping[str, Any]
    """Keys of the config with their values, as a tree."""
    price: str
    """The drawback, in words."""
    kind: Literal["speed", "bits", "adapters", "task"] = "speed"
    """Changes the speed only; the precision of training; trains adapters instead of all weights; or shortens
    completions."""

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in _flat(self.changes))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, str(value).lower() if isinstance(value, bool) else str(value)


def trades(config: RunConfig, gpus: int) -> Iterator[Trade]:
    """Yield changes of a config that may save memory, the cheapest first.

    First changes of the speed only; then 8-bit moments, adapters and a quantised base, which change training; last
    shorter completions, which change the task.

    Args:
        gpus: number of GPUs; 0 on a CPU.
    """
    model, rollout, train = config.model, config.rollout, config.train
    if config.backend is None and gpus > 1:
        yield Trade({"backend": {"type": "fsdp", "ranks": gpus}}, "shards over all GPUs; not slower")
    # Speed only: smaller batches, down to sizes that cost little, then recomputation, then smaller ones still.
    # A micro-batch holds at least one whole row.
    has_rollouts = config.kind == "rl"
    concurrent = min(rollout.concurrent_completions, rollout.prompts_per_step * rollout.completions_per_prompt)
    row = config.data.max_prompt_tokens + rollout.max_completion_tokens if has_rollouts else 1
    tokens = train.micro_batch_tokens("cuda" if gpus else "cpu")
    while has_rollouts and concurrent > max(32, FEWEST_CONCURRENT):
        concurrent = max(32, concurrent // 2)
        yield Trade(
            {"rollout": {"max_concurrent_completions": concurrent}}, "smaller decoding batches: slower rollouts"
        )
    while tokens > max(row, 2048):
        tokens = max(row, 2048, tokens // 2)
        yield Trade(
            {"train": {"tokens_per_micro_batch": tokens}}, "smaller micro-batches: the same gradients, a little slower"
        )
    if not model.checkpoints_layers:
        yield Trade({"model": {"gradient_checkpointing": True}}, "recomputes layers: updates a third slower")
    while tokens > max(row, 512):
        tokens = max(row, 512, tokens // 2)
        yield Trade({"train": {"tokens_per_micro_batch": tokens}}, "smaller micro-batches: the same gradients, slower")
    # Changes of what is trained: moments, adapters, the base.
    if train.optimizer == "adamw" and config.backend is None:
        price = "Adam's moments in 8 bits (pip install 'atomrl[quant]')"
        yield Trade({"train": {"optimizer": "adamw8bit"}}, price, "bits")
    if model.lora is None:
        lora = {"lora": {"rank": 32, "alpha": 64.0}}
        rate = {"train": {"learning_rate": 2e-5}} if train.learning_rate < 1e-5 else {}
        price = "trains adapters of rank 32 instead of all weights"
        yield Trade({"model": lora, **rate}, price, "adapters")
    if model.quantization is None:
        price = "the frozen base in 4 bits: a little noise (pip install 'atomrl[quant]')"
        yield Trade({"model": {"quantization": "nf4"}}, price, "bits")
    # Last: very slow rollouts, and shorter completions, which change the task.
    while has_rollouts and concurrent > FEWEST_CONCURRENT:
        concurrent = max(FEWEST_CONCURRENT, concurrent - 8)
        yield Trade(
            {"rollout": {"max_concurrent_completions": concurrent}}, "smaller decoding batches: much slower rollouts"
        )
    limit = rollout.max_completion_tokens
    while has_rollouts and limit > LEAST_COMPLETION:
        limit = max(LEAST_COMPLETION, limit // 2)
        price = "truncates longer completions: changes the task"
        yield Trade({"rollout": {"max_completion_tokens": limit}}, price, "task")


def helpful(plan: Plan) -> list[tuple[Trade, Plan]]:
    """Return single changes that save 64 MiB or more, each with its plan.

    Of several values for the same keys it is the first with which the run fits, or else the last.
    """
    by_keys: dict[str, tuple[Trade, Plan]] = {}
    for trade in trades(plan.chosen, plan.gpus):
        smaller = changed(plan, [trade])
        if smaller is not None and smaller.memory.peak < plan.memory.peak - 2**26:
            keys = " ".join(key for key, _ in _flat(trade.changes))
            if keys not in by_keys or not by_keys[keys][1].fits:
                by_keys[keys] = (trade, smaller)
    return list(by_keys.values())


def find_fitting(plan: Plan) -> tuple[list[Trade], Plan] | None:
    """Find changes with which a run fits, without superfluous ones; None if no changes are enough.

    Three stages, each only if the one before does not fit: changes of the speed and precision; adapters as well;
    shorter completions as well. Within a stage every subset of the precision changes (8-bit moments, a quantised base)
    is completed by changes of the speed until it fits. The result is the smallest subset whose step takes at most
    `SLOWER` times as long as the fastest.
    """
    if plan.fits:
        return [], plan
    available = list(trades(plan.chosen, plan.gpus))
    speed, bits, adapters, task = (
        [trade for trade in available if trade.kind == kind] for kind in ("speed", "bits", "adapters", "task")
    )
    subsets = [list(subset) for count in range(len(bits) + 1) for subset in combinations(bits, count)]
    for required, optional in (([], speed), (adapters, speed), (adapters, [*speed, *task])):
        fits = [one for subset in subsets if (one := _fit_with(plan, [*required, *subset], optional)) is not None]
        if fits:
            fastest = min(smaller.step_seconds for _, smaller in fits)
            return next(one for one in fits if one[1].step_seconds <= SLOWER * fastest)
    return None


def _fit_with(plan: Plan, required: Sequence[Trade], optional: Sequence[Trade]) -> tuple[list[Trade], Plan] | None:
    """Apply required changes and as many optional ones, in their order, as it takes to fit; None if that is too few."""
    chosen, current = list(required), changed(plan, required)
    if current is None:
        return None
    for trade in optional:
        if current.fits:
            break
        smaller = changed(plan, [*chosen, trade])
        if smaller is not None and smaller.memory.peak < current.memory.peak:
            chosen, current = [*chosen, trade], smaller
    if not current.fits:
        return None
    for trade in list(chosen):  # a later change may have made an earlier one superfluous
        fewer = [other for other in chosen if other is not trade]
        smaller = changed(plan, fewer)
        if smaller is not None and smaller.fits and smaller.step_seconds <= current.step_seconds:
            chosen, current = fewer, smaller
    return chosen, current


def least(plan: Plan) -> tuple[list[Trade], Plan]:
    """Return the changes that bring a run's memory to its minimum, and its plan."""
    chosen: list[Trade] = []
    current = plan
    for trade in trades(plan.chosen, plan.gpus):
        smaller = changed(plan, [*chosen, trade])
        if smaller is not None and smaller.memory.peak < current.memory.peak:
            chosen, current = [*chosen, trade], smaller
    return chosen, current


def largest_that_fits(plan: Plan, changes: Sequence[Trade]) -> tuple[str, Plan] | None:
    """Return the largest well-known model that fits with some changes, with its plan: of the same family, else of any
    other; None if none fits."""
    path = plan.config.model.path
    assert path is not None
    shape = planning_shape(path, plan.config.model.trust_remote_code)
    size = count_parameters(shape)
    sizes = {name: count_parameters(other) for name, other in known_shapes().items() if other.model_type in FAMILIES}
    ordered = sorted((name for name, count in sizes.items() if count < size), key=lambda name: -sizes[name])
    for of_family in (True, False):
        for name in ordered:
            if (known_shapes()[name].model_type == shape.model_type) is of_family:
                renamed = changed(plan, [*changes, Trade({"model": {"path": name}}, "a smaller model", "task")])
                if renamed is not None and renamed.fits:
                    return name, renamed
    return None


def merged(chosen: Sequence[Trade]) -> dict[str, Any]:
    """Merge the changes of several trades into one tree."""
    tree: dict[str, Any] = {}
    for trade in chosen:
        tree = merge_trees(tree, trade.changes)
    return tree


def changed(plan: Plan, chosen: Sequence[Trade]) -> Plan | None:
    """Plan a config after some changes; None if they make it invalid."""
    try:
        return plan.replan(load_config(merge_trees(plan.config.to_tree(secrets=True), merged(chosen))))
    except ConfigError:
        return None
