"""Translate SkyRL's scripts, whose `key=value` words are much like verl's. Mini-batches count prompts.

Its loss is a sum of advantages that were divided before (`loss_reduction`), which is the same as a mean where the loss
is proportional to the advantage.
"""

import re
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError
from atomrl.tools.importers.names import SKYRL
from atomrl.tools.importers.sources import Settings, read_hydra
from atomrl.tools.importers.translation import (
    TEMPLATE,
    Moves,
    Translation,
    at_least_zero,
    files_of,
    put_gpus,
    put_trackers,
    run_name,
)

VERSION = "SkyRL of August 2026"
PROGRAMS = {
    r"skyrl(\.|_)train\.entrypoints\.main_base": "",
    r"examples(\.train)?\.algorithms\.dapo\.main_dapo": "dapo",
    r"examples(\.train)?\.algorithms\.dapo\.main_dapo_fully_async": "dapo fully_async",
    r"examples(\.train)?\.fully_async\.main_fully_async": "fully_async",
}
"""Regular expression of a module -> what it adds to SkyRL's trainer."""
SUPPORTED = "skyrl.train.entrypoints.main_base, main_dapo, main_dapo_fully_async and main_fully_async of its examples"
A, P, G = "trainer.algorithm.", "trainer.policy.", "generator."
C = A + "off_policy_correction."
SAPO = (A + "sapo.tau_pos", A + "sapo.tau_neg")
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
    A + "cispo.cispo_eps_clip_low": 1.0,
    A + "cispo.cispo_eps_clip_high": 4.0,
    A + "cispo.cispo_anchor": "old",
    A + "clip_cov.clip_ratio": 2e-4,
    A + "clip_cov.clip_cov_lb": 1.0,
    A + "clip_cov.clip_cov_ub": 5.0,
    A + "kl_cov.kl_cov_frac": 0.2,
    A + "kl_cov.ppo_kl_coef": 1.0,
    A + "kl_ctrl.kl_target": 0.1,
    A + "kl_ctrl.horizon": 10000,
    A + "tis_imp_ratio_cap": -1.0,
    C + "token_tis_ratio_clip_high": 2.0,
    C + "sequence_tis_ratio_clip_high": 5.0,
    C + "geo_mask_low": 0.99,
    C + "geo_mask_high": 1.01,
    "trainer.fully_async.max_staleness_steps": 4,
    G + "n_samples_per_prompt": 5,
    G + "sampling_params.max_generate_length": 1024,
    G + "sampling_params.temperature": 1.0,
    G + "sampling_params.top_p": 1.0,
    G + "sampling_params.top_k": -1,
    G + "eval_n_samples_per_prompt": 1,
    "environment.env_class": "gsm8k",
}
DAPO_DEFAULTS: Settings = {A + "overlong_buffer_len": 512, A + "overlong_buffer_penalty_factor": 1.0}
"""Keys that its recipe DAPO adds."""


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
    "rollout.min_p": (G + "sampling_params.min_p", float),
    "rollout.stop": (G + "sampling_params.stop", lambda stop: [stop] if isinstance(stop, str) else list(stop)),
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
ESTIMATORS = {"grpo": "grpo", "rloo": "rloo", "gae": "gae", "reinforce++": "reinforce_pp", "maxrl": "maxrl"}
REDUCTIONS = {
    "token_mean": "token_mean",
    "token_mean_legacy": "token_mean",
    "sequence_mean": "sequence_mean",
    "seq_mean_token_sum_norm": "constant_length",
    "prompt_mean": "prompt_mean",
}
AIME = '''"""Reward written by atomrl import."""

import re


def aime(completions, ground_truth, **columns):
    """1 for an answer behind the last "Answer:" that is the ground truth, else -1."""

    def plain(text):
        text = re.sub(r"\\\\(?:boxed|text|textbf|mathrm)\\{([^{}]*)\\}", r"\\1", str(text).rpartition("=")[2])
        return re.sub(r"[\\s$]|(?<=\\d),(?=\\d{3})", "", text).rstrip(".")

    def score(text, truth):
        answers = re.findall(r"(?i)answer\\s*:\\s*([^\\n<]+)", text[-300:])
        return 1.0 if answers and plain(answers[-1]) == plain(truth) else -1.0

    return [score(text, truth) for text, truth in zip(completions, ground_truth, strict=True)]
'''
"""Source of the reward of the environment `aime`."""
SHARDS = "how GPUs share a model: section backend (docs/guides/multi_gpu.md); no numbers change"
ENGINE = "an option of SkyRL's engine; section rollout sets where completions are sampled"
SAVED = "--resume continues a run; checkpoints have its complete state (docs/guides/checkpoints.md)"
KERNEL = "an implementation choice; AtomRL has its own kernels"
SHOWN = "completions of each step and evaluation are in the run's folder: atomrl rollouts"
ONE_TURN = "for several turns; these are off"
REASONS = {
    **dict.fromkeys(("trainer.placement.", "trainer.strategy", P + "fsdp_config.", P + "megatron_config.",
                     P + "sequence_parallel_size", "trainer.ref.fsdp_config.", "trainer.ref.megatron_config.",
                     "trainer.critic.fsdp_config.", "trainer.ref.sequence_parallel_size",
                     "trainer.critic.sequence_parallel_size", "trainer.sequence_parallel_backend",
                     P + "optimizer_config.offload_after_step", "trainer.critic.optimizer_config.offload_after_step"),
                    SHARDS),
    **dict.fromkeys((G + "inference_engine.", G + "batched", G + "use_cache_salt", G + "sampling_params.logprobs",
                     G + "eval_sampling_params.logprobs", P + "model.lora.lora_sync_path", P + "model.lora.max_loras",
                     P + "model.lora.max_cpu_loras", "trainer.fully_async.num_parallel_generation_workers",
                     "trainer.fully_async.clear_kv_cache_on_weight_sync"), ENGINE),
    **dict.fromkeys(("trainer.micro_forward_batch_size_per_gpu", "trainer.eval_batch_size", "trainer.flash_attn",
                     "trainer.remove_microbatch_padding", "trainer.use_sample_packing",
                     "trainer.recompute_old_logprobs_per_minibatch"),
                    "the size of forward passes, which changes no numbers"),
    **dict.fromkeys(("trainer.resume_mode", "trainer.resume_path", "trainer.export_path", "trainer.hf_save_interval",
                     "trainer.log_path", "trainer.dump_data_batch"), SAVED),
    **dict.fromkeys(("trainer.logprobs_chunk_size", "trainer.vocab_entropy_", "trainer.fused_lm_head_",
                     "trainer.use_expandable_segments", "trainer.gradient_checkpointing_use_reentrant",
                     "trainer.disable_fast_tokenizer", P + "use_torch_compile", P + "record_memory",
                     P + "torch_profiler_config.", A + "value_head_prefix"), KERNEL),
    **dict.fromkeys(("trainer.dump_eval_results", "trainer.print_example_interval", "trainer.log_example_interval",
                     "trainer.num_logger_eval_samples", "trainer.num_logger_train_samples", "trainer.tags",
                     "trainer.enable_ray_gpu_monitor"), SHOWN),
    **dict.fromkeys((G + "use_conversation_multi_turn", G + "append_eos_token_after_stop_str_in_multi_turn",
                     G + "max_input_length"), ONE_TURN),
    **dict.fromkeys((G + "sampling_params.repetition_penalty", G + "eval_sampling_params.repetition_penalty"),
                    "SkyRL does not pass it to its engine"),
    **dict.fromkeys(("trainer.critic.optimizer_config.weight_decay", "trainer.critic.optimizer_config.adam_betas",
                     "trainer.critic.optimizer_config.max_grad_norm", "trainer.critic.optimizer_config.scheduler",
                     "trainer.critic.optimizer_config.num_warmup_steps"), "the critic's are those of the policy"),
    "data.dataloader.": "how rows are loaded; the rows are the same",
    "environment.skyrl_gym.": "for other environments",
    A + "dynamic_sampling.max_sample_batches": "a limit after which SkyRL ends the run with an error",
    A + "zero_variance_filter_tol": "for zero_variance_filter, which is off",
    A + "dppo.": "for policy_loss_type=dppo",
    "trainer.mtp.": "for trainer.mtp.enabled, which is off",
}  # fmt: skip
REFUSED = {
    A + "zero_variance_filter": "algorithm.group_filter replaces such groups: set it by hand",
    A + "advantage_batch_normalize": "advantages are those of the estimator",
    C + "outlier_token_is_threshold_low": "completions are not masked by their furthest token",
    C + "outlier_token_is_threshold_high": "completions are not masked by their furthest token",
    G + "zero_reward_on_non_stop": "algorithm.shaping is set by hand",
    G + "step_wise_trajectories": "turns are an environment (docs/guides/environments.md)",
    G + "sampling_params.additional_kwargs": "completions are sampled with temperature, top_p, top_k and min_p",
    G + "chat_template.name_or_path": TEMPLATE,
    "trainer.mtp.enabled": "heads for several tokens are not trained",
    "trainer.critic.model.lora.rank": "critics are trained without adapters",
    "trainer.ref.model.path": "the reference is the initial model",
    "trainer.update_ref_every_epoch": "the reference is the initial model",
    "trainer.fully_async.simulate_training": "nothing is trained",
    P + "inference_only_init": "nothing is trained",
    P + "model.fake_int4_qat.enabled": "weights are not quantized in training",
    P + "model.lora.exclude_modules": "select modules with target_modules",
    P + "model_config_kwargs": "the model's config is that of its folder",
    P + "megatron_config.moe_enable_routing_replay": "the experts of a token are chosen anew in each pass",
    P + "megatron_config.freeze_moe_router": "all weights are trained",
    P + "megatron_config.moe_aux_loss_coeff": "the loss is that of the algorithm alone",
    P + "megatron_config.mtp_num_layers": "heads for several tokens are not trained",
}


def translate(path: Path, out: Path) -> Translation:
    """Translate a script of SkyRL.

    Args:
        out: path of the config; names the file of the reward.

    Raises:
        ConfigError: it starts another program, has a key that SkyRL does not have, or a choice has no counterpart.
    """
    flags, notes, program = read_hydra(path)
    module = program.removesuffix(".py").replace("/", ".").lstrip(".")
    adds = next((adds for pattern, adds in PROGRAMS.items() if re.fullmatch(pattern, module)), None)
    if adds is None:
        raise ConfigError(f"{path} starts {program or 'no program'} of SkyRL: supported are {SUPPORTED}")
    more = DAPO_DEFAULTS if "dapo" in adds else {}
    t = Translation("SkyRL", flags, DEFAULTS | more, path)
    t.version = VERSION
    t.reasons = REASONS
    t.check_names(SKYRL | more.keys())
    t.refuse_set(REFUSED)
    for name in t.settings:
        if name.startswith(P + "model_config_kwargs."):
            raise t.refuse(name, t(name), REFUSED[P + "model_config_kwargs"])
    if t(G + "max_turns") not in (None, 1):
        raise t.refuse(G + "max_turns", t(G + "max_turns"), "turns are an environment (docs/guides/environments.md)")
    answer = {"gsm8k": "reward_spec.ground_truth", "aime": "reward_model.ground_truth"}
    environment = t("environment.env_class")
    t.put("data.answer_field", t.choice("environment.env_class", environment, answer), "environment.env_class")
    machines, each = (
        t.count("trainer.placement.policy_num_nodes"),
        t.count("trainer.placement.policy_num_gpus_per_node"),
    )
    put_gpus(t, machines * each, f"policy_num_gpus_per_node={each} x policy_num_nodes={machines}", machines)
    t.move(MOVES)
    _schedule(t)
    t.put_engine(G + "inference_engine.backend", engine=str(t(G + "inference_engine.backend") or "vLLM"))
    _adapters(t)
    _pictures(t)
    _advantage(t)
    _policy_loss(t)
    _corrections(t)
    _kl_and_entropy(t)
    _filters(t, "dapo" in adds)
    _asynchronous(t, "fully_async" in adds)
    _reward(t, out)
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


def _reward(t: Translation, out: Path) -> None:
    """Set the reward of the environment."""
    if t("environment.env_class") == "aime":
        name = f"{out.stem}_rewards.py"
        t.files[name] = AIME
        t.put("reward.functions", [f"./{name}:aime"], "environment.env_class")
        theirs = "texts are compared after Minerva's normalisation, which also removes words for units"
        t.differ("reward aime", theirs, f"without spaces, $, boxes and commas in numbers ({name})")
    else:
        t.put("reward.functions", ["gsm8k"], "environment.env_class")
        theirs = "1 if the first #### number is the ground truth, as text"
        t.differ("reward gsm8k", theirs, "without #### the last number counts too, and 18.0 equals 18")


def _filters(t: Translation, dapo: bool) -> None:
    """Set dynamic sampling, the penalty for long completions, and whether those that are cut off are trained.

    Args:
        dapo: the program is that of DAPO, which always has the penalty.
    """
    kind = t(A + "dynamic_sampling.type")
    if t.choice(A + "dynamic_sampling.type", kind, {None: "", "filter": "mixed_outcomes"}):
        t.put("algorithm.group_filter", "mixed_outcomes", A + "dynamic_sampling.type")
    t.name_of([A + "dynamic_sampling.min_replace_ratio"])
    if dapo:
        length, factor = DAPO_DEFAULTS
        penalty = {"soft_overlong": True, "overlong_buffer_tokens": t.count(length)}
        t.put("algorithm.shaping", penalty | {"overlong_penalty": t.number(factor)}, length, factor)
    if t.flag(G + "apply_overlong_filtering"):
        t.put("algorithm.shaping.mask_truncated", True, G + "apply_overlong_filtering")
        if t(A + "loss_reduction") in ("sequence_mean", "prompt_mean"):
            t.differ("completions that are cut off", "count in the mean of the loss, as 0", "do not count")


def _asynchronous(t: Translation, on: bool) -> None:
    """Set the asynchronous loop, if the program has it."""
    switch, staleness = "trainer.fully_async.enabled", "trainer.fully_async.max_staleness_steps"
    if t.flag(switch) != on:
        raise t.refuse(switch, t(switch), "main_fully_async and main_dapo_fully_async have it, and no other program")
    t.name_of([staleness])
    if not on:
        return
    t.put("asynchronous", {"max_staleness": t.integer(staleness), "on_update": "keep"}, switch, staleness)
    t.refuse_set({"trainer.fully_async.sample_full_batch": "set algorithm.group_filter by hand"})
    t.differ("staleness", "counted from the step at which a group is scheduled", "of its oldest token")
    if t.count("trainer.train_batch_size") != t.count("trainer.policy_mini_batch_size"):
        raise t.refuse("trainer.train_batch_size", t("trainer.train_batch_size"), "SkyRL asks for one mini-batch here")


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
    name = P + "optimizer_config.num_warmup_steps"
    if t.integer(name):
        t.put("train.warmup_updates", t.integer(name), name)
        t.differ("first update of the warm-up", "a learning rate of 0", "that of SkyRL's second update")
    if t("trainer.max_tokens_per_microbatch") is not None and t.integer("trainer.max_tokens_per_microbatch") > 0:
        t.put("train.rows_per_micro_batch", None)
        most = t.count("trainer.max_tokens_per_microbatch")
        t.put("train.tokens_per_micro_batch", most, "trainer.max_tokens_per_microbatch")


def _updates(t: Translation) -> int:
    """Return the number of optimizer steps of a step."""
    batches = t.count("trainer.train_batch_size") // t.count("trainer.policy_mini_batch_size")
    return max(1, batches) * t.count("trainer.update_epochs_per_batch")


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
    method = P + "model.lora.init_method"
    t.name_of([*names, method])
    if t.integer(names[0]):
        t.choice(method, t(method), {None: "", "kaiming": ""})
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
    elif kind == "maxrl":
        advantage |= {"eps": 1e-6}
        t.differ("advantage of a group whose mean reward is below 0", "divided by that mean", "0")
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
    """Set ratio, clip, token filter and aggregation. The numbers 20 and 10 are clamps in SkyRL's code."""
    kind = t(A + "policy_loss_type")
    low, high, c = (t.number(A + name) for name in ("eps_clip_low", "eps_clip_high", "clip_ratio_c"))
    names = [A + name for name in ("policy_loss_type", "eps_clip_low", "eps_clip_high")]
    token: dict[str, Any] = {"type": "token", "clamp": 20.0}
    plain: dict[str, Any] = {"type": "token", "clamp": None}
    ppo: dict[str, Any] = {"type": "ppo", "low": low, "high": high, "dual": None}
    cispo = {"type": "cispo", **{side: t.number(f"{A}cispo.cispo_eps_clip_{side}") for side in ("low", "high")}}
    sapo = {"type": "sapo", "tau_positive": t.number(SAPO[0]), "tau_negative": t.number(SAPO[1])}
    clips: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "regular": (token, ppo),
        "dual_clip": (token, ppo | {"dual": c}),
        "gspo": ({"type": "sequence_token", "ceiling": 10.0}, ppo),
        "sapo": (token, sapo),
        "cispo": (token, cispo),
        "clip_cov": (plain, ppo),
        "kl_cov": (plain, {"type": "none"}),
        "rollout_is": (token, {"type": "reinforce"}),
    }
    ratio, clip = t.choice(A + "policy_loss_type", kind, clips)
    if kind == "cispo":
        names = [names[0], A + "cispo.cispo_eps_clip_low", A + "cispo.cispo_eps_clip_high"]
    if _anchored(t):
        clip, names = {"type": "reinforce"}, [names[0]]
    if kind in ("dual_clip", "sapo"):
        names = [*names, A + "clip_ratio_c"] if kind == "dual_clip" else [names[0], *SAPO]
    t.put("algorithm.ratio", ratio, names[0])
    t.put("algorithm.clip", clip, *names)
    t.name_of([A + "clip_ratio_c", A + "cispo.cispo_anchor", *SAPO])
    _token_filter(t, kind)
    name = A + "loss_reduction"
    aggregation = t.choice(name, t(name), REDUCTIONS)
    t.name_of([A + "max_seq_len"])
    length = {"length": t.count(A + "max_seq_len")} if aggregation == "constant_length" else {}
    t.put("algorithm.loss_agg", {"type": aggregation, **length}, name, A + "max_seq_len")
    if t(name) == "token_mean_legacy":
        t.differ("mean of the loss", "over a forward pass, then over passes", "over the tokens of an optimizer step")


def _token_filter(t: Translation, kind: str) -> None:
    """Set which tokens `clip_cov` and `kl_cov` select by the covariance of advantage and log-prob."""
    if kind not in ("clip_cov", "kl_cov"):
        return
    keys = {
        "clip_cov": {"fraction": "clip_ratio", "low": "clip_cov_lb", "high": "clip_cov_ub"},
        "kl_cov": {"fraction": "kl_cov_frac", "coefficient": "ppo_kl_coef"},
    }[kind]
    names = {ours: f"{A}{kind}.{theirs}" for ours, theirs in keys.items()}
    tokens = {ours: t.number(name) for ours, name in names.items()}
    t.put("algorithm.token_filter", {"type": kind, **tokens}, *names.values())
    t.differ(f"tokens of {kind}", "chosen in each forward pass, by its log-probs", "in a step, by those at its start")
    if kind == "clip_cov":
        theirs = "of advantages that are divided as the loss is (loss_reduction), so that hardly a token is in bounds"
        t.differ("covariance of clip_cov", theirs, "of the advantages, as in the paper")
    else:
        theirs = "its sum over the tokens of a mini-batch"
        t.differ("KL of kl_cov", theirs, "its mean (loss_reduction), as in the paper")


def _anchored(t: Translation) -> bool:
    """Return whether the loss has the ratio to the engine's log-probs.

    With one update in a step the policy is the old policy, so the weight pi_old / mu, without gradient, is that ratio.
    """
    kind, anchor = t(A + "policy_loss_type"), t(A + "cispo.cispo_anchor")
    if kind == "cispo":
        return bool(t.choice(A + "cispo.cispo_anchor", anchor, {"old": False, "rollout": True}))
    return bool(kind == "rollout_is")


def _corrections(t: Translation) -> None:
    """Set the correction of rollouts: weights pi_old / mu and masks by them, which change no denominator."""
    parts: list[dict[str, Any]] = []
    names, kind = [], t(A + "policy_loss_type")
    if _anchored(t):
        if _updates(t) > 1:
            why = "a step has one update here: the ratio to the engine's log-probs is that at its start"
            raise t.refuse(A + "policy_loss_type", kind, why)
        place = "cispo.cispo_eps_clip_" if kind == "cispo" else "eps_clip_"
        names += [A + f"{place}low", A + f"{place}high"]
        bounds = {"low": max(0.0, 1 - t.number(names[0])), "high": 1 + t.number(names[1])}
        parts.append({"type": "token_tis" if kind == "cispo" else "token_mis", **bounds})
    level, cap = t(C + "tis_ratio_type"), C + f"{t(C + 'tis_ratio_type')}_tis_ratio_clip_high"
    names += [C + "tis_ratio_type"]
    if t.flag(A + "use_tis"):
        level, cap = "token", A + "tis_imp_ratio_cap"
        names += [A + "use_tis"]
    if level is not None:
        weight = t.choice(C + "tis_ratio_type", level, {"token": "token_tis", "sequence": "sequence_tis"})
        parts.append({"type": weight, "high": t.number(cap)})
        names += [cap]
    mask = t(C + "sequence_mask_metric")
    if t.choice(C + "sequence_mask_metric", mask, {None: False, "geometric": True}):
        bounds = {"low": t.number(C + "geo_mask_low"), "high": t.number(C + "geo_mask_high")}
        parts.append({"type": "sequence_mask", **bounds})
        names += [C + "sequence_mask_metric", C + "geo_mask_low", C + "geo_mask_high"]
    sides = [C + f"token_mask_is_threshold_{side}" for side in ("low", "high")]
    t.name_of(
        [*sides, *(C + name for name in ("token_tis_ratio_clip_high", "sequence_tis_ratio_clip_high", "geo_mask_low",
                                         "geo_mask_high", "product_mask_low", "product_mask_high")),
         A + "tis_imp_ratio_cap"]
    )  # fmt: skip
    if t.is_set(sides[0]) and t.is_set(sides[1]):  # one alone has no effect in SkyRL
        raise t.refuse(sides[0], t(sides[0]), "tokens are masked with their weight: algorithm.rollout_is token_mis")
    if parts and kind in ("clip_cov", "kl_cov"):
        raise t.refuse(A + "policy_loss_type", kind, "SkyRL has no off_policy_correction for it")
    if parts:
        t.put("algorithm.rollout_is", parts, *names)


def _kl_and_entropy(t: Translation) -> None:
    in_loss, in_reward = t.flag(A + "use_kl_loss"), t.flag(A + "use_kl_in_reward")
    if in_loss and in_reward:
        raise t.refuse(A + "use_kl_loss", "true with use_kl_in_reward", "the KL is in only one of the two here")
    if in_reward and t(A + "kl_ctrl.type") not in (None, "fixed"):
        raise t.refuse(A + "kl_ctrl.type", t(A + "kl_ctrl.type"), "set algorithm.kl.target by hand")
    reduction, temperature = t(A + "loss_reduction"), A + "temperature"
    if t(temperature) is not None and t.number(temperature) != t.number(G + "sampling_params.temperature"):
        raise t.refuse(temperature, t(temperature), "log-probs are at the temperature of sampling")
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
    if in_loss and kl["coefficient"] and reduction != "sequence_mean":
        t.differ("mean of the KL", "over completions, of their means over tokens", f"as that of the loss ({reduction})")
    entropy = t.number(A + "entropy_loss_coef") if t.flag(A + "use_entropy_loss") else 0.0
    t.put("algorithm.entropy.coefficient", entropy, A + "use_entropy_loss", A + "entropy_loss_coef")
    if entropy:
        t.differ("mean of the entropy", "over the tokens of a forward pass", f"as that of the loss ({reduction})")
