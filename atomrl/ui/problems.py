"""Problems of a config, by the key beside which a page shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

KEYS = Path(__file__).parent / "static" / "keys.json"
WORD = re.compile(r"(?<![\w.])[a-z_]+(?:\.[a-z0-9_]+)*(?![\w.]*\w)")
TRADE = re.compile(r"^  ([a-z_.]+)=(\S+) +(.+)$", re.MULTILINE)
"""A change of a setting, in a plan, with which a run takes less memory."""


@cache
def known() -> frozenset[str]:
    """All keys of a config, sections too."""
    keys = [item["key"] for item in json.loads(KEYS.read_text(encoding="utf-8"))]
    return frozenset(".".join(key.split(".")[:depth]) for key in keys for depth in range(1, key.count(".") + 2))


def problems(lines: Iterable[str]) -> list[dict[str, str | None]]:
    """Each line with the `key` that it is about, None where it names none.

    Example:
        >>> problems(["train.steps: must be positive (got 0)"])
        [{'key': 'train.steps', 'message': 'must be positive (got 0)'}]
        >>> problems(["unknown key 'train.stepz'; did you mean 'train.steps'?"])[0]["key"]
        'train.stepz'
        >>> problems(["reward.functions.0.weight: no number", "it is odd"])[0]["key"]
        'reward.functions'
    """
    return [{"key": key_in(line), "message": _shorter(line.strip())} for line in lines if line.strip()]


def key_in(line: str) -> str | None:
    """The first key that a message names; an unknown one is named as such."""
    if unknown := re.match(r"\s*unknown key '([^']+)'", line):
        return unknown[1]
    for word in WORD.findall(line):
        parts = word.split(".")
        for depth in range(len(parts), 0, -1):
            key = ".".join(parts[:depth])
            # One word alone may be a word: a section is named before a colon, or an equals sign.
            if key in known() and ("." in key or re.search(rf"(?<![\w.]){key}[:=]", line)):
                return key
    return None


def _shorter(line: str) -> str:
    key, colon, rest = line.partition(": ")
    return rest if colon and key in known() else line


def plan_problems(text: str) -> list[dict[str, str | None]]:
    """What a plan says of a run that does not fit: beside each setting with which it takes less, what it takes then.

    Example:
        >>> plan_problems("  train.rows_per_micro_batch=1      2.0 GiB, fits: slower")
        [{'key': 'train.rows_per_micro_batch', 'message': 'does not fit; with 1: 2.0 GiB, fits: slower'}]
    """
    found = [(key, f"does not fit; with {value}: {' '.join(rest.split())}") for key, value, rest in TRADE.findall(text)]
    return [{"key": key, "message": message} for key, message in found if key in known()] or [
        {"key": "model.path", "message": "does not fit, and no single setting makes it: a smaller model does"}
    ]
