"""What scripts of unsloth import: models with adapters, as transformers and peft load them."""

import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from atomrl.config import ConfigError
from atomrl.models.shapes import auto_class, is_whole, tower_weights
from atomrl.redirect import absent
from atomrl.trl.unsloth_functions import (  # noqa: F401  (names of unsloth)
    check_python_modules,
    create_locked_down_function,
    execute_with_time_limit,
)

__version__ = "2026.1"


class FastLanguageModel:
    """unsloth's loader: `from_pretrained` and `get_peft_model` with its arguments."""

    @staticmethod
    def from_pretrained(
        model_name: str = "unsloth/Llama-3.2-1B-Instruct",
        max_seq_length: int | None = None,
        dtype: Any = None,
        load_in_4bit: bool = True,
        load_in_8bit: bool = False,
        token: str | None = None,
        full_finetuning: bool = False,
        **options: Any,
    ) -> tuple[Any, Any]:
        """Return the model, in 4 or 8 bits on a GPU, and its tokenizer; its processor if it has a vision tower.

        Args:
            max_seq_length: has no effect: lengths are arguments of the trainer.
            options: others of unsloth (`fast_inference`, `gpu_memory_utilization`, ...), which only set how it runs.
        """
        import torch
        from transformers import AutoConfig, AutoProcessor, AutoTokenizer

        given: dict[str, Any] = {"dtype": dtype or "auto", "token": token}
        if torch.cuda.is_available() and (load_in_4bit or load_in_8bit) and not full_finetuning:
            from transformers import BitsAndBytesConfig

            given["quantization_config"] = BitsAndBytesConfig(
                load_in_8bit=load_in_8bit, load_in_4bit=load_in_4bit and not load_in_8bit, bnb_4bit_quant_type="nf4"
            )
            given["device_map"] = {"": torch.cuda.current_device()}
        config = AutoConfig.from_pretrained(model_name, token=token)
        model = _with_members(auto_class(config).from_pretrained(model_name, **given))
        if is_whole(config):
            return model, _taking_messages(AutoProcessor.from_pretrained(model_name, token=token))
        tokenizer = AutoTokenizer.from_pretrained(model_name, token=token)
        # unsloth's scripts expect token ids, which transformers 5 returns in a dict
        vars(tokenizer)["apply_chat_template"] = partial(tokenizer.apply_chat_template, return_dict=False)
        return model, tokenizer

    @staticmethod
    def get_peft_model(
        model: Any,
        r: int = 16,
        target_modules: Any = None,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        bias: str = "none",
        finetune_vision_layers: bool = True,
        finetune_language_layers: bool = True,
        finetune_attention_modules: bool = True,
        finetune_mlp_modules: bool = True,
        use_rslora: bool = False,
        modules_to_save: Any = None,
        random_state: int | None = None,
        **options: Any,
    ) -> Any:
        """Return the model with new adapters.

        Args:
            finetune_vision_layers, finetune_language_layers, finetune_attention_modules, finetune_mlp_modules: False:
                no adapters there.
            random_state: has no effect: the seed of the adapters is the trainer's.
            options: others of unsloth (`use_gradient_checkpointing`, `loftq_config`).

        Raises:
            ConfigError: `finetune_audio_layers`, `finetune_last_n_layers` or `layers_to_transform` is set.
        """
        from peft import LoraConfig, get_peft_model

        for name in ("finetune_audio_layers", "finetune_last_n_layers", "layers_to_transform", "qat_scheme"):
            if options.get(name):
                raise ConfigError(f"get_peft_model({name}=...) has no counterpart: select layers with target_modules")
        parts = {"vision": finetune_vision_layers, "language": finetune_language_layers}
        parts |= {"attention": finetune_attention_modules, "mlp": finetune_mlp_modules}
        settings = LoraConfig(
            r=r, lora_dropout=lora_dropout, use_rslora=use_rslora, lora_alpha=lora_alpha,  # type: ignore[arg-type]
            bias=bias, target_modules=_targets(model, target_modules, parts),  # type: ignore[arg-type]
            modules_to_save=modules_to_save, task_type="CAUSAL_LM",
        )  # fmt: skip
        return _with_members(get_peft_model(model, settings))

    @staticmethod
    def for_inference(model: Any) -> Any:
        """Switch dropout off."""
        return model.eval()

    @staticmethod
    def for_training(model: Any, **_: Any) -> Any:
        """Return the model."""
        return model


FastModel = FastVisionModel = FastLanguageModel
KINDS = {
    "attention": ("self_attn", "attention", "attn", "mixer"),
    "mlp": ("mlp", "feed_forward", "ffn", "dense", "mixer"),
}
"""Kind of module -> parts of the names of its layers."""


def _targets(model: Any, targets: Any, parts: Mapping[str, bool]) -> list[str] | str:
    """Return `target_modules` for peft: the layers that `get_peft_model` selects.

    Args:
        targets: ends of their names; None: all linear layers of attention and MLP.
        parts: `vision`, `language`, `attention`, `mlp` -> whether it gets adapters.

    Raises:
        ConfigError: no layer is selected.
    """
    if isinstance(targets, str) and targets != "all-linear":
        return targets
    if isinstance(targets, list | tuple) and all(parts.values()):
        return list(targets)
    tower = {name.rpartition(".")[0] for name in tower_weights(model)}
    words = [word for kind, names in KINDS.items() if parts[kind] for word in names]
    chosen = []
    for name, module in model.named_modules():
        if not hasattr(module, "weight") or module.weight.dim() != 2 or module is model.get_output_embeddings():
            continue
        owner = name.rpartition(".")[0]
        listed = any(f".{name}".endswith(f".{one}") for one in targets) if isinstance(targets, list | tuple) else True
        if listed and parts["vision" if name in tower else "language"] and any(word in owner for word in words):
            chosen.append(name)
    if not chosen:
        raise ConfigError("get_peft_model: no layer is selected by target_modules and the finetune_ arguments")
    return chosen


def _taking_messages(processor: Any) -> Any:
    """Return a processor whose `text` may be messages, which it renders as a prompt."""
    kind = type(processor)

    def call(self: Any, images: Any = None, text: Any = None, *others: Any, **options: Any) -> Any:
        if isinstance(text, list) and text and isinstance(text[0], Mapping) and "role" in text[0]:
            prompt = options.pop("add_generation_prompt", True)
            text = self.apply_chat_template(text, tokenize=False, add_generation_prompt=prompt)
        return kind.__call__(self, images, text, *others, **options)

    # `save_pretrained` writes the name of the class
    processor.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
    return processor


def _with_members(model: Any) -> Any:
    """Add unsloth's methods of models: `save_lora`, `load_lora`, `fast_generate`, `save_pretrained_merged`."""

    def save_lora(folder: str) -> None:
        model.save_pretrained(folder)

    def fast_generate(prompts: Any, sampling_params: Any = None, lora_request: Any = None, **_: Any) -> list[Any]:
        return _generated(model, prompts, sampling_params)

    def save_pretrained_merged(folder: str, tokenizer: Any = None, save_method: str = "merged_16bit", **_: Any) -> None:
        if save_method == "lora" or not hasattr(model, "peft_config"):
            model.save_pretrained(folder)
        else:
            import copy

            copy.deepcopy(model).merge_and_unload().save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def save_pretrained_gguf(folder: str, tokenizer: Any = None, *_: Any, **__: Any) -> None:
        save_pretrained_merged(folder, tokenizer)
        print(f"{folder}: has the weights in 16 bits, not as GGUF: convert them with llama.cpp", file=sys.stderr)

    def push_to_hub_merged(
        name: str, tokenizer: Any = None, save_method: str = "merged_16bit", token: str | None = None, **_: Any
    ) -> None:
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained_merged(folder, tokenizer, save_method)
            api.create_repo(name, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=folder)

    def push_to_hub_gguf(name: str, tokenizer: Any = None, *_: Any, token: str | None = None, **__: Any) -> None:
        push_to_hub_merged(name, tokenizer, token=token)
        print(f"{name}: has the weights in 16 bits, not as GGUF: convert them with llama.cpp", file=sys.stderr)

    members = {
        "push_to_hub_merged": push_to_hub_merged, "push_to_hub_gguf": push_to_hub_gguf,
        "save_pretrained_gguf": save_pretrained_gguf, "fast_generate": fast_generate,
        "save_lora": save_lora, "load_lora": lambda folder, **_: folder,
        "save_pretrained_merged": save_pretrained_merged,
        "vllm_engine": SimpleNamespace(sleep=lambda *_: None, wake_up=lambda *_: None),
    }  # fmt: skip
    for name, member in members.items():
        object.__setattr__(model, name, member)
    return model


def _generated(model: Any, prompts: Any, sampling: Any) -> list[Any]:
    """Sample with transformers; returns objects like vLLM's, with `outputs[0].text`."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    made = []
    for prompt in [prompts] if isinstance(prompts, str) else prompts:
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        temperature = getattr(sampling, "temperature", 1.0)
        options: dict[str, Any] = {"max_new_tokens": getattr(sampling, "max_tokens", None) or 16}
        options |= {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        with torch.no_grad():
            ids = model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        made.append(SimpleNamespace(prompt=prompt, outputs=[SimpleNamespace(text=text, token_ids=ids.tolist())]))
    return made


def PatchFastRL(*_: Any, **__: Any) -> None:
    """Do nothing: there is nothing to patch."""


PatchDPOTrainer = PatchKTOTrainer = PatchFastRL


def is_bfloat16_supported() -> bool:
    """Return True if the GPU computes in bfloat16."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


is_bf16_supported = is_bfloat16_supported


def unsloth_train(trainer: Any, *arguments: Any, **options: Any) -> Any:
    """Return `trainer.train()`."""
    return trainer.train(*arguments, **options)


def train_on_responses_only(
    trainer: Any, instruction_part: str | None = None, response_part: str | None = None, **_: Any
) -> Any:
    """Return the `SFTTrainer`, which then trains the assistant's answers only: from behind `response_part` to the next
    `instruction_part`.

    Raises:
        ConfigError: a part is missing, or in no row.
    """
    from atomrl.trl.collators import responses, template_ids

    if not instruction_part or not response_part:
        raise ConfigError("train_on_responses_only: give instruction_part and response_part")
    parts = [
        template_ids(part, trainer.tokenizer, "train_on_responses_only") for part in (instruction_part, response_part)
    ]
    trainer.train_on(lambda ids: responses(ids, *parts), f"response_part={response_part!r}")
    return trainer


def get_chat_template(tokenizer: Any, chat_template: str = "chatml", **_: Any) -> Any:
    """Return the tokenizer with its own template, which is said, or ChatML if it has none.

    Raises:
        ConfigError: another template than ChatML for a tokenizer without one; or ChatML for one with another.
    """
    from atomrl.common.chat_template import CHATML

    if tokenizer.chat_template:
        if chat_template == "chatml" and "<|im_start|>" not in tokenizer.chat_template:
            raise ConfigError("get_chat_template('chatml'): the tokenizer has another: set tokenizer.chat_template")
        print(f"get_chat_template({chat_template!r}): the tokenizer's own template is kept")
    else:
        if chat_template != "chatml":
            raise ConfigError(f"get_chat_template({chat_template!r}): set tokenizer.chat_template yourself")
        tokenizer.chat_template = CHATML
    return tokenizer


RESIZES = "it changes the size of pictures: remove data_collator, and rows are trained with their pictures as they are"
"""Why there is no data collator."""


def __getattr__(name: str) -> Any:
    why = RESIZES if name == "UnslothVisionDataCollator" else "of unsloth only its models and their helpers are here"
    raise absent("unsloth", name, f": {why}")
