"""What an unknown key may mean: the nearest key, or the one that other libraries' users know by that name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

NAMES = {
    "rollout.completions_per_prompt": "n group_size num_generations n_samples_per_prompt rollout_n",
    "rollout.prompts_per_step (prompts in a step)": "train_batch_size gen_batch_size",
    "rollout.prompts_per_step (prompts in a step; OpenRLHF counts prompts as well)": "rollout_batch_size",
    "rollout.max_completion_tokens": "max_response_length max_completion_length generate_max_len max_new_tokens "
    "max_tokens response_length",
    "train.rows_per_update (completions in an optimizer step; verl counts prompts)": "ppo_mini_batch_size "
    "mini_batch_size",
    "train.rows_per_update (completions in an optimizer step)": "gradient_accumulation_steps",
    "train.rows_per_micro_batch (completions in a forward pass)": "per_device_train_batch_size batch_size "
    "micro_train_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu micro_batch_size",
    "train.tokens_per_micro_batch (padded tokens in a forward pass)": "ppo_max_token_len_per_gpu",
    "train.epochs_per_step (passes over a step)": "ppo_epochs num_iterations max_epochs",
    "train.total_epochs (passes over the data)": "total_epochs num_train_epochs num_episodes epochs",
    "train.steps": "max_steps total_training_steps n_steps",
    "train.learning_rate": "lr actor_lr actor_learning_rate",
    "train.schedule": "lr_scheduler_type lr_scheduler lr_warmup_style",
    "train.warmup_ratio (a share of all updates)": "lr_warmup_steps_ratio lr_warmup_ratio",
    "train.max_grad_norm": "grad_clip max_norm",
    "critic.learning_rate": "critic_lr critic_learning_rate",
    "algorithm.name": "adv_estimator advantage_estimator",
    "algorithm.kl.coefficient": "kl_coef kl_loss_coef init_kl_coef kl_coefficient",
    "algorithm.kl.coefficient (in DPO and its family algorithm.loss.beta)": "beta",
    "algorithm.clip.low (and algorithm.clip.high)": "clip_ratio epsilon cliprange clip_range eps_clip clip_eps "
    "clip_ratio_low",
    "algorithm.clip.high": "clip_ratio_high epsilon_high eps_clip_high",
    "algorithm.loss_agg.type": "loss_agg_mode loss_type loss_level",
    "algorithm.rollout_is": "rollout_is tis",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "data.train": "train_files train_dataset dataset_name prompt_data",
    "data.eval": "val_files eval_dataset test_files",
    "model.path": "model_name_or_path model_path base_model",
    "model.dtype (auto, float32 or bfloat16)": "bf16 fp16 torch_dtype precision",
    "model.lora.rank": "lora_rank lora_r r",
    "model.lora.alpha": "lora_alpha",
    "reward.functions": "reward_funcs custom_reward_function reward_function",
    "checkpoint.every_steps": "save_steps save_freq",
    "checkpoint.keep": "save_total_limit max_ckpt_num",
    "eval.every_steps": "eval_steps test_freq",
    "tracking.log_every_steps": "logging_steps",
    "tracking.sinks (tensorboard, wandb)": "report_to logger",
    "tracking.wandb_project": "project_name",
    "output_dir": "default_local_dir ckpt_path save_path",
    "run_name": "experiment_name exp_name",
}
"""A key, and what it counts where that is not plain -> its names in TRL, verl and OpenRLHF."""

FOREIGN = {
    name: (key.partition(" ")[0], key.partition(" ")[2]) for key, names in NAMES.items() for name in names.split()
}
"""Each of these names -> the key, and what it counts."""

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
        return f"did you mean {key!r}{f' {unit}' if unit else ''}?"
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


def renamed(message: str, names: Mapping[str, str]) -> str:
    """A message about a config with the keys called as where the values were given.

    Example:
        >>> renamed("train.steps: must be positive; see train.steps_", {"train.steps": "max_steps"})
        'max_steps: must be positive; see train.steps_'
    """
    keys = "|".join(re.escape(key) for key in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![\w.])(?:{keys})(?!\w)", lambda found: names[found.group()], message)
