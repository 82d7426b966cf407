"""Translate OpenRLHF scripts: `openrlhf.cli.train_ppo_ray`, `train_sft`, `train_dpo` and `train_rm`, with dotted flags
or the underscores of older versions.

OpenRLHF's `train.batch_size` counts completions, its `rollout.batch_size` prompts.
"""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError
from atomrl.tools.importers.sources import Settings, flat, hub_source, read_flags, text_of
from atomrl.tools.importers.translation import (
    NO_PICTURES,
    TEMPLATE,
    Moves,
    Translation,
    at_least_zero,
    misspelt,
    put_gpus,
    run_name,
)

# --------------------------------------------------------------------------------------------------------------------
# OpenRLHF's flags that are not translated, with the reason; its schedules and its names of data.

SCHEDULES = {
    "cosine_with_min_lr": "cosine",
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
GPUS = "the first line says how GPUs are used"
SHARDS = "how GPUs share a model, which changes no numbers: section backend (docs/guides/multi_gpu.md)"
KERNEL = "an implementation choice; AtomRL has its own kernels"
REASONS = {
    **{
        f"{role}.{name}": GPUS
        for role in ("ref", "reward", "critic", "actor")
        for name in ("num_nodes", "num_gpus_per_node")
    },
    **dict.fromkeys(("train.colocate_", "vllm.num_engines", "train.colocate_all"), GPUS),
    "vllm.": "an option of vLLM; section rollout sets where completions are sampled",
    "ds.zero_stage": SHARDS,
    "ds.": SHARDS,
    **dict.fromkeys((
        "ds.packing_samples", "ds.attn_implementation", "ds.experts_implementation", "ds.use_liger_kernel",
        "ds.deepcompile", "ds.param_dtype", "ds.grad_accum_dtype",
    ), KERNEL),
    **dict.fromkeys(("actor.gradient_checkpointing_reentrant", "model.gradient_checkpointing_reentrant"), KERNEL),
    **dict.fromkeys(("ref.offload", "reward.offload"), "idle models are not offloaded"),
    "ckpt.output_dir": "output_dir and run_name set the run's folder",
    "ckpt.path": "output_dir and run_name set the run's folder",
    "ckpt.": "--resume continues a run, from checkpoints with its complete state (docs/guides/checkpoints.md)",
    "logger.": "each step is in the run's metrics.jsonl",
    "local_rank": GPUS,
    "bf16": "model.dtype is bfloat16",
    "data.disable_fast_tokenizer": "how rows are loaded; the rows are the same",
    "data.dataloader_num_workers": "how rows are loaded; the rows are the same",
    "use_ms": "models and data come from the Hugging Face hub or folders",
    "rollout.micro_batch_size": "train.tokens_per_micro_batch sets the size of forward passes",
    "rollout.max_tokens_per_gpu": "train.tokens_per_micro_batch sets the size of forward passes",
    "rollout.vllm_generate_batch_size": "missing groups are sampled as needed",
    "train.full_determinism_enable": "sampling is determined by the seed",
    "critic.save_value_network": "checkpoints contain the critic",
    "train.enable_ema": "no average of the weights is kept",
    "train.ema_beta": "no average of the weights is kept",
    "algo.kl.target": "for an adaptive KL, which is off",
}  # fmt: skip
"""Flag, or prefix of flags -> reason why it has no counterpart."""


def source_file(source: str, split: str) -> str:
    """Return a file unchanged, and a data set of the hub with its split."""
    if source.endswith((".json", ".jsonl", ".csv", ".parquet", ".gz")):
        return source
    return hub_source(source, split=split)


def listed(value: Any) -> list[str]:
    """Split names at commas."""
    return [] if value is None else str(value).split(",")


# --------------------------------------------------------------------------------------------------------------------
# OpenRLHF's offline trainers: `train_sft`, `train_dpo` and `train_rm`. Their batch sizes cover all GPUs.

SHARED: Settings = {
    "data.apply_chat_template": False,
    "data.dataset_split": "train",
    "data.max_samples": 1000000,
    "train.batch_size": 128,
    "train.max_epochs": 1,
    "train.seed": 42,
    "adam.betas": [0.9, 0.95],
    "adam.eps": 1e-8,
    "adam.weight_decay": 0.0,
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.03,
    "min_lr_ratio": 0.1,
    "max_norm": 1.0,
    "model.gradient_checkpointing_enable": False,
    "eval.steps": -1,
    "ckpt.save_steps": -1,
    "ckpt.max_num": 3,
    "ds.lora.rank": 0,
    "ds.lora.alpha": 16,
    "ds.lora.dropout": 0.0,
    "ds.lora.target_modules": "all-linear",
    "optim": "adam",
}
OFFLINE_DEFAULTS: Mapping[str, Settings] = {
    "sft": {
        **SHARED,
        "train.max_epochs": 2,
        "train.micro_batch_size": 8,
        "data.max_len": 2048,
        "data.input_key": "input",
        "data.input_template": "User: {}\nAssistant: ",
        "adam.lr": 5e-6,
        "eval.split": "train",
        "logger.wandb.project": "openrlhf_train_sft",
    },
    "dpo": {
        **SHARED,
        "train.micro_batch_size": 8,
        "data.max_len": 512,
        "data.chosen_key": "chosen",
        "data.rejected_key": "rejected",
        "adam.lr": 1e-5,
        "model.beta": 0.1,
        "model.label_smoothing": 0.0,
        "model.nll_loss_coef": 0.0,
        "eval.split": "test",
        "logger.wandb.project": "openrlhf_train_dpo",
    },
    "rm": {
        **SHARED,
        "train.micro_batch_size": 1,
        "data.max_len": 512,
        "data.chosen_key": "chosen",
        "data.rejected_key": "rejected",
        "adam.lr": 9e-6,
        "model.loss_type": "sigmoid",
        "eval.split": "train",
        "logger.wandb.project": "openrlhf_train_rm",
    },
}
"""OpenRLHF's defaults, of the flags that have a counterpart."""
RENAMED = {"chosen_key": "data.chosen_key", "rejected_key": "data.rejected_key", "dataset": "data.dataset",
           "beta": "model.beta", "learning_rate": "adam.lr", "max_len": "data.max_len",
           "prompt_key": "data.prompt_key", "output_key": "data.output_key", "lr_warmup_ratio": "lr_warmup_ratio",
           "actor.adam.lr": "adam.lr", "actor.lr_warmup_ratio": "lr_warmup_ratio", "actor.lr_scheduler": "lr_scheduler",
           "actor.adam.betas": "adam.betas", "actor.adam.weight_decay": "adam.weight_decay",
           "actor.max_norm": "max_norm", "label_smoothing": "model.label_smoothing", "ipo": "model.ipo_enable",
           "nll_loss_coef": "model.nll_loss_coef", "input_template": "data.input_template"}  # fmt: skip
"""Flags of older versions and of the README -> current names."""


OFFLINE_MOVES: Moves = {
    "model.path": ("model.model_name_or_path", str),
    "model.gradient_checkpointing": ("model.gradient_checkpointing_enable", bool),
    "seed": ("train.seed", int),
    "train.rows_per_update": ("train.batch_size", int),
    "train.total_epochs": ("train.max_epochs", float),
    "train.learning_rate": ("adam.lr", float),
    "train.adam_beta1": ("adam.betas", lambda betas: float(betas[0])),
    "train.adam_beta2": ("adam.betas", lambda betas: float(betas[1])),
    "train.adam_eps": ("adam.eps", float),
    "train.weight_decay": ("adam.weight_decay", float),
    "train.min_lr_ratio": ("min_lr_ratio", float),
    "train.max_grad_norm": ("max_norm", float),
    "eval.every_steps": ("eval.steps", at_least_zero),
    "checkpoint.every_steps": ("ckpt.save_steps", at_least_zero),
    "checkpoint.keep": ("ckpt.max_num", int),
    "tracking.wandb_project": ("logger.wandb.project", str),
}


def renamed(name: str) -> str:
    """Return the current name of a flag; `actor.X` of the README is `model.X`."""
    name = RENAMED.get(name, name)
    if name in ("actor.model_name_or_path", "actor.gradient_checkpointing_enable"):
        return name.replace("actor.", "model.")
    return name


def translate_offline(t: Translation, kind: str) -> None:
    """Translate an offline trainer of a kind, `sft`, `dpo` or `rm`."""
    if t("optim") != "adam":
        raise t.refuse("optim", t("optim"), "the optimizer is AdamW")
    t.refuse_set({
        "model.aux_loss_coef": "the load-balancing loss of experts is not computed",
        "data.image_key": NO_PICTURES,
        "model.pretrain_mode_enable": "to train on plain text, use a config with the section `pretrain`",
    })  # fmt: skip
    t.move(OFFLINE_MOVES)
    _offline_data(t)
    pair = 1 if kind == "sft" else 2
    t.put("train.rows_per_micro_batch", t.count("train.micro_batch_size") * pair, "train.micro_batch_size")
    length = t.count("data.max_len")
    t.put("train.max_row_tokens", length, "data.max_len")
    t.put("data.max_prompt_tokens", length - 1, "data.max_len")
    schedule = t("lr_scheduler")
    t.put("train.schedule", t.choice("lr_scheduler", schedule, SCHEDULES), "lr_scheduler")
    warmup = 0.0 if schedule == "constant" else t.number("lr_warmup_ratio")
    t.put("train.warmup_ratio", warmup, "lr_scheduler" if schedule == "constant" else "lr_warmup_ratio")
    t.put("eval.before", False)
    t.put(
        "model.dtype", t.choice("ds.param_dtype", t("ds.param_dtype") or "bf16", {"bf16": "bfloat16"}), "ds.param_dtype"
    )
    _adapters(t)
    {"sft": _sft, "dpo": _dpo, "rm": _reward_model}[kind](t)
    if warmup:
        t.differ("first update of the warm-up", "a learning rate of 0", "that of OpenRLHF's second update")
    t.differ(
        "random draws",
        f"seed={t.integer('train.seed')} with its own generators",
        "the same seed gives another order of rows",
    )


def _offline_data(t: Translation) -> None:
    t.put("data.answer_field", None)
    for key, name, split in (
        ("data.train", "data.dataset", "data.dataset_split"),
        ("data.eval", "eval.dataset", "eval.split"),
    ):
        sources = [source_file(source.strip(), t(split) or "train") for source in listed(t(name))]
        if sources:
            t.put(key, sources[0] if len(sources) == 1 else sources, name, split)
    if t("data.dataset_probs") is not None:
        t.to_do.append(
            f"data.dataset_probs={t('data.dataset_probs')}: all rows of each data set are used: join them in a file"
        )
    if t.is_set("data.max_samples"):
        t.put("data.train_size", t.count("data.max_samples"), "data.max_samples")
    t.name_of(["data.max_samples"])


def _adapters(t: Translation) -> None:
    """Set LoRA, and the quantization of the weights under it."""
    rank = t.integer("ds.lora.rank")
    names = [f"ds.lora.{name}" for name in ("alpha", "dropout", "target_modules")]
    t.name_of(names)
    if t.flag("ds.load_in_4bit"):
        if not rank:
            raise t.refuse("ds.load_in_4bit", True, "quantized weights are not trained: add adapters (ds.lora.rank)")
        t.put("model.quantization", "nf4", "ds.load_in_4bit")
    if not rank:
        return
    t.put("model.lora.rank", rank, "ds.lora.rank")
    t.put("model.lora.alpha", t.number(names[0]), names[0])
    t.put("model.lora.dropout", t.number(names[1]), names[1])
    modules: Any = t(names[2])
    t.put(
        "model.lora.target_modules",
        [modules] if isinstance(modules, str) and modules != "all-linear" else modules,
        names[2],
    )


def _template(t: Translation) -> None:
    """Report `data.input_template`, which wraps a prompt if there is no chat template."""
    template = t("data.input_template")
    if template and not t.flag("data.apply_chat_template"):
        text = str(template).removeprefix("$")
        t.differ("a prompt", f"within data.input_template={text!r}", "only the text: write the template into the rows")


def _sft(t: Translation) -> None:
    prompt, completion = str(t("data.input_key")), t("data.output_key")
    t.put("data.prompt_field", prompt, "data.input_key")
    t.put("sft.completion_field", str(completion or "completion"), "data.output_key")
    if completion is None:
        t.to_do.append(
            f"data.output_key is not given: rows have whole conversations in {prompt!r}; here such a column is "
            "`messages` or `conversations` (docs/guides/data.md)"
        )
    if not t.flag("data.multiturn"):
        t.differ("answers before the last of a conversation", "not trained (data.multiturn is off)", "trained")
    _template(t)


def _dpo(t: Translation) -> None:
    reference = t("ref.model_name_or_path")
    if reference not in (None, t("model.model_name_or_path")):
        raise t.refuse("ref.model_name_or_path", reference, "the reference is the initial model")
    t.put("algorithm.name", "dpo")
    beta, smoothing = t.number("model.beta"), t.number("model.label_smoothing")
    loss: dict[str, Any] = {"type": "ipo", "beta": beta} if t.flag("model.ipo_enable") else {
        "type": "sigmoid", "beta": beta, "label_smoothing": smoothing,
    }  # fmt: skip
    t.put("algorithm.loss", [loss], "model.beta", "model.label_smoothing", "model.ipo_enable")
    if weight := t.number("model.nll_loss_coef"):
        t.put("algorithm.nll", {"coefficient": weight}, "model.nll_loss_coef")
        t.differ(
            "mean of the likelihood", "over a row's tokens, then over rows", "over all tokens of the optimizer step"
        )
    _pairs(t)


def _reward_model(t: Translation) -> None:
    if t.integer("ds.lora.rank"):
        if t("ds.lora.target_modules") != "all-linear":
            reason = "the score head is frozen there, and trained in full here: use all-linear"
            raise t.refuse("ds.lora.target_modules", t("ds.lora.target_modules"), reason)
        t.differ("score head beside adapters", "frozen, with an adapter", "trained in full")
    t.put("algorithm.name", "reward_model")
    t.choice("model.loss_type", t("model.loss_type"), {"sigmoid": "", "logexp": ""})  # the same equation
    t.put("algorithm.centring", 0.0)
    t.put("algorithm.margin", 1.0 if t.flag("model.margin_loss_enable") else 0.0, "model.margin_loss_enable")
    t.leave("model.compute_fp32_loss_enable", "the loss is computed in float32 anyway")
    _pairs(t)


def _pairs(t: Translation) -> None:
    t.put("preference.chosen_field", str(t("data.chosen_key")), "data.chosen_key")
    t.put("preference.rejected_field", str(t("data.rejected_key")), "data.rejected_key")
    if t("data.prompt_key") is not None:
        t.put("data.prompt_field", str(t("data.prompt_key")), "data.prompt_key")
    _template(t)


DEFAULTS: Settings = {
    "data.input_key": "input",
    "data.apply_chat_template": False,
    "data.max_len": 2048,
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "train.batch_size": 128,
    "train.micro_batch_size": 1,
    "train.dynamic_batch_enable": False,
    "train.max_tokens_per_gpu": 16192,
    "train.max_epochs": 1,
    "train.num_episodes": 1,
    "train.seed": 42,
    "actor.adam.lr": 1e-6,
    "actor.adam.betas": [0.9, 0.95],
    "actor.adam.eps": 1e-8,
    "actor.adam.weight_decay": 0.0,
    "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.lr_warmup_ratio": 0.03,
    "actor.min_lr_ratio": 0.1,
    "actor.max_norm": 1.0,
    "actor.gradient_checkpointing_enable": False,
    "actor.eps_clip": 0.2,
    "actor.policy_loss_type": "ppo",
    "critic.adam.lr": 9e-6,
    "critic.value_clip": 0.5,
    "algo.advantage.estimator": "gae",
    "algo.advantage.gamma": 1.0,
    "algo.advantage.lambd": 1.0,
    "algo.advantage.no_std_norm": False,
    "algo.advantage.is_correction_enable": False,
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "algo.advantage.is_correction_type": "tis",
    "algo.kl.init_coef": 0.01,
    "algo.kl.horizon": 10000,
    "algo.kl.estimator": "k1",
    "algo.kl.use_loss": False,
    "algo.dynamic_filtering_enable": False,
    "algo.dynamic_filtering_range": [0, 1],
    "reward.clip_range": [-10, 10],
    "reward.overlong_penalty_factor": 1.0,
    "eval.temperature": 0.6,
    "eval.n_samples_per_prompt": 4,
    "eval.steps": -1,
    "ckpt.save_steps": -1,
    "ckpt.max_num": 3,
    "train.async_queue_size": 1,
    "ds.lora.rank": 0,
    "ds.lora.alpha": 16,
    "ds.lora.dropout": 0.0,
    "ds.lora.target_modules": "all-linear",
    "logger.wandb.project": "openrlhf_train_ppo",
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
}
VERSION = "OpenRLHF of August 2026"
PROGRAM = r"train_(ppo(_ray)?|sft|dpo|rm)(\.py)?$"
REWARD_FILE = '''"""A reward with OpenRLHF's interface, called with the arguments of a reward here."""

from atomrl.common.functions import find_function

theirs = find_function("PATH:reward_func")


def reward_func(prompts, completions, ground_truth, **columns):
    """Call reward_func(queries, prompts, labels): a query is a prompt with its completion."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in prompts]
    queries = [text + completion for text, completion in zip(texts, completions, strict=True)]
    result = theirs(queries, texts, ground_truth)
    rewards = result["rewards"] if isinstance(result, dict) else result
    return [float(reward) for reward in rewards]
'''
OLDER = {
    "pretrain": "actor.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "prompt_data": "data.prompt_dataset",
    "prompt_split": "data.prompt_split",
    "eval_dataset": "eval.dataset",
    "eval_split": "eval.split",
    "input_key": "data.input_key",
    "label_key": "data.label_key",
    "apply_chat_template": "data.apply_chat_template",
    "tokenizer_chat_template": "data.tokenizer_chat_template",
    "max_samples": "data.max_samples",
    "prompt_max_len": "data.prompt_max_len",
    "generate_max_len": "rollout.max_new_tokens",
    "rollout_batch_size": "rollout.batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "max_epochs": "train.max_epochs",
    "num_episodes": "train.num_episodes",
    "seed": "train.seed",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "adam_betas": "actor.adam.betas",
    "l2": "actor.adam.weight_decay",
    "lr_scheduler": "actor.lr_scheduler",
    "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "max_norm": "actor.max_norm",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "policy_loss_type": "actor.policy_loss_type",
    "entropy_loss_coef": "actor.entropy_coef",
    "value_clip": "critic.value_clip",
    "advantage_estimator": "algo.advantage.estimator",
    "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "vllm_is_correction_type": "algo.advantage.is_correction_type",
    "normalize_reward": "reward.normalize_enable",
    "agent_func_path": "train.agent_func_path",
    "async_train": "train.async_enable",
    "async_queue_size": "train.async_queue_size",
    "partial_rollout": "train.partial_rollout_enable",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "kl_estimator": "algo.kl.estimator",
    "use_kl_loss": "algo.kl.use_loss",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "reward_clip_range": "reward.clip_range",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "eval_steps": "eval.steps",
    "save_steps": "ckpt.save_steps",
    "max_ckpt_num": "ckpt.max_num",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "lora_dropout": "ds.lora.dropout",
    "target_modules": "ds.lora.target_modules",
    "use_wandb": "logger.wandb.key",
    "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name",
    "use_tensorboard": "logger.tensorboard_dir",
    **{
        f"{role}_{name}": f"{role}.{name}"
        for role in ("actor", "critic", "ref", "reward")
        for name in ("num_nodes", "num_gpus_per_node")
    },
    "colocate_all_models": "train.colocate_all",
    "colocate_actor_ref": "train.colocate_actor_ref",
    "colocate_critic_reward": "train.colocate_critic_reward",
    **{
        f"vllm_{name}": f"vllm.{name}"
        for name in (
            "num_engines", "tensor_parallel_size", "gpu_memory_utilization", "sync_backend", "enable_sleep",
            "sync_with_ray",
        )
    },
    "enforce_eager": "vllm.enforce_eager",
    "enable_prefix_caching": "vllm.enable_prefix_caching",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "zero_stage": "ds.zero_stage",
    "adam_offload": "ds.adam_offload",
    "packing_samples": "ds.packing_samples",
    "attn_implementation": "ds.attn_implementation",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "save_path": "ckpt.output_dir",
    "ckpt_path": "ckpt.path",
    "save_hf_ckpt": "ckpt.save_hf",
    "load_checkpoint": "ckpt.load_enable",
    "logging_steps": "logger.logging_steps",
}  # fmt: skip
"""Flags of versions without dots -> current names."""


MOVES: Moves = {
    "model.path": ("actor.model_name_or_path", str),
    "model.gradient_checkpointing": ("actor.gradient_checkpointing_enable", bool),
    "data.prompt_field": ("data.input_key", str),
    "seed": ("train.seed", int),
    "rollout.prompts_per_step": ("rollout.batch_size", int),
    "rollout.completions_per_prompt": ("rollout.n_samples_per_prompt", int),
    "rollout.temperature": ("rollout.temperature", float),
    "rollout.top_p": ("rollout.top_p", float),
    "train.rows_per_update": ("train.batch_size", int),
    "train.epochs_per_step": ("train.max_epochs", int),
    "train.total_epochs": ("train.num_episodes", float),
    "train.learning_rate": ("actor.adam.lr", float),
    "train.adam_beta1": ("actor.adam.betas", lambda betas: float(betas[0])),
    "train.adam_beta2": ("actor.adam.betas", lambda betas: float(betas[1])),
    "train.adam_eps": ("actor.adam.eps", float),
    "train.weight_decay": ("actor.adam.weight_decay", float),
    "train.min_lr_ratio": ("actor.min_lr_ratio", float),
    "train.max_grad_norm": ("actor.max_norm", float),
    "eval.temperature": ("eval.temperature", float),
    "eval.samples_per_prompt": ("eval.n_samples_per_prompt", int),
    "eval.every_steps": ("eval.steps", at_least_zero),
    "checkpoint.every_steps": ("ckpt.save_steps", at_least_zero),
    "checkpoint.keep": ("ckpt.max_num", int),
    "tracking.wandb_project": ("logger.wandb.project", str),
    "rollout.gpu_memory_utilization": ("vllm.gpu_memory_utilization", float),
}
ESTIMATORS = {
    "gae": "gae",
    "reinforce": "reinforce_pp",
    "rloo": "rloo",
    "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo",
    "dr_grpo": "grpo_no_std",
}


def translate(path: Path, out: Path) -> Translation:
    """Translate an OpenRLHF script.

    Args:
        out: path of the config.
    """
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(f"{path}: OpenRLHF is configured by flags: give the script (.sh) that calls it")
    flags, notes, launcher, words = read_flags(
        path, PROGRAM, "openrlhf.cli.train_ppo_ray, train_sft, train_dpo or train_rm"
    )
    flags = flat(flags)
    kind = next((name for name in OFFLINE_DEFAULTS if f"train_{name}" in words[0]), None)
    names = {name: OLDER.get(name, name) for name in flags}
    if kind is not None:
        names = {name: renamed(current) for name, current in names.items()}
    current = {names[name]: value for name, value in flags.items()}
    t = Translation("OpenRLHF", current, DEFAULTS if kind is None else OFFLINE_DEFAULTS[kind], path)
    t.own = {current: (name, flags[name]) for name, current in names.items()}
    t.reasons = REASONS
    t.version = VERSION
    if older := [name for name in flags if name in OLDER]:
        t.approximate(
            f"{len(older)} flags are from an older version ({older[0]}, ...); missing ones have today's defaults"
        )
    name = t("logger.wandb.run_name") or path.stem
    t.put("run_name", run_name(name), "logger.wandb.run_name")
    t.refuse_set({"data.tokenizer_chat_template": TEMPLATE})
    t.put("data.chat_template", "auto" if t.flag("data.apply_chat_template") else "none", "data.apply_chat_template")
    if kind is not None:
        for name, more, by in (("num_gpus", "num_nodes", "deepspeed"), ("nproc_per_node", "nnodes", "torchrun")):
            if isinstance(each := launcher.get(name), int):
                machines = launcher.get(more, 1)
                machines = machines if isinstance(machines, int) else 1
                put_gpus(t, each * machines, f"{by} --{name} {each}", machines)
        translate_offline(t, kind)
    else:
        _policy(t, out)
    sinks = [name for name, key in (("wandb", "logger.wandb.key"), ("tensorboard", "logger.tensorboard_dir")) if t(key)]
    t.settings = {key: value for key, value in t.settings.items() if key != "logger.wandb.key"}  # which is a secret
    t.put("tracking.sinks", sinks, "logger.tensorboard_dir")
    for note in notes:
        t.approximate(note)
    keys = t.read_keys | t.reasons.keys() | OLDER.keys()
    for unread in t.unread:
        near = misspelt(unread, [name for name in keys if name.count(".") == unread.count(".")])
        if near is not None:
            raise ConfigError(f"{path}: OpenRLHF has no flag --{unread}; did you mean --{near}?")
    t.leave_unknown()
    return t


def _policy(t: Translation, out: Path) -> None:
    """Translate `train_ppo_ray`."""
    machines, each = t.count("actor.num_nodes"), t.count("actor.num_gpus_per_node")
    setting = f"actor.num_gpus_per_node={each} x actor.num_nodes={machines}"
    setting += "" if t.flag("train.colocate_all") else ", besides those of engines and other roles"
    put_gpus(t, machines * each, setting, machines)
    t.move(MOVES)
    _data(t)
    _lengths_and_batches(t)
    _agent(t)
    _asynchronous(t)
    _model(t)
    t.put_pictures("data.image_key", "actor.freeze_visual_encoder", "data.max_images_per_prompt")
    _objective(t)
    _kl(t)
    _shaping(t)
    _reward(t, out)
    _differences(t)


def _differences(t: Translation) -> None:
    """Report numbers that differ from OpenRLHF's."""
    if t.tree["train"].get("warmup_ratio"):
        t.differ("first update of the warm-up", "a learning rate of 0", "that of OpenRLHF's second update")
    if t("algo.advantage.estimator") == "gae":
        t.differ(
            "the critic's optimizer, except its learning rate",
            "separate settings (critic.adam.*, critic.lr_*)",
            "the settings of train",
        )
    t.differ("random draws", "its own generators", "the same seed gives another order of rows and other completions")


def _data(t: Translation) -> None:
    for key, name, split in (
        ("data.train", "data.prompt_dataset", "data.prompt_split"),
        ("data.eval", "eval.dataset", "eval.split"),
    ):
        part = t(split) or "train"
        files = [source_file(path.strip(), part) for path in listed(t(name))]
        if files:
            t.put(key, files[0] if len(files) == 1 else files, name, split)
    t.put("data.answer_field", t("data.label_key"), "data.label_key")
    if t("data.max_samples") is not None and (most := t.integer("data.max_samples")) < 1e8:
        t.put("data.train_size", most, "data.max_samples")


def _lengths_and_batches(t: Translation) -> None:
    longest = t.integer("data.max_len")
    if t("rollout.max_new_tokens") is not None and t("train.agent_func_path") is None:
        t.put("rollout.max_completion_tokens", t.count("rollout.max_new_tokens"), "rollout.max_new_tokens")
    else:
        t.put("rollout.max_completion_tokens", longest, "data.max_len")
        t.differ(
            "longest completion",
            f"{longest} minus its prompt",
            f"{longest}; rows are cut to {longest}",
        )
    if t("data.prompt_max_len") is not None:
        t.put("data.max_prompt_tokens", t.count("data.prompt_max_len"), "data.prompt_max_len")
    else:
        t.put("data.max_prompt_tokens", longest - 1, "data.max_len")
    if t("data.prompt_max_len") is None or t("rollout.max_new_tokens") is None or t.is_set("data.max_len"):
        t.put("train.max_row_tokens", longest, "data.max_len")
    else:  # the older flags, whose rows nothing cuts
        t.name_of(["data.max_len"])
    if t.flag("train.dynamic_batch_enable"):
        names = "train.dynamic_batch_enable", "train.max_tokens_per_gpu"
        t.put("train.tokens_per_micro_batch", t.integer(names[1]), *names)
    else:
        t.put("train.rows_per_micro_batch", t.integer("train.micro_batch_size"), "train.micro_batch_size")
    t.name_of(["train.max_tokens_per_gpu", "train.micro_batch_size", "actor.lr_warmup_ratio"])
    schedule = t.choice("actor.lr_scheduler", t("actor.lr_scheduler"), SCHEDULES)
    t.put("train.schedule", schedule, "actor.lr_scheduler")
    if t("actor.lr_scheduler") == "constant":  # which has no warm-up in transformers
        t.put("train.warmup_ratio", 0.0, "actor.lr_scheduler")
    else:
        t.put("train.warmup_ratio", t.number("actor.lr_warmup_ratio"), "actor.lr_warmup_ratio")
    t.put("eval.before", False)


AGENT_STEP_S = 600.0
"""Time limit of a step of an agent, which OpenRLHF does not limit."""


def _agent(t: Translation) -> None:
    """Translate `train.agent_func_path`: episodes of several turns, which also give the reward."""
    if (path := t("train.agent_func_path")) is None:
        return
    _check_agent(t, str(path))
    if t("data.prompt_max_len") is not None and not t.is_set("data.max_len"):
        raise ConfigError(f"{t.path} has no --data.max_len, the limit of an agent's episode: add it, with its prompt")
    longest = t.integer("data.max_len")
    episode = {"function": "openrlhf_agent", "args": {"path": str(path)}, "timeout_s": AGENT_STEP_S}
    t.put("environment", episode, "train.agent_func_path")
    for key in ("environment.max_turns", "environment.max_reply_tokens"):
        t.put(key, longest, "data.max_len")
    t.differ("a step of the agent", "no time limit", f"{AGENT_STEP_S:g} s, then its episode fails")
    t.leave("rollout.max_new_tokens", "an agent's turn may have all tokens that are left of data.max_len")
    t.leave_text("extra_logs of the agent", "they are not logged")
    for name in ("reward.remote_url", "reward.model_name_or_path"):
        t.leave(name, "an agent gives its reward itself")


def _check_agent(t: Translation, path: str) -> None:
    """Read the agent's file, if it is there, and refuse one that samples by itself. It is not executed."""
    places = [Path(path), *(parent / path for parent in (t.path or Path()).resolve().parents)]
    if (file := next((place for place in places if place.is_file()), None)) is None:
        t.to_do.append(f"{t.given('train.agent_func_path')}: the file is not there; atomrl train needs it")
        return
    try:
        statements = ast.parse(text_of(file)).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{t.named('train.agent_func_path')}={path} is not Python: {error}") from None
    classes = [one for one in statements if isinstance(one, ast.ClassDef) and one.name == "AgentExecutor"]
    bases = [ast.unparse(base).rpartition(".")[2] for one in classes for base in one.bases]
    methods = [part.name for one in classes for part in one.body if isinstance(part, FUNCTIONS)]
    if bases != ["MultiTurnAgentExecutor"] or "execute" in methods:
        raise t.refuse(
            "train.agent_func_path", path,
            "its AgentExecutor samples by itself: supported is a MultiTurnAgentExecutor, whose AgentInstance has reset "
            "and step; else write an environment (docs/guides/environments.md)",
        )  # fmt: skip


FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


def _asynchronous(t: Translation) -> None:
    """Translate rollouts during training: at most `async_queue_size` batches are sampled ahead."""
    if t.flag("train.partial_rollout_enable") and not t.flag("train.async_enable"):
        raise ConfigError(f"{t.named('train.partial_rollout_enable')} needs train.async_enable, as in OpenRLHF")
    if not t.flag("train.async_enable"):
        return
    if (more := t("rollout.vllm_generate_batch_size")) not in (None, t("rollout.batch_size")):
        raise t.refuse("rollout.vllm_generate_batch_size", more, "prompts are sampled as the steps need them")
    keep = t.flag("train.partial_rollout_enable")
    ahead = {"max_staleness": t.count("train.async_queue_size"), "on_update": "keep" if keep else "wait"}
    t.put(
        "asynchronous", ahead, "train.async_enable", "train.async_queue_size", "train.partial_rollout_enable",
    )  # fmt: skip
    if not t.flag("algo.advantage.is_correction_enable"):
        t.put("algorithm.rollout_is", "none")  # else the section brings one
    t.differ("rollouts during training", "whole batches are queued", "groups are, the oldest first")


def _model(t: Translation) -> None:
    dtype = t("ds.param_dtype") or "bf16"
    t.put("model.dtype", t.choice("ds.param_dtype", dtype, {"bf16": "bfloat16"}), "ds.param_dtype")
    _adapters(t)
    t.put_engine()


def _objective(t: Translation) -> None:
    if t.flag("reward.normalize_enable"):
        t.to_do.append(
            "reward.normalize_enable=True: OpenRLHF normalises scores by mean and std of the reward model's config; "
            "here scores are not changed: if the config has them, return (score - mean) / std from a reward function"
        )
    _advantage(t)
    _policy_loss(t)


def _advantage(t: Translation) -> None:
    """Set the advantage; GAE brings a critic."""
    place = "algo.advantage."
    kind = t.choice("algo.advantage.estimator", t(place + "estimator"), ESTIMATORS)
    advantage: dict[str, Any] = {"type": kind}
    names = [place + "estimator"]
    if kind in ("gae", "reinforce_pp"):
        advantage |= {"gamma": t.number(place + "gamma")}
        names.append(place + "gamma")
    if kind == "grpo":
        advantage |= {"eps": 1e-9}
    if kind == "gae":
        advantage |= {"lam": t.number(place + "lambd"), "whiten": True}
        names.append(place + "lambd")
        t.put("critic.learning_rate", t.number("critic.adam.lr"), "critic.adam.lr")
        if (start := t("critic.model_name_or_path") or t("reward.model_name_or_path")) is not None:
            t.put("critic.path", str(start).split(",")[0], "critic.model_name_or_path", "reward.model_name_or_path")
        value = {"type": "clipped", "coefficient": 1.0, "clip": t.number("critic.value_clip")}
        t.put("algorithm.value", value, "critic.value_clip")
    if t.flag(place + "no_std_norm") and kind in ("gae", "reinforce_pp", "reinforce_pp_baseline"):
        raise t.refuse(place + "no_std_norm", True, "advantages are whitened here, or unchanged (whiten: false)")
    t.put("algorithm.name", "ppo" if kind == "gae" else "grpo")
    t.put("algorithm.advantage", advantage, *names)


def _policy_loss(t: Translation) -> None:
    """Set clip, ratio, aggregation and entropy bonus, and the correction of the mismatch between engine and trainer."""
    if t("actor.eps_clip_low_high") is None:
        low, high = [t.number("actor.eps_clip")] * 2
    else:
        low, high = t.numbers("actor.eps_clip_low_high", 2)
    dual = None if t("actor.dual_clip") is None else t.number("actor.dual_clip")
    clip = {"type": "ppo", "low": low, "high": high, "dual": dual}
    t.put("algorithm.clip", clip, "actor.eps_clip_low_high", "actor.eps_clip", "actor.dual_clip")
    gspo = t.choice("actor.policy_loss_type", t("actor.policy_loss_type"), {"ppo": False, "gspo": True})
    token: dict[str, Any] = {"type": "token", "clamp": 20.0}
    ratio: dict[str, Any] = {"type": "sequence", "length_normalised": True, "clamp": None} if gspo else token
    t.put("algorithm.ratio", ratio, "actor.policy_loss_type")
    t.put("algorithm.loss_agg", {"type": "sequence_mean" if gspo else "token_mean"}, "actor.policy_loss_type")
    entropy = 0.0 if t("actor.entropy_coef") is None else t.number("actor.entropy_coef")
    t.put("algorithm.entropy.coefficient", entropy, "actor.entropy_coef")
    place = "algo.advantage."
    if t.flag(place + "is_correction_enable"):
        if gspo:
            raise t.refuse(
                place + "is_correction_enable", True, "with gspo the ratio is then to the engine's log-probs"
            )
        low, high = t.numbers(place + "is_correction_threshold", 2)
        table = {
            "tis": {"type": "token_tis"},
            "icepop": {"type": "icepop"},
            "seq-mask-tis": {"type": "sequence_mask", "weighted": True},
        }
        part = t.choice("is_correction_type", t(place + "is_correction_type"), table) | {"low": low, "high": high}
        t.put(
            "algorithm.rollout_is",
            [part],
            *(place + "is_correction_" + name for name in ("enable", "type", "threshold")),
        )


def _kl(t: Translation) -> None:
    names = [f"algo.kl.{name}" for name in ("init_coef", "estimator", "use_loss", "target", "horizon")]
    coefficient, estimator, in_loss = t.number(names[0]), t(names[1]), t.flag(names[2])
    target, horizon = None if t(names[3]) is None else t.number(names[3]), t.number(names[4])
    kl = {
        "type": estimator,
        "coefficient": coefficient,
        "apply_to": "loss" if in_loss else "reward",
        "k2_gradient": False,
    }
    kl |= {"target": target, "horizon": horizon}
    group = t("algo.advantage.estimator") in ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
    t.put("algorithm.kl", kl, *names)
    if coefficient:
        t.differ("KL of a token", "within -10 and 10", "not bounded")
    if group and coefficient and not in_loss:
        t.differ("KL", "subtracted per token after the baseline", "part of the reward, before the baseline")


def _shaping(t: Translation) -> None:
    low, high = t.numbers("reward.clip_range", 2)
    t.put("algorithm.shaping", {"lowest": low, "highest": high}, "reward.clip_range")
    if t("algo.advantage.estimator") in ("rloo", "reinforce_baseline", "group_norm", "dr_grpo"):
        t.differ(f"bounds {low:g} and {high:g}", "of the reward after the baseline", "of the reward")
    if t("reward.overlong_buffer_len") is not None:
        penalty = {
            "soft_overlong": True,
            "overlong_buffer_tokens": t.count("reward.overlong_buffer_len"),
            "overlong_penalty": t.number("reward.overlong_penalty_factor"),
        }
        t.put("algorithm.shaping", penalty, "reward.overlong_buffer_len", "reward.overlong_penalty_factor")
    if t.flag("algo.dynamic_filtering_enable"):
        bounds = t.numbers("algo.dynamic_filtering_range", 2)
        if bounds != [0.0, 1.0]:
            raise t.refuse(
                "algo.dynamic_filtering_range", bounds, "groups whose rewards are not all equal are kept (0 1)"
            )
        t.put(
            "algorithm.group_filter", "mixed_outcomes", "algo.dynamic_filtering_enable", "algo.dynamic_filtering_range"
        )
        t.differ(
            "groups that are kept",
            "those whose mean is between 0 and 1",
            "those whose rewards differ: the same if rewards are 0 or 1"
            + " (an agent's `scores` are not used)" * t.is_set("train.agent_func_path"),
        )


def _reward(t: Translation, out: Path) -> None:
    if t("train.agent_func_path") is not None:
        return
    functions: list[dict[str, Any]] = []
    for url in listed(t("reward.remote_url")):
        if url.endswith(".py"):
            name = f"{out.stem}_rewards.py"
            functions.append({"function": f"./{name}:reward_func"})
            t.files[name] = REWARD_FILE.replace("PATH", url)
            t.approximate(
                f"reward.remote_url={url}: {name} calls its reward_func(queries, prompts, labels) with the arguments "
                "of a reward here"
            )
        else:
            functions.append({"function": "http", "args": {"url": url}})
    if not functions:
        functions = [
            {"function": "reward_model", "args": {"path": path}} for path in listed(t("reward.model_name_or_path"))
        ]
    t.name_of(["reward.model_name_or_path"])
    if not functions:
        raise ConfigError(f"{t.path} has no reward: give --reward.model_name_or_path or --reward.remote_url")
    t.put("reward.functions", functions, "reward.remote_url", "reward.model_name_or_path")
