"""Model shapes, read from transformers configs, and checks of the parallel sizes."""

from dataclasses import dataclass
from typing import Any

from atomrl.config import ConfigError, MegatronConfig
from atomrl.models.decoder_spec import DecoderSpec, read_spec, rope_frequencies, unsupported

MIXTURE = "qwen3_moe"
"""The mixture-of-experts family that has a weight mapping."""


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture-of-experts layer."""

    count: int
    chosen: int
    """Experts per token (top-k)."""
    width: int
    """Intermediate size of an expert's MLP."""
    renormalised: bool
    """True if the router weights of the chosen experts are normalized to sum to 1."""


def read_shape(config: Any) -> tuple[DecoderSpec, Experts | None]:
    """Read decoder spec and experts from a transformers config that `check_shape` accepts."""
    if config.model_type != MIXTURE:
        return read_spec(config), None
    return read_spec(dense(config)), Experts(
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, config.norm_topk_prob
    )


def dense(config: Any) -> Any:
    """Return the config of the same model with a dense MLP instead of experts."""
    from transformers import Qwen3Config

    if config.model_type != MIXTURE:
        return config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Qwen3Config.from_dict(config.to_dict() | {"model_type": "qwen3", "head_dim": size})


def check_shape(config: Any, settings: MegatronConfig, path: str) -> None:
    """Raise ConfigError if a model has no weight mapping, or is not divisible by the parallel sizes.

    Args:
        config: transformers config of the model.
        path: path of the model, for the message.
    """
    if (reason := unsupported(dense(config))) is not None:
        raise ConfigError(
            f"backend.type=megatron has no mapping of weights for {path}: {reason}; use backend.type=fsdp"
        )
    (spec, experts), tensor, pipeline = read_shape(config), settings.tensor, settings.pipeline
    divided = {"heads": spec.heads, "key heads": spec.kv_heads}
    if experts is None:
        divided["width of the MLP"] = spec.intermediate
    for name, number in divided.items():
        if number % tensor:
            raise ConfigError(f"backend.tensor={tensor} does not divide the {name} of {path}, {number}")
    if spec.layers % pipeline:
        raise ConfigError(f"backend.pipeline={pipeline} does not divide the {spec.layers} layers of {path}")
    if rope_frequencies(dense(config))[1] != 1.0:
        raise ConfigError(f"backend.type=megatron: {path} scales its rotary positions (yarn); use backend.type=fsdp")
    if spec.output_bias or spec.mlp_bias:
        raise ConfigError(f"backend.type=megatron: {path} has output or MLP biases; use backend.type=fsdp")
    check_experts(config, experts, settings, path)


def check_experts(config: Any, experts: Experts | None, settings: MegatronConfig, path: str) -> None:
    """Raise ConfigError if the experts of a model cannot be distributed as configured."""
    tensor, pipeline, expert = settings.tensor, settings.pipeline, settings.expert
    if experts is None:
        if expert > 1:
            raise ConfigError(f"backend.expert={expert}: {path} has no experts; leave it out")
        return
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise ConfigError(f"backend.type=megatron: {path} has layers without experts; use backend.type=fsdp")
    if experts.chosen == 1 and experts.renormalised:
        raise ConfigError(f"backend.type=megatron: {path} always weights the single expert of a token by 1; use fsdp")
    if experts.count % expert:
        raise ConfigError(f"backend.expert={expert} does not divide the {experts.count} experts of {path}")
    if expert % tensor or (pipeline > 1 and expert != tensor):
        number = "backend.tensor" if pipeline > 1 else "a multiple of backend.tensor"
        raise ConfigError(f"backend.expert={expert}: with tensor={tensor} and pipeline={pipeline} it must be {number}")
