"""Rules on updates, rewards, lengths and weights of the engine."""

from collections.abc import Callable
from statistics import fmean, median

from atomrl.tracking.doctor.findings import (
    GAP,
    LONG,
    MEDIUM,
    SHORT,
    MetricRows,
    Row,
    Symptom,
    Verdict,
    column,
    least_stale,
    recent,
    rows_with,
    shift,
)

FAILURES = ("/timeouts", "/errors", "/crashes", "/invalid")
CHANGES: tuple[tuple[str, str, Callable[[float, float], bool]], ...] = (
    ("actor/entropy", "entropy from {:.3g} to {:.3g}", lambda old, now: now > 3 * old > 0 or now < old / 3),
    ("actor/grad_norm", "gradient norm from {:.3g} to {:.3g}", lambda old, now: now > 5 * old > 0),
    ("response_length/clip_ratio", "cut at the limit from {:.0%} to {:.0%}", lambda old, now: now > old + 0.3),
    ("response_length/mean", "length from {:.0f} to {:.0f} tokens", lambda old, now: now < 0.5 * old),
)
"""Signs of a collapse beside the reward: (metric, text, predicate of the old and the new value)."""
IDENTICAL = "the completions of a group are identical"
CHANGE_DIFFICULTY = "harder problems if nearly all answers are right, easier ones if none is (data.train)."
RAISE_TEMPERATURE = "rollout.temperature=1 (at 0 all completions of a prompt are the same)."


def skipped_updates(rows: MetricRows) -> Verdict:
    """An update was skipped because its gradient was not finite."""
    if skipped := sum(column(rows, "actor/skipped_updates")):
        yield Symptom(f"{skipped:.0f} update(s) were skipped because the gradient was NaN or infinite.")


def reward_failures(rows: MetricRows) -> Verdict:
    """Completions have no reward: they are dropped, and the batch is smaller than configured."""
    [share] = recent(rows, "reward/missing_ratio", 1)
    if share >= 0.01:
        failures = {name: value for name, value in rows[-1].items() if name.endswith(FAILURES) and value}
        counts = ", ".join(f"{name.removeprefix('reward/')} {value:.0f}" for name, value in failures.items())
        kinds = f" ({counts})" if counts else ""
        yield Symptom(f"{share:.0%} of the completions have no reward{kinds}; they are not trained on.")


def learning_rate_too_high(rows: MetricRows) -> Verdict:
    """The updates are too large: the policy collapsed (the reward fell by half or more, and entropy, gradient norm or
    length changed with it), or one step moves the policy further than the clipped objective is meant for.

    A KL of 0.2 within a step is over ten times the 0.01 to 0.02 at which PPO implementations stop early (Spinning Up's
    `target_kl`). The clip fraction counts only together with a KL: some algorithms clip most tokens by design (GSPO's
    bounds are 3e-4).
    """
    now = "".join(f" (now {rate:.1e})" for rate in column(rows[-1:], "actor/lr"))
    advice = (
        f"a train.learning_rate ten times lower{now}, a longer train.warmup_ratio, a smaller train.max_grad_norm, "
        "or a KL penalty (algorithm.kl.coefficient)."
    )
    kl = recent(rows, "actor/ppo_kl", SHORT, default=0.0)
    clipped = recent(rows, "actor/pg_clipfrac", SHORT, default=0.0)
    smallest = min(map(abs, kl))
    if smallest > 0.2 or (smallest > 0.02 and min(clipped) > 0.5):
        yield Symptom(f"Each step moves the policy too far (KL {kl[-1]:.2g}, {clipped[-1]:.0%} clipped).", advice)
        return
    scores, low = recent(rows, "critic/score/mean", SHORT), column(rows, "critic/score/min")
    top, best = max(
        ((score, row) for row in rows[:-SHORT] if (score := row.get("critic/score/mean")) is not None),
        key=lambda pair: pair[0],
        default=(0.0, {}),
    )
    height = top - min(low, default=top)
    if height >= 0.05 and max(scores) < top - 0.5 * height and (changes := _changes(best, rows[-SHORT:])):
        reward = f"the reward fell from {top:.3g} to {scores[-1]:.3g}"
        yield Symptom(f"The policy has collapsed: {reward}, {', '.join(changes)}.", advice)


def _changes(before: Row, rows: MetricRows) -> list[str]:
    """Return the texts of `CHANGES` that apply between the row `before` and the median of `rows`."""
    changes = []
    for name, text, differs in CHANGES:
        old, new = before.get(name), column(rows, name)
        if old is not None and new and differs(old, median(new)):
            changes.append(text.format(old, median(new)))
    return changes


def missing_stop_token(rows: MetricRows) -> Verdict:
    """Nearly all completions run to the limit although they had ended before it: an answer was closed, or an
    end-of-sequence token written, and sampling continued."""
    cut = recent(rows, "response_length/clip_ratio", SHORT)
    ran_on = recent(rows, "response_length/ran_on_ratio", SHORT)
    if min(cut) >= 0.9 and min(ran_on) >= 0.5:
        yield Symptom(
            f"{cut[-1]:.0%} of the completions reach the limit, and {ran_on[-1]:.0%} continue after their end: the "
            "token that ends a completion is not among the stop tokens."
        )


def length_limit(rows: MetricRows) -> Verdict:
    """Many completions are truncated, which adds noise to the rewards (DAPO, arXiv:2503.14476, section 3.4)."""
    cut = median(recent(rows, "response_length/clip_ratio", MEDIUM))
    turns = median(recent(rows, "environment/ended/turns", MEDIUM, default=0.0))
    if cut >= 0.15 and turns > 0.5 * cut:
        yield Symptom(
            f"{turns:.0%} of the episodes end at the turn limit (median of {MEDIUM} steps).",
            "a larger environment.max_turns, or a prompt that states the limit.",
        )
    elif cut >= 0.15:
        limit = "".join(f" of {longest:.0f} tokens" for longest in column(rows[-1:], "response_length/max"))
        yield Symptom(f"{cut:.0%} of the completions are cut at the limit{limit} (median of {MEDIUM} steps).")


def are_identical(rows: MetricRows, count: int) -> bool:
    """Return whether nearly all groups of the last `count` steps consist of identical completions."""
    return min(recent(rows, "by_group/frac_identical", count, default=0.0)) > 0.9


def no_updates(rows: MetricRows) -> Verdict:
    """Steps without an update, or with advantages that are all 0 although the rewards differ: no weight changes."""
    if not any("critic/score/mean" in row for row in rows):  # offline data: every update has a gradient
        if (norms := column(rows, "actor/grad_norm")) and not any(norms):
            yield Symptom(
                f"Every gradient of {len(norms)} step(s) is exactly 0, so no weights were updated.",
                "a larger train.max_row_tokens; check data.train for identical pairs.",
            )
    elif not any(recent(rows, "rollout/groups_accepted", SHORT, default=1.0)):
        what = f"No group was accepted in the last {SHORT} steps, so no weights were updated"
        if are_identical(rows, SHORT):
            yield Symptom(f"{what}: {IDENTICAL}.", RAISE_TEMPERATURE)
        else:
            yield Symptom(f"{what}: all completions of a group have equal rewards.", CHANGE_DIFFICULTY)
    elif not any(recent(rows, "train/rows", SHORT, default=1.0)):
        yield Symptom(
            f"No weights were updated in the last {SHORT} steps: no completion became a row.",
            "a larger train.max_row_tokens; check rollouts/ for completions without a reward or without tokens.",
        )
    else:
        advantages = [value for end in ("min", "max") for value in recent(rows, f"critic/advantages/{end}", SHORT)]
        norms = recent(rows, "actor/grad_norm", SHORT, default=0.0)  # distillation learns without advantages
        varied = all(row.get("critic/score/min") != row.get("critic/score/max") for row in rows[-SHORT:])
        if varied and not any([*advantages, *norms]) and not column(rows, "by_group/frac_mixed"):
            yield Symptom(
                f"Every advantage of the last {SHORT} steps is 0, although the rewards differ: nothing is learned.",
                "rollout.completions_per_prompt of at least 2 (the mean of a group of one is its own reward), or "
                "an algorithm.advantage that does not compare within groups.",
            )


def constant_reward(rows: MetricRows) -> Verdict:
    """All completions of several steps have the same reward: all advantages are 0, nothing is learned."""
    low = recent(rows, "critic/score/min", MEDIUM)
    what = f"Every completion of the last {MEDIUM} steps has reward {low[0]:.3g}: nothing"
    if min(low) != max(recent(rows, "critic/score/max", MEDIUM)):
        return
    if are_identical(rows, MEDIUM):
        yield Symptom(f"{what} can be learned, since {IDENTICAL}.", RAISE_TEMPERATURE)
    elif low[0] > 0:
        yield Symptom(
            f"{what} is left to learn.",
            "harder problems (data.train), or a stricter reward (reward.functions), if this is not what you wanted.",
        )
    else:
        yield Symptom(
            f"{what} can be learned.",
            "read rollouts/: is the answer right, but not in the format that the reward expects (tags, \\boxed)? Is "
            "ground_truth what the reward compares with? `atomrl reward NAME FILE` scores a file without training.",
        )


def no_mixed_groups(rows: MetricRows) -> Verdict:
    """No group has completions with different rewards: group-relative advantages are all 0 (DAPO, arXiv:2503.14476,
    section 3.2)."""
    mixed = recent(rows, "by_group/frac_mixed", MEDIUM)
    bad = fmean(recent(rows, "by_group/frac_all_bad", MEDIUM))
    what = f"In the last {MEDIUM} steps no group had completions with different rewards ({bad:.0%} all bad)"
    sample_more = "a larger rollout.completions_per_prompt and rollout.temperature"
    if max(mixed) > 0:
        long = [recent(rows, f"by_group/frac_{name}", LONG, default=0.0) for name in ("mixed", "all_good")]
        if len(long[0]) == LONG and median(long[0]) <= 0.05 and median(long[1]) >= 0.9:
            yield Symptom(
                f"In the last {LONG} steps {median(long[1]):.0%} of the groups were solved (one reward above 0 for "
                "all): their gradient is 0, so hardly anything is left to learn.",
                "harder problems (data.train), or stop the run.",
            )
        return
    if are_identical(rows, MEDIUM):
        yield Symptom(f"{what}: {IDENTICAL}.", RAISE_TEMPERATURE)
    elif bad > 0.5:
        yield Symptom(f"{what}: the problems are too hard.", f"easier problems, a better start (SFT), {sample_more}.")
    else:
        yield Symptom(f"{what}: the problems are too easy.", f"harder problems (data.train), {sample_more}.")


def dead_reward_part(rows: MetricRows) -> Verdict:
    """One of several reward functions has returned 0 for every completion of many steps, which the sum hides. (The best
    value of a function with "penalty" in its name is 0, so those are skipped.)"""
    means = [name for name in rows[-1] if name.startswith("reward/") and name.endswith("/mean")]
    parts = [name for name in means if "penalty" not in name]
    dead = [name for name in parts if not any(recent(rows, name, LONG, default=1.0))]
    if dead and len(parts) > 1:
        names = " and ".join(name.removeprefix("reward/").removesuffix("/mean") for name in dead)
        yield Symptom(f"The reward function {names} returned 0 for every completion in {LONG} steps; the sum hides it.")


def pays_for_length(rows: MetricRows) -> Verdict:
    """The reward grows with length: longer completions earn more among equally correct ones of a group; or length alone
    decides the reward; or both rise while accuracy does not (Dr. GRPO, arXiv:2503.20783)."""
    tied = recent(rows, "reward/length_correlation_equally_correct", MEDIUM, default=0.0)
    every = recent(rows, "reward/length_correlation", MEDIUM, default=0.0)
    both = fmean(tied) > 0.5 and fmean(every) > 0.9
    if min(tied) > 0.9:
        yield Symptom(
            "The reward pays for length: among equally correct completions of a group longer ones have higher rewards "
            f"(correlation {fmean(tied):.2f})."
        )
    elif both or min(every) > 0.99:
        yield Symptom(f"The reward depends almost only on length: the correlation within groups is {fmean(every):.2f}.")
    else:
        score = shift(rows, "critic/score/mean")
        if score.change <= 0 or not score.clear:
            return
        accuracy, length = shift(rows, "train/accuracy"), shift(rows, "response_length/mean")
        rising = length.clear and length.late >= 1.25 * length.early
        followed = accuracy.change > min(0.1, 0.25 * score.change)  # a reward model's scores have a scale of their own
        if rising and not followed and accuracy.early <= 0.95:
            yield Symptom(
                f"Reward ({score.early:.3g} to {score.late:.3g}) and length ({length.early:.0f} to {length.late:.0f} "
                f"tokens) rise while accuracy does not ({accuracy.early:.3g} to {accuracy.late:.3g}): the reward pays "
                "for length."
            )


def reward_without_accuracy(rows: MetricRows) -> Verdict:
    """The reward rises while accuracy (by the first reward function) falls: reward hacking (Gao et al.,
    arXiv:2210.10760)."""
    score = shift(rows, "critic/score/mean")
    if score.change <= 0 or not score.clear:
        return
    accuracy = shift(rows, "train/accuracy")
    if accuracy.change <= -0.05 and accuracy.clear:
        yield Symptom(
            f"The reward rises ({score.early:.3g} to {score.late:.3g}) while accuracy falls ({accuracy.early:.3g} to "
            f"{accuracy.late:.3g}): the policy is rewarded for something other than right answers."
        )


def learns_nothing(rows: MetricRows) -> Verdict:
    """Accuracy (without it, the place of the reward in its range) has not risen in 20 steps, and is low: the rewards
    differ and the updates are made, but the policy gets no better. A run that begins higher may have little to gain."""
    score = shift(rows, "critic/score/mean", LONG)
    if score.change > 0:
        return
    what = "Accuracy" if column(rows, "train/accuracy") else "The reward"
    if what == "Accuracy":
        now = shift(rows, "train/accuracy", LONG)
        place = now.late
    else:
        now, low = score, min(column(rows, "critic/score/min"), default=0.0)
        height = max(column(rows, "critic/score/max"), default=0.0) - low
        place = (now.late - low) / height if height > 0 else 1.0
    if now.change <= 0 and place < 0.2:
        yield Symptom(
            f"{what} is low and has not risen: {now.early:.3g} in the first {LONG} steps, {now.late:.3g} in the last."
        )


def stale_weights(rows: MetricRows) -> Verdict:
    """The engine does not receive new weights: the gap between its probabilities and the trainer's was small at the
    first step, when both had the same weights, and has grown many times since.

    In huggingface/trl#5312 it jumped from 0.015 to 0.2; in a healthy run it stays within a factor of two. In
    asynchronous runs only tokens sampled with the newest weights count.
    """
    [first], now = recent(rows_with(rows)[:1], GAP, 1), recent(rows_with(rows[1:][-2 * LONG :]), GAP, SHORT)
    if min(now) >= max(8 * first, 1e-4):
        yield Symptom(
            f"The engine's weights are stale: its probabilities differed from the trainer's by {first:.1e} at first "
            f"and by {now[-1]:.1e} now."
        )


def rollout_gap(rows: MetricRows) -> Verdict:
    """Engine and trainer assign different probabilities to the same tokens, so the gradient is off-policy.

    Healthy: 1e-6 in float32, about 0.01 in bfloat16 with another engine (vllm-project/vime#64, huggingface/trl#5312).
    The threshold is 0.2 if all tokens were sampled with older weights: the updates since explain smaller gaps.
    """
    name = least_stale(rows := rows[-2 * LONG :])
    now = recent(rows_with(rows, name), name, SHORT)
    if min(now) >= (0.03 if name == GAP else 0.2):
        yield Symptom(f"Engine and trainer differ by {now[-1]:.2g} in the probability of a token, on average.")


def entropy_collapse(rows: MetricRows) -> Verdict:
    """Entropy has fallen to a tenth of its first value while accuracy is still low and most groups have equal rewards:
    the policy no longer explores (arXiv:2505.22617: the reward stops rising once entropy is used up)."""
    start = fmean(recent(rows[:3], "actor/entropy", 3))
    now = fmean(recent(rows[3:], "actor/entropy", MEDIUM))
    accuracy = fmean(recent(rows, "train/accuracy", MEDIUM))
    mixed = fmean(recent(rows, "by_group/frac_mixed", MEDIUM, default=0.0))
    if now <= 0.1 * start and accuracy <= 0.85 and mixed <= 0.5:
        yield Symptom(
            f"Entropy fell from {start:.2g} to {now:.2g} nats per token, with accuracy at {accuracy:.2f}: the policy "
            "hardly explores anymore."
        )


def gradient_spikes(rows: MetricRows) -> Verdict:
    """The gradient norm is ten times the usual one, and three times the largest of the first steps. A single spike is
    clipped; several undo learning."""
    [now] = recent(rows, "actor/grad_norm", 1)
    before = [norm for norm in column(rows[:-1], "actor/grad_norm") if norm > 0]
    if len(before) < LONG:
        return
    usual = median(before[-LONG:])
    if now >= 10 * usual and now >= 3 * max(before[:LONG]):
        yield Symptom(f"The gradient norm jumped to {now:.3g}, from a typical {usual:.3g}.")
