"""The FSDP back end: sharded weights, gradients and moments (PyTorch's FSDP2), with tensor parallelism."""

import copy
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from atomrl.backends.base import LossInputs
from atomrl.backends.checkpoints import (
    PART_BYTES,
    BackgroundCheckpoints,
    Job,
    gather_weights,
    model_jobs,
    split_by_size,
)
from atomrl.backends.group import Ranks
from atomrl.backends.roles import TRAINED, RoleName, load_role, role_prefix, save_role
from atomrl.backends.shards import copies_on_cpu, load_shards, shard_job
from atomrl.backends.tensor_parallel import check_tensor, shard_layers, sum_parts
from atomrl.batches import RowBatch, TrainingBatch
from atomrl.common.metrics import Metrics
from atomrl.config import ConfigError, FSDPConfig, ModelConfig
from atomrl.models.loading import compute_dtype, model_weights
from atomrl.models.lora import adapter_weights, has_adapters, published_whole_weights
from atomrl.models.memory import FLOAT32, IN_CPU_MEMORY, SHARDED, Sizes, adapters_of_rank, ends, layer_count, uncut
from atomrl.models.scalar import HFScalar
from atomrl.models.sequence_parallel import check_heads
from atomrl.models.shapes import language_model, tower_weights
from atomrl.models.stream import packs_rows
from atomrl.protocols import Algorithm, ModelInput, WeightUpdate

# Outputs are views of a layer's output if there is no padding. That is safe, because nothing writes into them.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")

BY_TOKENS = {"activations", "critic activations", "log-prob chunk", "backward pass", "distributions"}
"""Parts of the memory estimate that grow with the tokens of a micro-batch."""


class FSDPBackend(BackgroundCheckpoints):
    """Trains on several ranks with sharded weights, gradients and moments (FSDP2).

    A layer's weights are gathered while it computes. Gradients are summed over ranks and micro-batches, so an update
    equals that of one process up to rounding. All methods are collective.

    Args:
        settings: config section `backend`.
        model, train, algorithm, named: arguments of `BaseBackend`; `collective` must be `Ranks`.
    """

    has_full_weights = False
    retries_out_of_memory = False
    """False: when one rank runs out of memory, the others wait in a collective of the same layer."""
    checkpoint_part_bytes, engine_part_bytes = PART_BYTES, 2**28
    """Bytes gathered at a time for a checkpoint, and for an engine."""
    parts: Sequence[Sequence[tuple[str, Tensor]]] = ()
    """Sharded weights of the last `weight_update`, in parts for `weight_part`."""

    def __init__(
        self, settings: FSDPConfig, model: ModelConfig, train: Any, algorithm: Algorithm, **named: Any
    ) -> None:
        self.settings, self.skeletons = settings, dict[RoleName, nn.Module]()
        self.norms = dict[RoleName, list[nn.Module]]()
        """Per-head norms of trained models with tensor parallelism."""
        self.ranks: Ranks = named["collective"]
        world, replicas = self.ranks.world, settings.replicas
        settings.check_count(world)
        self.ranks_per_row = settings.ranks_per_row
        self.sharing = self.ranks.consecutive_group(settings.sequence) if settings.sequence > 1 else None
        sizes = {"replicate": replicas, "shard": world // replicas // settings.tensor, "tensor": settings.tensor}
        names = tuple(name for name, size in sizes.items() if size > 1 or name == "shard")
        shape = tuple(sizes[name] for name in names)
        self.mesh = init_device_mesh(torch.device(named["device"]).type, shape, mesh_dim_names=names)
        super().__init__(model, train, algorithm, **named)
        self.seed = named.get("seed", 0)
        torch.manual_seed(self.seed + 1_000_003 * self.collective.rank)  # dropout differs; initial weights did not

    @staticmethod
    def check(settings: FSDPConfig, model: ModelConfig, shapes: Mapping[str, Any], device: str) -> None:
        """Raise ConfigError if these models cannot be trained with these settings (`RankedKind.check`)."""
        if settings.sequence > 1:
            kind = device.partition(":")[0]
            if not packs_rows(model.pack_rows, kind, compute_dtype(model.dtype, kind)):
                raise ConfigError(f"backend.sequence={settings.sequence} needs packed rows: set model.pack_rows=true")
            for path, shape in shapes.items():
                check_heads(shape, settings.sequence, path)
        if settings.tensor > 1:
            if model.quantization is not None:
                raise ConfigError(
                    "backend.tensor: a quantised base model cannot be sharded; remove it or model.quantization"
                )
            if model.lora is not None and model.lora.modules_to_save:
                raise ConfigError("model.lora.modules_to_save: not supported with backend.tensor; remove one of them")
            for path, shape in shapes.items():
                check_tensor(shape, settings.tensor, path)
        if settings.cpu_offload and device == "cpu":
            raise ConfigError("backend.cpu_offload: has no effect on a CPU; leave it out")

    @staticmethod
    def memory(settings: FSDPConfig, parts: Mapping[str, int], sizes: Sizes, ranks: int) -> dict[str, int]:
        """Estimate the memory of a rank (`RankedKind.memory`): its shards, and weights while they are gathered.

        Gathered at a time are embedding and output matrix with their unreduced gradients, and two layers: one that
        computes and the next one, prefetched. In the backward pass there are also the gradients of one layer in the
        dtype of computation, and those of the layer after it, which are being reduced in float32. Weights for the
        engine are in rank 0's CPU memory.
        """
        shape, total, trained, compute = sizes.shape, sizes.total, sizes.trained, sizes.compute
        shards = ranks // settings.replicas
        # Tensor parallelism replicates embedding, output matrix and norms, as a share of all weights.
        replicated = uncut(shape) / total * (settings.tensor - 1)
        estimate = {**parts}
        estimate |= {name: math.ceil(parts[name] * (1 + replicated) / shards) for name in SHARDED if name in parts}
        trained_of_rank = trained * (1 + replicated) / settings.tensor  # unsharded
        if trained < total:
            trained_of_rank = adapters_of_rank(shape, trained, settings.tensor)
            share = trained_of_rank * settings.tensor / trained / shards
            estimate |= {name: math.ceil(parts[name] * share) for name in ("optimizer", "gradients")}
        for name in BY_TOKENS & estimate.keys():
            estimate[name] //= settings.sequence
        if settings.reduce == "update":
            estimate["gradients"] += math.ceil(trained_of_rank * FLOAT32)
        layer = (total - ends(shape)) // layer_count(shape) // settings.tensor
        estimate["rounded weights"] = estimate["fresh gradients"] = 0
        full = trained == total
        estimate["gathered embedding"] = ends(shape) * compute * (2 if full else 1)
        estimate["gathered layers"] = layer * (3 * compute + FLOAT32) if full else math.ceil(2 * layer * sizes.kept)
        estimate["backward pass"] //= settings.tensor
        if settings.cpu_offload:
            estimate[IN_CPU_MEMORY] = sum(estimate[name] for name in SHARDED if name in estimate)
            estimate |= {name: 0 for name in SHARDED if name in estimate}
        return estimate

    def load_model(self, name: RoleName, path: str, config: ModelConfig) -> nn.Module:
        """Load and shard the model of a role; one rank per machine at a time has the full model in memory."""
        model: Any = self.ranks.in_turns(partial(self._load, name, path, config))
        if self.sharing is not None:
            self._share(model, path)
        return cast(nn.Module, model)

    def _share(self, model: Any, path: str) -> None:
        """Turn on sequence parallelism: consecutive ranks share the tokens of a micro-batch.

        Raises:
            ConfigError: the model does not support it.
        """
        shape = model.config
        if not model.shares_prompts:
            raise ConfigError(
                f"backend.sequence={self.ranks_per_row}: {path} ({shape.model_type}) would use padded rows; on a GPU "
                "set model.dtype=bfloat16; remove model.pack_rows=false"
            )
        check_heads(shape, self.ranks_per_row, path)
        model.sharing = self.sharing

    def _load(self, name: RoleName, path: str, config: ModelConfig) -> nn.Module:
        compute = compute_dtype(config.dtype, self.device)
        full = name in TRAINED and config.lora is None
        dtype = torch.float32 if full else compute
        model = load_role(name, path, config, torch.device("cpu"), dtype)
        if name in TRAINED:
            self.skeletons[name] = without_weights(model)
        if self.settings.tensor > 1:
            norms = shard_layers(model, self.mesh["tensor"], path)
            self.norms |= {name: norms} if name in TRAINED else {}
        rounded = compute if full and compute != torch.float32 else None
        self._shard(model, MixedPrecisionPolicy(rounded, torch.float32 if rounded else None, cast_forward_inputs=False))
        return model

    def _shard(self, model: nn.Module, precision: MixedPrecisionPolicy) -> None:
        offload = CPUOffloadPolicy() if self.settings.cpu_offload else OffloadPolicy()
        inner = getattr(model, "inner", None)
        has_tower = inner is not None and bool(tower_weights(inner))  # the tower stays with the root
        decoder: nn.Module = language_model(inner)[1] if has_tower else model
        lists = (child for child in decoder.modules() if isinstance(child, nn.ModuleList) and len(child))
        mesh = self.mesh["shard"] if self.settings.tensor > 1 else self.mesh
        for module in (*next(lists, ()), model):
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # these setters do not apply to nested FSDP modules
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        cast(FSDPModule, model).set_reduce_scatter_unused_params(True)
        for entry in ("scores",) if isinstance(model, HFScalar) else ("forward_hidden", "stream_states"):
            register_fsdp_forward_method(model, entry)

    def before_backward(self, last: bool) -> None:
        """With `reduce: update`, reduce gradients at the last micro-batch only."""
        if self.settings.reduce == "update":
            for name in self.trained:
                self.roles[name].model.set_requires_gradient_sync(last)

    def forward_only(self, rows: RowBatch, needs: Collection[ModelInput]) -> RowBatch:
        rows = super().forward_only(rows, needs)
        self._reshard()
        return rows

    def gradients(self, batch: TrainingBatch, algorithm: Algorithm, of: Collection[RoleName] | None = None) -> Metrics:
        metrics = super().gradients(batch, algorithm, of)
        self._reshard()
        return metrics

    def _accumulate(self, inputs: LossInputs, split: list[Tensor]) -> list[Metrics]:
        if self.settings.tensor == 1:
            return super()._accumulate(inputs, split)
        # Same seed on the ranks that share layers, so that dropout is the same in their replicated activations.
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(hash((self.seed, self.updates, self.collective.rank // self.settings.tensor)))
            metrics = super()._accumulate(inputs, split)
        for norms in self.norms.values():
            sum_parts(norms, self.mesh["tensor"], self.device)
        return metrics

    def _reshard(self) -> None:
        """Free the root module's gathered weights: embedding, final norm and output matrix."""
        for role in self.roles.values():
            role.model.reshard()

    def gather_model(self, name: RoleName, adapters_alone: bool = False) -> nn.Module | None:
        """Gather the full model of a role to rank 0's CPU memory; None on other ranks. Collective.

        Args:
            adapters_alone: gather only what is trained: the adapters, and modules that are trained in full beside them.
        """
        weights = self.roles[name].model.named_parameters(remove_duplicate=False)
        wanted = [(key, weight) for key, weight in weights if not adapters_alone or weight.requires_grad]
        full = gather_weights(wanted, self.collective.rank == 0)
        if self.collective.rank:
            return None
        if adapters_alone:  # copied: an unsharded adapter is the parameter itself, which the next step changes
            full = copies_on_cpu(full)
        model = copy.deepcopy(self.skeletons[name])
        model.load_state_dict(full, assign=True, strict=False)
        return model

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        """Return the policy's weights for an engine on rank 0, and an empty update on the others.

        Weights are gathered part by part when they are read (`weight_part`). Two cases are gathered at once: a base
        with adapters, which is sent only once, and models whose published weights differ from their parameters.
        """
        name = next(iter(self.roles))
        skeleton: Any = self.skeletons[name]
        weights = self.roles[name].model.named_parameters(remove_duplicate=False)
        own = {key.removeprefix("inner."): weight for key, weight in weights}
        outline = [] if has_adapters(skeleton) else list(model_weights(skeleton))
        if outline and all(key in own for key, _ in outline):
            self.parts = split_by_size([(key, own[key]) for key, _ in outline], self.engine_part_bytes)
            tensors = (pair for number in range(len(self.parts)) for pair in self.weight_part(number))
            return WeightUpdate(version, tensors, outline=outline)
        model = self.gather_model(name, adapters_alone)
        if model is None:
            return WeightUpdate(version)
        policy: Any = model
        weights = [*published_whole_weights(policy).items()] if adapters_alone else list(model_weights(policy))
        return WeightUpdate(version, weights, adapter_weights(policy))

    @torch.inference_mode(False)
    def weight_part(self, number: int) -> list[tuple[str, Tensor]]:
        """Gather one of `parts` of the last `weight_update` to rank 0; empty on other ranks, and after the last part.
        Collective."""
        part = [pair for part in self.parts[number : number + 1] for pair in part]
        return list(gather_weights(part, self.collective.rank == 0).items())

    def save(self, folder: Path) -> Callable[[], None]:
        """Start writing models and tokenizer in Hugging Face layout, and the sharded state for an exact resume.

        A thread of each rank writes from copies; `saved` waits for it.
        """
        self.saved()
        jobs: list[Job] = [shard_job(self.trained, self.collective, self.updates, folder)]
        for name in self.trained:
            model, target, size = self.roles[name].model, folder / role_prefix(name), self.checkpoint_part_bytes
            if has_adapters(model):
                if (adapted := self.gather_model(name, adapters_alone=True)) is not None:
                    jobs.append(partial(save_role, name, adapted, self.tokenizer, folder))
                continue
            jobs += model_jobs(model, self.skeletons[name], self.tokenizer, self.collective, target, size)
        return self.write_in_background(folder, jobs)

    def load(self, folder: Path) -> None:
        """Resume from `save`: exactly on the same number of ranks, within rounding on another.

        Raises:
            ConfigError: the folder has no such state, or that of another model.
        """
        self.updates = load_shards(self.trained, self.collective, folder)


def without_weights(model: nn.Module) -> nn.Module:
    """Copy a module with its parameters on the meta device.

    Example:
        >>> [str(weight.device) for weight in without_weights(nn.Linear(2, 2)).parameters()]
        ['meta', 'meta']
    """
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, cast(dict[int, Any], memo))
