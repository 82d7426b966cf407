"""Rules about a reward that is hacked: what is paid (repetition, a copy of the prompt, a list of answers, no answer,
one text, a word, shortness, the format, wrong answers), and the completions that show it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from atomrl.tracking.doctor.findings import LONG, MEDIUM, SHORT, MetricRows, Row, Verdict, column, recent, shift

QUOTED = 100
"""Characters of a completion that a finding shows."""
QUARTER = 0.25
"""The share of completions from which a way of writing counts as learned. Good runs of docs/development/benchmarks.md
had at most 0.055 over five steps, from a start that was taught each of these ways in 6% of its demonstrations."""


def _paid(rows: MetricRows, name: str) -> float | None:
    """The mean reward of such completions over the last steps, where it is no less than the mean of all and more than
    the worst that the run has paid; else None."""
    given, mean = column(rows[-MEDIUM:], f"{name}_reward"), fmean(recent(rows, "critic/score/mean", MEDIUM))
    worst = min(column(rows, "critic/score/min"), default=0.0)
    earned = fmean(given) if given else worst
    return earned if earned > worst + 1e-6 and earned >= mean - 0.05 * (mean - worst) else None


def _share(rows: MetricRows, name: str, least: float = QUARTER) -> float | None:
    """The median share of such completions over the last steps, where it is at least `least`; else None."""
    share = median(recent(rows, name, MEDIUM))
    return share if share >= least else None


def repetition_is_paid(rows: MetricRows) -> Verdict:
    """Many completions repeat one piece of text, and earn no less than the others: repeating is learned.

    Try: a reward that gives repetition nothing (reward.functions: add repetition_penalty, or check the answer alone), a
    smaller rollout.max_completion_tokens, a KL penalty (algorithm.kl.coefficient=0.01).
    """
    if (share := _share(rows, "text/repetition")) and (paid := _paid(rows, "text/repetition")) is not None:
        yield f"{share:.0%} of the completions are one piece of text repeated, and they earn {paid:.3g} on average."


def echo_is_paid(rows: MetricRows) -> Verdict:
    """Many completions copy their prompt, and earn no less than the others: the reward reads the question in the
    answer.

    Try: a reward that reads the answer alone (what the prompt has and the completion too should count nothing), and one
    that compares with ground_truth beside it (reward.functions).
    """
    if (share := _share(rows, "text/echo")) and (paid := _paid(rows, "text/echo")) is not None:
        yield f"{share:.0%} of the completions are copied from their prompt, and they earn {paid:.3g} on average."


def hedging_is_paid(rows: MetricRows) -> Verdict:
    """Many completions list several answers, and earn no less than the others: the reward looks whether the right
    answer is among them.

    Try: a reward that takes one answer and compares all of it (strict_math, exact_match, boxed), not one that searches
    the truth in the text (reward.functions).
    """
    if (share := _share(rows, "text/hedge")) and (paid := _paid(rows, "text/hedge")) is not None:
        yield f"{share:.0%} of the completions list several answers for one, and they earn {paid:.3g} on average."


def empty_answer_is_paid(rows: MetricRows) -> Verdict:
    """Many completions have no answer, and earn no less than the others: saying nothing is the safest.

    Try: 0 in the reward where there is no answer, also where it fails to read one (reward.functions; a default in an
    `except` is the usual cause), and no penalty for wrong answers that is larger than the reward of right ones.
    """
    if (share := _share(rows, "text/empty")) and (paid := _paid(rows, "text/empty")) is not None:
        yield f"{share:.0%} of the completions have no answer, and they earn {paid:.3g} on average."


def one_text_is_paid(rows: MetricRows) -> Verdict:
    """Three of four completions are one and the same text, whatever the prompt, by a quarter more than at the start,
    and it is paid. (A text that is the right answer for half of its prompts does not count: such data are one-sided,
    and the policy is right. Neither does a model that begins with one answer to all: it has not learned that.)

    Try: a reward that depends on the prompt (compare with ground_truth); data whose answers differ (data.train); a KL
    penalty (algorithm.kl.coefficient=0.01).
    """
    share = _share(rows, "text/same", 1 - QUARTER)
    if share is None or share < fmean(column(rows, "text/same")[:SHORT]) + QUARTER:
        return
    if (paid := _paid(rows, "text/same")) is not None:
        yield f"{share:.0%} of the completions are the same text, whatever the prompt, and earn {paid:.3g} on average."


def keyword_is_paid(rows: MetricRows) -> Verdict:
    """Within groups the reward goes with one word, which half of the completions or more have, and most of the best
    paid are wrong. A correlation of 0.9 explains four fifths of what rewards differ by. Honest runs come to it as well
    (0.94, by a word of the form), so it is the wrong ones among the best paid that tell. Where answers cannot be
    compared with the ground truth it has to be 0.99: a form that is paid with right answers alone goes with a word too.

    Try: a reward that compares the answer with ground_truth (reward.functions); of a judge or a reward model, look at
    what it gives to this word alone (`atomrl reward NAME FILE`).
    """
    going, share = recent(rows, "text/word_correlation", MEDIUM), _share(rows, "text/word_share", 2 * QUARTER)
    wrong = column(rows[-MEDIUM:], "text/best_wrong")
    certain = min(going) >= 0.9 and fmean(wrong) >= 0.5 if wrong else min(going) >= 0.99
    if share is not None and certain:
        said = f", and {fmean(wrong):.0%} of the best paid are wrong" if wrong else ""
        yield f"The reward is little else than one word: their correlation within groups is {fmean(going):.2f}{said}."


def wrong_answers_are_paid(rows: MetricRows) -> Verdict:
    """Answers that are literally the ground truth earn no more than the others, which earn a quarter of the reward's
    range or more: the reward does not look at the answer. The gap has to be below a tenth of the range with two
    standard errors.

    Try: compare with ground_truth in the reward (reward.functions: strict_math, exact_match, boxed, gsm8k), or drop the
    column if there is no right and wrong.
    """
    right, wrong = (recent(rows, f"text/{name}_reward", LONG) for name in ("right", "wrong"))
    low, high = min(recent(rows, "critic/score/min", LONG)), max(recent(rows, "critic/score/max", LONG))
    gaps = [more - less for more, less in zip(right, wrong, strict=True)]
    bound = fmean(gaps) + 2 * stdev(gaps) / LONG**0.5
    if high > low and bound <= 0.1 * (high - low) and fmean(wrong) >= low + QUARTER * (high - low):
        yield f"Right answers earn {fmean(right):.3g} on average, and wrong ones {fmean(wrong):.3g}."


def pays_for_shortness(rows: MetricRows) -> Verdict:
    """Little else than shortness decides what is earned (a correlation with length below -0.9 within groups), while
    most answers are wrong or cannot be judged; or the completions become shorter by a quarter and accuracy falls with
    it.

    A cost of length is no fault by itself: among right answers the shorter may earn more, and where all are right
    nothing else is left to learn.

    Try: no cost of length for wrong answers, a smaller weight of it (reward.functions), or length_penalty with
    free_tokens, below which length costs nothing.
    """
    every = recent(rows, "reward/length_correlation", MEDIUM, default=0.0)
    able = [column(rows[-MEDIUM:], name) for name in ("train/accuracy", "text/right")]
    if max(every) < -0.9 and not any(values and fmean(values) > 0.5 for values in able):
        yield f"The reward is little else than shortness: its correlation with length in groups is {fmean(every):.2f}."
        return
    score = shift(rows, "critic/score/mean")
    if score.change <= 0 or not score.clear:
        return
    length, accuracy = shift(rows, "response_length/mean"), shift(rows, "train/accuracy")
    shorter = length.clear and length.late <= 0.75 * length.early
    if shorter and accuracy.change <= -0.05 and accuracy.clear:
        yield (
            f"The reward rises ({score.early:.3g} to {score.late:.3g}) as completions become shorter "
            f"({length.early:.0f} to {length.late:.0f} tokens) and accuracy falls ({accuracy.early:.3g} to "
            f"{accuracy.late:.3g})."
        )


def format_alone_is_paid(rows: MetricRows) -> Verdict:
    """The reward has risen by a part beside the first until that part is full, by three tenths of it or more, while
    accuracy (the first reward function's) is at most a half, has not followed (by a fifth of that: in the right form
    chance is right more often) and does not rise now: the format is learned, and nothing else.

    Try: a lower weight of the part (reward.functions), or a format that counts only with a right answer (strict_format
    beside strict_math does not); easier problems, or a warm start (SFT), so that some answers are right.
    """
    score = shift(rows, "critic/score/mean", LONG)
    if score.change <= 0 or not score.clear:
        return
    accuracy, lately = (shift(some, "train/accuracy", LONG) for some in (rows, rows[-2 * LONG :]))
    if accuracy.late > 0.5 or (lately.change > 0 and lately.clear):
        return
    for name in [name for name in rows[-1] if name.startswith("reward/") and name.endswith("/mean")]:
        part = column(rows, name)
        early, late, top = fmean(part[:SHORT]), fmean(part[-LONG:]), max(part)
        risen = (late - early) / top if top > 0 else 0.0
        if risen > 0.3 and late >= 0.95 * top and accuracy.change <= 0.2 * risen:
            short = name.removeprefix("reward/").removesuffix("/mean")
            yield (
                f"The reward rose ({score.early:.3g} to {score.late:.3g}) by {short}, which is full ({early:.3g} to "
                f"{late:.3g}); accuracy is {accuracy.late:.3g}, from {accuracy.early:.3g}."
            )
            return


# ---- Completions that show it ----


Rollout = Mapping[str, Any]
"""A row of `rollouts/step_N/train.jsonl`."""


def quote(finding: str, rollouts: Sequence[Rollout]) -> str:
    """Completions of a step that show what a finding says, and what they earn on average; "" where the finding is not
    about texts.

    Args:
        finding: its id.
        rollouts: of the step.

    Example:
        >>> rows = [{"prompt_id": "1:a", "completion": "Max. " * 9, "reward": 1.0}] * 8
        >>> quote("repetition_is_paid", rows)
        "reward 1: 8 of 8 completions are 'Max. ' repeated"
    """
    scored = [
        row for row in rollouts
        if isinstance(row.get("reward"), int | float) and isinstance(row.get("completion"), str)
    ]  # fmt: skip
    if not scored or finding not in QUOTED_FOR:
        return ""
    shown, words = SHOWN_BY.get(finding, _best)(scored)
    if not shown:  # the step may differ from those that the finding is of
        shown, words = _best(scored)
    return f"reward {fmean(float(row['reward']) for row in shown):.3g}: {words}"


Shown = tuple[Sequence[Rollout], str]
"""Rows that show a finding, and how they are said."""


def _repeated(scored: Sequence[Rollout]) -> Shown:
    units = [repeated_unit(row["completion"]) for row in scored]
    if not any(units):
        return [], ""
    [(unit, count)] = Counter(filter(None, units)).most_common(1)
    shown = [row for row, own in zip(scored, units, strict=True) if own == unit]
    return shown, f"{count} of {len(scored)} completions are {_short(unit)} repeated"


def _same(scored: Sequence[Rollout]) -> Shown:
    [(text, count)] = Counter(row["completion"] for row in scored).most_common(1)
    shown = [row for row in scored if row["completion"] == text]
    return shown, f"{count} of {len(scored)} completions are {_short(text)}"


def _empty(scored: Sequence[Rollout]) -> Shown:
    nothing = re.compile(r"(?s)\s*|.*(?:<answer>\s*</answer>|\\boxed\{\s*\})\s*")
    shown = [row for row in scored if nothing.fullmatch(row["completion"])]
    text = Counter(row["completion"] for row in shown).most_common(1)
    return shown, "".join(
        f"{len(shown)} of {len(scored)} completions have no answer, as {_short(one)}" for one, _ in text
    )


def _word(scored: Sequence[Rollout]) -> Shown:
    """The word that most of the best paid and fewest of all have."""
    top, _ = _best(scored)
    best, every = (
        Counter(word for row in some for word in set(re.findall(r"\w+", row["completion"]))) for some in (top, scored)
    )
    if not best:
        return [], ""
    word = max(best, key=lambda one: (2 * best[one] - every[one], len(one), one))
    of_all = f"{every[word]} of all {len(scored)} completions"
    return top, f"{best[word]} of {len(top)} have {word!r} ({of_all}), as {_short(top[0]['completion'])}"


def _best(scored: Sequence[Rollout]) -> Shown:
    best = max(float(row["reward"]) for row in scored)
    shown = [row for row in scored if float(row["reward"]) >= best - 1e-9]
    [(text, count)] = Counter(row["completion"] for row in shown).most_common(1)
    said = f", {count} of them" if count > 1 else ", as"
    return shown, f"{len(shown)} of {len(scored)} completions{said} {_short(text)}"


SHOWN_BY = {
    "repetition_is_paid": _repeated,
    "one_text_is_paid": _same,
    "empty_answer_is_paid": _empty,
    "keyword_is_paid": _word,
}
"""Completions that a finding quotes, where they are not the best paid of the step."""
QUOTED_FOR = {
    *SHOWN_BY, "echo_is_paid", "hedging_is_paid", "format_alone_is_paid", "wrong_answers_are_paid", "pays_for_length",
    "pays_for_shortness", "reward_without_accuracy", "constant_reward", "no_mixed_groups",
}  # fmt: skip
"""Findings that are about texts."""


def repeated_unit(text: str) -> str | None:
    """The shortest piece that a text has four times or more in a row; None where there is none.

    Example:
        >>> repeated_unit("so: ha ha ha ha ha"), repeated_unit("1 2 3 4")
        (' ha', None)
    """
    match = re.search(r"(?s)(.{1,80}?)\1{3,}", text[-2000:])
    return match[1] if match else None


def _short(text: str) -> str:
    return repr(text if len(text) <= QUOTED else f"{text[: QUOTED // 2]} ... {text[-QUOTED // 2 :]}")


# --------------------------------------------------------------------------------------------------------------------
# The rules for runs with an environment; `rules.RULES` has them in its order.

REPLIES, INVALID = "environment/replies", "environment/replies/invalid"
KINDS = ("timeouts", "errors", "crashes", "invalid")


def replies_in_the_loss(rows: MetricRows) -> Verdict:
    """Tokens that the environment wrote are trained on as if the model had written them: it learns to write replies of
    its own, and stops asking (Search-R1, arXiv:2503.09516, section 3.1, masks them for this reason).

    Try: only what the model sampled may be a segment of origin `model` (`atomrl/types.py`), in an engine of your own
    too; RowBatch.loss_mask must be false elsewhere.
    """
    [tokens] = recent(rows, "train/reply_tokens", 1)
    if tokens:
        yield f"{tokens:.0f} tokens that the environment wrote were trained on in this step."


def environment_failures(rows: MetricRows) -> Verdict:
    """The environment fails: its episodes have no reward, are left out, and the batch is smaller than it looks.

    Try: read the message in rollouts/ (episode.message); is the service that it asks up, and as fast as
    environment.timeout_s wants?
    """
    [share] = recent(rows, "environment/ended/failed", 1)
    if share >= 0.01:
        found = {kind: rows[-1].get(f"reward/environment/{kind}") for kind in KINDS}
        counts = ", ".join(f"{kind} {value:.0f}" for kind, value in found.items() if value)
        yield f"The environment failed in {share:.0%} of the episodes{f' ({counts})' * bool(counts)}."


def invalid_actions(rows: MetricRows) -> Verdict:
    """A large part of the replies tells the model that it did something wrong (label `invalid`), and it does not become
    less: turns are lost, and the model learns in a conversation of complaints.

    Try: SFT on some episodes that are right; stop strings that end a turn where an action ends
    (environment.stop); a reward for turns that are valid, or a cost of those that are not.
    """
    kept = [row for row in rows if row.get(REPLIES)]
    shares = [(row.get(INVALID) or 0.0) / (row.get(REPLIES) or 1.0) for row in kept]
    if len(shares) >= LONG:
        before, late = fmean(shares[-LONG:-MEDIUM]), shares[-MEDIUM:]
        if min(late) >= 0.3 and fmean(late) >= 0.9 * before:
            yield f"{fmean(late):.0%} of the replies say that an action was invalid, and it does not become less."


def replies_die_out(rows: MetricRows) -> Verdict:
    """A kind of reply that was common has nearly vanished, and the model has not become better without it: it no longer
    searches, or no longer calls its tools.

    A model that learns where it need not ask becomes more accurate meanwhile, and is not meant.

    Try: look for a cost of each reply in the reward: where it is charged on wrong answers too, a group of wrong answers
    differs in nothing else, and division by its deviation makes it large; charge it on right answers alone, or take
    algorithm.advantage.type=grpo_no_std. Compare reward/NAME/mean by part, and read rollouts/.
    """
    episodes = [row for row in rows if row.get(REPLIES) is not None]
    if len(episodes) < SHORT + MEDIUM:
        return
    labels = {name for row in episodes for name in row if name.startswith(f"{REPLIES}/") and name != INVALID}
    for name in sorted(labels):
        counts = [row.get(name) or 0.0 for row in episodes]
        places = range(len(counts) - MEDIUM - SHORT + 1)
        start = max(places, key=lambda place: fmean(counts[place : place + SHORT]))
        top, now = fmean(counts[start : start + SHORT]), counts[-MEDIUM:]
        before, after = (_ability(part) for part in (episodes[start : start + SHORT], episodes[-MEDIUM:]))
        if top >= 0.2 and max(now) <= 0.1 * top and after < before + 0.05:
            what = name.removeprefix(f"{REPLIES}/")
            yield (
                f"The model has stopped asking: replies of the kind {what!r} fell from {top:.2g} to {now[-1]:.2g} an "
                f"episode, and accuracy went from {before:.2g} to {after:.2g}."
            )
            return


def _ability(rows: list[Row]) -> float:
    """How good the model was: accuracy, or where it is not logged the reward."""
    found = column(rows, "train/accuracy") or column(rows, "critic/score/mean")
    return fmean(found) if found else 0.0
