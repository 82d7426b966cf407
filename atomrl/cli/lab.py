"""Score the recorded completions of a run with other rewards: what would have been taught instead.

atomrl lab runs/NAME --reward ./my_reward.py:score
atomrl lab runs/NAME --reward exact_match,strict_math --steps 10-40
atomrl lab runs/NAME --reward exact_match format_score=0.1 --out scored.jsonl

For each reward: how its rankings within groups differ from those of the rewards that the run earned, which groups gain
or lose their signal, the completions to read first (on which the two disagree most), and what completions that solve
nothing would earn. The recorded rollouts have prompt, completion, ground truth and data source; a reward that reads
other columns of the data has no value here, and that is said.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atomrl.rewards.compute import Rewards

Values = Sequence[float | None]
SPOILED = 200
"""How many of the run's completions, the newest, are scored again spoiled."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the folder of a run")
    add("arguments", nargs="*", metavar="key=value", help="arguments of the reward, where it is one")
    add("--reward", required=True, metavar="NAME[,NAME]", help="built-in rewards, or paths to functions")
    add("--steps", metavar="FIRST-LAST", help="of these steps (all)")
    add("--split", choices=("train", "eval"), default="train")
    add("--limit", type=int, default=2000, help="score so many completions, the newest (2000)")
    add("--show", type=int, default=3, help="how many disagreements to print (3)")
    add("--out", type=Path, metavar="FILE", help="write the completions with all their rewards to a JSONL file")
    add("--timeout-s", type=float, default=10.0, help="for one completion (10)")
    add("--workers", type=int, default=2, help="processes (2)")


def run(arguments: argparse.Namespace) -> int:
    from atomrl.files import check_writable, write_jsonl

    if arguments.limit < 1:
        raise ValueError(f"--limit {arguments.limit}: score at least one")
    names = arguments.reward.split(",")
    rows = recorded(arguments)
    if arguments.out is not None:
        check_writable(arguments.out)
    before: list[float | None] = [row.get("reward") for row in rows]
    with built(names, arguments) as rewards:
        scored, failures = score(rewards, rows, names)
        if not any(value is not None for values in scored.values() for value in values):
            why = "; ".join(failures.values()) or "each was given None"
            raise ValueError(f"no value for any of {len(rows)} completions: {why}")
        print(f"{len(rows)} completions of {arguments.run}, steps {rows[0]['step']} to {rows[-1]['step']}")
        for name in names:
            print("\n" + compared(name, rows, before, scored[name], failures.get(name), arguments.show))
        print("\n" + earned(rewards, rows, names, before, scored))
    if arguments.out is not None:
        extra = [{f"lab/{name}": scored[name][place] for name in names} for place in range(len(rows))]
        write_jsonl([{**row, **more} for row, more in zip(rows, extra, strict=True)], arguments.out, lenient=True)
        print(f"\n{arguments.out}")
    return 0


def recorded(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The completions that the command line asks for, whole groups, oldest first.

    Raises:
        ValueError: there are none.
    """
    from atomrl.cli.rollouts import chosen
    from atomrl.reading import load_run

    run = load_run(arguments.run)
    wanted = argparse.Namespace(
        step=None, steps=arguments.steps, split=arguments.split, prompt=None, text=None, mixed=None, min_reward=None,
        max_reward=None, finish=None, sort="step", descending=False, out=arguments.run,
    )  # fmt: skip
    numbers = chosen(run, wanted)
    if len(numbers) > arguments.limit:
        first = numbers[-arguments.limit]
        numbers = [number for number in numbers if run.rollouts.groups[number] >= run.rollouts.groups[first]]
    rows = [row for row in run.rollouts.rows(numbers) if row and isinstance(row.get("completion"), str)]
    if not rows:
        raise ValueError(f"{arguments.run} has no rollouts of these steps")
    return rows


@contextmanager
def built(names: Sequence[str], arguments: argparse.Namespace) -> Iterator[Rewards]:
    from atomrl.cli.reward import build

    rewards = build(names, arguments)
    try:
        yield rewards
    finally:
        rewards.close()


def score(
    rewards: Rewards, rows: Sequence[dict[str, Any]], names: Sequence[str]
) -> tuple[dict[str, list[float | None]], dict[str, str]]:
    """What each reward gives each completion, None where it has no value, and why the first of those has none."""
    from atomrl.cli.reward import to_trajectory

    known = ("prompt", "opening", "completion", "ground_truth", "data_source", "token_ids", "completion_tokens")
    bare = [{key: row[key] for key in known if row.get(key) is not None} for row in rows]
    scored = rewards.score([to_trajectory(str(place), row) for place, row in enumerate(bare)])
    parts = [part.name for part in rewards.parts]
    failed = [failure for item in scored for failure in item.reward_failures]
    first = {one.reward: f"{one.kind}: {one.message}" for one in reversed(failed)}
    values = {name: [item.reward_parts.get(part) for item in scored] for name, part in zip(names, parts, strict=True)}
    return values, {name: first[part] for name, part in zip(names, parts, strict=True) if part in first}


def compared(
    name: str, rows: Sequence[dict[str, Any]], before: Values, after: Values, failure: str | None, show: int
) -> str:
    """How a reward differs from what the run earned."""
    from atomrl.cli.rollouts import in_full
    from atomrl.rewards.lab import disagreements, rankings

    found = rankings(rows, before, after)
    none = sum(value is None for value in after)
    lines = [f"== {name}: mean {mean(after)} where the run earned {mean(before)}"]
    if none:
        why = f"; the first: {failure}" if failure else ""
        lines.append(f"no value for {none} of {len(rows)} completions{why}")
    if found.pairs:
        lines += [
            f"pairs of a group: {found.pairs}; {found.turned} the other way round, {found.parted} no longer equal, "
            f"{found.joined} now equal",
            f"groups: {found.groups}; {found.gained} gain a signal, {found.lost} lose it, of {found.other_best} "
            "another completion is the best",
        ]
    first = disagreements(rows, before, after)
    lines.append(f"completions that stand elsewhere in their group: {len(first)}")
    for place in first[:show]:
        lines.append(f"\n{in_full(rows[place])}\n{name}: {after[place]}")
    return "\n".join(lines)


def earned(
    rewards: Rewards, rows: Sequence[dict[str, Any]], names: Sequence[str], before: Values,
    scored: dict[str, list[float | None]],
) -> str:  # fmt: skip
    """What completions that solve nothing would earn, and those of the run when they are spoiled."""
    from atomrl.rewards.lab import hacks, on_its_completions

    lines = [f"{'what it would earn, mean':<44}" + "".join(f"{name[-18:]:>20}" for name in names)]
    lines.append(
        f"{'the run (which earned ' + mean(before) + ')':<44}" + "".join(f"{mean(scored[n]) + '  ':>20}" for n in names)
    )
    spoiled = rows[-SPOILED:]
    tried = [(title, texts, 0) for title, texts in hacks(rows).items()]
    tried += [(title, texts, len(rows) - len(spoiled)) for title, texts in on_its_completions(spoiled)]
    for title, texts, first in tried:
        found, _ = score(rewards, texts, names)
        marks = [mean(found[name]) + (" !" if above(found[name], scored[name][first:]) else "  ") for name in names]
        lines.append(f"  {title:<42}" + "".join(f"{mark:>20}" for mark in marks))
    lines.append("! earns as much as the run did, or more")
    return "\n".join(lines)


def above(hack: Values, run: Values) -> bool:
    """Whether a hack earns at least what the run does, and anything."""
    one, other = ([value for value in side if value is not None] for side in (hack, run))
    if not one or not other:
        return False
    mine, theirs = sum(one) / len(one), sum(other) / len(other)
    return mine >= theirs and mine > min(*other, 0.0)  # where the run earned nothing, nothing is no success


def mean(values: Values) -> str:
    given = [value for value in values if value is not None]
    return f"{sum(given) / len(given):.4f}" if given else "-"
