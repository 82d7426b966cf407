"""The section `backend`: a trainer of several processes."""

from typing import Literal, Self

from pydantic import Field, model_validator

from atomrl.config.base import Section


class RankedConfig(Section):
    """What every back end of several processes (ranks) has."""

    ranks: int | None = Field(None, ge=1)
    """Processes that train, the one that you start included. null: as many as torchrun or accelerate started; without
    them one for each GPU, and one on a machine without."""
    timeout_s: float = Field(600.0, gt=0)
    """Within which all ranks must come to the same point; an error names who did not."""
    restarts: int = Field(2, ge=0)
    """How often in a run a new group goes on from the newest checkpoint, after a rank died, stood still, or ran out of
    memory (then with micro-batches of half the size). Where a launcher started the ranks the run ends instead."""


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

    @model_validator(mode="after")
    def _whole_copies(self) -> Self:
        if self.ranks is not None and self.ranks % self.replicas:
            raise ValueError(f"replicas={self.replicas} does not divide ranks={self.ranks}")
        if self.ranks is not None and self.ranks % self.sequence:
            raise ValueError(f"sequence={self.sequence} does not divide ranks={self.ranks}")
        if self.ranks is not None and self.ranks % self.tensor:
            raise ValueError(f"tensor={self.tensor} does not divide ranks={self.ranks}")
        if self.tensor > 1 and (self.sequence > 1 or self.replicas > 1):
            raise ValueError("tensor goes with neither sequence nor replicas: leave out one of them")
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

    @model_validator(mode="after")
    def _whole_copies(self) -> Self:
        if self.ranks is not None and self.ranks % (self.tensor * self.pipeline):
            raise ValueError(f"tensor={self.tensor} x pipeline={self.pipeline} does not divide ranks={self.ranks}")
        return self


BackendConfig = FSDPConfig | MegatronConfig
"""The back ends of several processes, told apart by `type`."""
