"""What is known of a run on Megatron before it begins: whether it can be, and what it takes of memory."""

from collections.abc import Mapping
from typing import Any

from atomrl.backends.megatron_layout import check_shape
from atomrl.backends.megatron_model import check_adapters
from atomrl.config import ConfigError, MegatronConfig, ModelConfig
from atomrl.models.memory import FLOAT32, SHARDED, Sizes, adapters_of_rank, ends, expert_parameters

SHARED = {"activations", "critic activations", "log-prob chunk", "backward pass", "fresh gradients"}
"""Of what there is for a moment, what ranks cut that share each layer."""


def check(settings: MegatronConfig, model: ModelConfig, shapes: Mapping[str, Any], device: str) -> None:
    """As of `RankedKind`: megatron-core is there, has a mapping of weights for all models, and divides them."""
    check_config(model)
    for path, shape in shapes.items():
        check_shape(shape, settings, path)


def check_config(model: ModelConfig) -> None:
    """Raise ConfigError where a config asks for what Megatron has not here, or Megatron is not there."""
    check_adapters(model)
    try:
        import megatron.core  # noqa: F401
    except ImportError:
        raise ConfigError("backend.type=megatron needs megatron-core: pip install 'atomrl[megatron]'") from None


def memory(settings: MegatronConfig, parts: Mapping[str, int], sizes: Sizes, ranks: int) -> dict[str, int]:
    """As of `RankedKind`: its part of the layers, and of the first stage's embedding.

    Gradients are float32; of float32 weights beside rounded ones, and of the moments, each copy of the model has a
    share. Adapters are float32 themselves. Activations are cut over the ranks that share layers; the first of P stages
    holds those of P micro-batches.
    """
    shape, total, trained, compute = sizes.shape, sizes.total, sizes.trained, sizes.compute
    tensor, pipeline, expert = settings.tensor, settings.pipeline, settings.expert
    one = shape.vocab_size * shape.hidden_size
    experts = shape.num_hidden_layers * expert_parameters(shape)
    dense = ((total - ends(shape) - experts) // pipeline + (one if pipeline > 1 else ends(shape))) // tensor
    mixed = experts // (pipeline * expert)
    found = {name: size * (dense + mixed) // total if name in SHARDED else size for name, size in parts.items()}
    once = dense * tensor * pipeline // ranks + mixed * expert * pipeline // ranks
    found["trainer weights"] = (dense + mixed) * compute
    found["rounded weights"] = once * FLOAT32 if compute != FLOAT32 and trained == total else 0
    if trained != total:
        adapters = adapters_of_rank(shape, trained, tensor) // pipeline
        once = adapters * tensor * pipeline // ranks
        found["trainer weights"] += adapters * FLOAT32
        found["gradients"] = adapters * FLOAT32
    found["optimizer"] = parts["optimizer"] * once // trained
    for name in SHARED & found.keys():
        found[name] //= tensor
    return found
