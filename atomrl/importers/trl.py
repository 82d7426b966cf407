"""TRL's GRPO: the Python file that calls `GRPOConfig`, the YAML of `trl grpo --config`, or a script with its flags.

TRL counts completions of one process, and its steps are optimizer steps.
"""

import ast
import math
import re
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError
from atomrl.importers.sources import Given, Name, read_calls, read_flags
from atomrl.importers.translation import Moves, Translation
from atomrl.importers.trl_objective import translate_objective

DEFAULTS: Given = {
    "learning_rate": 1e-6,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.0,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": True,
    "bf16": True,
    "seed": 42,
    "save_steps": 500,
    "logging_steps": 10,
    "eval_strategy": "no",
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
LORA_DEFAULTS: Given = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
"""Of TRL's command line."""
PEFT_DEFAULTS: Given = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Of `LoraConfig` itself."""
PEFT_NAMES = {"r": "lora_r", "target_modules": "lora_target_modules"}
MOVES: Moves = {
    "model.path": (("model_name_or_path", "model"), str),
    "model.gradient_checkpointing": ("gradient_checkpointing", bool),
    "data.shuffle": ("shuffle_dataset", bool),
    "data.max_prompt_tokens": ("max_prompt_length", int),
    "seed": ("seed", int),
    "rollout.completions_per_prompt": ("num_generations", int),
    "rollout.temperature": ("temperature", float),
    "rollout.top_p": ("top_p", float),
    "rollout.top_k": ("top_k", lambda k: max(0, int(k))),
    "rollout.max_completion_tokens": ("max_completion_length", int),
    "train.epochs_per_step": ("num_iterations", int),
    "train.rows_per_micro_batch": ("per_device_train_batch_size", int),
    "train.learning_rate": ("learning_rate", float),
    "train.weight_decay": ("weight_decay", float),
    "train.adam_beta1": ("adam_beta1", float),
    "train.adam_beta2": ("adam_beta2", float),
    "train.adam_eps": ("adam_epsilon", float),
    "train.max_grad_norm": ("max_grad_norm", float),
    "checkpoint.keep": ("save_total_limit", int),
    "eval.samples_per_prompt": ("num_generations_eval", int),
    "algorithm.entropy.coefficient": ("entropy_coef", float),
}
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}


def translate(path: Path, processes: int | None) -> Translation:
    """TRL's file as a translation; `processes` where the file does not say how many there are."""
    given, notes, found = _read(path)
    t = Translation("TRL", given, DEFAULTS)
    t.put("run_name", _run_name(t, path), "run_name", "output_dir")
    t.move(MOVES)
    said = processes or found
    if said is None:
        t.nearly("how many processes there are is not in the file: 1 was taken; --processes N says otherwise")
    _batches(t, said or 1)
    _schedule(t)
    _model(t)
    _data(t)
    translate_objective(t)
    _rewards(t)
    reported = t("report_to")
    sinks = [reported] if isinstance(reported, str) else reported or []
    known = [name for name in sinks if name in ("wandb", "tensorboard", "mlflow", "trackio")]
    t.put("tracking.sinks", known, "report_to")
    for note in notes:
        t.nearly(note)
    return t


def _read(path: Path) -> tuple[Given, list[str], int | None]:
    if path.suffix != ".py":
        given, notes, launcher = read_flags(path, r"(^|/)trl$|\.py$|^trl\.")
        given = {key.replace("-", "_"): value for key, value in given.items() if key != "config"}
        return given, notes, _processes({key.replace("-", "_"): v for key, v in launcher.items()} | given, given)
    calls, notes = read_calls(path, "GRPOConfig", "GRPOTrainer", "LoraConfig", "load_dataset")
    if "GRPOConfig" not in calls:
        raise ConfigError(f"{path} calls no GRPOConfig(...)")
    given = dict(calls["GRPOConfig"])
    if output := given.pop("0", None):
        given["output_dir"] = output
    trainer = {
        key: value for key, value in calls.get("GRPOTrainer", {}).items() if key in ("model", "reward_funcs", "0", "1")
    }
    given |= {{"0": "model", "1": "reward_funcs"}.get(key, key): value for key, value in trainer.items()}
    if isinstance(given.get("model"), Name):
        notes.append(f"GRPOTrainer(model={given.pop('model')}) is made elsewhere; give model.path")
    if "load_dataset" in calls and "0" in calls["load_dataset"]:
        given["dataset_name"] = calls["load_dataset"]["0"]
    if "LoraConfig" in calls:
        lora = PEFT_DEFAULTS | {PEFT_NAMES.get(key, key): value for key, value in calls["LoraConfig"].items()}
        given |= lora | {"use_peft": True}
        for key in ("task_type", "bias"):  # of a causal model, and none
            given.pop(key, None)
    return given, notes, None


def _processes(flags: Given, own: Given) -> int | None:
    """How many processes a launcher's flags say; `num_processes` is no key of TRL's config."""
    own.pop("num_processes", None)
    if "num_processes" in flags:  # of all machines
        found = flags["num_processes"]
    else:
        found, machines = flags.get("nproc_per_node"), flags.get("nnodes", 1)
        found = found * machines if isinstance(found, int) and isinstance(machines, int) else None
    return found if isinstance(found, int) else None


def _run_name(t: Translation, path: Path) -> str:
    name = t("run_name") or (Path(str(t("output_dir"))).name if t("output_dir") else path.stem)
    return re.sub(r"[/\\]", "-", str(name)).lstrip(".")


def _batches(t: Translation, processes: int) -> None:
    """TRL's batches of one process and steps of the optimizer as prompts, completions and steps of ours."""
    each, accumulated = t.whole("per_device_train_batch_size"), t.whole("gradient_accumulation_steps")
    n, iterations = t.whole("num_generations"), t.whole("num_iterations")
    per_update = each * processes * accumulated
    generated = t("generation_batch_size")
    if generated is None:
        steps = accumulated if t("steps_per_generation") is None else t.whole("steps_per_generation")
        generated = each * processes * steps
    else:
        generated = t.whole("generation_batch_size")
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

    if (given := t.whole("max_steps")) > 0:
        rest = f"a step is {updates} optimizer steps; the last is whole" if given % updates else ""
        t.put("train.steps", math.ceil(given / updates), "max_steps", because=rest)
        t.name_of(["num_train_epochs"])
    else:
        t.put("train.total_epochs", t.number("num_train_epochs"), "num_train_epochs")
    _every(t, "checkpoint.every_steps", "save_steps", updates, on=t("save_strategy") not in ("no", "epoch"))
    evaluates = t("eval_strategy") == "steps"
    often = "logging_steps" if evaluates and t("eval_steps") is None else "eval_steps"
    _every(t, "eval.every_steps", often, updates, on=evaluates)
    t.put("eval.before", bool(t("eval_on_start")), "eval_on_start")
    t.put("eval.temperature", t.number("temperature"), "temperature")
    if not t.is_given("save_total_limit"):
        t.nearly("save_total_limit=None keeps all checkpoints; here checkpoint.keep is 2")
    if generated > per_update and t("loss_type") in ("dapo", "cispo"):
        t.nearly(
            f"loss_type={t('loss_type')}: TRL divides each optimizer step's sum by the tokens of the whole generation, "
            f"which are those of {generated // per_update} optimizer steps, here by its own"
        )


def _every(t: Translation, key: str, name: str, updates: int, on: bool) -> None:
    """So many optimizer steps as steps of ours; 0 where it is not on."""
    every = t(name)
    if not on or every is None:
        t.put(key, 0, name)
    elif 0 < float(every) < 1:
        t.leave(name, "a share of all steps; give a number of steps")
    else:
        rest = f"optimizer steps; {updates} are a step" if int(every) % updates else ""
        t.put(key, max(1, round(int(every) / updates)), name, because=rest)


def _schedule(t: Translation) -> None:
    t.put("train.schedule", t.choice("lr_scheduler_type", t("lr_scheduler_type"), SCHEDULES), "lr_scheduler_type")
    warmup = t("warmup_steps")
    if warmup and float(warmup) >= 1:
        total = t.whole("max_steps")
        ratio = min(1.0, float(warmup) / total) if total > 0 else 0.0
        why = "of max_steps" if total > 0 else "a share of all updates here; give it once they are known"
        t.put("train.warmup_ratio", round(ratio, 6), "warmup_steps", because=why)
    else:
        t.put("train.warmup_ratio", float(warmup or t("warmup_ratio")), "warmup_steps", "warmup_ratio")


def _model(t: Translation) -> None:
    t.put("model.dtype", "bfloat16" if t("bf16") else "float32", "bf16")
    t.leave("trust_remote_code", "code of a model is only run where you write model.trust_remote_code yourself")
    if t("use_peft"):
        t.defaults = {**t.defaults, **LORA_DEFAULTS}
        t.move(
            {
                "model.lora.rank": ("lora_r", int),
                "model.lora.alpha": ("lora_alpha", float),
                "model.lora.dropout": ("lora_dropout", float),
                "model.lora.target_modules": (
                    "lora_target_modules",
                    lambda names: names if names == "all-linear" else list(names),
                ),
            }
        )
        if t("lora_target_modules") is None:
            t.nearly("lora_target_modules=None takes what peft knows of the model; here all linear layers")


def _data(t: Translation) -> None:
    name = t("dataset_name")
    if name is not None:
        file = str(name).rpartition("/")[2] + ".parquet"
        t.put(
            "data.train",
            file,
            "dataset_name",
            because="nothing is downloaded: write it once with datasets.load_dataset(...).to_parquet(...)",
        )
    else:
        t.put("data.train", "train.parquet", because="the file does not name its data; name the file of its rows")
    t.put(
        "data.answer_field",
        None,
        because="TRL gives every column to the rewards, as is done here; name one if yours needs it",
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
