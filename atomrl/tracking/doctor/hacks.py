"""Rules that detect reward hacking and problems of environments, and quotes of the completions that show it.

Hacks: repetition, a copy of the prompt, a list of answers, no answer, one text for all prompts, a keyword, shortness,
the format alone, wrong answers that earn as much as right ones. `doctor.RULES` has their order and remedies.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from atomrl.tracking.doctor.rules import (
    LONG,
    MEDIUM,
    SHORT,
    MetricRows,
    Row,
    Symptom,
    Verdict,
    column,
    recent,
    shift,
)

QUOTED = 100
"""Characters of a completion that a finding shows."""
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


# --------------------------------------------------------------------------------------------------------------------
# Quotes: completions that show a finding.

Rollout = Mapping[str, Any]
"""A row of `rollouts/step_N/train.jsonl`."""


def quote(finding: str, rollouts: Sequence[Rollout]) -> str:
    """Describe completions of a step that show a finding, with their mean reward; "" if the finding is not about texts.

    Args:
        finding: id of the finding.
        rollouts: rows of the step.

    Example:
        >>> rows = [{"prompt_id": "1:a", "completion": "Max. " * 9, "reward": 1.0}] * 8
        >>> quote("repetition_is_paid", rows)
        "reward 1: 8 of 8 completions repeat 'Max. '"
    """
    scored = [
        row for row in rollouts
        if isinstance(row.get("reward"), int | float) and isinstance(row.get("completion"), str)
    ]  # fmt: skip
    if not scored or finding not in QUOTED_FOR:
        return ""
    examples, text = EXAMPLES.get(finding, _best)(scored)
    if not examples:  # this step may differ from those that the finding is about
        examples, text = _best(scored)
    return f"reward {fmean(float(row['reward']) for row in examples):.3g}: {text}"


Example = tuple[Sequence[Rollout], str]
"""Rows that show a finding, and their description."""


def _repeated(scored: Sequence[Rollout]) -> Example:
    units = [repeated_unit(row["completion"]) for row in scored]
    if not any(units):
        return [], ""
    [(unit, count)] = Counter(filter(None, units)).most_common(1)
    examples = [row for row, own in zip(scored, units, strict=True) if own == unit]
    return examples, f"{count} of {len(scored)} completions repeat {_short(unit)}"


def _same(scored: Sequence[Rollout]) -> Example:
    [(text, count)] = Counter(row["completion"] for row in scored).most_common(1)
    examples = [row for row in scored if row["completion"] == text]
    return examples, f"{count} of {len(scored)} completions are {_short(text)}"


def _empty(scored: Sequence[Rollout]) -> Example:
    no_answer = re.compile(r"(?s)\s*|.*(?:<answer>\s*</answer>|\\boxed\{\s*\})\s*")
    examples = [row for row in scored if no_answer.fullmatch(row["completion"])]
    if not examples:
        return [], ""
    [(text, _)] = Counter(row["completion"] for row in examples).most_common(1)
    return examples, f"{len(examples)} of {len(scored)} completions have no answer, such as {_short(text)}"


def _word(scored: Sequence[Rollout]) -> Example:
    """Select the word that is in most of the best paid completions and in fewest of all."""
    top, _ = _best(scored)
    best, every = (
        Counter(word for row in rows for word in set(re.findall(r"\w+", row["completion"]))) for rows in (top, scored)
    )
    if not best:
        return [], ""
    word = max(best, key=lambda word: (2 * best[word] - every[word], len(word), word))
    of_all = f"{every[word]} of all {len(scored)} completions"
    return top, f"{best[word]} of {len(top)} contain {word!r} ({of_all}), such as {_short(top[0]['completion'])}"


def _best(scored: Sequence[Rollout]) -> Example:
    best = max(float(row["reward"]) for row in scored)
    examples = [row for row in scored if float(row["reward"]) >= best - 1e-9]
    [(text, count)] = Counter(row["completion"] for row in examples).most_common(1)
    times = f", {count} of them" if count > 1 else ", such as"
    return examples, f"{len(examples)} of {len(scored)} completions{times} {_short(text)}"


EXAMPLES = {
    "repetition_is_paid": _repeated,
    "one_text_is_paid": _same,
    "empty_answer_is_paid": _empty,
    "keyword_is_paid": _word,
}
"""Selects the completions that a finding quotes; all others quote the best paid."""
QUOTED_FOR = {
    *EXAMPLES, "echo_is_paid", "hedging_is_paid", "format_alone_is_paid", "wrong_answers_are_paid", "pays_for_length",
    "pays_for_shortness", "reward_without_accuracy", "constant_reward", "no_mixed_groups",
}  # fmt: skip
"""Findings that are about texts, and have a quote."""


def repeated_unit(text: str) -> str | None:
    """Return the shortest substring that a text repeats at least four times in a row, or None.

    Example:
        >>> repeated_unit("so: ha ha ha ha ha"), repeated_unit("1 2 3 4")
        (' ha', None)
    """
    match = re.search(r"(?s)(.{1,80}?)\1{3,}", text[-2000:])
    return match[1] if match else None


def _short(text: str) -> str:
    return repr(text if len(text) <= QUOTED else f"{text[: QUOTED // 2]} ... {text[-QUOTED // 2 :]}")


# --------------------------------------------------------------------------------------------------------------------
# Rules for runs with an environment.

REPLIES, INVALID = "environment/replies", "environment/replies/invalid"
KINDS = ("timeouts", "errors", "crashes", "invalid")


def replies_in_the_loss(rows: MetricRows) -> Verdict:
    """Tokens of the environment are in the loss: the model learns to write replies itself, and stops asking
    (Search-R1, arXiv:2503.09516, section 3.1, masks them for this reason)."""
    [tokens] = recent(rows, "train/reply_tokens", 1)
    if tokens:
        yield Symptom(f"{tokens:.0f} tokens of the environment were trained on in this step.")


def environment_failures(rows: MetricRows) -> Verdict:
    """The environment fails: its episodes have no reward, are dropped, and the batch is smaller than configured."""
    [share] = recent(rows, "environment/ended/failed", 1)
    if share >= 0.01:
        failures = {kind: rows[-1].get(f"reward/environment/{kind}") for kind in KINDS}
        counts = ", ".join(f"{kind} {value:.0f}" for kind, value in failures.items() if value)
        yield Symptom(f"The environment failed in {share:.0%} of the episodes{f' ({counts})' if counts else ''}.")


def invalid_actions(rows: MetricRows) -> Verdict:
    """Many replies say that an action was invalid (label `invalid`), and their share does not fall, so turns are
    wasted."""
    with_replies = [row for row in rows if row.get(REPLIES)]
    shares = [(row.get(INVALID) or 0.0) / (row.get(REPLIES) or 1.0) for row in with_replies]
    if len(shares) >= LONG:
        before, late = fmean(shares[-LONG:-MEDIUM]), shares[-MEDIUM:]
        if min(late) >= 0.3 and fmean(late) >= 0.9 * before:
            yield Symptom(f"{fmean(late):.0%} of the replies report an invalid action, and this does not decrease.")


def replies_die_out(rows: MetricRows) -> Verdict:
    """The model no longer searches or calls its tools: a kind of reply that was common has nearly vanished, and
    accuracy has not improved meanwhile (a model that learns when not to ask becomes more accurate)."""
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
            yield Symptom(
                f"The model stopped asking: replies of kind {what!r} fell from {top:.2g} to {now[-1]:.2g} per "
                f"episode, and accuracy went from {before:.2g} to {after:.2g}."
            )
            return


def _ability(rows: list[Row]) -> float:
    """Return the mean accuracy, or the mean reward if accuracy is not logged."""
    values = column(rows, "train/accuracy") or column(rows, "critic/score/mean")
    return fmean(values) if values else 0.0
