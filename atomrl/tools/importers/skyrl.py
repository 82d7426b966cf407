"""Translate SkyRL's scripts, whose `key=value` words are much like verl's. Mini-batches count prompts."""

from pathlib import Path
from typing import Any

from atomrl.config import ConfigError
from atomrl.tools.importers.sources import Settings, read_hydra
from atomrl.tools.importers.translation import (
    Moves,
    Translation,
    at_least_zero,
    files_of,
    put_gpus,
    put_trackers,
    run_name,
)

VERSION = "SkyRL of August 2026"
PROGRAMS = ("skyrl.train.entrypoints.main_base", "skyrl_train.entrypoints.main_base")
A, P, G = "trainer.algorithm.", "trainer.policy.", "generator."
DEFAULTS: Settings = {
    "data.train_data": "~/data/gsm8k/train.parquet",
    "data.val_data": "~/data/gsm8k/validation.parquet",
    P + "model.path": "Qwen/Qwen2.5-1.5B-Instruct",
    P + "model.lora.rank": 0,
    P + "model.lora.alpha": 16,
    P + "model.lora.dropout": 0.0,
    P + "model.lora.target_modules": "all-linear",
    P + "optimizer_config.lr": 1e-6,
    P + "optimizer_config.adam_betas": [0.9, 0.999],
    P + "optimizer_config.weight_decay": 0.01,
    P + "optimizer_config.max_grad_norm": 1.0,
    P + "optimizer_config.num_warmup_steps": 0,
    P + "optimizer_config.scheduler": "constant_with_warmup",
    "trainer.critic.optimizer_config.lr": 5e-6,
    "trainer.gradient_checkpointing": True,
    "trainer.seed": 42,
    "trainer.logger": "wandb",
    "trainer.eval_interval": 5,
    "trainer.eval_before_train": True,
    "trainer.ckpt_interval": 10,
    "trainer.max_ckpts_to_keep": -1,
    "trainer.bf16": True,
    "trainer.micro_train_batch_size_per_gpu": 1,
    "trainer.critic_mini_batch_size": 256,
    "trainer.run_name": "test_run",
    "trainer.project_name": "skyrl",
    "trainer.epochs": 1,
    "trainer.update_epochs_per_batch": 1,
    "trainer.train_batch_size": 1024,
    "trainer.policy_mini_batch_size": 256,
    "trainer.max_prompt_length": 512,
    "trainer.placement.policy_num_nodes": 1,
    "trainer.placement.policy_num_gpus_per_node": 1,
    A + "advantage_estimator": "grpo",
    A + "grpo_norm_by_std": True,
    A + "policy_loss_type": "regular",
    A + "loss_reduction": "token_mean",
    A + "eps_clip_low": 0.2,
    A + "eps_clip_high": 0.2,
    A + "clip_ratio_c": 3.0,
    A + "value_clip": 0.2,
    A + "gamma": 1.0,
    A + "lambd": 1.0,
    A + "use_kl_loss": True,
    A + "use_kl_in_reward": False,
    A + "kl_loss_coef": 0.001,
    A + "kl_estimator_type": "k3",
    A + "use_entropy_loss": False,
    A + "entropy_loss_coef": 0.01,
    A + "sapo.tau_pos": 1.0,
    A + "sapo.tau_neg": 1.05,
    G + "n_samples_per_prompt": 5,
    G + "sampling_params.max_generate_length": 1024,
    G + "sampling_params.temperature": 1.0,
    G + "sampling_params.top_p": 1.0,
    G + "sampling_params.top_k": -1,
    G + "eval_n_samples_per_prompt": 1,
    "environment.env_class": "gsm8k",
}


MOVES: Moves = {
    "run_name": ("trainer.run_name", run_name),
    "output_dir": ("trainer.ckpt_path", str),
    "model.path": (P + "model.path", str),
    "model.gradient_checkpointing": ("trainer.gradient_checkpointing", bool),
    "data.train": ("data.train_data", files_of),
    "data.eval": ("data.val_data", files_of),
    "data.max_prompt_tokens": ("trainer.max_prompt_length", int),
    "seed": ("trainer.seed", int),
    "rollout.prompts_per_step": ("trainer.train_batch_size", int),
    "rollout.completions_per_prompt": (G + "n_samples_per_prompt", int),
    "rollout.temperature": (G + "sampling_params.temperature", float),
    "rollout.top_p": (G + "sampling_params.top_p", float),
    "rollout.top_k": (G + "sampling_params.top_k", at_least_zero),
    "rollout.max_completion_tokens": (G + "sampling_params.max_generate_length", int),
    "rollout.gpu_memory_utilization": (G + "inference_engine.gpu_memory_utilization", float),
    "train.epochs_per_step": ("trainer.update_epochs_per_batch", int),
    "train.rows_per_micro_batch": ("trainer.micro_train_batch_size_per_gpu", int),
    "train.learning_rate": (P + "optimizer_config.lr", float),
    "train.weight_decay": (P + "optimizer_config.weight_decay", float),
    "train.max_grad_norm": (P + "optimizer_config.max_grad_norm", float),
    "train.adam_beta1": (P + "optimizer_config.adam_betas", lambda betas: float(betas[0])),
    "train.adam_beta2": (P + "optimizer_config.adam_betas", lambda betas: float(betas[1])),
    "eval.every_steps": ("trainer.eval_interval", at_least_zero),
    "eval.before": ("trainer.eval_before_train", bool),
    "eval.samples_per_prompt": (G + "eval_n_samples_per_prompt", int),
    "checkpoint.every_steps": ("trainer.ckpt_interval", at_least_zero),
    "tracking.wandb_project": ("trainer.project_name", str),
}
ESTIMATORS = {"grpo": "grpo", "rloo": "rloo", "gae": "gae", "reinforce++": "reinforce_pp"}
REDUCTIONS = {
    "token_mean": "token_mean",
    "sequence_mean": "sequence_mean",
    "seq_mean_token_sum_norm": "constant_length",
}
SHARDS = "how GPUs share a model: section backend (docs/guides/multi_gpu.md); no numbers change"
ENGINE = "an option of SkyRL's engine; section rollout sets where completions are sampled"
SAVED = "--resume continues a run; checkpoints have its complete state (docs/guides/checkpoints.md)"
REASONS = {
    **dict.fromkeys(("trainer.placement.", "trainer.strategy", P + "fsdp_config.", P + "megatron_config.",
                     P + "sequence_parallel_size", "trainer.ref.fsdp_config.", "trainer.ref.megatron_config.",
                     "trainer.critic.fsdp_config.", "trainer.ref.sequence_parallel_size"), SHARDS),
    **dict.fromkeys((G + "inference_engine.", G + "batched"), ENGINE),
    **dict.fromkeys(("trainer.micro_forward_batch_size_per_gpu", "trainer.eval_batch_size", "trainer.flash_attn",
                     "trainer.remove_microbatch_padding", "trainer.use_sample_packing"),
                    "the size of forward passes, which changes no numbers"),
    **dict.fromkeys(("trainer.resume_mode", "trainer.resume_path", "trainer.export_path", "trainer.hf_save_interval",
                     "trainer.log_path", "trainer.dump_data_batch"), SAVED),
}  # fmt: skip
REFUSED = {
    "trainer.fully_async.enabled": "set the section asynchronous by hand (docs/guides/distributed_rollout.md)",
    A + "dynamic_sampling.type": "algorithm.group_filter is set by hand",
    A + "off_policy_correction.tis_ratio_type": "algorithm.rollout_is is set by hand",
    A + "use_tis": "algorithm.rollout_is is set by hand",
    A + "zero_variance_filter": "algorithm.group_filter is set by hand",
    A + "advantage_batch_normalize": "advantages are those of the estimator",
    G + "zero_reward_on_non_stop": "algorithm.shaping is set by hand",
    G + "step_wise_trajectories": "turns are an environment (docs/guides/environments.md)",
    G + "sampling_params.min_p": "completions are sampled with temperature, top_p and top_k",
    "trainer.mtp.enabled": "heads for several tokens are not trained",
    "trainer.critic.model.lora.rank": "critics are trained without adapters",
}


def translate(path: Path) -> Translation:
    """Translate a script of SkyRL.

    Raises:
        ConfigError: it starts another program than `main_base`, or a choice has no counterpart.
    """
    flags, notes, program = read_hydra(path)
    if program not in PROGRAMS:
        raise ConfigError(f"{path} starts {program or 'no program'} of SkyRL: supported is {PROGRAMS[0]}")
    t = Translation("SkyRL", flags, DEFAULTS, path)
    t.version = VERSION
    t.reasons = REASONS
    t.refuse_set(REFUSED)
    if t(G + "max_turns") not in (None, 1):
        raise t.refuse(G + "max_turns", t(G + "max_turns"), "turns are an environment (docs/guides/environments.md)")
    t.choice("environment.env_class", t("environment.env_class"), {"gsm8k": ""})
    machines, each = (
        t.count("trainer.placement.policy_num_nodes"),
        t.count("trainer.placement.policy_num_gpus_per_node"),
    )
    put_gpus(t, machines * each, f"policy_num_gpus_per_node={each} x policy_num_nodes={machines}", machines)
    t.move(MOVES)
    t.put("data.answer_field", "reward_spec.ground_truth")
    _schedule(t)
    t.put_engine(G + "inference_engine.backend", engine=str(t(G + "inference_engine.backend") or "vLLM"))
    _adapters(t)
    _pictures(t)
    _advantage(t)
    _policy_loss(t)
    _kl_and_entropy(t)
    if t.flag(G + "apply_overlong_filtering"):
        t.put("algorithm.shaping.mask_truncated", True, G + "apply_overlong_filtering")
    t.put("reward.functions", ["gsm8k"], "environment.env_class")
    t.differ("reward gsm8k", "1 if the last #### number is the ground truth", "without #### the last number counts too")
    _evaluation(t)
    t.put("model.dtype", "bfloat16" if t.flag("trainer.bf16") else "float32", "trainer.bf16")
    if (keep := t.integer("trainer.max_ckpts_to_keep")) > 0:
        t.put("checkpoint.keep", keep, "trainer.max_ckpts_to_keep")
    else:
        t.approximate("trainer.max_ckpts_to_keep=-1 keeps all checkpoints; here checkpoint.keep is 2")
    t.chat_template_kwargs(G + "chat_template_kwargs")
    put_trackers(t)
    decay = t.number(P + "optimizer_config.weight_decay")
    t.differ("weight decay", f"{decay:g} on all weights", f"{decay:g} on matrices; norms and biases are excluded")
    t.differ("random draws", "its own generators", "the same seed gives another order of rows and other completions")
    for note in notes:
        t.approximate(note)
    t.leave_unknown()
    return t


def _schedule(t: Translation) -> None:
    """Set rows per update, number of steps, and the schedule of the learning rate."""
    rows = t.integer("trainer.policy_mini_batch_size") * t.integer(G + "n_samples_per_prompt")
    t.put("train.rows_per_update", rows, "trainer.policy_mini_batch_size", G + "n_samples_per_prompt")
    if t("trainer.max_training_steps") is not None:
        t.put("train.steps", t.count("trainer.max_training_steps"), "trainer.max_training_steps")
        t.name_of(["trainer.epochs"])
    else:
        t.put("train.total_epochs", t.number("trainer.epochs"), "trainer.epochs")
    t.choice("scheduler", t(P + "optimizer_config.scheduler"), {"constant_with_warmup": "", "constant": ""})
    t.put("train.schedule", "constant", P + "optimizer_config.scheduler")
    if t.integer(P + "optimizer_config.num_warmup_steps"):
        steps = t(P + "optimizer_config.num_warmup_steps")
        t.to_do.append(
            f"{P}optimizer_config.num_warmup_steps={steps}: set train.warmup_ratio, their share of all updates"
        )


def _evaluation(t: Translation) -> None:
    """Set how evaluation samples: greedy, unless the script has parameters for it, with defaults of their own."""
    place = G + "eval_sampling_params."
    given = any(name.startswith(place) for name in t.settings)
    own = {"temperature": 1.0 if given else 0.0, "top_p": 1.0, "top_k": -1}
    for key, default in own.items():
        value = default if t(place + key) is None else t.number(place + key)
        t.put(f"eval.{key}", max(0, int(value)) if key == "top_k" else value, place + key)
    if given:
        length = 1024 if t(place + "max_generate_length") is None else t.count(place + "max_generate_length")
        t.put("eval.max_completion_tokens", length, place + "max_generate_length")


def _adapters(t: Translation) -> None:
    names = [f"{P}model.lora.{name}" for name in ("rank", "alpha", "dropout", "target_modules")]
    t.name_of(names)
    if t.integer(names[0]):
        t.put("model.lora.rank", t.integer(names[0]), names[0])
        t.put("model.lora.alpha", t.number(names[1]), names[1])
        t.put("model.lora.dropout", t.number(names[2]), names[2])
        t.put("model.lora.target_modules", t(names[3]), names[3])


def _pictures(t: Translation) -> None:
    """Set what is trained for pictures, which are parts of the messages; the whole model is trained, or adapters of it.

    Raises:
        ConfigError: pictures are on, but the vision tower is not loaded.
    """
    pictures, alone = G + "vision_language_generator", [f"{P}language_model_only", "trainer.ref.language_model_only"]
    for name in (*alone, G + "inference_engine.language_model_only"):
        if t.flag(pictures) and t.flag(name):
            raise t.refuse(name, True, f"the data have pictures ({pictures}=true), which it does not read")
    for name in alone:
        t.leave(name, "a vision tower is kept, and left as it is")
    t.name_of([pictures])
    if t.flag(pictures) and not t.tree["model"].get("lora"):
        t.put("model.freeze_vision", False, pictures)
    elif t.flag(pictures):
        t.differ("adapters", "of the vision tower too", "of the language model alone")


def _advantage(t: Translation) -> None:
    """Set the advantage; GAE brings a critic."""
    kind = t.choice(A + "advantage_estimator", t(A + "advantage_estimator"), ESTIMATORS)
    advantage: dict[str, Any] = {"type": kind}
    names = [A + "advantage_estimator", A + "grpo_norm_by_std", A + "gamma", A + "lambd"]
    if kind == "grpo":
        advantage = {"type": "grpo", "eps": 1e-6} if t.flag(A + "grpo_norm_by_std") else {"type": "grpo_no_std"}
    elif kind in ("gae", "reinforce_pp"):
        advantage |= {"gamma": t.number(A + "gamma")}
    if kind == "gae":
        advantage |= {"lam": t.number(A + "lambd"), "whiten": True}
        t.put(
            "critic.learning_rate", t.number("trainer.critic.optimizer_config.lr"), "trainer.critic.optimizer_config.lr"
        )
        if (path := t("trainer.critic.model.path")) is not None:
            t.put("critic.path", str(path), "trainer.critic.model.path")
        value = {"type": "clipped", "coefficient": 1.0, "clip": t.number(A + "value_clip")}
        t.put("algorithm.value", value, A + "value_clip")
        if t.count("trainer.critic_mini_batch_size") != t.count("trainer.policy_mini_batch_size"):
            ours = "those of the policy (trainer.policy_mini_batch_size)"
            t.differ("the critic's mini-batches", f"{t('trainer.critic_mini_batch_size')} prompts", ours)
    t.name_of(
        [
            *names,
            A + "value_clip",
            "trainer.critic_mini_batch_size",
            "trainer.critic.optimizer_config.lr",
            "trainer.critic.model.path",
        ]
    )
    t.put("algorithm.name", "ppo" if kind == "gae" else "grpo")
    t.put("algorithm.advantage", advantage, names[0], *(names[1:2] if kind == "grpo" else ()))


def _policy_loss(t: Translation) -> None:
    """Set ratio, clip and aggregation."""
    low, high, c = (t.number(A + name) for name in ("eps_clip_low", "eps_clip_high", "clip_ratio_c"))
    clips = {
        "regular": {"type": "ppo", "low": low, "high": high, "dual": None},
        "dual_clip": {"type": "ppo", "low": low, "high": high, "dual": c},
    }
    clip = t.choice(A + "policy_loss_type", t(A + "policy_loss_type"), clips)
    t.put("algorithm.ratio", {"type": "token", "clamp": 20.0})
    t.put("algorithm.clip", clip, *(A + name for name in ("policy_loss_type", "eps_clip_low", "eps_clip_high")))
    t.name_of([A + "clip_ratio_c", A + "sapo.tau_pos", A + "sapo.tau_neg"])
    aggregation = t.choice(A + "loss_reduction", t(A + "loss_reduction"), REDUCTIONS)
    t.name_of([A + "max_seq_len"])
    length = {"length": t.count(A + "max_seq_len")} if aggregation == "constant_length" else {}
    t.put("algorithm.loss_agg", {"type": aggregation, **length}, A + "loss_reduction", A + "max_seq_len")


def _kl_and_entropy(t: Translation) -> None:
    in_loss, in_reward = t.flag(A + "use_kl_loss"), t.flag(A + "use_kl_in_reward")
    if in_loss and in_reward:
        raise t.refuse(A + "use_kl_loss", "true with use_kl_in_reward", "the KL is in only one of the two here")
    if in_reward and t(A + "kl_ctrl.type") not in (None, "fixed"):
        raise t.refuse(A + "kl_ctrl.type", t(A + "kl_ctrl.type"), "set algorithm.kl.target by hand")
    kl = {
        "type": t.choice(
            A + "kl_estimator_type", t(A + "kl_estimator_type"), {name: name for name in ("k1", "abs", "k2", "k3")}
        ),
        "coefficient": t.number(A + "kl_loss_coef") if in_loss or in_reward else 0.0,
        "apply_to": "reward" if in_reward else "loss", "k2_gradient": False, "target": None,
    }  # fmt: skip
    t.name_of([A + "use_kl_in_reward", A + "kl_ctrl.kl_target", A + "kl_ctrl.horizon"])
    t.put("algorithm.kl", kl, *(A + name for name in ("use_kl_loss", "kl_loss_coef", "kl_estimator_type")))
    if kl["type"] == "k3" and kl["coefficient"]:
        t.differ("KL of a token", "at most 10", "not bounded")
    entropy = t.number(A + "entropy_loss_coef") if t.flag(A + "use_entropy_loss") else 0.0
    t.put("algorithm.entropy.coefficient", entropy, A + "use_entropy_loss", A + "entropy_loss_coef")
