"""Translate TRL's configs: YAML for `trl dpo --config`, and shell scripts with TRL's own command line."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atomrl.common.errors import did_you_mean
from atomrl.config import ConfigError, read_yaml
from atomrl.tools.importers import trl_arguments as trl_shared
from atomrl.tools.importers.shell import read_script
from atomrl.tools.importers.sources import Settings, flat_yaml, read_flags, text_of
from atomrl.tools.importers.translation import Moves, Translation, at_least_zero, put_gpus, put_template
from atomrl.tools.importers.trl_arguments import (
    NO_CLIP,
    put_engine,
    put_rewards,
    put_steps,
    translate_objective,
    translate_rloo_objective,
)

# --------------------------------------------------------------------------------------------------------------------
# GRPO and RLOO. Their batch sizes count completions per process, and their steps are optimizer steps.

DEFAULTS: Settings = {
    "learning_rate": 1e-6,
    "num_generations": 8,
    "num_iterations": 1,
    "max_completion_length": 512,
    "shuffle_dataset": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "beta": 0.0,
    "epsilon": 0.2,
    "importance_sampling_level": "token",
    "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group",
    "loss_type": "dapo",
    "use_bias_correction_kl": True,
    "mask_truncated_completions": False,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
}
RLOO_DEFAULTS: Settings = {
    **{name: DEFAULTS[name] for name in (
        "learning_rate", "num_iterations", "max_completion_length", "shuffle_dataset", "temperature", "top_p", "top_k",
        "epsilon", "mask_truncated_completions", "use_vllm",
    )},
    "num_generations": 2,
    "beta": 0.05,
    "normalize_advantages": False,
}  # fmt: skip
MOVES: Moves = {
    "data.shuffle": ("shuffle_dataset", bool),
    "data.max_prompt_tokens": ("max_prompt_length", int),
    "rollout.completions_per_prompt": ("num_generations", int),
    "rollout.temperature": ("temperature", float),
    "rollout.top_p": ("top_p", float),
    "rollout.top_k": ("top_k", at_least_zero),
    "rollout.min_p": ("min_p", float),
    "rollout.max_completion_tokens": ("max_completion_length", int),
    "train.epochs_per_step": ("num_iterations", int),
    "train.rows_per_micro_batch": ("per_device_train_batch_size", int),
    "eval.samples_per_prompt": ("num_generations_eval", int),
}


class BatchSizeError(ConfigError):
    """Batch sizes that do not fit together on this number of processes."""


def translate_grpo(t: Translation, processes: int) -> None:
    """Translate GRPO's own arguments."""
    updates = _shared(t, processes)
    t.move({"algorithm.entropy.coefficient": ("entropy_coef", float)})
    translate_objective(t, updates)


def translate_rloo(t: Translation, processes: int) -> None:
    """Translate RLOO's own arguments."""
    _shared(t, processes)
    translate_rloo_objective(t)


def _shared(t: Translation, processes: int) -> int:
    """Translate what GRPO and RLOO share; returns the optimizer steps on the completions of a generation."""
    t.move(MOVES)
    if t.is_set("max_prompt_length"):
        t.put("data.overlong_prompt", "truncate", "max_prompt_length")
    else:
        _prompts(t)
    updates = _grpo_batches(t, processes)
    _sampling(t)
    t.put("data.answer_field", None)  # every column is given to the rewards by its name, as in TRL
    here = "the same seed gives another order of rows and other completions"
    t.differ("random draws", f"seed={t.integer('seed')} with its own generators", here)
    return updates


def _sampling(t: Translation) -> None:
    """Translate `generation_kwargs`; arguments without a counterpart are refused."""
    keys = {"stop": "rollout.stop", "stop_strings": "rollout.stop", "stop_token_ids": "rollout.stop_token_ids",
             "min_tokens": "rollout.min_completion_tokens", "min_new_tokens": "rollout.min_completion_tokens",
             "temperature": "rollout.temperature", "top_p": "rollout.top_p", "top_k": "rollout.top_k",
             "min_p": "rollout.min_p"}  # fmt: skip
    for name, value in t.mapping("generation_kwargs").items():
        if name in ("do_sample", "max_new_tokens", "max_tokens", "num_return_sequences") and value in (True, 1, None):
            continue
        key = t.choice(f"generation_kwargs.{name}", name, keys)
        t.put(key, [value] if key == "rollout.stop" and isinstance(value, str) else value, "generation_kwargs")
    if t.is_set("vllm_gpu_memory_utilization"):
        share = t.number("vllm_gpu_memory_utilization")
        t.put("rollout.gpu_memory_utilization", share, "vllm_gpu_memory_utilization")


def _grpo_batches(t: Translation, processes: int) -> int:
    """Convert TRL's batches per process and optimizer steps to prompts, completions and steps.

    Returns:
        Optimizer steps per step.
    """
    each, accumulated = t.count("per_device_train_batch_size"), t.count("gradient_accumulation_steps")
    n, iterations = t.count("num_generations"), t.count("num_iterations")
    # TRL counts completions: those of a generation serve one or more optimizer steps. Here a step has prompts, and
    # `rows_per_update` splits it.
    per_update = each * processes * accumulated
    generated = t("generation_batch_size")
    if generated is None:
        steps = accumulated if t("steps_per_generation") is None else t.count("steps_per_generation")
        generated = each * processes * steps
    else:
        generated = t.count("generation_batch_size")
    if generated % n or generated % per_update:
        raise BatchSizeError(
            f"{t.named('per_device_train_batch_size')}={each}: a generation has {generated} completions, not a "
            f"multiple of num_generations={n} and of the {per_update} completions of an optimizer step ({each} x "
            f"{processes} processes x gradient_accumulation_steps={accumulated}); set their number with --processes N"
        )
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    t.put(
        "rollout.prompts_per_step",
        generated // n,
        "generation_batch_size",
        "steps_per_generation",
        *names,
        "num_generations",
    )
    t.put("train.rows_per_update", per_update, *names)
    updates = generated // per_update * iterations

    put_steps(t, updates)
    t.put("eval.temperature", t.number("temperature"), "temperature")
    if generated > per_update and t("loss_type") in ("dapo", "cispo"):
        t.differ(
            "loss normalisation",
            f"by the tokens of the generation, which are those of {generated // per_update} optimizer steps",
            "by the tokens of each optimizer step",
        )
    if t.integer("max_steps") <= 0:
        t.differ(
            "end of an epoch",
            f"rows that do not fill a generation of {generated // n} prompts are dropped",
            "they come first in the next epoch, so the run may have a step more",
        )
    return updates


def flag_rewards(t: Translation) -> list[dict[str, Any]]:
    """Return the rewards that flags or a YAML file name, in the order of their weights."""
    model, functions = t("reward_model_name_or_path"), t("reward_funcs")
    names = [functions] if isinstance(functions, str) else list(functions or [])
    rewards: list[dict[str, Any]] = [{"model": str(model)}] if model else []
    for name in names:
        if "/" in str(name):
            rewards.append({"model": name})
        elif "." in name:
            rewards.append({"path": name})
        else:
            rewards.append({"trl": name, "args": {}})
    return rewards


# --------------------------------------------------------------------------------------------------------------------
# Offline trainers: SFT, DPO and reward models. Their batch sizes are per process; their steps equal ours.

SFT_DEFAULTS: Settings = {
    "learning_rate": 2e-5,
    "max_length": 1024,
    "loss_type": "chunked_nll",
    "assistant_only_loss": False,
    "packing": False,
    "packing_strategy": "bfd",
}
DPO_DEFAULTS: Settings = {
    "disable_dropout": True,
    "learning_rate": 1e-6,
    "max_length": 1024,
    "loss_type": ["sigmoid"],
    "beta": 0.1,
    "label_smoothing": 0.0,
    "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.5,
    "discopop_tau": 0.05,
    "use_weighting": False,
    "sync_ref_model": False,
}
KTO_DEFAULTS: Settings = {
    "disable_dropout": True,
    "learning_rate": 1e-6,
    "max_length": 1024,
    "loss_type": "kto",
    "beta": 0.1,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
}
ORPO_DEFAULTS: Settings = {"disable_dropout": True, "learning_rate": 1e-6, "max_length": 1024, "beta": 0.1}
CPO_DEFAULTS: Settings = {
    "disable_dropout": True,
    "learning_rate": 1e-6,
    "max_length": 1024,
    "loss_type": "sigmoid",
    "beta": 0.1,
    "label_smoothing": 0.0,
    "cpo_alpha": 1.0,
    "simpo_gamma": 0.5,
}
ONLINE_DPO_DEFAULTS: Settings = {
    "disable_dropout": True,
    "learning_rate": 5e-7,
    "max_length": 512,
    "max_new_tokens": 64,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": 0,
    "loss_type": "sigmoid",
    "beta": [0.1],
    "use_vllm": False,
}
REWARD_DEFAULTS: Settings = {"disable_dropout": True, "learning_rate": 1e-4, "max_length": 1024}
PPO_DEFAULTS: Settings = {
    "disable_dropout": True,
    "learning_rate": 3e-6,
    "num_mini_batches": 1,
    "response_length": 53,
    "temperature": 0.7,
    "num_ppo_epochs": 4,
    "kl_coef": 0.05,
    "kl_estimator": "k1",
    "cliprange": 0.2,
    "vf_coef": 0.1,
    "cliprange_value": 0.2,
    "gamma": 1.0,
    "lam": 0.95,
}
DISTILLATION_DEFAULTS: Settings = {
    "disable_dropout": True,
    "learning_rate": 1e-6,
    "temperature": 1.0,
    "beta": 1.0,
    "max_completion_length": 512,
    "num_generations": 1,
    "top_p": 0.95,
    "top_k": 0,
    "use_vllm": False,
}
GKD_DEFAULTS: Settings = {
    "disable_dropout": True,
    "learning_rate": 2e-5,
    "max_length": 1024,
    "temperature": 0.9,
    "lmbda": 0.5,
    "beta": 0.5,
    "max_new_tokens": 128,
    "seq_kd": False,
}

LOSSES = {
    "sigmoid": "sigmoid",
    "sigmoid_norm": "sigmoid",
    **{
        name: name
        for name in (
            "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
            "apo_zero", "apo_down", "discopop",
        )
    },
}  # fmt: skip
"""Loss of TRL -> our loss."""
PER_TOKEN = {"ipo", "sigmoid_norm"}
"""Losses whose scores are means over tokens."""
SMOOTHED = {"robust", "exo_pair", "aot", "aot_unpaired"}
"""Losses that read `label_smoothing`."""
LOG_RATIOS = {"aot", "aot_unpaired", "apo_zero", "apo_down"}
"""Losses that use the plain log-ratios with any divergence."""
NO_LIMIT = 2**20


def translate_sft(t: Translation, processes: int) -> None:
    """Translate SFT's own arguments."""
    if (loss := t("loss_type")) not in ("nll", "chunked_nll", None):
        raise t.refuse("loss_type", loss, "every token has the same weight here")
    t.put("sft.completion_field", "completion")
    t.name_of(["loss_type", "completion_only_loss"])
    everything = t("completion_only_loss") is not None and not t.flag("completion_only_loss")
    tokens = "all" if everything else "completions" if t.flag("assistant_only_loss") else "conversations"
    t.put("sft.train_on", tokens, "assistant_only_loss", "completion_only_loss")
    t.put("data.row_end", "turn" if tokens == "completions" else "template", "assistant_only_loss")
    if t("dataset_text_field") not in (None, "text"):
        t.to_do.append(
            f"dataset_text_field={t('dataset_text_field')}: a row of text has the column `text` here: rename it"
        )
    put_batches(t, processes, rows_of_one=1)
    put_lengths(t, "truncated")
    t.name_of(["packing", "packing_strategy"])
    if t.flag("packing"):
        if t("max_length", "max_seq_length") is None:
            raise t.refuse("packing", True, "it needs max_length, the size of a block")
        strategies = {"bfd": "bfd", "bfd_split": "bfd_split", "wrapped": "wrapped", "ffd": "bfd"}
        if t("packing_strategy") == "ffd":  # of TRL 0.18
            t.differ("packing_strategy", "ffd", "bfd")
        strategy = t.choice("packing_strategy", t("packing_strategy"), strategies)
        t.put("sft.packing", strategy, "packing", "packing_strategy")
        tokens = t.count("per_device_train_batch_size") * t.tree["train"]["max_row_tokens"]
        t.put("train.rows_per_micro_batch", None)
        t.put("train.tokens_per_micro_batch", tokens, "per_device_train_batch_size")


def translate_dpo(t: Translation, processes: int) -> None:
    """Translate DPO's own arguments."""
    t.refuse_set(
        {
            "use_weighting": "all pairs have the same weight here",
            "reference_free": "to compare log-probs, set algorithm.score={type: logprob} yourself",
        }
    )
    t.put("algorithm.name", "dpo")
    _losses(t)
    t.put("data.row_end", "template")
    put_batches(t, processes, rows_of_one=2)
    put_lengths(t, "truncated")


def translate_kto(t: Translation, processes: int) -> None:
    """Translate the arguments of KTO and its variants, which train on completions with labels."""
    t.refuse_set({"precompute_ref_log_probs": "the reference's log-probs are computed in each step"})
    kind = t.choice("loss_type", t("loss_type"), {"kto": "kto", "bco": "bco", "apo_zero_unpaired": "apo_zero_unpaired"})
    t.put("algorithm.name", kind, "loss_type")
    t.put("algorithm.loss", [{"type": kind, "beta": t.number("beta")}], "beta")
    for name in ("desirable_weight", "undesirable_weight"):
        if kind != "bco":
            t.put("algorithm.loss", [{**_only_loss(t), name: t.number(name)}], name)
        elif t.number(name) != 1:
            raise t.refuse(name, t(name), "bco has no weights")
    if kind == "kto":
        t.differ("KTO's reference point z_0", "from the completions of a forward pass", "from those of the step")
    t.put("data.row_end", "template")
    put_batches(t, processes, rows_of_one=2)
    put_lengths(t, "truncated")


def _only_loss(t: Translation) -> dict[str, Any]:
    loss = t.tree["algorithm"]["loss"]
    return dict(loss[0] if isinstance(loss, list) else loss)


def translate_orpo(t: Translation, processes: int) -> None:
    """Translate ORPO's own arguments."""
    t.put("algorithm.name", "orpo")
    t.put("algorithm.loss", [{"type": "odds_ratio", "beta": t.number("beta")}], "beta")
    t.differ("likelihood of the chosen row", "of prompt and completion", "of the completion")
    _mean_of_likelihood(t)
    t.put("data.row_end", "template")
    _end_again(t)
    put_batches(t, processes, rows_of_one=2)
    put_lengths(t, "truncated")


def translate_cpo(t: Translation, processes: int) -> None:
    """Translate the arguments of CPO and SimPO."""
    t.refuse_set({"alpha": "AlphaPO is algorithm.score.shape: set it in a config"})
    kind, beta = t("loss_type"), t.number("beta")
    t.put("algorithm.name", "cpo")
    loss: dict[str, Any] = {
        "type": t.choice("loss_type", kind, {"sigmoid": "sigmoid", "simpo": "sigmoid", "hinge": "hinge", "ipo": "ipo"})
    }
    loss |= {"beta": beta}
    if loss["type"] == "sigmoid":
        loss |= {"label_smoothing": t.number("label_smoothing")}
    if kind == "simpo":
        loss |= {"target_margin": t.number("simpo_gamma")}
    t.name_of(["simpo_gamma", "label_smoothing"])
    t.put("algorithm.loss", [loss], "loss_type", "beta", "label_smoothing", "simpo_gamma")
    t.put("algorithm.score", {"type": "logprob", "length_normalised": kind in ("simpo", "ipo")}, "loss_type")
    likelihood = t.number("cpo_alpha")
    t.put("algorithm.nll", {"coefficient": likelihood}, "cpo_alpha")
    if likelihood:
        _mean_of_likelihood(t)
    t.put("data.row_end", "template")
    _end_again(t)
    put_batches(t, processes, rows_of_one=2)
    put_lengths(t, "truncated")


def _end_again(t: Translation) -> None:
    t.differ("end of messages", "an end-of-sequence token after what the template writes", "what it writes")


def translate_online_dpo(t: Translation, processes: int) -> None:
    """Translate the arguments of online DPO: pairs of the policy's own completions, ranked by a reward."""
    t.refuse_set({"judge": "completions are ranked by reward_funcs"})
    t.put("algorithm.name", "online_dpo")
    kind = t.choice("loss_type", t("loss_type"), {"sigmoid": "sigmoid", "ipo": "ipo"})
    beta = t("beta")[0] if isinstance(t("beta"), list | tuple) and len(t("beta")) == 1 else t.number("beta")
    t.put("algorithm.loss", [{"type": kind, "beta": float(beta)}], "loss_type", "beta")
    t.move(
        {
            "rollout.temperature": ("temperature", float),
            "rollout.top_p": ("top_p", float),
            "rollout.top_k": ("top_k", at_least_zero),
            "rollout.min_p": ("min_p", float),
            "rollout.max_completion_tokens": ("max_new_tokens", int),
        }
    )
    _sampling(t)
    prompts = t.count("per_device_train_batch_size") * processes * t.count("gradient_accumulation_steps")
    t.put("rollout.prompts_per_step", prompts, "per_device_train_batch_size", "gradient_accumulation_steps")
    t.put("rollout.completions_per_prompt", 2, because="a pair")
    t.put("data.max_prompt_tokens", max(1, t.count("max_length") - t.count("max_new_tokens")), "max_length")
    t.put("data.answer_field", None)
    t.name_of(["use_vllm", "reward_weights"])
    put_engine(t)
    put_steps(t, updates=1)
    t.differ("pairs with equal rewards", "trained, in random order", "replaced by other prompts' pairs")


def translate_ppo(t: Translation, processes: int) -> None:
    """Translate the arguments of PPO with a critic and a reward model."""
    t.refuse_set({"whiten_rewards": "advantages are whitened, rewards are not"})
    each, accumulated = t.count("per_device_train_batch_size"), t.count("gradient_accumulation_steps")
    batch, names = each * processes * accumulated, ("per_device_train_batch_size", "gradient_accumulation_steps")
    if batch % t.count("num_mini_batches"):
        raise BatchSizeError(f"{t.named('num_mini_batches')}={t.count('num_mini_batches')} does not divide {batch}")
    t.put("algorithm.name", "ppo")
    t.put(
        "algorithm.advantage",
        {"type": "gae", "gamma": t.number("gamma"), "lam": t.number("lam"), "whiten": True},
        "gamma",
        "lam",
    )
    clip = t.number("cliprange")
    t.put("algorithm.clip", {"type": "ppo", "low": clip, "high": clip, "dual": None}, "cliprange")
    kl = {"type": t.choice("kl_estimator", t("kl_estimator"), {"k1": "k1", "k3": "k3"}), "apply_to": "reward"}
    t.put("algorithm.kl", {**kl, "coefficient": t.number("kl_coef"), "target": None}, "kl_coef", "kl_estimator")
    value = {"type": "clipped", "coefficient": t.number("vf_coef"), "clip": t.number("cliprange_value")}
    t.put("algorithm.value", value, "vf_coef", "cliprange_value")
    _prompts(t)
    t.put("rollout.prompts_per_step", batch, *names)
    t.put("rollout.completions_per_prompt", 1)
    t.move({"rollout.max_completion_tokens": ("response_length", int), "rollout.temperature": ("temperature", float)})
    t.put("eval.temperature", t.number("temperature"), "temperature")
    if t("stop_token_id") is not None:
        t.put("rollout.stop_token_ids", [t.integer("stop_token_id")], "stop_token_id")
    elif t.choice("stop_token", t("stop_token"), {None: False, "eos": True}) is False:
        t.differ("end of a completion (no stop_token)", "always response_length tokens", "the end-of-sequence token")
    t.put("train.rows_per_update", batch, *names, "num_mini_batches")
    t.put("train.rows_per_micro_batch", each, names[0])
    t.put("train.epochs_per_step", t.count("num_ppo_epochs"), "num_ppo_epochs")
    t.put("critic.learning_rate", t.number("learning_rate"), "learning_rate")
    put_steps(t, t.count("num_ppo_epochs"))
    if t("total_episodes") is not None:
        t.put("train.steps", -(-t.count("total_episodes") // batch), "total_episodes")
        t.put("train.total_epochs", None)
    t.name_of(["total_episodes", "local_batch_size", "micro_batch_size", "batch_size", "mini_batch_size",
               "local_mini_batch_size", "num_total_batches"])  # fmt: skip  # which TRL computes
    t.put("train.max_grad_norm", NO_CLIP, "max_grad_norm", because="TRL's PPO does not clip gradients")
    t.differ("means over tokens", "over those of a forward pass", "over those of the optimizer step")
    t.differ("learning rate within a step", "constant", "set at each optimizer step")


def translate_gkd(t: Translation, processes: int) -> None:
    """Translate the arguments of GKD on the student's own samples."""
    if t.number("lmbda") != 1:
        raise t.refuse("lmbda", t("lmbda"), "all completions are the student's own here: set lmbda=1")
    t.refuse_set({"seq_kd": "all completions are the student's own here"})
    t.put("data.max_prompt_tokens", max(1, t.count("max_length") - t.count("max_new_tokens")), "max_length")
    t.put("rollout.max_completion_tokens", t.count("max_new_tokens"), "max_new_tokens")
    if t.number("temperature") != 1:
        t.differ("temperature of the distributions", "1", f"that of sampling, {t.number('temperature'):g}")
    _distil(t, processes)


def translate_distillation(t: Translation, processes: int) -> None:
    """Translate the arguments of distillation on the student's own samples."""
    _prompts(t)
    t.move({"rollout.max_completion_tokens": ("max_completion_length", int), "rollout.top_p": ("top_p", float)})
    t.move({"rollout.top_k": ("top_k", at_least_zero)})
    _sampling(t)
    t.name_of(["generation_batch_size"])  # has to be that of the other sizes
    _distil(t, processes)


def _distil(t: Translation, processes: int) -> None:
    each, accumulated = t.count("per_device_train_batch_size"), t.count("gradient_accumulation_steps")
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    rows, group = each * processes * accumulated, t.count("num_generations") if t("num_generations") else 1
    if rows % group:
        raise BatchSizeError(f"{t.named('num_generations')}={group} does not divide {rows} completions of a step")
    t.put("algorithm.name", "gkd")
    t.put("algorithm.distillation", {"coefficient": 1.0, "beta": t.number("beta")}, "beta")
    t.put("rollout.prompts_per_step", rows // group, *names)
    t.put("rollout.completions_per_prompt", group, "num_generations")
    for key in ("rollout.temperature", "eval.temperature"):
        t.put(key, t.number("temperature"), "temperature")
    t.put("train.rows_per_micro_batch", each, names[0])
    t.put("data.answer_field", None)
    put_engine(t)
    put_steps(t, updates=1)


def _prompts(t: Translation) -> None:
    """Limit prompts, for which TRL has no limit; the trainer of a script, which has the rows, takes the longest."""
    if t.path is None:
        return
    t.put("data.max_prompt_tokens", 512)
    t.differ("longest prompt", "no limit", "512 tokens (data.max_prompt_tokens); longer ones are dropped and counted")
    t.put("data.answer_field", None)
    t.put("data.shuffle", True)


def translate_reward(t: Translation, processes: int) -> None:
    """Translate a reward model's own arguments."""
    if t.library == "TRL" and t.flag("use_peft") and t("lora_task_type") != "SEQ_CLS":
        t.differ("score head beside adapters", "trained with lora_task_type=SEQ_CLS only", "trained in full")
    t.put("algorithm.name", "reward_model")
    t.put(
        "algorithm.centring",
        t.number("center_rewards_coefficient") if t("center_rewards_coefficient") is not None else 0.0,
        "center_rewards_coefficient",
    )
    t.put(
        "algorithm.margin",
        1.0,
        because="TRL uses a column margin if the rows have one; here score_chosen and score_rejected are "
        "used too, and 0 ignores both",
    )
    put_batches(t, processes, rows_of_one=2)
    put_lengths(t, "dropped")


def put_batches(t: Translation, processes: int, rows_of_one: int) -> None:
    """Convert batches per process; both rows of a pair are in one forward pass."""
    each, accumulated = t.count("per_device_train_batch_size"), t.count("gradient_accumulation_steps")
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    t.put("train.rows_per_update", each * processes * accumulated, *names)
    t.put("train.rows_per_micro_batch", each * rows_of_one, names[0])
    t.put("data.shuffle", True)
    t.name_of(["shuffle_dataset"])
    t.put("data.answer_field", None)
    put_steps(t, updates=1)
    t.differ(
        "random draws", f"seed={t.integer('seed')} with its own generators", "the same seed gives another order of rows"
    )
    t.differ(
        "end of an epoch",
        "the remaining rows are dropped" if t.flag("dataloader_drop_last") else "a smaller batch of the remaining rows",
        "a full one, with the next epoch's first rows",
    )


def put_lengths(t: Translation, overlong: str) -> None:
    given = str(t.name_of(["max_length", "max_seq_length"]))  # max_seq_length: SFT before TRL 0.20
    length = None if t(given) is None else t.integer(given)
    mode = t("truncation_mode")
    if length is None:
        t.put("data.max_prompt_tokens", NO_LIMIT, given, because="no limit except the model's context")
        return
    if mode == "keep_end":
        raise t.refuse("truncation_mode", mode, "rows are truncated at the end")
    t.put("train.max_row_tokens", length, given, "truncation_mode")
    if overlong == "dropped":
        t.differ(f"rows over {length} tokens", "dropped", "truncated")
    if (longest := t("max_completion_length")) is not None:  # of DPO and KTO before TRL 0.29
        t.differ("completions over max_completion_length", f"truncated to {longest} tokens", "only rows are truncated")
    t.put("data.max_prompt_tokens", length - 1, given)  # of a longer prompt nothing is left to train on
    if t("max_prompt_length") is not None:
        t.put(
            "data.max_prompt_tokens",
            t.count("max_prompt_length"),
            "max_prompt_length",
            because="longer prompts are dropped",
        )


def _losses(t: Translation) -> None:
    """Translate `loss_type` and its weights to the losses of a preference objective and its likelihood term."""
    loss_type = t("loss_type")
    kinds = [str(kind) for kind in (loss_type if isinstance(loss_type, list | tuple) else [loss_type])]
    weights = [1.0] * len(kinds) if t("loss_weights") is None else t.numbers("loss_weights", len(kinds))
    named = dict(zip(kinds, weights, strict=True))
    likelihood = named.pop("sft", 0.0) + (t.number("rpo_alpha") if t("rpo_alpha") is not None else 0.0)
    divergence = str(t("f_divergence_type")).rpartition(".")[2].lower()
    beta, smoothing = t.number("beta"), t.number("label_smoothing")
    # Combinations that one objective, with one score per run, cannot express.
    if not named:
        raise t.refuse("loss_type", loss_type, "only the likelihood is SFT (the section `sft`)")
    if named.keys() & PER_TOKEN and named.keys() - PER_TOKEN:
        raise t.refuse("loss_type", loss_type, "a run has one score: means over tokens (ipo, sigmoid_norm) or sums")
    if divergence != "reverse_kl" and (odd := sorted(named.keys() & LOG_RATIOS)):
        raise t.refuse("f_divergence_type", divergence, f"TRL's {', '.join(odd)} uses log-ratios anyway")
    losses: list[dict[str, Any]] = []
    for kind, weight in named.items():
        loss: dict[str, Any] = {"type": t.choice("loss_type", kind, LOSSES), "beta": beta}
        loss |= {"label_smoothing": smoothing} if kind in SMOOTHED else {}
        loss |= {"tau": t.number("discopop_tau")} if kind == "discopop" else {}
        losses.append(loss | ({"weight": weight} if weight != 1.0 else {}))
    t.put("algorithm.loss", losses, "loss_type", "loss_weights", "beta", "label_smoothing", "discopop_tau")
    if smoothing and not named.keys() & SMOOTHED:
        t.approximate(
            f"label_smoothing={smoothing:g}: TRL's {', '.join(named)} ignores it (earlier versions did not with "
            "sigmoid, which is cDPO: algorithm.loss.label_smoothing)"
        )
    if named.keys() & {"aot", "aot_unpaired"}:
        t.differ("ranks of aot", "within a forward pass of one process", "within the optimizer step")
    score: dict[str, Any] = {"type": "log_ratio", "divergence": divergence}
    score |= {"alpha": t.number("f_alpha_divergence_coef")} if divergence == "alpha_divergence" else {}
    score |= {} if t("ld_alpha") is None else {"ld_alpha": t.number("ld_alpha")}
    score |= {"length_normalised": True} if named.keys() & PER_TOKEN else {}
    t.put("algorithm.score", score, "f_divergence_type", "f_alpha_divergence_coef", "ld_alpha")
    if likelihood:
        t.put("algorithm.nll", {"coefficient": likelihood}, "loss_type", "rpo_alpha")
        _mean_of_likelihood(t)


def _mean_of_likelihood(t: Translation) -> None:
    t.differ("mean of the likelihood", "over the tokens of a forward pass", "over those of the optimizer step")


@dataclass(frozen=True)
class TrainerKind:
    """One of TRL's trainers."""

    called: str
    """Prefix of the names of its classes."""
    defaults: Settings
    translate: Callable[[Translation, int], None]
    """Translates the trainer's own arguments, given the number of processes."""
    marks: frozenset[str]
    """Keys that no other trainer has."""
    samples: bool = False
    """True if it samples completions."""


TRAINERS: Mapping[str, TrainerKind] = {
    "grpo": TrainerKind("GRPO", DEFAULTS, translate_grpo, frozenset({
        "scale_rewards", "delta", "importance_sampling_level", "top_entropy_quantile",
    }), samples=True),
    "rloo": TrainerKind("RLOO", RLOO_DEFAULTS, translate_rloo, frozenset({
        "normalize_advantages", "reward_clip_range",
    }), samples=True),
    "sft": TrainerKind("SFT", SFT_DEFAULTS, translate_sft, frozenset({
        "packing", "packing_strategy", "eval_packing", "completion_only_loss", "assistant_only_loss",
        "dataset_text_field", "max_seq_length",
    })),
    "dpo": TrainerKind("DPO", DPO_DEFAULTS, translate_dpo, frozenset({
        "loss_weights", "ld_alpha", "f_divergence_type", "precompute_ref_log_probs", "use_weighting", "discopop_tau",
        "label_smoothing",
    })),
    "kto": TrainerKind("KTO", KTO_DEFAULTS, translate_kto, frozenset({"desirable_weight", "undesirable_weight"})),
    "orpo": TrainerKind("ORPO", ORPO_DEFAULTS, translate_orpo, frozenset()),
    "cpo": TrainerKind("CPO", CPO_DEFAULTS, translate_cpo, frozenset({"cpo_alpha", "simpo_gamma"})),
    "online_dpo": TrainerKind("OnlineDPO", ONLINE_DPO_DEFAULTS, translate_online_dpo, frozenset({
        "missing_eos_penalty", "max_new_tokens",
    }), samples=True),
    "reward": TrainerKind("Reward", REWARD_DEFAULTS, translate_reward, frozenset({
        "center_rewards_coefficient",
    })),
    "ppo": TrainerKind("PPO", PPO_DEFAULTS, translate_ppo, frozenset(), samples=True),
    "gkd": TrainerKind("GKD", GKD_DEFAULTS, translate_gkd, frozenset(), samples=True),
    "distillation": TrainerKind(
        "Distillation", DISTILLATION_DEFAULTS, translate_distillation, frozenset(), samples=True),
}  # fmt: skip
PROGRAM = r"(^|/)trl$|^trl\.|\.py$"
OWN = r"(?:.*/)?trl/scripts/(\w+)\.py|trl\.scripts\.(\w+)|(?:.*/)?examples/scripts/(sft|dpo)\.py"
"""TRL's own programs, which have only TRL's flags; its examples `sft.py` and `dpo.py` only call them."""
SAMPLING = frozenset({
    "num_generations", "reward_funcs", "max_completion_length", "num_iterations", "epsilon", "generation_batch_size",
    "steps_per_generation", "use_vllm",
})  # fmt: skip
"""Keys of GRPO and RLOO, which GRPO alone has unless a key of RLOO is there too."""
OF_ALL = frozenset({
    "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "datasets", "model_name_or_path",
    "data_files", "reward_funcs", "reward_model_name_or_path", "reward_weights", "report_to", "output_dir",
    "eval_dataset_name", "dataset_revision", "lora_r", "lora_alpha", "lora_dropout",
    "max_steps", "warmup_ratio", "eval_steps", "lora_target_modules", "use_rslora", "save_strategy",
    "max_prompt_length",
})  # fmt: skip


VERSION = "TRL 1.16"
"""The version whose defaults the tables hold."""
SIGNS_OF_OLD = (
    "torch_dtype", "max_seq_length", "max_prompt_length", "vllm_device", "tokenizer_name_or_path", "use_liger",
)  # fmt: skip
"""Keys that `VERSION` no longer has."""
OLD_DEFAULTS: Mapping[str, Settings] = {kind: {"bf16": False} for kind in TRAINERS} | {
    "grpo": {"beta": 0.04, "temperature": 0.9, "max_completion_length": 256, "loss_type": "grpo", "bf16": False},
}
"""Defaults of TRL 0.14 that affect the training and have changed since."""


@dataclass
class Reading:
    """The content of a TRL file."""

    kind: str
    settings: Settings
    notes: list[str]
    processes: int | None
    processes_from: str
    """The setting that gives the number of processes."""


def translate(path: Path, out: Path, processes: int | None = None, trainer: str | None = None) -> Translation:
    """Translate a TRL file.

    Args:
        out: path of the config.
        processes: number of processes, if the file does not say it.
        trainer: a key of `TRAINERS`, if the file does not say it.
    """
    reading = _read(path, trainer)
    which = TRAINERS[reading.kind]
    t = Translation("TRL", reading.settings, {**trl_shared.DEFAULTS, **which.defaults}, path)
    t.version = VERSION
    if (count := processes or reading.processes) is not None:
        put_gpus(t, count, f"--processes {processes}" if processes else reading.processes_from)
    elif path.suffix != ".sh":
        t.approximate("the file does not set the number of processes: 1 was used; set it with --processes N")
    t.reasons |= RECIPE_KEYS
    trl_shared.translate_shared(t, path)
    _recipe(t, out)
    which.translate(t, count or 1)
    if which.samples:
        put_rewards(t, flag_rewards(t), out)
    _text_prompts(t)
    _older(t, reading.kind)
    for note in reading.notes:
        t.approximate(note)
    _check_names(t, path, which)
    if "path" not in t.tree.get("model", {}):
        raise ConfigError(f"{path} has no model: give --model_name_or_path")
    return t


def _text_prompts(t: Translation) -> None:
    """Use text as it is, unless a template was set: TRL renders messages alone."""
    if "chat_template" not in t.tree.get("data", {}):
        t.put("data.chat_template", "messages_only")


def _older(t: Translation, kind: str) -> None:
    """Report defaults that have changed, if the file has keys of an older TRL."""
    if signs := [name for name in SIGNS_OF_OLD if name in t.settings]:
        for name, value in OLD_DEFAULTS[kind].items():
            if name not in t.settings:
                t.differ(
                    f"default of {name}, which the file does not set ({signs[0]} is a key of an older TRL)",
                    f"0.14 {value}",
                    f"{t.defaults.get(name)}, of {VERSION}",
                )


RECIPE_KEYS: Mapping[str, str] = {
    **dict.fromkeys((
        "benchmarks", "callbacks", "hub_model_revision", "overwrite_hub_revision", "push_to_hub_revision",
    ), trl_shared.UPLOAD),
    **dict.fromkeys(("wandb_entity", "wandb_run_group"), trl_shared.LOGGING),
}  # fmt: skip
"""Keys that recipes of open-r1 and alignment-handbook add, and that do not affect what is trained."""


def _recipe(t: Translation, out: Path) -> None:
    """Translate keys that recipes of open-r1 and alignment-handbook add to TRL's."""
    t.move({"data.prompt_field": ("dataset_prompt_column", str), "data.system_prompt": ("system_prompt", str)})
    t.move({"tracking.wandb_project": ("wandb_project", str)})
    put_template(t, "chat_template", out)
    mixture = t.mapping("dataset_mixture")
    for name in mixture.keys() - {"datasets", "seed", "test_split_size"}:
        raise t.refuse(f"dataset_mixture.{name}", mixture[name], "supported: datasets, seed, test_split_size")
    if mixture.get("test_split_size"):
        t.to_do.append(
            f"dataset_mixture.test_split_size={mixture['test_split_size']}: rows are not split here, all of them are "
            "trained: write the two parts to files, and set data.train and data.eval"
        )


def _check_names(t: Translation, path: Path, which: TrainerKind) -> None:
    """Refuse an argument that TRL does not have."""
    known = sorted({*t.read_keys, *t.reasons, *t.defaults, *OF_ALL})
    for name in t.unread:
        if name not in OF_ALL:
            hint = did_you_mean(name, known)
            raise ConfigError(f"{t.place(name) or path}: {which.called}Config of TRL has no argument {name!r}; {hint}")
        t.leave(name, "not used here")


def _read(path: Path, trainer: str | None) -> Reading:
    if path.suffix in (".yaml", ".yml"):
        settings, notes, named = flat_yaml(path), list[str](), trainer
        launched: Mapping[str, Any] = {}
    else:
        wanted = rf"\btrl {trainer}\b|\b{trainer}\.py\b|trl\.scripts\.{trainer}\b" if trainer else None
        settings, notes, launched, words = read_flags(path, PROGRAM, "trl", wanted)
        if len(all_there := _trainers_of(path)) > 1 and trainer is None:
            raise ConfigError(f"{path} calls {', '.join(all_there)} of TRL: set --trainer {'|'.join(all_there)}")
        settings = {key.replace("-", "_"): value for key, value in settings.items()}
        named = _trainer_of(path, words)
        for name in [name for name, value in settings.items() if name.startswith("no_") and value is True]:
            settings[name.removeprefix("no_")] = not settings.pop(name)  # as argparse has it for what is on by default
        settings = _with_config(path, settings)
    settings.pop("env", None)
    launched = {key.replace("-", "_"): value for key, value in launched.items()}
    setting = path.parent / str(launched.get("config_file", ""))
    if setting.suffix in (".yaml", ".yml") and setting.is_file():  # of accelerate
        launched = {**read_yaml(setting), **launched}
    processes, origin = _processes(launched | settings, settings)
    if trainer is not None and named not in (None, trainer):
        raise ConfigError(f"{path} calls TRL's {named}, not --trainer {trainer}")
    return Reading(named or _inferred(path, settings), settings, notes, processes, origin)


def _with_config(path: Path, settings: Settings) -> Settings:
    """Add the keys of the YAML file of `--config`, which flags override.

    Raises:
        ConfigError: the file is not there.
    """
    if "config" not in settings:
        return settings
    name = str(settings.pop("config"))
    if (config := next((one for one in (path.parent / name, Path(name)) if one.is_file()), None)) is None:
        raise ConfigError(f"{path}: --config {name} is not there: copy it next to {path.name}")
    return flat_yaml(config) | settings


def _trainer_of(path: Path, words: list[str]) -> str:
    """Return the trainer of a command: `trl dpo`, `-m trl.scripts.dpo`, `trl/scripts/dpo.py`.

    Raises:
        ConfigError: it calls another Python file, or a trainer that AtomRL does not have.
    """
    program = words[0]
    if re.search(r"(^|/)trl$", program):
        kind = words[1] if len(words) > 1 else ""
    elif own := re.fullmatch(OWN, program):
        kind = own[1] or own[2] or own[3]
    else:
        raise ConfigError(
            f"{path} calls {program}, a Python file that decides itself what its flags mean: convert it with atomrl "
            f"run {program} FLAGS --config-out X.yaml; atomrl import reads `trl {'|'.join(TRAINERS)}` and "
            "trl/scripts/*.py"
        )
    if kind not in TRAINERS:
        raise ConfigError(f"{path}: trl {kind} has no counterpart; supported: trl {', '.join(TRAINERS)}")
    return kind


def _trainers_of(path: Path) -> list[str]:
    """Return the trainers that a script's commands name, sorted."""
    names = set()
    for words in read_script(text_of(path), str(path)).commands:
        for before, word in zip(["", *words], words, strict=False):
            if own := re.fullmatch(OWN, word):
                names.add(own[1] or own[2] or own[3])
            elif re.search(r"(^|/)trl$", before):
                names.add(word)
    return sorted(names & TRAINERS.keys())


def _inferred(path: Path, settings: Settings) -> str:
    """Return the trainer of a YAML file, by keys that only one trainer has, else by its folder or name.

    Raises:
        ConfigError: they name none, several, or one that AtomRL does not have.
    """
    named = {name for name, one in TRAINERS.items() if one.marks & settings.keys()}
    if not named and SAMPLING & settings.keys():
        named = {"grpo"}
    names = re.split(r"[/_.-]", "/".join(path.resolve().parts[-3:]).lower())
    if other := next((name for name in OTHER_TRAINERS if name in names), None):
        raise ConfigError(f"{path} is a config of TRL's {other} by its name; supported: {', '.join(TRAINERS)}")
    named = named or (TRAINERS.keys() & set(names))
    if len(named) != 1:
        problem = f"has keys of {', '.join(sorted(named))} of TRL" if named else "does not name a trainer of TRL"
        raise ConfigError(f"{path} {problem}: set --trainer {'|'.join(sorted(named or TRAINERS))}")
    return next(iter(named))


OTHER_TRAINERS = ("bco", "xpo", "nash", "prm")


def _processes(flags: Settings, own: Settings) -> tuple[int | None, str]:
    """Return the number of processes by a launcher's flags, and the flags; removes `num_processes` from TRL's own."""
    own.pop("num_processes", None)
    if isinstance(processes := flags.get("num_processes"), int):  # of all machines
        return processes, f"num_processes={processes}"
    each, machines = flags.get("nproc_per_node"), flags.get("nnodes", 1)
    if isinstance(each, int) and isinstance(machines, int):
        return each * machines, f"nproc_per_node={each}" + f" x nnodes={machines}" * (machines > 1)
    each = flags.get("num_gpus")  # deepspeed
    return (each, f"num_gpus={each}") if isinstance(each, int) else (None, "")
