"""Translate verl's SFT trainers: `fsdp_sft_trainer`, whose rows are a prompt and a response or messages, and
`sft_trainer`, whose rows are messages.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError
from atomrl.tools.importers.sources import Settings
from atomrl.tools.importers.translation import (
    EARLIER_ANSWERS,
    NO_PICTURES,
    TEMPLATE,
    Moves,
    Translation,
    at_least_zero,
    files_of,
    put_gpus,
    put_trackers,
    run_name,
    same,
)

PROGRAM = r"verl\.trainer\.(fsdp_sft_trainer|sft_trainer|sft_trainer_ray)"
VERSION = "verl of August 2026"
DEFAULTS: Settings = {
    "data.train_batch_size": 256,
    "data.micro_batch_size_per_gpu": 4,
    "data.train_files": "~/data/gsm8k/train.parquet",
    "data.max_length": 1024,
    "data.truncation": "error",
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.weight_decay": 0.01,
    "optim.lr_warmup_steps_ratio": 0.1,
    "optim.clip_grad": 1.0,
    "model.enable_gradient_checkpointing": True,
    "model.lora_rank": 0,
    "model.lora_alpha": 16,
    "model.target_modules": "all-linear",
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
    "trainer.total_epochs": 4,
    "trainer.logger": ["console", "wandb"],
    "trainer.seed": 1,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
}
"""Defaults of both trainers."""
OF_FSDP: Settings = {"data.prompt_key": "question", "data.response_key": "answer", "optim.lr_scheduler": "cosine"}
OF_ENGINE: Settings = {
    "optim.lr": 1e-3, "optim.betas": [0.9, 0.999], "optim.lr_warmup_steps_ratio": 0.0,
    "optim.lr_scheduler_type": "constant",
    "optim.min_lr_ratio": 0.0, "data.use_dynamic_bsz": True, "data.max_token_len_per_gpu": 8192,
    "model.path": "~/models/deepseek-llm-7b-chat", "trainer.n_gpus_per_node": 1,
}  # fmt: skip
OPTIMIZERS: Mapping[str, Settings] = {
    "veomni": {"lr_scheduler_type": "cosine"},
    "automodel": {"lr_scheduler_type": "cosine", "lr": 1e-5, "min_lr_ratio": 0.01, "init_lr_ratio": 0.1},
    "torchtitan": {"lr_scheduler_type": "linear"},
}
"""Defaults of the optimizers of back ends other than FSDP and Megatron."""


TOWER = "the vision tower of a model that has one, if rows have pictures"
OFFLOADED = tuple(f"optim.override_optimizer_config.{key}" for key in (
    "optimizer_offload_fraction", "offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "optimizer_cpu_offload",
    "use_precision_aware_optimizer",
))  # fmt: skip
"""Keys that place an optimizer's state, which change no numbers."""


MOVES: Moves = {
    "run_name": ("trainer.experiment_name", run_name),
    "output_dir": ("trainer.default_local_dir", str),
    "model.path": (("model.partial_pretrain", "model.path"), str),
    "model.tokenizer": ("model.tokenizer_path", str),
    "model.gradient_checkpointing": ("model.enable_gradient_checkpointing", bool),
    "data.train": ("data.train_files", files_of),
    "data.eval": ("data.val_files", files_of),
    "seed": ("trainer.seed", int),
    "train.rows_per_update": ("data.train_batch_size", int),
    "train.max_row_tokens": ("data.max_length", int),
    "train.learning_rate": ("optim.lr", float),
    "train.weight_decay": ("optim.weight_decay", float),
    "train.adam_beta1": ("optim.betas", lambda betas: float(betas[0])),
    "train.adam_beta2": ("optim.betas", lambda betas: float(betas[1])),
    "train.max_grad_norm": ("optim.clip_grad", float),
    "eval.every_steps": ("trainer.test_freq", at_least_zero),
    "checkpoint.every_steps": ("trainer.save_freq", at_least_zero),
    "checkpoint.keep": ("trainer.max_ckpt_to_keep", int),
    "tracking.wandb_project": ("trainer.project_name", str),
}
SHARDS = "how GPUs share a model: section backend (docs/guides/multi_gpu.md); no numbers change"
KERNEL = "an implementation choice; AtomRL has its own kernels"
REASONS = {
    **dict.fromkeys((
        "engine", "engine.", "model.fsdp_config.", "model.strategy", "ulysses_sequence_parallel_size", "backend",
        "data.balance_dp_token", *OFFLOADED, "trainer.n_gpus_per_node", "trainer.nnodes",
    ), SHARDS),
    **dict.fromkeys((
        "use_remove_padding", "model.use_remove_padding", "model.use_liger", "model.use_shm", "data.use_shm",
        "data.pad_mode", "model.use_fused_kernels", "model.enable_activation_offload", "data.num_workers",
    ), KERNEL),
    **dict.fromkeys((
        "trainer.resume_mode", "trainer.resume_from_path", "trainer.default_hdfs_dir", "trainer.checkpoint.",
        "checkpoint.", "trainer.device", "profiler.", "global_profiler.",
    ), "checkpoints have the complete state: --resume (docs/guides/checkpoints.md)"),
    "model": "which back end's keys of the model are read",
    "optim": "which back end's keys of the optimizer are read",
    "data.tools_key": "rows with tools have a column tools (docs/guides/data.md)",
    "data.ignore_input_ids_mismatch": "the chat template is applied to the whole conversation",
}  # fmt: skip
REFUSED = {
    "data.custom_cls.path": "rows are read as docs/guides/data.md lists",
    **dict.fromkeys(("data.chat_template", "model.custom_chat_template"), TEMPLATE),
    "model.mtp.enable": "heads for several tokens are not trained",
}


def translate(path: Path, flags: Settings) -> Translation:
    """Translate the keys of an SFT script or YAML file of verl."""
    old = "model.partial_pretrain" in flags
    optimizer = OPTIMIZERS.get(str(flags.get("optim", flags.get("engine"))), {})
    of_engine = OF_ENGINE | {f"optim.{key}": value for key, value in optimizer.items()}
    t = Translation("verl", flags, DEFAULTS | (OF_FSDP if old else of_engine), path)
    t.version = VERSION
    t.reasons = REASONS
    t.refuse_set(REFUSED)
    if {"trainer.nnodes", "trainer.n_gpus_per_node"} & flags.keys():
        put_machines(t)
    t.move(MOVES)
    put_precision(t, "engine.", "model.fsdp_config.")
    t.put("data.shuffle", True)
    t.put("data.answer_field", None)
    t.put("data.max_prompt_tokens", t.count("data.max_length") - 1, "data.max_length")
    _rows(t, old)
    _passes(t)
    put_optimizer(t, "optim.")
    _adapters(t)
    t.chat_template_kwargs("data.apply_chat_template_kwargs")
    put_trackers(t)
    put_kept(t, "trainer.max_ckpt_to_keep")
    t.differ(
        "mean of the loss",
        "over a forward pass, then over passes" if old else "over the tokens of the batch",
        "over the tokens of the optimizer step",
    )
    if t("data.truncation") == "error":
        t.differ(f"rows over {t.count('data.max_length')} tokens", "an error", "truncated")
    elif t("data.truncation") == "left":
        raise t.refuse("data.truncation", "left", "rows are truncated at the end")
    if old:
        t.refuse_set({"data.image_key": NO_PICTURES})
    elif not t.put_pictures("data.image_key"):
        t.differ(TOWER, "trained", "frozen (model.freeze_vision=true)")
    t.differ("random draws", "its own generators", "the same seed gives another order of rows")
    return t


def _rows(t: Translation, old: bool) -> None:
    if old and not t.flag("data.multiturn.enable"):
        for ours, key, inner in (
            ("data.prompt_field", "data.prompt_key", "data.prompt_dict_keys"),
            ("sft.completion_field", "data.response_key", "data.response_dict_keys"),
        ):
            inside = t(inner) or []
            entries = [str(entry) for entry in (inside if isinstance(inside, list) else [inside])]
            column = entries[-1] if entries else str(t(key))
            t.put(ours, column, key, inner)
            if entries:
                nested = ".".join([str(t(key)), *entries])
                t.to_do.append(f"{ours}: it is {nested} in the rows: write it to a column {column!r} of its own")
        return
    messages = t("data.multiturn.messages_key", "data.messages_key") or "messages"
    t.put(
        "sft.completion_field",
        "completion",
        "data.multiturn.enable",
        "data.multiturn.messages_key",
        "data.messages_key",
    )
    if messages != "messages":
        t.to_do.append(f"messages_key={messages}: the column is `messages` here: rename it in the file")
    t.put("data.row_end", "template")
    t.differ(*EARLIER_ANSWERS)
    put_sizes(t)


def _passes(t: Translation) -> None:
    sizes = ("data.micro_batch_size_per_gpu", "data.micro_batch_size")
    if t.flag("data.use_dynamic_bsz"):
        t.put("train.tokens_per_micro_batch", t.count("data.max_token_len_per_gpu"), "data.max_token_len_per_gpu")
    else:
        name = str(t.name_of(sizes))
        t.put("train.rows_per_micro_batch", t.count(name), name)
    t.name_of([*sizes, "data.use_dynamic_bsz", "data.max_token_len_per_gpu"])
    put_duration(t)
    put_warmup(t, 1, "optim.lr_warmup_steps", "optim.lr_warmup_steps_ratio", "optim.warmup_steps_ratio")


def _adapters(t: Translation) -> None:
    """Set LoRA: the keys of FSDP, or Megatron's in `model.lora`."""
    t.leave("model.trust_remote_code", "code of a model runs only if you set model.trust_remote_code yourself")
    put_adapters(t, "model.")


def put_adapters(t: Translation, place: str) -> None:
    """Set LoRA from the keys of FSDP or of Megatron.

    Args:
        place: prefix of the model's keys.
    """
    names = (("lora.rank", "lora_rank"), ("lora.alpha", "lora_alpha"), ("lora.target_modules", "target_modules"))
    rank, alpha, modules = (str(t.name_of([place + new, place + old])) for new, old in names)
    if (method := t(f"{place}lora.lora_A_init_method")) is not None:
        t.choice(f"{place}lora.lora_A_init_method", method, {"kaiming": "kaiming"})
    if (start := t(f"{place}lora_adapter_path")) is not None:
        t.put("model.lora.start", str(start), f"{place}lora_adapter_path")
        if not t.integer(rank):
            t.approximate("lora_adapter_path: verl of August 2026 trains all weights without lora_rank; here adapters")
        for name in (rank, alpha, modules):
            t.leave(name, "the adapters in lora_adapter_path have their own")
        return
    if t.integer(rank):
        makers: tuple[Callable[[Any], Any], ...] = (int, float, same)
        for key, name, make in zip(("rank", "alpha", "target_modules"), (rank, alpha, modules), makers, strict=True):
            t.put(f"model.lora.{key}", make(t(name)), name)


def put_optimizer(t: Translation, place: str) -> None:
    """Set the schedule, and check the optimizer. Each back end has names of its own for them.

    Args:
        place: prefix of the optimizer's keys.
    """
    kinds = dict.fromkeys(("AdamW", "adamw", "Adam", "adam", "FusedAdam"))
    t.choice(f"{place}optimizer", t(f"{place}optimizer") or "AdamW", kinds)
    styles = ("warmup_style", "lr_scheduler", "lr_scheduler_type", "lr_decay_style", "decay_type")
    names = [place + name for name in styles]
    schedules = ("constant", "cosine", "linear") if t.is_set(*names[3:]) else ("constant", "cosine")
    t.put("train.schedule", t.choice("lr_scheduler_type", t(*names), {one: one for one in schedules}), *names)
    rates, ratios = [f"{place}min_lr", f"{place}lr_min"], [f"{place}min_lr_ratio", f"{place}min_lr_factor"]
    t.name_of([*rates, *ratios])
    if t.is_set(*rates):
        name = str(t.name_of(rates))
        t.put("train.min_lr_ratio", round(t.number(name) / t.number(f"{place}lr"), 9), name)
    else:
        t.put("train.min_lr_ratio", 0.0 if t(*ratios) is None else t.number(str(t.name_of(ratios))), *ratios)
    for begin in (place + name for name in ("lr_warmup_init", "lr_start", "init_lr_ratio")):
        if t(begin) is not None and t.number(begin):
            t.differ("first learning rate of a warm-up", f"{begin}={t(begin)}", "the first part of the rise from 0")


def put_machines(t: Translation) -> None:
    """Set the number of GPUs by `trainer.n_gpus_per_node` and `trainer.nnodes`."""
    try:
        machines, each = t.count("trainer.nnodes"), t.count("trainer.n_gpus_per_node")
        put_gpus(t, machines * each, f"trainer.n_gpus_per_node={each} x trainer.nnodes={machines}", machines)
    except ConfigError as error:  # an environment variable, such as the number of Slurm's nodes
        t.approximate(f"the number of GPUs is known only to the shell: {error}")


def put_sizes(t: Translation) -> None:
    """Set the number of rows that are read of each file."""
    for theirs, ours in (("data.train_max_samples", "data.train_size"), ("data.val_max_samples", "data.eval_size")):
        if t(theirs) not in (None, -1):
            t.put(ours, t.integer(theirs), theirs)


def put_duration(t: Translation) -> None:
    """Set the number of steps, or of epochs."""
    t.name_of(["trainer.total_epochs"])
    if t("trainer.total_training_steps") is None:
        t.put("train.total_epochs", t.number("trainer.total_epochs"), "trainer.total_epochs")
    else:
        t.put("train.steps", t.count("trainer.total_training_steps"), "trainer.total_training_steps")


def put_warmup(t: Translation, updates_per_step: int, name: str, *ratios: str) -> None:
    """Set the warm-up: its number of steps counts if it is above 0.

    Args:
        name: key of the number of warm-up steps.
        ratios: names of the key of their share of all steps.
    """
    t.name_of(ratios)
    if t(name) is not None and (steps := t.integer(name)) > 0:
        t.put("train.warmup_updates", steps * updates_per_step, name)
    else:
        t.put("train.warmup_ratio", t.number(str(t.name_of(ratios))), *ratios)


def put_precision(t: Translation, *places: str) -> None:
    """Set the precision of forward passes. The optimizer's weights are float32, whatever `model_dtype` says.

    Args:
        places: prefixes of the keys `dtype` and `model_dtype`.
    """
    name = t.name_of([f"{place}dtype" for place in places])
    dtype = str(t(name) if name else "bfloat16")
    names = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
    if dtype in ("float16", "fp16"):
        t.put("model.dtype", "auto", str(name))
        t.differ("precision", "float16", "bfloat16, or float32 on a GPU without it: there is no float16")
    else:
        t.put("model.dtype", t.choice(str(name), dtype, names), str(name))
    if names.get(str(t(*(f"{place}model_dtype" for place in places)))) == "bfloat16":
        t.differ("weights that the optimizer updates", "bfloat16", "float32, computed in bfloat16")


def put_kept(t: Translation, keep: str) -> None:
    """Say how many checkpoints are kept without `keep`, the key that limits their number."""
    if not t.is_set(keep):
        t.approximate(f"{keep}=null keeps all checkpoints; here checkpoint.keep is 2")
