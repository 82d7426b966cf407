"""Trainers that sample: GRPO, RLOO, online DPO, PPO and distillation."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

from atomrl.common.functions import names_in
from atomrl.config import ConfigError, RunConfig
from atomrl.data.problems import load_problems
from atomrl.models.loading import load_tokenizer
from atomrl.rewards.scorer import parameters_of, takes_any
from atomrl.rewards.table import REWARDS
from atomrl.trainer.build import image_reader, image_store, model_path, policy_tokenizer, processor
from atomrl.trl.arguments import GRPOArgs
from atomrl.trl.configs import TRLConfig
from atomrl.trl.inputs import (
    built_in_rows,
    dataset_rows,
    is_reward_model,
    prompts_of_messages,
    prompts_of_tokens,
    reward_items,
)
from atomrl.trl.trainer import Trainer, check_reference

OWN_TOKENIZER = object()
"""For `reward_processing_classes`: the policy's."""
UNTRAINED = "length_penalty"
"""Reward of trainers that train on none; it is logged."""


class GRPOTrainer(Trainer):
    """Train a model with GRPO.

    The arguments become the config of a run (`trainer.config`), and `train` is `atomrl train` on it: the same loop,
    folder, checkpoints and metrics. Objects are saved into the run's folder, so a model passed as an object is on disk
    too.

    Args:
        model: as for `Trainer`, and so are callbacks, peft_config, processing_class and what is not listed here.
        tokenizer: a folder, a hub name or a tokenizer; None: the one beside the model.
        reward_processing_classes: tokenizers of the reward models; None: those beside them.
        reward_funcs: one or several of: `f(prompts, completions, **columns) -> list of numbers`, the name of a built-in
            reward, a dotted path, a reward model (name, folder or object). A completion's reward is their weighted sum.
        args: `GRPOArgs`, or `GRPOConfig` with TRL's arguments; None: `GRPOArgs()`.
        train_dataset: rows with a `prompt` (text or messages), usually a `ground_truth` (or `answer` or `solution`),
            and any other columns. None: a built-in arithmetic task.
        eval_dataset: problems of the same form, for an evaluation before and after training.

    Raises:
        ConfigError, DataError, RewardError: the message uses the names of these arguments.

    Example:
        >>> trainer = GRPOTrainer("your-model-path", reward_funcs="strict_math")  # doctest: +SKIP
        >>> trainer.train()["model"]  # doctest: +SKIP
        'runs/grpo/model'
    """

    copies_adapters = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        **others: Any,
    ) -> None:
        if isinstance(reward_funcs, TRLConfig | GRPOArgs | None) and not hasattr(tokenizer, "encode") and tokenizer:
            # TRL's order of positional arguments: model, reward_funcs, args, train_dataset, eval_dataset
            given = args
            tokenizer, reward_funcs, args = None, tokenizer, reward_funcs or args
            if given is not None and args is not given:
                train_dataset, eval_dataset = given, train_dataset if eval_dataset is None else eval_dataset
        self._built_in = train_dataset is None
        listed = (
            reward_funcs if isinstance(reward_funcs, Sequence) and not isinstance(reward_funcs, str) else [reward_funcs]
        )
        self._copies_answer = isinstance(args, GRPOArgs | None) or any(
            isinstance(one, str) and one in REWARDS for one in listed
        )
        super().__init__(
            model, args, train_dataset, eval_dataset, processing_class, tokenizer, callbacks, peft_config, **others
        )
        of_trl = isinstance(self.args, TRLConfig)
        given = reward_processing_classes
        if isinstance(given, Sequence) and (isinstance(given, str) or len(given) != len(listed)):
            raise ConfigError(f"reward_processing_classes: give a tokenizer for each of the {len(listed)} reward_funcs")
        listed = [
            self._reward_model(one, place, reward_processing_classes) if of_trl and is_reward_model(one) else one
            for place, one in enumerate(listed)
        ]
        listed = [self._with_state(one) if of_trl and callable(one) else one for one in listed]
        self._items, self._local = reward_items(listed, getattr(self.args, "reward_weights", None), of_trl)
        if penalty := getattr(self.args, "missing_eos_penalty", None):
            eos = {"eos_token_id": self.tokenizer.eos_token_id}
            self._items.append({"function": "missing_eos_penalty", "weight": penalty, "args": eos})

    def _with_state(self, reward: Callable[..., Any]) -> Callable[..., Any]:
        """Bind what TRL passes beside the columns and a reward function asks for; it then runs in this process."""
        offered = {"trainer_state": self.state, "log_extra": _unused, "log_metric": _unused}
        parameters = parameters_of(reward) or {}
        asked = offered.keys() & {*parameters, *(names_in(reward) if takes_any(parameters) else ())}
        if not asked:
            return reward
        if idle := sorted(asked - {"trainer_state"}):
            self._notes.append(
                f"{', '.join(idle)} of reward functions: no effect here (atomrl rollouts shows completions)"
            )
        given = functools.partial(reward, **{name: offered[name] for name in asked})
        given.__name__ = getattr(reward, "__name__", type(reward).__name__)  # type: ignore[attr-defined]
        return given

    def _reward_model(self, model: Any, place: int, tokenizers: Any) -> str:
        """Return the name or folder of a reward model."""
        given = tokenizers[place] if isinstance(tokenizers, Sequence) else tokenizers
        given = self.tokenizer if given is OWN_TOKENIZER else given
        if isinstance(model, str):
            if given is not None:
                self._notes.append(f"reward_processing_classes: the tokenizer of {model} is used")
            return self._companion(model, "reward_funcs")
        name = getattr(model.config, "_name_or_path", None)
        return self._companion(model, f"reward_model_{place}", given or (load_tokenizer(name) if name else None))

    def _own_args(self, args: Any) -> Any:
        if isinstance(args, GRPOArgs | None) and self.kind == "grpo":
            return copy.deepcopy(args) if args is not None else GRPOArgs()
        return super()._own_args(args)

    def _read_rows(self, train: Any, held_out: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        copied = self._copies_answer
        rows = built_in_rows() if self._built_in else dataset_rows(train, "train_dataset", copied)
        return rows, None if held_out is None else dataset_rows(held_out, "eval_dataset", copied)

    def _make_config(self, resume: bool) -> RunConfig:
        config = super()._make_config(resume)
        limited = "max_prompt_tokens" in config.data.model_fields_set
        return self._with_longest_prompt(config) if isinstance(self.args, TRLConfig) and not limited else config

    def _with_longest_prompt(self, config: RunConfig) -> RunConfig:
        """Set `data.max_prompt_tokens` to the length of the longest prompt: TRL has no limit."""
        reader = image_reader(config, model_path(config))
        images = image_store(config, reader)
        reads = processor(config, policy_tokenizer(config), images=reader)
        splits: list[Literal["train", "eval"]] = ["train"] if self._eval_rows is None else ["train", "eval"]
        loaded = (load_problems(config.data, split, config.seed, images=images).problems for split in splits)
        lengths = [length for problems in loaded for length in reads.lengths(problems)]
        data = config.data.model_copy(update={"max_prompt_tokens": max(lengths)})
        return config.model_copy(update={"data": data})

    def _sections(self) -> dict[str, Any]:
        return {"reward": {"functions": self._items}}

    def _describe_data(self) -> str:
        of_task = " of the built-in arithmetic task (no train_dataset was given)" if self._built_in else ""
        return f"{len(self._train_rows)} problems{of_task}"


class RLOOTrainer(GRPOTrainer):
    """Train a model with RLOO; arguments as for `GRPOTrainer`, with `RLOOConfig`."""

    kind = "rloo"


class OnlineDPOTrainer(GRPOTrainer):
    """Train a model with online DPO, on pairs of its own completions that the rewards rank (`OnlineDPOConfig`)."""

    kind = "online_dpo"
    copies_adapters = False

    def __init__(
        self, model: Any, ref_model: Any = None, reward_funcs: Any = None, args: Any = None, **others: Any
    ) -> None:
        check_reference(ref_model, model)
        others.setdefault("reward_processing_classes", others.pop("reward_processing_class", None))
        super().__init__(model, None, reward_funcs or others.pop("reward_model", None), args, **others)


class PPOTrainer(GRPOTrainer):
    """Train a model with PPO (`PPOConfig`).

    Args:
        ref_model: None, or the initial model again: the reference is always the initial model.
        reward_model: scores a completion, with the policy's tokenizer: a sequence classifier with one label.
        value_model: initial weights of the critic: such a classifier, or a language model.
        train_dataset: rows with `input_ids`, the tokens of a prompt; or with `prompt`.
    """

    kind = "ppo"
    copies_adapters = False

    def __init__(
        self,
        args: Any,
        processing_class: Any,
        model: Any,
        ref_model: Any = None,
        reward_model: Any = None,
        train_dataset: Any = None,
        value_model: Any = None,
        data_collator: Any = None,
        eval_dataset: Any = None,
        optimizers: Any = None,
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        check_reference(ref_model, model)
        if value_model is None or reward_model is None or train_dataset is None:
            raise ConfigError("PPOTrainer needs reward_model, value_model and train_dataset")
        if type(data_collator).__name__ == "DataCollatorWithPadding":
            data_collator = None
        super().__init__(
            model, None, [reward_model], args, train_dataset, eval_dataset, callbacks, peft_config, processing_class,
            reward_processing_classes=OWN_TOKENIZER, data_collator=data_collator, optimizers=optimizers, **others,
        )  # fmt: skip
        self._critic = self._companion(value_model, "value_model")

    def _read_rows(self, train: Any, held_out: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        rows, eval_rows = Trainer._read_rows(self, train, held_out)
        return prompts_of_tokens(rows, self.tokenizer, "train_dataset"), (
            None if eval_rows is None else prompts_of_tokens(eval_rows, self.tokenizer, "eval_dataset")
        )

    def _sections(self) -> dict[str, Any]:
        return {**super()._sections(), "critic": {"path": self._critic}}

    def _counted_updates(self, config: RunConfig) -> int:
        return 1  # TRL's PPO counts batches

    def generate_completions(self, sampling: bool = False) -> None:
        """Do nothing: the run's folder has the completions of every step (`atomrl rollouts`)."""


class GKDTrainer(GRPOTrainer):
    """Distil a teacher into a model on the model's own completions (`GKDConfig` with `lmbda=1`).

    Args:
        teacher_model: a model with the same vocabulary.
        train_dataset: rows with `messages`, whose last is left out, or with `prompt`.
    """

    kind = "gkd"
    copies_adapters = False

    def __init__(
        self, model: Any, teacher_model: Any = None, args: Any = None, data_collator: Any = None,
        train_dataset: Any = None, eval_dataset: Any = None, processing_class: Any = None, **others: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            model, None, UNTRAINED, args, train_dataset, eval_dataset, processing_class=processing_class,
            data_collator=data_collator, **others,
        )  # fmt: skip
        teacher_model = teacher_model or self.args.teacher_model_name_or_path
        if teacher_model is None:
            raise ConfigError("teacher_model: is required")
        loading = self.args.translated()[0].mapping("teacher_model_init_kwargs")
        quantised = any(loading.get(name) for name in ("quantization_config", "load_in_4bit", "load_in_8bit"))
        if quantised or loading.get("revision") not in (None, "main"):
            raise ConfigError("teacher_model_init_kwargs: a teacher is loaded unquantised, in its newest revision")
        self._teacher = self._companion(teacher_model, "teacher", self.tokenizer)

    def _read_rows(self, train: Any, held_out: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        rows, eval_rows = Trainer._read_rows(self, train, held_out)
        return prompts_of_messages(rows, "train_dataset"), (
            None if eval_rows is None else prompts_of_messages(eval_rows, "eval_dataset")
        )

    def _sections(self) -> dict[str, Any]:
        return {**super()._sections(), "teacher": {"path": self._teacher}}


class DistillationTrainer(GKDTrainer):
    """Distil a teacher into a model on the model's own completions (`DistillationConfig`)."""

    kind = "distillation"


def _unused(*_: Any) -> None:
    """Do nothing."""
