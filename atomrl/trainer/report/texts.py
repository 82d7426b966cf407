"""Metrics of completions as texts, from which `atomrl doctor` detects reward hacking.

Repetition, one text for all prompts, copies of the prompt, lists of answers, empty answers, and words that are paid.
They are computed from texts and rewards alone, for any reward function. A property that the ground truth itself has (in
a task of copying or listing) does not count. Episodes are left out.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean
from typing import Any

from atomrl.data.rows import by_group
from atomrl.rewards.answers import answers_equal, normalise_text, parse_number
from atomrl.rewards.extraction import extract_answer, marked_answer
from atomrl.types import Trajectory

WINDOW, LEAST, SHARE, MAX_CHARACTERS = 8, 32, 0.35, 2000
"""A text of LEAST or more characters is repetitive if at most SHARE of its windows of WINDOW characters are distinct.
Only the last MAX_CHARACTERS of a text are read."""
COPIED = 0.7
"""A text of LEAST or more characters is an echo if this share of its windows is in the prompt. A solution that begins
by repeating the question has less."""
SEVERAL = 3
"""Minimum number of different answers that is hedging; two may be a correction."""
MIXED, VARIED, GRADED = 4, 0.1, 4
"""Minimum samples of a metric. The correlation of a word and the reward needs MIXED groups in which both vary, and a
word that at least VARIED of their completions have and at least VARIED lack. Rewards of right and wrong answers need
GRADED completions of each."""


def repeats(text: str) -> bool:
    """Return whether a text mostly repeats one piece.

    Example:
        >>> repeats("Max. " * 8), repeats("7-3=4+9=13, and 13 times 7 is 91, so the last digit is 1.")
        (True, False)
    """
    windows = _windows(text)
    return len(windows) > LEAST - WINDOW and len(set(windows)) <= SHARE * len(windows)


def echoes(text: str, prompt: str) -> bool:
    """Return whether a text is mostly copied from its prompt.

    Example:
        >>> asked = "Natalia sold clips to 48 of her friends in April. How many clips did she sell?"
        >>> echoes(asked[:50], asked), echoes("She sold clips to 48 friends, so that is 48.", asked)
        (True, False)
    """
    windows = _windows(text)
    copied = sum(map(_prompt_windows(prompt).__contains__, windows))
    return len(windows) > LEAST - WINDOW and copied >= COPIED * len(windows)


def hedges(text: str, truth: str, known: frozenset[str] = frozenset()) -> bool:
    """Return whether a text answers with a list of different answers, one of which is right.

    Answers are numbers and the ground truths of other prompts. The list is the content of all `<answer>` and
    `\\boxed{}` of a text; if there are none, its last line.

    Args:
        truth: the ground truth. If it is a list itself, no text hedges.
        known: normalised ground truths of other prompts.

    Example:
        >>> hedges("<answer>1, 2, 3 or 4</answer>", "3"), hedges("3 + 1 = 4", "4"), hedges("so 1, 2, 3", "1, 2, 3")
        (True, False, False)
        >>> hedges("maybe yes or no or maybe", "no", frozenset({"yes", "no", "maybe"}))
        True
    """
    text = text[-MAX_CHARACTERS:]
    # The content has no <answer> in it, so that many unclosed ones take linear time.
    mark_recorded = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>|\\boxed\{([^{}]*)\}", text, re.DOTALL)
    lines = text.rpartition("</think>")[2].strip().splitlines() or [""]
    items = _items(" ".join(map("".join, mark_recorded)) if mark_recorded else lines[-1])
    wanted = _items(truth)
    if len(wanted) != 1 or wanted[0] not in items:
        return False
    answers = [item for item in items if item in known or item == wanted[0] or re.fullmatch(r"-?\d[\d.,/]*", item)]
    return len(set(answers)) >= SEVERAL and len(answers) >= 0.8 * len(items)


def is_empty(text: str) -> bool:
    """Return whether a text has no answer: it is white space, or its marked answer is empty.

    Example:
        >>> is_empty(" "), is_empty("<think>hm</think><answer></answer>"), is_empty("4")
        (True, True, False)
    """
    return not text.strip() or marked_answer(text) == ""


def is_right(text: str, truth: Any) -> bool | None:
    """Return whether a text has the right answer, regardless of its reward; None if the truth cannot be compared.

    The extracted answer is compared as a whole and by its last number; a truth in words may be among other words. This
    is lenient on purpose: a reward function or a judge should accept few answers that are wrong here.

    Example:
        >>> is_right("<answer>18 dollars</answer>", "18"), is_right("Yes, it is.", "yes"), is_right("18", None)
        (True, True, None)
    """
    answer = extract_answer(text)
    candidates = [answer, *re.findall(r"-?\d+(?:[.,/]\d+)*", answer)[-1:]]
    try:
        return any(
            answers_equal(one, accepted) or (parse_number(str(accepted)) is None and _has_words(answer, str(accepted)))
            for accepted in (truth if isinstance(truth, list | tuple) else [truth])
            for one in candidates
        )
    except (TypeError, ValueError):
        return None


def _has_words(text: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(normalise_text(words))}(?!\w)", normalise_text(text)) is not None


def text_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute shares of completions with properties of reward hacking, and their mean rewards (`NAME_reward`).

    Returns:
        `text/repetition`, `text/echo`, `text/hedge` and `text/empty`.
        `text/same`: share of the most common text, if several prompts have it and it is right for less than half.
        `text/right`, `text/right_reward`, `text/wrong_reward`: share of right answers, and mean rewards, if answers can
        be compared with the ground truth.
        `text/best_wrong`: share of wrong answers among the completions with the highest reward.
        `text/word_correlation`, `text/word_share`: of the word that correlates most with the reward
        (`word_correlations`).
    """
    single = [item for item in trajectories if item.episode is None]
    if not single:
        return {}
    truths = {group: _text(items[0].problem.ground_truth) for group, items in by_group(single).items()}
    known = frozenset(normalise_text(truth) for truth in set(truths.values()) if 0 < len(truth) <= 100)
    prompts = {group: _prompt(items[0]) for group, items in by_group(single).items()}

    def properties(text: str, group: str) -> set[str]:
        holds = {
            "repetition": repeats(text),
            "echo": echoes(text, prompts[group]),
            "hedge": hedges(text, truths[group], known),
            "empty": is_empty(text),
        }
        return {name for name, value in holds.items() if value}

    # A property that the ground truth has too is part of the task.
    expected = {group: properties(truth, group) if truth else set() for group, truth in truths.items()}
    unexpected = [properties(item.text, item.prompt_id) - expected[item.prompt_id] for item in single]
    metrics: dict[str, float] = {}
    for name in ("repetition", "echo", "hedge", "empty"):
        having = [item for item, names in zip(single, unexpected, strict=True) if name in names]
        metrics |= _share(f"text/{name}", having, len(single))
    right = {id(item): is_right(item.turn, item.problem.ground_truth) for item in single}
    if len(truths) > 1:
        text, _ = Counter(item.text for item in single).most_common(1)[0]
        same = [item for item in single if item.text == text]
        often_right = sum(bool(right[id(item)]) for item in same) >= 0.5 * len(same)
        metrics |= _share("text/same", same if len(by_group(same)) > 1 and not often_right else [], len(single))
    if correlations := word_correlations(single):
        metrics["text/word_correlation"], metrics["text/word_share"] = max(correlations.values())
    return metrics | _right_and_wrong(single, right)


def word_correlations(trajectories: Sequence[Trajectory]) -> dict[str, tuple[float, float]]:
    """Compute the correlation of the reward with the presence of each word, within groups.

    Words of a group's ground truth do not count in it: they should be rewarded.

    Returns:
        Word -> (correlation, share of completions with the word), for words that enough completions have and lack
        (`MIXED`, `VARIED`).

    Example:
        >>> word_correlations([])
        {}
    """
    scored = [item for item in trajectories if item.total_reward is not None]
    groups = [items for items in by_group(scored).values() if len({item.total_reward for item in items}) > 1]
    products, counts, spreads = defaultdict[str, float](float), Counter[str](), defaultdict[str, float](float)
    varied, total, square = Counter[str](), 0, 0.0
    # Sums for the Pearson correlation of reward and presence (0 or 1), each centred by its group's mean.
    for items in groups:
        mean = fmean(item.total_reward or 0.0 for item in items)
        truth_words = set(_word_list(_text(items[0].problem.ground_truth)))
        having, sums = Counter[str](), defaultdict[str, float](float)
        for item in items:
            centred = (item.total_reward or 0.0) - mean
            square += centred**2
            for word in set(_word_list(item.text[-MAX_CHARACTERS:])) - truth_words:
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


def _right_and_wrong(trajectories: Sequence[Trajectory], right: Mapping[int, bool | None]) -> dict[str, float]:
    """Compute `text/right`, `text/right_reward`, `text/wrong_reward` and `text/best_wrong`.

    Empty if an answer cannot be compared with the ground truth, or if none is right.

    Args:
        right: id of a trajectory -> result of `is_right`.
    """
    graded = [(item.total_reward, right[id(item)]) for item in trajectories if item.total_reward is not None]
    if not graded or any(correct is None for _, correct in graded) or not any(correct for _, correct in graded):
        return {}
    best = max(reward for reward, _ in graded)
    metrics = {
        "text/right": fmean(bool(correct) for _, correct in graded),
        "text/best_wrong": fmean(not correct for reward, correct in graded if reward >= best - 1e-9),
    }
    rewards = {
        "right": [reward for reward, correct in graded if correct],
        "wrong": [reward for reward, correct in graded if not correct],
    }
    if min(map(len, rewards.values())) >= GRADED:
        metrics |= {f"text/{name}_reward": fmean(values) for name, values in rewards.items()}
    return metrics


def _share(name: str, chosen: Sequence[Trajectory], total: int) -> dict[str, float]:
    """Return the share of completions as `name`, and their mean reward as `name_reward`."""
    rewards = [item.total_reward for item in chosen if item.total_reward is not None]
    return {name: len(chosen) / total} | ({f"{name}_reward": fmean(rewards)} if rewards else {})


@lru_cache(maxsize=2)  # repeats and echoes read the same text
def _windows(text: str) -> list[str]:
    text = re.sub(r"\s+", " ", text[-MAX_CHARACTERS:]).strip()
    return [text[at : at + WINDOW] for at in range(len(text) - WINDOW + 1)]


@lru_cache(maxsize=8)  # shared by the completions of a group
def _prompt_windows(prompt: str) -> frozenset[str]:
    prompt = re.sub(r"\s+", " ", prompt)
    return frozenset(prompt[at : at + WINDOW] for at in range(len(prompt) - WINDOW + 1))


def _items(text: str) -> list[str]:
    """Split a list into its normalised items, without "or" and "and"."""
    parts = re.split(r"[\s,;/|]+", re.sub(r"\b(?:or|and)\b", " ", text, flags=re.IGNORECASE))
    return [item for part in parts if (item := normalise_text(part).strip(".:()[]"))]


def _word_list(text: str) -> list[str]:
    """Split a text into words in lower case; Chinese and Japanese into characters."""
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+", text.lower())


def _text(truth: Any) -> str:
    """Return a ground truth as text; "" if it is neither text nor a number."""
    return truth if isinstance(truth, str) else str(truth) if isinstance(truth, int | float) else ""


def _prompt(item: Trajectory) -> str:
    prompt = item.problem.prompt
    return prompt if isinstance(prompt, str) else "\n".join(str(turn["content"]) for turn in prompt)
