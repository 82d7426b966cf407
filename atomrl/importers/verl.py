"""verl: Hydra's YAML, or the script that calls `verl.trainer.main_ppo`.

verl counts prompts in its mini-batches (`ppo_mini_batch_size`), and is the same for any number of GPUs.
"""

from pathlib import Path
from typing import Any

from atomrl.config import ConfigError
from atomrl.importers.sources import Given, read_hydra
from atomrl.importers.translation import TEMPLATE, Moves, Translation, same
from atomrl.importers.verl_objective import ACTOR as A
from atomrl.importers.verl_objective import translate_objective

R, M = "actor_rollout_ref.rollout.", "actor_rollout_ref.model."

DEFAULTS: Given = {
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
}
"""What verl takes for keys that are not given, of those that have a counterpart."""


def _at_least_zero(value: Any) -> int:
    return max(0, int(value))


def _files(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


MOVES: Moves = {
    "run_name": ("trainer.experiment_name", lambda name: str(name).replace("/", "-").lstrip(".")),
    "output_dir": ("trainer.default_local_dir", str),
    "model.path": (M + "path", str),
    "model.tokenizer": ((M + "tokenizer_path", "data.tokenizer"), str),
    "model.gradient_checkpointing": (M + "enable_gradient_checkpointing", bool),
    "data.train": ("data.train_files", _files),
    "data.eval": ("data.val_files", _files),
    "data.prompt_field": ("data.prompt_key", str),
    "data.data_source_field": ("data.reward_fn_key", str),
    "data.max_prompt_tokens": ("data.max_prompt_length", int),
    "data.shuffle": ("data.shuffle", bool),
    "seed": ("data.seed", int),
    "rollout.prompts_per_step": ("data.train_batch_size", int),
    "rollout.completions_per_prompt": (R + "n", int),
    "rollout.temperature": (R + "temperature", float),
    "rollout.top_p": (R + "top_p", float),
    "rollout.top_k": (R + "top_k", _at_least_zero),
    "rollout.max_completion_tokens": (("data.max_response_length", R + "response_length"), int),
    "rollout.max_concurrent_completions": (R + "max_num_seqs", int),
    "train.epochs_per_step": (A + "ppo_epochs", int),
    "train.learning_rate": (A + "optim.lr", float),
    "train.weight_decay": (A + "optim.weight_decay", float),
    "train.adam_beta1": (A + "optim.betas", lambda betas: float(betas[0])),
    "train.adam_beta2": (A + "optim.betas", lambda betas: float(betas[1])),
    "train.max_grad_norm": ((A + "optim.clip_grad", A + "grad_clip"), float),
    "train.min_lr_ratio": (A + "optim.min_lr_ratio", float),
    "eval.samples_per_prompt": (R + "val_kwargs.n", int),
    "eval.top_p": (R + "val_kwargs.top_p", float),
    "eval.top_k": (R + "val_kwargs.top_k", _at_least_zero),
    "eval.every_steps": ("trainer.test_freq", _at_least_zero),
    "eval.before": ("trainer.val_before_train", bool),
    "checkpoint.every_steps": ("trainer.save_freq", _at_least_zero),
    "checkpoint.keep": ("trainer.max_actor_ckpt_to_keep", int),
    "tracking.wandb_project": ("trainer.project_name", str),
}


def translate(path: Path) -> Translation:
    """verl's file as a translation."""
    given, notes = read_hydra(path)
    if path.suffix in (".yaml", ".yml") and not any(
        key.startswith(("actor_rollout_ref.", "trainer.")) for key in given
    ):
        raise ConfigError(f"{path} has neither actor_rollout_ref nor trainer, so it is no config of verl's")
    t = Translation("verl", given, DEFAULTS)
    t.move(MOVES)
    _data(t)
    _updates(t)
    _model(t)
    translate_objective(t)
    _reward(t)
    _tracking(t)
    for note in notes:
        t.nearly(note)
    return t


def _data(t: Translation) -> None:
    t.chat_template_kwargs("data.apply_chat_template_kwargs")
    t.refuse_given({M + "custom_chat_template": TEMPLATE})
    t.put("data.answer_field", "reward_model.ground_truth")
    for theirs, ours in (("data.train_max_samples", "data.train_size"), ("data.val_max_samples", "data.eval_size")):
        if t(theirs) not in (None, -1):
            t.put(ours, t.whole(theirs), theirs)
    drops, truncation = t.flag("data.filter_overlong_prompts"), t("data.truncation") or "error"
    names = ("data.filter_overlong_prompts", "data.truncation")
    if drops:
        t.put("data.overlong_prompt", "drop", *names)
    elif truncation == "left":
        t.put("data.overlong_prompt", "truncate", *names)
    else:
        what = "stops at a longer prompt" if truncation == "error" else f"cuts a longer prompt ({truncation})"
        t.put("data.overlong_prompt", "drop", *names, because=f"verl {what}; here it is left out, and counted")


def _updates(t: Translation) -> None:
    prompts, n = t.whole(A + "ppo_mini_batch_size"), t.whole(R + "n")
    t.put("train.rows_per_update", prompts * n, A + "ppo_mini_batch_size", R + "n")
    size = t(A + "ppo_micro_batch_size_per_gpu", A + "ppo_micro_batch_size")
    if t.flag(A + "use_dynamic_bsz"):
        t.put("train.tokens_per_micro_batch", t.whole(A + "ppo_max_token_len_per_gpu"), A + "ppo_max_token_len_per_gpu")
    elif size is not None:
        name = t.name_of([A + "ppo_micro_batch_size_per_gpu", A + "ppo_micro_batch_size"])
        t.put("train.rows_per_micro_batch", t.count(str(name)), str(name))
    steps = None if t("trainer.total_training_steps") is None else t.whole("trainer.total_training_steps")
    if steps is not None:
        t.name_of(["trainer.total_epochs"])
        t.put("train.steps", steps, "trainer.total_training_steps")
    else:
        t.put("train.total_epochs", t.number("trainer.total_epochs"), "trainer.total_epochs")
    schedule = t(A + "optim.warmup_style", A + "optim.lr_scheduler_type")
    t.put(
        "train.schedule",
        t.choice("lr_scheduler_type", schedule, {"constant": "constant", "cosine": "cosine"}),
        A + "optim.warmup_style",
        A + "optim.lr_scheduler_type",
    )
    warmup = -1 if t(A + "optim.lr_warmup_steps") is None else t.whole(A + "optim.lr_warmup_steps")
    if warmup >= 0:  # else the share counts
        ratio = min(1.0, warmup / steps) if steps else 0.0
        why = "of trainer.total_training_steps" if steps else "a share of all updates here; give it once they are known"
        t.put("train.warmup_ratio", round(ratio, 6), A + "optim.lr_warmup_steps", because=why if warmup else "")
    else:
        t.put("train.warmup_ratio", t.number(A + "optim.lr_warmup_steps_ratio"), A + "optim.lr_warmup_steps_ratio")
    temperature = t.number(R + "val_kwargs.temperature") if t.flag(R + "val_kwargs.do_sample") else 0.0
    t.put("eval.temperature", temperature, R + "val_kwargs.do_sample", R + "val_kwargs.temperature")


def _model(t: Translation) -> None:
    t.put("model.dtype", "bfloat16")  # autocast over float32 weights, in both
    if t.whole(M + "lora_rank"):
        for key, name, make in (
            ("rank", "lora_rank", int),
            ("alpha", "lora_alpha", float),
            ("target_modules", "target_modules", same),
        ):
            t.put(f"model.lora.{key}", make(t(M + name)), M + name)
    else:
        t.name_of([M + "lora_alpha", M + "target_modules"])
    t.leave(M + "trust_remote_code", "code of a model is only run where you write model.trust_remote_code yourself")
    if engine := t(R + "name"):
        t.put(
            "rollout.engine",
            "native",
            R + "name",
            because=f"AtomRL's own engine; where {engine} is installed, rollout.engine={engine}",
        )
    if (batch := t("data.gen_batch_size")) is not None and batch != t("data.train_batch_size"):
        t.leave("data.gen_batch_size", "missing groups are drawn as they are needed")


def _reward(t: Translation) -> None:
    functions: list[dict[str, Any]] = []
    places = [f"{prefix}custom_reward_function" for prefix in ("", "reward.")]
    path = t(*(f"{place}.path" for place in places))
    name = t(*(f"{place}.name" for place in places)) or "compute_score"
    if path:
        args = {
            key.rpartition(".")[2]: t(key) for key in t.given if ".reward_kwargs." in key and "custom_reward" in key
        }
        functions.append({"function": f"{path}:{name}", **({"args": args} if args else {})})
    model = t("reward.reward_model.model_path", "reward_model.model.path")
    if t.flag("reward_model.enable", "reward.reward_model.enable") and model:
        functions.append({"function": "reward_model", "args": {"path": str(model)}})
    if functions:
        t.put(
            "reward.functions",
            functions,
            *(f"{place}.{key}" for place in places for key in ("path", "name")),
            "reward_model.model.path",
            "reward.reward_model.model_path",
        )
    else:
        t.put(
            "reward.by_data_source",
            {"openai/gsm8k": "gsm8k"},
            because="verl picks a scorer by each row's data_source; name yours for other sources than openai/gsm8k",
        )
    _overlong(t)


def _overlong(t: Translation) -> None:
    places = (
        "reward_model.overlong_buffer.",
        "reward_model.reward_kwargs.overlong_buffer_cfg.",
        "reward.reward_kwargs.overlong_buffer_cfg.",
    )
    if not t.flag(*(place + "enable" for place in places)):
        t.name_of([place + key for place in places for key in ("len", "penalty_factor", "log")])
        return
    length, factor = (t.name_of([place + key for place in places]) for key in ("len", "penalty_factor"))
    t.put(
        "algorithm.shaping",
        {
            "soft_overlong": True,
            "overlong_buffer_tokens": t.count(length or places[0] + "len"),
            "overlong_penalty": 1.0 if factor is None else t.number(factor),
        },
        *(place + key for place in places for key in ("enable", "len", "penalty_factor")),
    )
    t.name_of([place + "log" for place in places] + ["reward_model.reward_kwargs.max_resp_len"])


def _tracking(t: Translation) -> None:
    loggers = t("trainer.logger")
    loggers = [loggers] if isinstance(loggers, str) else list(loggers or [])
    known = [name for name in loggers if name in ("wandb", "tensorboard", "mlflow", "trackio")]
    t.put("tracking.sinks", known, "trainer.logger")
    if unknown := [name for name in loggers if name not in (*known, "console")]:
        t.nearly(f"trainer.logger: {', '.join(unknown)} has no counterpart; metrics.jsonl has every step")
    if not t.is_given("trainer.max_actor_ckpt_to_keep"):
        t.nearly("trainer.max_actor_ckpt_to_keep=null keeps all checkpoints; here checkpoint.keep is 2")
