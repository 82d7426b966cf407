"""Trainers with TRL's interface. Each builds a config from Python objects and starts the run of `atomrl train` on it,
so there is only one training loop."""

import copy
import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from atomrl.backends.launcher import follow_launcher
from atomrl.common.files import write_jsonl
from atomrl.common.launchers import launched
from atomrl.config import ConfigError, FSDPConfig, RunConfig, load_config, merge_trees
from atomrl.config.keys import renamed
from atomrl.data.files import DataError
from atomrl.models.loading import adapted_path, copy_processor, load_tokenizer, model_config_only, resolve_folder
from atomrl.tracking.reading.lines import read_metrics
from atomrl.tracking.run_directory import is_begun
from atomrl.trainer import Options, prepare_run
from atomrl.trainer.build import device_name, with_steps
from atomrl.trainer.loop import Callback
from atomrl.trl.adapters import default_targets, tower_adapters, tower_targets
from atomrl.trl.arguments import NAMES, hint
from atomrl.trl.callbacks import Events, split_callbacks
from atomrl.trl.configs import CONFIGS, PlainArguments, TRLConfig, from_training_arguments
from atomrl.trl.inputs import has_pictures, lora_section, plain_rows
from atomrl.trl.objects import GivenModel, load_trained, quantization_of, with_adapters, with_template, without_new_pad
from atomrl.trl.state import RunState

INPUTS = "inputs"
INTERNALS = frozenset({
    "compute_rewards", "generate", "score", "dpo_loss", "concatenated_forward", "concatenated_inputs", "tokenize_row",
    "get_batch_logps", "get_batch_loss_metrics", "process_row",
})  # fmt: skip
"""Methods of TRL's trainers that a subclass may not override, beside those of transformers' `Trainer`."""
REFUSED = {
    "tools": "give the tools in a config, as `tools` (docs/guides/tool_calling.md)",
    "environment_factory": "give the environment in a config, as `environment` (docs/guides/environments.md)",
    "rollout_func": "completions are sampled here; episodes with replies are an `environment` in a config",
    "compute_loss_func": "the loss is the objective's; an own one is a function in a config (docs/guides)",
    "optimizers": "AdamW and its schedule are set by the arguments",
    "optimizer_cls_and_kwargs": "AdamW is set by the arguments",
    "model_init": "give model",
    "judge": "completions are ranked by reward_funcs",
    "reward_model": "give it as reward_funcs",
    "value_model": "PPOTrainer has a critic",
    "teacher_model": "GKDTrainer and DistillationTrainer have a teacher",
}
"""Arguments of TRL's trainers that change training and have no counterpart -> what to use."""
IDLE = frozenset({
    "compute_metrics", "preprocess_logits_for_metrics", "ref_model_init_kwargs", "model_adapter_name",
    "ref_adapter_name", "force_use_ref_model", "infinite",
})  # fmt: skip
"""Arguments of TRL's trainers that do not change what is trained."""

begun: set[Path] | None = None
"""Set by `atomrl run`: folders of the runs that the script has begun."""
planning: Callable[["Trainer", RunConfig], None] | None = None
"""Set by `atomrl run --dry-run`: called where a run would start."""


class TrainResult(dict[str, Any]):
    """The run's summary, and what TRL returns: `global_step`, `training_loss` and `metrics`."""

    def __init__(self, summary: Mapping[str, Any], state: RunState) -> None:
        super().__init__(summary)
        losses = [row["loss"] for row in state.log_history if "loss" in row]
        self.global_step: int = state.global_step
        self.training_loss: float = sum(losses) / len(losses) if losses else 0.0
        steps_per_second = self.global_step / summary["wall_s"] if summary["wall_s"] else 0.0
        self.metrics: dict[str, Any] = {
            "train_runtime": summary["wall_s"],
            "train_steps_per_second": round(steps_per_second, 3),
            "train_loss": self.training_loss,
        }


class Accelerator:
    """What scripts read of `trainer.accelerator`. The script runs in one process; ranks do not run it."""

    is_main_process = is_local_main_process = is_last_process = True
    process_index = local_process_index = 0
    num_processes = 1

    def __init__(self, device: Any) -> None:
        self.device = device
        self.state = SimpleNamespace(fsdp_plugin=None, deepspeed_plugin=None, num_processes=1, is_main_process=True)

    def print(self, *values: Any, **options: Any) -> None:
        """Print."""
        print(*values, **options)

    def wait_for_everyone(self) -> None:
        """Return at once."""

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        """Return the model, which nothing wraps."""
        return model


class Trainer:
    """Base class of all trainers: what they share of their arguments, and TRL's members.

    Args:
        model: a folder in Hugging Face layout, a hub name, a transformers model, or a `PeftModel`.
        args: the config of the trainer; None: its defaults. Copied: changing it later has no effect.
        train_dataset: rows: a list of dicts, a JSONL or Parquet file, or a Hugging Face dataset.
        eval_dataset: held-out rows, for an evaluation before and after training.
        processing_class, tokenizer: a tokenizer, its folder or its hub name; None: the one beside the model.
        callbacks: `transformers.TrainerCallback` objects, or functions `f(step, metrics)` that are called after every
            step; an exception ends the run.
        peft_config: train LoRA adapters instead of all weights: a `peft.LoraConfig`, or a dict with `r`, `lora_alpha`,
            `lora_dropout`, `target_modules`, `modules_to_save`.
        others: arguments that older versions of TRL had here and that are the config's today.

    Raises:
        ConfigError, DataError, RewardError: an argument or a row is invalid. Nothing was loaded or written.
    """

    kind: ClassVar[str] = "grpo"
    """Key of the trainer in `CONFIGS`."""
    copies_adapters: ClassVar[bool] = False
    """As in TRL, the reference is a copy of the adapters of the given `PeftModel`, not the model without them."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__.startswith(f"{__package__}."):
            return
        from transformers import Trainer as Theirs

        own = {name for name in vars(cls) if not name.startswith("__") and callable(getattr(cls, name))}
        internal = sorted(name for name in own if name in INTERNALS or hasattr(Theirs, name) or name.startswith("_"))
        if internal:
            raise ConfigError(
                f"class {cls.__name__} overrides {', '.join(internal)} of a trainer, which nothing calls here: "
                "training is AtomRL's loop. A loss, a reward or an advantage of your own is a function in a config "
                "(docs/reference/extension_points.md); a trainer may only get further methods"
            )

    def __init__(
        self,
        model: Any,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        tokenizer: Any = None,
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        self.args = self._own_args(args)
        self._notes: list[str] = []
        self._take_others(others)
        if processing_class is not None and tokenizer is not None:
            raise ConfigError("processing_class and tokenizer are the same; give only one")
        tokenizer = tokenizer if processing_class is None else processing_class
        self._image_processor = getattr(tokenizer, "image_processor", None)
        if self._image_processor is not None:  # a processor of text and pictures
            tokenizer = tokenizer.tokenizer
        if isinstance(self.args, TRLConfig):
            self.args.check(batches=True)
        loading = getattr(self.args, "model_init_kwargs", None)
        revision = loading.get("revision") if isinstance(loading, Mapping) else None
        if isinstance(model, str) and revision not in (None, "main"):
            model = f"{model}@{revision}"
        if peft_config is not None and not isinstance(peft_config, Mapping):
            model, peft_config = with_adapters(model, peft_config)
        self._given = GivenModel(model)
        self._notes += self._given.notes
        self._open_tokenizer(model, tokenizer)
        self._model: Any = None if self._given.is_name else model
        self._callbacks, self._events = split_callbacks(callbacks or ())
        self._open_adapters(peft_config)
        self.run_dir = _run_dir(self.args.output_dir, self.kind, type(self.args).__name__)
        self.config: RunConfig | None = None
        """The resolved config of the run; None before `train`."""
        self._train_rows, self._eval_rows = self._read_rows(train_dataset, eval_dataset)
        self._reads_pictures = has_pictures(self._train_rows)
        if self._reads_pictures and self._lora is not None:
            self._check_tower(self._lora.get("target_modules", "all-linear"))
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._items: list[dict[str, Any]] = []
        self._local: dict[str, Any] = {}
        self._companions: dict[Path, tuple[Any, Any]] = {}
        self.state = RunState()
        if self._events:
            self._events.call("on_init_end", self)

    def _open_tokenizer(self, model: Any, tokenizer: Any) -> None:
        """Load the tokenizer, with the template of the arguments; of a model by name by default the model's own.

        Raises:
            ConfigError: a loaded model has none.
        """
        if self._given.is_name:
            resolve_folder(model, weights=False)  # report a wrong name now
        elif tokenizer is None:
            tokenizer = getattr(self._given.base.config, "_name_or_path", None)
            if not tokenizer:
                raise ConfigError("processing_class: is required for a loaded model")
        self._initial_tokenizer = tokenizer
        source = tokenizer or model
        self.tokenizer = load_tokenizer(source) if isinstance(source, str | Path) else source
        # scripts load it with the model's arguments, which its files cannot hold
        for name in ("dtype", "torch_dtype", "quantization_config", "device_map"):
            getattr(self.tokenizer, "init_kwargs", {}).pop(name, None)
        if (end := getattr(self.args, "eos_token", None)) is not None:
            if end not in self.tokenizer.get_vocab():
                raise ConfigError(f"eos_token: {end!r} is not a token of the tokenizer")
            self.tokenizer.eos_token = end
            self._initial_tokenizer = self.tokenizer
        if (template := getattr(self.args, "chat_template_path", None)) is not None:
            self.tokenizer = self._initial_tokenizer = with_template(self.tokenizer, template)
        added = self.tokenizer("a")["input_ids"][len(self.tokenizer("a", add_special_tokens=False)["input_ids"]) :]
        if self.tokenizer.eos_token_id in added[-1:] and isinstance(self.args, TRLConfig):
            self._notes.append(
                f"differs from TRL: end of prompts and texts: TRL one more {self.tokenizer.eos_token}, which the "
                "tokenizer adds (add_eos_token); here none"
            )
        if (without := without_new_pad(self.tokenizer, self._given.embeddings)) is not None:
            self._notes.append(
                f"pad_token {self.tokenizer.pad_token!r}: left out, as the model has no embedding for it"
            )
            self.tokenizer = self._initial_tokenizer = without

    def _open_adapters(self, peft_config: Any) -> None:
        """Take adapters and quantization from `peft_config` or the model.

        Raises:
            ConfigError: both have adapters; or weights are quantized or frozen that would be trained.
        """
        self._peft_config = peft_config
        if peft_config is not None and self._given.lora is not None:
            raise ConfigError("peft_config: the model is a PeftModel already; give only one")
        self._lora = self._given.lora or lora_section(peft_config)
        if self._lora is not None and "target_modules" not in self._lora and not isinstance(peft_config, Mapping):
            self._lora["target_modules"] = default_targets(self._given.config.model_type)
        if self._lora is not None and getattr(self.args, "disable_dropout", False) and self._lora.get("dropout"):
            self._lora["dropout"] = 0.0
            self._notes.append("lora_dropout: 0, as TRL switches dropout off (disable_dropout)")
        self._quantization = self._given.quantization or self._named_quantization
        if self._quantization and self._lora is None:
            raise ConfigError("quantised weights are not trained: add adapters (peft_config)")
        dtype = "float32" if self._given.is_name else str(self._given.base.dtype).removeprefix("torch.")
        if self._lora is None and dtype != "float32" and isinstance(self.args, TRLConfig):
            self._notes.append(
                f"differs from TRL: weights that are trained: TRL {dtype}, as the model has been loaded; here float32, "
                "cast to model.dtype for computing"
            )
        if self._given.adapted and not any(weight.requires_grad for weight in self._given.model.parameters()):
            self._notes.append("differs from TRL: adapters loaded without is_trainable: TRL trains nothing; here them")
        if self._given.is_name and self._lora is None and adapted_path(self._given.model) is not None:
            self._notes.append(f"model: the adapters of {self._given.model} are merged, and all weights are trained")
        if self._lora is None and self._given.frozen == "others":
            raise ConfigError(
                "model: some of its weights are frozen (requires_grad): here all weights are trained, or all but the "
                "vision tower"
            )

    def _check_tower(self, targets: Any) -> None:
        """Compare the adapters with those of peft, which are on layers of a vision tower too.

        Raises:
            ConfigError: the model has such adapters; text alone does not train them, and pictures would.
        """
        given = tower_adapters(self._given.base) if self._given.adapted else []
        meant = [] if self._given.adapted else tower_targets(self._given.config, targets)
        if given or (meant and isinstance(targets, str) and targets != "all-linear"):
            raise ConfigError(
                f"the vision tower has adapters ({(given or meant)[0]}, ...), and here only the language model "
                "gets some: name its layers in target_modules (unsloth: finetune_vision_layers=False)"
            )
        if meant:
            self._notes.append(
                f"differs from TRL: adapters are on the language model alone, and not on {len(meant)} layers of the "
                "vision tower"
            )

    # ----------------------------------------------------------------------------------------------------------------
    # Arguments

    def _own_args(self, args: Any) -> Any:
        """Return a copy of the trainer's config, made from transformers' `TrainingArguments` if it is one.

        Raises:
            ConfigError: it belongs to another trainer, or to the package trl.
        """
        from transformers import TrainingArguments

        wanted = CONFIGS[self.kind]
        if args is None:
            return wanted()
        if type(args) in (TrainingArguments, PlainArguments):
            return from_training_arguments(args, self.kind)
        if not isinstance(args, wanted):
            where = " of trl: import it from atomrl.trl" if type(args).__module__.startswith("trl.") else ""
            raise ConfigError(f"args must be a {wanted.__name__}, not {type(args).__name__}{where}")
        return copy.deepcopy(args)

    def _take_others(self, others: Mapping[str, Any]) -> None:
        for name, value in others.items():
            if value is None or value == (None, None) or value == []:
                continue
            if name in REFUSED:
                raise ConfigError(f"{type(self).__name__}({name}=...) has no counterpart: {REFUSED[name]}")
            if name == "data_collator":
                self._check_collator(value)
            elif name == "quantization_config":
                self.args.model_init_kwargs = {**(self.args.model_init_kwargs or {}), name: value}
            elif name in IDLE:
                self._notes.append(f"{name}: no effect here")
            elif isinstance(self.args, TRLConfig):
                setattr(self.args, name, value)  # which refuses an unknown one
            else:
                raise TypeError(f"{type(self).__name__} has no argument {name!r}")

    def _check_collator(self, collator: Any) -> None:
        name = type(collator).__name__
        if name == "DataCollatorForLanguageModeling" and not getattr(collator, "mlm", False):
            return
        if name in ("DataCollatorForSeq2Seq", "DataCollatorWithPadding"):  # which only pad
            return
        raise ConfigError(
            f"data_collator: {name} has no counterpart: a row's tokens are trained as TRL trains them without one; "
            "give prompt and completion in columns, or completion_only_loss or assistant_only_loss, to select tokens"
        )

    @property
    def _named_quantization(self) -> str | None:
        settings = getattr(self.args, "model_init_kwargs", None)
        return (
            quantization_of(settings.get("quantization_config"), self._notes) if isinstance(settings, Mapping) else None
        )

    def _read_rows(self, train: Any, held_out: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        if train is None:
            raise ConfigError("train_dataset: is required")
        return plain_rows(train, "train_dataset"), None if held_out is None else plain_rows(held_out, "eval_dataset")

    # ----------------------------------------------------------------------------------------------------------------
    # The run

    def _sections(self) -> dict[str, Any]:
        """Return further sections of the config, besides those that all trainers have."""
        return {}

    def train(self, resume_from_checkpoint: bool | str | Path | None = None, **_: Any) -> TrainResult:
        """Start the run, or continue the run in `args.output_dir` from its newest checkpoint.

        Ctrl-C finishes the current step, saves a checkpoint, and returns.

        Args:
            resume_from_checkpoint: True, or the path of the run's newest checkpoint.

        Returns:
            The run's summary, a dict: `run` (its folder), `model` (folder of the trained model), `finished`, `steps`,
            `wall_s`, and with an `eval_dataset` `accuracy_before`, `accuracy_after`, ...; with TRL's attributes.

        Raises:
            ConfigError, DataError, RewardError: the message uses the names of `GRPOArgs`.
        """
        if (started := launched()) is not None and started.rank > 0:
            # of a launcher that started the script several times: the first process trains, this one is its rank
            follow_launcher(FSDPConfig(type="fsdp"), device_name(self._device), None)
            raise SystemExit(0)
        if self.config is not None and not resume_from_checkpoint and self._given.is_name:
            # a second training goes on from the trained weights
            self._given, self._initial_tokenizer = GivenModel(self.model), self.tokenizer
        resume = self._check_folder(resume_from_checkpoint)
        if begun is not None:
            begun.add(self.run_dir.resolve())
        try:
            config = self._make_config(resume)
            self._begin_state(with_steps(config, len(self._train_rows)), resume)
            if planning is not None:
                planning(self, config)
            run = prepare_run(config, self._local or None)
            self.config = run.config
            self._begin_state(run.config, resume)
            print_line(f"{self._describe_data()}; run folder {self.run_dir}")
            print_line("\n".join([*run.describe_batch(), run.describe_ranks()]))
            for note in self.notes():
                print_line(note)
            device = self._given.to_cpu()
            if self._events:
                self._events.call("on_train_begin", self)
                self._events.call("on_step_begin", self)
            callbacks: list[Callback] = [*self._callbacks, self._after_step]
            summary = run.execute(Options(resume=resume, callbacks=callbacks, wording=hint))
            self.state.end(summary["steps"])
        except (ConfigError, DataError) as error:
            raise type(error)(renamed(_of_rows(str(error), self.run_dir / INPUTS), NAMES)) from error
        if summary["model"] is not None:
            self._model = (
                None  # drop a cached initial model, so that `model` loads the trained one
                if self._given.is_name
                else self._given.take(summary["model"], device, self._load, self._peft_config)
            )
        if not summary["finished"]:
            print_line("stopped early; continue with train(resume_from_checkpoint=True)")
        if self._events:
            self._events.call("on_train_end", self)
        if getattr(self.args, "push_to_hub", False):
            self.push_to_hub()
        return TrainResult(summary, self.state)

    def _begin_state(self, config: RunConfig, resume: bool) -> None:
        self.state.begin(config, len(self._train_rows), self._counted_updates(config), resume)

    def _counted_updates(self, config: RunConfig) -> int:
        """Return what a step of the run adds to `state.global_step`."""
        return config.updates_per_step if isinstance(self.args, TRLConfig) else 1

    def _after_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        row = self.state.after_step(step, metrics)
        return bool(self._events) and self._events.after_step(self, row)

    def notes(self) -> list[str]:
        """List what differs from TRL, and the arguments without effect here."""
        return [*(self.args.notes() if isinstance(self.args, TRLConfig) else ()), *self._notes]

    def _describe_data(self) -> str:
        return f"{len(self._train_rows)} rows"

    def _check_folder(self, resume: Any) -> bool:
        """Return whether to resume. Checks the folder before any objects are written into it."""
        if isinstance(resume, str | Path):
            newest = self.run_dir / "model"
            if newest.exists() and Path(resume).resolve() not in (newest.resolve(), self.run_dir.resolve()):
                raise ConfigError(
                    f"resume_from_checkpoint={str(resume)!r} is not the newest checkpoint of {self.run_dir} "
                    f"({newest.resolve()}): a run continues from its newest one"
                )
        if resume and (self.args.output_dir is None or not (self.run_dir / "config.yaml").is_file()):
            raise ConfigError(
                f"no run to resume in {self.run_dir}: set {type(self.args).__name__}.output_dir to the run's folder"
            )
        if not resume and is_begun(self.run_dir) and begun is not None and self.run_dir.resolve() in begun:
            # TRL writes into the folder again
            self.run_dir, earlier = _free(self.run_dir), self.run_dir
            print_line(f"{earlier} has an earlier run of this script; this one is in {self.run_dir}")
        elif not resume and is_begun(self.run_dir):
            raise ConfigError(
                f"the run {self.run_dir} already exists: continue it with train(resume_from_checkpoint=True), "
                f"or set {type(self.args).__name__}.output_dir to another folder"
            )
        return bool(resume)

    def _companion(self, model: Any, name: str, tokenizer: Any = None) -> str:
        """Return the name or folder of a further model (reward model, critic, teacher). An object is saved into the
        run's folder when training starts, with its tokenizer.

        Raises:
            ConfigError: it is no model, or its weights cannot be saved as they are.
        """
        if isinstance(model, str | Path):
            resolve_folder(model, weights=False)  # report a wrong name now
            return str(model)
        if not hasattr(model, "save_pretrained"):
            raise ConfigError(f"{name}: must be a folder, a hub name or a transformers model, not {type(model)}")
        if hasattr(model, "get_base_model") or getattr(model, "is_quantized", False):
            raise ConfigError(f"{name}: has adapters or is quantised: merge it, and give the folder of its weights")
        folder = self.run_dir / INPUTS / name
        self._companions[folder] = model, tokenizer
        return str(folder)

    def _make_config(self, resume: bool) -> RunConfig:
        """Write the objects into the run's folder, and build the config that names them."""
        inputs = self.run_dir / INPUTS
        for folder, parts in self._companions.items() if not resume else ():
            for part in filter(None, parts):
                part.save_pretrained(folder)
        model, adapters = self._given.write(inputs / "model") if not resume else self._written(inputs)
        if self._has_processor and not resume and model == str(inputs / "model"):
            self._write_image_processor(inputs / "model")
        tokenizer = self._initial_tokenizer
        if tokenizer is not None and not isinstance(tokenizer, str | Path):
            if not resume:
                tokenizer.save_pretrained(inputs / "tokenizer")
            tokenizer = str(inputs / "tokenizer")
        answer = "ground_truth" if "ground_truth" in self._train_rows[0] else None
        data = {"train": str(inputs / "train.jsonl"), "answer_field": answer}
        write_jsonl(self._train_rows, inputs / "train.jsonl")
        if self._eval_rows is not None:
            data["eval"] = str(inputs / "eval.jsonl")
            write_jsonl(self._eval_rows, inputs / "eval.jsonl")
        started = {} if adapters is None else {"start": adapters}
        started |= {"reference": "start"} if started and self.copies_adapters else {}
        lora = {**(self._lora or {}), **started} if started else self._lora
        of_model = {"path": model, "tokenizer": None if tokenizer == model else tokenizer and str(tokenizer)}
        of_model |= {"lora": lora} | ({"quantization": self._quantization} if self._quantization else {})
        if self._reads_pictures and lora is None:  # as TRL, which trains what requires a gradient
            of_model["freeze_vision"] = self._given.frozen == "tower"
        tree = {
            "run_name": self.run_dir.name,
            "output_dir": str(self.run_dir.parent),
            "model": of_model,
            "data": data,
            **self._sections(),
        }
        config: RunConfig = load_config(merge_trees(self.args.to_tree(), tree), name=type(self).__name__)
        return config

    @property
    def _has_processor(self) -> bool:
        return self._image_processor is not None or self._reads_pictures

    def _write_image_processor(self, folder: Path) -> None:
        """Save the image processor beside the model's weights: that of the arguments, or the model's own."""
        name = self._given.model if self._given.is_name else getattr(self._given.base.config, "_name_or_path", "")
        if self._image_processor is not None:
            self._image_processor.save_pretrained(folder)
        elif name:
            copy_processor(resolve_folder(name, weights=False), folder)

    def _written(self, inputs: Path) -> tuple[str, str | None]:
        adapters = inputs / "adapters"
        model = inputs / "model" if (inputs / "model").exists() else self._given.model
        if not isinstance(model, str | Path):
            model = getattr(self._given.base.config, "_name_or_path", "")
        return str(model), str(adapters) if adapters.exists() else None

    # ----------------------------------------------------------------------------------------------------------------
    # Members that scripts read

    @property
    def model(self) -> Any:
        """The model as a transformers model, trained once `train` has returned; a `PeftModel` with adapters. If the
        model was passed as an object, it is that object, and `train` updates its weights."""
        if self._model is None:
            trained = self.run_dir / "model"
            there = trained.exists() and self.config is not None
            self._model = self._load(trained if there else resolve_folder(self._given.model))
            self._model.to(device_name(self._device))
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._model = model

    @property
    def _device(self) -> str:
        return self.args.chosen_device if isinstance(self.args, TRLConfig) else self.args.device

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        return self.tokenizer

    @processing_class.setter
    def processing_class(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def accelerator(self) -> Accelerator:
        """What scripts read of accelerate's object."""
        return Accelerator(device_name(self._device))

    is_fsdp_enabled = is_deepspeed_enabled = False

    @property
    def log_history(self) -> list[dict[str, Any]]:
        """Metrics of every step and evaluation so far, each a dict with `step` (names: docs/reference/cli.md)."""
        return read_metrics(self.run_dir / "metrics.jsonl") if self.config else []

    def is_world_process_zero(self) -> bool:
        """Return True: ranks do not run the script."""
        return True

    is_local_process_zero = is_world_process_zero

    def add_callback(self, callback: Any) -> None:
        """Add a `TrainerCallback` (object or class), or a function `f(step, metrics)`."""
        functions, events = split_callbacks([callback])
        self._callbacks = (*self._callbacks, *functions)
        self._events = Events([*self._events.callbacks, *events.callbacks])

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Save model, tokenizer and image processor in Hugging Face layout.

        Args:
            output_dir: None: the run's folder.
        """
        folder = self.run_dir if output_dir is None else output_dir
        from atomrl.models.older_readers import make_readable

        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        if self._has_processor:
            self._write_image_processor(Path(folder))
        make_readable(folder)

    @property
    def hub_model_id(self) -> str:
        """Name of the model's repository on the hub."""
        return getattr(self.args, "hub_model_id", None) or Path(self.args.output_dir or self.run_dir).name

    def push_to_hub(self, commit_message: str | None = "End of training", **options: Any) -> str:
        """Upload the trained model to the hub, with `huggingface_hub`.

        Args:
            options: `token` and `revision` of the upload; others are for the model card.

        Returns:
            Name of the repository.
        """
        import tempfile

        from huggingface_hub import HfApi

        token = options.get("token") or getattr(self.args, "hub_token", None)
        api = HfApi(token=token)
        private = getattr(self.args, "hub_private_repo", None)
        repository = getattr(
            api.create_repo(self.hub_model_id, private=private, exist_ok=True), "repo_id", self.hub_model_id
        )
        with tempfile.TemporaryDirectory() as folder:
            self.save_model(folder)
            self.create_model_card(folder=folder)
            api.upload_folder(
                repo_id=repository, folder_path=folder, commit_message=commit_message, revision=options.get("revision")
            )
        print_line(f"uploaded to {repository}")
        return str(repository)

    def create_model_card(self, *_: Any, folder: str | Path | None = None, **details: Any) -> None:
        """Write README.md for the hub: the base model, and that it was trained here.

        Args:
            details: TRL's arguments; `model_name`, `dataset_name` and `tags` are used.
        """
        base = self._given.model if self._given.is_name else getattr(self._given.base.config, "_name_or_path", "")
        tags = details.get("tags") or []
        lines = [
            "---",
            "library_name: transformers",
            f"tags: {json.dumps([*([tags] if isinstance(tags, str) else tags), 'atomrl'])}",
        ]
        lines += [f"base_model: {base}"] if base else []
        lines += [f"datasets: {json.dumps(details['dataset_name'])}"] if details.get("dataset_name") else []
        title = details.get("model_name") or self.run_dir.name
        lines += ["---", "", f"# {title}", "", f"Trained with AtomRL's {type(self).__name__}.", ""]
        target = Path(folder or self.run_dir)
        target.mkdir(parents=True, exist_ok=True)
        (target / "README.md").write_text("\n".join(lines), encoding="utf-8")

    def evaluate(self, eval_dataset: Any = None, **_: Any) -> dict[str, float]:
        """Return the metrics of the evaluation after training, with `eval_` before TRL's names.

        Raises:
            ConfigError: there was none, or another data set is given.
        """
        if eval_dataset is not None and eval_dataset is not self.eval_dataset:
            raise ConfigError("evaluate(eval_dataset=...): give it to the trainer; it is evaluated after training")
        if self._eval_rows is None:
            raise ConfigError("evaluate(): the trainer has no eval_dataset")
        rows = [row for row in self.state.log_history if any(name.startswith("eval") for name in row)]
        if not rows:
            raise ConfigError(
                "evaluate(): call it after train(), which evaluates before the first and after the last step"
            )
        return {name.replace("eval/", "eval_"): value for name, value in rows[-1].items() if name.startswith("eval")}

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics."""
        print(
            f"***** {split} metrics *****", *(f"  {key} = {value}" for key, value in sorted(metrics.items())), sep="\n"
        )

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write metrics to `SPLIT_results.json` in the run's folder, and with `combined` to `all_results.json`."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for name in (split, *(["all"] if combined else [])):
            file = self.run_dir / f"{name}_results.json"
            before = json.loads(file.read_text(encoding="utf-8")) if name == "all" and file.exists() else {}
            file.write_text(json.dumps({**before, **metrics}, indent=4, default=str) + "\n", encoding="utf-8")

    def save_state(self) -> None:
        """Write `trainer_state.json` with the metrics of all steps into the run's folder."""
        self.state.save_to_json(str(self.run_dir / "trainer_state.json"))

    @staticmethod
    def _load(folder: str | Path) -> Any:
        from atomrl.models.shapes import auto_class

        return load_trained(folder, auto_class(model_config_only(folder)))


def check_reference(reference: Any, model: Any) -> None:
    """Raise ConfigError for a reference that is another model."""
    if reference is None or reference is model:
        return
    names = [
        one if isinstance(one, str | Path) else getattr(one.config, "_name_or_path", None) for one in (reference, model)
    ]
    if names[0] is None or str(names[0]) != str(names[1]) or _differ(reference, model):
        raise ConfigError("ref_model: the reference is always the initial model; remove it")


def _differ(one: Any, other: Any) -> bool:
    """Return True if two models have a parameter of one name with other values. They may have other dtypes."""
    import torch

    if isinstance(one, str | Path) or isinstance(other, str | Path):
        return False
    others = dict(other.named_parameters())
    pairs = [(a.detach(), others[name].detach()) for name, a in one.named_parameters() if name in others]
    return not all(torch.equal(a, b.to(a)) or torch.equal(a.to(b), b) for a, b in pairs)


def _run_dir(output_dir: str | Path | None, kind: str, args: str) -> Path:
    """Return the run's folder: `output_dir`, or the first of `runs/KIND`, `runs/KIND-2`, ... that does not exist."""
    if output_dir is not None:
        path = Path(output_dir)
        if path.name in ("", "..") or path.name.startswith("."):
            raise ConfigError(
                f"{args}.output_dir must be a folder whose name does not begin with a dot (got {str(output_dir)!r})"
            )
        return path
    return _free(Path("runs", kind))


def _free(path: Path) -> Path:
    """Return `path`, or the first of `path-2`, `path-3`, ... that does not exist."""
    paths = itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2)))
    return next(one for one in paths if not one.exists())


def _of_rows(message: str, inputs: Path) -> str:
    """Name the rows of the script in a message on the files that were made of them."""
    message = message.replace(f"{inputs}/", "").replace(" (data.on_bad_row=skip drops them)", "")
    message = re.sub(r"\b(train|eval)\.jsonl:(\d+)", lambda m: f"{m[1]}_dataset[{int(m[2]) - 1}]", message)
    return re.sub(r"\b(train|eval)\.jsonl\b", r"\1_dataset", message)


def print_line(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr)
