"""Translate verl's configs: Hydra's YAML, or a script that calls `verl.trainer.main_ppo` or its SFT trainer. Also those
of verl 0.1, which TinyZero and Search-R1 carry, and Search-R1's own keys.

verl counts prompts in its mini-batches (`ppo_mini_batch_size`), and is the same for any number of GPUs.
"""

import re
from pathlib import Path
from typing import Any

from atomrl.common.errors import nearest
from atomrl.config import ConfigError
from atomrl.tools.importers import verl_sft
from atomrl.tools.importers.sources import Settings, read_hydra
from atomrl.tools.importers.translation import (
    NO_PICTURES,
    TEMPLATE,
    Moves,
    Translation,
    at_least_zero,
    files_of,
    misspelt,
    put_trackers,
    run_name,
)
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

# --------------------------------------------------------------------------------------------------------------------
# verl's objective: advantage, policy loss, KL and correction of rollouts, on the axes of an algorithm.

A = "actor_rollout_ref.actor."
ESTIMATORS = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "remax": "remax",
    "opo": "opo",
    "gpg": "gpg",
    "gdpo": "gdpo",
    "grpo_passk": "pass_at_k",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
LOSS_MODES = ("vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl")
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "constant_length",
    "seq-mean-token-sum-norm": "constant_length",
}
KLS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}

COV = {"fraction": "ratio", "low": "lb", "high": "ub"}


def translate_objective(t: Translation) -> None:
    """Translate the section `algorithm`, except the shaping of rewards."""
    _advantage(t)
    _policy_loss(t)
    _kl(t)
    _rollout_correction(t)


def _advantage(t: Translation) -> None:
    estimator, norm = str(t("algorithm.adv_estimator")), t.flag("algorithm.norm_adv_by_std_in_grpo")
    kind = t.choice("algorithm.adv_estimator", estimator, ESTIMATORS)
    advantage: dict[str, Any] = {"type": kind}
    names = ["algorithm.adv_estimator"]
    if kind == "grpo":
        advantage = {"type": "grpo", "eps": 1e-6} if norm else {"type": "grpo_no_std"}
        names.append("algorithm.norm_adv_by_std_in_grpo")
    elif kind == "pass_at_k":
        advantage |= {"divide_by_std": norm}
        names.append("algorithm.norm_adv_by_std_in_grpo")
    elif kind == "gpg":
        advantage |= {"alpha": "verl"}
    elif kind in ("gae", "reinforce_pp"):
        advantage |= {"gamma": t.number("algorithm.gamma")}
        names.append("algorithm.gamma")
    if kind == "gae":
        advantage |= {"lam": t.number("algorithm.lam"), "whiten": True}
        names.append("algorithm.lam")
        t.put("critic.learning_rate", t.number("critic.optim.lr"), "critic.optim.lr")
        if (path := t("critic.model.path")) is not None:
            t.put("critic.path", str(path), "critic.model.path")
        clip = t.number("critic.cliprange_value")
        t.put("algorithm.value", {"type": "clipped", "coefficient": 1.0, "clip": clip}, "critic.cliprange_value")
    t.put("algorithm.name", "ppo" if kind == "gae" else "grpo")
    t.put("algorithm.advantage", advantage, *names)
    metric = "algorithm.filter_groups.metric"
    t.name_of([metric])
    if t.flag("algorithm.filter_groups.enable"):
        t.put("algorithm.group_filter", "mixed_outcomes", "algorithm.filter_groups.enable", metric)
        if t(metric) in ("seq_reward", "seq_final_reward"):
            t.differ("groups are compared by", f"{t(metric)}, with penalties", "the reward before penalties")
    t.put("algorithm.entropy.coefficient", t.number(A + "entropy_coeff"), A + "entropy_coeff")


def _policy_loss(t: Translation) -> None:
    mode = t.choice("policy_loss.loss_mode", t(A + "policy_loss.loss_mode"), {mode: mode for mode in LOSS_MODES})
    if t.version == OLD:
        clip = {"type": "ppo", "low": t.number(A + "clip_ratio"), "high": t.number(A + "clip_ratio"), "dual": None}
        t.put("algorithm.ratio", {"type": "token", "clamp": None})
        t.put("algorithm.clip", clip, A + "clip_ratio")
        t.put("algorithm.loss_agg", {"type": "token_mean"})
        return
    if t.is_set(A + "clip_ratio") and not t.is_set(A + "clip_ratio_low", A + "clip_ratio_high"):
        t.approximate(
            f"{A}clip_ratio={t(A + 'clip_ratio')}: verl reads clip_ratio_low and clip_ratio_high, by default 0.2"
        )
    t.name_of([A + "clip_ratio"])
    # Each loss mode of verl is a pair of ratio and clip. The numbers 20 and 10 are clamps in its code, which no key
    # sets.
    low, high, c = (t.number(A + f"clip_ratio_{name}") for name in ("low", "high", "c"))
    cov = A + "policy_loss."
    token: dict[str, Any] = {"type": "token", "clamp": 20.0}
    plain: dict[str, Any] = {"type": "token", "clamp": None}
    bounds = {"low": low, "high": high}
    taus = [str(t.name_of([f"{A}policy_loss.{name}", A + name])) for name in ("tau_pos", "tau_neg")]
    sapo = {"type": "sapo", "tau_positive": t.number(taus[0]), "tau_negative": t.number(taus[1])}
    choices: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "vanilla": (token, {"type": "ppo", **bounds, "dual": c}),
        "gspo": ({"type": "sequence_token", "ceiling": 10.0}, {"type": "ppo", **bounds, "dual": None}),
        "sapo": (token, sapo),
        "gpg": (plain, {"type": "reinforce"}),
        "clip_cov": (plain, {"type": "ppo", **bounds, "dual": None}),
        "kl_cov": (plain, {"type": "none"}),
        "geo_mean": (plain, {"type": "gmpo", **bounds}),
        "cispo": (token, {"type": "cispo", **bounds}),
        "dppo_tv": (token, {"type": "dppo_tv", **bounds, "cap": c}),
        "dppo_kl": (token, {"type": "dppo_kl", **bounds, "cap": c}),
    }
    ratio, clip = choices[mode]
    t.put("algorithm.ratio", ratio, cov + "loss_mode")
    t.put(
        "algorithm.clip",
        clip,
        cov + "loss_mode",
        A + "clip_ratio_low",
        A + "clip_ratio_high",
        A + "clip_ratio_c",
        *(taus if mode == "sapo" else ()),
    )
    # Two modes select tokens by covariance, in addition.
    if mode == "clip_cov":
        tokens = {key: t.number(cov + f"clip_cov_{name}") for key, name in COV.items()}
        t.put(
            "algorithm.token_filter",
            {"type": mode, **tokens},
            cov + "clip_cov_ratio",
            cov + "clip_cov_lb",
            cov + "clip_cov_ub",
        )
    if mode == "kl_cov":
        tokens = {"fraction": t.number(cov + "kl_cov_ratio"), "coefficient": t.number(cov + "ppo_kl_coef")}
        t.put("algorithm.token_filter", {"type": mode, **tokens}, cov + "kl_cov_ratio", cov + "ppo_kl_coef")
    _aggregation(t, forced=mode in ("gspo", "sapo", "geo_mean"))


def _aggregation(t: Translation, forced: bool) -> None:
    name = A + "loss_agg_mode"
    mode = t(name)
    kind = t.choice("loss_agg_mode", mode, AGGREGATIONS)
    if forced:
        t.put("algorithm.loss_agg", {"type": "sequence_mean"}, A + "policy_loss.loss_mode")
    elif mode == "seq-mean-token-sum":
        t.put("algorithm.loss_agg", {"type": kind, "length": 1}, name)
    elif mode == "seq-mean-token-sum-norm":
        source = A + "loss_scale_factor" if t.is_set(A + "loss_scale_factor") else "data.max_response_length"
        length = t.count(source)
        t.put("algorithm.loss_agg", {"type": kind, "length": length}, name, A + "loss_scale_factor")
    else:
        t.put("algorithm.loss_agg", {"type": kind}, name)


def _kl(t: Translation) -> None:
    in_loss, in_reward = t.flag(A + "use_kl_loss"), t.flag("algorithm.use_kl_in_reward")
    if t.version == OLD:
        in_reward = not in_loss
    elif not (in_loss or in_reward) and t.is_set("algorithm.kl_ctrl.kl_coef"):
        t.approximate(
            f"algorithm.kl_ctrl.kl_coef={t('algorithm.kl_ctrl.kl_coef')} is not applied, as use_kl_in_reward is off; "
            "verl 0.1 applied it wherever use_kl_loss is off"
        )
    if in_loss and in_reward:
        raise t.refuse(
            "use_kl_loss", "true together with algorithm.use_kl_in_reward=true", "the KL is in only one of the two here"
        )
    kl: dict[str, Any] = {"type": "k3", "coefficient": 0.0, "apply_to": "loss", "k2_gradient": False, "target": None}
    names = [A + "use_kl_loss", "algorithm.use_kl_in_reward"]
    loss_names = [A + "kl_loss_coef", A + "kl_loss_type"]
    reward_names = [
        "algorithm.kl_penalty",
        "algorithm.kl_ctrl.kl_coef",
        "algorithm.kl_ctrl.type",
        "algorithm.kl_ctrl.target_kl",
        "algorithm.kl_ctrl.horizon",
    ]
    if in_loss:
        estimator = str(t(A + "kl_loss_type"))
        kind = t.choice("kl_loss_type", estimator.rstrip("+"), KLS)
        kl |= {"type": kind, "coefficient": t.number(A + "kl_loss_coef"), "k2_gradient": estimator.endswith("+")}
        names += loss_names
    if in_reward:
        kind = t.choice("algorithm.kl_penalty", str(t("algorithm.kl_penalty")).rstrip("+"), KLS)
        kl |= {"type": kind, "coefficient": t.number("algorithm.kl_ctrl.kl_coef"), "apply_to": "reward"}
        control = t("algorithm.kl_ctrl.type")
        if t.choice("algorithm.kl_ctrl.type", control, {"fixed": False, "adaptive": True}):
            kl |= {"target": t.number("algorithm.kl_ctrl.target_kl"), "horizon": t.number("algorithm.kl_ctrl.horizon")}
        names += reward_names
    t.name_of([*loss_names, *reward_names])
    t.put("algorithm.kl", kl, *names)
    if kl["type"] == "k3" and kl["coefficient"]:
        t.differ("KL of a token", "at most 10", "not bounded")


def _rollout_correction(t: Translation) -> None:
    c = "algorithm.rollout_correction."
    parts: list[dict[str, Any]] = []
    if t.flag(c + "bypass_mode"):
        raise t.refuse(c + "bypass_mode", True, "the trainer always computes the old log-probs here")
    if level := t(c + "rollout_is"):
        low, _, high = str(t(c + "rollout_is_threshold")).rpartition("_")
        normalised = t.flag(c + "rollout_is_batch_normalize")
        if low:  # LOW_HIGH: weights beyond the bounds are 0
            kind = t.choice("rollout_is", level, {"token": "icepop", "sequence": "sequence_mis"})
            if normalised:
                raise t.refuse(
                    c + "rollout_is_batch_normalize", True, "weights with two bounds are not divided by a mean"
                )
            parts.append({"type": kind, "low": _threshold(t, low), "high": _threshold(t, high)})
        else:
            kind = t.choice("rollout_is", level, {"token": "token_tis", "sequence": "sequence_tis"})
            parts.append({"type": kind, "high": t.number(c + "rollout_is_threshold"), "normalised": normalised})
    t.refuse_set({"algorithm.rollout_is": "from an earlier verl; use algorithm.rollout_correction.rollout_is=token"})
    if t.is_set(A + "tis_imp_ratio_cap") and (cap := t.number(A + "tis_imp_ratio_cap")) > 0:  # of an earlier verl
        if level:
            raise t.refuse(A + "tis_imp_ratio_cap", cap, f"{c}rollout_is={level} is set too")
        parts.append({"type": "token_tis", "high": cap})
    if rejections := t(c + "rollout_rs"):
        options, limits = str(rejections).split(","), str(t(c + "rollout_rs_threshold")).split(",")
        if len(limits) not in (1, len(options)):
            raise ConfigError(
                f"{t.named(f'{c}rollout_rs')}={rejections} names {len(options)}, and rollout_rs_threshold="
                f"{','.join(limits)} has {len(limits)} thresholds: use one for each, or one for all"
            )
        for option, limit in zip(options, limits * len(options) if len(limits) == 1 else limits, strict=True):
            parts.append(_rejection(t, option.strip(), limit.strip()))
    t.name_of([c + name for name in ("rollout_is_threshold", "rollout_is_batch_normalize", "loss_type")])
    if parts:
        t.put(
            "algorithm.rollout_is",
            parts,
            A + "tis_imp_ratio_cap",
            *(
                c + n
                for n in (
                    "rollout_is",
                    "rollout_is_threshold",
                    "rollout_is_batch_normalize",
                    "rollout_rs",
                    "rollout_rs_threshold",
                )
            ),
        )


def _rejection(t: Translation, option: str, limit: str) -> dict[str, Any]:
    """Translate rejection such as `seq_mean_k3`: rows or tokens that are masked out."""
    levels = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}
    level, _, estimator = option.rpartition("_")
    if option == "seq_mean_k1":  # bounds of the geometric mean; a single one is the upper
        low, _, high = limit.rpartition("_")
        upper = _threshold(t, high)
        return {"type": "sequence_mask", "low": _threshold(t, low) if low else 1 / upper, "high": upper}
    if estimator != "k3" or level not in levels:
        raise t.refuse("rollout_rs", option, "supported: seq_mean_k1, and k3 of tokens, sums, means, maxima")
    return {"type": "kl_rejection", "bound": _threshold(t, limit), "level": levels[level], "estimator": "k3"}


def _threshold(t: Translation, text: str) -> float:
    try:
        threshold = float(text)
    except ValueError:
        threshold = 0.0
    if not threshold > 0:
        name = "algorithm.rollout_correction.rollout_rs_threshold"
        raise ConfigError(
            f"{t.named(name)}: rollout_rs needs a number above 0 (or LOW_HIGH for seq_mean_k1), not {text}"
        )
    return threshold


R, M = "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
VERSION, OLD = "verl of August 2026", "verl 0.1"

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
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "algorithm.rollout_correction.rollout_is_batch_normalize": False,
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
    "data.trust_remote_code": "code of a model runs only if you set model.trust_remote_code yourself",
    "critic.model.trust_remote_code": "code of a model runs only if you set model.trust_remote_code yourself",
    A + "shuffle": "the seed sets which rows of a step go into which update",
    A + "data_loader_seed": "seed determines all sampling",
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
    R + "multi_turn.enable": "turns are an environment or tools (docs/guides/environments.md, "
    "docs/guides/tool_calling.md)",
    "data.tool_config_path": "tools are Python functions here (docs/guides/tool_calling.md)",
    "data.video_key": "videos are not trained on",
    **dict.fromkeys(
        ("distillation.enable", "distillation.enabled"), "distillation is algorithm.name=gkd or on_policy_distillation"
    ),
    M + "mtp.enable": "heads for several tokens are not trained",
    M + "lora_adapter_path": "merge the adapters first",
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
PPO = r"(.*\.)?trainer\.main_ppo(_format)?|(.*\.)?(dapo|entropy)\.(src\.)?main_(dapo|entropy)"
"""Programs that train by PPO's keys: `main_ppo_format` of Search-R1, and recipes that add filters to it."""


def translate(path: Path) -> Translation:
    """Translate a config or script of verl.

    Raises:
        ConfigError: it starts another program than `main_ppo` and the SFT trainers, or it is not a config of verl.
    """
    flags, notes, program = read_hydra(path, OWN_CONFIGS)
    if re.fullmatch(verl_sft.PROGRAM, program) or (not program and "model.partial_pretrain" in flags):
        t = verl_sft.translate(path, flags)
    elif path.suffix in (".yaml", ".yml"):
        if not any(key.startswith(("actor_rollout_ref.", "trainer.")) for key in flags):
            raise ConfigError(f"{path} has neither actor_rollout_ref nor trainer, so it is not a config of verl")
        t = _policy(path, flags)
    elif re.fullmatch(PPO, program):
        t = _policy(path, flags)
    else:
        raise ConfigError(
            f"{path} starts {program or 'no program of verl'}: supported are verl.trainer.main_ppo, the recipe DAPO "
            "and verl's SFT trainers"
        )
    for note in notes:
        t.approximate(note)
    _check_names(t, path)
    t.leave_unknown()
    return t


def _policy(path: Path, flags: Settings) -> Translation:
    searches = bool({"max_turns", "do_search", "retriever.url"} & flags.keys())
    old = searches or _is_old(flags)
    defaults = DEFAULTS | (OLD_DEFAULTS if old else {}) | (SEARCH_DEFAULTS if searches else {})
    defaults |= {f"{A}optim.{key}": value for key, value in OPTIMIZERS.get(flags.get("model_engine", ""), {}).items()}
    t = Translation("verl", flags, defaults, path)
    t.version = OLD if old else VERSION
    t.reasons = REASONS
    t.refuse_set(REFUSED)
    if t(A + "router_replay.mode") not in (None, "disabled"):
        raise t.refuse(
            A + "router_replay.mode", t(A + "router_replay.mode"), REFUSED[R + "enable_rollout_routing_replay"]
        )
    for name in flags:
        if name.startswith(R + "multi_turn.") and name not in REFUSED:
            t.leave(name, "for multi_turn.enable, which is off")
    put_machines(t)
    t.move(MOVES)
    _data(t)
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


def _check_names(t: Translation, path: Path) -> None:
    """Refuse a key that verl does not have: of an unknown section, or a misspelling of a key that is read."""
    known = [key.split(".") for key in t.read_keys | t.reasons.keys()]
    for name in t.unread:
        parts = name.split(".")
        near: str | None = None
        for place, part in enumerate(parts):
            rest = [*parts[:place], *parts[place + 1 :]]
            like = [key[place] for key in known if len(key) == len(parts) and [*key[:place], *key[place + 1 :]] == rest]
            if (meant := misspelt(part, like)) is not None:
                near = ".".join([*parts[:place], meant, *parts[place + 1 :]])
        if near is None and parts[0] not in SECTIONS:
            near = nearest(name, [".".join(key) for key in known])
        if near is not None:
            raise ConfigError(f"{path}: verl has no key {name!r}; did you mean {near!r}?")


def _differences(t: Translation) -> None:
    """Report numbers that differ from verl's."""
    if t.number(A + "optim.weight_decay"):
        decay = t.number(A + "optim.weight_decay")
        t.differ("weight decay", f"{decay:g} on all weights", f"{decay:g} on matrices; norms and biases are excluded")
    warmup = t.tree["train"].get("warmup_ratio")
    if warmup or t.tree["train"]["schedule"] != "constant":
        t.differ(
            "learning rate",
            "set once per step, for all its mini-batches; 0 in the first step of a warm-up",
            "set at each optimizer step; the first of a warm-up is not 0",
        )
    updates = (
        t.integer("data.train_batch_size") // max(1, t.integer(A + "ppo_mini_batch_size")) * t.integer(A + "ppo_epochs")
    )
    if updates == 1:
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


def _data(t: Translation) -> None:
    t.chat_template_kwargs("data.apply_chat_template_kwargs")
    t.refuse_set({M + "custom_chat_template": TEMPLATE})
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
    steps = put_duration(t)
    put_optimizer(t, A + "optim.")
    put_warmup(t, steps, A + "optim.lr_warmup_steps", A + "optim.lr_warmup_steps_ratio")
    temperature = t.number(R + "val_kwargs.temperature") if t.flag(R + "val_kwargs.do_sample") else 0.0
    t.put("eval.temperature", temperature, R + "val_kwargs.do_sample", R + "val_kwargs.temperature")


def _model(t: Translation) -> None:
    put_precision(t, A + "fsdp_config.", A + "megatron.")
    if t.is_set(A + "megatron.override_transformer_config.fp8"):
        t.differ("precision of matrix products", "8 bits (override_transformer_config.fp8)", "bfloat16")
    if (enabled := t("critic.enable")) is not None and enabled != (t("algorithm.adv_estimator") == "gae"):
        raise t.refuse("critic.enable", enabled, "gae has a critic, other estimators have none")
    put_adapters(t, M)
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
        t.put(
            "reward.by_data_source",
            {"openai/gsm8k": "gsm8k"} | (dict.fromkeys(MATH, "boxed") if math else {}),
            because="verl selects a reward by each row's data_source; set yours for other sources",
        )
        t.differ(
            "reward of openai/gsm8k",
            "1 if the last #### number equals the ground truth as text, else 0",
            "gsm8k: without #### the last box or number counts too, and 18.0 equals 18",
        )
        if math:
            theirs = "1 if the last box equals the ground truth as normalized text"
            t.differ(f"reward of {MATH[0]}", theirs, "boxed: 1 if it is equal according to math-verify")
    _reward_manager(t)
    _overlong(t)


def _reward_manager(t: Translation) -> None:
    """Leave a manager to the user that computes rewards in its own way."""
    name = t.name_of(["reward_model.reward_manager", "reward.reward_manager.name"])
    module = t("reward.reward_manager.module.path")
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
