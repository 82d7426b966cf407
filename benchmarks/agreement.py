"""Agreement of the graders with labels and with math-verify, for `benchmarks/rewards.py`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atomrl.rewards import boxed, correctness_reward, exact_match, gsm8k, strict_math

VARIANTS = ["{a}", "${a}", "\\${a}", "{a}.", "{a}.0", "{a}.00", "{c}", "${c}", "\\frac{{{d}}}{{2}}", "{d}/2", "{a}\\%",
            "{a}\\text{{ units}}", "\\text{{ }}{a}", "x = {a}", "{a} "]  # fmt: skip
"""Ways in which models write a whole number in a box; all equal {a}."""


def labelled(shared: Path) -> Iterator[tuple[str, str, float]]:
    """(solution, truth, label): 1,004 solutions by real models to GSM8K's test problems, as published."""
    truths = {}
    for line in (shared / "data" / "gsm8k" / "test.jsonl").read_text().splitlines():
        row = json.loads(line)
        truths[row["question"].strip()] = row["answer"].rpartition("####")[2].strip()
    for line in (shared / "data" / "preferences" / "gsm8k_solutions.jsonl").read_text().splitlines():
        pair = json.loads(line)
        truth = truths[pair["prompt"].strip()]
        yield pair["chosen"], truth, 1.0
        yield pair["rejected"], truth, 0.0


def share(function: Any, rows: list[tuple[str, str, float]]) -> dict[str, Any]:
    values = function([""] * len(rows), [text for text, _, _ in rows], [truth for _, truth, _ in rows])
    wrong = [row for value, row in zip(values, rows, strict=True) if (value > 0) != bool(row[2])]
    return {
        "completions": len(rows),
        "agreement": round(1 - len(wrong) / len(rows), 4),
        "disagreements": [{"end": text[-60:], "truth": truth, "label": label} for text, truth, label in wrong[:5]],
    }


def agreement(shared: Path) -> dict[str, Any]:
    """`real`: texts and labels as published. `real_answers_in_form`: the answers and labels are real, the form that the
    grader reads is put around them. `by_construction`: right and wrong answers written in ways that models write.
    `math_verify`: `boxed` against math-verify alone, on the same boxes."""
    rows = list(labelled(shared))
    ended = [row for row in rows if "\nA: " in row[0]]
    forms = {
        strict_math: "<think>{}</think><answer>{}</answer>",
        correctness_reward: "<think>\n{}\n</think>\n<answer>\n{}\n</answer>",
        exact_match: "{}\n#### {}",
        boxed: "{}\nThe answer is $\\boxed{{{}}}$.",
    }
    in_form = {
        function.__name__: share(function, [(form.format(*text.rsplit("\nA: ", 1)), t, y) for text, t, y in ended])
        for function, form in forms.items()
    }
    boxes = list(constructed(shared, 600))
    return {
        "real": {"gsm8k": share(gsm8k, rows)},
        "real_answers_in_form": in_form,
        "by_construction": {"boxed": share(boxed, boxes)},
        "math_verify": same_as_math_verify(boxes),
    }


def constructed(shared: Path, count: int) -> Iterator[tuple[str, str, float]]:
    """GSM8K's own solutions with the answer, or a wrong number from the solution, in a box."""
    rng = random.Random(0)
    lines = (shared / "data" / "gsm8k" / "train.jsonl").read_text().splitlines()
    for n, line in enumerate(rng.sample(lines, count)):
        solution, _, truth = json.loads(line)["answer"].partition("\n#### ")
        number = int(truth.replace(",", ""))
        given = number if n % 2 == 0 else number + rng.choice([-10, -1, 1, 2, 10, number + 1])
        answer = VARIANTS[n // 2 % len(VARIANTS)].format(a=given, c=f"{given:,}", d=2 * given)
        tail = rng.choice(["", ".", " Hope that helps!", "\n\nLet me check: it fits.", " $"])
        yield f"{solution}\nSo the answer is $\\boxed{{{answer}}}${tail}", truth, float(given == number)


def same_as_math_verify(rows: list[tuple[str, str, float]]) -> dict[str, Any]:
    from math_verify import parse, verify

    ours = boxed([""] * len(rows), [text for text, _, _ in rows], [truth for _, truth, _ in rows])
    theirs = [float(verify(parse(f"\\boxed{{{truth}}}"), parse(text))) for text, truth, _ in rows]
    differ = [(row, a, b) for row, a, b in zip(rows, ours, theirs, strict=True) if a != b]
    return {
        "completions": len(rows),
        "agreement": round(1 - len(differ) / len(rows), 4),
        "differences": [
            {"end": row[0][-60:], "truth": row[1], "ours": a, "math_verify": b} for row, a, b in differ[:5]
        ],
    }
