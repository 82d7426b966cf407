"""Rules about a reward that is hacked: it is earned by repetition, by one text for all, or by the format alone; and the
completions that show it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from atomrl.doctor.findings import LONG, MEDIUM, MetricRows, Verdict, column, recent, shift

QUOTED = 100
"""Characters of a completion that a finding shows."""


def _paid(rows: MetricRows, name: str) -> float | None:
    """The mean reward of such completions over the last steps, where it is no less than the mean of all and more than
    the worst that the run has paid; else None."""
    earned = column(rows[-MEDIUM:], f"{name}_reward")
    worst = min(column(rows, "critic/score/min"), default=0.0)
    if not earned or fmean(earned) <= worst + 1e-6:
        return None
    return fmean(earned) if fmean(earned) >= 0.95 * fmean(recent(rows, "critic/score/mean", MEDIUM)) else None


def repetition_is_paid(rows: MetricRows) -> Verdict:
    """Many completions repeat one piece of text, and earn no less than the others: repeating is learned.

    Try: a reward that gives repetition nothing (reward.functions: add repetition_penalty, or check the answer alone), a
    smaller rollout.max_completion_tokens, a KL penalty (algorithm.kl.coefficient=0.01).
    """
    share = median(recent(rows, "text/repetition", MEDIUM))
    if share >= 0.25 and (paid := _paid(rows, "text/repetition")) is not None:
        yield f"{share:.0%} of the completions are one piece of text repeated, and they earn {paid:.3g} on average."


def one_text_is_paid(rows: MetricRows) -> Verdict:
    """Nearly all completions are one and the same text, whatever the prompt, and it is paid.

    Try: a reward that depends on the prompt (compare with ground_truth); data whose answers differ (data.train); a KL
    penalty (algorithm.kl.coefficient=0.01).
    """
    share = median(recent(rows, "text/same", MEDIUM))
    if share >= 0.9 and (paid := _paid(rows, "text/same")) is not None:
        yield f"{share:.0%} of the completions are the same text, whatever the prompt, and earn {paid:.3g} on average."


def format_alone_is_paid(rows: MetricRows) -> Verdict:
    """The reward has risen by a part beside the first until that part is full, while accuracy (the first reward
    function's) has stayed where it was: the format is learned, and nothing else.

    Try: a lower weight of the part (reward.functions), or a format that counts only with a right answer (strict_format
    beside strict_math does not); easier problems, or a warm start (`atomrl sft`), so that some answers are right.
    """
    score, accuracy = shift(rows, "critic/score/mean", LONG), shift(rows, "train/accuracy", LONG)
    means = [name for name in rows[-1] if name.startswith("reward/") and name.endswith("/mean")]
    for name in means:
        part = shift(rows, name, LONG)
        top = max(column(rows, name))
        full = top > 0 and part.late >= 0.95 * top and part.late > part.early + 0.3 * top
        stuck = accuracy.late <= min(0.5, accuracy.early + 0.02)
        if full and stuck and score.change > 0 and score.clear:
            short = name.removeprefix("reward/").removesuffix("/mean")
            yield (
                f"The reward rose ({score.early:.3g} to {score.late:.3g}) by {short} alone, which is full; accuracy "
                f"is {accuracy.late:.3g} as at the start ({accuracy.early:.3g})."
            )
            return


# ---- Completions that show it ----


def quote(finding: str, rollouts: Sequence[Mapping[str, Any]]) -> str:
    """Completions of a step that show what a finding says; "" where the finding is not about texts.

    Args:
        finding: its id.
        rollouts: rows of `rollouts/step_N/train.jsonl`.

    Example:
        >>> rows = [{"prompt_id": "1:a", "completion": "Max. " * 9, "reward": 1.0}] * 8
        >>> quote("repetition_is_paid", rows)
        "reward 1: 8 of 8 completions are 'Max. ' repeated"
    """
    scored = [row for row in rollouts if isinstance(row.get("reward"), int | float) and row.get("completion")]
    if not scored or finding not in QUOTES:
        return ""
    best = max(float(row["reward"]) for row in scored)
    top = [str(row["completion"]) for row in scored if float(row["reward"]) >= best - 1e-9]
    return f"reward {best:.3g}: " + QUOTES[finding](top, len(scored))


def _repeated(texts: Sequence[str], total: int) -> str:
    units = Counter(unit for text in texts if (unit := repeated_unit(text)))
    if not units:
        return _best(texts, total)
    unit, count = units.most_common(1)[0]
    return f"{count} of {total} completions are {_short(unit)} repeated"


def _same(texts: Sequence[str], total: int) -> str:
    text, count = Counter(texts).most_common(1)[0]
    return f"{count} of {total} completions are {_short(text)}"


def _best(texts: Sequence[str], total: int) -> str:
    text, count = Counter(texts).most_common(1)[0]
    return f"{len(texts)} of {total} completions" + (f", {count} of them" if count > 1 else ", as") + f" {_short(text)}"


QUOTES = {
    "repetition_is_paid": _repeated,
    "one_text_is_paid": _same,
    "format_alone_is_paid": _best,
    "pays_for_length": _best,
    "reward_without_accuracy": _best,
    "constant_reward": _best,
    "no_mixed_groups": _best,
}
"""How the best paid completions of a step are said, by finding: (their texts, how many completions there are)."""


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
