"""TRL's configs as dataclasses: their fields and defaults, translated to config sections by the importer of TRL files.

`transformers.TrainingArguments` has most fields; `OWN` has those that each config of TRL adds. A script's own dataclass
may extend a config, and command-line parsers of transformers and TRL take them.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from transformers import TrainingArguments

from atomrl.common.errors import did_you_mean
from atomrl.common.launchers import launched
from atomrl.config import ConfigError, RunConfig, load_config, merge_trees
from atomrl.tools.importers import trl_arguments as trl_shared
from atomrl.tools.importers.translation import Translation
from atomrl.tools.importers.trl import TRAINERS, BatchSizeError
from atomrl.tools.importers.trl_arguments import WITHOUT_MEANING

VERSION = "1.16"
"""Version of TRL with these fields and defaults."""
RENAMED = {
    "max_seq_length": "max_length",
    "torch_dtype": "dtype",
    "evaluation_strategy": "eval_strategy",
    "use_liger": "use_liger_kernel",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "num_processes": "dataset_num_proc",
    "dataset_batch_size": "dataset_num_proc",
}
"""Name of an argument in older versions of TRL or transformers -> its name today."""
OF_SCRIPT = frozenset({
    "reward_model_path", "sft_model_path", "missing_eos_penalty", "teacher_model_name_or_path",
    "teacher_model_init_kwargs", "dataset_text_field",
})  # fmt: skip
"""Arguments that the script or its trainer reads, and no config has."""
OF_TRAINER = frozenset({"processing_class", "model", "reward_funcs", "train_dataset", "eval_dataset", "peft_config"})

_NUMBERS, _NAMES, _DICT = "list[float] | None", "list[str] | None", "dict | str | None"
_ALL = {
    "logging_steps": ("float", 10), "gradient_checkpointing": ("bool", True), "bf16": ("bool | None", None),
    "lr_scheduler_kwargs": (_DICT, None), "model_init_kwargs": (_DICT, None),
    "router_aux_loss_coef": ("float | None", None), "pad_to_multiple_of": ("str | None", "auto"),
}  # fmt: skip
_OFFLINE = {
    "dataset_num_proc": ("int | None", None), "max_length": ("int | None", 1024), "pad_token": ("str | None", None),
    "eos_token": ("str | None", None), "chat_template_path": ("str | None", None),
    "truncation_mode": ("str", "keep_start"), "padding_free": ("bool", False), "activation_offloading": ("bool", False),
}  # fmt: skip
_REFERENCE = {
    "sync_ref_model": ("bool", False), "ref_model_mixup_alpha": ("float", 0.6), "ref_model_sync_steps": ("int", 512),
}  # fmt: skip
_DISABLED = {"disable_dropout": ("bool", True)}
_TEACHER = {"teacher_model_name_or_path": ("str | None", None), "teacher_model_init_kwargs": (_DICT, None)}
_PREFERENCE = {
    **_OFFLINE, **_DISABLED, "beta": ("float", 0.1),
    "precompute_ref_log_probs": ("bool", False), "precompute_ref_batch_size": ("int | None", None),
}  # fmt: skip
_VLLM = {
    "use_vllm": ("bool", False), "vllm_mode": ("str", "colocate"),
    "vllm_model_impl": ("str", "vllm"), "vllm_enable_sleep_mode": ("bool", False),
    "vllm_structured_outputs_regex": ("str | None", None), "vllm_server_base_url": ("str | None", None),
    "vllm_server_host": ("str", "0.0.0.0"), "vllm_server_port": ("int", 8000), "vllm_group_port": ("int", 51216),
    "vllm_server_timeout": ("float", 240.0), "vllm_gpu_memory_utilization": ("float", 0.3),
    "vllm_max_model_length": ("int | None", None), "vllm_tensor_parallel_size": ("int", 1),
}  # fmt: skip
_SAMPLED = {
    "disable_dropout": ("bool", False), "remove_unused_columns": ("bool | None", False),
    "num_generations": ("int | None", 8), "num_generations_eval": ("int | None", None),
    "max_completion_length": ("int | None", 512), "ds3_gather_for_generation": ("bool", True),
    "shuffle_dataset": ("bool | None", True), "generation_batch_size": ("int | None", None),
    "steps_per_generation": ("int | None", None), "temperature": ("float", 1.0), "top_p": ("float", 1.0),
    "top_k": ("int", 0), "min_p": ("float | None", None), "generation_kwargs": (_DICT, None),
    "chat_template_kwargs": (_DICT, None), "repetition_penalty": ("float", 1.0),
    "cache_implementation": ("str | None", None), **_VLLM,
    "beta": ("float", 0.0), "num_iterations": ("int", 1), "epsilon": ("float", 0.2),
    "epsilon_high": ("float | None", None), "reward_weights": (_NUMBERS, None),
    "mask_truncated_completions": ("bool", False), "log_completions": ("bool", False), "log_multimodal": ("bool", True),
    "num_completions_to_print": ("int | None", None), "log_unique_prompts": ("bool", False),
    "use_transformers_continuous_batching": ("bool", False), "use_transformers_paged": ("bool", False),
    "transformers_continuous_batching_config": (_DICT, None), **_REFERENCE,
}  # fmt: skip
OWN: Mapping[str, Mapping[str, tuple[str, Any]]] = {
    "grpo": {
        **_SAMPLED, "cast_lm_head_to_fp32": ("bool", False), "delta": ("float | None", None),
        "sapo_temperature_neg": ("float", 1.05), "sapo_temperature_pos": ("float", 1.0), "vespo_k_pos": ("float", 2.0),
        "vespo_lambda_pos": ("float", 3.0), "vespo_k_neg": ("float", 3.0), "vespo_lambda_neg": ("float", 2.0),
        "importance_sampling_level": ("str", "token"), "multi_objective_aggregation": ("str", "sum_then_normalize"),
        "scale_rewards": ("str", "group"), "loss_type": ("str", "dapo"), "top_entropy_quantile": ("float", 1.0),
        "entropy_coef": ("float", 0.0), "use_adaptive_entropy": ("bool", False), "entropy_coef_min": ("float", 0.0),
        "entropy_coef_max": ("float", 1.0), "entropy_coef_delta": ("float", 0.005), "entropy_target": ("float", 0.2),
        "max_tool_calling_iterations": ("int | None", None), "vllm_importance_sampling_correction": ("bool", True),
        "vllm_importance_sampling_mode": ("str", "sequence_mask"),
        "vllm_importance_sampling_clip_max": ("float | None", 3.0),
        "vllm_importance_sampling_clip_min": ("float | None", None),
        "vllm_importance_sampling_cap": ("float | None", None), "off_policy_mask_threshold": ("float | None", None),
        "use_bias_correction_kl": ("bool", True), "log_completions_hub_repo": ("str | None", None),
    },
    "rloo": {
        **_SAMPLED, "num_generations": ("int | None", 2), "beta": ("float", 0.05),
        "normalize_advantages": ("bool", False), "reward_clip_range": (_NUMBERS, None),
    },
    "online_dpo": {
        **_DISABLED, **_VLLM, "remove_unused_columns": ("bool | None", False),
        "reward_model_path": ("str | None", None),
        "max_new_tokens": ("int", 64), "max_length": ("int", 512), "temperature": ("float", 0.9),
        "top_p": ("float", 1.0), "top_k": ("int", 0), "min_p": ("float | None", None),
        "repetition_penalty": ("float", 1.0), "generation_kwargs": (_DICT, None),
        "cache_implementation": ("str | None", None), "missing_eos_penalty": ("float | None", None),
        "beta": ("list[float]", [0.1]), "loss_type": ("str", "sigmoid"), "judge": ("str | None", None),
        "ds3_gather_for_generation": ("bool", True), "reward_weights": (_NUMBERS, None),
        "dataset_num_proc": ("int | None", None),
    },
    "sft": {
        **_OFFLINE, "dataset_text_field": ("str", "text"), "dataset_kwargs": (_DICT, None),
        "shuffle_dataset": ("bool", False), "packing": ("bool", False), "packing_strategy": ("str", "bfd"),
        "eval_packing": ("bool | None", None), "completion_only_loss": ("bool | None", None),
        "assistant_only_loss": ("bool", False), "loss_type": ("str", "nll"), "chat_template_kwargs": (_DICT, None),
    },
    "dpo": {
        **_PREFERENCE, "loss_type": ("list[str]", ["sigmoid"]), "loss_weights": (_NUMBERS, None),
        "ld_alpha": ("float | None", None), "f_divergence_type": ("str", "reverse_kl"),
        "f_alpha_divergence_coef": ("float", 0.5), "label_smoothing": ("float", 0.0), "use_weighting": ("bool", False),
        "discopop_tau": ("float", 0.05), **_REFERENCE,
        "rpo_alpha": ("float | None", None),
    },
    "kto": {
        **_PREFERENCE, "loss_type": ("str", "kto"), "desirable_weight": ("float", 1.0),
        "undesirable_weight": ("float", 1.0), **_REFERENCE,
    },
    "orpo": {
        **_PREFERENCE, "padding_value": ("int | None", None), "generate_during_eval": ("bool", False),
        "is_encoder_decoder": ("bool | None", None), "max_completion_length": ("int | None", None),
    },
    "cpo": {
        **_PREFERENCE, "padding_value": ("int | None", None), "generate_during_eval": ("bool", False),
        "is_encoder_decoder": ("bool | None", None), "max_completion_length": ("int | None", None),
        "label_smoothing": ("float", 0.0), "loss_type": ("str", "sigmoid"), "cpo_alpha": ("float", 1.0),
        "simpo_gamma": ("float", 0.5), "alpha": ("float", 0.0),
    },
    "reward": {**_OFFLINE, **_DISABLED, "center_rewards_coefficient": ("float | None", None)},
    "ppo": {
        **_DISABLED, "dataset_num_proc": ("int | None", None), "num_mini_batches": ("int", 1),
        "total_episodes": ("int | None", None), "local_rollout_forward_batch_size": ("int", 64),
        "num_sample_generations": ("int", 10), "response_length": ("int", 53), "stop_token": ("str | None", None),
        "stop_token_id": ("int | None", None), "temperature": ("float", 0.7),
        "missing_eos_penalty": ("float | None", None), "sft_model_path": ("str", "EleutherAI/pythia-160m"),
        "reward_model_path": ("str", "EleutherAI/pythia-160m"), "num_ppo_epochs": ("int", 4),
        "whiten_rewards": ("bool", False), "kl_coef": ("float", 0.05), "kl_estimator": ("str", "k1"),
        "cliprange": ("float", 0.2), "vf_coef": ("float", 0.1), "cliprange_value": ("float", 0.2),
        "gamma": ("float", 1.0), "lam": ("float", 0.95), "ds3_gather_for_generation": ("bool", True),
        **dict.fromkeys(("num_total_batches", "micro_batch_size", "local_batch_size", "batch_size",
                         "local_mini_batch_size", "mini_batch_size"), ("int | None", None)),
        "model_adapter_name": ("str | None", None), "ref_adapter_name": ("str | None", None),
    },
    "gkd": {
        **_OFFLINE, **_DISABLED, **_TEACHER, "temperature": ("float", 0.9), "lmbda": ("float", 0.5),
        "beta": ("float", 0.5), "max_new_tokens": ("int", 128), "seq_kd": ("bool", False),
        "dataset_text_field": ("str", "text"), "dataset_kwargs": (_DICT, None),
    },
    "distillation": {
        **_DISABLED, **_TEACHER, "teacher_model_revision": ("str | None", None), "temperature": ("float", 1.0),
        "beta": ("float", 1.0), "max_completion_length": ("int", 512), "num_generations": ("int", 1),
        "generation_batch_size": ("int | None", None), "top_p": ("float", 0.95), "top_k": ("int", 0), **_VLLM,
        "vllm_sync_frequency": ("int", 1), "log_completions": ("bool", False), "log_completions_steps": ("int", 100),
        "num_completions_to_print": ("int | None", None),
    },
}  # fmt: skip
"""Kind of trainer -> fields of its config that `TrainingArguments` lacks or has with another default: type, default."""
SAMPLING_OF_VLLM: Mapping[str, tuple[Any, ...]] = {
    "temperature": (1.0,), "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "stop": (None, []),
    "stop_token_ids": (None, []), "min_tokens": (0,), "presence_penalty": (0.0,), "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,), "logit_bias": (None,), "bad_words": (None, []), "allowed_token_ids": (None, []),
    "structured_outputs": (None,), "guided_decoding": (None,), "logits_processors": (None, []), "ignore_eos": (False,),
}  # fmt: skip
"""Fields of vLLM's `SamplingParams` that change what is sampled -> values with which they are off. The others are the
trainer's (`n`, `seed`, `max_tokens`) or select what is returned."""
_TYPES: Mapping[str, Any] = {
    "int": int, "float": float, "bool": bool, "str": str, "list[float]": list[float], "list[str]": list[str],
    "int | None": int | None, "float | None": float | None, "bool | None": bool | None, "str | None": str | None,
    _NUMBERS: list[float] | None, _NAMES: list[str] | None, _DICT: dict | str | None,
}  # fmt: skip


class _ConfigType(type):
    """Metaclass of the configs: takes arguments that are no fields by their older names, and checks the result."""

    def __call__(cls, *positional: Any, **values: Any) -> Any:
        names = {item.name for item in fields(cls)}  # type: ignore[arg-type]
        fields_here: dict[str, Any] = {}
        older: dict[str, Any] = {}
        for name, value in values.items():
            new = name if name in names else RENAMED.get(name, name)
            if new in values and new != name:
                raise ConfigError(f"{cls.__name__}: {name} is the older name of {new}; give only one")
            (fields_here if new in names else older)[new] = value
        config = super().__call__(*positional, **fields_here)
        config.__dict__.update(older)
        config.__dict__["_older"] = frozenset(older)
        config.check()
        return config


@dataclass
class TRLConfig(TrainingArguments, metaclass=_ConfigType):
    """Base class of TRL's configs, with its arguments, defaults and meaning: batch sizes are per process, a step is an
    optimizer step, the learning rate decays linearly.

    An argument that is unknown, or that affects training and has no counterpart here, is an error; one that only
    affects how TRL itself runs is listed when training starts. Arguments of older versions are accepted by their old
    names. Fields that a subclass adds are the script's own.

    Raises:
        ConfigError: an argument is unknown or has no counterpart, or a value is invalid.

    Example:
        >>> args = GRPOConfig(output_dir="out", learning_rate=1e-5, num_generations=4, per_device_train_batch_size=8)
        >>> args.learning_rate, args.to_tree()["rollout"]["prompts_per_step"]
        (1e-05, 2)
        >>> GRPOConfig(learning_rat=1e-5)
        Traceback (most recent call last):
            ...
        atomrl.common.errors.ConfigError: GRPOConfig has no argument 'learning_rat'; did you mean 'learning_rate'?
    """

    kind: ClassVar[str] = "grpo"
    """Key of the trainer in `TRAINERS`."""

    def __post_init__(self) -> None:
        """Leave the values as given: those of transformers ask for a device, and refuse bfloat16 on a CPU."""

    def __getattr__(self, name: str) -> Any:
        # only called for what is not set: an argument of an older version that the script reads
        if not name.startswith("_") and "_older" in self.__dict__ and name in self.known():
            return None
        raise AttributeError(f"{type(self).__name__} has no argument {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if "_older" not in self.__dict__ or name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        before = dict(self.__dict__)
        name = name if name in {item.name for item in fields(self)} else RENAMED.get(name, name)
        object.__setattr__(self, name, value)
        if name not in {item.name for item in fields(self)}:
            self.__dict__["_older"] |= {name}
        try:
            self.check()
        except ConfigError:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given().items())})"

    __str__ = __repr__

    def given(self) -> dict[str, Any]:
        """Return TRL's arguments that are set, and differ from the default."""
        own = next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        values = {item.name: (getattr(self, item.name), _default(item)) for item in fields(own)}
        set_here = {name: value for name, (value, default) in values.items() if value != default}
        set_here |= {name: self.__dict__[name] for name in sorted(self._older)}
        return {name: value.value if isinstance(value, Enum) else value for name, value in set_here.items()}

    def check(self, batches: bool = False) -> None:
        """Raise ConfigError for an argument that is unknown, invalid or without a counterpart.

        Args:
            batches: check also that batch sizes fit together; scripts set them one by one, so only a trainer does.
        """
        try:
            self.translated()
        except BatchSizeError:
            if batches:
                raise

    def known(self) -> frozenset[str]:
        """Return the names of all arguments, those of older versions included."""
        older = {
            "max_prompt_length",
            "warmup_ratio",
            "model_revision",
            "vllm_device",
            "trust_remote_code",
            *RENAMED,
            *WITHOUT_MEANING,
        }
        return frozenset(older | self._defaults.keys() | {item.name for item in fields(self)})

    @property
    def chosen_device(self) -> str:
        """`cpu` with `use_cpu`, else `auto`."""
        return "cpu" if self.use_cpu else "auto"

    def to_tree(self) -> dict[str, Any]:
        """Convert the arguments into config sections, without model, data and rewards."""
        return self.translated()[1]

    def notes(self) -> list[str]:
        """List what differs from TRL, and the arguments without effect here."""
        return self.translated()[2]

    def translated(self) -> tuple[Translation, dict[str, Any], list[str]]:
        """Translate to config sections: the translation, the sections, and the notes."""
        values, called = self.given(), type(self).__name__
        for name in ("chat_template_path", "eos_token"):  # which the trainer reads
            values.pop(name, None)
        if (of_vllm := values.pop("vllm_sampling_params", None)) is not None:
            values["generation_kwargs"] = {**(self.generation_kwargs or {}), **_of_vllm(of_vllm)}
        if values.get("output_dir") is not None:
            values["output_dir"] = str(values["output_dir"])
        # The importer of TRL files translates; a model is required there, so it gets a placeholder.
        t = Translation("TRL", {**values, "model": "-"}, self._defaults)
        trl_shared.translate_shared(t, Path(self.kind))
        TRAINERS[self.kind].translate(t, int(os.environ.get("WORLD_SIZE", "1")))
        idle = sorted(name for name in values if name not in t.read_keys and name in WITHOUT_MEANING)
        t.name_of([*WITHOUT_MEANING, "reward_weights"])
        known = t.read_keys | self.known()
        for name in self._older - known:
            if name in OF_TRAINER:
                raise ConfigError(f"{called} has no argument {name!r}: it is an argument of the trainer")
            raise ConfigError(f"{called} has no argument {name!r}; {did_you_mean(name, sorted(known))}")
        if left := sorted(values.keys() - t.read_keys - OF_SCRIPT - WITHOUT_MEANING.keys()):
            raise t.refuse(left[0], values[left[0]], "it has no counterpart")
        tree, on_cpu = self._for_this_machine(t.tree, values)
        checked: RunConfig = load_config(
            merge_trees(tree, {"run_name": "-", "model": {"path": "-"}, "data": {"train": "-"}}), name=called
        )
        assert (checked.kind == "rl") == TRAINERS[self.kind].samples
        notes = [f"{called}: the defaults are those of TRL {VERSION}"]
        notes += [f"differs from TRL: {line}" for line in t.differences]
        notes += [f"{', '.join(idle)}: no effect here"] if idle else []
        if values.get("use_vllm") and TRAINERS[self.kind].samples and tree["rollout"]["engine"] != "vllm":
            notes.append("use_vllm: vLLM is not installed (pip install 'atomrl[vllm]'); using AtomRL's own engine")
        return t, tree, [*notes, *on_cpu, *t.left]

    def _for_this_machine(
        self, translated: Mapping[str, Any], values: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the sections without what the trainer's own arguments set, following this machine where the script
        does not choose; and a note on what has no effect here."""
        tree = {key: value for key, value in translated.items() if key not in ("run_name", "reward")}
        tree["data"] = {key: value for key, value in tree["data"].items() if key not in ("train", "answer_field")}
        tree["data"]["chat_template"] = "messages_only"
        tree["model"] = {key: value for key, value in tree["model"].items() if key != "path"}
        tree["model"]["device"] = self.chosen_device
        if not {"bf16", "fp16"} & values.keys():  # TRL's default of bfloat16, where the hardware has it
            tree["model"]["dtype"] = "auto"
        on_cpu = []
        if tree["model"].get("activation_offload") and self.device.type == "cpu":
            tree["model"]["activation_offload"] = False
            on_cpu = ["activation_offloading: no effect on a CPU"]
        if launched() is not None:
            tree["backend"] = {"type": "fsdp"}
        if TRAINERS[self.kind].samples and values.get("use_vllm") and find_spec("vllm") is not None:
            tree["rollout"]["engine"] = "vllm"
        return tree, on_cpu

    @property
    def _defaults(self) -> dict[str, Any]:
        return {**trl_shared.DEFAULTS, **TRAINERS[self.kind].defaults}

    # Members of `TrainingArguments` that scripts read; those of transformers start its own processes and devices.

    @property
    def device(self) -> Any:
        """Device of this process, as a `torch.device`."""
        import torch

        from atomrl.trainer.build import device_name

        return torch.device(device_name(self.chosen_device))

    @property
    def n_gpu(self) -> int:
        """1 with a GPU, else 0."""
        return int(self.device.type == "cuda")

    @property
    def world_size(self) -> int:
        """Number of processes that a launcher started, or 1."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return int(os.environ.get("RANK", "0"))

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def distributed_state(self) -> Any:
        """The state object of accelerate."""
        from accelerate import PartialState

        return PartialState(cpu=self.chosen_device == "cpu" or None)

    def main_process_first(self, local: bool = True, desc: str = "work") -> Any:
        """Return a block for work that one process does first; ranks of AtomRL do not run the script."""
        return nullcontext()

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and their values."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def _of_vllm(parameters: Any) -> dict[str, Any]:
    """Return the fields of a `SamplingParams` of vLLM that are on, as `generation_kwargs`."""
    values = {name: (getattr(parameters, name, off[0]), off) for name, off in SAMPLING_OF_VLLM.items()}
    return {name: value for name, (value, off) in values.items() if value not in off}


def _default(item: "dataclasses.Field[Any]") -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _config_class(name: str, kind: str) -> type[TRLConfig]:
    """Make the dataclass of one of TRL's configs: `OWN`'s fields, with the importer's defaults where it has them."""
    defaults: dict[str, Any] = {**trl_shared.DEFAULTS, **TRAINERS[kind].defaults}
    typed = {**_ALL, **OWN[kind], "learning_rate": ("float", defaults["learning_rate"])}
    own = []
    for argument, (annotation, default) in typed.items():
        value = defaults.get(argument, default)
        help_text = {"help": WITHOUT_MEANING.get(argument, f"as in TRL {VERSION}")}
        made: Any = (
            field(default_factory=functools.partial(list, value), metadata=help_text)
            if isinstance(value, list)
            else field(default=value, metadata=help_text)
        )
        own.append((argument, _TYPES[annotation], made))
    namespace: dict[str, Any] = {
        "kind": kind,
        "__module__": __name__,
        "__doc__": f"The arguments of `trl.{name}`; see `TRLConfig`.",
    }
    namespace |= {"__repr__": TRLConfig.__repr__, "__str__": TRLConfig.__repr__}
    return dataclasses.make_dataclass(name, own, bases=(TRLConfig,), namespace=namespace, repr=False)


GRPOConfig = _config_class("GRPOConfig", "grpo")
RLOOConfig = _config_class("RLOOConfig", "rloo")
OnlineDPOConfig = _config_class("OnlineDPOConfig", "online_dpo")
SFTConfig = _config_class("SFTConfig", "sft")
DPOConfig = _config_class("DPOConfig", "dpo")
KTOConfig = _config_class("KTOConfig", "kto")
ORPOConfig = _config_class("ORPOConfig", "orpo")
CPOConfig = _config_class("CPOConfig", "cpo")
RewardConfig = _config_class("RewardConfig", "reward")
PPOConfig = _config_class("PPOConfig", "ppo")
GKDConfig = _config_class("GKDConfig", "gkd")
DistillationConfig = _config_class("DistillationConfig", "distillation")
CONFIGS: Mapping[str, type[TRLConfig]] = {
    kind.kind: kind
    for kind in (
        GRPOConfig, RLOOConfig, OnlineDPOConfig, SFTConfig, DPOConfig, KTOConfig, ORPOConfig, CPOConfig, RewardConfig,
        PPOConfig, GKDConfig, DistillationConfig,
    )
}  # fmt: skip
"""Kind of trainer -> its config."""


class _PlainType(type):
    """Metaclass of `PlainArguments`: sets arguments of older versions aside, for the trainer that gets them."""

    def __call__(cls, *positional: Any, **values: Any) -> Any:
        names = {item.name for item in fields(cls)}  # type: ignore[arg-type]
        known = SFTConfig().known()
        new = {name: name if name in names else RENAMED.get(name, name) for name in values}
        older = {new[name]: value for name, value in values.items() if new[name] not in names and name in known}
        given = {new[name]: value for name, value in values.items() if new[name] not in older}
        arguments = super().__call__(*positional, **given)
        arguments.older = older
        return arguments


class PlainArguments(TrainingArguments, metaclass=_PlainType):
    """transformers' `TrainingArguments`, with the arguments of its older versions (`evaluation_strategy`,
    `warmup_ratio`, `group_by_length`). `atomrl run` gives it to scripts in its place."""

    older: dict[str, Any]
    """Arguments that only older versions have."""


def from_training_arguments(arguments: Any, kind: str) -> TRLConfig:
    """Convert plain `TrainingArguments` of transformers, which older trainers took, into a trainer's config."""
    names = {item.name for item in fields(CONFIGS[kind])}
    values = getattr(arguments, "older", {}) | {
        item.name: value
        for item in fields(arguments)
        if item.init and item.name in names and (value := getattr(arguments, item.name)) != _default(item)
    }
    filled_in = {"run_name", "logging_dir", "accelerator_config", "fsdp", "fsdp_config", "bf16"} - (
        {"bf16"} if arguments.bf16 else set()
    )
    return CONFIGS[kind](**{name: value for name, value in values.items() if name not in filled_in})
