"""Rules that detect reward hacking."""

from __future__ import annotations

from statistics import fmean, median, stdev

from atomrl.tracking.doctor.findings import LONG, MEDIUM, SHORT, MetricRows, Symptom, Verdict, column, recent, shift

QUARTER = 0.25
"""Minimum share of completions for a pattern to count as learned. Good runs of docs/development/benchmarks.md had at
most 0.055 over five steps, from a model that had seen each pattern in 6% of its demonstrations."""


def _paid(rows: MetricRows, name: str) -> float | None:
    """Return the mean reward of the completions with pattern `name` over the last steps; None if it is below the mean
    of all completions, or no better than the worst reward of the run."""
    rewards, mean = column(rows[-MEDIUM:], f"{name}_reward"), fmean(recent(rows, "critic/score/mean", MEDIUM))
    worst = min(column(rows, "critic/score/min"), default=0.0)
    average = fmean(rewards) if rewards else worst
    return average if average > worst + 1e-6 and average >= mean - 0.05 * (mean - worst) else None


def _share(rows: MetricRows, name: str, least: float = QUARTER) -> float | None:
    """Return the median share of the completions with pattern `name` over the last steps; None below `least`."""
    share = median(recent(rows, name, MEDIUM))
    return share if share >= least else None


def _pattern_is_paid(rows: MetricRows, name: str, description: str) -> Verdict:
    if (share := _share(rows, name)) and (paid := _paid(rows, name)) is not None:
        yield Symptom(f"{share:.0%} of the completions {description}; their mean reward is {paid:.3g}.")


def repetition_is_paid(rows: MetricRows) -> Verdict:
    """Many completions repeat one piece of text, and earn no less than the others: repetition is learned."""
    return _pattern_is_paid(rows, "text/repetition", "repeat one piece of text")


def echo_is_paid(rows: MetricRows) -> Verdict:
    """Many completions copy their prompt, and earn no less than the others: the reward matches the question in the
    answer."""
    return _pattern_is_paid(rows, "text/echo", "are copied from their prompt")


def hedging_is_paid(rows: MetricRows) -> Verdict:
    """Many completions list several answers, and earn no less than the others: the reward checks only whether the right
    answer is among them."""
    return _pattern_is_paid(rows, "text/hedge", "list several answers")


def empty_answer_is_paid(rows: MetricRows) -> Verdict:
    """Many completions have no answer, and earn no less than the others: no answer is the safest answer."""
    return _pattern_is_paid(rows, "text/empty", "have no answer")


def one_text_is_paid(rows: MetricRows) -> Verdict:
    """Three of four completions are the same text for all prompts, a quarter more than at the start, and earn a reward.

    Not counted: a text that is the right answer for half of its prompts (the data are one-sided, the policy is right),
    and a model that answered everything alike from the start (it has not learned that).
    """
    share = _share(rows, "text/same", 1 - QUARTER)
    if share is None or share < fmean(column(rows, "text/same")[:SHORT]) + QUARTER:
        return
    if (paid := _paid(rows, "text/same")) is not None:
        what = f"{share:.0%} of the completions are the same text for all prompts; their mean reward is {paid:.3g}."
        yield Symptom(what)


def keyword_is_paid(rows: MetricRows) -> Verdict:
    """One word, in at least half of the completions, predicts the reward within groups, and most of the best paid
    completions are wrong.

    A correlation of 0.9 explains four fifths of the reward's variance. Honest runs reach it too (0.94, by a word of the
    format), so the wrong answers among the best paid decide. If answers cannot be compared with the ground truth, the
    threshold is 0.99: a format that is paid only with right answers correlates with a word too.
    """
    correlation, share = recent(rows, "text/word_correlation", MEDIUM), _share(rows, "text/word_share", 2 * QUARTER)
    wrong = column(rows[-MEDIUM:], "text/best_wrong")
    certain = min(correlation) >= 0.9 and fmean(wrong) >= 0.5 if wrong else min(correlation) >= 0.99
    if share is not None and certain:
        suffix = f", and {fmean(wrong):.0%} of those with the highest reward are wrong" if wrong else ""
        yield Symptom(
            "The reward depends almost only on one word: the correlation within groups is "
            f"{fmean(correlation):.2f}{suffix}."
        )


def wrong_answers_are_paid(rows: MetricRows) -> Verdict:
    """Answers equal to the ground truth earn no more than the others, which earn at least a quarter of the reward's
    range: the reward ignores the answer. The gap plus two standard errors has to be below a tenth of the range."""
    right, wrong = (recent(rows, f"text/{name}_reward", LONG) for name in ("right", "wrong"))
    low, high = min(recent(rows, "critic/score/min", LONG)), max(recent(rows, "critic/score/max", LONG))
    gaps = [more - less for more, less in zip(right, wrong, strict=True)]
    bound = fmean(gaps) + 2 * stdev(gaps) / LONG**0.5
    if high > low and bound <= 0.1 * (high - low) and fmean(wrong) >= low + QUARTER * (high - low):
        yield Symptom(f"The mean reward of right answers is {fmean(right):.3g}, of wrong ones {fmean(wrong):.3g}.")


def pays_for_shortness(rows: MetricRows) -> Verdict:
    """The reward falls with length (a correlation below -0.9 within groups) while most answers are wrong or cannot be
    judged; or completions become a quarter shorter and accuracy falls.

    A length penalty as such is fine: among right answers the shorter may earn more, and once all are right it is all
    that is left to learn.
    """
    every = recent(rows, "reward/length_correlation", MEDIUM, default=0.0)
    able = [column(rows[-MEDIUM:], name) for name in ("train/accuracy", "text/right")]
    if max(every) < -0.9 and not any(values and fmean(values) > 0.5 for values in able):
        correlation = f"the correlation with length within groups is {fmean(every):.2f}"
        yield Symptom(f"The reward depends almost only on shortness: {correlation}.")
        return
    score = shift(rows, "critic/score/mean")
    if score.change <= 0 or not score.clear:
        return
    length, accuracy = shift(rows, "response_length/mean"), shift(rows, "train/accuracy")
    shorter = length.clear and length.late <= 0.75 * length.early
    if shorter and accuracy.change <= -0.05 and accuracy.clear:
        yield Symptom(
            f"The reward rises ({score.early:.3g} to {score.late:.3g}) as completions become shorter "
            f"({length.early:.0f} to {length.late:.0f} tokens) and accuracy falls ({accuracy.early:.3g} to "
            f"{accuracy.late:.3g})."
        )


def format_alone_is_paid(rows: MetricRows) -> Verdict:
    """Only the format is learned: another reward part than the first has risen to its maximum, by at least 0.3 of it,
    while accuracy (by the first reward function) is at most 0.5, rose by less than a fifth of that (the right format
    alone makes chance hits more likely), and is not rising now."""
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
            yield Symptom(
                f"The reward rose ({score.early:.3g} to {score.late:.3g}) because of {short}, now at its maximum "
                f"({early:.3g} to {late:.3g}); accuracy is {accuracy.late:.3g}, from {accuracy.early:.3g}."
            )
            return
