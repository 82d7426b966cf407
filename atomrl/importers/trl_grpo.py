"""TRL's GRPO. It counts completions of one process, and its steps are optimizer steps."""

import ast
from typing import Any

from atomrl.config import ConfigError
from atomrl.importers.python_calls import Name
from atomrl.importers.sources import Given
from atomrl.importers.translation import Moves, Translation
from atomrl.importers.trl_objective import translate_objective
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
    "algorithm.entropy.coefficient": ("entropy_coef", float),
}


def translate(t: Translation, processes: int) -> None:
    """What is GRPO's own."""
    t.move(MOVES)
    if not t.is_given("max_prompt_length"):
        why = "TRL has no limit; longer prompts are left out here, so raise it to the longest one"
        t.put("data.max_prompt_tokens", 512, because=why)
    else:
        t.put("data.overlong_prompt", "truncate", "max_prompt_length")
    _batches(t, processes)
    t.put(
        "data.answer_field",
        None,
        because="TRL gives every column to the rewards, as is done here; name one if yours needs it",
    )
    translate_objective(t)
    _rewards(t)


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
            f"TRL's batches: a generation has {generated} completions, no multiple of num_generations={n} and of the "
            f"{per_update} completions of an optimizer step (per_device_train_batch_size={each} x {processes} "
            f"processes x gradient_accumulation_steps={accumulated})"
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
        t.nearly(
            f"loss_type={t('loss_type')}: TRL divides each optimizer step's sum by the tokens of the whole generation, "
            f"which are those of {generated // per_update} optimizer steps, here by its own"
        )


def _reward_names(given: Any) -> list[str]:
    """What is in `reward_funcs`: names of functions, and of models. Of a call, the function that makes the reward."""
    if not isinstance(given, Name):
        return [given] if isinstance(given, str) else list(given or [])
    node = ast.parse(given, mode="eval").body
    items = node.elts if isinstance(node, ast.List) else [node]
    called = [item.func if isinstance(item, ast.Call) else item for item in items]
    return [str(item.value) if isinstance(item, ast.Constant) else ast.unparse(item) for item in called]


def _rewards(t: Translation) -> None:
    model = t("reward_model_name_or_path")
    names = [*([str(model)] if model else []), *_reward_names(t("reward_funcs"))]  # in the order of the weights
    weights = t("reward_weights")
    weights = [1.0] * len(names) if weights is None else weights if isinstance(weights, list) else [weights]
    if len(weights) != len(names):
        t.nearly(f"reward_weights={weights} are not as many as the rewards that the file names: each has the weight 1")
        weights = [1.0] * len(names)
    functions: list[dict[str, Any]] = []
    for name, weight in zip(names, weights, strict=True):
        if "/" in name:
            function: dict[str, Any] = {"function": "reward_model", "args": {"path": name}}
        elif name == "accuracy_reward":
            function = {"function": "boxed"}
            t.put("data.answer_field", "solution", "reward_funcs", because="the column that accuracy_reward reads")
        else:
            function = {"function": name if "." in name else f"./my_rewards.py:{name}"}
        functions.append(function | ({"weight": float(weight)} if float(weight) != 1.0 else {}))
    if not functions:
        t.nearly("the file names no reward function; reward.functions is strict_math")
        return
    own = any("my_rewards.py" in item["function"] for item in functions)
    why = (
        "functions of the script go to my_rewards.py, beside this config; nothing of the script was run" if own else ""
    )
    t.put("reward.functions", functions, "reward_funcs", "reward_weights", "reward_model_name_or_path", because=why)
