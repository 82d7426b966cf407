"""The section `backend`: a trainer of several processes."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from atomrl.config.base import ConfigError, Section


class RankedConfig(Section):
    """What every back end of several processes (ranks) has."""

    ranks: int | None = Field(None, ge=1)
    """Processes that train, the one that you start included. null: as many as torchrun or accelerate started; without
    them one for each GPU, and one on a machine without."""
    timeout_s: float = Field(600.0, gt=0)
    """Within which all ranks must come to the same point; an error names who did not."""
    restarts: int = Field(2, ge=0)
    """How often in a run a new group goes on from the newest checkpoint, after a rank died, stood still, or ran out of
    memory (then with micro-batches of half the size, or gradient checkpointing). Where a launcher started the ranks the
    run ends instead."""

    @property
    def divisors(self) -> Mapping[str, int]:
        """What must divide the number of ranks, by the words that say it."""
        raise NotImplementedError

    @property
    def choices(self) -> Mapping[str, Any]:
        """Other values of settings, of which a dry run says what they would take; one that cannot be is left out."""
        raise NotImplementedError

    @property
    def activation_ranks(self) -> int:
        """Ranks that share what a layer keeps of a token beside the residual stream and its norms."""
        return 1

    @property
    def ranks_per_row(self) -> int:
        """Ranks that compute the same rows."""
        return 1

    def check_count(self, ranks: int) -> None:
        """Raise ConfigError where so many ranks cannot be shared out."""
        for words, divisor in self.divisors.items():
            if ranks % divisor:
                raise ConfigError(f"backend.{words} does not divide the {ranks} ranks")

    @model_validator(mode="after")
    def _whole_shares(self) -> Self:
        for words, divisor in self.divisors.items():
            if self.ranks is not None and self.ranks % divisor:
                raise ValueError(f"backend.{words} does not divide ranks={self.ranks}")
        return self


class FSDPConfig(RankedConfig):
    """Weights, gradients and moments in shards over the ranks (PyTorch's FSDP2)."""

    type: Literal["fsdp"]
    replicas: int = Field(1, ge=1)
    """Hybrid sharding: whole copies of the shards, each over ranks / replicas ranks."""
    reduce: Literal["micro_batch", "update"] = "micro_batch"
    """When gradients are summed over ranks: after each micro-batch, or once in an update, until when every rank holds
    all of them."""
    sequence: int = Field(1, ge=1)
    """Ranks that share the rows of a micro-batch, each a part of the tokens (Ulysses), for rows that are too long for
    one. It divides the numbers of ranks and of the model's heads, of keys too."""
    tensor: int = Field(1, ge=1)
    """Ranks that share each layer's matrices, and compute the same rows (tensor parallel). It divides the numbers of
    ranks, of the model's heads, of keys too, and the MLP's width."""
    cpu_offload: bool = False
    """Shards of weights, gradients and moments are kept in the CPU's memory; needs GPUs."""

    @property
    def divisors(self) -> Mapping[str, int]:
        named = {"replicas": self.replicas, "sequence": self.sequence, "tensor": self.tensor}
        return {f"{key}={value}": value for key, value in named.items()}

    @property
    def choices(self) -> Mapping[str, Any]:
        return {
            "tensor": 2 * self.tensor,
            "replicas": 2 if self.replicas == 1 else 1,
            "reduce": "update" if self.reduce == "micro_batch" else "micro_batch",
            "sequence": 2 * self.sequence,
            "cpu_offload": not self.cpu_offload,
        }

    @property
    def activation_ranks(self) -> int:
        return self.tensor

    @property
    def ranks_per_row(self) -> int:
        return self.sequence * self.tensor  # one of them is 1

    @model_validator(mode="after")
    def _one_at_a_time(self) -> Self:
        if self.tensor > 1 and (self.sequence > 1 or self.replicas > 1):
            raise ValueError("backend.tensor goes with neither sequence nor replicas: leave out one of them")
        return self


class MegatronConfig(RankedConfig):
    """Each layer's matrices, and the layers, cut over ranks (NVIDIA's megatron-core)."""

    type: Literal["megatron"]
    tensor: int = Field(1, ge=1)
    """Ranks that share each layer: its heads, its MLP, the vocabulary. It divides the numbers of heads, of keys too,
    and the MLP's width."""
    pipeline: int = Field(1, ge=1)
    """Stages, each with as many of the layers. tensor x pipeline ranks hold the model once; rows are spread over the
    ranks / (tensor x pipeline) copies."""
    expert: int = Field(1, ge=1)
    """Ranks that share the experts of each layer of a mixture, each some of them whole: a multiple of tensor, or with
    stages the same number. Tokens travel to their experts."""

    @property
    def divisors(self) -> Mapping[str, int]:
        return {
            f"tensor={self.tensor} x pipeline={self.pipeline}": self.tensor * self.pipeline,
            f"expert={self.expert} x pipeline={self.pipeline}": self.expert * self.pipeline,
        }

    @property
    def choices(self) -> Mapping[str, Any]:
        return {"tensor": 2 * self.tensor, "pipeline": 2 * self.pipeline, "expert": 2 * self.expert}

    @property
    def ranks_per_row(self) -> int:
        return self.tensor * self.pipeline


BackendConfig = FSDPConfig | MegatronConfig
"""The back ends of several processes, told apart by `type`."""
