"""TRL's objective: advantage, policy loss, KL and correction of rollouts, on the axes of an algorithm."""

from typing import Any

from atomrl.importers.translation import Translation

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


def translate_objective(t: Translation) -> None:
    """All of `algorithm`."""
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
    low = t.number("epsilon")
    high = low if t("epsilon_high") is None else t.number("epsilon_high")
    names = ["loss_type", "epsilon", "epsilon_high", "delta"]
    delta = None if t("delta") is None else t.number("delta")
    if loss == "cispo":
        if high < 1:
            raise t.refuse(
                "epsilon_high", high, "with loss_type=cispo it is the bound of the ratio itself, and usually 5"
            )
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
    length = {"length": t.whole("max_completion_length")} if kind == "constant_length" else {}
    t.put("algorithm.loss_agg", {"type": kind, **length}, "loss_type")
    if loss == "bnpo":
        t.differ("loss normalisation", "by the tokens of a forward pass", "by the tokens of the optimizer step")
    beta = {"type": "k3", "coefficient": t.number("beta"), "apply_to": "loss", "k2_gradient": False, "target": None}
    t.put("algorithm.kl", beta, "beta")
    if t.flag("mask_truncated_completions"):
        t.put("algorithm.shaping.mask_truncated", True, "mask_truncated_completions")
    _rollout_correction(t)
    if (share := t.number("top_entropy_quantile")) < 1:
        t.put("algorithm.token_filter", {"type": "high_entropy", "fraction": share}, "top_entropy_quantile")


def translate_rloo_objective(t: Translation) -> None:
    """All of `algorithm`: a ratio of whole completions, the KL in the reward, and the others' mean as the baseline."""
    t.put("algorithm.name", "rloo")
    if t.flag("normalize_advantages"):
        raise t.refuse(
            "normalize_advantages", True, "advantages of rloo are left as they are: scale_rewards of GRPO does"
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
    _engine(t)


def _engine(t: Translation) -> None:
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
        most = "vllm_importance_sampling_cap" if t.is_given("vllm_importance_sampling_cap") else names[3]
        high = 1e30 if t(most) is None else t.number(most)
        parts.append({"type": kind, "high": high, "low": 0.0 if t(names[4]) is None else t.number(names[4])})
    t.name_of([*names, "vllm_importance_sampling_cap"])
    _engine(t)
    if t("off_policy_mask_threshold") is not None:
        parts.append({"type": "off_policy_sequences", "bound": t.number("off_policy_mask_threshold")})
        names.append("off_policy_mask_threshold")
    if parts:
        t.put("algorithm.rollout_is", parts, *names)
