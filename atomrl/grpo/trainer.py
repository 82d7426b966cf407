"""`GRPOTrainer`: a config made of Python objects, and `atomrl train` on it. There is no second loop here."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError, RunConfig, build_config, merge_trees
from atomrl.data.problems import DataError
from atomrl.data.processor import DataProcessor
from atomrl.data.sources import load_samples
from atomrl.grpo.arguments import GRPOArgs, hint, name_arguments
from atomrl.grpo.inputs import answer_field, built_in_rows, dataset_rows, lora_section, reward_items, write_rows
from atomrl.models.loading import load_tokenizer, model_config_only, resolve_folder
from atomrl.runs.build import device_name, prompt_limit
from atomrl.runs.rl import RLRun
from atomrl.tracking.run_directory import STARTED, read_metrics

INPUTS = "inputs"
"""In the run's folder: what was given as objects."""


class GRPOTrainer:
    """Trains a model with GRPO.

    What is given becomes the config of a run (`trainer.config`), and the run is that of `atomrl train`: the same loop,
    folder, checkpoints and metrics. Objects are written into the run's folder, so the model there is a second copy.

    Args:
        model: a folder in Hugging Face layout, a hub name, or a transformers model.
        tokenizer: likewise; None is the one beside the model.
        reward_funcs: one or several: `f(prompts, completions, **columns) -> list of numbers`, the name of a built-in
            reward, or a dotted path. A completion's reward is their weighted sum.
        args: None is `GRPOArgs()`. Copied: later changes have no effect.
        train_dataset: a list of dicts, a JSONL or Parquet file, or a Hugging Face dataset; rows have `prompt` (text or
            messages), mostly `ground_truth` (else `answer` or `solution` is that), and any columns. None is a built-in
            arithmetic task.
        eval_dataset: the same, for an evaluation before and after.
        callbacks: functions `f(step, metrics)`, called after every step; what they raise ends the run.
        peft_config: low-rank adapters in place of all weights: a `peft.LoraConfig`, or a dict with `r`, `lora_alpha`,
            `lora_dropout`, `target_modules`.

    Raises:
        ConfigError, DataError, RewardError: what is wrong, in the terms of these arguments.

    Example:
        >>> trainer = GRPOTrainer("your-model-path", reward_funcs="strict_math")  # doctest: +SKIP
        >>> trainer.train()["model"]  # doctest: +SKIP
        'runs/grpo/model'
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        reward_funcs: Any = None,
        args: GRPOArgs | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        callbacks: Sequence[Callable[[int, Mapping[str, float]], None]] | None = None,
        peft_config: Any = None,
    ) -> None:
        if args is not None and not isinstance(args, GRPOArgs):
            raise ConfigError(f"args must be a GRPOArgs, not {type(args).__name__}")
        self.args = GRPOArgs() if args is None else args.model_copy(deep=True)
        if model is None:
            raise ConfigError("model: is required (a folder, a hub name or a transformers model)")
        self._given, self._model = model, None if isinstance(model, str | Path) else model
        if self._model is not None and (hasattr(model, "peft_config") or not hasattr(model, "save_pretrained")):
            raise ConfigError(
                "model: merge the adapters first (model.merge_and_unload())"
                if hasattr(model, "peft_config")
                else f"model must be a folder, a hub name or a transformers model, not {type(model).__name__}"
            )
        if self._model is None:
            resolve_folder(model, weights=False)  # a name that leads nowhere shows now
        elif tokenizer is None:
            raise ConfigError("tokenizer: is required beside a loaded model")
        self._tokenizer_path = str(tokenizer) if isinstance(tokenizer, str | Path) else None
        self._tokenizer_beside_model = tokenizer is None
        self._items, self._local = reward_items(reward_funcs, self.args.reward_weights)
        self.tokenizer = load_tokenizer(tokenizer or model) if isinstance(tokenizer or model, str | Path) else tokenizer
        self._train_rows = built_in_rows() if train_dataset is None else dataset_rows(train_dataset, "train_dataset")
        self._eval_rows = None if eval_dataset is None else dataset_rows(eval_dataset, "eval_dataset")
        self._built_in = train_dataset is None
        self._callbacks = tuple(callbacks or ())
        if not all(callable(callback) for callback in self._callbacks):
            raise ConfigError("callbacks: each is a function f(step, metrics), called after every step")
        self._lora = lora_section(peft_config)
        self.run_dir = _run_dir(self.args.output_dir)
        self.config: RunConfig | None = None
        """What the run is, once `train` has begun."""

    def train(self, resume_from_checkpoint: bool = False) -> dict[str, Any]:
        """Run, or go on with the run in `args.output_dir` from its newest checkpoint.

        Ctrl-C lets the step under way end, saves, and returns.

        Returns:
            The run's summary: `run` (its folder), `model` (the trained model's), `finished`, `steps`, `wall_s`, and
            with an `eval_dataset` `accuracy_before`, `accuracy_after`, ...

        Raises:
            ConfigError, DataError, RewardError: what is wrong, in the terms of `GRPOArgs`.
        """
        self._check_folder(resume_from_checkpoint)
        try:
            self.config = self._make_config(bool(resume_from_checkpoint))
            run = RLRun(self.config, local_rewards=self._local)
            summary = run.execute(bool(resume_from_checkpoint), callbacks=self._callbacks, wording=hint)
        except (ConfigError, DataError) as error:
            raise type(error)(name_arguments(str(error))) from error
        if summary["model"] is not None:
            self._take(summary["model"])
        if not summary["finished"]:
            say("stopped early; train(resume_from_checkpoint=True) goes on")
        return summary

    @property
    def model(self) -> Any:
        """The model as transformers loads it: trained, once `train` has ended. A model that was given as an object is
        that object, with the trained weights."""
        if self._model is None:
            trained = self.run_dir / "model"
            self._model = _load(trained if trained.exists() and self.config else resolve_folder(self._given))
            self._model.to(device_name(self.args.device))
        return self._model

    @property
    def log_history(self) -> list[dict[str, Any]]:
        """The metrics of every step and evaluation so far, each a dict with `step` (docs/cli.md has the names)."""
        return read_metrics(self.run_dir / "metrics.jsonl") if self.config else []

    def save_model(self, output_dir: str | Path) -> None:
        """Write model and tokenizer as a folder in Hugging Face layout (`trainer.model.push_to_hub` uploads it)."""
        self.model.save_pretrained(output_dir)
        self.tokenizer.save_pretrained(output_dir)

    def _check_folder(self, resume: Any) -> None:
        if not isinstance(resume, bool | None):
            raise ConfigError("resume_from_checkpoint is True or False: it is the newest checkpoint of output_dir")
        started = (self.run_dir / "config.yaml").is_file()
        if resume and (self.args.output_dir is None or not started):
            raise ConfigError(f"no run to resume in {self.run_dir}: set GRPOArgs.output_dir to the folder of the run")
        present = {path.name for path in self.run_dir.iterdir()} if self.run_dir.is_dir() else set()
        if not resume and {name for name in present - STARTED if not name.endswith(".partial")}:
            raise ConfigError(
                f"the run {self.run_dir} exists already: go on with it by train(resume_from_checkpoint=True), "
                "or set GRPOArgs.output_dir to another folder"
            )

    def _make_config(self, resume: bool) -> RunConfig:
        """The config of the run; objects are first written into its folder."""
        inputs = self.run_dir / INPUTS
        path, tokenizer = str(self._given), self._tokenizer_path
        if not isinstance(self._given, str | Path):
            path = str(inputs / "model")
            if not resume:
                self._given.save_pretrained(path)
        if tokenizer is None and not self._tokenizer_beside_model:
            tokenizer = str(inputs / "tokenizer")
            if not resume:
                self.tokenizer.save_pretrained(tokenizer)
        data: dict[str, str | None] = {"train": write_rows(self._train_rows, inputs / "train.jsonl", resume)}
        data |= {"answer_field": answer_field(self._train_rows)}
        if self._eval_rows is not None:
            data["eval"] = write_rows(self._eval_rows, inputs / "eval.jsonl", resume)
        tree = {
            "run_name": self.run_dir.name,
            "output_dir": str(self.run_dir.parent),
            "model": {"path": path, "tokenizer": None if tokenizer == path else tokenizer, "lora": self._lora},
            "data": data,
            "reward": {"functions": self._items},
        }
        config = build_config(merge_trees(self.args.to_tree(), tree), "GRPOTrainer")
        device_name(config.model.device)
        words, vocabulary = len(self.tokenizer), model_config_only(path).vocab_size
        if words > vocabulary:
            raise ConfigError(f"the tokenizer is another model's: it has {words} tokens, and the model {vocabulary}")
        return config.model_copy(update={"train": config.train.model_copy(update={"steps": self._steps(config, path)})})

    def _steps(self, config: RunConfig, path: str) -> int:
        """`max_steps`, or enough for `epoch` passes over the problems that fit `max_prompt_length`."""
        processor = DataProcessor(self.tokenizer, config.data, prompt_limit(config, path))
        kept, _ = processor.filter_overlong(load_samples(config.data, "train").samples)
        steps = math.ceil(self.args.epoch * len(kept) / self.args.prompts_per_step)
        steps = steps if self.args.max_steps < 1 else self.args.max_steps
        what = f"{len(kept)} problems"
        if self._built_in:
            what = f"no train_dataset was given: {what} of the built-in arithmetic task"
        say(
            f"{what}; {steps} steps of {self.args.prompts_per_step} prompts x {self.args.num_generations} completions; "
            f"run folder {self.run_dir}"
        )
        return steps

    def _take(self, folder: str) -> None:
        """The trained weights into the model that was given, or forget the model of the start."""
        if isinstance(self._given, str | Path):
            self._model = None
        else:
            self._given.load_state_dict(_load(folder).state_dict())


def _load(folder: str | Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def _run_dir(output_dir: str | None) -> Path:
    """The run's folder: the one that was named, or the first of `runs/grpo`, `runs/grpo-2`, ... that is free."""
    if output_dir is not None:
        path = Path(output_dir)
        if path.name in ("", "..") or path.name.startswith("."):
            raise ConfigError(f"GRPOArgs.output_dir must name a folder, without a dot in front (got {output_dir!r})")
        return path
    names = itertools.chain(["runs/grpo"], (f"runs/grpo-{number}" for number in itertools.count(2)))
    return next(path for path in map(Path, names) if not path.exists())


def say(line: str) -> None:
    """To the terminal, beside the progress of the run."""
    print(line, file=sys.stderr)
