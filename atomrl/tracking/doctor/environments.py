"""Rules for runs with an environment."""

from __future__ import annotations

from statistics import fmean

from atomrl.tracking.doctor.findings import LONG, MEDIUM, SHORT, MetricRows, Row, Symptom, Verdict, column, recent

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
