"""The back end on NVIDIA's megatron-core: layers and their matrices cut over ranks."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from atomrl.backends import megatron_plan
from atomrl.backends.base import LossInputs
from atomrl.backends.checkpoints import (
    MOMENTS,
    Job,
    ShardReader,
    BackgroundCheckpoints,
    check_shapes,
    counts_job,
    file_name,
    kept,
    read_counts,
    set_random_state,
)
from atomrl.backends.fsdp import without_weights
from atomrl.backends.group import Ranks
from atomrl.backends.megatron_layout import MIXTURE, Key, check_shape
from atomrl.backends.megatron_model import Stage, on_device, stage_weights
from atomrl.backends.megatron_optimizer import WEIGHT, MegatronOptimizer, Shapes, on_first_rank, parts_from, shares
from atomrl.backends.roles import (
    SHARDS,
    SOURCES,
    STATE_FOLDER,
    TRAINED,
    RoleName,
    load_role,
    role_prefix,
    save_role,
    sources,
)
from atomrl.batches import RowBatch, TrainingBatch, moved
from atomrl.common.metrics import Metrics
from atomrl.config import ConfigError, MegatronConfig, ModelConfig
from atomrl.models.adapted import ADAPTER
from atomrl.models.attention import Stream, packs_rows
from atomrl.models.loading import compute_dtype, load_transformers, model_config_only, model_weights, save_settings
from atomrl.models.lora import adapter_weights, has_adapters, is_adapter
from atomrl.models.reward_model import ScalarModel, scalar_settings
from atomrl.models.transformers_model import HFModel
from atomrl.protocols import Adapter, Algorithm, ModelOutputs, WeightUpdate

_groups: list[Any] = []
"""The ranks that Megatron's groups were made for, and how: it has one set of them in a process."""


class Loaded(NamedTuple):
    """What a rank keeps of a model that it had whole."""

    parts: Mapping[Key, Tensor]
    shapes: Shapes
    adapted: Mapping[str, Adapter]
    skeleton: Any


class MegatronBackend(BackgroundCheckpoints):
    """Trains on several ranks, each of which has a part of every layer (`tensor`), or some layers (`pipeline`).

    Rows are spread over the copies of the model that there are. Gradients are sums, as they are over micro-batches, so
    the step is that of one process but for rounding. All methods are collective.

    Args:
        settings: how many ranks share a layer, and how many stages there are.
        model, train, algorithm, named: as of `BaseBackend`; `collective` are the `Ranks`.

    Raises:
        ConfigError: the model, or what the config asks for, cannot be on Megatron.
    """

    has_full_weights, retries_out_of_memory = False, False
    check, memory = staticmethod(megatron_plan.check), staticmethod(megatron_plan.memory)

    def __init__(
        self, settings: MegatronConfig, model: ModelConfig, train: Any, algorithm: Algorithm, **named: Any
    ) -> None:
        megatron_plan.check_config(model)
        self.settings, self.skeletons, self.wrapped = settings, dict[RoleName, Any](), dict[RoleName, Any]()
        self.shapes = dict[RoleName, Shapes]()
        self.loaded: Mapping[Key, Tensor] = {}
        """This rank's parts of the weights that a model was loaded from, until it has an optimizer."""
        self.ranks: Ranks = named["collective"]
        self.ranks_per_row = settings.ranks_per_row
        settings.check_count(self.ranks.world)
        meet(self.ranks, settings)
        super().__init__(model, train, algorithm, **named)
        # Of adapters' dropout: no two ranks see the same numbers, those that share a layer included.
        torch.manual_seed(named.get("seed", 0) + 1_000_003 * self.ranks.rank)

    @property
    def is_replica_leader(self) -> bool:
        """The first rank of the last stage: outputs are there."""
        return self.ranks.rank % self.ranks_per_row == self.ranks_per_row - self.settings.tensor

    @property
    def _is_last(self) -> bool:
        return self.ranks.rank % self.ranks_per_row >= self.ranks_per_row - self.settings.tensor

    def load_model(self, name: RoleName, path: str, config: ModelConfig) -> nn.Module:
        """This rank's part of a role's model; of the ranks of a machine one at a time has all of it."""
        found = self.ranks.in_turns(partial(self._part_of, name, path, config))
        trained, scalar = name in TRAINED, isinstance(found.skeleton, ScalarModel)
        dtype, device = compute_dtype(config.dtype, self.device), self.device
        checkpointing = trained and config.checkpoints_layers
        dropout, settings = config.lora.dropout if config.lora else 0.0, self.settings
        packed = packs_rows(config.pack_rows, device.type, dtype)
        shape, adapted = found.skeleton.config, found.adapted
        with on_device(self.device):
            stage = Stage(shape, found.parts, scalar, settings, device, dtype, checkpointing, packed, adapted, dropout)
            if trained:
                self.skeletons[name], self.shapes[name], self.loaded = found.skeleton, found.shapes, found.parts
                self.wrapped[name] = wrap(stage, dtype)
        if not trained:
            stage.requires_grad_(False)
        return stage.train(trained)

    def _part_of(self, name: RoleName, path: str, config: ModelConfig) -> Loaded:
        whole = self._load(name, path, config)
        adapted = adapter_weights(whole) if has_adapters(whole) else {}
        weights = dict(model_weights(whole)) | named_adapters(adapted)
        shapes = {key: tuple(weight.shape) for key, weight in weights.items()}
        return Loaded(stage_weights(whole.config, weights, self.settings), shapes, adapted, without_weights(whole))

    def _load(self, name: RoleName, path: str, config: ModelConfig) -> Any:
        trained_whole = name in TRAINED and (name != "policy" or config.lora is None)
        dtype = torch.float32 if trained_whole else compute_dtype(config.dtype, self.device)
        shape = model_config_only(path, config.trust_remote_code)
        check_shape(shape, self.settings, path)
        if shape.model_type != MIXTURE:
            return load_role(name, path, config, torch.device("cpu"), dtype)
        if name in ("critic", "reward_model"):
            raise ConfigError(f"backend.type=megatron: a {name.replace('_', ' ')} with experts, {path}; take fsdp")
        return HFModel(load_transformers(path, dtype, config.trust_remote_code))

    def make_optimizer(self, name: RoleName, model: nn.Module, rate: float, total_updates: int) -> MegatronOptimizer:
        with on_device(self.device):
            optimizer = MegatronOptimizer(TRAINED[name], self.wrapped[name], self.train, rate, total_updates)
        parts, self.loaded = self.loaded, {}
        for key, weight in cast(Stage, model).trained_weights().items():  # in float32, where the layers' are rounded
            optimizer.take(weight, WEIGHT, parts[key])
        return optimizer

    def close(self) -> None:
        self.wrapped = {}
        super().close()

    def _outputs(self, micro: RowBatch, names: Collection[str]) -> dict[str, Any]:
        """Outputs of all roles for a micro-batch, by name, where each rank has all layers."""
        found: dict[str, Any] = {}
        for name, asked in sources(names, self.roles).items():
            role = self.roles[name]
            grad = nullcontext() if role.optimizer else torch.no_grad()
            with grad, self._adapters(name), on_device(self.device):
                stage: Stage = role.model
                stream = stage.stream(micro, asked.values())
                states = self._module(name)(micro, stream)
                outputs = stage.outputs(states, micro, stream, asked.values(), self.temperature)
            found |= {key: outputs[output] for key, output in asked.items()}
        return found

    def _module(self, name: RoleName) -> Any:
        """What Megatron calls: the stage, wrapped where it is trained."""
        return self.wrapped.get(name, self.roles[name].model)

    def _adapters(self, name: RoleName) -> AbstractContextManager[None]:
        """Within it the reference of a policy with adapters is the policy without them."""
        role = self.roles[name]
        return role.model.adapters.disabled() if role.without_adapters else nullcontext()

    def _forward_outputs(
        self, rows: RowBatch, split: list[Tensor], names: Collection[str]
    ) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        if self.settings.pipeline == 1:
            yield from super()._forward_outputs(rows, split, names)
            return
        micros = [self._micro(rows, index) for index in split]
        yield from zip(split, self._given(micros, names), strict=True)

    @torch.no_grad()
    def _given(self, micros: Sequence[RowBatch], names: Collection[str]) -> list[dict[str, Any]]:
        """Outputs without gradient of each micro-batch, on the last stage."""
        found: list[dict[str, Any]] = [{} for _ in micros]
        for name, asked in sources(names, self.roles).items():

            def keep(number: int, outputs: dict[str, Any], asked: Any = asked) -> Tensor:
                found[number] |= {key: outputs[output] for key, output in asked.items()}
                return torch.zeros((), device=self.device)

            self._through_stages(name, micros, asked.values(), keep, forward_only=True)
        return found

    def _accumulate(self, what: LossInputs, split: list[Tensor]) -> list[Metrics]:
        through = super()._accumulate if self.settings.pipeline == 1 else self._accumulate_in_stages
        with on_device(self.device):
            parts = through(what, split)
        self._sum_gradients()
        return parts

    def _accumulate_in_stages(self, what: LossInputs, split: list[Tensor]) -> list[Metrics]:
        """Each role that is trained by itself, with the part of the loss that its outputs make: its micro-batches are
        under way in all stages at a time."""
        batch, algorithm, wanted, watched = what.batch, what.algorithm, what.wanted, what.watched
        micros = [self._micro(batch, index) for index in split]
        trained = [name for name in wanted if SOURCES[name][0] in self.trained]
        given = self._given(micros, [name for name in wanted if name not in trained])
        parts: list[Metrics] = []
        seen: list[tuple[Tensor, TrainingBatch, ModelOutputs]] = []
        for name, asked in sources(trained, self.roles).items():

            def loss(number: int, outputs: dict[str, Any], name: RoleName = name, asked: Any = asked) -> Tensor:
                beside = given[number] if name == "policy" else {}
                named = ModelOutputs(**{key: outputs[output] for key, output in asked.items()}, **beside)
                micro, index = moved(micros[number], self.device), split[number]
                if watched and name == "policy":
                    micro = watched.begin(micro, named)
                    seen.append((index if self.is_replica_leader else index[:0], micro, named))
                result = algorithm.loss(named, micro)
                parts.extend([result.metrics] * (len(index) > 0 and self.is_replica_leader))
                return result.loss

            self._through_stages(name, micros, asked.values(), loss)
        for index, micro, outputs in seen:
            assert watched is not None
            watched.end(index, micro, outputs, algorithm)
        return parts

    def _through_stages(self, name: RoleName, micros: Any, wanted: Any, loss: Any, forward_only: bool = False) -> None:
        """Send micro-batches through the stages, and their gradients back.

        Args:
            loss: of a micro-batch's number and outputs, on the last stage.
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
                seq_length=1,  # each micro-batch has its own, which the stages tell each other
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _sum_gradients(self) -> None:
        """Over the copies of the model, and of what several ranks of a copy have alike."""
        from megatron.core.distributed import finalize_model_grads

        with on_device(self.device):
            for model in self.wrapped.values():
                finalize_model_grads([model])

    def gradients(self, batch: TrainingBatch, algorithm: Algorithm, of: Collection[RoleName] | None = None) -> Metrics:
        metrics = super().gradients(batch, algorithm, of)
        stage: Stage = self.policy.model
        return metrics if stage.balance is None else metrics | stage.balance.metrics()

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        """The policy's weights for an engine, and its adapters apart, on rank 0; others have none."""
        name = next(iter(self.roles))
        found = on_first_rank(self.roles[name].model, self.ranks, self.shapes[name], adapters_alone)
        if found is None:
            return WeightUpdate(version)
        adapters: dict[str, Adapter] = {}
        for key, adapter in adapter_weights(self.skeletons[name]).items():
            a, b = (found.pop(part) for part in named_adapters({key: adapter}))
            adapters[key] = Adapter(a, b, adapter.scale)
        return WeightUpdate(version, list(found.items()), adapters)

    def save(self, folder: Path) -> Callable[[], None]:
        """Write the models and the tokenizer for transformers, and beside them what it takes to go on exactly: each
        rank its share, from copies, on a thread, for which `saved` waits."""
        self.saved()
        jobs: list[Job] = []
        steps: dict[RoleName, dict[str, int]] = {}
        for name, optimizer in self.trained.items():
            assert isinstance(optimizer, MegatronOptimizer)
            state: dict[str, Tensor] = {}
            stage: Stage = self.roles[name].model
            for share in shares(stage, stage.trained_weights(), optimizer.whole, spread=True):
                state |= kept(share)
            jobs.append(partial(self._write_state, name, state, folder))
            steps[name] = dict.fromkeys(self._trained_shapes(name) if optimizer.steps else (), optimizer.steps)
            if not has_adapters(self.skeletons[name]):
                jobs.append(partial(self._write_model, name, state, folder))
            elif (found := on_first_rank(stage, self.ranks, self.shapes[name], adapters_alone=True)) is not None:
                model = copy.deepcopy(self.skeletons[name])
                model.load_state_dict(kept(found), assign=True, strict=False)
                jobs.append(partial(save_role, name, model, self.tokenizer, folder))
        jobs.append(counts_job(self.trained, steps, self.ranks, self.updates, folder))
        return self.write_in_background(folder, jobs)

    def _trained_shapes(self, name: RoleName) -> Shapes:
        """Shapes of the weights that are trained."""
        every = self.shapes[name]
        return {key: shape for key, shape in every.items() if is_adapter(key)} or every

    def _write_state(self, name: RoleName, state: Mapping[str, Tensor], folder: Path) -> None:
        """This rank's share of what it takes to go on."""
        if state:
            found = {f"{name}/{key}": tensor for key, tensor in state.items()}
            save_file(found, folder / STATE_FOLDER / SHARDS / f"{name}_{self.ranks.rank}.safetensors")

    def _write_model(self, name: RoleName, state: Mapping[str, Tensor], folder: Path) -> None:
        """This rank's share of a role's model."""
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
        """Continue from what any number of ranks saved: exactly where they were cut as these are, else within rounding.

        Raises:
            ConfigError: the folder holds no such state, or it is another model's.
        """
        saved = read_counts(self.trained, folder)
        kinds = {name: [WEIGHT, *(MOMENTS if saved["steps"][name] else ())] for name in self.trained}
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
            optimizer.begin_at(max(saved["steps"][name].values(), default=0))
            for kind in kinds[name]:
                for weight, part in parts_from(reader, name, kind, self.roles[name].model, self.shapes[name]):
                    optimizer.take(weight, kind, part)
        set_random_state(saved, self.ranks, folder)
        self.updates = saved["updates"]


def named_adapters(adapted: Mapping[str, Adapter]) -> dict[str, Tensor]:
    """The matrices of adapters, A before B, by the names that they have in a model that is not cut."""
    found: dict[str, Tensor] = {}
    for name, adapter in adapted.items():
        layer = name.removesuffix(".weight")
        found |= {f"{layer}.lora_A.{ADAPTER}.weight": adapter.a, f"{layer}.lora_B.{ADAPTER}.weight": adapter.b}
    return found


def meet(ranks: Ranks, settings: MegatronConfig) -> None:
    """Have Megatron make the groups of ranks that share layers, that are stages, and that are copies; once."""
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401  # here all that takes long to import
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    ranks.all_here()

    initialize_rng_tracker(inference_rng_tracker=True)  # of no dropout there are random states to keep
    made = [ranks, settings.tensor, settings.pipeline, settings.expert]
    if _groups == made:
        return
    parallel_state.destroy_model_parallel()
    with ranks.making_groups():
        parallel_state.initialize_model_parallel(
            settings.tensor,
            settings.pipeline,
            expert_model_parallel_size=settings.expert,
            expert_tensor_parallel_size=settings.tensor if settings.expert == 1 else 1,
            order="tp-cp-ep-pp-dp",  # copies last: ranks beside each other have one model together
            create_gloo_process_groups=False,
            distributed_timeout_minutes=ranks.timeout_s / 60,
        )
    _groups[:] = made


def wrap(stage: Stage, dtype: torch.dtype) -> Any:
    """A stage whose gradients are kept in float32, and shared by the copies of the model."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=dtype != torch.float32, use_distributed_optimizer=True, average_in_collective=False
    )
    return DistributedDataParallel(stage.module.config, settings, stage)
