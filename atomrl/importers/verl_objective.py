"""verl's objective: advantage, policy loss, KL and correction of rollouts, on the axes of an algorithm."""

from typing import Any

from atomrl.config import ConfigError
from atomrl.importers.translation import Translation

ACTOR = A = "actor_rollout_ref.actor."
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
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
LOSS_MODES = ("vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl")
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "constant_length",
    "seq-mean-token-sum-norm": "constant_length",
}
KLS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}

COV = {"fraction": "ratio", "low": "lb", "high": "ub"}


def translate_objective(t: Translation) -> None:
    """All of `algorithm` but the shaping of rewards."""
    _advantage(t)
    _policy_loss(t)
    _kl(t)
    _rollout_correction(t)


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
    if t.flag("algorithm.filter_groups.enable"):
        t.name_of(["algorithm.filter_groups.metric"])
        t.put("algorithm.group_filter", "mixed_outcomes", "algorithm.filter_groups.enable")
    t.put("algorithm.entropy.coefficient", t.number(A + "entropy_coeff"), A + "entropy_coeff")


def _policy_loss(t: Translation) -> None:
    mode = t.choice("policy_loss.loss_mode", t(A + "policy_loss.loss_mode"), {mode: mode for mode in LOSS_MODES})
    if t.is_given(A + "clip_ratio") and not t.is_given(A + "clip_ratio_low", A + "clip_ratio_high"):
        t.nearly(f"{A}clip_ratio={t(A + 'clip_ratio')}: verl reads clip_ratio_low and clip_ratio_high, by default 0.2")
    t.name_of([A + "clip_ratio"])
    low, high, c = (t.number(A + f"clip_ratio_{name}") for name in ("low", "high", "c"))
    cov = A + "policy_loss."
    token: dict[str, Any] = {"type": "token", "clamp": 20.0}
    plain: dict[str, Any] = {"type": "token", "clamp": None}
    bounds = {"low": low, "high": high}
    sapo = {"type": "sapo", "tau_positive": t.number(A + "tau_pos"), "tau_negative": t.number(A + "tau_neg")}
    ratio, clip = {
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
    }[mode]
    t.put("algorithm.ratio", ratio, cov + "loss_mode")
    t.put(
        "algorithm.clip",
        clip,
        cov + "loss_mode",
        A + "clip_ratio_low",
        A + "clip_ratio_high",
        A + "clip_ratio_c",
        A + "tau_pos",
        A + "tau_neg",
    )
    if mode == "clip_cov":
        tokens = {key: t.number(cov + f"clip_cov_{name}") for key, name in COV.items()}
        t.put(
            "algorithm.token_filter",
            {"type": mode, **tokens},
            cov + "clip_cov_ratio",
            cov + "clip_cov_lb",
            cov + "clip_cov_ub",
        )
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
        given = A + "loss_scale_factor" if t.is_given(A + "loss_scale_factor") else "data.max_response_length"
        length = t.count(given)
        t.put("algorithm.loss_agg", {"type": kind, "length": length}, name, A + "loss_scale_factor")
    else:
        t.put("algorithm.loss_agg", {"type": kind}, name)


def _kl(t: Translation) -> None:
    in_loss, in_reward = t.flag(A + "use_kl_loss"), t.flag("algorithm.use_kl_in_reward")
    if in_loss and in_reward:
        raise t.refuse(
            "use_kl_loss", "true beside algorithm.use_kl_in_reward=true", "the KL is in one of the two places here"
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


def _rollout_correction(t: Translation) -> None:
    c = "algorithm.rollout_correction."
    parts: list[dict[str, Any]] = []
    if t.flag(c + "bypass_mode"):
        raise t.refuse(c + "bypass_mode", True, "the trainer computes the log-probs of the old policy itself here")
    if level := t(c + "rollout_is"):
        low, _, high = str(t(c + "rollout_is_threshold")).rpartition("_")
        normalised = t.flag(c + "rollout_is_batch_normalize")
        if low:  # LOW_HIGH: weights beyond the bounds are 0
            kind = t.choice("rollout_is", level, {"token": "icepop", "sequence": "sequence_mis"})
            if normalised:
                raise t.refuse(
                    c + "rollout_is_batch_normalize", True, "weights with two bounds are not divided by a mean"
                )
            parts.append({"type": kind, "low": _threshold(t, low), "high": _threshold(t, high)})
        else:
            kind = t.choice("rollout_is", level, {"token": "token_tis", "sequence": "sequence_tis"})
            parts.append({"type": kind, "high": t.number(c + "rollout_is_threshold"), "normalised": normalised})
    t.refuse_given({"algorithm.rollout_is": "of an earlier verl; write algorithm.rollout_correction.rollout_is=token"})
    if t.is_given(A + "tis_imp_ratio_cap") and (cap := t.number(A + "tis_imp_ratio_cap")) > 0:  # of an earlier verl
        if level:
            raise t.refuse(A + "tis_imp_ratio_cap", cap, f"{c}rollout_is={level} is given beside it")
        parts.append({"type": "token_tis", "high": cap})
    if rejections := t(c + "rollout_rs"):
        options, limits = str(rejections).split(","), str(t(c + "rollout_rs_threshold")).split(",")
        if len(limits) not in (1, len(options)):
            raise ConfigError(
                f"{t.named(f'{c}rollout_rs')}={rejections} names {len(options)}, and rollout_rs_threshold="
                f"{','.join(limits)} has {len(limits)} thresholds: give one for each, or one for all"
            )
        for option, limit in zip(options, limits * len(options) if len(limits) == 1 else limits, strict=True):
            parts.append(_rejection(t, option.strip(), limit.strip()))
    t.name_of([c + name for name in ("rollout_is_threshold", "rollout_is_batch_normalize", "loss_type")])
    if parts:
        t.put(
            "algorithm.rollout_is",
            parts,
            A + "tis_imp_ratio_cap",
            *(
                c + n
                for n in (
                    "rollout_is",
                    "rollout_is_threshold",
                    "rollout_is_batch_normalize",
                    "rollout_rs",
                    "rollout_rs_threshold",
                )
            ),
        )


def _rejection(t: Translation, option: str, limit: str) -> dict[str, Any]:
    """`seq_mean_k3` and its like: rows or tokens that are left out."""
    levels = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}
    level, _, estimator = option.rpartition("_")
    if option == "seq_mean_k1":  # bounds of the geometric mean; a single one is the upper
        low, _, high = limit.rpartition("_")
        upper = _threshold(t, high)
        return {"type": "sequence_mask", "low": _threshold(t, low) if low else 1 / upper, "high": upper}
    if estimator != "k3" or level not in levels:
        raise t.refuse(
            "rollout_rs", option, "those that have one are seq_mean_k1, and k3 of tokens, sums, means, maxima"
        )
    return {"type": "kl_rejection", "bound": _threshold(t, limit), "level": levels[level], "estimator": "k3"}


def _threshold(t: Translation, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not found > 0:
        name = "algorithm.rollout_correction.rollout_rs_threshold"
        raise ConfigError(
            f"{t.named(name)}: rollout_rs needs a number above 0 (or, of seq_mean_k1, LOW_HIGH), not {text}"
        )
    return found
