"""What scripts of unsloth import: models with adapters, as transformers and peft load them."""

from functools import partial
from types import SimpleNamespace
from typing import Any

from atomrl.config import ConfigError
from atomrl.redirect import absent

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
        """Return the model and its tokenizer, in 4 or 8 bits on a GPU.

        Args:
            max_seq_length: has no effect: lengths are arguments of the trainer.
            options: others of unsloth (`fast_inference`, `gpu_memory_utilization`, ...), which only set how it runs.
        """
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        given: dict[str, Any] = {"dtype": dtype or "auto", "token": token}
        if torch.cuda.is_available() and (load_in_4bit or load_in_8bit) and not full_finetuning:
            from transformers import BitsAndBytesConfig

            given["quantization_config"] = BitsAndBytesConfig(
                load_in_8bit=load_in_8bit, load_in_4bit=load_in_4bit and not load_in_8bit, bnb_4bit_quant_type="nf4"
            )
            given["device_map"] = {"": torch.cuda.current_device()}
        model = AutoModelForCausalLM.from_pretrained(model_name, **given)
        tokenizer = AutoTokenizer.from_pretrained(model_name, token=token)
        # unsloth's scripts expect token ids, which transformers 5 returns in a dict
        vars(tokenizer)["apply_chat_template"] = partial(tokenizer.apply_chat_template, return_dict=False)
        return _with_members(model), tokenizer

    @staticmethod
    def get_peft_model(
        model: Any,
        r: int = 16,
        target_modules: Any = None,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        bias: str = "none",
        use_rslora: bool = False,
        modules_to_save: Any = None,
        random_state: int | None = None,
        **options: Any,
    ) -> Any:
        """Return the model with new adapters.

        Args:
            random_state: has no effect: the seed of the adapters is the trainer's.
            options: others of unsloth (`use_gradient_checkpointing`, `loftq_config`, `finetune_*`).
        """
        from peft import LoraConfig, get_peft_model

        if options.get("finetune_vision_layers"):
            raise ConfigError("get_peft_model(finetune_vision_layers=True): adapters leave the vision tower alone")
        options_of_peft: dict[str, Any] = {"lora_alpha": lora_alpha, "bias": bias}
        settings = LoraConfig(
            r=r, lora_dropout=lora_dropout, use_rslora=use_rslora, **options_of_peft,
            target_modules=target_modules or "all-linear", modules_to_save=modules_to_save, task_type="CAUSAL_LM",
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


FastModel = FastLanguageModel


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

    members = {
        "save_lora": save_lora, "load_lora": lambda folder, **_: folder, "fast_generate": fast_generate,
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


def get_chat_template(tokenizer: Any, chat_template: str = "chatml", **_: Any) -> Any:
    """Return the tokenizer with its own template, or ChatML if it has none."""
    from atomrl.common.chat_template import CHATML

    if not tokenizer.chat_template:
        if chat_template != "chatml":
            raise ConfigError(f"get_chat_template({chat_template!r}): set tokenizer.chat_template yourself")
        tokenizer.chat_template = CHATML
    return tokenizer


def __getattr__(name: str) -> Any:
    why = "of unsloth only FastLanguageModel and its helpers are here"
    raise absent("unsloth", name, f": {why}")
