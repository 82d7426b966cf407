"""The rules: pure functions of a window of metrics, and the table of them.

A rule gets the training rows of a run, oldest first: all of a short run, of a long one the first 20 and the last 100
steps. Where it holds, it yields what is wrong; what to try stands in its docstring after `Try:`, or where that depends
on what is wrong, is said with it. A metric that a rule needs and that is not there silences it (`findings.NotLogged`).
Thresholds that have a source name it; all others are set so that healthy runs
(docs/development/benchmarks.md) stay far from them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from atomrl.tracking.doctor.findings import (
    GAP,
    LONG,
    MEDIUM,
    SHORT,
    Finding,
    MetricRows,
    NotLogged,
    Row,
    Severity,
    Verdict,
    column,
    having,
    is_evaluation,
    least_stale,
    recent,
    shift,
)
from atomrl.tracking.doctor.hacks import (
    echo_is_paid,
    empty_answer_is_paid,
    environment_failures,
    format_alone_is_paid,
    hedging_is_paid,
    invalid_actions,
    keyword_is_paid,
    one_text_is_paid,
    pays_for_shortness,
    quote,
    repetition_is_paid,
    replies_die_out,
    replies_in_the_loss,
    wrong_answers_are_paid,
)


@dataclass(frozen=True)
class Rule:
    """A line of the table."""

    severity: Severity
    holds: Callable[[MetricRows], Verdict]
    explained_by: frozenset[str] = frozenset()
    """Findings of which this one is a mere consequence: it is not named beside them."""

    @property
    def id(self) -> str:
        return self.holds.__name__

    def findings(self, rows: MetricRows) -> Iterator[tuple[str, str]]:
        """What is wrong and what to try.

        Raises:
            NotLogged: the rows lack a metric.
        """
        for said in self.holds(rows):
            what, _, own = said.partition(" Try: ")
            yield what, own or " ".join((self.holds.__doc__ or "").partition("Try: ")[2].split())


def skipped_updates(rows: MetricRows) -> Verdict:
    """An update was left out because its gradient was not finite.

    Try: a lower train.learning_rate; model.dtype=float32; and look for extreme rewards in rollouts/.
    """
    if skipped := sum(column(rows, "actor/skipped_updates")):
        yield f"{skipped:.0f} update(s) were left out because the gradient was NaN or infinite."


FAILURES = ("/timeouts", "/errors", "/crashes", "/invalid")


def reward_failures(rows: MetricRows) -> Verdict:
    """Completions got no reward at all: they are left out, and the batch is smaller than it looks.

    Try: `atomrl reward NAME rollouts/step_.../train.jsonl` with your function, to see the exception; make it return a
    number for every completion.
    """
    [share] = recent(rows, "reward/missing_ratio", 1)
    if share >= 0.01:
        failures = {name: value for name, value in rows[-1].items() if name.endswith(FAILURES) and value}
        counts = ", ".join(f"{name.removeprefix('reward/')} {value:.0f}" for name, value in failures.items())
        left_out = "they are left out of training."
        yield f"{share:.0%} of the completions have no reward{f' ({counts})' * bool(counts)}: {left_out}"


def learning_rate_too_high(rows: MetricRows) -> Verdict:
    """The updates are too large: the reward fell by half or more and the policy changed its nature with it, or one
    step moves the policy further than the clipped objective is meant for.

    A KL of 0.2 within a step is over ten times the 0.01 to 0.02 at which PPO implementations stop early (Spinning Up's
    `target_kl`). A share of clipped tokens says so only where the policy has moved as well: the bounds of some
    algorithms (GSPO's are 3e-4) are made to act on most tokens.
    """
    now = "".join(f" (now {rate:.1e})" for rate in column(rows[-1:], "actor/lr"))
    advice = (
        f"Try: a train.learning_rate ten times lower{now}, a longer train.warmup_ratio, a smaller train.max_grad_norm, "
        "or a KL penalty (algorithm.kl.coefficient)."
    )
    kl = recent(rows, "actor/ppo_kl", SHORT, default=0.0)
    clipped = recent(rows, "actor/pg_clipfrac", SHORT, default=0.0)
    moved = min(map(abs, kl))
    if moved > 0.2 or (moved > 0.02 and min(clipped) > 0.5):
        yield f"Each step moves the policy too far (KL {kl[-1]:.2g}, {clipped[-1]:.0%} clipped). {advice}"
        return
    scores, low = recent(rows, "critic/score/mean", SHORT), column(rows, "critic/score/min")
    top, best = max(
        ((score, row) for row in rows[:-SHORT] if (score := row.get("critic/score/mean")) is not None),
        key=lambda pair: pair[0],
        default=(0.0, {}),
    )
    height = top - min(low, default=top)
    if height >= 0.05 and max(scores) < top - 0.5 * height:
        changed = _changes(best, rows[-SHORT:])
        if changed:
            said = ", ".join(changed)
            yield f"The policy has collapsed: the reward fell from {top:.3g} to {scores[-1]:.3g}, {said}. {advice}"


CHANGES: tuple[tuple[str, str, Callable[[float, float], bool]], ...] = (
    ("actor/entropy", "entropy from {:.3g} to {:.3g}", lambda old, now: now > 3 * old > 0 or now < old / 3),
    ("actor/grad_norm", "gradient norm from {:.3g} to {:.3g}", lambda old, now: now > 5 * old > 0),
    ("response_length/clip_ratio", "cut at the limit from {:.0%} to {:.0%}", lambda old, now: now > old + 0.3),
    ("response_length/mean", "length from {:.0f} to {:.0f} tokens", lambda old, now: now < 0.5 * old),
)
"""By what a policy shows that its nature has changed: a metric, how to say it, and when."""


def _changes(before: Row, rows: MetricRows) -> list[str]:
    """What else is different from the row `before`, in words."""
    found = []
    for name, words, differs in CHANGES:
        old, new = before.get(name), column(rows, name)
        if old is not None and new and differs(old, median(new)):
            found.append(words.format(old, median(new)))
    return found


def missing_stop_token(rows: MetricRows) -> Verdict:
    """Nearly all completions run to the limit although they had come to an end before it: an answer was closed, or an
    end-of-sequence token written, and sampling went on.

    Try: rollout.stop_token_ids=[ID] with the tokenizer's end token (or rollout.stop=['TEXT']), and eos_token_id in the
    model's generation_config.json; a base model may need some steps of SFT to learn to stop.
    """
    cut = recent(rows, "response_length/clip_ratio", SHORT)
    ran_on = recent(rows, "response_length/ran_on_ratio", SHORT)
    if min(cut) >= 0.9 and min(ran_on) >= 0.5:
        yield (
            f"{cut[-1]:.0%} of the completions run to the limit, and {ran_on[-1]:.0%} go on after their end: the token "
            "that ends a completion is not among those at which sampling stops."
        )


def length_limit(rows: MetricRows) -> Verdict:
    """Many completions are cut at the limit: what they would have earned is never seen (DAPO, arXiv:2503.14476,
    section 3.4, on the noise that this puts into rewards).

    Try: a larger rollout.max_completion_tokens (twice), or a prompt that asks for less. If the texts in rollouts/ are
    complete and then run on, see docs/guides/troubleshooting/missing_stop_token.md.
    """
    cut = median(recent(rows, "response_length/clip_ratio", MEDIUM))
    turns = median(recent(rows, "environment/ended/turns", MEDIUM, default=0.0))
    if cut >= 0.15 and turns > 0.5 * cut:
        yield (
            f"{turns:.0%} of the episodes end at the limit on turns (median of {MEDIUM} steps). Try: a larger "
            "environment.max_turns, or a prompt that says how many there are."
        )
    elif cut >= 0.15:
        limit = "".join(f" of {longest:.0f} tokens" for longest in column(rows[-1:], "response_length/max"))
        yield f"{cut:.0%} of the completions are cut at the limit{limit} (median of {MEDIUM} steps)."


ALIKE = "the completions of a group are the same text"
REACH = "Try: harder problems where nearly all is right, easier ones where nothing is (data.train)."
DRAW = "Try: rollout.temperature=1 (at 0 all completions of a prompt are the same)."


def all_alike(rows: MetricRows, count: int) -> bool:
    """Whether the completions of a group are the same text, in nearly all groups of the last steps."""
    return min(recent(rows, "by_group/frac_identical", count, default=0.0)) > 0.9


def no_updates(rows: MetricRows) -> Verdict:
    """Steps without an update, or with advantages that are all 0 although the rewards differ: no weight changes."""
    if not any("critic/score/mean" in row for row in rows):  # given data, of which every update moves something
        if (norms := column(rows, "actor/grad_norm")) and not any(norms):
            yield (
                f"Every gradient of {len(norms)} step(s) is exactly 0, so there was no update. Try: a larger "
                "train.max_row_tokens; look at the rows of data.train for pairs that differ in nothing."
            )
    elif not any(recent(rows, "rollout/groups_accepted", SHORT, default=1.0)):
        yield (
            f"No group was accepted in the last {SHORT} steps, so there was no update: "
            + (f"{ALIKE}. {DRAW}" if all_alike(rows, SHORT) else f"all completions of a group earn the same. {REACH}")
        )
    elif not any(recent(rows, "train/rows", SHORT, default=1.0)):
        yield (
            f"There was no update in the last {SHORT} steps: no completion became a row. Try: a larger "
            "train.max_row_tokens; look into rollouts/ for completions without a reward or without a token."
        )
    else:
        given = [recent(rows, f"critic/advantages/{end}", SHORT) for end in ("min", "max")]
        moved = recent(rows, "actor/grad_norm", SHORT, default=0.0)  # distillation learns without advantages
        varied = all(row.get("critic/score/min") != row.get("critic/score/max") for row in rows[-SHORT:])
        if varied and not any([*given[0], *given[1], *moved]) and not column(rows, "by_group/frac_mixed"):
            yield (
                f"Every advantage of the last {SHORT} steps is 0, although the rewards differ: nothing is learned. "
                "Try: rollout.completions_per_prompt of at least 2 (the mean of a group of one is its own reward), or "
                "an algorithm.advantage that does not compare within groups."
            )


def constant_reward(rows: MetricRows) -> Verdict:
    """All completions of several steps have one and the same reward: all advantages are 0, nothing is learned."""
    low = recent(rows, "critic/score/min", MEDIUM)
    what = f"Every completion of the last {MEDIUM} steps has reward {low[0]:.3g}: nothing"
    if min(low) != max(recent(rows, "critic/score/max", MEDIUM)):
        return
    if all_alike(rows, MEDIUM):
        yield f"{what} can be learned, since {ALIKE}. {DRAW}"
    elif low[0] > 0:
        yield (
            f"{what} is left to learn. Try: harder problems (data.train), or a stricter reward (reward.functions), if "
            "this is not what you wanted."
        )
    else:
        yield (
            f"{what} can be learned. Try: read rollouts/: is the answer right but in another form than the reward "
            "expects (tags, \\boxed)? Is ground_truth what the reward compares with? `atomrl reward NAME FILE` scores "
            "a file without training."
        )


def no_mixed_groups(rows: MetricRows) -> Verdict:
    """No group has completions with different rewards: group-relative advantages are all 0 (DAPO, arXiv:2503.14476,
    section 3.2)."""
    mixed = recent(rows, "by_group/frac_mixed", MEDIUM)
    bad = fmean(recent(rows, "by_group/frac_all_bad", MEDIUM))
    what = f"In the last {MEDIUM} steps no group had completions with different rewards ({bad:.0%} all bad)"
    many = "a larger rollout.completions_per_prompt and rollout.temperature"
    if max(mixed) > 0:
        long = [recent(rows, f"by_group/frac_{name}", LONG, default=0.0) for name in ("mixed", "all_good")]
        if len(long[0]) == LONG and median(long[0]) <= 0.05 and median(long[1]) >= 0.9:
            yield (
                f"In the last {LONG} steps {median(long[1]):.0%} of the groups were solved (one reward above 0 for "
                "all): their gradient is 0, hardly anything is left to learn. Try: harder problems (data.train), or "
                "an end of the run."
            )
        return
    if all_alike(rows, MEDIUM):
        yield f"{what}: {ALIKE}. {DRAW}"
    elif bad > 0.5:
        yield f"{what}: the problems are too hard. Try: easier problems, a better start (SFT), {many}."
    else:
        yield f"{what}: the problems are too easy. Try: harder problems (data.train), {many}."


def dead_reward_part(rows: MetricRows) -> Verdict:
    """One of several reward functions has given 0 to everything for long, which the total hides. (Of a function with
    "penalty" in its name, 0 is the best value.)

    Try: `atomrl reward NAME rollouts/step_.../train.jsonl`, to see whether it is the function, the ground truth or the
    model.
    """
    means = [name for name in rows[-1] if name.startswith("reward/") and name.endswith("/mean")]
    parts = [name for name in means if "penalty" not in name]
    dead = [name for name in parts if not any(recent(rows, name, LONG, default=1.0))]
    if dead and len(parts) > 1:
        names = " and ".join(name.removeprefix("reward/").removesuffix("/mean") for name in dead)
        yield f"The reward function {names} has given 0 to every completion for {LONG} steps; the sum hides it."


def pays_for_length(rows: MetricRows) -> Verdict:
    """Among completions of a group that are equally correct the longer earn more; or length alone decides the reward;
    or both rise together while accuracy does not (on length and reward: Dr. GRPO, arXiv:2503.20783).

    Try: the reward without its dependence on length (reward.functions); compare reward/NAME/mean by part.
    """
    tied = recent(rows, "reward/length_correlation_equally_correct", MEDIUM, default=0.0)
    every = recent(rows, "reward/length_correlation", MEDIUM, default=0.0)
    both = fmean(tied) > 0.5 and fmean(every) > 0.9
    if min(tied) > 0.9:
        yield (
            "The reward pays for length: among equally correct completions of a group the longer earn more "
            f"(correlation {fmean(tied):.2f})."
        )
    elif both or min(every) > 0.99:
        yield f"The reward is little else than length: their correlation within groups is {fmean(every):.2f}."
    else:
        score = shift(rows, "critic/score/mean")
        if score.change <= 0 or not score.clear:
            return
        accuracy, length = shift(rows, "train/accuracy"), shift(rows, "response_length/mean")
        rising = length.clear and length.late >= 1.25 * length.early
        followed = accuracy.change > min(0.1, 0.25 * score.change)  # a reward model's scores have a scale of their own
        if rising and not followed and accuracy.early <= 0.95:
            yield (
                f"Reward ({score.early:.3g} to {score.late:.3g}) and length ({length.early:.0f} to {length.late:.0f} "
                f"tokens) rise while accuracy does not ({accuracy.early:.3g} to {accuracy.late:.3g}): the reward pays "
                "for length."
            )


def reward_without_accuracy(rows: MetricRows) -> Verdict:
    """The reward rises while accuracy (the first reward function's) falls: what is paid is not what is wanted
    (reward hacking; Gao et al., arXiv:2210.10760).

    Try: lower weights of the other reward.functions; sort rollouts/ by reward and read the best paid.
    """
    score = shift(rows, "critic/score/mean")
    if score.change <= 0 or not score.clear:
        return
    accuracy = shift(rows, "train/accuracy")
    if accuracy.change <= -0.05 and accuracy.clear:
        yield (
            f"The reward rises ({score.early:.3g} to {score.late:.3g}) while accuracy falls ({accuracy.early:.3g} to "
            f"{accuracy.late:.3g}): the policy earns with something else than being right."
        )


def stale_weights(rows: MetricRows) -> Verdict:
    """The gap between the engine's and the trainer's probabilities was small at the first step, when both had the same
    weights, and has grown many times since: the engine does not get the new ones.

    Seen elsewhere as a jump from 0.015 to 0.2 (huggingface/trl#5312); without that fault it stays within twice. In
    asynchronous runs the tokens count that were drawn by the newest weights.

    Try: another rollout.engine (`hf` is the reference), to see whether it is the engine: weights must reach it after
    every step. An engine of your own: does its update_weights copy all tensors?
    """
    [first], now = recent(having(rows)[:1], GAP, 1), recent(having(rows[1:][-2 * LONG :]), GAP, SHORT)
    if min(now) >= max(8 * first, 1e-4):
        yield (
            f"The engine's weights are stale: its probabilities were within {first:.1e} of the trainer's at first and "
            f"are {now[-1]:.1e} away now."
        )


def rollout_gap(rows: MetricRows) -> Verdict:
    """Engine and trainer give clearly different probabilities to the same tokens, so the gradient is off-policy.

    Healthy: 1e-6 in float32, about 0.01 in bfloat16 with another engine (vllm-project/vime#64, huggingface/trl#5312).
    Where older weights have drawn all tokens, 0.2: less may be the updates since.

    Try: model.dtype=float32; rollout.engine=hf, to compare; rollout.top_p=1 and rollout.top_k=0.
    """
    name = least_stale(rows := rows[-2 * LONG :])
    now = recent(having(rows, name), name, SHORT)
    if min(now) >= (0.03 if name == GAP else 0.2):
        yield f"Engine and trainer differ by {now[-1]:.2g} in the probability of a token, on average."


def entropy_collapse(rows: MetricRows) -> Verdict:
    """Entropy has fallen to a tenth of the start's while much is still wrong and most groups are all alike: the policy
    repeats itself and no longer explores (arXiv:2505.22617 finds that reward stops rising where entropy is used up).

    Try: algorithm.clip.high=0.28 (clip-higher), a lower train.learning_rate, rollout.temperature=1, or a KL penalty
    (algorithm.kl.coefficient=0.001).
    """
    start = fmean(recent(rows[:3], "actor/entropy", 3))
    now = fmean(recent(rows[3:], "actor/entropy", MEDIUM))
    accuracy = fmean(recent(rows, "train/accuracy", MEDIUM))
    mixed = fmean(recent(rows, "by_group/frac_mixed", MEDIUM, default=0.0))
    if now <= 0.1 * start and accuracy <= 0.85 and mixed <= 0.5:
        yield (
            f"Entropy fell from {start:.2g} to {now:.2g} nats per token, with accuracy at {accuracy:.2f}: the policy "
            "hardly explores any more."
        )


def gradient_spikes(rows: MetricRows) -> Verdict:
    """A gradient norm ten times the usual one, and three times the largest of the first steps. One is clipped; several
    undo learning.

    Try: a smaller train.max_grad_norm or train.learning_rate; look at this step's rollouts/ for odd texts or rewards.
    """
    [now] = recent(rows, "actor/grad_norm", 1)
    before = [norm for norm in column(rows[:-1], "actor/grad_norm") if norm > 0]
    if len(before) < LONG:
        return
    usual = median(before[-LONG:])
    if now >= 10 * usual and now >= 3 * max(before[:LONG]):
        yield f"The gradient norm jumped to {now:.3g}; {usual:.3g} is usual."


TEXTS = frozenset({"repetition_is_paid", "echo_is_paid", "hedging_is_paid", "empty_answer_is_paid", "one_text_is_paid"})
HACKED = TEXTS | {"keyword_is_paid", "pays_for_length", "pays_for_shortness", "wrong_answers_are_paid"}
NO_SIGNAL = HACKED | {"no_updates", "missing_stop_token", "length_limit", "learning_rate_too_high", "constant_reward"}
"""What leaves all completions without reward."""
ASKS_NO_MORE = frozenset({"replies_in_the_loss", "environment_failures", "learning_rate_too_high"})
"""What ends the use of an environment."""

RULES = (
    Rule("error", skipped_updates),
    Rule("error", replies_in_the_loss),
    Rule("error", environment_failures),
    Rule("error", reward_failures, frozenset({"environment_failures"})),
    Rule("error", stale_weights),
    Rule("error", rollout_gap, frozenset({"stale_weights"})),
    Rule("error", learning_rate_too_high, frozenset({"stale_weights"})),
    Rule("error", missing_stop_token, frozenset({"learning_rate_too_high"})),
    Rule("warning", length_limit, frozenset({"missing_stop_token", "learning_rate_too_high"})),
    Rule("error", repetition_is_paid, frozenset({"missing_stop_token"})),
    Rule("error", echo_is_paid),
    Rule("error", hedging_is_paid),
    Rule("error", empty_answer_is_paid),
    Rule("error", one_text_is_paid, frozenset({"empty_answer_is_paid", "repetition_is_paid"})),
    Rule("error", pays_for_length, TEXTS),
    Rule("error", pays_for_shortness, TEXTS),
    Rule("error", keyword_is_paid, TEXTS | {"pays_for_length", "pays_for_shortness"}),
    Rule("error", wrong_answers_are_paid, TEXTS | {"pays_for_length", "pays_for_shortness", "keyword_is_paid"}),
    Rule("error", reward_without_accuracy, HACKED),
    Rule("warning", format_alone_is_paid, HACKED),
    Rule("error", no_updates, NO_SIGNAL),
    Rule("error", constant_reward, NO_SIGNAL),
    Rule("warning", no_mixed_groups, NO_SIGNAL),
    Rule("warning", dead_reward_part, NO_SIGNAL),
    Rule("warning", invalid_actions, frozenset({"learning_rate_too_high", "missing_stop_token"})),
    Rule("warning", replies_die_out, ASKS_NO_MORE),
    Rule("warning", entropy_collapse, HACKED | {"learning_rate_too_high", "constant_reward"}),
    Rule("warning", gradient_spikes, frozenset({"learning_rate_too_high"})),
)
"""In the order of causes: what explains another stands before it."""


# --------------------------------------------------------------------------------------------------------------------
# The doctor at a run's side: it sees one row of metrics after another and says what is new.

FIRST_ROWS, LAST_ROWS = 20, 100


class Doctor:
    """Applies the rules to the steps so far. What it says is a function of the rows alone.

    Attributes:
        findings: all so far, oldest first; one of a kind.

    Example:
        >>> doctor = Doctor()
        >>> rows = [{"step": step, "response_length/clip_ratio": 0.8} for step in range(1, 7)]
        >>> [finding.id for row in rows for finding in doctor.observe(row)]
        ['length_limit']
        >>> doctor.findings[0].step
        5
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._rows: list[Row] = []

    def observe(self, row: Row, completions: Sequence[Mapping[str, Any]] = ()) -> list[Finding]:
        """Take the metrics of one more step; what an evaluation logged is passed over.

        Args:
            completions: of the step, as rows of `rollouts/`; findings quote them.

        Returns:
            The findings that are new.
        """
        if is_evaluation(row):
            return []
        self._rows.append(row)
        if len(self._rows) > FIRST_ROWS + LAST_ROWS:
            del self._rows[FIRST_ROWS]
        new: list[Finding] = []
        for rule in RULES:
            known = {finding.id for finding in (*self.findings, *new)}
            if rule.id in known or rule.explained_by & known:
                continue
            with suppress(NotLogged):
                for what, advice in rule.findings(self._rows):
                    step = int(row["step"] or 0)
                    seen = quote(rule.id, completions)
                    new.append(
                        Finding(id=rule.id, severity=rule.severity, step=step, what=what, advice=advice, quote=seen)
                    )
        self.findings += new
        return new


def diagnose(rows: Iterable[Row]) -> list[Finding]:
    """All findings of a run, from the rows of its `metrics.jsonl`."""
    doctor = Doctor()
    for row in rows:
        doctor.observe(row)
    return doctor.findings
