"""What an unknown key may mean: the nearest key, or the one that other libraries' users know by that name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

FOREIGN: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("n", "group_size", "num_generations", "n_samples_per_prompt", "rollout_n"),
        ("rollout.completions_per_prompt", ""),
    ),
    **dict.fromkeys(("train_batch_size", "gen_batch_size"), ("rollout.prompts_per_step", "prompts in a step")),
    "rollout_batch_size": ("rollout.prompts_per_step", "prompts in a step; OpenRLHF counts prompts as well"),
    **dict.fromkeys(
        ("ppo_mini_batch_size", "mini_batch_size"),
        ("train.rows_per_update", "completions in an optimizer step; verl counts prompts"),
    ),
    "gradient_accumulation_steps": ("train.rows_per_update", "completions in an optimizer step"),
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "micro_train_batch_size",
            "ppo_micro_batch_size",
            "ppo_micro_batch_size_per_gpu",
            "micro_batch_size",
            "batch_size",
        ),
        ("train.rows_per_micro_batch", "completions in a forward pass"),
    ),
    "ppo_max_token_len_per_gpu": ("train.tokens_per_micro_batch", "padded tokens in a forward pass"),
    **dict.fromkeys(("ppo_epochs", "num_iterations", "max_epochs"), ("train.epochs_per_step", "passes over a step")),
    **dict.fromkeys(
        ("total_epochs", "num_train_epochs", "num_episodes", "epochs"), ("train.total_epochs", "passes over the data")
    ),
    **dict.fromkeys(("max_steps", "total_training_steps", "n_steps"), ("train.steps", "")),
    **dict.fromkeys(("lr", "actor_lr", "actor_learning_rate"), ("train.learning_rate", "")),
    **dict.fromkeys(("critic_lr", "critic_learning_rate"), ("critic.learning_rate", "")),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "lr_warmup_style"), ("train.schedule", "")),
    **dict.fromkeys(("lr_warmup_steps_ratio", "lr_warmup_ratio"), ("train.warmup_ratio", "a share of all updates")),
    **dict.fromkeys(("grad_clip", "max_norm"), ("train.max_grad_norm", "")),
    **dict.fromkeys(("kl_coef", "kl_loss_coef", "init_kl_coef", "kl_coefficient"), ("algorithm.kl.coefficient", "")),
    "beta": ("algorithm.kl.coefficient", "in DPO and its family algorithm.loss.beta"),
    **dict.fromkeys(
        ("clip_ratio", "epsilon", "cliprange", "clip_range", "eps_clip", "clip_eps", "clip_ratio_low"),
        ("algorithm.clip.low", "and algorithm.clip.high"),
    ),
    **dict.fromkeys(("clip_ratio_high", "epsilon_high", "eps_clip_high"), ("algorithm.clip.high", "")),
    **dict.fromkeys(("adv_estimator", "advantage_estimator"), ("algorithm.name", "")),
    **dict.fromkeys(("loss_agg_mode", "loss_type", "loss_level"), ("algorithm.loss_agg.type", "")),
    **dict.fromkeys(("max_prompt_length", "prompt_max_len"), ("data.max_prompt_tokens", "")),
    **dict.fromkeys(
        (
            "max_response_length",
            "max_completion_length",
            "generate_max_len",
            "max_new_tokens",
            "max_tokens",
            "response_length",
        ),
        ("rollout.max_completion_tokens", ""),
    ),
    **dict.fromkeys(("model_name_or_path", "model_path", "base_model"), ("model.path", "")),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "precision"), ("model.dtype", "auto, float32 or bfloat16")),
    **dict.fromkeys(("lora_rank", "lora_r", "r"), ("model.lora.rank", "")),
    **dict.fromkeys(("lora_alpha",), ("model.lora.alpha", "")),
    **dict.fromkeys(("train_files", "train_dataset", "dataset_name", "prompt_data"), ("data.train", "")),
    **dict.fromkeys(("val_files", "eval_dataset", "test_files"), ("data.eval", "")),
    **dict.fromkeys(("reward_funcs", "custom_reward_function", "reward_function"), ("reward.functions", "")),
    **dict.fromkeys(("save_steps", "save_freq"), ("checkpoint.every_steps", "")),
    **dict.fromkeys(("save_total_limit", "max_ckpt_num"), ("checkpoint.keep", "")),
    **dict.fromkeys(("eval_steps", "test_freq"), ("eval.every_steps", "")),
    "logging_steps": ("tracking.log_every_steps", ""),
    **dict.fromkeys(("report_to", "logger"), ("tracking.sinks", "tensorboard, wandb")),
    **dict.fromkeys(("default_local_dir", "ckpt_path", "save_path"), ("output_dir", "")),
    **dict.fromkeys(("experiment_name", "exp_name"), ("run_name", "")),
    "project_name": ("tracking.wandb_project", ""),
    **dict.fromkeys(("rollout_is", "tis"), ("algorithm.rollout_is", "")),
}
"""A name in TRL, verl or OpenRLHF -> the key here, and what it counts where that is not plain."""

FOREIGN_SECTIONS = {
    "actor_rollout_ref": "verl's section: its parts are model, rollout and train here",
    "trainer": "verl's section: its parts are train, eval, checkpoint and tracking here",
    "custom_reward_function": "verl's section: name the function in reward.functions",
}


def suggestion(path: Sequence[str], keys: Sequence[str]) -> str | None:
    """What to say of an unknown key.

    Args:
        path: its parts.
        keys: all valid keys with dots.

    Example:
        >>> suggestion(["data", "train_batch_size"], ["rollout.prompts_per_step", "data.train_size"])
        "did you mean 'rollout.prompts_per_step' (prompts in a step)?"
        >>> suggestion(["train", "stepz"], ["train.steps", "eval.every_steps"])
        "did you mean 'train.steps'?"
    """
    if path[-1] in FOREIGN_SECTIONS and len(path) == 1:
        return FOREIGN_SECTIONS[path[-1]]
    if path[-1] in FOREIGN:
        key, unit = FOREIGN[path[-1]]
        return f"did you mean {key!r}{f' ({unit})' if unit else ''}?"
    near = nearest_key(path, keys)
    return None if near is None else f"did you mean {near!r}?"


def nearest_key(path: Sequence[str], keys: Sequence[str]) -> str | None:
    """The valid key most like `path`: in the same section first, then by its last part anywhere."""
    section = ".".join(path[:-1])
    siblings = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == section]
    if near := difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.65):
        return ".".join([*path[:-1], near[0]])
    leaves = {key.rpartition(".")[2]: key for key in reversed(keys)}  # the first section counts
    near = difflib.get_close_matches(path[-1], list(leaves), n=1, cutoff=0.6)
    return leaves[near[0]] if near else None
