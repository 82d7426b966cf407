"""What is known to be biased, unstable or without effect: one small rule for each, on an objective and a few facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atomrl.objective.compose import Objective

GROUP_BASELINES = {
    "grpo", "grpo_no_std", "rloo", "reinforce_pp_baseline", "opo", "gpg", "gdpo", "pass_at_k", "pass_at_k_analytic",
    "maxrl",
}  # fmt: skip
TRUST_REGIONS = {"ppo", "sapo", "gmpo", "dppo_tv", "dppo_kl"}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a config says beside the objective."""

    completions_per_prompt: int = 8
    updates_per_step: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    logprobs_over_kept: bool = False
    """Whether log-probs are over the tokens that top-p and top-k keep."""
    rollout_logprobs: bool = True
    """Whether the engine returns them."""
    reward_parts: int = 1
    """Parts that enter the sum."""
    max_completion_tokens: int = 48


def length_bias(o: Objective, f: Facts) -> str | None:
    by_row = o.ratio.type == "sequence" or o.clip.type == "gmpo"
    if o.aggregate.type == "sequence_mean" and not by_row:
        return "biased: a sequence mean weighs a token of a long completion less, so long wrong answers cost little"
    return None


def std_normalisation(o: Objective, f: Facts) -> str | None:
    if o.advantage.type == "grpo":
        return "biased: division by the group's deviation weighs prompts that are nearly always or never solved more"
    return None


def group_of_one(o: Objective, f: Facts) -> str | None:
    if f.completions_per_prompt == 1 and o.advantage.type in GROUP_BASELINES:
        return f"no effect: one completion per prompt has nothing to be compared with; {o.advantage.type} is always 0"
    return None


def k_of_group(o: Objective, f: Facts) -> str | None:
    if f.completions_per_prompt > 1 and o.advantage.parameters.get("k", 0) >= f.completions_per_prompt:
        k, n = o.advantage.k, f.completions_per_prompt
        return f"no effect: with k={k} of {n} completions per prompt every subset has the same best; advantages are 0"
    return None


def group_never_mixed(o: Objective, f: Facts) -> str | None:
    if f.completions_per_prompt == 1 and o.accept_group.type == "mixed_outcomes":
        return "no effect: groups of one are never mixed, so dynamic sampling would refuse all and stop the run"
    return None


def zero_kl(o: Objective, f: Facts) -> str | None:
    if o.kl.coefficient == 0 and o.kl != o.kl.__class__():
        return "no effect: kl.coefficient is 0, so the other settings of kl do nothing and no reference is loaded"
    return None


def nothing_to_learn(o: Objective, f: Facts) -> str | None:
    if o.distillation.coefficient:
        return None
    if o.distillation != o.distillation.__class__():
        return "no effect: distillation.coefficient is 0, so the other settings of distillation do nothing"
    if o.advantage.type == "none":
        return "no effect: advantage none learns nothing from rewards, and there is no distillation beside it"
    return None


def kl_gradient(o: Objective, f: Facts) -> str | None:
    if o.kl_in == "loss" and not o.kl.k2_gradient and o.kl.type in ("k1", "abs"):
        hides = "has a gradient of mean 0" if o.kl.type == "k1" else "has the gradient of no KL"
        return f"biased: {o.kl.type} in the loss {hides}; use k2 or k3, or k2_gradient"
    if o.kl_in == "loss" and o.kl.type == "k3" and not o.kl.k2_gradient:
        return "biased: k3's value is the reverse KL, its gradient is that of the forward KL; k2_gradient mends it"
    return None


def truncated_sampling(o: Objective, f: Facts) -> str | None:
    if (f.top_p < 1 or f.top_k) and not f.logprobs_over_kept:
        what = f"top_p={f.top_p}" if f.top_p < 1 else f"top_k={f.top_k}"
        mends = "no correction here knows of the cut" if o.correction.type != "none" else "and nothing corrects it"
        return (
            f"biased: {what} samples from fewer tokens than the log-probs are taken over, {mends}; "
            "rollout.logprobs_over=kept takes them over the same"
        )
    return None


def clip_without_effect(o: Objective, f: Facts) -> str | None:
    if f.updates_per_step == 1 and o.clip.type in TRUST_REGIONS:
        return f"no effect: with one update in a step the ratio is 1, and {o.clip.type} is plain REINFORCE"
    return None


def reinforce_off_policy(o: Objective, f: Facts) -> str | None:
    if f.updates_per_step > 1 and o.clip.type == "reinforce" and o.advantage.type != "none":
        return f"biased: {f.updates_per_step} updates in a step without a ratio; all but the first are off-policy"
    return None


def unbounded_ratio(o: Objective, f: Facts) -> str | None:
    bounded = o.selection.type == "kl_cov" or o.update.type == "trust_region"
    if f.updates_per_step > 1 and o.clip.type == "none" and not bounded:
        return "unstable: nothing bounds the ratio over several updates"
    return None


def unbounded_below(o: Objective, f: Facts) -> str | None:
    if o.clip.type == "ppo" and o.clip.dual is not None and o.clip.dual <= 1:
        return "no effect: a dual clip of at most 1 leaves negative advantages without a gradient; 3 is usual"
    return None


def width_of_clip(o: Objective, f: Facts) -> str | None:
    if o.clip.type != "ppo" or f.updates_per_step == 1:
        return None
    if o.ratio.type != "token" and getattr(o.ratio, "length_normalised", True) and o.clip.low >= 0.05:
        return "no effect: a completion's mean ratio moves by some 1e-4; a clip this wide never acts (GSPO: 3e-4, 4e-4)"
    if o.ratio.type == "token" and o.clip.high < 0.01:
        return "unstable: token ratios move by more than this; nearly every token is clipped after the first update"
    return None


def missing_rollout_logprobs(o: Objective, f: Facts) -> str | None:
    if o.correction.type != "none" and not f.rollout_logprobs:
        return f"an error when it runs: {o.correction.type} needs log-probs, which this engine does not return"
    return None


def mixed_levels(o: Objective, f: Facts) -> str | None:
    by_token = {"token_tis", "token_mis", "icepop"} & {part.type for part in o.correction.parts}
    if o.ratio.type == "sequence" and by_token:
        return "biased: a weight by token on a ratio by completion; sequence_tis is of one level with it"
    return None


def one_number_per_row(o: Objective, f: Facts) -> str | None:
    if (o.ratio.type == "sequence" or o.clip.type == "gmpo") and o.aggregate.type == "token_mean":
        return "biased: a completion's one ratio is counted once a token, so long completions weigh more"
    return None


def masked_penalty(o: Objective, f: Facts) -> str | None:
    if o.shaping.mask_truncated and o.shaping.soft_overlong:
        return "partly without effect: completions that are cut off have no loss, so the penalty only moves baselines"
    return None


def selected_share(o: Objective, f: Facts) -> str | None:
    if o.selection.type in ("high_entropy", "random"):
        return "note: the loss is still divided by all tokens, so the gradient is that much smaller"
    return None


def one_part(o: Objective, f: Facts) -> str | None:
    if o.advantage.type == "gdpo" and f.reward_parts == 1:
        return "no effect: gdpo with one reward is grpo, standardised over the batch once more"
    return None


def negative_mean(o: Objective, f: Facts) -> str | None:
    if o.advantage.type == "maxrl" and (o.shaping.soft_overlong or o.shaping.repetition_ngram_tokens):
        return "biased: maxrl divides by the mean reward, which penalties may bring to 0 or below (then it is left out)"
    return None


def greedy_sampling(o: Objective, f: Facts) -> str | None:
    if f.temperature == 0:
        return "no effect: at temperature 0 all completions of a prompt are the same, and no baseline leaves a signal"
    return None


def standardised_without_groups(o: Objective, f: Facts) -> str | None:
    if o.accept_group.type == "mixed_outcomes" and o.advantage.type not in GROUP_BASELINES:
        return f"biased: dynamic sampling leaves out groups that {o.advantage.type} would have learned from"
    return None


def discounted_away(o: Objective, f: Facts) -> str | None:
    gamma = o.advantage.parameters.get("gamma", 1.0)
    left = gamma**f.max_completion_tokens
    if left < 0.1:
        return f"biased: with gamma={gamma} a reward after {f.max_completion_tokens} tokens is {left:.1g} at the first"
    return None


def critic_far_away(o: Objective, f: Facts) -> str | None:
    if not o.has_critic or o.advantage.length_alpha is not None:
        return None
    weight = o.advantage.lam**f.max_completion_tokens
    if weight < 0.01:
        what = f"at the first of {f.max_completion_tokens} tokens the reward itself weighs {weight:.1g}"
        return f"biased: with lam={o.advantage.lam} {what}, the rest is the critic's word (length_alpha mends it)"
    return None


def value_without_critic(o: Objective, f: Facts) -> str | None:
    if not o.has_critic and o.value != o.value.__class__():
        return f"no effect: {o.advantage.type} reads no values, so there is no critic for the settings of value"
    return None


def untrained_critic(o: Objective, f: Facts) -> str | None:
    if o.has_critic and o.value.coefficient == 0:
        return "biased: value.coefficient is 0, so the critic stays what it starts as; a fresh one expects 0 everywhere"
    return None


def value_clip_without_effect(o: Objective, f: Facts) -> str | None:
    if o.has_critic and o.value.type == "clipped" and f.updates_per_step == 1:
        return "no effect: with one update in a step no value has moved yet, and the clip of values never acts"
    return None


def entropy_explosion(o: Objective, f: Facts) -> str | None:
    if o.entropy.coefficient >= 0.01:
        return "unstable: nothing bounds the bonus; over a large vocabulary entropy has exploded (arXiv:2505.22617)"
    return None


RULES: tuple[Callable[[Objective, Facts], str | None], ...] = (
    length_bias,
    std_normalisation,
    group_of_one,
    k_of_group,
    group_never_mixed,
    zero_kl,
    nothing_to_learn,
    kl_gradient,
    truncated_sampling,
    clip_without_effect,
    reinforce_off_policy,
    unbounded_ratio,
    unbounded_below,
    width_of_clip,
    missing_rollout_logprobs,
    mixed_levels,
    one_number_per_row,
    masked_penalty,
    selected_share,
    one_part,
    negative_mean,
    greedy_sampling,
    standardised_without_groups,
    discounted_away,
    critic_far_away,
    value_without_critic,
    untrained_critic,
    value_clip_without_effect,
    entropy_explosion,
)


def cautions(objective: Objective, facts: Facts) -> list[str]:
    """What the rules say of an objective under these facts.

    Example:
        >>> from atomrl.objective import Advantage
        >>> cautions(Objective(advantage=Advantage("rloo")), Facts(completions_per_prompt=1, updates_per_step=2))
        ['no effect: one completion per prompt has nothing to be compared with; rloo is always 0']
    """
    found = (rule(objective, facts) for rule in RULES)
    return [message for message in found if message is not None]
