"""TRL's GRPO and RLOO. They count completions of one process, and their steps are optimizer steps."""

from typing import Any

from atomrl.config import ConfigError
from atomrl.importers.sources import Given
from atomrl.importers.translation import Moves, Translation
from atomrl.importers.trl_objective import translate_objective, translate_rloo_objective
from atomrl.importers.trl_shared import put_steps

DEFAULTS: Given = {
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
RLOO_DEFAULTS: Given = {
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
    "rollout.top_k": ("top_k", lambda k: max(0, int(k))),
    "rollout.max_completion_tokens": ("max_completion_length", int),
    "train.epochs_per_step": ("num_iterations", int),
    "train.rows_per_micro_batch": ("per_device_train_batch_size", int),
    "eval.samples_per_prompt": ("num_generations_eval", int),
}


def translate(t: Translation, processes: int) -> None:
    """Translate GRPO's own arguments."""
    _shared(t, processes)
    t.move({"algorithm.entropy.coefficient": ("entropy_coef", float)})
    translate_objective(t)


def translate_rloo(t: Translation, processes: int) -> None:
    """Translate RLOO's own arguments."""
    _shared(t, processes)
    translate_rloo_objective(t)


def _shared(t: Translation, processes: int) -> None:
    t.move(MOVES)
    if not t.is_given("max_prompt_length"):
        t.put("data.max_prompt_tokens", 512, "max_prompt_length")
        t.differ(
            "longest prompt", "no limit", "512 tokens (data.max_prompt_tokens); longer ones are left out, and counted"
        )
    else:
        t.put("data.overlong_prompt", "truncate", "max_prompt_length")
    _batches(t, processes)
    _sampling(t)
    t.put("data.answer_field", None)  # every column is given to the rewards by its name, as in TRL
    here = "other rows first and other completions by the same seed"
    t.differ("draws", f"seed={t.whole('seed')} of its own generators", here)


def _sampling(t: Translation) -> None:
    """`generation_kwargs`: what has a key; else it is refused."""
    known = {"stop": "rollout.stop", "stop_strings": "rollout.stop", "stop_token_ids": "rollout.stop_token_ids",
             "min_tokens": "rollout.min_completion_tokens", "min_new_tokens": "rollout.min_completion_tokens",
             "temperature": "rollout.temperature", "top_p": "rollout.top_p", "top_k": "rollout.top_k"}  # fmt: skip
    for name, value in t.mapping("generation_kwargs").items():
        if name in ("do_sample", "max_new_tokens", "max_tokens", "num_return_sequences") and value in (True, 1, None):
            continue
        key = t.choice(f"generation_kwargs.{name}", name, known)
        t.put(key, [value] if key == "rollout.stop" and isinstance(value, str) else value, "generation_kwargs")
    if t.is_given("vllm_gpu_memory_utilization"):
        share = t.number("vllm_gpu_memory_utilization")
        t.put("rollout.gpu_memory_utilization", share, "vllm_gpu_memory_utilization")


def _batches(t: Translation, processes: int) -> None:
    """TRL's batches of one process and steps of the optimizer as prompts, completions and steps of ours."""
    each, accumulated = t.count("per_device_train_batch_size"), t.count("gradient_accumulation_steps")
    n, iterations = t.count("num_generations"), t.count("num_iterations")
    per_update = each * processes * accumulated
    generated = t("generation_batch_size")
    if generated is None:
        steps = accumulated if t("steps_per_generation") is None else t.count("steps_per_generation")
        generated = each * processes * steps
    else:
        generated = t.count("generation_batch_size")
    if generated % n or generated % per_update:
        raise ConfigError(
            f"{t.named('per_device_train_batch_size')}={each}: a generation has {generated} completions, no multiple "
            f"of num_generations={n} and of the {per_update} completions of an optimizer step "
            f"({each} x {processes} processes x gradient_accumulation_steps={accumulated}); --processes N says how "
            "many ran it"
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
    if t.whole("max_steps") <= 0:
        t.differ(
            "end of an epoch",
            f"rows that fill no whole generation of {generated // n} prompts are left out",
            "they come first in the next epoch, so the run may have a step more",
        )


def flag_rewards(t: Translation) -> list[dict[str, Any]]:
    """The rewards that flags or a YAML file name, in the order of their weights."""
    model, given = t("reward_model_name_or_path"), t("reward_funcs")
    names = [given] if isinstance(given, str) else list(given or [])
    rewards: list[dict[str, Any]] = [{"model": str(model)}] if model else []
    for name in names:
        if "/" in name:
            rewards.append({"model": name})
        elif "." in name:
            rewards.append({"path": name})
        else:
            rewards.append({"trl": name, "args": {}})
    return rewards
