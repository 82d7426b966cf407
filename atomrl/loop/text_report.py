"""Metrics of completions as texts: repetition, and one text for all prompts. They show a reward that is hacked."""

import re
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from atomrl.types import Trajectory, by_group

WINDOW, LEAST, SHARE, LOOKED_AT = 8, 32, 0.35, 2000
"""A text of LEAST characters or more is repetition where at most SHARE of its windows of WINDOW characters differ. The
last LOOKED_AT characters count."""


def repeats(text: str) -> bool:
    """Whether a text is mostly one piece over and over.

    Example:
        >>> repeats("Max. " * 8), repeats("7-3=4+9=13, and 13 times 7 is 91, so the last digit is 1.")
        (True, False)
    """
    text = re.sub(r"\s+", " ", text[-LOOKED_AT:]).strip()
    windows = len(text) - WINDOW + 1
    return len(text) >= LEAST and len({text[at : at + WINDOW] for at in range(windows)}) <= SHARE * windows


def text_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The share of completions that are repetition, and of the most common text where several prompts have it; with the
    mean reward of these. Episodes of several turns do not count."""
    single = [item for item in trajectories if item.episode is None]
    if not single:
        return {}
    looping = [item for item in single if repeats(item.text)]
    found = _group("text/repetition", looping, len(single))
    if len(by_group(single)) > 1:
        text, _ = Counter(item.text for item in single).most_common(1)[0]
        same = [item for item in single if item.text == text]
        found |= _group("text/same", same if len(by_group(same)) > 1 else [], len(single))
    return found


def _group(name: str, chosen: Sequence[Trajectory], total: int) -> dict[str, float]:
    earned = [item.earned for item in chosen if item.earned is not None]
    return {name: len(chosen) / total} | ({f"{name}_reward": fmean(earned)} if earned else {})
