"""Make preference pairs from a model's completions: of two answers to a problem, the right one is chosen.

    atomrl eval MODEL --data problems.jsonl --samples-per-prompt 4 --max-tokens 48 --out samples.json
    python examples/rlhf/label_pairs.py samples.jsonl pairs.jsonl

Reads the completions that `atomrl eval` writes. Pairs each right completion of a problem with a wrong one of the same
problem, and uses each text once. Problems with only right or only wrong answers give no pairs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from atomrl.common.files import write_jsonl
from atomrl.data.files import read_rows


def label_pairs(completions: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return rows with `prompt`, `chosen` and `rejected`.

    Example:
        >>> rows = [{"prompt": "2+2=", "completion": text, "correct": text == "4"} for text in ("5", "4", "4", "3")]
        >>> label_pairs(rows)
        [{'prompt': '2+2=', 'chosen': '4', 'rejected': '5'}]
    """
    by_prompt: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for row in completions:
        right, wrong = by_prompt.setdefault(row["prompt"], ({}, {}))
        (right if row["correct"] else wrong)[row["completion"]] = None
    return [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for prompt, (right, wrong) in by_prompt.items()
        for chosen, rejected in zip(right, wrong, strict=False)
    ]


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    rows = [row.row for row in read_rows(source) if row.row is not None]
    print(f"{write_jsonl(label_pairs(rows), target)} pairs of {len(rows)} completions: {target}")
