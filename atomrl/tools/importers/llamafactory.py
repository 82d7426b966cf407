"""Translate LLaMA-Factory's YAML: its stages `sft`, `dpo` and `rm`. Its other keys are those of Hugging Face's
`TrainingArguments`, so they are translated as TRL's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError
from atomrl.tools.importers import trl_arguments
from atomrl.tools.importers.sources import Settings, flat_yaml
from atomrl.tools.importers.translation import TEMPLATE, Translation
from atomrl.tools.importers.trl import TRAINERS

VERSION = "LLaMA-Factory of August 2026"
STAGES = {"sft": "sft", "dpo": "dpo", "rm": "reward"}
"""Stage -> TRL's trainer of the same kind."""
RENAMED = {
    "lora_rank": "lora_r", "lora_target": "lora_target_modules", "cutoff_len": "max_length", "pref_beta": "beta",
    "pref_loss": "loss_type", "dpo_label_smoothing": "label_smoothing", "pref_ftx": "rpo_alpha",
    "enable_liger_kernel": "use_liger_kernel", "flash_attn": "attn_implementation",
    "additional_target": "lora_modules_to_save",
    "preprocessing_num_workers": "dataset_num_proc", "disable_gradient_checkpointing": "gradient_checkpointing",
}  # fmt: skip
"""Key -> TRL's name for it."""
DEFAULTS: Settings = {
    "learning_rate": 5e-5, "max_length": 2048, "bf16": False, "optim": "adamw_torch", "lora_r": 8, "lora_dropout": 0.0,
    "lora_target_modules": "all-linear", "assistant_only_loss": True,
}  # fmt: skip
"""Defaults by which it differs from TRL."""
REFUSED: Mapping[str, str] = {
    "train_on_prompt": "prompts are not trained on",
    "mask_history": "all answers of a conversation are trained on",
    "tokenized_path": "it writes tokenized rows, or trains on those there and not on dataset: remove the key",
    "ref_model": "the reference is the initial model",
    "adapter_name_or_path": "merge the adapters first",
    "reward_model": "only stage ppo has one",
    "pref_bco_weight": "write the losses to algorithm.loss",
    "quantization_bit": "supported: 4, 8",
    "rope_scaling": "positions are those of the model",
    "mixture_of_depths": "layers are those of the model",
    "default_system": "set data.system_prompt, and remove the key",
    "freeze_language_model": "weights of the language model are trained",
    "use_llama_pro": "all weights, or adapters, are trained",
    **dict.fromkeys((
        "use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon", "use_dft_loss", "use_asft_loss",
        "use_eaft_loss", "loraplus_lr_ratio", "pissa_init", "enable_fp8_training", "fp8",
    ), "the optimizer is AdamW, adapters are plain LoRA, and every token has the same weight"),
}  # fmt: skip
REASONS: Mapping[str, str] = {
    **dict.fromkeys(("plot_loss", "ray_", "swanlab_", "use_swanlab"), trl_arguments.LOGGING),
    **dict.fromkeys(("overwrite_cache", "dataset_dir", "buffer_size"), trl_arguments.LOADING),
    **dict.fromkeys(("upcast_layernorm", "use_unsloth", "use_reentrant_gc", "low_cpu_mem_usage"),
                    trl_arguments.KERNEL),
    "quantization_method": "4 bits are nf4, 8 bits int8 here",
    "double_quantization": "the scales of the 4 bits are not quantised again, which is more exact",
    "neat_packing": "the rows of a block never see each other here",
    "video_": "rows with videos are an error when they are read",
}  # fmt: skip


def translate(path: Path) -> Translation:
    """Translate a YAML file of LLaMA-Factory.

    Raises:
        ConfigError: a stage, a kind of fine-tuning or another choice has no counterpart.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{path}: give the YAML file of llamafactory-cli train")
    given = flat_yaml(path)
    if not given.get("do_train"):
        raise ConfigError(f"{path} trains nothing: do_train is not true")
    if (stage := given.get("stage", "sft")) not in STAGES:
        raise ConfigError(f"{path}: stage={stage} has no counterpart; supported: {', '.join(STAGES)}")
    if (tuning := given.get("finetuning_type", "lora")) not in ("full", "lora"):
        raise ConfigError(f"{path}: finetuning_type={tuning} has no counterpart; supported: full, lora")
    kind = STAGES[stage]
    which = TRAINERS[kind]
    names = {name: _name(name, given) for name in given}
    settings = {names[name]: _converted(name, value) for name, value in given.items()}
    defaults = {**trl_arguments.DEFAULTS, **which.defaults, **DEFAULTS, "disable_dropout": kind == "dpo"}
    defaults |= {"use_peft": tuning == "lora", "packing": given.get("neat_packing", False)}
    settings |= {"packing": True} if "packing" in given and given.get("neat_packing") else {}
    t = Translation("LLaMA-Factory", settings, defaults, path)
    t.own = {name: (own, given[own]) for own, name in names.items()}
    t.version = VERSION
    t.reasons |= REASONS
    t.name_of(["stage", "finetuning_type"])
    if kind == "reward" and tuning == "lora":
        raise t.refuse("finetuning_type", tuning, "reward models are trained without adapters")
    t.refuse_set({**REFUSED, "chat_template": TEMPLATE})
    if tuning == "lora" and "lora_alpha" not in settings:
        t.defaults = {**t.defaults, "lora_alpha": 2 * t.count("lora_r")}
    trl_arguments.translate_shared(t, path)
    which.translate(t, 1)
    _data(t)
    t.leave("do_train", "the run trains")
    t.leave("stage", f"the kind of run: {kind}")
    t.leave("finetuning_type", "model.lora, or all weights")
    t.approximate("batch sizes are those of one process: multiply train.rows_per_update by the number of yours")
    t.leave_unknown()
    if "path" not in t.tree.get("model", {}):
        raise ConfigError(f"{path} has no model_name_or_path")
    return t


def _name(name: str, given: Settings) -> str:
    """Return TRL's name for a key of the file."""
    if name == "quantization_bit" and given[name] in (4, 8):
        return f"load_in_{given[name]}bit"
    return RENAMED.get(name, name)


def _converted(name: str, value: Any) -> Any:
    """Return a value in TRL's form."""
    if name == "quantization_bit" and value in (4, 8):
        return True
    if name == "lora_target":
        return "all-linear" if value == "all" else [part.strip() for part in str(value).split(",")]
    if name == "disable_gradient_checkpointing":
        return not value
    if name == "pref_ftx":
        return value or None
    return value


def _data(t: Translation) -> None:
    """Name the data sets, whose files only `dataset_info.json` of LLaMA-Factory knows."""
    for name, key in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        if t(name) is not None:
            t.to_do.append(f"{name}={t(name)}: {key} is the files of these names in its dataset_info.json")
    if t("val_size"):
        t.to_do.append(f"val_size={t('val_size')}: rows are not split here: set data.eval to the held-out rows")
    if t("max_samples") is not None:
        t.put("data.train_size", t.count("max_samples"), "max_samples", because="of all data sets; there of each")
    _pictures(t)
    if t.flag("packing") and not t.flag("neat_packing"):
        t.differ("rows of a block (packing)", "see each other", "never do, as with neat_packing")
    t.differ("rows over cutoff_len tokens", "prompt and answer are shortened in proportion", "truncated at the end")
    if t("template") is not None:
        t.differ("chat template", f"its own {t('template')} (template)", "that of the tokenizer")


MOST_PIXELS, LEAST_PIXELS = 768 * 768, 32 * 32
"""Its limits for the pixels of a picture."""


def _pictures(t: Translation) -> None:
    """Set the limits of pictures and whether the vision tower is trained, if the file sets a key of them."""
    most, least, tower, projector = (
        "image_max_pixels", "image_min_pixels", "freeze_vision_tower", "freeze_multi_modal_projector",
    )  # fmt: skip
    if not t.is_set(most, least, tower, projector):
        t.name_of([most, least, tower, projector])
        return
    t.defaults = {most: MOST_PIXELS, least: LEAST_PIXELS, tower: True, projector: True, **t.defaults}
    t.put("data.max_pixels", t.count(most), most)
    t.put("data.min_pixels", t.count(least), least)
    frozen = t.flag(tower)
    if t.flag(projector) != frozen:
        raise t.refuse(projector, t(projector), "the projector is a part of the tower (freeze_vision_tower)")
    if frozen or not t.tree["model"].get("lora"):
        t.put("model.freeze_vision", frozen, tower, projector)
    else:
        t.differ("adapters", "of the vision tower too", "of the language model alone")
