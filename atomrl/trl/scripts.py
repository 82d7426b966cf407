"""What TRL's scripts import besides trainers: dataclasses of the command line, its parser, data sets, peft and
quantization configs, chat templates, and rewards. Small functions with TRL's names and meaning."""

import argparse
import copy
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import HfArgumentParser

from atomrl.common.chat_template import CHATML
from atomrl.common.errors import reraise_as
from atomrl.config import ConfigError, read_yaml
from atomrl.trl.configs import RENAMED, TRLConfig

# --------------------------------------------------------------------------------------------------------------------
# Command line


@dataclass
class ModelConfig:
    """TRL's arguments of the model; `torch_dtype`, `trust_remote_code` and `tokenizer_name_or_path` of older versions
    are accepted as attributes."""

    model_name_or_path: str | None = None
    model_revision: str = "main"
    dtype: str | None = "float32"
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None = None
    lora_target_parameters: list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = "CAUSAL_LM"
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "nf4"
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str | None = None

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ConfigError("load_in_8bit and load_in_4bit: give only one")
        if self.lora_target_modules is not None and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]  # type: ignore[assignment]

    trust_remote_code = False
    tokenizer_name_or_path = None

    @property
    def torch_dtype(self) -> str | None:
        """The name of `dtype` in older versions."""
        return self.dtype

    @torch_dtype.setter
    def torch_dtype(self, value: str | None) -> None:
        self.dtype = value


OLDER = ("trust_remote_code", "tokenizer_name_or_path", "torch_dtype")
"""Attributes of `ModelConfig` that were arguments in older versions of TRL."""


@dataclass
class ScriptArguments:
    """TRL's arguments of a script's data set."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    gradient_checkpointing_use_reentrant: bool = False
    ignore_bias_buffers: bool = False


@dataclass
class DatasetConfig:
    """A data set of a mixture: arguments of `datasets.load_dataset`."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: Any = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass
class DatasetMixtureConfig:
    """Data sets that are concatenated."""

    datasets: list[DatasetConfig] = field(default_factory=list)
    streaming: bool = False
    test_split_size: float | None = None

    def __post_init__(self) -> None:
        self.datasets = [DatasetConfig(**each) if isinstance(each, dict) else each for each in self.datasets]


class TrlParser(HfArgumentParser):
    """TRL's parser: dataclasses from flags, and from the YAML file of `--config`.

    Flags and keys of older versions are accepted where no dataclass has a field of that name.
    """

    def __init__(self, dataclass_types: Any = None, **options: Any) -> None:
        types = [] if dataclass_types is None else dataclass_types
        types = list(types) if isinstance(types, Iterable) else [types]
        self._in_order = types
        # a field that a script's own dataclass has, too, is the script's: it comes later, and takes its value first
        ours = [each for each in types if issubclass(each, TRLConfig | ModelConfig | ScriptArguments)]
        others = [each for each in types if each not in ours]
        super().__init__(dataclass_types=[*ours, *others], **{"conflict_handler": "resolve", **options})
        self.dataclass_types = self._by_turn = [*others, *ours]
        self._names = {item.name for each in types for item in fields(each)}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the values, and the words that no dataclass has."""
        return super().parse_known_args(args, _Values() if namespace is None else namespace)

    def parse_args_into_dataclasses(self, *given: Any, **named: Any) -> tuple[Any, ...]:
        """Return the dataclasses in the order in which they were given, and what follows them."""
        made = super().parse_args_into_dataclasses(*given, **named)
        count = len(self._in_order)
        return (*(made[self._by_turn.index(each)] for each in self._in_order), *made[count:])

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Return the dataclasses in order, and with `return_remaining_strings` a list of the words left over.

        Raises:
            ConfigError: a flag or key is unknown.
        """
        words = list(sys.argv[1:] if args is None else args)
        settings: dict[str, Any] = {}
        if "--config" in words:
            place = words.index("--config")
            if place + 1 == len(words):
                raise ConfigError("--config: give a YAML file")
            settings = read_yaml(words[place + 1])
            del words[place : place + 2]
            os.environ.update({name: str(value) for name, value in settings.pop("env", {}).items()})
        known = {key: value for key, value in settings.items() if key in self._names}
        for action in self._actions:
            if action.dest in known:
                action.default, action.required = known[action.dest], False
        *made, rest = self.parse_args_into_dataclasses(args=words, return_remaining_strings=True)
        older, unknown = self._older(made, {k: v for k, v in settings.items() if k not in known}, rest)
        for owner, name, value in older:
            setattr(owner, name, value)
        if return_remaining_strings:
            return (*made, unknown)
        if unknown and fail_with_unknown_args:
            raise ConfigError(f"unknown arguments: {' '.join(unknown)}")
        return tuple(made)

    def _older(
        self, made: Sequence[Any], settings: Mapping[str, Any], rest: Sequence[str]
    ) -> tuple[list[tuple[Any, str, Any]], list[str]]:
        """Split what no field has into arguments of older versions, with the object that takes each, and the rest."""
        flags: dict[str, Any] = dict(settings)
        words, unknown = list(rest), []
        while words:
            word = words.pop(0)
            if not word.startswith("--"):
                unknown.append(word)
                continue
            name, equals, value = word.removeprefix("--").partition("=")
            if not equals:
                value = words.pop(0) if words and not words[0].startswith("--") else "true"
            flags[name.replace("-", "_")] = _scalar(value)
        older = []
        for name, value in flags.items():
            for owner in sorted(made, key=lambda each: not isinstance(each, ModelConfig)):
                takes = isinstance(owner, TRLConfig) and name in owner.known() | RENAMED.keys() - {"torch_dtype"}
                if takes or (isinstance(owner, ModelConfig) and name in OLDER):
                    older.append((owner, name, value))
                    break
            else:
                unknown += [f"--{name}", str(value)]
        return older, unknown


class _Values(argparse.Namespace):
    """Values of flags. Each dataclass removes its own, and a field of two dataclasses is removed twice."""

    def __delattr__(self, name: str) -> None:
        vars(self).pop(name, None)


def _scalar(text: str) -> Any:
    import yaml

    with reraise_as(ConfigError, f"{text!r} is not a value", yaml.YAMLError):
        return yaml.safe_load(text)


# --------------------------------------------------------------------------------------------------------------------
# Data sets, peft, quantization


def get_dataset(mixture: DatasetMixtureConfig) -> Any:
    """Load and concatenate the data sets of a mixture; returns a `DatasetDict`."""
    import datasets

    if any(each.fraction is not None for each in mixture.datasets):
        raise ConfigError("datasets: fraction is not supported; select the rows in the script")
    loaded = []
    for each in mixture.datasets:
        rows = datasets.load_dataset(
            each.path, each.name, data_dir=each.data_dir, data_files=each.data_files, split=each.split,
            streaming=mixture.streaming,
        )  # fmt: skip
        loaded.append(rows.select_columns(each.columns) if each.columns else rows)
    if not loaded:
        raise ConfigError("datasets: the mixture has no data set")
    whole = datasets.concatenate_datasets(loaded)
    if mixture.test_split_size is not None:
        return whole.train_test_split(test_size=mixture.test_split_size)
    return datasets.DatasetDict({"train": whole})


def get_peft_config(model_args: ModelConfig) -> Any:
    """Return the `peft.LoraConfig` of the arguments, or None without `use_peft`."""
    if not model_args.use_peft:
        return None
    from peft import LoraConfig

    return LoraConfig(
        task_type=model_args.lora_task_type, r=model_args.lora_r, lora_alpha=model_args.lora_alpha,
        target_modules=model_args.lora_target_modules, lora_dropout=model_args.lora_dropout, bias="none",
        use_rslora=model_args.use_rslora, use_dora=model_args.use_dora, modules_to_save=model_args.lora_modules_to_save,
    )  # fmt: skip


def get_quantization_config(model_args: ModelConfig) -> Any:
    """Return the `BitsAndBytesConfig` of the arguments, or None."""
    if not model_args.load_in_4bit and not model_args.load_in_8bit:
        return None
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=model_args.bnb_4bit_quant_type)


def get_kbit_device_map() -> dict[str, int] | None:
    """Return the device map of a quantised model: the GPU of this process, or None without a GPU."""
    import torch

    return {"": int(os.environ.get("LOCAL_RANK", "0"))} if torch.cuda.is_available() else None


# --------------------------------------------------------------------------------------------------------------------
# Chat templates

SIMPLE_CHAT_TEMPLATE = (
    "{%- for message in messages %}{{ message.role | capitalize }}: {{ message.content }}{{ '\n\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}Assistant:{% endif %}"
)
"""TRL's template for a tokenizer without one: `User: TEXT`, an empty line, `Assistant:`."""
TEXT_KEYS = ("prompt", "chosen", "rejected", "completion", "messages")


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Return True if a column of a row is a list of messages."""
    for key in TEXT_KEYS:
        value = example.get(key)
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            return "role" in value[0] and "content" in value[0]
    return False


def apply_chat_template(example: Mapping[str, Any], tokenizer: Any, tools: Any = None, **kwargs: Any) -> dict[str, str]:
    """Render the messages of a row: `prompt` with the generation prompt, the others as the text behind it."""

    def rendered(messages: Sequence[Any], **options: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options, **kwargs))

    if "messages" in example:
        return {"text": rendered(example["messages"])}
    made: dict[str, str] = {}
    prompt = example.get("prompt")
    if prompt is not None:
        last = prompt[-1]["role"]
        made["prompt"] = rendered(
            prompt, add_generation_prompt=last == "user", continue_final_message=last == "assistant"
        )
    for key in ("chosen", "rejected", "completion"):
        if key in example:
            whole = rendered([*(prompt or []), *example[key]])
            made[key] = whole.removeprefix(made.get("prompt", ""))
    return made | ({"label": example["label"]} if "label" in example else {})


def maybe_apply_chat_template(example: Mapping[str, Any], tokenizer: Any, tools: Any = None, **kwargs: Any) -> Any:
    """Apply the chat template to a row of messages; return any other row unchanged."""
    return apply_chat_template(example, tokenizer, tools, **kwargs) if is_conversational(example) else example


def extract_prompt(example: Mapping[str, Any]) -> dict[str, Any]:
    """Split the shared beginning of `chosen` and `rejected` from both, as the prompt."""
    chosen, rejected = example["chosen"], example["rejected"]
    pairs = enumerate(zip(chosen, rejected, strict=False))
    same = next((at for at, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str) and same and chosen[same - 1] == " ":
        same -= 1
    return {"prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]}


def maybe_extract_prompt(example: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `extract_prompt` of a row of preferences without a prompt of its own; any other row unchanged."""
    if "chosen" not in example or "rejected" not in example:
        return example
    if "prompt" in example and is_conversational({"prompt": example["prompt"]}) == is_conversational(
        {"chosen": example["chosen"]}
    ):
        return example
    return extract_prompt(example)


def unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """Return each pair as two rows, `completion` with `label` true and false."""

    def unpaired(rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        count = len(rows["chosen"])
        made = {"completion": [*rows["chosen"], *rows["rejected"]], "label": [True] * count + [False] * count}
        return made | ({"prompt": rows["prompt"] * 2} if "prompt" in rows else {})

    return dataset.map(unpaired, batched=True, remove_columns=["chosen", "rejected"], num_proc=num_proc, desc=desc)


def maybe_unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """Return `unpair_preference_dataset` of a data set of pairs; any other unchanged."""
    if "chosen" in dataset.column_names and "rejected" in dataset.column_names:
        return unpair_preference_dataset(dataset, num_proc, desc)
    return dataset


def init_zero_verbose() -> None:
    """Do nothing: TRL's function hides log messages."""


def create_reference_model(model: Any) -> Any:
    """Return a copy of a model whose weights are not trained."""
    copied = copy.deepcopy(model).eval()
    return copied.requires_grad_(False)


def setup_chat_format(model: Any, tokenizer: Any, format: str = "chatml", **_: Any) -> tuple[Any, Any]:
    """Give a tokenizer without a chat template the ChatML one and its tokens, and resize the model's embeddings.

    Raises:
        ConfigError: the tokenizer has a template.
    """
    if tokenizer.chat_template is not None:
        raise ConfigError("setup_chat_format: the tokenizer has a chat template; remove the call")
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token = "<|im_end|>", "<|im_end|>", "<|im_start|>"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    model.resize_token_embeddings(len(tokenizer))
    for settings in filter(None, (model.config, getattr(model, "generation_config", None))):
        settings.pad_token_id, settings.bos_token_id, settings.eos_token_id = (
            tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id
        )  # fmt: skip
    return model, tokenizer


# --------------------------------------------------------------------------------------------------------------------
# Rewards

Completions = Sequence[Any]


def _texts(completions: Completions) -> list[str]:
    return [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]


def accuracy_reward(completions: Completions, solution: Sequence[str], **_: Any) -> list[float | None]:
    """Return 1 if math-verify finds the solution in a completion, else 0; None if it cannot read the solution."""
    with reraise_as(ImportError, "accuracy_reward needs: pip install 'atomrl[math]' (math-verify)", ImportError):
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify

    wanted = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    scores: list[float | None] = []
    for text, truth in zip(_texts(completions), solution, strict=True):
        gold = parse(truth, parsing_timeout=None)
        answer = parse(text, extraction_config=[wanted], extraction_mode="first_match", parsing_timeout=None)
        scores.append(float(verify(gold, answer, timeout_seconds=None)) if gold else None)
    return scores


def reasoning_accuracy_reward(
    completions: Completions, solution: Sequence[str], reasoning_delimiters: Sequence[str] = ("</think>",), **_: Any
) -> list[float | None]:
    """Return `accuracy_reward` of the text behind the thoughts; 0 if they do not end."""
    texts = _texts(completions)
    ends = [
        max((text.rfind(mark) + len(mark) for mark in reasoning_delimiters if mark in text), default=-1)
        for text in texts
    ]
    answers = [text[end:] if end >= 0 else "" for text, end in zip(texts, ends, strict=True)]
    scores = accuracy_reward(answers, solution)
    return [score if end >= 0 or score is None else 0.0 for score, end in zip(scores, ends, strict=True)]


def think_format_reward(completions: Completions, **_: Any) -> list[float]:
    """Return 1 for a text that begins with <think>, opens it once, and closes it."""
    return [
        float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text)
        for text in _texts(completions)
    ]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """Return DAPO's length penalty: 0 up to `max_completion_len - soft_punish_cache` tokens, then down to -1."""

    def soft_overlong_punishment_reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        free = max_completion_len - soft_punish_cache
        over = [len(ids) - free for ids in completion_ids]
        return [0.0 if n <= 0 else -1.0 if n > soft_punish_cache else -n / soft_punish_cache for n in over]

    return soft_overlong_punishment_reward


def get_repetition_penalty_reward(ngram_size: int, max_penalty: float) -> Callable[..., list[float]]:
    """Return a penalty for repeated n-grams of words: `max_penalty` times the share of repeated ones."""

    def repetition_penalty_reward(completions: Completions, **_: Any) -> list[float]:
        scores = []
        for text in _texts(completions):
            words = text.lower().split()
            ngrams = list(zip(*(words[start:] for start in range(ngram_size)), strict=False))
            scores.append((1 - len(set(ngrams)) / len(ngrams)) * max_penalty if ngrams else 0.0)
        return scores

    return repetition_penalty_reward
