"""The Megatron back end (NVIDIA's megatron-core): tensor, pipeline and expert parallelism.

`model.Stage` is the model of a rank, `layout` converts weights from and to Hugging Face layout, and
`optimizer` has the distributed optimizer.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from atomrl.backends.base import LossInputs
from atomrl.backends.checkpoints import BackgroundCheckpoints, Job, file_name
from atomrl.backends.fsdp import without_weights
from atomrl.backends.group import Ranks
from atomrl.backends.megatron.gathering import WEIGHT, Shapes, on_first_rank, parts_from, shares
from atomrl.backends.megatron.layout import Key
from atomrl.backends.megatron.lora import check_adapters
from atomrl.backends.megatron.model import Stage, stage_weights
from atomrl.backends.megatron.on_cpu import on_device
from atomrl.backends.megatron.optimizer import MegatronOptimizer
from atomrl.backends.megatron.shapes import MIXTURE, check_shape
from atomrl.backends.roles import SOURCES, TRAINED, RoleName, load_role, role_prefix, save_role, sources
from atomrl.backends.shards import (
    MOMENTS,
    ShardReader,
    check_shapes,
    copies_on_cpu,
    counts_job,
    load_counts,
    set_random_state,
)
from atomrl.batches import RowBatch, TrainingBatch, batch_to_device
from atomrl.common.metrics import Metrics
from atomrl.config import ConfigError, MegatronConfig, ModelConfig
from atomrl.models.adapted import ADAPTER
from atomrl.models.loading import compute_dtype, load_transformers, model_config_only, model_weights, save_settings
from atomrl.models.lora import adapter_weights, has_adapters, is_adapter
from atomrl.models.memory import FLOAT32, SHARDED, Sizes, adapters_of_rank, ends, expert_parameters, layer_count
from atomrl.models.scalar import ScalarModel, scalar_settings
from atomrl.models.shapes import text_config
from atomrl.models.stream import Stream, packs_rows
from atomrl.models.transformers_model import HFModel
from atomrl.protocols import Adapter, Algorithm, LossOutput, ModelOutputs, WeightUpdate
from atomrl.tracking.checkpoint_format import SHARDS, STATE_FOLDER

_groups: list[Any] = []
"""The ranks and sizes that Megatron's process groups were created for: a process has one set of them."""
SHARED = {"activations", "critic activations", "log-prob chunk", "backward pass", "fresh gradients"}
"""Parts of the memory estimate that are divided among the ranks of a tensor-parallel group."""


class LoadedPart(NamedTuple):
    """This rank's part of a loaded model's weights, with shapes and adapters of the full model."""

    parts: Mapping[Key, Tensor]
    shapes: Shapes
    adapters: Mapping[str, Adapter]
    skeleton: Any
    """The full model on the meta device."""


class MegatronBackend(BackgroundCheckpoints):
    """Trains on several ranks; each has a part of every layer (`tensor`), some layers (`pipeline`), or some experts.

    Rows are distributed over the replicas of the model. Gradients are summed over replicas and micro-batches, so an
    update equals that of one process up to rounding. All methods are collective.

    Args:
        settings: config section `backend`.
        model, train, algorithm, named: arguments of `BaseBackend`; `collective` must be `Ranks`.

    Raises:
        ConfigError: Megatron does not support the model or the config.
    """

    has_full_weights = retries_out_of_memory = supports_images = False

    @staticmethod
    def check(settings: MegatronConfig, model: ModelConfig, shapes: Mapping[str, Any], device: str) -> None:
        """Raise ConfigError if these models cannot be trained with these settings (`RankedKind.check`)."""
        check_config(model)
        for path, shape in shapes.items():
            check_shape(shape, settings, path)

    @staticmethod
    def memory(settings: MegatronConfig, parts: Mapping[str, int], sizes: Sizes, ranks: int) -> dict[str, int]:
        """Estimate the memory of a rank of the first stage (`RankedKind.memory`).

        Gradients are float32. Float32 master weights and moments are sharded over replicas. Adapters are float32.
        Activations are divided among the ranks that share layers; the first of P stages holds those of P micro-batches.
        """
        shape, total, trained, compute = sizes.shape, sizes.total, sizes.trained, sizes.compute
        tensor, pipeline, expert = settings.tensor, settings.pipeline, settings.expert
        text = text_config(shape)
        embedding = text.vocab_size * text.hidden_size
        experts = layer_count(shape) * expert_parameters(shape)
        # Parameters of this rank: dense ones, and those of experts; then their share of one replica.
        dense = ((total - ends(shape) - experts) // pipeline + (embedding if pipeline > 1 else ends(shape))) // tensor
        mixed = experts // (pipeline * expert)
        estimate = {name: size * (dense + mixed) // total if name in SHARDED else size for name, size in parts.items()}
        share = dense * tensor * pipeline // ranks + mixed * expert * pipeline // ranks
        estimate["trainer weights"] = (dense + mixed) * compute
        estimate["rounded weights"] = share * FLOAT32 if compute != FLOAT32 and trained == total else 0
        if trained != total:
            adapters = adapters_of_rank(shape, trained, tensor) // pipeline
            share = adapters * tensor * pipeline // ranks
            estimate["trainer weights"] += adapters * FLOAT32
            estimate["gradients"] = adapters * FLOAT32
        estimate["optimizer"] = parts["optimizer"] * share // trained
        for name in SHARED & estimate.keys():
            estimate[name] //= tensor
        return estimate

    def __init__(
        self, settings: MegatronConfig, model: ModelConfig, train: Any, algorithm: Algorithm, **named: Any
    ) -> None:
        check_config(model)
        self.settings, self.skeletons, self.wrapped = settings, dict[RoleName, Any](), dict[RoleName, Any]()
        self.shapes = dict[RoleName, Shapes]()
        self.loaded: Mapping[Key, Tensor] = {}
        """This rank's parts of a loaded model's weights, until the optimizer has copied them."""
        self.ranks: Ranks = named["collective"]
        self.ranks_per_row = settings.ranks_per_row
        settings.check_count(self.ranks.world)
        create_groups(self.ranks, settings)
        super().__init__(model, train, algorithm, **named)
        # Dropout of adapters: it differs on all ranks, also on those that share a layer, which have different tokens.
        torch.manual_seed(named.get("seed", 0) + 1_000_003 * self.ranks.rank)

    @property
    def is_replica_leader(self) -> bool:
        """True on the first rank of the last pipeline stage, which has the outputs."""
        return self.ranks.rank % self.ranks_per_row == self.ranks_per_row - self.settings.tensor

    def load_model(self, name: RoleName, path: str, config: ModelConfig) -> nn.Module:
        """Load this rank's part of a role's model; one rank per machine at a time has the full model in memory."""
        loaded = self.ranks.in_turns(partial(self._load_part, name, path, config))
        trained, scalar = name in TRAINED, isinstance(loaded.skeleton, ScalarModel)
        dtype, device = compute_dtype(config.dtype, self.device), self.device
        checkpointing = trained and config.checkpoints_layers
        dropout, settings = config.lora.dropout if config.lora else 0.0, self.settings
        packed = packs_rows(config.pack_rows, device.type, dtype)
        shape, adapters = loaded.skeleton.config, loaded.adapters
        with on_device(self.device):
            options = settings, device, dtype, checkpointing, packed, adapters, dropout
            stage = Stage(shape, loaded.parts, scalar, *options)
            if trained:
                self.skeletons[name], self.shapes[name], self.loaded = loaded.skeleton, loaded.shapes, loaded.parts
                self.wrapped[name] = wrap(stage, dtype)
        if not trained:
            stage.requires_grad_(False)
        return stage.train(trained)

    def _load_part(self, name: RoleName, path: str, config: ModelConfig) -> LoadedPart:
        model = self._load_full(name, path, config)
        adapters = adapter_weights(model) if has_adapters(model) else {}
        weights = dict(model_weights(model)) | named_adapters(adapters)
        shapes = {key: tuple(weight.shape) for key, weight in weights.items()}
        parts = stage_weights(model.config, weights, self.settings)
        return LoadedPart(parts, shapes, adapters, without_weights(model))

    def _load_full(self, name: RoleName, path: str, config: ModelConfig) -> Any:
        if name == "reward_model" and config.lora is not None:
            raise ConfigError("model.lora: Megatron trains reward models without adapters; leave it out, or use fsdp")
        full = name in TRAINED and (name != "policy" or config.lora is None)
        dtype = torch.float32 if full else compute_dtype(config.dtype, self.device)
        shape = model_config_only(path, config.trust_remote_code)
        check_shape(shape, self.settings, path)
        if shape.model_type != MIXTURE:
            return load_role(name, path, config, torch.device("cpu"), dtype)
        if name in ("critic", "reward_model"):
            raise ConfigError(
                f"backend.type=megatron: a {name.replace('_', ' ')} with experts ({path}) is not supported; use fsdp"
            )
        return HFModel(load_transformers(path, dtype, config.trust_remote_code))

    def make_optimizer(self, name: RoleName, model: nn.Module, rate: float, total_updates: int) -> MegatronOptimizer:
        with on_device(self.device):
            optimizer = MegatronOptimizer(TRAINED[name], self.wrapped[name], self.train, rate, total_updates)
        parts, self.loaded = self.loaded, {}
        for key, weight in cast(Stage, model).trained_weights().items():  # float32 masters of rounded weights
            optimizer.set(weight, WEIGHT, parts[key])
        return optimizer

    def close(self) -> None:
        self.wrapped = {}
        super().close()

    def forward(self, micro: RowBatch, names: Collection[str]) -> dict[str, Any]:
        """Return the named outputs of all roles for a micro-batch, without pipeline parallelism."""
        named: dict[str, Any] = {}
        for name, requested in sources(names, self.roles).items():
            role = self.roles[name]
            grad = nullcontext() if role.optimizer else torch.no_grad()
            with grad, self._adapters(name), on_device(self.device):
                stage: Stage = role.model
                stream = stage.stream(micro, requested.values())
                states = self._module(name)(micro, stream)
                outputs = stage.outputs(states, micro, stream, requested.values(), self.temperature)
            named |= {key: outputs[output] for key, output in requested.items()}
        return named

    def _module(self, name: RoleName) -> Any:
        """Return the module that Megatron calls: the stage, wrapped in its DDP if it is trained."""
        return self.wrapped.get(name, self.roles[name].model)

    def _adapters(self, name: RoleName) -> AbstractContextManager[None]:
        """Disable adapters inside the block if the role is the reference of a policy with adapters."""
        role = self.roles[name]
        return role.model.adapters.disabled() if role.without_adapters else nullcontext()

    def _forward_outputs(
        self, rows: RowBatch, split: list[Tensor], names: Collection[str]
    ) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        if self.settings.pipeline == 1:
            yield from super()._forward_outputs(rows, split, names)
            return
        micros = [self._micro(rows, index) for index in split]
        yield from zip(split, self._frozen_outputs(micros, names), strict=True)

    @torch.no_grad()
    def _frozen_outputs(self, micros: Sequence[RowBatch], names: Collection[str]) -> list[dict[str, Any]]:
        """Run the pipeline without gradient; return the named outputs of each micro-batch, on the last stage."""
        named: list[dict[str, Any]] = [{} for _ in micros]
        for name, requested in sources(names, self.roles).items():

            def store(number: int, outputs: dict[str, Any], requested: Any = requested) -> Tensor:
                named[number] |= {key: outputs[output] for key, output in requested.items()}
                return torch.zeros((), device=self.device)

            self._run_pipeline(name, micros, requested.values(), store, forward_only=True)
        return named

    def _accumulate(self, inputs: LossInputs, split: list[Tensor]) -> list[Metrics]:
        accumulate = super()._accumulate if self.settings.pipeline == 1 else self._accumulate_in_pipeline
        with on_device(self.device):
            metrics = accumulate(inputs, split)
        self._reduce_gradients()
        return metrics

    def _accumulate_in_pipeline(self, inputs: LossInputs, split: list[Tensor]) -> list[Metrics]:
        """Run the pipeline forward and backward once for each trained role; return the metrics of each micro-batch.

        A pipeline runs one model. So policy and critic each get the part of the loss that depends on their outputs.
        """
        batch, algorithm, recorder = inputs.batch, inputs.algorithm, inputs.recorder
        micros = [self._micro(batch, index) for index in split]
        trained = [name for name in inputs.outputs if SOURCES[name][0] in self.trained]
        frozen = self._frozen_outputs(micros, [name for name in inputs.outputs if name not in trained])
        metrics: list[Metrics] = []
        to_record: list[tuple[Tensor, TrainingBatch, ModelOutputs, LossOutput]] = []
        for name, requested in sources(trained, self.roles).items():

            def loss(number: int, outputs: dict[str, Any], name: RoleName = name, requested: Any = requested) -> Tensor:
                others = frozen[number] if name == "policy" else {}
                named = ModelOutputs(**{key: outputs[output] for key, output in requested.items()}, **others)
                micro, index = batch_to_device(micros[number], self.device), split[number]
                if recorder and name == "policy":
                    micro = recorder.before_loss(micro, named)
                result = algorithm.loss(named, micro)
                if recorder and name == "policy":
                    to_record.append((index if self.is_replica_leader else index[:0], micro, named, result))
                if len(index) and self.is_replica_leader:
                    metrics.append(result.metrics)
                return result.loss

            self._run_pipeline(name, micros, requested.values(), loss)
        for recorded in to_record:
            assert recorder is not None
            recorder.after_backward(*recorded)
        return metrics

    def _run_pipeline(self, name: RoleName, micros: Any, wanted: Any, loss: Any, forward_only: bool = False) -> None:
        """Run the micro-batches of a role through the pipeline stages, forward and backward.

        Args:
            loss: called on the last stage with number and outputs of a micro-batch; returns its loss.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        stage: Stage = self.roles[name].model

        def calculate(number: int, stream: Stream, states: Tensor) -> tuple[Tensor, Tensor, None]:
            outputs = stage.outputs(states, micros[number], stream, wanted, self.temperature)
            return loss(number, outputs), torch.zeros((), dtype=torch.int, device=self.device), None

        def forward(numbers: Iterator[int], model: Any) -> tuple[Tensor, Any]:
            number = next(numbers)
            stream = stage.stream(micros[number], wanted)
            return model(micros[number], stream), partial(calculate, number, stream)

        with self._adapters(name), on_device(self.device):
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(range(len(micros))),
                model=[self._module(name)],
                num_microbatches=len(micros),
                seq_length=1,  # unused: with variable lengths, stages send each other the shapes
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _reduce_gradients(self) -> None:
        """Reduce gradients over replicas, and those of weights that ranks of a replica share (embeddings, norms)."""
        from megatron.core.distributed import finalize_model_grads

        with on_device(self.device):
            for model in self.wrapped.values():
                finalize_model_grads([model])

    def gradients(self, batch: TrainingBatch, algorithm: Algorithm, of: Collection[RoleName] | None = None) -> Metrics:
        metrics = super().gradients(batch, algorithm, of)
        stage: Stage = self.policy.model
        return metrics if stage.balance is None else metrics | stage.balance.metrics()

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        """Gather the policy's weights for an engine on rank 0, adapters separately; an empty update on the others."""
        name = next(iter(self.roles))
        weights = on_first_rank(self.roles[name].model, self.ranks, self.shapes[name], adapters_alone)
        if weights is None:
            return WeightUpdate(version)
        adapters: dict[str, Adapter] = {}
        for key, adapter in adapter_weights(self.skeletons[name]).items():
            a, b = (weights.pop(part) for part in named_adapters({key: adapter}))
            adapters[key] = Adapter(a, b, adapter.scale)
        return WeightUpdate(version, list(weights.items()), adapters)

    def save(self, folder: Path) -> Callable[[], None]:
        """Start writing models and tokenizer in Hugging Face layout, and the state for an exact resume.

        Each rank writes its share from copies, on a thread; `saved` waits for it.
        """
        self.saved()
        jobs: list[Job] = []
        steps: dict[RoleName, dict[str, int]] = {}
        for name, optimizer in self.trained.items():
            assert isinstance(optimizer, MegatronOptimizer)
            state: dict[str, Tensor] = {}
            stage: Stage = self.roles[name].model
            for share in shares(stage, stage.trained_weights(), optimizer.gather, spread=True):
                state |= copies_on_cpu(share)
            jobs.append(partial(self._write_state, name, state, folder))
            steps[name] = dict.fromkeys(self._trained_shapes(name) if optimizer.steps else (), optimizer.steps)
            if not has_adapters(self.skeletons[name]):
                jobs.append(partial(self._write_model, name, state, folder))
            elif (adapters := on_first_rank(stage, self.ranks, self.shapes[name], adapters_alone=True)) is not None:
                model = copy.deepcopy(self.skeletons[name])
                model.load_state_dict(copies_on_cpu(adapters), assign=True, strict=False)
                jobs.append(partial(save_role, name, model, self.tokenizer, folder))
        jobs.append(counts_job(self.trained, steps, self.ranks, self.updates, folder))
        return self.write_in_background(folder, jobs)

    def _trained_shapes(self, name: RoleName) -> Shapes:
        """Return the shapes of the trained weights: of the adapters, if there are any."""
        shapes = self.shapes[name]
        return {key: shape for key, shape in shapes.items() if is_adapter(key)} or shapes

    def _write_state(self, name: RoleName, state: Mapping[str, Tensor], folder: Path) -> None:
        """Write this rank's share of a role's weights and moments."""
        if state:
            tensors = {f"{name}/{key}": tensor for key, tensor in state.items()}
            save_file(tensors, folder / STATE_FOLDER / SHARDS / f"{name}_{self.ranks.rank}.safetensors")

    def _write_model(self, name: RoleName, state: Mapping[str, Tensor], folder: Path) -> None:
        """Write this rank's file of a role's model."""
        place, rank, world = folder / role_prefix(name), self.ranks.rank, self.ranks.world
        place.mkdir(parents=True, exist_ok=True)
        skeleton, dtype = self.skeletons[name], self.roles[name].model.config.params_dtype
        weights = {key.partition("/")[2]: tensor.to(dtype) for key, tensor in state.items() if key.startswith(WEIGHT)}
        if weights:
            save_file(weights, place / file_name(rank, world), metadata={"format": "pt"})
        if rank == 0:
            settings = scalar_settings(skeleton, self.tokenizer) if isinstance(skeleton, ScalarModel) else {}
            save_settings(skeleton, self.tokenizer, place, dtype, **settings)

    def load(self, folder: Path) -> None:
        """Resume from `save`: exactly with the same parallel sizes, within rounding with others.

        Raises:
            ConfigError: the folder has no such state, or that of another model.
        """
        saved = load_counts(self.trained, folder)
        kinds = {name: [WEIGHT, *(MOMENTS if saved.steps[name] else ())] for name in self.trained}
        expected = {
            f"{name}/{kind}/{key}": shape
            for name in self.trained
            for kind in kinds[name]
            for key, shape in self._trained_shapes(name).items()
        }
        reader = ShardReader(folder)
        check_shapes(expected, reader)
        for name, optimizer in self.trained.items():
            assert isinstance(optimizer, MegatronOptimizer)
            optimizer.reset(max(saved.steps[name].values(), default=0))
            for kind in kinds[name]:
                for weight, part in parts_from(reader, name, kind, self.roles[name].model, self.shapes[name]):
                    optimizer.set(weight, kind, part)
        set_random_state(saved, self.ranks, folder)
        self.updates = saved.updates


def check_config(model: ModelConfig) -> None:
    """Raise ConfigError if the config has a setting that Megatron lacks, or megatron-core is not installed."""
    check_adapters(model)
    try:
        import megatron.core  # noqa: F401
    except ImportError:
        raise ConfigError("backend.type=megatron needs megatron-core: pip install 'atomrl[megatron]'") from None


def named_adapters(adapters: Mapping[str, Adapter]) -> dict[str, Tensor]:
    """Return the adapters' matrices, A before B, by their parameter names in an unsharded model."""
    matrices: dict[str, Tensor] = {}
    for name, adapter in adapters.items():
        layer = name.removesuffix(".weight")
        matrices |= {f"{layer}.lora_A.{ADAPTER}.weight": adapter.a, f"{layer}.lora_B.{ADAPTER}.weight": adapter.b}
    return matrices


def create_groups(ranks: Ranks, settings: MegatronConfig) -> None:
    """Create Megatron's process groups (tensor, pipeline, expert and data parallel), once per process."""
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401  # slow imports, done before ranks wait for each other
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    ranks.barrier()

    initialize_rng_tracker(inference_rng_tracker=True)  # dropout is 0: no random states to track
    wanted = [ranks, settings.tensor, settings.pipeline, settings.expert]
    if _groups == wanted:
        return
    parallel_state.destroy_model_parallel()
    with ranks.creating_groups():
        parallel_state.initialize_model_parallel(
            settings.tensor,
            settings.pipeline,
            expert_model_parallel_size=settings.expert,
            expert_tensor_parallel_size=settings.tensor if settings.expert == 1 else 1,
            order="tp-cp-ep-pp-dp",  # data parallel last: consecutive ranks form one replica
            create_gloo_process_groups=False,
            distributed_timeout_minutes=ranks.timeout_s / 60,
        )
    _groups[:] = wanted


def wrap(stage: Stage, dtype: torch.dtype) -> Any:
    """Wrap a stage in Megatron's DDP: gradients in float32, reduced over replicas."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=dtype != torch.float32, use_distributed_optimizer=True, average_in_collective=False
    )
    return DistributedDataParallel(stage.module.config, settings, stage)
