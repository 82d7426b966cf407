"""Translate verl's configs: Hydra's YAML, or a script that calls `verl.trainer.main_ppo` or its SFT trainer. Also those
of verl 0.1, which TinyZero and Search-R1 carry, and Search-R1's own keys.

verl counts prompts in its mini-batches (`ppo_mini_batch_size`), and is the same for any number of GPUs.
"""

import re
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError
from atomrl.tools.importers import verl_sft, verl_turns
from atomrl.tools.importers.sources import Settings, read_hydra
from atomrl.tools.importers.translation import (
    NO_PICTURES,
    Moves,
    Translation,
    at_least_zero,
    files_of,
    put_template,
    put_trackers,
    run_name,
)
from atomrl.tools.importers.verl_objective import OLD, VERSION, A, translate_objective, updates_per_step
from atomrl.tools.importers.verl_sft import (
    OFFLOADED,
    OPTIMIZERS,
    TOWER,
    put_adapters,
    put_duration,
    put_kept,
    put_machines,
    put_optimizer,
    put_precision,
    put_sizes,
    put_warmup,
)
from atomrl.tools.importers.verl_turns import data_sources, put_turns

R, M = "actor_rollout_ref.rollout.", "actor_rollout_ref.model."

DEFAULTS: Settings = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.prompt_key": "prompt",
    "data.reward_fn_key": "data_source",
    "data.shuffle": True,
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    M + "path": "~/models/deepseek-llm-7b-chat",
    M + "enable_gradient_checkpointing": True,
    M + "lora_rank": 0,
    M + "lora_alpha": 16,
    M + "target_modules": "all-linear",
    A + "ppo_mini_batch_size": 256,
    A + "ppo_epochs": 1,
    A + "use_dynamic_bsz": False,
    A + "ppo_max_token_len_per_gpu": 16384,
    A + "clip_ratio_low": 0.2,
    A + "clip_ratio_high": 0.2,
    A + "clip_ratio_c": 3.0,
    A + "tau_pos": 1.0,
    A + "tau_neg": 1.05,
    A + "policy_loss.loss_mode": "vanilla",
    A + "policy_loss.clip_cov_ratio": 2e-4,
    A + "policy_loss.clip_cov_lb": 1.0,
    A + "policy_loss.clip_cov_ub": 5.0,
    A + "policy_loss.kl_cov_ratio": 2e-4,
    A + "policy_loss.ppo_kl_coef": 0.1,
    A + "loss_agg_mode": "token-mean",
    A + "entropy_coeff": 0.0,
    A + "use_kl_loss": False,
    A + "kl_loss_coef": 0.001,
    A + "kl_loss_type": "low_var_kl",
    A + "optim.lr": 1e-6,
    A + "optim.weight_decay": 0.01,
    A + "optim.betas": [0.9, 0.999],
    A + "optim.lr_warmup_steps_ratio": 0.0,
    A + "optim.min_lr_ratio": 0.0,
    A + "optim.lr_scheduler_type": "constant",
    A + "grad_clip": 1.0,
    R + "n": 1,
    R + "temperature": 1.0,
    R + "top_p": 1.0,
    R + "top_k": -1,
    R + "max_num_seqs": 256,
    R + "val_kwargs.n": 1,
    R + "val_kwargs.temperature": 0.0,
    R + "val_kwargs.top_p": 1.0,
    R + "val_kwargs.top_k": -1,
    R + "val_kwargs.do_sample": False,
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.rollout_correction.loss_type": "ppo_clip",
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "algorithm.rollout_correction.rollout_is_batch_normalize": False,
    "distillation.distillation_loss.loss_mode": "k3",
    "distillation.distillation_loss.use_task_rewards": True,
    "distillation.distillation_loss.use_policy_gradient": False,
    "distillation.distillation_loss.policy_loss_mode": "vanilla",
    "distillation.distillation_loss.clip_ratio_low": 0.2,
    "distillation.distillation_loss.clip_ratio_high": 0.2,
    "critic.optim.lr": 1e-5,
    "critic.cliprange_value": 0.5,
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.logger": ["console", "wandb"],
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.critic_warmup": 0,
    "critic.optim.weight_decay": 0.01,
}
"""verl's defaults, of the keys that have a counterpart."""
OLD_DEFAULTS: Settings = {
    A + "clip_ratio": 0.2,
    A + "entropy_coeff": 0.001,
    M + "enable_gradient_checkpointing": False,
    R + "max_num_seqs": 1024,
}
"""Defaults of verl 0.1 that have changed."""
SEARCH_DEFAULTS: Settings = {
    R + "top_p": 0.95,
    R + "n_agent": 1,
    A + "state_masking": False,
    "data.max_start_length": 256,
    "data.max_obs_length": 512,
    "retriever.url": "http://127.0.0.1:8000/retrieve",
    "retriever.topk": 3,
    "max_turns": 10,
    "do_search": True,
    "algorithm.no_think_rl": False,
}
"""Search-R1's defaults: of its own keys, and of verl's that it changes."""


MATH = ("DigitalLearningGmbH/MATH-lighteval", "lighteval/MATH", "HuggingFaceH4/MATH-500")
"""Data sources whose answers are boxed, by the names of verl's data preparation."""
CODE = ("codecontests", "apps", "codeforces", "taco")
"""Data sources whose answers are programs with tests."""


MOVES: Moves = {
    "run_name": ("trainer.experiment_name", run_name),
    "output_dir": ("trainer.default_local_dir", str),
    "model.path": (M + "path", str),
    "model.tokenizer": ((M + "tokenizer_path", "data.tokenizer"), str),
    "model.gradient_checkpointing": (M + "enable_gradient_checkpointing", bool),
    "data.train": ("data.train_files", files_of),
    "data.eval": ("data.val_files", files_of),
    "data.prompt_field": ("data.prompt_key", str),
    "data.data_source_field": ("data.reward_fn_key", str),
    "data.max_prompt_tokens": ("data.max_prompt_length", int),
    "data.shuffle": ("data.shuffle", bool),
    "seed": ("data.seed", int),
    "rollout.prompts_per_step": ("data.train_batch_size", int),
    "rollout.completions_per_prompt": (R + "n", int),
    "rollout.temperature": (R + "temperature", float),
    "rollout.top_p": (R + "top_p", float),
    "rollout.top_k": (R + "top_k", at_least_zero),
    "rollout.max_completion_tokens": (("data.max_response_length", R + "response_length"), int),
    "rollout.max_concurrent_completions": (R + "max_num_seqs", int),
    "train.epochs_per_step": (A + "ppo_epochs", int),
    "train.learning_rate": (A + "optim.lr", float),
    "train.weight_decay": (A + "optim.weight_decay", float),
    "train.adam_beta1": (A + "optim.betas", lambda betas: float(betas[0])),
    "train.adam_beta2": (A + "optim.betas", lambda betas: float(betas[1])),
    "train.max_grad_norm": ((A + "optim.clip_grad", A + "grad_clip"), float),
    "eval.samples_per_prompt": (R + "val_kwargs.n", int),
    "eval.top_p": (R + "val_kwargs.top_p", float),
    "eval.top_k": (R + "val_kwargs.top_k", at_least_zero),
    "eval.every_steps": ("trainer.test_freq", at_least_zero),
    "eval.before": ("trainer.val_before_train", bool),
    "checkpoint.every_steps": ("trainer.save_freq", at_least_zero),
    "checkpoint.keep": ("trainer.max_actor_ckpt_to_keep", int),
    "tracking.wandb_project": ("trainer.project_name", str),
    "rollout.gpu_memory_utilization": (R + "gpu_memory_utilization", float),
}
SHARDS = "how GPUs share a model: section backend (docs/guides/{multi_gpu,megatron}.md); no numbers change"
KERNEL = "an implementation choice; AtomRL has its own kernels"
ENGINE = "an option of verl's engine; section rollout sets where completions are sampled"
PASSES = "the size of forward passes, which changes no numbers: train.tokens_per_micro_batch"
REASONS = {
    **{f"actor_rollout_ref.{role}.{part}": SHARDS for role in ("actor", "ref") for part in (
        "fsdp_config.", "megatron.", "strategy", "ulysses_sequence_parallel_size", "veomni.", "torchtitan.",
    )},
    **{f"critic.{part}": SHARDS for part in (
        "fsdp.", "model.fsdp_config.", "megatron.", "strategy", "ulysses_sequence_parallel_size",
    )},
    **{f"{place}{part}": PASSES for place in (R, "actor_rollout_ref.ref.", A, "critic.") for part in (
        "log_prob_", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu",
        "forward_micro_batch_size", "forward_micro_batch_size_per_gpu", "use_dynamic_bsz",
        "forward_max_token_len_per_gpu",
    )},
    **dict.fromkeys((
        M + "use_remove_padding", M + "use_fused_kernels", M + "use_liger", M + "fused_kernel_options.", M + "use_shm",
        A + "use_torch_compile", A + "entropy_from_logits_with_chunking", A + "entropy_checkpointing",
        "critic.model.use_remove_padding", "critic.model.enable_gradient_checkpointing", A + "use_fused_kernels",
        "actor_rollout_ref.ref.use_torch_compile",
        "actor_rollout_ref.ref.entropy_", M + "enable_activation_offload", "critic.model.enable_activation_offload",
        A + "use_remove_padding", A + "use_prefix_grouper",
    ), KERNEL),
    **dict.fromkeys((R + part for part in (
        "mode", "tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size",
        "expert_parallel_size",
        "enforce_eager", "free_cache_engine", "enable_chunked_prefill", "enable_prefix_caching",
        "max_num_batched_tokens",
        "max_model_len", "load_format", "layered_summon", "disable_log_stats", "dtype", "engine_kwargs.", "cudagraph_",
        "multi_stage_wake_up", "skip_tokenizer_init", "checkpoint_engine.", "prompt_length", "seed",
        "calculate_log_probs",
        "logprobs_mode", "scheduling_policy", "update_weights_bucket_megabytes", "nnodes", "n_gpus_per_node",
        "swap_space",
    )), ENGINE),
    **dict.fromkeys((
        "data.dataloader_num_workers", "data.filter_overlong_prompts_workers", "data.return_raw_chat",
        "data.return_raw_input_ids", "data.return_full_prompt", "data.validation_shuffle", "data.val_batch_size",
        "data.use_shm", "data.return_multi_modal_inputs",
    ), "how rows are loaded; the rows are the same"),
    M + "torch_dtype": "verl's models have no such key: model.dtype",
    "data.image_patch_size": "the model's own processor resizes pictures",
    "data.custom_cls.": "for data.custom_cls.path, which is not set",
    **dict.fromkeys((
        "trainer.balance_batch", "trainer.use_legacy_worker_impl", "trainer.device",
        "trainer.ray_wait_register_center_timeout",
        "ray_kwargs.", "ray_init.", "trainer.use_v1", "actor_rollout_ref.nccl_timeout", "transfer_queue.",
        "actor_rollout_ref.hybrid_engine", "reward_model.launch_reward_fn_async", "trainer.num_cpus",
    ), "how verl's processes communicate"),
    **dict.fromkeys((
        "trainer.log_val_generations", "trainer.rollout_data_dir", "trainer.validation_data_dir",
    ), "completions of each step and evaluation are in the run's folder: atomrl rollouts"),
    **dict.fromkeys((
        "trainer.resume_mode", "trainer.resume_from_path", "trainer.default_hdfs_dir", "trainer.esi_redundant_time",
        "trainer.del_local_ckpt_after_load", "trainer.max_critic_ckpt_to_keep", "trainer.remove_previous_ckpt_in_save",
        A + "checkpoint.", "critic.checkpoint.",
    ), "--resume continues a run; checkpoints have its complete state (docs/guides/checkpoints.md)"),
    **dict.fromkeys((
        "global_profiler.", "trainer.profile_steps", A + "profiler.", "actor_rollout_ref.ref.profiler.",
        R + "profiler.",
        "critic.profiler.", R + "trace.", "reward_model.profiler.",
    ), "nothing is profiled"),
    **dict.fromkeys(("model_engine", A + "model_engine", A + "engine.", "hydra."), SHARDS),
    **{f"{place}{key}": SHARDS for place in (A, "critic.") for key in OFFLOADED},
    **dict.fromkeys((
        f"{place}override_config.{key}" for place in (M, "critic.model.") for key in (
            "attn_implementation", "attention_dropout", "embd_pdrop", "resid_pdrop",
        )
    ), "an implementation choice; a model's dropout is off, in both"),
    A + "optim.override_optimizer_config.fp8_recipe": "how products of 8 bits are scaled",
    **dict.fromkeys((
        R + "prometheus.",
        R + "moe_tensor_parallel_size", A + "pad_to_length", "reward_model.model.use_remove_padding",
        M + "mtp.", M + "lora.merge",
    ), KERNEL),
    **dict.fromkeys((
        "reward_model.rollout.", "reward.reward_model.rollout.", "reward_model.use_reward_loop",
        "reward_model.enable_resource_pool", "reward_model.strategy", "reward_model.micro_batch_size",
        "reward_model.micro_batch_size_per_gpu", "reward_model.model.fsdp_config.",
    ), "how the scores of a reward model are computed; the scores are the same"),
    **dict.fromkeys(("distillation.teacher_models.", "distillation.nnodes", "distillation.n_gpus_per_node"), ENGINE),
    "distillation.teacher_key": "a run has one teacher",
    "data.trust_remote_code": "code of a model runs only if you set model.trust_remote_code yourself",
    "critic.model.trust_remote_code": "code of a model runs only if you set model.trust_remote_code yourself",
    A + "shuffle": "the seed sets which rows of a step go into which update",
    A + "data_loader_seed": "seed determines all sampling",
    A + "calculate_sum_pi_squared": "computed for an advantage that reads it",
    A + "calculate_entropy": "the entropy is logged: train.report_entropy",
    "reward.reward_manager.": "rewards are called according to their signature (docs/guides/rewards.md)",
    "reward.num_workers": "reward.workers",
    "reward_model.num_workers": "reward.workers",
    "algorithm.filter_groups.max_num_gen_batches": "a limit after which verl ends the run with an error",
    "trainer.nnodes": "the first line says how GPUs are used",
    "trainer.n_gpus_per_node": "the first line says how GPUs are used",
}  # fmt: skip
"""Key, or prefix of keys -> reason why it has no counterpart."""
REFUSED = {
    "data.video_key": "videos are not trained on",
    "data.custom_cls.path": "rows are read as docs/guides/data.md lists",
    M + "mtp.enable": "heads for several tokens are not trained",
    "algorithm.use_pf_ppo": "completions are not resampled by their reward",
    "trainer.val_only": "nothing is trained: atomrl eval evaluates",
    R + "ignore_eos": "completions end with the end-of-sequence token",
    R + "enable_rollout_routing_replay": "the experts of a token are chosen anew in each pass",
    **dict.fromkeys((A + "qat.enable", A + "fsdp_config.qat.enable"), "weights are not quantized in training"),
    **{f"{A}megatron.override_transformer_config.{key}": "the loss is that of the algorithm alone" for key in (
        "moe_aux_loss_coeff", "moe_z_loss_coeff",
    )},
    **{f"{A}megatron.override_transformer_config.{key}": "a model's dropout is always off" for key in (
        "attention_dropout", "hidden_dropout",
    )},
}  # fmt: skip
SECTIONS = {
    "actor_rollout_ref", "critic", "data", "algorithm", "trainer", "reward_model", "reward", "custom_reward_function",
    "ray_kwargs", "ray_init", "global_profiler", "transfer_queue", "distillation", "model_engine", "global_tool_config",
    "optim", "model", "engine", "checkpoint", "profiler", "hydra", "async_training", "defaults", "switch", "retriever",
}  # fmt: skip
OWN_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")
"""verl's own configs, whose defaults are known; those of Megatron train the same."""
PPO = r"(.*\.)?trainer\.main_ppo(_format|_sync|_v0)?|(.*\.)?(dapo|entropy)\.(\w+\.)?main_(dapo|entropy)"
"""Programs that train by PPO's keys: `main_ppo_format` of Search-R1, and recipes that add filters to it."""


def translate(path: Path, out: Path) -> Translation:
    """Translate a config or script of verl.

    Args:
        out: path of the config; a chat template is written next to it.

    Raises:
        ConfigError: it starts another program than `main_ppo` and the SFT trainers, or it is not a config of verl.
    """
    flags, notes, program = read_hydra(path, OWN_CONFIGS)
    if re.fullmatch(verl_sft.PROGRAM, program) or (not program and "model.partial_pretrain" in flags):
        t = verl_sft.translate(path, flags)
    elif path.suffix in (".yaml", ".yml"):
        if not any(key.startswith(("actor_rollout_ref.", "trainer.")) for key in flags):
            raise ConfigError(f"{path} has neither actor_rollout_ref nor trainer, so it is not a config of verl")
        t = _policy(path, flags, out)
    elif re.fullmatch(PPO, program):
        t = _policy(path, flags, out)
    else:
        nothing = ", which trains nothing" if re.search(r"main_(generation|eval)", program) else ""
        raise ConfigError(
            f"{path} starts {program or 'no program of verl'}{nothing}: supported are verl.trainer.main_ppo, the "
            "recipe DAPO and verl's SFT trainers"
        )
    for note in notes:
        t.approximate(note)
    t.check_names(sections=SECTIONS)
    t.leave_unknown()
    return t


def _policy(path: Path, flags: Settings, out: Path) -> Translation:
    searches = bool({"max_turns", "do_search", "retriever.url"} & flags.keys())
    old = searches or _is_old(flags)
    defaults = DEFAULTS | verl_turns.DEFAULTS | (OLD_DEFAULTS if old else {}) | (SEARCH_DEFAULTS if searches else {})
    defaults |= {f"{A}optim.{key}": value for key, value in OPTIMIZERS.get(flags.get("model_engine", ""), {}).items()}
    t = Translation("verl", flags, defaults, path)
    t.version = OLD if old else VERSION
    t.reasons = REASONS | verl_turns.REASONS
    t.refuse_set(REFUSED)
    if t(A + "router_replay.mode") not in (None, "disabled"):
        raise t.refuse(
            A + "router_replay.mode", t(A + "router_replay.mode"), REFUSED[R + "enable_rollout_routing_replay"]
        )
    if M + "path" in flags and not flags[M + "path"]:
        raise ConfigError(f"{t.named(M + 'path')} is empty: give the script the model's path")
    for name in flags:
        if name.endswith("._target_"):
            t.leave(name, "the class of a section")
    put_machines(t)
    t.move(MOVES)
    put_turns(t)
    _data(t, out)
    if not searches:
        _overlong_prompts(t)
    _updates(t)
    _model(t)
    translate_objective(t)
    _reward(t, searches)
    if searches:
        _search(t)
    put_trackers(t)
    put_kept(t, "trainer.max_actor_ckpt_to_keep")
    _differences(t)
    return t


def _is_old(flags: Settings) -> bool:
    """Return whether a script is for verl 0.1: its forward passes are not counted per GPU."""
    sizes = [name for name in flags if "micro_batch_size" in name]
    return (
        bool(sizes)
        and not any(name.endswith("_per_gpu") for name in sizes)
        and "algorithm.use_kl_in_reward" not in flags
    )


def _search(t: Translation) -> None:
    """Translate Search-R1's keys: the environment `search_r1`, in which a prompt has several turns."""
    if not t.flag("do_search"):
        raise t.refuse("do_search", False, "import a script of verl itself for one turn")
    if not t.flag(A + "state_masking"):
        raise t.refuse(A + "state_masking", False, "the text of documents is never trained on")
    t.refuse_set({"algorithm.no_think_rl": "the thinking is trained too"})
    turns = t.count("max_turns")
    args = {"url": str(t("retriever.url")), "topk": t.count("retriever.topk"), "max_searches": turns}
    t.put("environment.function", "search_r1", "retriever.url")
    t.put("environment.args", args, "retriever.url", "retriever.topk", "max_turns")
    t.put("environment.stop", ["</search>", "</answer>"])
    t.put("environment.max_turns", turns + 1, "max_turns")
    t.put("environment.max_turn_tokens", t.count("data.max_response_length"), "data.max_response_length")
    t.put("environment.max_reply_tokens", t.count("data.max_obs_length"), "data.max_obs_length")
    t.put("rollout.max_completion_tokens", t.count("data.max_prompt_length"), "data.max_prompt_length")
    t.put("data.max_prompt_tokens", t.count("data.max_start_length"), "data.max_start_length")
    t.put("data.overlong_prompt", "truncate", "data.max_start_length")
    t.put("data.answer_field", "golden_answers", because="the column from which Search-R1's rows are made")
    agents = t.count(R + "n_agent") * t.integer(R + "n")
    t.put("rollout.completions_per_prompt", agents, R + "n_agent", R + "n")
    t.leave(A + "state_masking", "the text of documents is never trained on")
    t.leave("algorithm.no_think_rl", "it is off")
    t.leave("do_search", "it is on")
    t.put("data.shuffle", t("data.shuffle_train_dataloader") is not False, "data.shuffle_train_dataloader")
    for theirs, ours in (("data.train_data_num", "data.train_size"), ("data.val_data_num", "data.eval_size")):
        if t(theirs) is not None:
            t.put(ours, t.integer(theirs), theirs)
    t.differ("a row over its limit", "loses its first tokens", "ends")


def _differences(t: Translation) -> None:
    """Report numbers that differ from verl's."""
    if t.number(A + "optim.weight_decay"):
        decay = t.number(A + "optim.weight_decay")
        t.differ("weight decay", f"{decay:g} on all weights", f"{decay:g} on matrices; norms and biases are excluded")
    train = t.tree["train"]
    if train.get("warmup_ratio") or train.get("warmup_updates") or train["schedule"] != "constant":
        t.differ(
            "learning rate",
            "set once per step, for all its mini-batches; 0 in the first step of a warm-up",
            "set at each optimizer step; the first of a warm-up is not 0",
        )
    if updates_per_step(t) == 1 and not t.flag("algorithm.rollout_correction.bypass_mode"):
        t.differ(
            "ratio of the one update of a step",
            "to log-probs of an earlier pass, 1 up to rounding",
            "exactly 1, without an extra pass",
        )
    if t("algorithm.adv_estimator") == "gae":
        ours = f"those of train (weight_decay {t.number(A + 'optim.weight_decay'):g}, its schedule)"
        warm = "critic.optim.lr_warmup_steps_ratio"
        theirs = (
            f"separate: critic.optim.weight_decay={t.number('critic.optim.weight_decay'):g}, a constant rate after "
            f"{warm}={t(warm) or 0}"
        )
        t.differ("the critic's optimizer, except its learning rate", theirs, ours)
        if warmup := t.integer("trainer.critic_warmup"):
            t.differ(
                "first steps",
                f"{warmup} of only the critic (trainer.critic_warmup)",
                "policy and critic from the first step",
            )
    t.name_of(["trainer.critic_warmup", "critic.optim.weight_decay", "critic.optim.lr_warmup_steps_ratio"])
    if t.version == OLD:
        t.refuse_set({"data.image_key": NO_PICTURES})
        t.differ("mean of the loss", "over a forward pass, then over passes", "over the tokens of an optimizer step")
    elif not t.put_pictures("data.image_key", A + "freeze_vision_tower", R + "limit_images"):
        t.differ(TOWER, "trained (freeze_vision_tower=false)", "frozen (model.freeze_vision=true)")
    if t.tree["train"].get("steps") is None:
        t.differ("end of an epoch", "rows that do not fill a batch are dropped", "they come first in the next epoch")
    t.differ("random draws", "its own generators", "the same seed gives another order of rows and other completions")


def _data(t: Translation, out: Path) -> None:
    t.chat_template_kwargs("data.apply_chat_template_kwargs")
    put_template(t, M + "custom_chat_template", out)
    t.put("data.answer_field", "reward_model.ground_truth")
    put_sizes(t)


def _overlong_prompts(t: Translation) -> None:
    drops, truncation = t.flag("data.filter_overlong_prompts"), t("data.truncation") or "error"
    names = ("data.filter_overlong_prompts", "data.truncation")
    if drops:
        t.put("data.overlong_prompt", "drop", *names)
    elif truncation == "left":
        t.put("data.overlong_prompt", "truncate", *names)
    else:
        what = "an error" if truncation == "error" else f"cut ({truncation})"
        t.put("data.overlong_prompt", "drop", *names)
        t.differ("prompts over data.max_prompt_length", what, "dropped and counted")


def _updates(t: Translation) -> None:
    prompts, n = t.integer(A + "ppo_mini_batch_size"), t.integer(R + "n")
    t.put("train.rows_per_update", prompts * n, A + "ppo_mini_batch_size", R + "n")
    size = t(A + "ppo_micro_batch_size_per_gpu", A + "ppo_micro_batch_size")
    if t.flag(A + "use_dynamic_bsz"):
        t.put(
            "train.tokens_per_micro_batch", t.integer(A + "ppo_max_token_len_per_gpu"), A + "ppo_max_token_len_per_gpu"
        )
    elif size is not None:
        name = t.name_of([A + "ppo_micro_batch_size_per_gpu", A + "ppo_micro_batch_size"])
        t.put("train.rows_per_micro_batch", t.count(str(name)), str(name))
    put_duration(t)
    put_optimizer(t, A + "optim.")
    put_warmup(t, updates_per_step(t), A + "optim.lr_warmup_steps", A + "optim.lr_warmup_steps_ratio")
    temperature = t.number(R + "val_kwargs.temperature") if t.flag(R + "val_kwargs.do_sample") else 0.0
    t.put("eval.temperature", temperature, R + "val_kwargs.do_sample", R + "val_kwargs.temperature")


def _model(t: Translation) -> None:
    put_precision(t, A + "fsdp_config.", A + "megatron.")
    if t.is_set(A + "megatron.override_transformer_config.fp8"):
        t.differ("precision of matrix products", "8 bits (override_transformer_config.fp8)", "bfloat16")
    if (enabled := t("critic.enable")) is not None and enabled != (t("algorithm.adv_estimator") == "gae"):
        raise t.refuse("critic.enable", enabled, "gae has a critic, other estimators have none")
    put_adapters(t, M)
    if (left_out := t(M + "exclude_modules")) is not None:
        if not re.fullmatch(r"[.*^]*visual[.*$]*", str(left_out)):
            raise t.refuse(
                M + "exclude_modules", left_out, "name the layers that have adapters: model.lora.target_modules"
            )
        t.leave(M + "exclude_modules", "adapters leave the vision tower as it is")
    for name in t.settings:
        if re.fullmatch(rf"{M}override_config\.(model_config\.)?max_position_embeddings", name):
            t.to_do.append(f"{t.given(name)}: set max_position_embeddings in config.json of the model, if it is lower")
            t.name_of([name])
    t.leave(M + "trust_remote_code", "code of a model runs only if you set model.trust_remote_code yourself")
    t.put_engine(R + "name", engine=str(t(R + "name") or "vLLM"))
    if (batch := t("data.gen_batch_size")) is not None and batch != t("data.train_batch_size"):
        t.leave("data.gen_batch_size", "missing groups are sampled as needed")


def _reward(t: Translation, searches: bool) -> None:
    functions: list[dict[str, Any]] = []
    places = [f"{prefix}custom_reward_function" for prefix in ("", "reward.")]
    path = t(*(f"{place}.path" for place in places))
    name = t(*(f"{place}.name" for place in places)) or "compute_score"
    if path:
        args = {
            key.rpartition(".")[2]: t(key) for key in t.settings if ".reward_kwargs." in key and "custom_reward" in key
        }
        functions.append({"function": f"{path}:{name}", **({"args": args} if args else {})})
    # A reward model is added to a custom function.
    model = t("reward.reward_model.model_path", "reward_model.model.path")
    if t.flag("reward_model.enable", "reward.reward_model.enable"):
        if not model:
            raise ConfigError(f"{t.path}: reward_model.enable is on, and no key gives the reward model's path")
        functions.append({"function": "reward_model", "args": {"path": str(model)}})
    if searches:
        t.put("reward.functions", ["search_r1_em"])
        t.differ("text in which the answer is searched", "the whole row", "what the model wrote")
        names = [f"reward_model.{name}" for name in ("structure_format_score", "final_format_score", "retrieval_score")]
        t.name_of(names)
        if parts := [f"{name}={t(name)}" for name in names if t(name)]:
            t.to_do.append(
                f"{', '.join(parts)}: search_r1_em gives no part of the reward for the format: write it as a function "
                "(docs/guides/rewards.md)"
            )
    elif functions:
        t.put(
            "reward.functions",
            functions,
            *(f"{place}.{key}" for place in places for key in ("path", "name")),
            "reward_model.model.path",
            "reward.reward_model.model_path",
        )
    else:
        # Without either, verl selects its own graders by data source; ours differ in details.
        math = "math" in str(t("data.train_files")).lower()
        fusion = [f"{place}.sandbox_fusion." for place in ("reward_model", "reward")]
        runs = t.is_set(*(f"{place}url" for place in fusion))
        t.name_of([place + key for place in fusion for key in ("url", "max_concurrent", "memory_limit_mb")])
        rewards = {"openai/gsm8k": "gsm8k"} | dict.fromkeys(MATH if math else (), "boxed")
        rewards |= dict.fromkeys(CODE if runs else (), "code")
        t.put(
            "reward.by_data_source",
            rewards | data_sources(t),
            *(f"{place}url" for place in fusion if runs),
            because="verl selects a reward by each row's data_source; set yours for other sources",
        )
        t.differ(
            "reward of openai/gsm8k",
            "1 if the last #### number equals the ground truth as text, else 0",
            "gsm8k: without #### the last box or number counts too, and 18.0 equals 18",
        )
        if runs:
            t.differ("reward of code", "of a service, sandbox_fusion.url", "code: in a sandbox on this machine")
        if math:
            theirs = "1 if the last box equals the ground truth as normalized text"
            t.differ(f"reward of {MATH[0]}", theirs, "boxed: 1 if it is equal according to math-verify")
    _reward_manager(t)
    _overlong(t)


def _reward_manager(t: Translation) -> None:
    """Leave a manager to the user that computes rewards in its own way."""
    name = t.name_of(["reward_model.reward_manager", "reward.reward_manager.name"])
    module = t("reward.reward_manager.module.path")
    if (keys := t("algorithm.gdpo_reward_keys")) is not None:
        names = ", ".join(map(str, keys)) if isinstance(keys, list) else keys
        t.to_do.append(f"algorithm.gdpo_reward_keys={names}: write a function of reward.functions for each")
    if module or (name and t(name) not in (None, "naive", "dapo", "prime", "batch")):
        t.to_do.append(
            f"{name or 'reward.reward_manager.module.path'}={t(name) if name else module}: rewards are functions"
        )


def _overlong(t: Translation) -> None:
    places = (
        "reward_model.overlong_buffer.",
        "reward_model.reward_kwargs.overlong_buffer_cfg.",
        "reward.reward_kwargs.overlong_buffer_cfg.",
    )
    if not t.flag(*(place + "enable" for place in places)):
        t.name_of([place + key for place in places for key in ("len", "penalty_factor", "log")])
        t.name_of([f"{place}.reward_kwargs.max_resp_len" for place in ("reward_model", "reward")])
        return
    length, factor = (t.name_of([place + key for place in places]) for key in ("len", "penalty_factor"))
    limits = [f"{place}.reward_kwargs.max_resp_len" for place in ("reward_model", "reward")]
    limit = t.name_of(limits)
    t.put(
        "algorithm.shaping",
        {
            "soft_overlong": True,
            **({"max_completion_tokens": t.count(limit)} if limit and t(limit) is not None else {}),
            "overlong_buffer_tokens": t.count(length or places[0] + "len"),
            "overlong_penalty": 1.0 if factor is None else t.number(factor),
        },
        *(place + key for place in places for key in ("enable", "len", "penalty_factor")),
        *limits,
    )
    t.name_of([place + "log" for place in places])
