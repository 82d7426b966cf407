"""Translate LLaMA-Factory's YAML: its stages `pt`, `sft`, `dpo`, `kto` and `rm`. Its other keys are those of Hugging
Face's `TrainingArguments`, so they are translated as TRL's.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError
from atomrl.data.columns import SYSTEM
from atomrl.tools.importers import trl_arguments
from atomrl.tools.importers.names import LLAMA_FACTORY
from atomrl.tools.importers.sources import Settings, flat_yaml, hub_source, places_of, text_of
from atomrl.tools.importers.translation import EARLIER_ANSWERS, TEMPLATE, Translation
from atomrl.tools.importers.trl import TRAINERS, put_batches, put_lengths

VERSION = "LLaMA-Factory of August 2026"
STAGES = {"pt": "sft", "sft": "sft", "dpo": "dpo", "kto": "kto", "rm": "reward"}
"""Stage -> TRL's trainer of the same kind."""
RENAMED = {
    "lora_rank": "lora_r", "lora_target": "lora_target_modules", "cutoff_len": "max_length", "pref_beta": "beta",
    "dpo_label_smoothing": "label_smoothing",
    "kto_chosen_weight": "desirable_weight", "kto_rejected_weight": "undesirable_weight",
    "enable_liger_kernel": "use_liger_kernel", "flash_attn": "attn_implementation",
    "additional_target": "lora_modules_to_save", "quantization_type": "bnb_4bit_quant_type",
    "preprocessing_num_workers": "dataset_num_proc", "disable_gradient_checkpointing": "gradient_checkpointing",
}  # fmt: skip
"""Key -> TRL's name for it."""
GENERATION = (
    "do_sample", "temperature", "top_p", "top_k", "num_beams", "max_length", "max_new_tokens", "repetition_penalty",
    "length_penalty", "skip_special_tokens",
)  # fmt: skip
"""Keys of its sampling, which training has not, and of which some are TRL's for something else."""
DEFAULTS: Settings = {
    "learning_rate": 5e-5, "max_length": 2048, "bf16": False, "optim": "adamw_torch", "lora_r": 8, "lora_dropout": 0.0,
    "lora_target_modules": "all-linear", "assistant_only_loss": True, "pref_loss": "sigmoid", "pref_ftx": 0.0,
    "simpo_gamma": 0.5, "train_on_prompt": False, "dataset_dir": "data", "logging_steps": 500,
}  # fmt: skip
"""Defaults by which it differs from TRL."""
REFUSED: Mapping[str, str] = {
    "mask_history": "all answers of a conversation are trained on",
    "tokenized_path": "it writes tokenized rows, or trains on those there and not on dataset: remove the key",
    "ref_model": "the reference is the initial model",
    "create_new_adapter": "merge the adapters first: atomrl export",
    "reward_model": "only stage ppo has one",
    "ld_alpha": "it weighs the log-probs of the policy alone there, of the reference too here (algorithm.score)",
    "use_dora": "adapters are plain LoRA",
    "shift_attn": "attention is that of the model",
    "train_from_scratch": "weights are those of the model",
    "moe_aux_loss_coef": "the loss is that of the algorithm alone",
    **dict.fromkeys(("resize_vocab", "add_tokens", "add_special_tokens", "new_special_tokens_config"),
                    "the vocabulary is that of the model"),
    "pure_bf16": "weights are float32, and computed with in bfloat16",
    "media_dir": "paths of pictures are relative to the file of their rows",
    "interleave_probs": "rows of all data sets are shuffled together",
    "pref_bco_weight": "write the losses to algorithm.loss",
    "quantization_bit": "supported: 4, 8",
    "rope_scaling": "positions are those of the model",
    "mixture_of_depths": "layers are those of the model",
    "default_system": "set data.system_prompt, and remove the key",
    "freeze_language_model": "weights of the language model are trained",
    "use_llama_pro": "all weights, or adapters, are trained",
    **dict.fromkeys((
        "use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon", "use_dft_loss", "use_asft_loss",
        "use_eaft_loss", "loraplus_lr_ratio", "pissa_init", "fp8",
    ), "the optimizer is AdamW, adapters are plain LoRA, and every token has the same weight"),
}  # fmt: skip
REASONS: Mapping[str, str] = {
    **dict.fromkeys(("plot_loss", "ray_", "swanlab_", "use_swanlab", "include_effective_tokens_per_second",
                     "print_param_status", "enable_torch_profiler", "profiler_"), trl_arguments.LOGGING),
    **dict.fromkeys(("overwrite_cache", "buffer_size", "preprocessing_batch_size", "data_shared_file_system",
                     "cache_dir", "use_fast_tokenizer"), trl_arguments.LOADING),
    **dict.fromkeys(("generate.", "vllm_", "sglang_", "infer_", "export_", "predict_with_generate", "generation_",
                     "eval_num_beams", "sortish_sampler"), "for sampling and export after the training"),
    **dict.fromkeys(("pref_loss", "pref_ftx", "dpo_label_smoothing", "kto_chosen_weight", "kto_rejected_weight",
                     "ppo_"), "for another stage"),
    **dict.fromkeys(("upcast_layernorm", "use_unsloth", "use_reentrant_gc", "low_cpu_mem_usage"),
                    trl_arguments.KERNEL),
    **dict.fromkeys(("use_mca", "use_megatron_bridge", "use_hyper_parallel", "hyper_parallel_"), trl_arguments.SHARDS),
    **dict.fromkeys(("use_unsloth_gc", "use_kt", "kt_", "use_kv_cache", "use_v1_kernels", "offload_folder",
                     "upcast_lmhead_output"), trl_arguments.KERNEL),
    "compute_accuracy": trl_arguments.EVALUATION,
    "quantization_method": "4 bits are nf4, 8 bits int8 here",
    "double_quantization": "the scales of the 4 bits are not quantised again, which is more exact",
    "neat_packing": "the rows of a block never see each other here",
    "video_": "rows with videos are an error when they are read",
}  # fmt: skip


def translate(path: Path) -> Translation:
    """Translate a YAML file of LLaMA-Factory.

    Raises:
        ConfigError: it has a key that LLaMA-Factory does not have, or a stage, a kind of fine-tuning or another choice
            has no counterpart.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{path}: give the YAML file of llamafactory-cli train")
    given = flat_yaml(path)
    Translation("LLaMA-Factory", given, {}, path).check_names(LLAMA_FACTORY)
    if not given.get("do_train"):
        raise ConfigError(f"{path} trains nothing: do_train is not true")
    if str(stage := given.get("stage", "sft")) not in STAGES:
        raise ConfigError(f"{path}: stage={stage} has no counterpart; supported: {', '.join(STAGES)}")
    if (tuning := given.get("finetuning_type", "lora")) not in ("full", "lora"):
        raise ConfigError(f"{path}: finetuning_type={tuning} has no counterpart; supported: full, lora")
    kind = STAGES[stage]
    which = TRAINERS[kind]
    names = {name: _name(name, given) for name in given}
    settings = {names[name]: _converted(name, value) for name, value in given.items()}
    defaults = {**trl_arguments.DEFAULTS, **which.defaults, **DEFAULTS, "disable_dropout": kind in ("dpo", "kto")}
    defaults |= {"use_peft": tuning == "lora", "packing": stage == "pt" or given.get("neat_packing", False)}
    if given.get("neat_packing") or (stage == "pt" and given.get("packing") is None):
        settings |= {"packing": True} if "packing" in given else {}
    if given.get("packing") or given.get("neat_packing"):  # it pads a block by a token
        lengths = settings if isinstance(settings.get("max_length"), int) else defaults
        lengths["max_length"] -= 1
    if stage == "pt":
        defaults |= {"packing_strategy": "wrapped"}
    t = Translation("LLaMA-Factory", settings, defaults, path)
    t.own = {name: (own, given[own]) for own, name in names.items()}
    t.version = VERSION
    t.reasons |= REASONS
    t.name_of(["stage", "finetuning_type"])
    if tuning == "full":
        t.refuse_set({"adapter_name_or_path": "finetuning_type=full trains no adapters: merge them first"})
    t.refuse_set({**REFUSED, "chat_template": TEMPLATE})
    if tuning == "lora" and "lora_alpha" not in settings:
        t.defaults = {**t.defaults, "lora_alpha": 2 * t.count("lora_r")}
    columns = _name_data(t, stage)
    trl_arguments.translate_shared(t, path)
    if kind == "dpo":
        _preferences(t)
    elif kind == "reward":
        _reward_model(t)
    else:
        which.translate(t, 1)
    for key, column in columns.items():
        t.put(key, column, "dataset")
    if t.flag("train_on_prompt"):
        t.put("sft.train_on", "all", "train_on_prompt")
    if kind == "kto" and t.number("pref_ftx"):
        raise t.refuse("pref_ftx", t("pref_ftx"), "kto has no pairs, and so no likelihood of the chosen ones")
    if t.flag("disable_shuffling"):
        t.put("data.shuffle", False, "disable_shuffling")
    _rows(t, stage)
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
    if name in GENERATION:
        return f"generate.{name}"
    return RENAMED.get(name, name)


def _converted(name: str, value: Any) -> Any:
    """Return a value in TRL's form."""
    if name == "quantization_bit" and value in (4, 8):
        return True
    if name == "lora_target":
        return "all-linear" if value == "all" else [part.strip() for part in str(value).split(",")]
    if name == "disable_gradient_checkpointing":
        return not value
    return value


def _preferences(t: Translation) -> None:
    """Set the objective of stage `dpo`: its trainer has losses with and without a reference."""
    kind, beta = t("pref_loss"), t.number("beta")
    supported = {"sigmoid": "dpo", "hinge": "dpo", "ipo": "dpo", "orpo": "orpo", "simpo": "simpo"}
    if kind == "kto_pair":
        raise t.refuse("pref_loss", kind, "TRL's trainer, from which it has its losses, has it no more")
    t.put("algorithm.name", t.choice("pref_loss", kind, supported), "pref_loss")
    loss: dict[str, Any] = {"type": {"simpo": "sigmoid", "orpo": "odds_ratio"}.get(kind, kind), "beta": beta}
    loss |= {"label_smoothing": t.number("label_smoothing")} if kind == "sigmoid" else {}
    loss |= {"target_margin": t.number("simpo_gamma")} if kind == "simpo" else {}
    names = {"sigmoid": ["label_smoothing"], "simpo": ["simpo_gamma"]}.get(kind, [])
    if kind != "sigmoid" and t.number("label_smoothing"):
        raise t.refuse("label_smoothing", t("label_smoothing"), "only pref_loss=sigmoid has it")
    t.name_of(["label_smoothing", "simpo_gamma"])
    t.put("algorithm.loss", [loss], "pref_loss", "beta", *names)
    score = {"type": "logprob" if kind in ("orpo", "simpo") else "log_ratio"}
    t.put("algorithm.score", {**score, "length_normalised": kind in ("ipo", "orpo", "simpo")}, "pref_loss")
    likelihood = t.number("pref_ftx") + (kind == "orpo")
    nll = {"type": "sequence_mean", "coefficient": likelihood}
    t.put("algorithm.nll", nll, "pref_ftx", *(["pref_loss"] if kind == "orpo" else []))
    put_batches(t, 1, rows_of_one=2)
    put_lengths(t, "truncated")


def _reward_model(t: Translation) -> None:
    """Set the objective of stage `rm`, which knows no margins."""
    t.put("algorithm.name", "reward_model")
    t.put("algorithm.centring", 0.0)
    t.put("algorithm.margin", 0.0)
    t.differ("head of the model", "a linear layer with a bias, after dropout of 0.1", "a linear layer without")
    put_batches(t, 1, rows_of_one=2)
    put_lengths(t, "truncated")


# --------------------------------------------------------------------------------------------------------------------
# Data sets are names in `dataset_info.json`, which says where the rows are and what their columns mean.

ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
SHAREGPT = {"messages": "conversations"}
"""Columns of the two layouts, if the entry names none."""
TAGS: Mapping[str, tuple[str | None, ...]] = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": (None, "observation", "tool"),
    "function_tag": (None, "function_call"),
    "system_tag": (None, "system"),
}
"""Roles that messages may have here; `role_tag` and `content_tag` are `from` and `value`, or `role` and `content`."""
OPTIONAL = {"system": SYSTEM, "tools": ("tools",), "history": ("history",), "images": None}
"""Columns of all layouts, with the names that they may have here; None: any name."""
FORMATS = ("alpaca", "sharegpt", "openai")
READ = (".json", ".jsonl", ".csv", ".parquet")


def _name_data(t: Translation, stage: str) -> dict[str, str]:
    """Set the files or data sets of the names, and return our keys for the columns of their rows."""
    columns: dict[str, str] = {}
    for name, key in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        if (value := t(name)) is None:
            continue
        listed = value if isinstance(value, list) else str(value).split(",")
        given = [str(one).strip() for one in listed]
        try:
            found = [_source(t, one, stage) for one in given]
            if any(fields != found[0][1] for _, fields in found):
                raise ConfigError("their rows have different columns: write them to files with the same ones")
        except ConfigError as error:
            t.to_do.append(f"{name}={value}: set {key} to the rows of these data sets: {error}")
        else:
            given = [source for source, _ in found]
            columns |= found[0][1]
        files = given[0] if len(given) == 1 else given
        if name == "dataset":
            t.settings["data_files"], t.own["data_files"] = files, (name, value)
        else:
            t.put(key, files, name)
    if t("dataset") is None:
        raise ConfigError(f"{t.path} has no dataset")
    t.leave("dataset_dir", "the folder of dataset_info.json")
    return columns


def _source(t: Translation, name: str, stage: str) -> tuple[str, dict[str, str]]:
    """Return the source of a data set, and our keys for its columns.

    Raises:
        ConfigError: it is not in `dataset_info.json`, or its rows cannot be read as they are.
    """
    folder = str(t("dataset_dir"))
    if folder.startswith("REMOTE:"):
        raise ConfigError(f"dataset_dir={folder}: download that data set, and give its folder")
    if folder == "ONLINE":
        return hub_source(name, None, "train"), _columns(name, {}, stage)
    assert t.path is not None
    info = next((one for one in places_of(t.path, f"{folder}/dataset_info.json") if one.is_file()), None)
    if info is None:
        raise ConfigError(f"dataset_info.json is not in dataset_dir={folder}, here or in a folder above")
    entry = _entry(info, name)
    for key in ("folder", "num_samples"):
        if entry.get(key):
            raise ConfigError(f"{key}={entry[key]} of {name} in {info.name}")
    if "hf_hub_url" in entry:
        split = str(entry.get("split", "train"))
        return hub_source(entry["hf_hub_url"], entry.get("subset"), split), _columns(name, entry, stage)
    if "file_name" not in entry or Path(entry["file_name"]).suffix not in READ:
        where = entry.get("file_name", "in a place that is neither a file nor the Hugging Face hub")
        raise ConfigError(f"{name} is {where}; files are {', '.join(READ)}")
    return str(info.parent / entry["file_name"]), _columns(name, entry, stage)


def _entry(info: Path, name: str) -> dict[str, Any]:
    """Return what `dataset_info.json` says of a data set.

    Raises:
        ConfigError: the file is not JSON, has no such data set, or one of another form.
    """
    try:
        entries = json.loads(text_of(info))
    except ValueError as error:
        raise ConfigError(f"{info} is not valid JSON: {error}") from None
    if not isinstance(entries, dict) or name not in entries:
        raise ConfigError(f"{info} has no {name!r}")
    entry = entries[name]
    if not isinstance(entry, dict):
        raise ConfigError(f"{info}: {name!r} is not a mapping")
    forms = {"columns": dict, "tags": dict, "file_name": str, "hf_hub_url": str, "formatting": str}
    for key, form in forms.items():
        if not isinstance(entry.get(key, form()), form):
            what = "mapping" if form is dict else "text"
            raise ConfigError(f"{info}: {key}={entry[key]} of {name!r} is not a {what}")
    if entry.get("formatting", "alpaca") not in FORMATS:
        raise ConfigError(f"{info}: formatting={entry['formatting']} of {name!r} is none of {', '.join(FORMATS)}")
    return entry


def _columns(name: str, entry: Mapping[str, Any], stage: str) -> dict[str, str]:
    """Return our keys for the columns of a data set, without those that are found by their usual names.

    Raises:
        ConfigError: rows of this layout cannot be read as they are.
    """
    chat = entry.get("formatting", "alpaca") != "alpaca"
    given: dict[str, Any] = entry.get("columns") or (SHAREGPT if chat else ALPACA)
    wrong = ConfigError(
        f"columns {given} of {name} are not read as they are: write the rows to a file of a layout of "
        "docs/guides/data.md"
    )
    if bool(entry.get("ranking")) != (stage in ("dpo", "rm")):
        raise ConfigError(f"rows of {name} are {'' if entry.get('ranking') else 'no '}pairs, and the stage is {stage}")
    columns = {key: column for key, column in given.items() if column is not None}
    fields: dict[str, str] = {}
    for key, allowed in OPTIONAL.items():
        column = columns.pop(key, None)
        if column is not None and allowed is not None and column not in allowed:
            raise wrong
        if column is not None and allowed is None and column not in ("images", "image"):
            fields["data.images_field"] = column
    sides = (
        {"chosen": "preference.chosen_field", "rejected": "preference.rejected_field"} if entry.get("ranking") else {}
    )
    if chat:
        roles = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
        tags = entry.get("tags") or roles
        pair = (tags.get("role_tag"), tags.get("content_tag"))
        known = pair in (("from", "value"), ("role", "content"))
        known = known and all(tags.get(key) in allowed for key, allowed in TAGS.items())
        messages = columns.pop("messages", None)
        if stage in ("pt", "kto") or messages not in ("messages", "conversations") or not known:
            raise wrong
        if sides and messages == "messages":
            fields["data.prompt_field"] = messages
    elif stage == "pt":
        if columns.pop("prompt", None) != "text":
            raise wrong
    elif columns.pop("query", None) is not None:  # which is found by its usual names
        names = [columns.pop(key, ALPACA[key]) for key in ("prompt", *(() if sides else ("response",)))]
        if (
            stage == "kto"
            or given.get("query") != ALPACA["query"]
            or names != [ALPACA["prompt"], ALPACA["response"]][: len(names)]
        ):
            raise wrong
    else:
        more = {"sft": {"response": "sft.completion_field"}, "kto": {
            "response": "preference.completion_field", "kto_tag": "preference.label_field",
        }}  # fmt: skip
        sides = {"prompt": "data.prompt_field", **sides, **more.get(stage, {})}
    for key, ours in sides.items():
        if key not in columns:
            raise wrong
        fields[ours] = columns.pop(key)
    if columns:
        raise wrong
    return {ours: column for ours, column in fields.items() if ours.rpartition(".")[2] != f"{column}_field"}


def _rows(t: Translation, stage: str) -> None:
    """Report how rows are read and cut."""
    t.choice("mix_strategy", t("mix_strategy"), {None: "", "concat": ""})
    if t("val_size"):
        t.to_do.append(f"val_size={t('val_size')}: rows are not split here: set data.eval to the held-out rows")
    if t("max_samples") is not None:
        t.put("data.train_size", t.count("max_samples"), "max_samples", because="of all data sets; there of each")
    _pictures(t)
    t.name_of(["packing", "neat_packing"])
    if t.flag("packing") and stage != "pt" and not t.flag("neat_packing"):
        t.differ("rows of a block (packing)", "see each other", "never do, as with neat_packing")
    if stage == "pt":
        t.differ("beginning of a row or block", "the tokenizer's bos_token, if it adds one", "its text")
        if t.flag("packing"):
            t.differ("last block of 1000 rows, which is shorter", "dropped", "trained")
    else:
        if stage != "rm":
            t.put("data.row_end", "template")
        if stage == "sft":
            t.differ(*EARLIER_ANSWERS)
        t.differ("instruction and input of an Alpaca row", "a line break between them", "an empty line")
        why = "are read if dataset_info.json names them"
        t.differ("columns system, history and tools", why, "are read if the rows have them")
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
