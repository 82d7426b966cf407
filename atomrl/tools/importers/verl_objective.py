"""Translate verl's objective: advantage, policy loss, KL and correction of rollouts, on the axes of an algorithm."""

import math
import re
from typing import Any

from atomrl.config import ConfigError
from atomrl.tools.importers.translation import Translation

VERSION, OLD = "verl of August 2026", "verl 0.1"
A, C = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
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
    "optimal_token_baseline": "optimal_token_baseline",
    "tir_optimal_token_baseline": "optimal_token_baseline",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
LOSS_MODES = ("vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl")
D, TEACHER = "distillation.", r"distillation\.teacher_models\.\w+\.model_path"
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
    if t.flag(D + "enabled"):
        _distillation(t)
    else:
        _advantage(t)
        _policy_loss(t)
        _kl(t)
    _rollout_correction(t)


def updates_per_step(t: Translation) -> int:
    """Return the number of optimizer steps of one of verl's steps."""
    prompts, mini = t.integer("data.train_batch_size"), t.integer(A + "ppo_mini_batch_size")
    return max(1, prompts // max(1, mini) * t.integer(A + "ppo_epochs"))


def _distillation(t: Translation) -> None:
    """Translate on-policy distillation: a policy gradient with minus the distance to the teacher as the advantage."""
    loss = D + "distillation_loss."
    if t.flag(loss + "use_task_rewards"):
        raise t.refuse(loss + "use_task_rewards", True, "rewards and this distance do not add up to one loss here")
    if not t.flag(loss + "use_policy_gradient"):
        raise t.refuse(
            loss + "use_policy_gradient", False, "algorithm.name=gkd has a distance of its own, of whole distributions"
        )
    t.choice(loss + "loss_mode", t(loss + "loss_mode"), dict.fromkeys(("k1", "kl")))
    t.choice(loss + "policy_loss_mode", t(loss + "policy_loss_mode"), {"vanilla": "ppo"})
    if t.flag(C + "bypass_mode"):
        raise t.refuse(C + "bypass_mode", True, "with distillation the ratio is to the policy at the start of the step")
    paths = {name: value for name, value in t.settings.items() if re.fullmatch(TEACHER, name)}
    own = {name: path for name, path in paths.items() if ".teacher_model." not in name} or paths
    if len(own) != 1:
        raise t.refuse(D + "teacher_models", f"{len(own)} models", "a run has one teacher")
    ((name, path),) = own.items()
    t.put("teacher.path", str(path), name)
    t.put(
        "algorithm.name",
        "on_policy_distillation",
        D + "enabled",
        *(loss + key for key in ("use_policy_gradient", "use_task_rewards")),
    )
    t.put("algorithm.advantage", {"type": "reverse_kl"}, loss + "loss_mode")
    t.put("algorithm.ratio", {"type": "token", "clamp": 20.0}, loss + "policy_loss_mode")
    bounds = {"low": t.number(loss + "clip_ratio_low"), "high": t.number(loss + "clip_ratio_high")}
    clips = (loss + "clip_ratio_low", loss + "clip_ratio_high")
    t.put("algorithm.clip", {"type": "ppo", **bounds, "dual": 3.0}, loss + "policy_loss_mode", *clips)
    _aggregation(t, forced=False)
    if (most := t(loss + "loss_max_clamp")) is not None:
        t.differ("distance of a token to the teacher", f"at most {loss}loss_max_clamp={most}", "not bounded")
    if updates_per_step(t) > 1:
        t.differ("log-probs in this distance", "those of each update", "those at the start of the step")
    t.leave(loss + "log_prob_min_clamp", "for loss_mode=forward_kl_topk")
    t.leave(loss + "topk", "for loss_mode=forward_kl_topk")
    t.leave("algorithm.adv_estimator", "rewards are logged, and not trained on")


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
    loss_mode = t(A + "policy_loss.loss_mode", A + "loss_mode")
    mode = t.choice("policy_loss.loss_mode", loss_mode, {mode: mode for mode in LOSS_MODES})
    if t.flag(C + "bypass_mode"):  # it replaces the loss mode
        mode = t.choice(C + "loss_type", t(C + "loss_type"), {"ppo_clip": "vanilla", "reinforce": "gpg"})
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
    places = {key: [f"{place}clip_cov_{name}" for place in (cov, A)] for key, name in COV.items()}
    names = {key: str(t.name_of(name)) for key, name in places.items()}
    if mode == "clip_cov":
        tokens = {key: t.number(name) for key, name in names.items()}
        t.put("algorithm.token_filter", {"type": mode, **tokens}, *names.values())
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
    bypassed = t.flag(C + "bypass_mode")
    if bypassed:
        t.put("algorithm.old_policy", "rollout", C + "bypass_mode", C + "loss_type")
        if t.flag("algorithm.use_kl_in_reward"):
            t.differ("KL in the reward", "of the engine's log-probs", "of the trainer's")
    weights, rejections = _weights(t, bypassed), _rejections(t)
    if weights and not bypassed and "optimal_token_baseline" in str(t("algorithm.adv_estimator")):
        t.differ("energies of the baseline", "times the squared weights of rollout_is", "without weights")
    if rejections:
        t.differ("mean of the loss", "over the tokens that rollout_rs keeps", "over all trained tokens")
    t.name_of([C + name for name in ("rollout_is_threshold", "rollout_is_batch_normalize", "loss_type")])
    keys = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    if parts := [*weights, *rejections]:
        t.put("algorithm.rollout_is", parts, A + "tis_imp_ratio_cap", *(C + key for key in keys))


def _weights(t: Translation, bypassed: bool) -> list[dict[str, Any]]:
    """Return the importance weights; none where the ratio to the rollout policy contains them."""
    t.refuse_set({"algorithm.rollout_is": "from an earlier verl; use algorithm.rollout_correction.rollout_is=token"})
    level = t(C + "rollout_is")
    if t.is_set(A + "tis_imp_ratio_cap") and (cap := t.number(A + "tis_imp_ratio_cap")) > 0:  # of an earlier verl
        if level:
            raise t.refuse(A + "tis_imp_ratio_cap", cap, f"{C}rollout_is={level} is set too")
        return [{"type": "token_tis", "high": cap}]
    if level and bypassed and t(C + "loss_type") == "ppo_clip":
        t.leave(C + "rollout_is", "verl only logs it with bypass_mode and loss_type=ppo_clip")
        return []
    if not level:
        return []
    low, _, high = str(t(C + "rollout_is_threshold")).rpartition("_")
    normalised = t.flag(C + "rollout_is_batch_normalize")
    if low:  # LOW_HIGH: weights beyond the bounds are 0
        kind = t.choice("rollout_is", level, {"token": "icepop", "sequence": "sequence_mis"})
        if normalised:
            raise t.refuse(C + "rollout_is_batch_normalize", True, "weights with two bounds are not divided by a mean")
        return [{"type": kind, "low": _threshold(t, low), "high": _threshold(t, high)}]
    kind = t.choice("rollout_is", level, {"token": "token_tis", "sequence": "sequence_tis"})
    if normalised and bypassed:
        mean = "the mean weight of each forward pass"
        t.differ("importance weights", f"divided by {mean} (rollout_is_batch_normalize)", "not divided")
        normalised = False
    return [{"type": kind, "high": t.number(C + "rollout_is_threshold"), "normalised": normalised}]


def _rejections(t: Translation) -> list[dict[str, Any]]:
    if not (rejections := t(C + "rollout_rs")):
        return []
    # Hydra takes the quotes off values with commas.
    options, limits = (str(value).strip("'\"").split(",") for value in (rejections, t(C + "rollout_rs_threshold")))
    if len(limits) not in (1, len(options)):
        raise ConfigError(
            f"{t.named(f'{C}rollout_rs')}={rejections} names {len(options)}, and rollout_rs_threshold="
            f"{','.join(limits)} has {len(limits)} thresholds: use one for each, or one for all"
        )
    limits = limits * len(options) if len(limits) == 1 else limits
    return [_rejection(t, option.strip(), limit.strip()) for option, limit in zip(options, limits, strict=True)]


def _rejection(t: Translation, option: str, limit: str) -> dict[str, Any]:
    """Translate rejection such as `seq_mean_k3`: rows or tokens that are masked out."""
    levels = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}
    level, _, estimator = option.rpartition("_")
    if estimator not in ("k1", "k2", "k3") or level not in levels or option == "seq_max_k1":
        raise t.refuse(C + "rollout_rs", option, "supported: k1, k2 and k3 of tokens, sums and means; k2, k3 of maxima")
    if estimator != "k1":
        return {"type": "kl_rejection", "bound": _threshold(t, limit), "level": levels[level], "estimator": estimator}
    # Bounds of mu / pi_old; a single one is the upper.
    low, _, high = limit.rpartition("_")
    upper = _threshold(t, high)
    lower = _threshold(t, low) if low else 1 / upper
    if option == "seq_mean_k1":  # of the geometric mean
        return {"type": "sequence_mask", "low": 1 / upper, "high": 1 / lower}
    bounds = {"low": math.log(lower), "bound": math.log(upper)}
    return {"type": "kl_rejection", **bounds, "level": levels[level], "estimator": "k1"}


def _threshold(t: Translation, text: str) -> float:
    try:
        threshold = float(text)
    except ValueError:
        threshold = 0.0
    if not threshold > 0:
        name = "algorithm.rollout_correction.rollout_rs_threshold"
        raise ConfigError(f"{t.named(name)}: rollout_rs needs a number above 0 (or LOW_HIGH for k1), not {text}")
    return threshold
