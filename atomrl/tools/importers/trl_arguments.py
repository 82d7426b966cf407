"""Translate the arguments that TRL's trainers share: `TrainingArguments`, model, data, objective and rewards."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError
from atomrl.config.adapters import HEADS
from atomrl.tools.importers.sources import Settings, hub_source
from atomrl.tools.importers.translation import TEMPLATE, Moves, Translation

# --------------------------------------------------------------------------------------------------------------------
# Arguments that are not translated: irrelevant ones with the reason, and those that are refused if they are on.

LOGGING = "metrics.jsonl has every step"
COMPLETIONS = "completions of each step are in the run's folder: atomrl rollouts"
LOADING = "how rows are loaded; the rows are the same"
KERNEL = "an implementation choice; AtomRL has its own kernels"
SHARDS = "how processes share the model: section backend (docs/guides/multi_gpu.md)"
SERVER = "an option of TRL's vLLM; section rollout sets where completions are sampled"
UPLOAD = "nothing is uploaded: use atomrl export, then huggingface-cli upload"
SAVING = "checkpoints have model, optimizer and progress (docs/guides/checkpoints.md)"
EVALUATION = "section eval sets how evaluation computes"
REFERENCE = "for sync_ref_model, which is off"
ENTROPY = "for use_adaptive_entropy, which is off"
PADDING = "rows are packed, without padding"


def _of(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


WITHOUT_MEANING: Mapping[str, str] = {
    **_of(LOGGING, """
        logging_steps logging_first_step logging_strategy logging_dir logging_nan_inf_filter log_level log_level_replica
        log_on_each_node disable_tqdm include_num_input_tokens_seen include_tokens_per_second project trackio_space_id
        trackio_bucket_id trackio_static_space_id skip_memory_metrics debug"""),
    **_of(COMPLETIONS, """
        log_completions num_completions_to_print log_unique_prompts wandb_log_unique_prompts log_multimodal
        log_completions_steps num_sample_generations generate_during_eval"""),
    **_of(LOADING, """
        dataset_num_proc dataset_kwargs dataset_streaming dataloader_drop_last dataloader_num_workers
        dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order
        dataloader_multiprocessing_context remove_unused_columns label_names group_by_length length_column_name
        train_sampling_strategy ignore_data_skip"""),
    **_of(KERNEL, """
        tf32 use_liger torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config
        attn_implementation torch_empty_cache_steps gradient_checkpointing_kwargs use_cache low_cpu_mem_usage device_map
        jit_mode_eval cache_implementation auto_find_batch_size use_transformers_continuous_batching
        bnb_4bit_quant_storage
        bnb_4bit_compute_dtype transformers_continuous_batching_config use_transformers_paged full_determinism
        local_rollout_forward_batch_size"""),
    **_of(SHARDS, """
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp
        fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap deepspeed accelerator_config
        parallelism_config
        local_rank ds3_gather_for_generation accelerate_config average_tokens_across_devices ignore_bias_buffers"""),
    **_of(SERVER, """
        vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
        vllm_group_port vllm_device vllm_dtype
        vllm_tensor_parallel_size vllm_max_model_length vllm_enable_sleep_mode"""),
    **_of(UPLOAD, """
        push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
        log_completions_hub_repo hub_model_revision overwrite_hub_revision push_to_hub_revision"""),
    **_of(SAVING, """
        save_only_model save_on_each_node save_safetensors overwrite_output_dir enable_jit_checkpoint
        restore_callback_states_from_checkpoint"""),
    **_of(EVALUATION, """
        per_device_eval_batch_size eval_accumulation_steps eval_delay eval_do_concat_batches eval_use_gather_object
        batch_eval_metrics prediction_loss_only include_for_metrics do_train do_eval do_predict bf16_full_eval
        fp16_full_eval eval_packing"""),
    **_of(REFERENCE, "ref_model_mixup_alpha ref_model_sync_steps"),
    **_of(ENTROPY, "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"),
    **_of(PADDING, "pad_token pad_to_multiple_of padding_free pad_token_id padding_value"),
    **_of("for loss_type=vespo, which is off", "vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg"),
    **_of("the reference's log-probs are computed in each step, with the same values",
          "precompute_ref_log_probs precompute_ref_batch_size"),
    **_of("checkpoint.keep_best keeps the best one, by the name of a metric here",
          "load_best_model_at_end metric_for_best_model greater_is_better"),
    "use_bnb_nested_quant": "the scales of the 4 bits are not quantised again, which is more exact",
    "bnb_4bit_use_double_quant": "the scales of the 4 bits are not quantised again, which is more exact",
    "test_split_size": "rows are not split here: set data.eval to the held-out rows",
    "streaming": LOADING,
    "resume_from_checkpoint": "--resume continues a run",
    "eos_token": "rows of messages end as the chat template writes them, rows of text with the tokenizer's eos_token",
    "data_seed": "seed sets the order of the rows too",
    "lora_task_type": "an option of peft's class, not of the adapters",
    "task_type": "an option of peft's class, not of the adapters",
    "inference_mode": "an option of peft's class, not of the adapters",
    "router_aux_loss_coef": "the load-balancing loss of experts is not computed; other models have none",
    "max_tool_calling_iterations": "there are no tools to call",
    "cast_lm_head_to_fp32": "the output matrix computes in model.dtype; log-probs are float32",
    "sapo_temperature_neg": "for loss_type=sapo, which is off",
    "sapo_temperature_pos": "for loss_type=sapo, which is off",
}  # fmt: skip
"""Arguments that do not affect what is trained -> reason."""

REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "repetition_penalty": ((None, 1, 1.0), "completions are sampled from the unmodified model"),
    "vllm_structured_outputs_regex": ((None,), "completions are sampled from the unmodified model"),
    "vllm_guided_decoding_regex": ((None,), "completions are sampled from the unmodified model"),
    "vllm_sampling_params": ((None,), "set temperature, top_p, top_k, min_p and generation_kwargs"),
    "use_adaptive_entropy": ((None, False), "the coefficient of the entropy is constant here"),
    "sync_ref_model": ((None, False), "the reference model is fixed here"),
    "neftune_noise_alpha": ((None, 0, 0.0), "noise on embeddings is not supported"),
    "label_smoothing_factor": ((None, 0, 0.0), "label smoothing is not supported"),
    "optim_args": ((None,), "AdamW is set by train.adam_*"),
    "optim_target_modules": ((None,), "all weights have the same optimizer"),
    "use_dora": ((None, False), "adapters are plain LoRA"),
    "lora_target_parameters": ((None, []), "adapters are on linear layers"),
    "lora_bias": ((None, "none"), "only the adapters are trained"),
    "layers_to_transform": ((None,), "adapters are on all layers: select modules with model.lora.target_modules"),
    "rank_pattern": ((None, {}), "all adapters have the same rank"),
    "alpha_pattern": ((None, {}), "all adapters have the same scale"),
    "init_lora_weights": ((None, True), "adapters are initialized to zero"),
    "bnb_4bit_quant_type": ((None, "nf4"), "4 bits are nf4 here"),
    "is_encoder_decoder": ((None, False), "models are decoders"),
    "model_adapter_name": ((None,), "a model has one adapter, which is trained"),
    "ref_adapter_name": ((None,), "the reference is the model without its adapter"),
    "vllm_sync_frequency": ((None, 1), "the engine gets the weights of every step"),
    "teacher_model_revision": ((None, "main"), "download that revision and give its folder"),
}
"""Arguments that affect what is trained and have no counterpart -> values with which they are off, and the reason."""


# --------------------------------------------------------------------------------------------------------------------
# TRL's objective: advantage, policy loss, KL and correction of rollouts, on the axes of an algorithm.

AGGREGATIONS = {
    "grpo": "sequence_mean",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "constant_length",
    "cispo": "token_mean",
    "sapo": "sequence_mean",
}
CORRECTIONS = {
    "sequence_mask": "sequence_mis",
    "sequence_truncate": "sequence_tis",
    "token_mask": "token_mis",
    "token_truncate": "token_tis",
}


def translate_objective(t: Translation, updates: int) -> None:
    """Translate GRPO's objective: the section `algorithm`.

    Args:
        updates: optimizer steps on the completions of a generation.
    """
    loss = t("loss_type")
    kind = t.choice("loss_type", loss, AGGREGATIONS)
    t.put("algorithm.name", "grpo")
    _advantage(t)
    level = t.choice(
        "importance_sampling_level", t("importance_sampling_level"), {"token": "token", "sequence": "sequence"}
    )
    t.put(
        "algorithm.ratio",
        {"type": "token", "clamp": None}
        if level == "token"
        else {"type": level, "length_normalised": True, "clamp": None},
        "importance_sampling_level",
    )
    _clip(t, loss)
    length = {"length": t.integer("max_completion_length")} if kind == "constant_length" else {}
    t.put("algorithm.loss_agg", {"type": kind, **length}, "loss_type")
    if loss == "bnpo":
        t.differ("loss normalisation", "by the tokens of a forward pass", "by the tokens of the optimizer step")
    corrected = t.flag("use_bias_correction_kl")
    beta = {"type": "k3", "coefficient": t.number("beta"), "apply_to": "loss", "k2_gradient": corrected, "target": None}
    t.put("algorithm.kl", beta, "beta", "use_bias_correction_kl")
    if corrected and beta["coefficient"] and updates > 1:
        t.differ(
            "gradient of the KL after the first update of a generation (use_bias_correction_kl)",
            "times the importance ratio",
            "without it",
        )
    if t.flag("mask_truncated_completions"):
        t.put("algorithm.shaping.mask_truncated", True, "mask_truncated_completions")
    _rollout_correction(t)
    if (share := t.number("top_entropy_quantile")) < 1:
        t.put("algorithm.token_filter", {"type": "high_entropy", "fraction": share}, "top_entropy_quantile")


def _clip(t: Translation, loss: Any) -> None:
    """Set the clip. TRL reads epsilon_high as the bound of the ratio for CISPO, else as its distance from 1."""
    low = t.number("epsilon")
    high = low if t("epsilon_high") is None else t.number("epsilon_high")
    names = ["loss_type", "epsilon", "epsilon_high", "delta"]
    delta = None if t("delta") is None else t.number("delta")
    if loss == "cispo":
        if high < 1:
            raise t.refuse("epsilon_high", high, "with loss_type=cispo it is the bound of the ratio itself, usually 5")
        clip: dict[str, Any] = {"type": "cispo", "low": 1.0, "high": round(high - 1, 12)}
    elif loss == "sapo":
        clip = {
            "type": "sapo",
            "tau_positive": t.number("sapo_temperature_pos"),
            "tau_negative": t.number("sapo_temperature_neg"),
        }
        names += ["sapo_temperature_pos", "sapo_temperature_neg"]
    else:
        clip = {"type": "ppo", "low": low, "high": high, "dual": delta}
    t.name_of(["sapo_temperature_pos", "sapo_temperature_neg"])
    t.put("algorithm.clip", clip, *names)


def translate_rloo_objective(t: Translation) -> None:
    """Translate RLOO's objective: sequence-level ratio, KL in the reward, leave-one-out baseline."""
    t.put("algorithm.name", "rloo")
    if t.flag("normalize_advantages"):
        raise t.refuse(
            "normalize_advantages", True, "advantages of rloo are not normalised here; GRPO has scale_rewards"
        )
    t.put("algorithm.advantage", {"type": "rloo"})
    low = t.number("epsilon")
    high = low if t("epsilon_high") is None else t.number("epsilon_high")
    t.put("algorithm.clip", {"type": "ppo", "low": low, "high": high, "dual": None}, "epsilon", "epsilon_high")
    t.put("algorithm.ratio", {"type": "sequence", "length_normalised": False, "clamp": None})
    t.put("algorithm.loss_agg", {"type": "sequence_mean"})
    kl = {"type": "k1", "coefficient": t.number("beta"), "apply_to": "reward", "k2_gradient": False, "target": None}
    t.put("algorithm.kl", kl, "beta")
    if t("reward_clip_range") is not None:
        lowest, highest = t.numbers("reward_clip_range", 2)
        t.put("algorithm.shaping", {"lowest": lowest, "highest": highest}, "reward_clip_range")
    if t.flag("mask_truncated_completions"):
        t.put("algorithm.shaping.mask_truncated", True, "mask_truncated_completions")
    put_engine(t)


def put_engine(t: Translation) -> None:
    """Set `rollout.engine` by `use_vllm`."""
    if t.flag("use_vllm"):
        t.put_engine("use_vllm")
    else:
        t.put("rollout.engine", "auto", "use_vllm")


def _advantage(t: Translation) -> None:
    names = ("scale_rewards", "multi_objective_aggregation")
    scale, objectives = t("scale_rewards"), t("multi_objective_aggregation")
    scale = ("group" if scale else "none") if scale is None or isinstance(scale, bool) else scale
    if objectives == "normalize_then_sum":
        t.put("algorithm.advantage", {"type": "gdpo", "eps": 1e-4}, *names)
    else:
        kinds: dict[str, dict[str, Any]] = {
            "group": {"type": "grpo", "eps": 1e-4},
            "batch": {"type": "grpo_batch_std", "eps": 1e-4},
            "none": {"type": "grpo_no_std"},
        }
        t.put("algorithm.advantage", t.choice("scale_rewards", scale, kinds), *names)


def _rollout_correction(t: Translation) -> None:
    names = [
        "use_vllm",
        *(f"vllm_importance_sampling_{part}" for part in ("correction", "mode", "clip_max", "clip_min")),
    ]
    used, on, mode = t.flag(names[0]), t.flag(names[1]), t(names[2])
    parts: list[dict[str, Any]] = []
    if used and on:
        kind = t.choice("vllm_importance_sampling_mode", mode, CORRECTIONS)
        most = "vllm_importance_sampling_cap" if t.is_set("vllm_importance_sampling_cap") else names[3]
        high = 1e30 if t(most) is None else t.number(most)
        parts.append({"type": kind, "high": high, "low": 0.0 if t(names[4]) is None else t.number(names[4])})
    t.name_of([*names, "vllm_importance_sampling_cap"])
    put_engine(t)
    if t("off_policy_mask_threshold") is not None:
        parts.append({"type": "off_policy_sequences", "bound": t.number("off_policy_mask_threshold")})
        names.append("off_policy_mask_threshold")
    if parts:
        t.put("algorithm.rollout_is", parts, *names)


# --------------------------------------------------------------------------------------------------------------------
# Rows and rewards of a TRL script, as sections of a config.

_HEAD = '''
def {name}(prompts, completions, **columns):
    """{doc}"""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
'''
WRITTEN = {
    "think_format_reward": _HEAD.format(
        name="think_format_reward", doc="1 for a text that begins with <think>, opens it once, and closes it."
    )
    + """    opened = [text.startswith("<think>") and text.count("<think>") == 1 for text in texts]
    return [float(good and "</think>" in text) for good, text in zip(opened, texts, strict=True)]
""",
    "format": _HEAD.format(
        name="open_r1_format", doc="1 if <think> and then <answer> hold the text, each tag on its own line."
    )
    + """    layout = re.compile(r"<think>\\n.*?\\n</think>\\n<answer>\\n.*?\\n</answer>$", re.DOTALL | re.MULTILINE)
    return [float(layout.match(text) is not None) for text in texts]
""",
    "tag_count": _HEAD.format(
        name="open_r1_tag_count", doc="A quarter for each of the four tags that occurs once, with its line breaks."
    )
    + """    tags = ("<think>\\n", "\\n</think>\\n", "\\n<answer>\\n", "\\n</answer>")
    return [sum(0.25 for tag in tags if text.count(tag) == 1) for text in texts]
""",
    "code": """
from time import monotonic

from atomrl.sandbox import Limits, check, run

check("bubblewrap")  # an error before the run

"""
    + _HEAD.format(
        name="open_r1_code",
        doc="The share of verification_info's test cases that the last block of Python passes, in a sandbox.\n\n"
        "    It is 0 if a case takes over 5 s, or all of them over 30 s. Lines beyond the shorter output are ignored.\n"
        "    ",
    )
    + """    scores = []
    for text, info in zip(texts, columns["verification_info"], strict=True):
        program = (re.findall(r"```python\\n(.*?)```", text, re.DOTALL) or [""])[-1]
        passed, end = 0, monotonic() + 30
        for case in info["test_cases"]:
            result = run(program, stdin=case["input"], limits=Limits(wall_s=5.0, cpu_s=5))
            if result.ended == "timeout" or monotonic() > end:
                passed = 0
                break
            lines = zip(result.stdout.strip().split("\\n"), case["output"].split("\\n"))
            passed += result.ok and all(one.strip() == other.strip() for one, other in lines)
        scores.append(passed / len(info["test_cases"]))
    return scores
""",
    "code_format": _HEAD.format(
        name="open_r1_code_format", doc="1 for the layout of `format`, with a block of Python in the answer."
    )
    + """    layout = re.compile(
        r"^<think>\\n.*?\\n</think>\\n<answer>\\n.*?```python.*?```.*?\\n</answer>$", re.DOTALL | re.MULTILINE
    )
    return [float(layout.match(text) is not None) for text in texts]
""",
    "reasoning_steps": _HEAD.format(
        name="open_r1_reasoning_steps",
        doc="A third for each numbered step, list item, and word such as First; at most 1.",
    )
    + """    step = re.compile(r"Step \\d+:|^\\d+\\.|\\n-|\\n\\*|(?:First|Second|Next|Finally),")
    return [min(1.0, len(step.findall(text)) / 3) for text in texts]
""",
}
"""Rewards of TRL and open-r1 by name -> the source of a function."""


def put_rewards(t: Translation, rewards: list[dict[str, Any]], out: Path) -> None:
    """Write `reward.functions`.

    Args:
        rewards: each `{"trl": name}`, `{"path": dotted path of a function}` or `{"model": path}`.
        out: path of the config; a file next to it gets the functions that are written for it.
    """
    weights, given = [1.0] * len(rewards), t("reward_weights")
    if given is not None:
        weights = t.numbers("reward_weights", len(given) if isinstance(given, list | tuple) else 1)
    if len(weights) != len(rewards):
        raise ConfigError(
            f"{t.named('reward_weights')}={weights} has {len(weights)} weights for {len(rewards)} rewards"
        )
    functions: list[dict[str, Any]] = []
    own, needs = f"./{out.stem}_rewards.py", list[str]()
    for reward, weight in zip(rewards, weights, strict=True):
        if "model" in reward:
            item: dict[str, Any] = {"function": "reward_model", "args": {"path": reward["model"]}}
        elif "path" in reward:
            item = {"function": reward["path"], "completions": "messages"}
        else:
            item = trl_reward(t, reward["trl"], own, needs)
        functions.append(item | ({"weight": float(weight)} if float(weight) != 1.0 else {}))
    if not functions:
        raise ConfigError(
            f"{t.path} names no reward: give reward_funcs, or convert the script that has it: atomrl run SCRIPT.py "
            "--config-out X.yaml"
        )
    if needs:
        head = '"""Rewards written by atomrl import."""\n\nimport re\n\n'
        t.files[f"{out.stem}_rewards.py"] = head + "\n".join(needs)
    t.put("reward.functions", functions, "reward_funcs", "reward_model_name_or_path", "reward_weights")


def trl_reward(t: Translation, name: str, own: str, needs: list[str]) -> dict[str, Any]:
    """Translate a reward that TRL's and open-r1's scripts have by a name.

    Args:
        own: the file next to the config.
        needs: gets the source of what goes to that file.
    """
    if name in ("accuracy_reward", "reasoning_accuracy_reward", "accuracy"):
        t.put("data.answer_field", "solution", because=f"the column that {name} reads")
        theirs = "the first match of math-verify, and no value where the solution cannot be read"
        t.differ(f"reward {name}", theirs, "boxed: the last box; a solution that cannot be read is an error")
        if name == "reasoning_accuracy_reward":
            t.differ(f"reward {name}", "0 without </think>", "boxed reads the box wherever it is")
        return {"function": "boxed"}
    if name in WRITTEN:
        _check_code(t, name)
        if WRITTEN[name] not in needs:
            needs.append(WRITTEN[name])
        limit = {"timeout_s": 60.0} if name == "code" else {}
        return {"function": f"{own}:{'' if name.endswith('_reward') else 'open_r1_'}{name}", **limit}
    if name in ("get_soft_overlong_punishment", "soft_overlong_punishment"):
        most = 1280 if t("max_completion_len") is None else t.integer("max_completion_len")
        cache = 256 if t("soft_punish_cache") is None else t.integer("soft_punish_cache")
        return {"function": "length_penalty", "args": {"free_tokens": most - cache, "max_tokens": most}}
    supported = ("accuracy_reward", "reasoning_accuracy_reward", "get_soft_overlong_punishment", *WRITTEN)
    raise t.refuse(
        "reward_funcs", name, f"supported names of TRL and open-r1: {', '.join(supported)}, accuracy, "
        "soft_overlong_punishment; write this one as a function (docs/guides/rewards.md#code has a reward for programs)"
    )  # fmt: skip


def _check_code(t: Translation, name: str) -> None:
    """Report how open-r1's rewards for code differ, and refuse other languages."""
    if name == "code_format" and (language := t("code_language")) not in (None, "python"):
        raise t.refuse("code_language", language, "supported: python")
    if name == "code_format":
        t.differ(f"reward {name}", "the language of a column `language`, if there is one", "Python")
    if name == "code":
        provider = t("code_provider") or "e2b"
        t.differ(f"reward {name}", f"runs programs at {provider}", "runs them in the sandbox (docs/guides/sandbox.md)")
        t.leave("code_provider", "programs run in the sandbox (docs/guides/sandbox.md)")
        t.leave("parallel_code_exec_per_proc", "reward.workers is the number of programs at a time")
        t.leave("enforce_same_language", "programs are Python, as there")


DEFAULTS: Settings = {
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
    "optim": "adamw_torch_fused",
    "seed": 42,
    "save_steps": 500,
    "logging_steps": 10,
    "eval_strategy": "no",
}
"""Defaults of all trainers."""
LORA_DEFAULTS: Settings = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
"""Defaults of TRL's command line."""
MOVES: Moves = {
    "model.path": (("model_name_or_path", "model"), str),
    "model.gradient_checkpointing": ("gradient_checkpointing", bool),
    "seed": ("seed", int),
    "train.learning_rate": ("learning_rate", float),
    "train.weight_decay": ("weight_decay", float),
    "train.adam_beta1": ("adam_beta1", float),
    "train.adam_beta2": ("adam_beta2", float),
    "train.adam_eps": ("adam_epsilon", float),
    "checkpoint.keep": ("save_total_limit", int),
}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
}
OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw8bit"),
    "paged_adamw_8bit": "paged_adamw8bit",
}
NO_CLIP = 1e30
"""A limit that no gradient reaches, for TRL's `max_grad_norm=0`."""
SINKS = ("wandb", "tensorboard", "mlflow", "trackio")


def translate_shared(t: Translation, path: Path) -> None:
    """Translate what all trainers share: the run's name, optimizer, schedule, model, data and trackers."""
    t.reasons |= WITHOUT_MEANING
    for name, (off, why) in REFUSED.items():
        if t(name) not in off:
            raise t.refuse(name, t(name), why)
    t.put("run_name", _run_name(t, path), "run_name", "output_dir")
    if t("output_dir") and str(parent := Path(str(t("output_dir"))).parent) != ".":
        t.put("output_dir", str(parent), "output_dir")
    t.move(MOVES)
    optimizer = t.choice("optim", t("optim"), OPTIMIZERS)
    if optimizer != "adamw" and t.gpus is not None and t.gpus[0] > 1:
        t.differ("Adam's moments", f"8 bits ({t('optim')})", "float32, sharded: several GPUs do not support 8 bits")
        optimizer = "adamw"
    t.put("train.optimizer", optimizer, "optim")
    t.put("train.max_grad_norm", t.number("max_grad_norm") or NO_CLIP, "max_grad_norm")
    _schedule(t)
    _model(t)
    _data(t)
    reported = t("report_to")
    sinks = [reported] if isinstance(reported, str) else reported or []
    t.put("tracking.sinks", [name for name in sinks if name in SINKS], "report_to")
    if unknown := [str(name) for name in sinks if name not in (*SINKS, "none", "all")]:
        t.approximate(f"report_to: {', '.join(unknown)} has no counterpart; metrics.jsonl has every step")
    if not t.is_set("save_total_limit"):
        t.approximate("save_total_limit=None keeps all checkpoints; here checkpoint.keep is 2")


def _run_name(t: Translation, path: Path) -> str:
    name = t("run_name") or (Path(str(t("output_dir"))).name if t("output_dir") else path.stem)
    return re.sub(r"[/\\]", "-", str(name)).lstrip(".") or "run"


def _every(t: Translation, key: str, name: str, updates: int, on: bool) -> None:
    """Convert an interval in optimizer steps to steps; 0 if it is off."""
    every = t.number(name) if on and t(name) is not None else 0.0
    if not every:
        t.put(key, 0, name)
    elif 0 < every < 1:
        t.leave(name, "a fraction of all steps; use a number of steps")
    else:
        rest = f"optimizer steps; {updates} are a step" if int(every) % updates else ""
        t.put(key, max(1, round(int(every) / updates)), name, because=rest)


def _schedule(t: Translation) -> None:
    kind = str(t("lr_scheduler_type")).rpartition(".")[2].lower()
    t.put("train.schedule", t.choice("lr_scheduler_type", kind, SCHEDULES), "lr_scheduler_type")
    settings = t.mapping("lr_scheduler_kwargs")
    least = settings.pop("min_lr_rate", None)
    if settings.pop("min_lr", None) is not None:
        raise t.refuse("lr_scheduler_kwargs", t("lr_scheduler_kwargs"), "the minimum is a fraction here: min_lr_rate")
    if settings or (least is not None and kind != "cosine_with_min_lr"):
        raise t.refuse("lr_scheduler_kwargs", t("lr_scheduler_kwargs"), "schedules have only train.min_lr_ratio")
    if kind == "cosine_with_min_lr":
        t.put("train.min_lr_ratio", float(least or 0.0), "lr_scheduler_kwargs")
    warmup = t.number("warmup_steps") if t.is_set("warmup_steps") else 0.0
    if (warmup or t.number("warmup_ratio")) and kind != "constant":
        t.differ("first update of the warm-up", "a learning rate of 0", f"that of {t.library}'s second update")
    if kind == "constant":  # which has no warm-up in transformers
        t.put("train.warmup_ratio", 0.0, "lr_scheduler_type")
        t.name_of(["warmup_steps", "warmup_ratio"])
    elif warmup >= 1:
        t.put("train.warmup_updates", round(warmup), "warmup_steps")
    else:
        t.put("train.warmup_ratio", warmup or t.number("warmup_ratio"), "warmup_steps", "warmup_ratio")


def _model(t: Translation) -> None:
    for name, value in t.mapping("model_init_kwargs").items():
        t.settings.setdefault(name, value)
    if t.flag("fp16"):
        t.put("model.dtype", "auto", "fp16")
        t.name_of(["bf16"])  # scripts set both, one of them true
        t.differ(
            "precision", "float16 with a scaled loss", "bfloat16, or float32 on a GPU without it: there is no float16"
        )
    else:
        t.put("model.dtype", "bfloat16" if t.flag("bf16") else "float32", "bf16")
    if (revision := t("revision", "model_revision")) not in (None, "main") and "path" in t.tree["model"]:
        t.tree["model"]["path"] += f"@{revision}"
        t.carried.append(f"{t.given('model_revision')} -> model.path: {t.tree['model']['path']}")
    given = t("dtype", "torch_dtype")
    dtype = str(given or "float32").rpartition(".")[2]
    if given is not None and dtype not in ("float32", "auto", "None") and not t.flag("use_peft"):
        t.differ("weights that are trained", f"{dtype} (dtype)", "float32, cast to model.dtype for computing")
    if t.flag("use_cpu"):
        t.put("model.device", "cpu", "use_cpu")
    if t.flag("activation_offloading"):
        t.put("model.activation_offload", True, "activation_offloading")
    tokenizer = t("tokenizer", "tokenizer_name_or_path")
    if tokenizer is not None and tokenizer != t("model_name_or_path", "model"):
        t.put("model.tokenizer", str(tokenizer), "tokenizer", "tokenizer_name_or_path")
    for name, kind in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if t.flag(name):
            if not t.flag("use_peft"):
                raise t.refuse(name, True, "quantised weights are not trained: add adapters (peft_config)")
            t.put("model.quantization", kind, name)
    t.leave("trust_remote_code", "code of a model runs only if you set model.trust_remote_code yourself")
    t.name_of(["disable_dropout"])
    if not t.flag("use_peft"):
        t.reasons |= dict.fromkeys(
            (*LORA_DEFAULTS, "lora_target_modules", "lora_modules_to_save", "use_rslora"),
            "for adapters: use_peft is off",
        )
        return
    t.defaults = {**LORA_DEFAULTS, **t.defaults}
    if t.library == "LLaMA-Factory" and (start := t("adapter_name_or_path")) is not None:
        if "," in str(start):
            raise t.refuse("adapter_name_or_path", start, "give one folder of adapters, and merge the others first")
        t.put("model.lora.start", str(start), "adapter_name_or_path")
        if t.flag("disable_dropout"):
            t.put("model.lora.dropout", 0.0)
        for name in (*LORA_DEFAULTS, "lora_target_modules", "lora_modules_to_save", "use_rslora"):
            t.leave(name, "the adapters in adapter_name_or_path have their own")
        return
    rank, alpha = t.count("lora_r"), t.number("lora_alpha")
    rescaled = t.flag("use_rslora")
    t.put("model.lora.rank", rank, "lora_r")
    # A scale of alpha / sqrt(rank) there, of alpha / rank here.
    t.put("model.lora.alpha", alpha * math.sqrt(rank) if rescaled else alpha, "lora_alpha", "use_rslora")
    t.put("model.lora.dropout", 0.0 if t.flag("disable_dropout") else t.number("lora_dropout"), "lora_dropout")
    modules = t("lora_target_modules")
    if modules is None:
        t.approximate("lora_target_modules=None uses peft's defaults for the model; here all linear layers")
    else:
        one = isinstance(modules, str) and modules != "all-linear"
        t.put("model.lora.target_modules", [modules] if one else modules, "lora_target_modules")
    whole = t("lora_modules_to_save") or []
    whole = whole.split(",") if isinstance(whole, str) else whole
    if whole := [name.strip() for name in whole if name.strip() not in HEADS]:  # a reward model's head always is
        t.put("model.lora.modules_to_save", whole, "lora_modules_to_save")


def _data(t: Translation) -> None:
    t.chat_template_kwargs("chat_template_kwargs")
    t.refuse_set({"chat_template_path": TEMPLATE})
    name, files = t("dataset_name", "dataset_id_or_path"), t("data_files")
    mixed = t.mapping("dataset_mixture").get("datasets") or t("datasets")
    config, revision = t("dataset_config"), t("dataset_revision")
    if files is not None:
        t.put("data.train", files["train"] if isinstance(files, dict) else files, "data_files")
    elif isinstance(mixed, list) and mixed and all(isinstance(one, dict) for one in mixed):
        t.put("data.train", [_mixed(t, one) for one in mixed], "datasets", "dataset_mixture")
    elif mixer := t.mapping("dataset_mixer"):
        _mixer(t, mixer)
    elif name is not None:
        train, test = t("dataset_train_split") or "train", t("dataset_test_split") or "test"
        why = "" if "/" in str(name) else "a data set on the hub needs its owner: OWNER/NAME"
        names = ("dataset_name", "dataset_id_or_path", "dataset_config", "dataset_train_split")
        t.put("data.train", hub_source(str(name), config, train, revision), *names, because=why)
        if t("eval_strategy") != "no":
            test_name = str(t("eval_dataset_name") or name)
            t.put("data.eval", hub_source(test_name, config, test, revision), "dataset_test_split", because=why)
    else:
        t.put("data.train", "train.parquet", because="the file does not set its data; set the file of its rows")
        t.to_do.append("data.train: the file does not set its data: use the file of its rows, or its data set")


def _mixer(t: Translation, mixer: Mapping[str, Any]) -> None:
    """Translate `dataset_mixer` of alignment-handbook's first versions: a share of the training rows of each data set,
    the first ones, and all test rows."""
    splits, configs = t("dataset_splits") or ["train", "test"], t("dataset_configs") or [None] * len(mixer)
    names = ("dataset_mixer", "dataset_splits", "dataset_configs")
    if len(configs) != len(mixer) or not all("train" in split or "test" in split for split in splits):
        raise ConfigError(f"{t.named(names[0])}: needs a config for each data set, and splits named train or test")
    train, test = list[str](), list[str]()
    for (name, part), config in zip(mixer.items(), configs, strict=True):
        for split in splits:
            rows = f"[:{float(part):.0%}]" * ("train" in split and part != 1)
            (train if "train" in split else test).append(hub_source(name, config, split + rows))
        if part * 100 % 1:
            t.differ(f"rows of {name}", f"a share of {part:g}", f"{part:.0%}")
    t.put("data.train", train[0] if len(train) == 1 else train, *names)
    if test and t("eval_strategy") != "no":
        t.put("data.eval", test[0] if len(test) == 1 else test, *names)


def _mixed(t: Translation, one: Mapping[str, Any]) -> str:
    """Return the source of a data set of a mixture: TRL's `path`, `name`; `id`, `config`, `weight` of recipes."""
    if (path := one.get("path", one.get("id"))) is None:
        raise ConfigError(f"{t.path}: a data set of the mixture has neither path nor id: {dict(one)}")
    split, share = str(one.get("split") or "train"), one.get("weight")
    if share not in (None, 1):
        split = f"{split}[:{float(share):.0%}]"
        t.differ(f"rows of {path} (weight {share:g})", "a random sample", f"the first ones: {split}")
    return hub_source(str(path), one.get("name", one.get("config")), split)


def put_steps(t: Translation, updates: int) -> None:
    """Translate the number of steps and the intervals of saving and evaluating.

    Args:
        updates: optimizer steps per step.
    """
    if (updates_in_all := t.integer("max_steps")) > 0:
        rest = f"a step is {updates} optimizer steps; the last one is complete" if updates_in_all % updates else ""
        t.put("train.steps", math.ceil(updates_in_all / updates), "max_steps", because=rest)
        t.name_of(["num_train_epochs"])
    else:
        t.put("train.total_epochs", t.number("num_train_epochs"), "num_train_epochs")
    _every(t, "checkpoint.every_steps", "save_steps", updates, on=t("save_strategy") not in ("no", "epoch"))
    for name, key in (("save_strategy", "checkpoint.every_steps"), ("eval_strategy", "eval.every_steps")):
        if t(name) not in ("no", "steps"):
            t.leave(name, f"here it is by steps: {key}")
    evaluates = t("eval_strategy") == "steps"
    often = "logging_steps" if evaluates and t("eval_steps") is None else "eval_steps"
    _every(t, "eval.every_steps", often, updates, on=evaluates)
    t.put("eval.before", t.flag("eval_on_start"), "eval_on_start")
