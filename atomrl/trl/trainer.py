"""Trainers with TRL's interface. Each builds a config from Python objects and starts the run of `atomrl train` on it,
so there is only one training loop."""

import copy
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from atomrl.common.files import write_jsonl
from atomrl.config import ConfigError, DataConfig, RunConfig, load_config, merge_trees
from atomrl.config.loading import renamed
from atomrl.data.files import DataError, RawRow, error_list
from atomrl.data.problems import problem_reader, read_source, to_problems
from atomrl.data.tasks import generate, is_generator
from atomrl.trl.arguments import (
    NAMES,
    DPOConfig,
    GRPOArgs,
    GRPOConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
    TRLConfig,
    hint,
    in_trl_names,
)
from atomrl.models.loading import load_tokenizer, resolve_folder
from atomrl.rewards.compute import name_functions
from atomrl.rewards.table import REWARDS, AnyReward, find_reward
from atomrl.tracking.reading.lines import read_metrics
from atomrl.tracking.run_directory import is_begun
from atomrl.trainer import prepare_run
from atomrl.trainer.build import device_name
from atomrl.types import Problem

# --------------------------------------------------------------------------------------------------------------------
# Conversion of Python objects (data sets, reward functions, peft configs) into sections of a config

BUILT_IN_PROBLEMS = 512
INSTRUCTION = "Think between <think> and </think>, then write the number alone between <answer> and </answer>."
ANSWERS = ("ground_truth", "answer", "solution")
"""Names of the ground truth column; the first that the rows have is used."""

DatasetRows = list[dict[str, Any]]


def built_in_rows() -> DatasetRows:
    """Return the rows of the built-in task, which is used without a `train_dataset`: two-step arithmetic.

    Example:
        >>> built_in_rows()[0]["prompt"]  # doctest: +ELLIPSIS
        'Start with ...'
    """
    rows = generate("arithmetic", BUILT_IN_PROBLEMS, steps=2)
    return [{**row, "prompt": f"{row['prompt']}\n{INSTRUCTION}"} for row in rows]


def dataset_rows(dataset: Any, name: str) -> DatasetRows:
    """Read and check the rows of a list of dicts, a JSONL or Parquet file, or a Hugging Face dataset.

    If no row has a `ground_truth`, the column `answer` or `solution` is copied to it.

    Args:
        name: name of the argument, for messages.

    Raises:
        DataError: the data set is of another type or empty, or rows are invalid (all are listed).
    """
    raw = _raw_rows(dataset, name)
    rows = [item.row for item in raw if item.row is not None]
    answer = next((key for key in ANSWERS if any(key in row for row in rows)), None)
    read = problem_reader(DataConfig(train="-", answer_field=answer))

    def checked(place: str, row: Mapping[str, Any]) -> Problem:
        try:
            json.dumps(row, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(f"a value is not JSON serializable: {error}") from None
        return read(place, row)

    _, problems = to_problems(raw, checked)
    if problems:
        raise DataError(f"{name}: {len(problems)} rows have problems:\n{error_list(problems)}")
    if not rows:
        raise DataError(f"{name} has no rows")
    return [{**row, "ground_truth": row.get(answer)} for row in rows] if answer else rows


def plain_rows(dataset: Any, name: str) -> DatasetRows:
    """Read the rows of a list of dicts, a file or a Hugging Face dataset, unchanged.

    Raises:
        DataError: the data set is of another type or empty, or a row is not a dict of JSON values.
    """
    rows = []
    for raw in _raw_rows(dataset, name):
        try:
            json.dumps(raw.row, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(f"{raw.place}: a value is not JSON serializable: {error}") from None
        if raw.row is None:
            raise DataError(f"{raw.place}: {raw.error}")
        rows.append(raw.row)
    if not rows:
        raise DataError(f"{name} has no rows")
    return rows


def _raw_rows(dataset: Any, name: str) -> list[RawRow]:
    if isinstance(dataset, str | Path):
        if is_generator(str(dataset)):
            raise DataError(
                f"{name}: {dataset} is a task; pass its problems: atomrl.data.tasks.generate({str(dataset)!r}, 500)"
            )
        return list(read_source(str(dataset)))
    if isinstance(dataset, Mapping):
        raise DataError(f"{name} is a mapping with the keys {', '.join(map(str, dataset))}; pass one of its splits")
    if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{name} must be a list of dicts, a JSONL file or a Hugging Face dataset, not {type(dataset).__name__}"
        )
    rows = []
    for index, row in enumerate(dataset):
        problem = None if isinstance(row, Mapping) else f"a row must be a dict with a prompt, not {type(row).__name__}"
        rows.append(RawRow(f"{name}[{index}]", None if problem else dict(row), problem))
        if problem:
            break  # the others are not dicts either
    return rows


def reward_items(
    functions: Any, weights: Sequence[float] | None, messages: bool = False
) -> tuple[list[dict[str, Any]], dict[str, AnyReward]]:
    """Convert reward functions into the items of `reward.functions`.

    Args:
        functions: one or several of: a function, a built-in name, a dotted path.
        weights: one for each function, or None for 1 each.
        messages: pass completions as messages if the prompt is messages, as TRL does (built-in rewards excepted).

    Returns:
        The items, and the functions that only this process has, by name.

    Raises:
        ConfigError: no function is given, the number of weights differs, or an item is not a function.
    """
    rewards = list(functions) if isinstance(functions, Sequence) and not isinstance(functions, str) else [functions]
    if not rewards or rewards == [None]:
        raise ConfigError("reward_funcs: give at least one reward function")
    if weights is not None and len(weights) != len(rewards):
        raise ConfigError(f"GRPOArgs.reward_weights has {len(weights)} values for {len(rewards)} reward functions")
    for function in rewards:
        if isinstance(function, str):
            find_reward(function)
        elif not callable(function):
            raise ConfigError(f"reward_funcs: {function!r} is neither a function nor its name")
    names, local = name_functions(rewards)
    items = [{"function": n, "weight": w} for n, w in zip(names, weights or [1.0] * len(names), strict=True)]
    for item in items if messages else ():
        if item["function"] not in REWARDS:
            item["completions"] = "messages"
    return items, local


LORA = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target_modules"}
"""peft's names -> keys of `model.lora`."""
WITHOUT_EFFECT = {
    "task_type", "peft_type", "peft_version", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping",
    "fan_in_fan_out", "runtime_config",
}  # fmt: skip
"""Fields of `peft.LoraConfig` that do not affect training."""


def lora_section(peft_config: Any) -> dict[str, Any] | None:
    """Convert a `peft.LoraConfig`, or a dict with its names, into the section `model.lora`.

    Raises:
        ConfigError: it sets an option that adapters do not have here.

    Example:
        >>> lora_section({"r": 8, "lora_alpha": 16})
        {'rank': 8, 'alpha': 16}
    """
    if peft_config is None:
        return None
    if isinstance(peft_config, Mapping):
        options = dict(peft_config)
        unknown = [name for name in options if name not in LORA]
    else:
        if type(peft_config).__name__ != "LoraConfig":
            raise ConfigError(f"peft_config must be a peft.LoraConfig or a dict, not {type(peft_config).__name__}")
        options, defaults = {name: getattr(peft_config, name) for name in LORA}, type(peft_config)()
        others = [field.name for field in fields(peft_config) if field.name not in LORA.keys() | WITHOUT_EFFECT]
        unknown = [name for name in others if getattr(peft_config, name) != getattr(defaults, name)]
    if unknown:
        raise ConfigError(f"peft_config: {unknown[0]!r} is not supported; supported: {', '.join(LORA)}")
    section = {LORA[name]: value for name, value in options.items() if value is not None}
    modules = section.get("target_modules")
    return section | ({} if modules is None or isinstance(modules, str) else {"target_modules": sorted(modules)})


# --------------------------------------------------------------------------------------------------------------------
# Trainers

INPUTS = "inputs"
"""Subfolder of the run's folder with the model, tokenizer and data that were passed as objects."""


class Trainer:
    """Base class of the trainers: turns arguments into a config and starts the run on it."""

    run_dir: Path
    _train_rows: DatasetRows
    _eval_rows: DatasetRows | None
    _local: Mapping[str, AnyReward] = {}
    """Reward functions that only this process has, by name."""

    def _set_up(
        self,
        model: Any,
        tokenizer: Any,
        processing_class: Any,
        args: GRPOArgs | TRLConfig,
        callbacks: Sequence[Callable[[int, Mapping[str, float]], None]] | None,
        peft_config: Any,
    ) -> None:
        """Check and store the arguments that all trainers have."""
        self.args = copy.deepcopy(args)
        if processing_class is not None:
            if tokenizer is not None:
                raise ConfigError("processing_class and tokenizer are the same; give only one")
            tokenizer = processing_class
        if isinstance(model, str | Path):
            resolve_folder(model, weights=False)  # report a wrong name now
        elif hasattr(model, "peft_config"):
            raise ConfigError("model: merge the adapters first (model.merge_and_unload())")
        elif not hasattr(model, "save_pretrained"):
            raise ConfigError(f"model must be a folder, a hub name or a transformers model, not {type(model).__name__}")
        elif tokenizer is None:
            raise ConfigError("tokenizer: is required for a loaded model")
        self._initial_model, self._initial_tokenizer = model, tokenizer
        self._model = None if isinstance(model, str | Path) else model
        source = tokenizer or model
        self.tokenizer = load_tokenizer(source) if isinstance(source, str | Path) else source
        self._callbacks = tuple(callbacks or ())
        if not all(callable(callback) for callback in self._callbacks):
            raise ConfigError("callbacks: each must be a function f(step, metrics)")
        self._lora = lora_section(peft_config)
        kind = self.args.kind if isinstance(self.args, TRLConfig) else "grpo"
        self.run_dir = _run_dir(self.args.output_dir, kind, type(self.args).__name__)
        self.config: RunConfig | None = None
        """The resolved config of the run; None before `train`."""

    def _sections(self) -> dict[str, Any]:
        """Return further sections of the config, besides those that all trainers have."""
        return {}

    def train(self, resume_from_checkpoint: bool = False) -> dict[str, Any]:
        """Start the run, or continue the run in `args.output_dir` from its newest checkpoint.

        Ctrl-C finishes the current step, saves a checkpoint, and returns.

        Returns:
            The run's summary: `run` (its folder), `model` (folder of the trained model), `finished`, `steps`, `wall_s`,
            and with an `eval_dataset` `accuracy_before`, `accuracy_after`, ...

        Raises:
            ConfigError, DataError, RewardError: the message uses the names of `GRPOArgs`.
        """
        resume = self._check_folder(resume_from_checkpoint)
        try:
            run = prepare_run(self._make_config(resume), self._local or None)
            self.config = run.config
            print_line(f"{self._describe_data()}; run folder {self.run_dir}")
            print_line("\n".join([*run.describe_batch(), run.describe_ranks()]))
            for note in self.args.notes() if isinstance(self.args, TRLConfig) else ():
                print_line(note)
            summary = run.execute(resume, callbacks=self._callbacks, wording=hint)
        except (ConfigError, DataError) as error:
            raise type(error)(renamed(str(error), NAMES)) from error
        if isinstance(self._initial_model, str | Path):
            self._model = None  # drop a cached initial model, so that `model` loads the trained one
        elif summary["model"] is not None:
            trained = self._load(summary["model"])
            self._initial_model.load_state_dict(trained.state_dict())
            self._initial_model.generation_config = trained.generation_config  # has the trained end-of-turn token
        if not summary["finished"]:
            print_line("stopped early; continue with train(resume_from_checkpoint=True)")
        return summary

    def _describe_data(self) -> str:
        return f"{len(self._train_rows)} rows"

    @property
    def model(self) -> Any:
        """The model as a transformers model, trained once `train` has returned. If the model was passed as an object,
        it is that object, and `train` updates its weights."""
        if self._model is None:
            trained = self.run_dir / "model"
            self._model = self._load(
                trained if trained.exists() and self.config else resolve_folder(self._initial_model)
            )
            self._model.to(device_name(self.args.device))
        return self._model

    @property
    def log_history(self) -> list[dict[str, Any]]:
        """Metrics of every step and evaluation so far, each a dict with `step` (names: docs/reference/cli.md)."""
        return read_metrics(self.run_dir / "metrics.jsonl") if self.config else []

    @property
    def state(self) -> SimpleNamespace:
        """TRL's `trainer.state`: `log_history`, also with TRL's metric names, and `global_step`."""
        rows = [in_trl_names(row) for row in self.log_history]
        return SimpleNamespace(log_history=rows, global_step=max((row["step"] for row in rows), default=0))

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Save model and tokenizer in Hugging Face layout (`trainer.model.push_to_hub` uploads them).

        Args:
            output_dir: None: the run's folder.
        """
        folder = self.run_dir if output_dir is None else output_dir
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def _check_folder(self, resume: Any) -> bool:
        """Return whether to resume. Checks the folder before any objects are written into it."""
        if not isinstance(resume, bool | None):
            raise ConfigError(
                "resume_from_checkpoint must be True or False; True uses the newest checkpoint of output_dir"
            )
        if resume and (self.args.output_dir is None or not (self.run_dir / "config.yaml").is_file()):
            raise ConfigError(
                f"no run to resume in {self.run_dir}: set {type(self.args).__name__}.output_dir to the run's folder"
            )
        if not resume and is_begun(self.run_dir):
            raise ConfigError(
                f"the run {self.run_dir} already exists: continue it with train(resume_from_checkpoint=True), "
                f"or set {type(self.args).__name__}.output_dir to another folder"
            )
        return bool(resume)

    def _make_config(self, resume: bool) -> RunConfig:
        """Write the objects into the run's folder, and build the config that names them."""
        inputs = self.run_dir / INPUTS

        def path_of(source: Any, name: str) -> str | None:
            """Return a path as it is; save an object and return its path."""
            if source is None or isinstance(source, str | Path):
                return None if source is None else str(source)
            if not resume:
                source.save_pretrained(inputs / name)
            return str(inputs / name)

        answer = "ground_truth" if "ground_truth" in self._train_rows[0] else None
        data = {"train": str(inputs / "train.jsonl"), "answer_field": answer}
        write_jsonl(self._train_rows, inputs / "train.jsonl")
        if self._eval_rows is not None:
            data["eval"] = str(inputs / "eval.jsonl")
            write_jsonl(self._eval_rows, inputs / "eval.jsonl")
        model, tokenizer = path_of(self._initial_model, "model"), path_of(self._initial_tokenizer, "tokenizer")
        tree = {
            "run_name": self.run_dir.name,
            "output_dir": str(self.run_dir.parent),
            "model": {"path": model, "tokenizer": None if tokenizer == model else tokenizer, "lora": self._lora},
            "data": data,
            **self._sections(),
        }
        return load_config(merge_trees(self.args.to_tree(), tree), name=type(self).__name__)

    @staticmethod
    def _load(folder: str | Path) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder)


class GRPOTrainer(Trainer):
    """Train a model with GRPO.

    The arguments become the config of a run (`trainer.config`), and `train` is `atomrl train` on it: the same loop,
    folder, checkpoints and metrics. Objects are saved into the run's folder, so a model passed as an object is on disk
    too.

    Args:
        model: a folder in Hugging Face layout, a hub name, or a transformers model.
        tokenizer: a folder, a hub name or a tokenizer; None: the one beside the model.
        reward_funcs: one or several of: `f(prompts, completions, **columns) -> list of numbers`, the name of a built-in
            reward, a dotted path. A completion's reward is their weighted sum.
        args: `GRPOArgs`, or `GRPOConfig` with TRL's arguments; None: `GRPOArgs()`. Copied: changing it later has no
            effect.
        train_dataset: a list of dicts, a JSONL or Parquet file, or a Hugging Face dataset. Rows have a `prompt` (text
            or messages), usually a `ground_truth` (or `answer` or `solution`), and any other columns. None: a built-in
            arithmetic task.
        eval_dataset: problems of the same form, for an evaluation before and after training.
        callbacks: functions `f(step, metrics)`, called after every step; an exception ends the run.
        peft_config: train LoRA adapters instead of all weights: a `peft.LoraConfig`, or a dict with `r`, `lora_alpha`,
            `lora_dropout`, `target_modules`.
        processing_class: TRL's name for `tokenizer`.

    Raises:
        ConfigError, DataError, RewardError: the message uses the names of these arguments.

    Example:
        >>> trainer = GRPOTrainer("your-model-path", reward_funcs="strict_math")  # doctest: +SKIP
        >>> trainer.train()["model"]  # doctest: +SKIP
        'runs/grpo/model'
    """

    default_args: Callable[[], GRPOArgs | TRLConfig] = GRPOArgs
    args_types: tuple[type, ...] = (GRPOArgs, GRPOConfig)

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        reward_funcs: Any = None,
        args: GRPOArgs | TRLConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        callbacks: Sequence[Callable[[int, Mapping[str, float]], None]] | None = None,
        peft_config: Any = None,
        processing_class: Any = None,
    ) -> None:
        check_args(args, self.args_types)
        self._set_up(model, tokenizer, processing_class, args or self.default_args(), callbacks, peft_config)
        of_trl = isinstance(self.args, TRLConfig)
        self._items, self._local = reward_items(reward_funcs, self.args.reward_weights, of_trl)
        self._built_in = train_dataset is None
        self._train_rows = built_in_rows() if self._built_in else dataset_rows(train_dataset, "train_dataset")
        self._eval_rows = None if eval_dataset is None else dataset_rows(eval_dataset, "eval_dataset")

    def _sections(self) -> dict[str, Any]:
        return {"reward": {"functions": self._items}}

    def _describe_data(self) -> str:
        of_task = " of the built-in arithmetic task (no train_dataset was given)" if self._built_in else ""
        return f"{len(self._train_rows)} problems{of_task}"


class RLOOTrainer(GRPOTrainer):
    """Train a model with RLOO; arguments as for `GRPOTrainer`, with `RLOOConfig`."""

    default_args = RLOOConfig
    args_types = (RLOOConfig,)


class OfflineTrainer(Trainer):
    """Base class of trainers on offline data.

    Args:
        model: a folder in Hugging Face layout, a hub name, or a transformers model.
        args: the trainer's config; None: TRL's defaults.
        train_dataset: a list of dicts, a JSONL or Parquet file, or a Hugging Face dataset (rows: docs/guides/data.md).
        eval_dataset: held-out rows of the same form.
        processing_class: the tokenizer; None: the one beside the model.
        callbacks, peft_config: as for `GRPOTrainer`.

    Raises:
        ConfigError, DataError: an argument or a row is invalid.
    """

    args_type: type[TRLConfig]

    def __init__(
        self,
        model: Any,
        args: TRLConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Callable[[int, Mapping[str, float]], None]] | None = None,
        peft_config: Any = None,
    ) -> None:
        check_args(args, (self.args_type,))
        self._set_up(model, None, processing_class, self.args_type() if args is None else args, callbacks, peft_config)
        if train_dataset is None:
            raise ConfigError("train_dataset: is required")
        self._train_rows = plain_rows(train_dataset, "train_dataset")
        self._eval_rows = None if eval_dataset is None else plain_rows(eval_dataset, "eval_dataset")


class SFTTrainer(OfflineTrainer):
    """Train a model on demonstrations (`SFTConfig`)."""

    args_type = SFTConfig


class DPOTrainer(OfflineTrainer):
    """Train a model on preferences with DPO and its variants (`DPOConfig`).

    Args:
        ref_model: None, or the same as `model`: the reference is always the initial model.
    """

    args_type = DPOConfig

    def __init__(self, model: Any, ref_model: Any = None, args: DPOConfig | None = None, **arguments: Any) -> None:
        if ref_model is not None and ref_model != model:
            raise ConfigError("ref_model: the reference is always the initial model; remove it")
        super().__init__(model, args, **arguments)


class RewardTrainer(OfflineTrainer):
    """Train a reward model on preferences (`RewardConfig`)."""

    args_type = RewardConfig

    @staticmethod
    def _load(folder: str | Path) -> Any:
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)


def check_args(args: Any, args_types: tuple[type, ...]) -> None:
    """Check that `args` has one of the types that a trainer takes.

    Raises:
        ConfigError: it belongs to another trainer, or to the package trl.
    """
    if args is not None and not isinstance(args, args_types):
        where = " of trl: import it from atomrl.trl" if type(args).__module__.startswith("trl.") else ""
        names = " or ".join(kind.__name__ for kind in args_types)
        raise ConfigError(f"args must be a {names}, not {type(args).__name__}{where}")


def _run_dir(output_dir: str | None, kind: str, args: str) -> Path:
    """Return the run's folder: `output_dir`, or the first of `runs/KIND`, `runs/KIND-2`, ... that does not exist."""
    if output_dir is not None:
        path = Path(output_dir)
        if path.name in ("", "..") or path.name.startswith("."):
            raise ConfigError(
                f"{args}.output_dir must be a folder whose name does not begin with a dot (got {output_dir!r})"
            )
        return path
    names = itertools.chain([f"runs/{kind}"], (f"runs/{kind}-{number}" for number in itertools.count(2)))
    return next(path for path in map(Path, names) if not path.exists())


def print_line(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr)
