"""The back end on NVIDIA's megatron-core: layers and their matrices cut over ranks."""

import copy
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atomrl.batches import RowBatch, TrainingBatch
from atomrl.config import ConfigError, MegatronConfig, ModelConfig
from atomrl.hints import said_as
from atomrl.metrics import Metrics
from atomrl.models.loading import compute_dtype, model_config_only, model_weights
from atomrl.protocols import Algorithm, ModelOutputs, WeightUpdate
from atomrl.training.base import BaseBackend, Differentiated
from atomrl.training.fsdp import without_weights
from atomrl.training.group import Ranks
from atomrl.training.megatron_cpu import on_device
from atomrl.training.megatron_model import Stage, check_shape
from atomrl.training.megatron_optimizer import MegatronOptimizer
from atomrl.training.megatron_weights import joined
from atomrl.training.role_models import STATE_FOLDER, load_role, save_role
from atomrl.training.roles import SOURCES, TRAINED, RoleName, sources

FOLDER, COUNTS = "megatron", "trainer.json"
_groups: list[Any] = []
"""The ranks that Megatron's groups were made for, and how: it has one set of them in a process."""


class MegatronBackend(BaseBackend):
    """Trains on several ranks, each of which has a part of every layer (`tensor`), or some layers (`pipeline`).

    Rows are spread over the copies of the model that there are. Gradients are sums, as they are over micro-batches, so
    the step is that of one process but for rounding. All methods are collective.

    Args:
        settings: how many ranks share a layer, and how many stages there are.
        model, train, algorithm, named: as of `BaseBackend`; `collective` are the `Ranks`.

    Raises:
        ConfigError: the model, or what the config asks for, cannot be on Megatron.
    """

    whole_weights, begins_again = False, False

    def __init__(
        self, settings: MegatronConfig, model: ModelConfig, train: Any, algorithm: Algorithm, **named: Any
    ) -> None:
        check_config(model)
        self.settings, self.skeletons, self.wrapped = settings, dict[RoleName, nn.Module](), dict[RoleName, Any]()
        self.ranks: Ranks = named["collective"]
        self.together = settings.tensor * settings.pipeline
        settings.check_count(self.ranks.world)
        meet(self.ranks, settings)
        super().__init__(model, train, algorithm, **named)

    @property
    def _says(self) -> bool:
        """The first rank of the last stage: outputs are there."""
        return self.ranks.rank % self.together == self.together - self.settings.tensor

    @property
    def _is_last(self) -> bool:
        return self.ranks.rank % self.together >= self.together - self.settings.tensor

    def load_model(self, name: RoleName, path: str, config: ModelConfig) -> nn.Module:
        """This rank's part of a role's model; of the ranks of a machine one at a time has all of it."""
        whole = self.ranks.in_turns(partial(self._load, name, path, config))
        trained = name in TRAINED
        dtype = compute_dtype(config.dtype, self.device)
        with on_device(self.device):
            stage = Stage(whole, path, self.settings, self.device, dtype, trained and config.gradient_checkpointing)
            if trained:
                self.skeletons[name] = without_weights(whole)
                self.wrapped[name] = wrap(stage, dtype)
        return stage.requires_grad_(trained).train(trained)

    def _load(self, name: RoleName, path: str, config: ModelConfig) -> nn.Module:
        dtype = torch.float32 if name in TRAINED else compute_dtype(config.dtype, self.device)
        check_shape(model_config_only(path, config.trust_remote_code), self.settings, path)
        return load_role(name, path, config, torch.device("cpu"), dtype)

    def make_optimizer(self, name: RoleName, model: nn.Module, rate: float, total_updates: int) -> MegatronOptimizer:
        with on_device(self.device):
            return MegatronOptimizer(TRAINED[name], self.wrapped[name], self.train, rate, total_updates)

    def close(self) -> None:
        self.wrapped = {}
        super().close()

    def _outputs(self, micro: RowBatch, names: Collection[str]) -> dict[str, Tensor]:
        """Outputs of all roles for a micro-batch, by name, where each rank has all layers."""
        found: dict[str, Tensor] = {}
        for name, asked in sources(names, self.roles).items():
            role = self.roles[name]
            with nullcontext() if role.optimizer else torch.no_grad(), on_device(self.device):
                stage: Stage = role.model
                outputs = stage.outputs(self._module(name)(micro.tokens), micro, asked.values(), self.temperature)
            found |= {key: outputs[output] for key, output in asked.items()}
        return found

    def _module(self, name: RoleName) -> Any:
        """What Megatron calls: the stage, wrapped where it is trained."""
        return self.wrapped.get(name, self.roles[name].model)

    def _annotated(
        self, rows: RowBatch, split: list[Tensor], names: Collection[str]
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        if self.settings.pipeline == 1:
            yield from super()._annotated(rows, split, names)
            return
        micros = [self._micro(rows, index) for index in split]
        yield from zip(split, self._given(micros, names), strict=True)

    @torch.no_grad()
    def _given(self, micros: Sequence[RowBatch], names: Collection[str]) -> list[dict[str, Tensor]]:
        """Outputs without gradient of each micro-batch, on the last stage."""
        found: list[dict[str, Tensor]] = [{} for _ in micros]
        for name, asked in sources(names, self.roles).items():

            def keep(number: int, outputs: dict[str, Tensor], asked: Any = asked) -> Tensor:
                found[number] |= {key: outputs[output] for key, output in asked.items()}
                return next(iter(outputs.values())).new_zeros(())

            self._through_stages(name, micros, asked.values(), keep, forward_only=True)
        return found

    def _accumulate(self, what: Differentiated, split: list[Tensor]) -> list[Metrics]:
        through = super()._accumulate if self.settings.pipeline == 1 else self._accumulate_in_stages
        parts = through(what, split)
        self._sum_gradients()
        return parts

    def _accumulate_in_stages(self, what: Differentiated, split: list[Tensor]) -> list[Metrics]:
        """Each role that is trained by itself, with the part of the loss that its outputs make: its micro-batches are
        under way in all stages at a time."""
        batch, algorithm, wanted, watched = what.batch, what.algorithm, what.wanted, what.watched
        micros = [self._micro(batch, index) for index in split]
        trained = [name for name in wanted if SOURCES[name][0] in self.trained]
        given = self._given(micros, [name for name in wanted if name not in trained])
        parts: list[Metrics] = []
        seen: list[tuple[Tensor, TrainingBatch, ModelOutputs]] = []
        for name, asked in sources(trained, self.roles).items():

            def loss(number: int, outputs: dict[str, Tensor], name: RoleName = name, asked: Any = asked) -> Tensor:
                beside = given[number] if name == "policy" else {}
                named = ModelOutputs(**{key: outputs[output] for key, output in asked.items()}, **beside)
                micro, index = micros[number], split[number]
                if watched and name == "policy":
                    micro = watched.begin(micro, named)
                    seen.append((index if self._says else index[:0], micro, named))
                result = algorithm.loss(named, micro)
                parts.extend([result.metrics] * (len(index) > 0 and self._says))
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

        def calculate(number: int, states: Tensor) -> tuple[Tensor, Tensor, None]:
            outputs = stage.outputs(states, micros[number], wanted, self.temperature)
            return loss(number, outputs), torch.zeros((), dtype=torch.int, device=self.device), None

        def forward(numbers: Iterator[int], model: Any) -> tuple[Tensor, Any]:
            number = next(numbers)
            return model(micros[number].tokens), partial(calculate, number)

        with on_device(self.device):
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

    def gathered(self, name: RoleName) -> nn.Module | None:
        """A role's model, with all of its weights in the CPU's memory of rank 0; None on other ranks."""
        stage: Stage = self.roles[name].model
        own = stage.named_weights()
        stages: list[Any] = [None] * self.ranks.world
        dist.all_gather_object(stages, [(key, tuple(weight.shape)) for key, weight in own.items()], self.ranks.host)
        found: dict[str, Tensor] = {}
        if self.ranks.rank >= self.together:
            return None
        dtype = next(iter(own.values())).dtype
        for first in range(0, self.together, self.settings.tensor):
            for (key, layer), shape in stages[first]:
                if key == "output_layer.weight" and stage.spec.tied_head:
                    continue
                parts = self._parts(own, first, (key, layer), shape, dtype)
                if self.ranks.rank == 0:
                    found |= {n: t.cpu() for n, t in joined(key, layer, parts, stage.spec).items()}
        if self.ranks.rank:
            return None
        model = copy.deepcopy(self.skeletons[name])
        model.load_state_dict(found, assign=True, strict=True)
        return model

    def _parts(self, own: Any, first: int, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """On rank 0 what each tensor-parallel rank of the stage that begins with rank `first` has of a weight."""
        from megatron.core import parallel_state

        rank, size = self.ranks.rank, self.settings.tensor
        found = torch.empty(size, *shape, dtype=dtype, device=self.device)
        if first <= rank < first + size:
            weight = own[key].detach()
            dist.all_gather(list(found.unbind()), weight, group=parallel_state.get_tensor_model_parallel_group())
        if first and rank == first:
            dist.send(found, 0)
        elif first and rank == 0:
            dist.recv(found, first)
        return list(found.unbind())

    def weight_update(self, version: int, adapters_alone: bool = False) -> WeightUpdate:
        """The policy's weights for an engine, on rank 0; others have none."""
        model = self.gathered(next(iter(self.roles)))
        return WeightUpdate(version) if model is None else WeightUpdate(version, list(model_weights(model)))

    def save(self, folder: Path) -> None:
        """Write the models and the tokenizer for transformers, and beside them what ranks need to go on exactly."""
        for name in self.trained:
            if (model := self.gathered(name)) is not None:
                save_role(name, model, self.tokenizer, folder)
        state = folder / STATE_FOLDER / FOLDER
        if self.ranks.rank == 0:
            state.mkdir(parents=True)
        self.ranks.max(0)  # the folder is there from here on
        for name, optimizer in self.trained.items():
            save_file(optimizer.state(), state / f"{name}_{self.ranks.rank}.safetensors")
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        save_file(random, state / f"random_{self.ranks.rank}.safetensors")
        if self.ranks.rank == 0:
            skipped = {name: optimizer.skipped_in_a_row for name, optimizer in self.trained.items()}
            counts = {"updates": self.updates, "cut": self._cut(), "skipped_in_a_row": skipped}
            (state / COUNTS).write_text(json.dumps(counts) + "\n", encoding="utf-8")

    def _cut(self) -> dict[str, int]:
        return {"ranks": self.ranks.world, "tensor": self.settings.tensor, "pipeline": self.settings.pipeline}

    def load(self, folder: Path) -> None:
        """Continue exactly from `save`, on as many ranks.

        Raises:
            ConfigError: the folder holds no such state, or it is another model's, or of other ranks.
        """
        state = folder / STATE_FOLDER / FOLDER
        if not (state / COUNTS).is_file():
            raise ConfigError(
                f"{folder} holds no {STATE_FOLDER}/{FOLDER}: it is no checkpoint of backend.type=megatron; start a new "
                "run from its model"
            )
        counts = json.loads((state / COUNTS).read_text(encoding="utf-8"))
        if counts["cut"] != self._cut():
            there = ", ".join(f"{name}={number}" for name, number in counts["cut"].items())
            raise ConfigError(
                f"checkpoint {folder} is of backend: {there}; a run on Megatron goes on with the same, or starts anew "
                "from the model"
            )
        if counts["skipped_in_a_row"].keys() != self.trained.keys():
            critic = "" if "critic" in counts["skipped_in_a_row"] else "out"
            raise ConfigError(f"checkpoint {folder} was written with{critic} a critic")
        for name, optimizer in self.trained.items():
            found = read_state(state / f"{name}_{self.ranks.rank}.safetensors")
            assert isinstance(optimizer, MegatronOptimizer)
            if {key: tuple(found[key].shape) for key in found if key.startswith("weight/")} != optimizer.shapes():
                raise ConfigError(f"checkpoint {folder} is of another model")
            optimizer.load(found, self.device)
            optimizer.skipped_in_a_row = counts["skipped_in_a_row"][name]
        random = read_state(state / f"random_{self.ranks.rank}.safetensors")
        torch.set_rng_state(random["cpu"])
        if "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self.device)
        self.updates = counts["updates"]


def read_state(file: Path) -> dict[str, Tensor]:
    """The tensors of a file.

    Raises:
        ConfigError: it is missing or damaged.
    """
    with said_as(ConfigError, f"{file} is missing, damaged or cut short", SafetensorError, OSError):
        return load_file(file)


def check_config(model: ModelConfig) -> None:
    """Raise ConfigError where Megatron is not there, or a config asks for what it has not here."""
    try:
        import megatron.core  # noqa: F401
    except ImportError:
        raise ConfigError("backend.type=megatron needs megatron-core: pip install 'atomrl[megatron]'") from None
    if model.lora is not None:
        raise ConfigError(
            "model.lora: Megatron's layers take no adapters here; leave it out, or take backend.type=fsdp"
        )
    if model.pack_rows:
        raise ConfigError("model.pack_rows: rows are padded on Megatron; leave it out, or take backend.type=fsdp")


def meet(ranks: Ranks, settings: MegatronConfig) -> None:
    """Have Megatron make the groups of ranks that share layers, that are stages, and that are copies; once."""
    from megatron.core import parallel_state

    made = [ranks, settings.tensor, settings.pipeline]
    if _groups == made:
        return
    parallel_state.destroy_model_parallel()
    with ranks.making_groups():
        parallel_state.initialize_model_parallel(
            settings.tensor,
            settings.pipeline,
            order="tp-cp-ep-pp-dp",  # copies last: ranks beside each other have one model together
            create_gloo_process_groups=False,
            distributed_timeout_minutes=max(1, round(ranks.timeout_s / 60)),
        )
    _groups[:] = made


def wrap(stage: Stage, dtype: torch.dtype) -> Any:
    """A stage whose gradients are kept in float32, and shared by the copies of the model."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=dtype != torch.float32, use_distributed_optimizer=True, average_in_collective=False
    )
    return DistributedDataParallel(stage.module.config, settings, stage)
