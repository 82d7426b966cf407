"""Quotes: completions that show a finding."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

QUOTED = 100
"""Characters of a completion that a finding shows."""
Rollout = Mapping[str, Any]
"""A row of `rollouts/step_N/train.jsonl`."""
Example = tuple[Sequence[Rollout], str]
"""Rows that show a finding, and their description."""


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
