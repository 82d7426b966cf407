"""The shapes of models that Megatron's layers are, read from transformers' configs, and whether they can be cut."""

from dataclasses import dataclass
from typing import Any

from atomrl.config import ConfigError, MegatronConfig
from atomrl.models.spec import DecoderSpec, read_spec, rope_frequencies, unsupported

MIXTURE = "qwen3_moe"
"""The family of mixtures of experts that there is a mapping of weights for."""


@dataclass(frozen=True)
class Experts:
    """The experts of each layer."""

    count: int
    chosen: int
    """How many compute a token."""
    width: int
    """Of an expert's MLP."""
    renormalised: bool
    """Whether the weights of those that are chosen add up to 1."""


def read_shape(config: Any) -> tuple[DecoderSpec, Experts | None]:
    """The shape of a model that has none of what `check_shape` refuses."""
    if config.model_type != MIXTURE:
        return read_spec(config), None
    return read_spec(dense(config)), Experts(
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, config.norm_topk_prob
    )


def dense(config: Any) -> Any:
    """The config of the same model with one MLP in the place of the experts."""
    from transformers import Qwen3Config

    if config.model_type != MIXTURE:
        return config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Qwen3Config.from_dict(config.to_dict() | {"model_type": "qwen3", "head_dim": size})


def check_shape(config: Any, settings: MegatronConfig, path: str) -> None:
    """Raise ConfigError where a model cannot be cut over so many ranks, or has what the mapping of weights lacks.

    Args:
        config: transformers' of the model.
    """
    if (reason := unsupported(dense(config))) is not None:
        raise ConfigError(
            f"backend.type=megatron has no mapping of weights for {path}: {reason}; take backend.type=fsdp"
        )
    (spec, experts), tensor, pipeline = read_shape(config), settings.tensor, settings.pipeline
    divided = {"heads": spec.heads, "key heads": spec.kv_heads}
    if experts is None:
        divided["width of the MLP"] = spec.intermediate
    for what, number in divided.items():
        if number % tensor:
            raise ConfigError(f"backend.tensor={tensor} does not divide the {what} of {path}, {number}")
    if spec.layers % pipeline:
        raise ConfigError(f"backend.pipeline={pipeline} does not divide the {spec.layers} layers of {path}")
    if rope_frequencies(dense(config))[1] != 1.0:
        raise ConfigError(f"backend.type=megatron: {path} scales its rotary positions (yarn); take backend.type=fsdp")
    if spec.output_bias or spec.mlp_bias:
        raise ConfigError(f"backend.type=megatron: {path} has biases of outputs or MLPs; take backend.type=fsdp")
    check_experts(config, experts, settings, path)


def check_experts(config: Any, experts: Experts | None, settings: MegatronConfig, path: str) -> None:
    """Raise ConfigError where the experts of a model cannot be spread as the config says."""
    tensor, pipeline, expert = settings.tensor, settings.pipeline, settings.expert
    if experts is None:
        if expert > 1:
            raise ConfigError(f"backend.expert={expert}: {path} has no experts; leave it out")
        return
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise ConfigError(f"backend.type=megatron: {path} has layers without experts; take backend.type=fsdp")
    if experts.chosen == 1 and experts.renormalised:
        raise ConfigError(f"backend.type=megatron: {path} weighs its one expert of a token by 1, always; take fsdp")
    if experts.count % expert:
        raise ConfigError(f"backend.expert={expert} does not divide the {experts.count} experts of {path}")
    if expert % tensor or (pipeline > 1 and expert != tensor):
        number = "backend.tensor" if pipeline > 1 else "a multiple of backend.tensor"
        raise ConfigError(f"backend.expert={expert}: with tensor={tensor} and pipeline={pipeline} it is {number}")
