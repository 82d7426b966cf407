"""The arguments that TRL's trainers share: `TrainingArguments`, the model, and the data of flags and YAML files."""

import math
import re
from pathlib import Path

from atomrl.importers.sources import Given, hub_source
from atomrl.importers.translation import TEMPLATE, Moves, Translation
from atomrl.importers.trl_names import REFUSED, WITHOUT_MEANING

DEFAULTS: Given = {
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.0,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": True,
    "bf16": True,
    "optim": "adamw_torch_fused",
    "seed": 42,
    "save_steps": 500,
    "logging_steps": 10,
    "eval_strategy": "no",
}
"""Defaults of all trainers."""
LORA_DEFAULTS: Given = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
"""Defaults of TRL's command line."""
MOVES: Moves = {
    "model.path": (("model_name_or_path", "model"), str),
    "model.gradient_checkpointing": ("gradient_checkpointing", bool),
    "seed": ("seed", int),
    "train.learning_rate": ("learning_rate", float),
    "train.weight_decay": ("weight_decay", float),
    "train.adam_beta1": ("adam_beta1", float),
    "train.adam_beta2": ("adam_beta2", float),
    "train.adam_eps": ("adam_epsilon", float),
    "checkpoint.keep": ("save_total_limit", int),
}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw8bit"),
    "paged_adamw_8bit": "paged_adamw8bit",
}
NO_CLIP = 1e30
"""A norm that no gradient reaches: TRL's `max_grad_norm=0`."""
SINKS = ("wandb", "tensorboard", "mlflow", "trackio")


def translate_shared(t: Translation, path: Path) -> None:
    """Translate what all trainers share: the run's name, optimizer, schedule, model, data and trackers."""
    t.reasons |= WITHOUT_MEANING
    for name, (off, why) in REFUSED.items():
        if t(name) not in off:
            raise t.refuse(name, t(name), why)
    t.put("run_name", _run_name(t, path), "run_name", "output_dir")
    if t("output_dir") and str(parent := Path(str(t("output_dir"))).parent) != ".":
        t.put("output_dir", str(parent), "output_dir")
    t.move(MOVES)
    optimizer = t.choice("optim", t("optim"), OPTIMIZERS)
    if optimizer != "adamw" and t.gpus is not None and t.gpus[0] > 1:
        t.differ(
            "Adam's moments", f"in 8 bits ({t('optim')})", "float32, in shards: those of several GPUs have no 8 bits"
        )
        optimizer = "adamw"
    t.put("train.optimizer", optimizer, "optim")
    t.put("train.max_grad_norm", t.number("max_grad_norm") or NO_CLIP, "max_grad_norm")
    _schedule(t)
    _model(t)
    _data(t)
    reported = t("report_to")
    sinks = [reported] if isinstance(reported, str) else reported or []
    t.put("tracking.sinks", [name for name in sinks if name in SINKS], "report_to")
    if unknown := [str(name) for name in sinks if name not in (*SINKS, "none", "all")]:
        t.nearly(f"report_to: {', '.join(unknown)} has no counterpart; metrics.jsonl has every step")
    if not t.is_given("save_total_limit"):
        t.nearly("save_total_limit=None keeps all checkpoints; here checkpoint.keep is 2")


def _run_name(t: Translation, path: Path) -> str:
    name = t("run_name") or (Path(str(t("output_dir"))).name if t("output_dir") else path.stem)
    return re.sub(r"[/\\]", "-", str(name)).lstrip(".") or "run"


def _every(t: Translation, key: str, name: str, updates: int, on: bool) -> None:
    """So many optimizer steps as steps of ours; 0 where it is not on."""
    every = t.number(name) if on and t(name) is not None else 0.0
    if not every:
        t.put(key, 0, name)
    elif 0 < every < 1:
        t.leave(name, "a share of all steps; give a number of steps")
    else:
        rest = f"optimizer steps; {updates} are a step" if int(every) % updates else ""
        t.put(key, max(1, round(int(every) / updates)), name, because=rest)


def _schedule(t: Translation) -> None:
    kind = str(t("lr_scheduler_type")).rpartition(".")[2].lower()
    t.put("train.schedule", t.choice("lr_scheduler_type", kind, SCHEDULES), "lr_scheduler_type")
    settings = t.mapping("lr_scheduler_kwargs")
    least = settings.pop("min_lr_rate", None)
    if settings.pop("min_lr", None) is not None:
        raise t.refuse("lr_scheduler_kwargs", t("lr_scheduler_kwargs"), "the end is a share here: min_lr_rate")
    if settings or (least is not None and kind != "cosine_with_min_lr"):
        raise t.refuse("lr_scheduler_kwargs", t("lr_scheduler_kwargs"), "schedules have train.min_lr_ratio alone")
    if kind == "cosine_with_min_lr":
        t.put("train.min_lr_ratio", float(least or 0.0), "lr_scheduler_kwargs")
    warmup = t.number("warmup_steps") if t.is_given("warmup_steps") else 0.0
    if (warmup or t.number("warmup_ratio")) and kind != "constant":
        t.differ("first update of the warm-up", "a learning rate of 0", "a part of it, as in the second of TRL's")
    if kind == "constant":  # which has no warm-up in transformers
        t.put("train.warmup_ratio", 0.0, "lr_scheduler_type")
        t.name_of(["warmup_steps", "warmup_ratio"])
    elif warmup >= 1:
        total = t.whole("max_steps")
        ratio = min(1.0, warmup / total) if total > 0 else 0.0
        why = "of max_steps" if total > 0 else "a share of all updates here; give it once they are known"
        t.put("train.warmup_ratio", round(ratio, 6), "warmup_steps", because=why)
    else:
        t.put("train.warmup_ratio", warmup or t.number("warmup_ratio"), "warmup_steps", "warmup_ratio")


def _model(t: Translation) -> None:
    for name, value in t.mapping("model_init_kwargs").items():
        t.given.setdefault({"torch_dtype": "dtype"}.get(name, name), value)
    if t.flag("fp16"):
        t.put("model.dtype", "auto", "fp16")
        t.differ(
            "precision", "float16 with a scaled loss", "bfloat16, or float32 on a GPU without it: there is no float16"
        )
    else:
        t.put("model.dtype", "bfloat16" if t.flag("bf16") else "float32", "bf16")
    dtype = str(t("dtype") or "float32").rpartition(".")[2]
    if t("dtype") is not None and dtype not in ("float32", "auto", "None") and not t.flag("use_peft"):
        t.differ("weights that are trained", f"{dtype} (dtype)", "float32, computed with in model.dtype")
    if t.flag("use_cpu"):
        t.put("model.device", "cpu", "use_cpu")
    if t.flag("activation_offloading"):
        t.put("model.activation_offload", True, "activation_offloading")
    if (tokenizer := t("tokenizer")) is not None and tokenizer != t("model_name_or_path", "model"):
        t.put("model.tokenizer", str(tokenizer), "tokenizer")
    for name, kind in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if t.flag(name):
            if not t.flag("use_peft"):
                raise t.refuse(name, True, "quantised weights are not trained: give adapters too (peft_config)")
            t.put("model.quantization", kind, name)
    t.leave("trust_remote_code", "code of a model is only run where you write model.trust_remote_code yourself")
    if not t.flag("use_peft"):
        t.reasons |= dict.fromkeys(
            (*LORA_DEFAULTS, "lora_target_modules", "use_rslora"), "of adapters: use_peft is off"
        )
        return
    t.defaults = {**t.defaults, **LORA_DEFAULTS}
    rank, alpha = t.count("lora_r"), t.number("lora_alpha")
    rescaled = t.flag("use_rslora")
    t.put("model.lora.rank", rank, "lora_r")
    # A scale of alpha / sqrt(rank) there, of alpha / rank here.
    t.put("model.lora.alpha", alpha * math.sqrt(rank) if rescaled else alpha, "lora_alpha", "use_rslora")
    t.put("model.lora.dropout", t.number("lora_dropout"), "lora_dropout")
    modules = t("lora_target_modules")
    if modules is None:
        t.nearly("lora_target_modules=None takes what peft knows of the model; here all linear layers")
    else:
        one = isinstance(modules, str) and modules != "all-linear"
        t.put("model.lora.target_modules", [modules] if one else modules, "lora_target_modules")


def _data(t: Translation) -> None:
    t.chat_template_kwargs("chat_template_kwargs")
    t.refuse_given({"chat_template_path": TEMPLATE})
    if t.rows_are_put:
        return
    name, files, mixed = t("dataset_name"), t("data_files"), t("datasets")
    config, revision = t("dataset_config"), t("dataset_revision")
    if files is not None:
        t.put("data.train", files["train"] if isinstance(files, dict) else files, "data_files")
    elif isinstance(mixed, list) and mixed and all(isinstance(one, dict) and "path" in one for one in mixed):
        found = [hub_source(str(one["path"]), one.get("name"), one.get("split") or "train") for one in mixed]
        t.put("data.train", found, "datasets")
    elif name is not None:
        train, test = t("dataset_train_split") or "train", t("dataset_test_split") or "test"
        why = "" if "/" in str(name) else "a data set of the hub is named with its owner: OWNER/NAME"
        names = ("dataset_name", "dataset_config", "dataset_train_split")
        t.put("data.train", hub_source(str(name), config, train, revision), *names, because=why)
        if t("eval_strategy") != "no":
            test_name = str(t("eval_dataset_name") or name)
            t.put("data.eval", hub_source(test_name, config, test, revision), "dataset_test_split", because=why)
    else:
        t.put("data.train", "train.parquet", because="the file does not name its data; name the file of its rows")
        t.to_do.append("data.train: the file does not name its data: name the file of its rows, or its data set")


def put_steps(t: Translation, updates: int) -> None:
    """How long it trains, and how often it saves and evaluates, where a step of ours is so many of the optimizer's."""
    if (given := t.whole("max_steps")) > 0:
        rest = f"a step is {updates} optimizer steps; the last is whole" if given % updates else ""
        t.put("train.steps", math.ceil(given / updates), "max_steps", because=rest)
        t.name_of(["num_train_epochs"])
    else:
        t.put("train.total_epochs", t.number("num_train_epochs"), "num_train_epochs")
    _every(t, "checkpoint.every_steps", "save_steps", updates, on=t("save_strategy") not in ("no", "epoch"))
    for name, key in (("save_strategy", "checkpoint.every_steps"), ("eval_strategy", "eval.every_steps")):
        if t(name) not in ("no", "steps"):
            t.leave(name, f"here it is by steps: {key}")
    evaluates = t("eval_strategy") == "steps"
    often = "logging_steps" if evaluates and t("eval_steps") is None else "eval_steps"
    _every(t, "eval.every_steps", often, updates, on=evaluates)
    t.put("eval.before", t.flag("eval_on_start"), "eval_on_start")
