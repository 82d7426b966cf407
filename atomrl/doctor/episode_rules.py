"""The rules for runs with an environment; `rules.RULES` has them in its order."""

from statistics import fmean

from atomrl.doctor.findings import LONG, MEDIUM, SHORT, MetricRows, Row, Verdict, column, recent

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
