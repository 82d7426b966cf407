"""The rules: pure functions of a window of metrics, and the table of them.

A rule gets the training rows of a run, oldest first: all of a short run, of a long one the first 20 and the last 100
steps. It returns (what is wrong, what to try), or None. Thresholds are the constants beside the rule; where they have
a source it is named, all others are set so that healthy runs (docs/benchmarks.md) stay far from them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from atomrl.doctor.findings import MetricRows, Row, Severity, column, recent, shift

Verdict = tuple[str, str] | None


@dataclass(frozen=True)
class Rule:
    """A line of the table."""

    id: str
    severity: Severity
    holds: Callable[[MetricRows], Verdict]
    explained_by: frozenset[str] = frozenset()
    """Findings of which this one is a mere consequence: it is not named beside them."""


def skipped_updates(rows: MetricRows) -> Verdict:
    """An update was left out because its gradient was not finite."""
    skipped = sum(column(rows, "actor/skipped_updates"))
    if not skipped:
        return None
    return (
        f"{skipped:.0f} update(s) were left out because the gradient was NaN or infinite.",
        "a lower train.learning_rate; model.dtype=float32; and look for extreme rewards in rollouts/.",
    )


MISSING_SHARE = 0.01


def reward_failures(rows: MetricRows) -> Verdict:
    """Completions got no reward at all: they are left out, and the batch is smaller than it looks."""
    share = recent(rows, "reward/missing_ratio", 1)
    if not share or share[0] < MISSING_SHARE:
        return None
    failures = {
        name.removeprefix("reward/"): value
        for name, value in rows[-1].items()
        if name.startswith("reward/") and name.endswith(("/timeouts", "/errors", "/crashes", "/invalid")) and value
    }
    detail = f" ({', '.join(f'{name} {value:.0f}' for name, value in failures.items())})" if failures else ""
    return (
        f"{share[0]:.0%} of the completions have no reward{detail}: they are left out of training.",
        "`atomrl reward NAME rollouts/step_.../train.jsonl` with your function, to see the exception; make it return a "
        "number for every completion.",
    )


COLLAPSE_STEPS, COLLAPSE_SHARE, MIN_SCORE_RANGE = 3, 0.5, 0.05
MAX_KL, MAX_CLIPPED, CLIPPED_AT_KL = 0.2, 0.5, 0.02


def learning_rate_too_high(rows: MetricRows) -> Verdict:
    """The updates are too large: the reward fell by half or more and the policy changed its nature with it, or one
    step moves the policy further than the clipped objective is meant for.

    A KL of 0.2 within a step is over ten times the 0.01 to 0.02 at which PPO implementations stop early (Spinning Up's
    `target_kl`). A share of clipped tokens says so only where the policy has moved as well: the bounds of some
    algorithms (GSPO's are 3e-4) are made to act on most tokens.
    """
    rate = column(rows, "actor/lr")
    advice = f"a train.learning_rate ten times lower (now {rate[-1]:.1e})" if rate else "a lower train.learning_rate"
    advice += ", a longer train.warmup_ratio, a smaller train.max_grad_norm, or a KL penalty (algorithm.kl)."
    kl, clipped = recent(rows, "actor/ppo_kl", COLLAPSE_STEPS), recent(rows, "actor/pg_clipfrac", COLLAPSE_STEPS)
    moved = min(map(abs, kl), default=0.0)
    if moved > MAX_KL or (moved > CLIPPED_AT_KL and min(clipped or [0.0]) > MAX_CLIPPED):
        return f"Each step moves the policy too far (KL {kl[-1]:.2g}, {(clipped or [0.0])[-1]:.0%} clipped).", advice
    scores, low = recent(rows, "critic/score/mean", COLLAPSE_STEPS), column(rows, "critic/score/min")
    before = [row for row in rows[:-COLLAPSE_STEPS] if row.get("critic/score/mean") is not None]
    if not scores or not before or not low:
        return None
    best = max(before, key=lambda row: row["critic/score/mean"] or 0.0)
    top, floor = best["critic/score/mean"] or 0.0, min(low)
    if top - floor < MIN_SCORE_RANGE or max(scores) - floor >= COLLAPSE_SHARE * (top - floor):
        return None
    changed = _changes(best, rows[-COLLAPSE_STEPS:])
    if not changed:
        return None
    what = f"The policy has collapsed: the reward fell from {top:.3g} to {scores[-1]:.3g}, {', '.join(changed)}."
    return what, advice


def _changes(before: Row, rows: MetricRows) -> list[str]:
    """What else is different from the row `before`, in words."""
    found = []
    for name, words, factor in (("actor/entropy", "entropy", 3.0), ("actor/grad_norm", "gradient norm", 5.0)):
        old, new = before.get(name), column(rows, name)
        if old and new:
            now = statistics.median(new)
            if now > factor * old or (name == "actor/entropy" and now < old / factor):
                found.append(f"{words} from {old:.3g} to {now:.3g}")
    old, new = before.get("response_length/clip_ratio"), column(rows, "response_length/clip_ratio")
    if old is not None and new and statistics.median(new) > old + 0.3:
        found.append(f"completions cut at the limit from {old:.0%} to {statistics.median(new):.0%}")
    old, new = before.get("response_length/mean"), column(rows, "response_length/mean")
    if old and new and statistics.median(new) < 0.5 * old:
        found.append(f"length from {old:.0f} to {statistics.median(new):.0f} tokens")
    return found


STOP_STEPS, NEVER_STOPS, RAN_ON = 3, 0.9, 0.5


def missing_stop_token(rows: MetricRows) -> Verdict:
    """Nearly all completions run to the limit although they had come to an end before it: an answer was closed, or an
    end-of-sequence token written, and sampling went on."""
    cut = recent(rows, "response_length/clip_ratio", STOP_STEPS)
    ran_on = recent(rows, "response_length/ran_on_ratio", STOP_STEPS)
    if not cut or not ran_on or min(cut) < NEVER_STOPS or min(ran_on) < RAN_ON:
        return None
    return (
        f"{cut[-1]:.0%} of the completions run to the limit, and {ran_on[-1]:.0%} go on after their end: the token "
        "that ends a completion is not among those at which sampling stops.",
        "rollout.stop_token_ids=[ID] with the tokenizer's end token (or rollout.stop=['TEXT']), and eos_token_id in "
        "the model's generation_config.json; a base model may need some steps of `atomrl sft` to learn to stop.",
    )


LIMIT_STEPS, LIMIT_SHARE = 5, 0.15


def length_limit(rows: MetricRows) -> Verdict:
    """Many completions are cut at the limit: what they would have earned is never seen (DAPO, arXiv:2503.14476,
    section 3.4, on the noise that this puts into rewards)."""
    cut = recent(rows, "response_length/clip_ratio", LIMIT_STEPS)
    if not cut or statistics.median(cut) < LIMIT_SHARE:
        return None
    longest = recent(rows, "response_length/max", 1)
    limit = f" of {longest[0]:.0f} tokens" if longest else ""
    return (
        f"{statistics.median(cut):.0%} of the completions are cut at the limit{limit} (median of {LIMIT_STEPS} steps).",
        "a larger rollout.max_completion_tokens (twice), or a prompt that asks for less. If the texts in rollouts/ are "
        "complete and then run on, see docs/failures/missing_stop_token.md.",
    )


IDLE_STEPS = 3


def no_updates(rows: MetricRows) -> Verdict:
    """Steps without an update, or with advantages that are all 0 although the rewards differ: no weight changes."""
    accepted, updates = recent(rows, "rollout/groups_accepted", IDLE_STEPS), recent(rows, "train/rows", IDLE_STEPS)
    if accepted and not any(accepted):
        return (
            f"No group was accepted in the last {IDLE_STEPS} steps, so there was no update: all completions of a group "
            "earn the same.",
            "harder problems where train/accuracy is near 1, easier ones where it is near 0 (data.train).",
        )
    if updates and not any(updates):
        return (
            f"There was no update in the last {IDLE_STEPS} steps: no completion became a row.",
            "a larger train.max_row_tokens; look into rollouts/ for completions without a reward or without a token.",
        )
    low, high = recent(rows, "critic/advantages/min", IDLE_STEPS), recent(rows, "critic/advantages/max", IDLE_STEPS)
    varied = [row.get("critic/score/min") != row.get("critic/score/max") for row in rows[-IDLE_STEPS:]]
    if not low or not high or any(low + high) or not all(varied) or column(rows, "by_group/frac_mixed"):
        return None
    if any(recent(rows, "actor/grad_norm", IDLE_STEPS)):  # distillation learns without advantages
        return None
    return (
        f"Every advantage of the last {IDLE_STEPS} steps is 0, although the rewards differ: nothing is learned.",
        "rollout.completions_per_prompt of at least 2 (the mean of a group of one is its own reward), or an "
        "algorithm.advantage that does not compare within groups.",
    )


CONSTANT_STEPS = 5


def constant_reward(rows: MetricRows) -> Verdict:
    """All completions of several steps have one and the same reward: all advantages are 0, nothing is learned."""
    low = recent(rows, "critic/score/min", CONSTANT_STEPS)
    high = recent(rows, "critic/score/max", CONSTANT_STEPS)
    if not low or min(low) != max(high):
        return None
    if low[0] > 0:
        return (
            f"Every completion of the last {CONSTANT_STEPS} steps has reward {low[0]:.3g}: nothing is left to learn.",
            "harder problems (data.train), or a stricter reward (reward.functions), if this is not what you wanted.",
        )
    return (
        f"Every completion of the last {CONSTANT_STEPS} steps has reward {low[0]:.3g}: nothing can be learned.",
        "read rollouts/: is the answer right but in another form than the reward expects (tags, \\boxed)? Is "
        "ground_truth what the reward compares with? `atomrl reward NAME FILE` scores a file without training.",
    )


GROUP_STEPS, IDENTICAL = 5, 0.9


def no_mixed_groups(rows: MetricRows) -> Verdict:
    """No group has completions with different rewards: group-relative advantages are all 0 (DAPO, arXiv:2503.14476,
    section 3.2)."""
    mixed = recent(rows, "by_group/frac_mixed", GROUP_STEPS)
    bad = recent(rows, "by_group/frac_all_bad", GROUP_STEPS)
    if not mixed or not bad or max(mixed) > 0:
        return None
    share = statistics.fmean(bad)
    what = f"In the last {GROUP_STEPS} steps no group had completions with different rewards ({share:.0%} all bad)"
    if min(recent(rows, "by_group/frac_identical", GROUP_STEPS) or [0.0]) > IDENTICAL:
        return f"{what}: the completions of a group are the same text.", "rollout.temperature=1 (0 takes no chances)."
    many = "a larger rollout.completions_per_prompt and rollout.temperature"
    if share > 0.5:
        return f"{what}: the problems are too hard.", f"easier problems, a better start (`atomrl sft`), {many}."
    return f"{what}: the problems are too easy.", f"harder problems (data.train), {many}."


PART_STEPS = 10


def dead_reward_part(rows: MetricRows) -> Verdict:
    """One of several reward functions has given 0 to everything for long, which the total hides. (Of a function with
    "penalty" in its name, 0 is the best value.)"""
    names = [name for name in rows[-1] if name.startswith("reward/") and name.endswith("/mean")]
    parts = {name.removeprefix("reward/").removesuffix("/mean"): name for name in names if "penalty" not in name}
    if len(parts) < 2:
        return None
    given = {part: recent(rows, name, PART_STEPS) for part, name in parts.items()}
    dead = [part for part, values in given.items() if values and not any(values)]
    if not dead:
        return None
    return (
        f"The reward function {' and '.join(dead)} has given 0 to every completion for {PART_STEPS} steps; the sum "
        "hides it.",
        "`atomrl reward NAME rollouts/step_.../train.jsonl`, to see whether it is the function, the ground truth or "
        "the model.",
    )


EQUALLY_CORRECT, LENGTH_ALONE, LENGTH_STEPS, LONGER = 0.9, 0.99, 5, 1.25
LENGTH_HALF, LENGTH_MOST = 0.5, 0.9


def pays_for_length(rows: MetricRows) -> Verdict:
    """Among completions of a group that are equally correct the longer earn more; or length alone decides the reward;
    or both rise together while accuracy does not (on length and reward: Dr. GRPO, arXiv:2503.20783)."""
    advice = "the reward without its dependence on length (reward.functions); compare reward/NAME/mean by part."
    tied = recent(rows, "reward/length_correlation_equally_correct", LENGTH_STEPS)
    if tied and min(tied) > EQUALLY_CORRECT:
        return (
            f"The reward pays for length: among equally correct completions of a group the longer earn more "
            f"(correlation {statistics.fmean(tied):.2f}).",
            advice,
        )
    every = recent(rows, "reward/length_correlation", LENGTH_STEPS)
    both = tied and every and statistics.fmean(tied) > LENGTH_HALF and statistics.fmean(every) > LENGTH_MOST
    if both or (every and min(every) > LENGTH_ALONE):
        return (
            f"The reward is little else than length: their correlation within groups is {statistics.fmean(every):.2f}.",
            advice,
        )
    score, length, accuracy = (
        shift(rows, name) for name in ("critic/score/mean", "response_length/mean", "train/accuracy")
    )
    if not score or not length or not accuracy or accuracy.early > 0.95:
        return None
    rising = score.change > 0 and score.beyond_noise() and length.beyond_noise()
    followed = accuracy.change > min(0.1, 0.25 * score.change)  # a reward model's scores have a scale of their own
    if not rising or length.late < LONGER * length.early or followed:
        return None
    return (
        f"Reward ({score.early:.3g} to {score.late:.3g}) and length ({length.early:.0f} to {length.late:.0f} tokens) "
        f"rise while accuracy does not ({accuracy.early:.3g} to {accuracy.late:.3g}): the reward pays for length.",
        advice,
    )


ACCURACY_DROP = 0.05


def reward_without_accuracy(rows: MetricRows) -> Verdict:
    """The reward rises while accuracy (the first reward function's) falls: what is paid is not what is wanted
    (reward hacking; Gao et al., arXiv:2210.10760)."""
    score, accuracy = shift(rows, "critic/score/mean"), shift(rows, "train/accuracy")
    if not score or not accuracy or score.change <= 0 or not score.beyond_noise():
        return None
    if accuracy.change > -ACCURACY_DROP or not accuracy.beyond_noise():
        return None
    return (
        f"The reward rises ({score.early:.3g} to {score.late:.3g}) while accuracy falls ({accuracy.early:.3g} to "
        f"{accuracy.late:.3g}): the policy earns with something else than being right.",
        "lower weights of the other reward.functions; sort rollouts/ by reward and read the best paid.",
    )


STALE_FACTOR, STALE_GAP, GAP_STEPS = 8.0, 1e-4, 3


def stale_weights(rows: MetricRows) -> Verdict:
    """The gap between the engine's and the trainer's probabilities was small at the first step, when both had the same
    weights, and has grown many times since: the engine does not get the new ones.

    Seen elsewhere as a jump from 0.015 to 0.2 (huggingface/trl#5312); without that fault it stays within twice.
    """
    first, now = column(rows[:1], _GAP), recent(rows, _GAP, GAP_STEPS)
    if not first or not now or len(rows) <= GAP_STEPS:
        return None
    if min(now) < max(STALE_FACTOR * first[0], STALE_GAP):
        return None
    return (
        f"The engine's weights are stale: its probabilities were within {first[0]:.1e} of the trainer's at first and "
        f"are {now[-1]:.1e} away now.",
        "another rollout.engine (`hf` is the reference), to see whether it is the engine: weights must reach it after "
        "every step. An engine of your own: does its update_weights copy all tensors?",
    )


LARGE_GAP = 0.03


def rollout_gap(rows: MetricRows) -> Verdict:
    """Engine and trainer give clearly different probabilities to the same tokens, so the gradient is off-policy.

    Healthy: 1e-6 in float32, about 0.01 in bfloat16 with another engine (vllm-project/vime#64, huggingface/trl#5312).
    """
    now = recent(rows, _GAP, GAP_STEPS)
    if not now or min(now) < LARGE_GAP:
        return None
    return (
        f"Engine and trainer differ by {now[-1]:.2g} in the probability of a token, on average.",
        "model.dtype=float32; rollout.engine=hf, to compare; rollout.top_p=1 and rollout.top_k=0.",
    )


_GAP = "training/rollout_probs_diff_mean"
ENTROPY_SHARE, ENTROPY_STEPS, SOLVED, MIXED = 0.1, 5, 0.85, 0.5


def entropy_collapse(rows: MetricRows) -> Verdict:
    """Entropy has fallen to a tenth of the start's while much is still wrong and most groups are all alike: the policy
    repeats itself and no longer explores (arXiv:2505.22617 finds that reward stops rising where entropy is used up)."""
    start, now = column(rows[:3], "actor/entropy"), recent(rows, "actor/entropy", ENTROPY_STEPS)
    accuracy = recent(rows, "train/accuracy", ENTROPY_STEPS)
    if not start or not now or not accuracy or len(rows) < 3 + ENTROPY_STEPS:
        return None
    if statistics.fmean(now) > ENTROPY_SHARE * statistics.fmean(start) or statistics.fmean(accuracy) > SOLVED:
        return None
    if statistics.fmean(recent(rows, "by_group/frac_mixed", ENTROPY_STEPS) or [0.0]) > MIXED:
        return None
    return (
        f"Entropy fell from {statistics.fmean(start):.2g} to {statistics.fmean(now):.2g} nats per token, with accuracy "
        f"at {statistics.fmean(accuracy):.2f}: the policy hardly explores any more.",
        "algorithm.clip.high=0.28 (clip-higher), a lower train.learning_rate, rollout.temperature=1, or a KL penalty "
        "(algorithm.kl.coefficient=0.001).",
    )


SPIKE, SPIKE_STEPS = 10.0, 10


def gradient_spikes(rows: MetricRows) -> Verdict:
    """A gradient norm ten times the usual one, and three times the largest of the first steps. One is clipped; several
    undo learning."""
    now = recent(rows, "actor/grad_norm", 1)
    before = [norm for norm in column(rows[:-1], "actor/grad_norm") if norm > 0]
    if not now or len(before) < SPIKE_STEPS:
        return None
    usual = statistics.median(before[-SPIKE_STEPS:])
    if now[0] < SPIKE * usual or now[0] < 3 * max(before[:SPIKE_STEPS]):
        return None
    return (
        f"The gradient norm jumped to {now[0]:.3g}; {usual:.3g} is usual.",
        "a smaller train.max_grad_norm or train.learning_rate; look at this step's rollouts/ for odd texts or rewards.",
    )


NO_SIGNAL = frozenset({"no_updates", "missing_stop_token", "length_limit", "learning_rate_too_high", "constant_reward"})
"""What leaves all completions without reward."""

RULES = (
    Rule("skipped_updates", "error", skipped_updates),
    Rule("reward_failures", "error", reward_failures),
    Rule("stale_weights", "error", stale_weights),
    Rule("rollout_gap", "error", rollout_gap, frozenset({"stale_weights"})),
    Rule("learning_rate_too_high", "error", learning_rate_too_high, frozenset({"stale_weights"})),
    Rule("missing_stop_token", "error", missing_stop_token, frozenset({"learning_rate_too_high"})),
    Rule("length_limit", "warning", length_limit, frozenset({"missing_stop_token", "learning_rate_too_high"})),
    Rule("pays_for_length", "error", pays_for_length),
    Rule("reward_without_accuracy", "error", reward_without_accuracy, frozenset({"pays_for_length"})),
    Rule("no_updates", "error", no_updates, NO_SIGNAL),
    Rule("constant_reward", "error", constant_reward, NO_SIGNAL),
    Rule("no_mixed_groups", "warning", no_mixed_groups, NO_SIGNAL),
    Rule("dead_reward_part", "warning", dead_reward_part, NO_SIGNAL),
    Rule("entropy_collapse", "warning", entropy_collapse, frozenset({"learning_rate_too_high", "constant_reward"})),
    Rule("gradient_spikes", "warning", gradient_spikes, frozenset({"learning_rate_too_high"})),
)
"""In the order of causes: what explains another stands before it."""
