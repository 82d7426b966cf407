"""The section `model`: which policy, what it computes in, and how."""

from typing import Literal, Self

from pydantic import Field, model_validator

from atomrl.config.base import Section

Quantization = Literal["nf4", "int8"]


class LoraConfig(Section):
    """Low-rank adapters (needs the `lora` extra)."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: list[str] | str = "all-linear"
    """Linear layers: all between embedding and output matrix; or names, the last part or more of a path; or a regular
    expression of whole paths."""


class ModelConfig(Section):
    """The policy."""

    path: str | None = None
    """A folder in Hugging Face layout, or a hub name. Required, but where `sft.gpt` makes a fresh model."""
    tokenizer: str | None = None
    """Where its tokenizer is, if not beside the model: a folder or a hub name."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Where trainer and engine compute: `cpu`, `cuda`, `cuda:1`, ...; `auto` is a GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the forward pass computes in; master weights are float32 in either case. `auto` is bfloat16 where the
    hardware multiplies it fast."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Compute each layer again in the backward pass instead of keeping its activations. `auto`: on a GPU where a run
    does not fit without it, and where memory runs out with a single row in a micro-batch."""
    activation_offload: bool = False
    """Keep activations in the CPU's memory between the forward and the backward pass; needs a GPU."""
    compile: bool = False
    """Compile each layer once (pays after some tens of steps)."""
    pack_rows: bool | None = None
    """Lay the rows of a forward pass end to end, without padding, the prompt of a group once. null: where the model
    can, on a GPU in bfloat16 alone; true: an error where it cannot; false: padded rows."""
    lora: LoraConfig | None = None
    quantization: Quantization | None = None
    """Keep the linear layers beneath the adapters in 4 bits (bitsandbytes' nf4) or 8. null: in `dtype`."""
    trust_remote_code: bool = False

    @property
    def checkpoints_layers(self) -> bool:
        """`gradient_checkpointing`; False where it is `auto` and nothing was chosen."""
        return self.gradient_checkpointing is True

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.quantization and self.lora is None:
            raise ValueError("model.quantization: quantised weights are not trained; give model.lora too")
        if self.quantization and self.compile:
            raise ValueError("model.quantization: layers that are quantised are not compiled; leave out compile")
        return self
