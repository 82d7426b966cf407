"""Metrics of completions as texts, by which the doctor knows a hacked reward: repetition, one text for all prompts, a
copied prompt, a list of answers, no answer; a word that decides the reward; and what right and wrong answers earn.

All are computed from texts and rewards alone, whatever the reward function is. A property that the ground truth itself
has (a task of copying, of listing) does not count. Episodes of several turns are left out.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean
from typing import Any

from atomrl.rewards.answers import answers_equal, normalise_text, parse_number
from atomrl.rewards.format import extract_answer, marked_answer
from atomrl.types import Trajectory, by_group

WINDOW, LEAST, SHARE, LOOKED_AT = 8, 32, 0.35, 2000
"""A text of LEAST characters or more is repetition where at most SHARE of its windows of WINDOW characters differ. The
last LOOKED_AT characters count."""
COPIED = 0.7
"""A text of LEAST characters or more is an echo where so many of its windows stand in the prompt: more than what a
solution has that begins with the question."""
SEVERAL = 3
"""Different answers make a list that hedges: two may be a correction."""
MIXED, VARIED, JUDGED = 4, 0.1, 4
"""The correlation of a word and the reward needs MIXED groups in which both vary, so that chance makes none, and a word
that at least VARIED of their completions have, and lack. Rewards of right and wrong answers need JUDGED of each."""


def repeats(text: str) -> bool:
    """Whether a text is mostly one piece over and over.

    Example:
        >>> repeats("Max. " * 8), repeats("7-3=4+9=13, and 13 times 7 is 91, so the last digit is 1.")
        (True, False)
    """
    windows = _windows(text)
    return len(windows) > LEAST - WINDOW and len(set(windows)) <= SHARE * len(windows)


def echoes(text: str, prompt: str) -> bool:
    """Whether a text is mostly copied from its prompt.

    Example:
        >>> asked = "Natalia sold clips to 48 of her friends in April. How many clips did she sell?"
        >>> echoes(asked[:50], asked), echoes("She sold clips to 48 friends, so that is 48.", asked)
        (True, False)
    """
    windows = _windows(text)
    return len(windows) > LEAST - WINDOW and sum(map(_asked(prompt).__contains__, windows)) >= COPIED * len(windows)


def hedges(text: str, truth: str, known: frozenset[str] = frozenset()) -> bool:
    """Whether the answer of a text is a list of different answers with the truth among them.

    Answers are numbers, and what is the truth of other prompts. The list is what is marked as answer (all `<answer>`
    and `\\boxed{}` of a text), without a mark the last line.

    Args:
        truth: one answer; of a truth that is a list itself no text hedges.
        known: normalised truths of other prompts.

    Example:
        >>> hedges("<answer>1, 2, 3 or 4</answer>", "3"), hedges("3 + 1 = 4", "4"), hedges("so 1, 2, 3", "1, 2, 3")
        (True, False, False)
        >>> hedges("maybe yes or no or maybe", "no", frozenset({"yes", "no", "maybe"}))
        True
    """
    text = text[-LOOKED_AT:]
    # without an <answer> within, so that many that are never closed are read once each
    marked = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>|\\boxed\{([^{}]*)\}", text, re.DOTALL)
    lines = text.rpartition("</think>")[2].strip().splitlines() or [""]
    items = _items(" ".join(map("".join, marked)) if marked else lines[-1])
    wanted = _items(truth)
    if len(wanted) != 1 or wanted[0] not in items:
        return False
    answers = [item for item in items if item in known or item == wanted[0] or re.fullmatch(r"-?\d[\d.,/]*", item)]
    return len(set(answers)) >= SEVERAL and len(answers) >= 0.8 * len(items)


def is_empty(text: str) -> bool:
    """Whether a text has no answer: nothing but white space, or an answer that is marked and empty.

    Example:
        >>> is_empty(" "), is_empty("<think>hm</think><answer></answer>"), is_empty("4")
        (True, True, False)
    """
    return not text.strip() or marked_answer(text) == ""


def is_right(text: str, truth: Any) -> bool | None:
    """Whether a text answers with its ground truth, whatever the reward says; None where that cannot be read.

    Of what `extract_answer` finds all is compared, and its last number; words of the truth may stand among others. So a
    grader that is more lenient than this one, or a judge, finds few answers right that this calls wrong.

    Example:
        >>> is_right("<answer>18 dollars</answer>", "18"), is_right("Yes, it is.", "yes"), is_right("18", None)
        (True, True, None)
    """
    answer = extract_answer(text)
    tried = [answer, *re.findall(r"-?\d+(?:[.,/]\d+)*", answer)[-1:]]
    try:
        return any(
            answers_equal(one, wanted) or (parse_number(str(wanted)) is None and _has_words(answer, str(wanted)))
            for wanted in (truth if isinstance(truth, list | tuple) else [truth])
            for one in tried
        )
    except (TypeError, ValueError):
        return None


def _has_words(text: str, wanted: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(normalise_text(wanted))}(?!\w)", normalise_text(text)) is not None


def text_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Shares of completions by what they are as texts, each with the mean reward of these (`NAME_reward`).

    Returns:
        `text/repetition`, `text/echo`, `text/hedge`, `text/empty`; `text/same` of the most common text where several
        prompts have it and it is right for less than half of them; `text/right` with `text/right_reward` and
        `text/wrong_reward` where answers can be compared with the ground truth; `text/word_correlation` and
        `text/word_share` of the word that the reward goes with most (`word_correlations`); `text/best_wrong`, the share
        of wrong answers among the best paid.
    """
    single = [item for item in trajectories if item.episode is None]
    if not single:
        return {}
    truths = {group: _text(items[0].sample.ground_truth) for group, items in by_group(single).items()}
    known = frozenset(normalise_text(truth) for truth in set(truths.values()) if 0 < len(truth) <= 100)
    prompts = {group: _prompt(items[0]) for group, items in by_group(single).items()}

    def kinds(text: str, group: str) -> set[str]:
        held = {
            "repetition": repeats(text),
            "echo": echoes(text, prompts[group]),
            "hedge": hedges(text, truths[group], known),
            "empty": is_empty(text),
        }
        return {name for name, holds in held.items() if holds}

    fair = {group: kinds(truth, group) if truth else set() for group, truth in truths.items()}
    held = [kinds(item.text, item.prompt_id) - fair[item.prompt_id] for item in single]
    found: dict[str, float] = {}
    for name in ("repetition", "echo", "hedge", "empty"):
        found |= _group(
            f"text/{name}", [item for item, names in zip(single, held, strict=True) if name in names], len(single)
        )
    right = {id(item): is_right(item.turn, item.sample.ground_truth) for item in single}
    if len(truths) > 1:
        text, _ = Counter(item.text for item in single).most_common(1)[0]
        same = [item for item in single if item.text == text]
        apt = sum(bool(right[id(item)]) for item in same) >= 0.5 * len(same)
        found |= _group("text/same", same if len(by_group(same)) > 1 and not apt else [], len(single))
    return found | _judged(single, right) | _words(single)


def word_correlations(trajectories: Sequence[Trajectory]) -> dict[str, tuple[float, float]]:
    """(Correlation within groups of the reward and of having a word, the share of completions that have it), by word;
    of words that are common, and lacking, often enough.

    A word of the group's ground truth does not count: that it is paid is as it should be.

    Example:
        >>> word_correlations([])
        {}
    """
    scored = [item for item in trajectories if item.earned is not None]
    groups = [items for items in by_group(scored).values() if len({item.earned for item in items}) > 1]
    products, counts, spreads = defaultdict[str, float](float), Counter[str](), defaultdict[str, float](float)
    varied, total, square = Counter[str](), 0, 0.0
    for items in groups:
        mean = fmean(item.earned or 0.0 for item in items)
        own = set(_word_list(_text(items[0].sample.ground_truth)))
        having, sums = Counter[str](), defaultdict[str, float](float)
        for item in items:
            centred = (item.earned or 0.0) - mean
            square += centred**2
            for word in set(_word_list(item.text[-LOOKED_AT:])) - own:
                having[word] += 1
                sums[word] += centred
        total += len(items)
        for word, count in having.items():
            counts[word] += count
            products[word] += sums[word]
            spreads[word] += count - count**2 / len(items)
            varied[word] += count < len(items)
    return {
        word: (products[word] / (square * spreads[word]) ** 0.5, count / total)
        for word, count in counts.items()
        if varied[word] >= MIXED and VARIED * total <= count <= (1 - VARIED) * total and square > 1e-12
    }


def _words(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    found = word_correlations(trajectories)
    if not found:
        return {}
    correlation, share = max(found.values())
    return {"text/word_correlation": correlation, "text/word_share": share}


def _judged(trajectories: Sequence[Trajectory], right: Mapping[int, bool | None]) -> dict[str, float]:
    """Mean rewards of right and of wrong answers, and the share of the best paid that are wrong."""
    judged = [(item.earned, right[id(item)]) for item in trajectories if item.earned is not None]
    if not judged or any(correct is None for _, correct in judged) or not any(correct for _, correct in judged):
        return {}
    best = max(earned for earned, _ in judged)
    top = [correct for earned, correct in judged if earned >= best - 1e-9]
    found = {"text/right": fmean(bool(correct) for _, correct in judged)}
    found["text/best_wrong"] = fmean(not correct for correct in top)
    given = {
        name: [earned for earned, ok in judged if ok is wanted] for name, wanted in (("right", True), ("wrong", False))
    }
    if min(map(len, given.values())) >= JUDGED:
        found |= {f"text/{name}_reward": fmean(values) for name, values in given.items()}
    return found


def _group(name: str, chosen: Sequence[Trajectory], total: int) -> dict[str, float]:
    earned = [item.earned for item in chosen if item.earned is not None]
    return {name: len(chosen) / total} | ({f"{name}_reward": fmean(earned)} if earned else {})


@lru_cache(maxsize=2)  # repetition and echo ask after the same text
def _windows(text: str) -> list[str]:
    text = re.sub(r"\s+", " ", text[-LOOKED_AT:]).strip()
    return [text[at : at + WINDOW] for at in range(len(text) - WINDOW + 1)]


@lru_cache(maxsize=8)  # completions of a group ask after the same prompt
def _asked(prompt: str) -> frozenset[str]:
    prompt = re.sub(r"\s+", " ", prompt)
    return frozenset(prompt[at : at + WINDOW] for at in range(len(prompt) - WINDOW + 1))


def _items(text: str) -> list[str]:
    """Split a list into its normalised items, without the words between them."""
    parts = re.split(r"[\s,;/|]+", re.sub(r"\b(?:or|and)\b", " ", text, flags=re.IGNORECASE))
    return [item for part in parts if (item := normalise_text(part).strip(".:()[]"))]


def _word_list(text: str) -> list[str]:
    """Words in lower case; of Chinese and Japanese each character."""
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+", text.lower())


def _text(truth: Any) -> str:
    return truth if isinstance(truth, str) else str(truth) if isinstance(truth, int | float) else ""


def _prompt(item: Trajectory) -> str:
    prompt = item.sample.prompt
    return prompt if isinstance(prompt, str) else "\n".join(str(turn["content"]) for turn in prompt)
