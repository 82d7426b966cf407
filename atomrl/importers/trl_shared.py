"""What TRL's trainers have in common: `TrainingArguments`, the model, and the data."""

import math
import re
from pathlib import Path

from atomrl.importers.sources import Given, hub_source
from atomrl.importers.translation import TEMPLATE, Moves, Translation

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
    "seed": 42,
    "save_steps": 500,
    "logging_steps": 10,
    "eval_strategy": "no",
}
"""Of all trainers."""
LORA_DEFAULTS: Given = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
"""Of TRL's command line."""
MOVES: Moves = {
    "model.path": (("model_name_or_path", "model"), str),
    "model.gradient_checkpointing": ("gradient_checkpointing", bool),
    "seed": ("seed", int),
    "train.learning_rate": ("learning_rate", float),
    "train.weight_decay": ("weight_decay", float),
    "train.adam_beta1": ("adam_beta1", float),
    "train.adam_beta2": ("adam_beta2", float),
    "train.adam_eps": ("adam_epsilon", float),
    "train.max_grad_norm": ("max_grad_norm", float),
    "checkpoint.keep": ("save_total_limit", int),
}
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
SINKS = ("wandb", "tensorboard", "mlflow", "trackio")


def translate_shared(t: Translation, path: Path) -> None:
    """What all trainers say alike: the run's name, optimizer, schedule, model, data and trackers."""
    t.put("run_name", _run_name(t, path), "run_name", "output_dir")
    t.move(MOVES)
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
    return re.sub(r"[/\\]", "-", str(name)).lstrip(".")


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
    t.put("train.schedule", t.choice("lr_scheduler_type", t("lr_scheduler_type"), SCHEDULES), "lr_scheduler_type")
    warmup = t.number("warmup_steps") if t.is_given("warmup_steps") else 0.0
    if t("lr_scheduler_type") == "constant":  # which has no warm-up in transformers
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
    t.put("model.dtype", "bfloat16" if t.flag("bf16") else "float32", "bf16")
    for name, kind in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if t.flag(name):
            t.put("model.quantization", kind, name)
    t.leave("trust_remote_code", "code of a model is only run where you write model.trust_remote_code yourself")
    if t.flag("use_peft"):
        t.defaults = {**t.defaults, **LORA_DEFAULTS}
        t.move(
            {
                "model.lora.rank": ("lora_r", int),
                "model.lora.alpha": ("lora_alpha", float),
                "model.lora.dropout": ("lora_dropout", float),
                "model.lora.target_modules": (
                    "lora_target_modules",
                    lambda names: [names] if isinstance(names, str) and names != "all-linear" else names,
                ),
            }
        )
        if t("lora_target_modules") is None:
            t.nearly("lora_target_modules=None takes what peft knows of the model; here all linear layers")


def _data(t: Translation) -> None:
    t.chat_template_kwargs("chat_template_kwargs")
    t.refuse_given({"chat_template_path": TEMPLATE})
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
