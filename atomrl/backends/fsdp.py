"""The back end of several ranks: weights, gradients and moments in shards (PyTorch's FSDP2, `fully_shard`)."""

import copy
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from atomrl.atoms.logprobs import chunk_size, head_logits
from atomrl.backends.base import LossInputs
from atomrl.backends.checkpoints import (
    PART_BYTES,
    Job,
    BackgroundCheckpoints,
    gathered,
    kept,
    load_shards,
    model_jobs,
    parts_of,
    shard_job,
)
from atomrl.backends.group import Ranks
from atomrl.backends.roles import TRAINED, RoleName, load_role, role_prefix, save_role
from atomrl.batches import RowBatch, TrainingBatch
from atomrl.common.metrics import Metrics
from atomrl.common.threads import sent
from atomrl.config import ConfigError, FSDPConfig, ModelConfig
from atomrl.models.adapted import ADAPTER
from atomrl.models.attention import check_heads, packs_rows
from atomrl.models.gpt import Attention, Linear
from atomrl.models.loading import compute_dtype, model_weights
from atomrl.models.lora import adapter_weights, has_adapters, is_adapter
from atomrl.models.memory import BESIDE, FLOAT32, SHARDED, Sizes, adapters_of_rank, ends, uncut
from atomrl.models.reward_model import HFScalar
from atomrl.protocols import Algorithm, ModelInput, WeightUpdate

# --------------------------------------------------------------------------------------------------------------------
# Tensor parallel: each layer's matrices cut over ranks that compute the same rows (PyTorch's DTensor).
#
# Queries, keys, values, gate and up are cut by outputs, so that a rank has some of the heads and of the MLP's inner
# numbers; the output projections are cut by inputs, and what they give is summed, as are the gradients of what goes
# into the others. Norms, embedding and output matrix are on every rank. Of adapters the matrix is cut that is on the
# cut side.

STYLES: dict[str, Callable[[], ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
"""By transformers' names: cut by outputs, and by inputs."""
CUT_ADAPTER = {"colwise": "lora_B", "rowwise": "lora_A"}
"""Of the two matrices of an adapter the one that is cut like the matrix that it adds to; the other is on every rank."""
PER_HEAD = "replicated_with_grad_allreduce"
"""A norm of each head: every rank has its weight, and the gradient of its own heads alone."""
LAYERS = "layers.*."


def check_tensor(config: Any, ranks: int, path: object) -> dict[str, str]:
    """That so many ranks can share a model's layers.

    Args:
        config: of transformers.
        path: of the model, for the message.

    Returns:
        How each linear layer of a layer is cut, and which norms are of heads, by transformers' own plan.

    Raises:
        ConfigError: there is no plan, or one with more than these; it leaves out weights between matrices that are cut,
            or names what a layer lacks; heads, heads of keys or the MLP's width do not divide.
    """
    found: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    plan = {name.removeprefix(LAYERS): style for name, style in found.items() if name.startswith(LAYERS)}
    other = {name: style for name, style in plan.items() if style not in (*STYLES, PER_HEAD)}
    why = f"cuts {min(other)} as {other[min(other)]}" if other else "has no plan for it"
    if plan and not other:
        why = next((why for layer in _layers_of(config) if (why := _unplanned(layer, plan))), "")
    if why:
        raise ConfigError(
            f"backend.tensor: {path} ({config.model_type}) cannot be cut: transformers {why}; leave it out"
        )
    heads = config.num_attention_heads
    widths = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "num_global_key_value_heads": getattr(config, "num_global_key_value_heads", None) or 0,
        "intermediate_size": config.intermediate_size,
    }
    for name, width in widths.items():
        if not isinstance(width, int) or width % ranks:
            raise ConfigError(f"backend.tensor={ranks} does not divide {name}={width} of {path}")
    return plan


def _layers_of(config: Any) -> nn.ModuleList:
    """As transformers makes them, without memory for weights."""
    from transformers import AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(config)
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def _unplanned(layer: nn.Module, plan: Mapping[str, str]) -> str:
    """What a plan has not of a layer, or the layer not of it; empty: nothing."""
    there = dict(layer.named_modules())
    if missing := plan.keys() - there.keys():
        return f"names {min(missing)}, which a layer lacks"
    blocks = {name.partition(".")[0] for name in plan}
    weights = (name for name, _ in layer.named_parameters() if name.partition(".")[0] in blocks)
    left = [name for name in weights if name.rpartition(".")[0] not in plan]
    return f"does not say what becomes of {left[0]}" if left else ""


def cut_layers(model: Any, mesh: DeviceMesh, path: object) -> list[nn.Module]:
    """Cut the layers of a model over a mesh of one dimension, without communication: every rank has all of it.

    Args:
        model: a policy, critic or reward model.
        path: for the message.

    Returns:
        Norms of heads, whose gradients a backward pass leaves as parts (`sum_parts`).

    Raises:
        ConfigError: as `check_tensor`.
    """
    plan = check_tensor(model.config, mesh.size(), path)
    inner: nn.Module = getattr(model, "inner", model)
    norms: list[nn.Module] = []
    for layer in next(module for module in inner.modules() if isinstance(module, nn.ModuleList)):
        _plain_linears(layer)
        for module in layer.modules():
            if isinstance(module, Attention):
                module.heads //= mesh.size()
                module.kv_heads //= mesh.size()
        norms += [layer.get_submodule(name) for name, style in plan.items() if style == PER_HEAD]
        cut = {name: style for name, style in plan.items() if style in STYLES}
        for name in [name for name in cut if hasattr(layer.get_submodule(name), "lora_A")]:
            style = cut.pop(name)
            cut |= {f"{name}.base_layer": style, f"{name}.{CUT_ADAPTER[style]}.{ADAPTER}": style}
        parallelize_module(layer, mesh, {name: STYLES[style]() for name, style in cut.items()}, src_data_rank=None)
    return norms


def sum_parts(norms: Iterable[nn.Module], mesh: DeviceMesh, device: torch.device) -> None:
    """Sum the gradients of norms of heads over the ranks that share layers, once before a step: each has those of its
    own heads.

    Args:
        norms: `cut_layers` of a model, after a backward pass.
        device: which the ranks communicate on.
    """
    grads = [weight.grad for norm in norms for weight in norm.parameters() if weight.grad is not None]
    own: list[Tensor] = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    if own:
        every = torch.cat([grad.flatten() for grad in own]).to(device)
        dist.all_reduce(every, group=mesh.get_group())
        for grad, part in zip(own, every.split([grad.numel() for grad in own]), strict=True):
            grad.copy_(part.view_as(grad))


def _plain_linears(layer: nn.Module) -> None:
    """PyTorch's linear layers in the place of ours, which compute several in one product and look for no hooks."""
    for module in list(layer.modules()):
        for name, linear in list(module.named_children()):
            if type(linear) is Linear:
                plain = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
                plain.weight, plain.bias = linear.weight, linear.bias
                setattr(module, name, plain)


# --------------------------------------------------------------------------------------------------------------------
# Log-probs where each rank has the output matrix's rows of a part of the vocabulary.


def parallel_row_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    tokens: Tensor,
    wanted: Tensor,
    first: int,
    temperature: float,
    group: Any,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`atoms.logprobs.row_logprobs` by ranks that have a part of the vocabulary each.

    No rank holds more than its part of the logits, of a chunk of tokens. The ranks exchange three numbers for each
    token, and in the backward pass the gradient of `hidden`.

    Args:
        hidden: [n, H] of the token before each wanted one, row by row; the same on all ranks.
        head_weight: [V', H] rows of this rank's tokens.
        tokens, wanted: [B, T] ids in the whole vocabulary, and which of them; none in the first column. Best on the
            host, as there.
        first: id of this rank's first token.
        group: of the ranks that have one vocabulary together.

    Returns:
        Log-probs and entropies [B, T] in float32, the same on all ranks; 0 where they are not wanted.
    """
    chunk = chunk_tokens or chunk_size(head_weight)
    own, places = (sent(part, hidden.device) for part in (tokens[wanted] - first, wanted.flatten().nonzero()[:, 0]))
    arguments = hidden, head_weight, own, temperature, group, chunk, with_entropy
    logprobs, entropy = _Parallel.apply(*arguments)  # type: ignore[no-untyped-call]  # torch has no types for it

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(wanted.numel()).index_copy(0, places, values).view(wanted.shape)

    return spread(logprobs), spread(entropy) if with_entropy else None


def _logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    logits = head_logits(hidden, head)
    return logits if temperature == 1.0 else logits / temperature


class _Parallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, own: Tensor, temperature: float, group: Any, chunk: int, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        head, found = weight.to(hidden.dtype), []
        here = (own >= 0) & (own < len(weight))
        place = own.clamp(0, len(weight) - 1)
        for part in _parts(len(own), chunk):
            scaled = _logits(hidden[part], head, temperature)
            largest = scaled.amax(1)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            shares = (scaled - largest[:, None]).exp_()
            picked = scaled.gather(1, place[part, None])[:, 0] * here[part]
            sums = torch.stack([shares.sum(1), picked, shares.mul_(scaled).sum(1) if entropy else picked])
            dist.all_reduce(sums, group=group)
            log_norm = largest + sums[0].log()
            found.append(torch.stack([sums[1] - log_norm, log_norm - sums[2] / sums[0], log_norm]))
        logprobs, entropies, log_norms = torch.cat(found, dim=1) if found else hidden.new_zeros(3, 0)
        ctx.save_for_backward(hidden, weight, place, here, log_norms, entropies)
        ctx.settings = temperature, group, chunk, entropy
        return logprobs.clone(), entropies.clone()

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        hidden, weight, place, here, log_norms, entropies = ctx.saved_tensors
        temperature, group, chunk, with_entropy = ctx.settings
        head = weight.to(hidden.dtype)
        trained = ctx.needs_input_grad[1]  # not beneath adapters
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight) if trained else None
        for part in _parts(len(place), chunk):
            logs = _logits(hidden[part], head, temperature).sub_(log_norms[part, None])
            delta = logs.exp()
            if with_entropy:
                delta *= -grad_logprobs[part, None] - grad_entropy[part, None] * (logs + entropies[part, None])
            else:
                delta *= -grad_logprobs[part, None]
            delta.scatter_add_(1, place[part, None], (grad_logprobs[part] * here[part])[:, None])
            delta = delta.div_(temperature).to(hidden.dtype)
            torch.mm(delta, head, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += delta.T @ hidden[part]
        dist.all_reduce(grad_hidden, group=group)
        return grad_hidden, grad_weight, None, None, None, None, None


def whole_rows(weight: Tensor, group: Any) -> Tensor:
    """[V, H] of the rows [V', H] that each rank has, equally many; every rank then takes the gradient of its own."""
    found: Tensor = _WholeRows.apply(weight, group)  # type: ignore[no-untyped-call]  # torch has no types for it
    return found


class _WholeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: Any) -> Tensor:
        ctx.group = group
        found = [torch.empty_like(weight) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, weight.contiguous(), group=group)
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def _parts(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


# Outputs are views where there is no padding; nobody writes into them.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
BY_TOKENS = {"activations", "critic activations", "log-prob chunk", "backward pass", "distributions"}
"""Parts of a run's memory that grow with the tokens of a micro-batch."""


class FSDPBackend(BackgroundCheckpoints):
    """Trains on several ranks, each of which has a shard of every weight, gradient and moment.

    A layer's weights are gathered for the moment in which it computes. Gradients are sums over ranks, as they are over
    micro-batches, so the step is that of one process but for rounding. All methods are collective.

    Args:
        settings: replicas, when gradients are summed, and where shards lie.
        model, train, algorithm, named: as of `BaseBackend`; `collective` are the `Ranks`.
    """

    has_full_weights, retries_out_of_memory = False, False
    """The other ranks wait inside of a layer for one whose memory runs out."""
    part_bytes, bytes_on_their_way = PART_BYTES, 2**28
    """What is gathered at a time for a checkpoint, and for an engine."""
    parts: Sequence[Sequence[tuple[str, Tensor]]] = ()
    """The weights for an engine."""

    def __init__(
        self, settings: FSDPConfig, model: ModelConfig, train: Any, algorithm: Algorithm, **named: Any
    ) -> None:
        self.settings, self.skeletons = settings, dict[RoleName, nn.Module]()
        self.norms = dict[RoleName, list[nn.Module]]()
        """Of heads, of models that are trained with their layers cut."""
        self.ranks: Ranks = named["collective"]
        world, replicas = self.ranks.world, settings.replicas
        settings.check_count(world)
        self.ranks_per_row = settings.ranks_per_row
        self.sharing = self.ranks.neighbours(settings.sequence) if settings.sequence > 1 else None
        sizes = {"replicate": replicas, "shard": world // replicas // settings.tensor, "tensor": settings.tensor}
        names = tuple(name for name, size in sizes.items() if size > 1 or name == "shard")
        shape = tuple(sizes[name] for name in names)
        self.mesh = init_device_mesh(torch.device(named["device"]).type, shape, mesh_dim_names=names)
        super().__init__(model, train, algorithm, **named)
        self.seed = named.get("seed", 0)
        torch.manual_seed(self.seed + 1_000_003 * self.collective.rank)  # of dropout, after equal weights

    @staticmethod
    def check(settings: FSDPConfig, model: ModelConfig, shapes: Mapping[str, Any], device: str) -> None:
        """As of `RankedKind`."""
        if settings.sequence > 1:
            kind = device.partition(":")[0]
            if not packs_rows(model.pack_rows, kind, compute_dtype(model.dtype, kind)):
                raise ConfigError(
                    f"backend.sequence={settings.sequence} cuts rows that lie end to end: set model.pack_rows"
                )
            for path, shape in shapes.items():
                check_heads(shape, settings.sequence, path)
        if settings.tensor > 1:
            if model.quantization is not None:
                raise ConfigError("backend.tensor: a quantised base is not cut; leave it out, or model.quantization")
            for path, shape in shapes.items():
                check_tensor(shape, settings.tensor, path)
        if settings.cpu_offload and device == "cpu":
            raise ConfigError("backend.cpu_offload: on a CPU all is in its memory already; leave it out")

    @staticmethod
    def memory(settings: FSDPConfig, parts: Mapping[str, int], sizes: Sizes, ranks: int) -> dict[str, int]:
        """As of `RankedKind`: a share of what lies in shards, and what is gathered for a moment.

        Gathered are the embedding and the output matrix, with their gradients before they are summed, and of the layers
        two (one computes, the next arrives), as they are kept, and the gradients of one, in the dtype of computation,
        beside those of the layer after it, which are being summed in float32. Weights on their way to the engine are in
        the CPU's memory of rank 0.
        """
        shape, total, trained, compute = sizes.shape, sizes.total, sizes.trained, sizes.compute
        shards = ranks // settings.replicas
        more = uncut(shape) / total * (settings.tensor - 1)  # in the shards of ranks / tensor ranks alone
        found = {**parts} | {name: math.ceil(parts[name] * (1 + more) / shards) for name in SHARDED if name in parts}
        once = trained * (1 + more) / settings.tensor  # of what is trained, in one copy of what ranks share
        if trained < total:
            once = adapters_of_rank(shape, trained, settings.tensor)
            share = once * settings.tensor / trained / shards
            found |= {name: math.ceil(parts[name] * share) for name in ("optimizer", "gradients")}
        for name in BY_TOKENS & found.keys():
            found[name] //= settings.sequence
        if settings.reduce == "update":
            found["gradients"] += math.ceil(once * FLOAT32)
        layer = (total - ends(shape)) // shape.num_hidden_layers // settings.tensor
        found["rounded weights"] = found["fresh gradients"] = 0
        whole = trained == total
        found["gathered embedding"] = ends(shape) * compute * (2 if whole else 1)
        found["gathered layers"] = layer * (3 * compute + FLOAT32) if whole else math.ceil(2 * layer * sizes.kept)
        found["backward pass"] //= settings.tensor
        if settings.cpu_offload:
            found[BESIDE] = sum(found[name] for name in SHARDED if name in found)
            found |= {name: 0 for name in SHARDED if name in found}
        return found

    def load_model(self, name: RoleName, path: str, config: ModelConfig) -> nn.Module:
        """A role's model, cut into shards; of the ranks of a machine one at a time has all of it."""
        model: Any = self.ranks.in_turns(partial(self._load, name, path, config))
        if self.sharing is not None:
            self._share(model, path)
        return cast(nn.Module, model)

    def _share(self, model: Any, path: str) -> None:
        """Have neighbours share the rows of a micro-batch.

        Raises:
            ConfigError: the model cannot.
        """
        shape = model.config
        if not model.shares_prompts:
            raise ConfigError(
                f"backend.sequence={self.ranks_per_row}: {path} ({shape.model_type}) would take padded rows; on a GPU it "
                "takes model.dtype=bfloat16; leave out model.pack_rows=false"
            )
        check_heads(shape, self.ranks_per_row, path)
        model.sharing = self.sharing

    def _load(self, name: RoleName, path: str, config: ModelConfig) -> nn.Module:
        compute = compute_dtype(config.dtype, self.device)
        trained_whole = name in TRAINED and config.lora is None
        dtype = torch.float32 if trained_whole else compute
        model = load_role(name, path, config, torch.device("cpu"), dtype)
        if name in TRAINED:
            self.skeletons[name] = without_weights(model)
        if self.settings.tensor > 1:
            norms = cut_layers(model, self.mesh["tensor"], path)
            self.norms |= {name: norms} if name in TRAINED else {}
        rounded = compute if trained_whole and compute != torch.float32 else None
        self._shard(model, MixedPrecisionPolicy(rounded, torch.float32 if rounded else None, cast_forward_inputs=False))
        return model

    def _shard(self, model: nn.Module, precision: MixedPrecisionPolicy) -> None:
        offload = CPUOffloadPolicy() if self.settings.cpu_offload else OffloadPolicy()
        lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module))
        mesh = self.mesh["shard"] if self.settings.tensor > 1 else self.mesh
        for unit in (*next(lists, ()), model):
            fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload)
        for unit in model.modules():
            if isinstance(unit, FSDPModule):  # neither setting reaches the units within
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)
        cast(FSDPModule, model).set_reduce_scatter_unused_params(True)
        for entry in ("scores",) if isinstance(model, HFScalar) else ("forward_hidden", "stream_states"):
            register_fsdp_forward_method(model, entry)

    def before_backward(self, last: bool) -> None:
        """Where gradients are summed once in an update, that is after its last micro-batch."""
        if self.settings.reduce == "update":
            for name in self.trained:
                self.roles[name].model.set_requires_gradient_sync(last)

    def forward_only(self, rows: RowBatch, needs: Collection[ModelInput]) -> RowBatch:
        found = super().forward_only(rows, needs)
        self._reshard()
        return found

    def gradients(self, batch: TrainingBatch, algorithm: Algorithm, of: Collection[RoleName] | None = None) -> Metrics:
        found = super().gradients(batch, algorithm, of)
        self._reshard()
        return found

    def _accumulate(self, what: LossInputs, split: list[Tensor]) -> list[Metrics]:
        if self.settings.tensor == 1:
            return super()._accumulate(what, split)
        # Ranks that share layers drop the same of what both have, whatever else has drawn in a process.
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(hash((self.seed, self.updates, self.collective.rank // self.settings.tensor)))
            parts = super()._accumulate(what, split)
        for norms in self.norms.values():
            sum_parts(norms, self.mesh["tensor"], self.device)
        return parts

    def _reshard(self) -> None:
        """Let go of what forward passes gathered last: embedding, final norm and output matrix."""
        for role in self.roles.values():
            role.model.reshard()

    def gathered(self, name: RoleName, adapters_alone: bool = False) -> nn.Module | None:
        """A role's model with all of its weights in the CPU's memory of rank 0; None on other ranks."""
        weights = self.roles[name].model.named_parameters(remove_duplicate=False)
        wanted = [(key, weight) for key, weight in weights if not adapters_alone or is_adapter(key)]
        found = gathered(wanted, self.collective.rank == 0)
        if self.collective.rank:
            return None
        if adapters_alone:  # whole on a rank already, they are those that the next step changes
            found = kept(found)
        model = copy.deepcopy(self.skeletons[name])
        model.load_state_dict(found, assign=True, strict=False)
        return model

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        """The policy's weights for an engine, on rank 0; others have none.

        They are gathered as all ranks read them, but for those beneath adapters, which are sent once, and those of the
        families of transformers that publish others than they compute with.
        """
        name = next(iter(self.roles))
        skeleton: Any = self.skeletons[name]
        weights = self.roles[name].model.named_parameters(remove_duplicate=False)
        own = {key.removeprefix("inner."): weight for key, weight in weights}
        outline = [] if has_adapters(skeleton) else list(model_weights(skeleton))
        if outline and all(key in own for key, _ in outline):
            self.parts = parts_of([(key, own[key]) for key, _ in outline], self.bytes_on_their_way)
            tensors = (pair for number in range(len(self.parts)) for pair in self.weight_part(number))
            return WeightUpdate(version, tensors, outline=outline)
        model = self.gathered(name, adapters_alone)
        if model is None:
            return WeightUpdate(version)
        policy: Any = model
        weights = () if adapters_alone else list(model_weights(policy))
        return WeightUpdate(version, weights, adapter_weights(policy))

    @torch.inference_mode(False)
    def weight_part(self, number: int) -> list[tuple[str, Tensor]]:
        """One of `parts` of the last `weight_update`, gathered; empty on other ranks than 0."""
        return list(gathered(self.parts[number], self.collective.rank == 0).items())

    def save(self, folder: Path) -> Callable[[], None]:
        """Write the models and the tokenizer for transformers, and beside them, in shards, what it takes to go on
        exactly, on any number of ranks: from copies, on a thread of each rank, for which `saved` waits."""
        self.saved()
        jobs: list[Job] = [shard_job(self.trained, self.collective, self.updates, folder)]
        for name in self.trained:
            model, place = self.roles[name].model, folder / role_prefix(name)
            if has_adapters(model):
                if (found := self.gathered(name, adapters_alone=True)) is not None:
                    jobs.append(partial(save_role, name, found, self.tokenizer, folder))
                continue
            jobs += model_jobs(model, self.skeletons[name], self.tokenizer, self.collective, place, self.part_bytes)
        return self.write_in_background(folder, jobs)

    def load(self, folder: Path) -> None:
        """Continue from `save`: exactly on the same number of ranks, and within rounding on another.

        Raises:
            ConfigError: the folder holds no such state, or it is another model's.
        """
        self.updates = load_shards(self.trained, self.collective, folder)


def without_weights(model: nn.Module) -> nn.Module:
    """A copy whose parameters have shapes, and no storage.

    Example:
        >>> [str(weight.device) for weight in without_weights(nn.Linear(2, 2)).parameters()]
        ['meta', 'meta']
    """
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, cast(dict[int, Any], memo))
