"""A trainer and an engine on one device: which weights are held once, and whether the engine sleeps during updates.

The run, the plan and `rollout.engine=auto` ask here.
"""

from typing import Any

from atomrl.config import RunConfig
from atomrl.models.decoder_spec import unsupported
from atomrl.models.memory import FLOAT32
from atomrl.trainer.build import chosen_class


def why_two_copies(config: RunConfig, shape: Any, device: str, compute: int) -> str | None:
    """Return why an engine of the run's process has base weights of its own; None if it uses the trainer's.

    Args:
        config: config of a run, with or without the name of its engine.
        shape: the model's transformers config.
        device: `cpu` or `cuda`.
        compute: bytes per element in the forward pass.
    """
    model, engine = config.model, chosen_class(config.rollout)
    if model.lora is None:
        return "all weights are trained"
    if model.lora.modules_to_save:
        return "model.lora.modules_to_save are trained in full"
    if config.backend is not None or config.cluster is not None:
        return "the trainer's are in other processes, or spread over ranks"
    if not engine.shares_base:
        return f"rollout.engine={config.rollout.engine} loads its own"
    if reason := unsupported(shape):
        return f"the model is trained with transformers ({reason})"
    if model.compile:
        return "model.compile compiles the layers for the places of their weights"
    if device == "cpu" and compute < FLOAT32:
        return "a CPU multiplies bfloat16 in a layout of its own"
    return None


def shares_base(config: RunConfig, shape: Any, device: str, compute: int) -> bool:
    """Return True if the engine uses the trainer's frozen weights (`protocols.FrozenBase`); see `why_two_copies`."""
    return why_two_copies(config, shape, device, compute) is None


def rounds_into_engine(config: RunConfig, shape: Any) -> bool:
    """Return True if updates round trained weights into the engine's memory (`protocols.RoundedWeights`), on a GPU.

    An engine of an asynchronous run samples while the trainer computes, and its weights must have one version.
    """
    model, rollout = config.model, config.rollout
    here = config.backend is None and config.cluster is None and config.asynchronous is None
    return (
        (config.kind == "rl" and here and rollout.source != "pool" and chosen_class(rollout).shares_base)
        and model.lora is None and not model.compile and unsupported(shape) is None
    )  # fmt: skip


def engine_sleeps(config: RunConfig, device: str) -> bool:
    """Return True if the engine sleeps during updates: if it shares a GPU with the trainer and both do not work at the
    same time."""
    if config.cluster is not None:
        return config.cluster.placement == "colocated"
    return device != "cpu" and config.asynchronous is None
