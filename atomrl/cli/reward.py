"""`atomrl reward`: score existing completions, of a file or of a run, without training."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.cli.arguments import check_exists
from atomrl.cli.main import Run
from atomrl.common.files import check_writable, write_jsonl

if TYPE_CHECKING:
    from atomrl.rewards.compute import Rewards
    from atomrl.types import Trajectory

Values = Sequence[float | None]
LISTED = 5
SPOILED = 200
"""Number of a run's newest completions that are also scored in a spoiled form."""
OF_RUNS = {"steps": None, "split": "train", "limit": 2000, "show": 3}
"""Options for the completions of a run, with their defaults."""


def add_reward(parser: argparse.ArgumentParser) -> Run:
    """Score completions of a file, or recorded completions of a run, with rewards.

    A line of a FILE has `prompt`, `completion`, `ground_truth` (if the reward needs one) and any other columns. The
    summary shows the distribution of the rewards and, for two rewards or more, where they differ. --out writes each
    line with `reward` (the sum), `reward_parts`, and `reward_failures` if a reward has no usable value.

    For a RUN it compares another reward with the run's own: rankings within groups, groups that gain or lose their
    signal, the completions with the largest disagreement, and the reward of completions that solve nothing. A run
    records prompt, completion, ground truth and data source; a reward that reads other columns has no value here.

    atomrl reward boxed completions.jsonl
    atomrl reward gsm8k,my_rewards.mine runs/NAME/rollouts/step_000010/train.jsonl --out scored.jsonl
    atomrl reward exact_match completions.jsonl --out scored.jsonl format_score=0.1
    atomrl reward http completions.jsonl --out scored.jsonl url=http://127.0.0.1:8000/score
    atomrl reward ./my_reward.py:score runs/NAME
    atomrl reward exact_match,strict_math runs/NAME --steps 10-40
    """
    add = parser.add_argument
    add("name", metavar="NAME[,NAME]", help="built-in rewards, or paths to functions")
    add("file", metavar="FILE|RUN", type=Path, help="JSONL with prompt, completion, ground_truth; or a run's folder")
    add("arguments", nargs="*", metavar="key=value", help="arguments of the reward, if there is only one")
    add("--out", type=Path, metavar="FILE", help="write the completions with their rewards to this JSONL file")
    add(
        "--json", action="store_true", help="print the summary of a FILE as one JSON object, and nothing else on stdout"
    )
    add("--timeout-s", type=float, default=10.0, help="for one completion (10)")
    add("--workers", type=int, default=2, help="processes (2)")
    add = parser.add_argument_group("completions of a run").add_argument
    add("--steps", metavar="FIRST-LAST", help="completions of these steps (all)")
    add("--split", choices=("train", "eval"), help="(train)")
    add("--limit", type=int, help=f"score this many of the newest completions ({OF_RUNS['limit']})")
    add("--show", type=int, help=f"number of disagreements to print ({OF_RUNS['show']})")
    return score_completions


def score_completions(arguments: argparse.Namespace) -> int:
    """Score the completions of a file or of a run."""
    if arguments.file.suffix in (".yaml", ".yml") or arguments.name.endswith((".yaml", ".yml")):
        raise ValueError("atomrl reward scores completions; a reward model is trained by `atomrl train CONFIG`")
    if arguments.file.is_dir():
        if arguments.json:
            raise ValueError(f"--json needs a file of completions; {arguments.file} is a folder")
        for option, default in OF_RUNS.items():
            if getattr(arguments, option) is None:
                setattr(arguments, option, default)
        return score_run(arguments)
    for option in OF_RUNS:
        if getattr(arguments, option) is not None:
            raise ValueError(f"--{option} needs the folder of a run; {arguments.file} is not a folder")
    return score_file(arguments)


def score_file(arguments: argparse.Namespace) -> int:
    """Score each line of a file and print a summary; with --out, write the lines with their rewards."""
    names = arguments.name.split(",")
    check_exists(arguments.file)
    rewards = build_named(names, arguments)
    out: Path | None = arguments.out
    if out is not None and out.resolve() == arguments.file.resolve():
        raise ValueError(f"--out {out} is also the input; set another file")
    rows = read(arguments.file)
    if out is not None:
        check_writable(out)
    started = time.perf_counter()
    with closing(rewards):
        scored = rewards([trajectory for _, trajectory in rows])
    seconds = time.perf_counter() - started
    if out is not None:
        write_jsonl([with_rewards(row, one) for (row, _), one in zip(rows, scored, strict=True)], out)
    if arguments.json:
        print(
            json.dumps(
                figures(scored, seconds) | {"totals": rewards.totals(), "out": None if out is None else str(out)}
            )
        )
        return 0
    print(summary(scored, rewards.seconds, seconds))
    if totals := rewards.totals():
        print("\n" + "\n".join(f"{name}: {value:g}" for name, value in totals.items()))
    if out is not None:
        print(f"\n{out}")
    return 0


def build_named(names: Sequence[str], arguments: argparse.Namespace) -> Rewards:
    """Build the rewards named on the command line; key=value arguments go to a single reward.

    Raises:
        ValueError: a reward or an argument is unknown.
    """
    from atomrl.config import load_config, parse_overrides
    from atomrl.rewards.compute import build_rewards
    from atomrl.rewards.table import LOADING

    args = parse_overrides(arguments.arguments, section=None)
    if args and len(names) > 1:
        raise ValueError("key=value arguments need a single reward; score several one at a time")
    items = [{"function": name, "args": args, "timeout_s": arguments.timeout_s} for name in names]
    tree = {"run_name": "reward", "model": {"path": "-"}, "data": {"train": "-"}}
    config = load_config({**tree, "reward": {"functions": items, "workers": arguments.workers}}, name="atomrl reward")
    device = "cpu"
    if set(names) & set(LOADING):
        from atomrl.trainer.build import device_name

        device = device_name()
    return build_rewards(config.reward, patience=None, device=device)


def read(file: Path) -> list[tuple[dict[str, Any], Trajectory]]:
    """Read a file of completions: each row, and its trajectory, which is the only one of its prompt.

    Raises:
        DataError: lists all lines without a valid prompt and completion.
    """
    from atomrl.data.files import DataError, error_list, read_rows

    rows, problems = [], []
    for raw in read_rows(file):
        if raw.row is None:
            problems.append(f"{raw.place}: {raw.error}")
        elif not isinstance(raw.row.get("completion"), str):
            problems.append(f"{raw.place}: 'completion' must be text")
        elif not isinstance(raw.row.get("prompt"), (str, list)):
            problems.append(f"{raw.place}: 'prompt' must be text or messages")
        else:
            rows.append((raw.row, to_trajectory(raw.place, raw.row)))
    if problems:
        raise DataError(f"{file}: {len(problems)} lines cannot be scored:\n" + error_list(problems))
    if not rows:
        raise DataError(f"{file} has no rows")
    return rows


def to_trajectory(place: str, row: dict[str, Any]) -> Trajectory:
    """Convert a row with prompt and completion into a trajectory, in a group of its own."""
    from atomrl.common.chat_template import thought_opening
    from atomrl.types import Problem, Segment, Trajectory

    own = ("prompt", "completion", "opening", "ground_truth", "data_source", "completion_tokens", "token_ids", "reward",
           "reward_parts", "reward_failures")  # fmt: skip
    tokens = row.get("token_ids") or [0] * int(row.get("completion_tokens") or 0)  # only their number is used
    problem = Problem(
        problem_id=place,
        prompt=row["prompt"] if isinstance(row["prompt"], str) else tuple(row["prompt"]),
        ground_truth=truth_of(row),
        data_source=row.get("data_source", "default"),
        columns={name: value for name, value in row.items() if name not in own},
    )
    segments = Segment(origin="prompt", token_ids=()), Segment(origin="model", token_ids=tuple(tokens))
    opening = thought_opening(problem.prompt) if isinstance(problem.prompt, str) else ""
    return Trajectory(
        prompt_id=place, index=0, problem=problem, segments=segments, text=row["completion"], finish_reason="stop",
        opening=row.get("opening", opening),
    )  # fmt: skip


def truth_of(row: dict[str, Any]) -> Any:
    """Return the ground truth of a row: of `ground_truth`, or of `reward_model` as in the files of verl and Search-R1,
    which have several right answers as `{"target": [...]}`."""
    truth = row.get("ground_truth")
    if truth is None and isinstance(row.get("reward_model"), dict):
        truth = row["reward_model"].get("ground_truth")
    return truth["target"] if isinstance(truth, dict) and [*truth] == ["target"] else truth


def with_rewards(row: dict[str, Any], scored: Trajectory) -> dict[str, Any]:
    """Add the rewards and failures of a scored trajectory to its row."""
    failures = {failure.reward: f"{failure.kind}: {failure.message}" for failure in scored.reward_failures}
    columns = {key: value for key, value in row.items() if key != "reward_failures"}
    rewards = {"reward": scored.reward, "reward_parts": dict(scored.reward_parts)}
    return columns | rewards | ({"reward_failures": failures} if failures else {})


def figures(scored: Sequence[Trajectory], seconds: float) -> dict[str, Any]:
    """Return the summary of scored completions as JSON-ready values: for `reward` (the sum) and each part the number of
    values, their mean, minimum and maximum, and failures by kind."""
    columns = {"reward": [one.reward for one in scored]}
    for name in dict.fromkeys(name for one in scored for name in one.reward_parts):
        columns[f"reward/{name}"] = [one.reward_parts.get(name) for one in scored]
    kinds = Counter((f"reward/{failure.reward}", failure.kind) for one in scored for failure in one.reward_failures)
    rewards = {}
    for name, column in columns.items():
        values = [value for value in column if value is not None]
        rewards[name] = {
            "values": len(values),
            "mean": sum(values) / len(values) if values else None,
            "min": min(values, default=None),
            "max": max(values, default=None),
            "failures": {kind: count for (of, kind), count in sorted(kinds.items()) if of == name},
        }
    return {"completions": len(scored), "seconds": round(seconds, 3), "rewards": rewards}


def summary(scored: Sequence[Trajectory], row_seconds: Sequence[float], seconds: float) -> str:
    """Format the distribution, failures and time of each reward, and the completions on which rewards differ."""
    places = [one.prompt_id for one in scored]
    lines = [f"{len(places)} completions in {seconds:.2f} s: {1000 * sum(row_seconds) / len(places):.2f} ms each"]
    slowest = max(range(len(places)), key=row_seconds.__getitem__)
    lines[0] += f", the slowest {row_seconds[slowest]:.2f} s ({places[slowest]})"
    names = list(dict.fromkeys(name for one in scored for name in one.reward_parts))
    parts = {name: [one.reward_parts.get(name) for one in scored] for name in names}
    for name, part in parts.items():
        values = [value for value in part if value is not None]
        lines += ["", f"{name}: {len(values)} values" + (f", mean {sum(values) / len(values):.4f}" if values else "")]
        lines += distribution(values)
        own = [(one.prompt_id, failure) for one in scored for failure in one.reward_failures if failure.reward == name]
        kinds = Counter(failure.kind for _, failure in own)
        if kinds:
            lines.append("  no usable value: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
        lines += [f"    {place}: {failure.kind}: {failure.message}" for place, failure in own[:LISTED]]
    for name in names[1:]:
        differ = [place for place, a, b in zip(places, parts[names[0]], parts[name], strict=True) if a != b]
        places_text = f": {', '.join(differ[:LISTED])}" + (", ..." if len(differ) > LISTED else "") if differ else ""
        lines += ["", f"{names[0]} and {name} differ on {len(differ)} of {len(places)}{places_text}"]
    return "\n".join(lines)


def distribution(values: Sequence[float]) -> list[str]:
    """Format a histogram: of each value, or of ten bins of equal width if there are more than ten values."""
    counts = Counter(values)
    if len(counts) > 10:
        low, high = min(values), max(values)
        bins = Counter(min(9, int(10 * (value - low) / (high - low))) for value in values)
        width = (high - low) / 10
        rows = [(f"{low + width * n:.4g} to {low + width * (n + 1):.4g}", bins[n]) for n in range(10)]
    else:
        rows = [(f"{value:.6g}", count) for value, count in sorted(counts.items())]
    most = max((count for _, count in rows), default=1)
    return [f"  {label:>20} {count:>7} {'#' * round(30 * count / most)}".rstrip() for label, count in rows]


def score_run(arguments: argparse.Namespace) -> int:
    """Score a run's completions, and print the differences from their recorded rewards."""
    if arguments.limit < 1:
        raise ValueError(f"--limit {arguments.limit}: must be at least 1")
    names = arguments.name.split(",")
    rows = recorded_rows(arguments)
    if arguments.out is not None:
        check_writable(arguments.out)
    before: list[float | None] = [row.get("reward") for row in rows]
    with closing(build_named(names, arguments)) as rewards:
        scored, failures = score(rewards, rows, names)
        if not any(value is not None for values in scored.values() for value in values):
            why = "; ".join(failures.values()) or "all returned None"
            raise ValueError(f"no value for any of {len(rows)} completions: {why}")
        print(f"{len(rows)} completions of {arguments.file}, steps {rows[0]['step']} to {rows[-1]['step']}")
        for name in names:
            print("\n" + ranking_report(name, rows, before, scored[name], failures.get(name), arguments.show))
        print("\n" + hack_rewards(rewards, rows, names, before, scored))
    if arguments.out is not None:
        extra = [{f"lab/{name}": scored[name][place] for name in names} for place in range(len(rows))]
        write_jsonl([{**row, **more} for row, more in zip(rows, extra, strict=True)], arguments.out, lenient=True)
        print(f"\n{arguments.out}")
    return 0


def recorded_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Read the run's completions that match the options: complete groups, oldest first.

    Raises:
        ValueError: there are none.
    """
    from atomrl.cli.rollouts import select_rollouts
    from atomrl.tracking.reading import load_run

    run = load_run(arguments.file)
    options = argparse.Namespace(
        step=None, steps=arguments.steps, split=arguments.split, prompt=None, text=None, mixed=None, min_reward=None,
        max_reward=None, finish=None, sort="step", descending=False, out=arguments.file,
    )  # fmt: skip
    numbers = select_rollouts(run, options)
    if len(numbers) > arguments.limit:
        first = numbers[-arguments.limit]
        numbers = [number for number in numbers if run.rollouts.groups[number] >= run.rollouts.groups[first]]
    rows = [row for row in run.rollouts.rows(numbers) if row and isinstance(row.get("completion"), str)]
    if not rows:
        raise ValueError(f"{arguments.file} has no rollouts of these steps")
    return rows


def score(
    rewards: Rewards, rows: Sequence[dict[str, Any]], names: Sequence[str]
) -> tuple[dict[str, list[float | None]], dict[str, str]]:
    """Score completions with each reward.

    Returns:
        By name of the reward: its values, None where there is none; and its first failure, if it has failures.
    """
    columns = ("prompt", "opening", "completion", "ground_truth", "data_source", "token_ids", "completion_tokens")
    bare = [{key: row[key] for key in columns if row.get(key) is not None} for row in rows]
    scored = rewards([to_trajectory(str(index), row) for index, row in enumerate(bare)], judge=False)
    parts = [part.name for part in rewards.parts]
    failed = [failure for item in scored for failure in item.reward_failures]
    first = {one.reward: f"{one.kind}: {one.message}" for one in reversed(failed)}
    values = {name: [item.reward_parts.get(part) for item in scored] for name, part in zip(names, parts, strict=True)}
    return values, {name: first[part] for name, part in zip(names, parts, strict=True) if part in first}


def ranking_report(
    name: str, rows: Sequence[dict[str, Any]], before: Values, after: Values, failure: str | None, show: int
) -> str:
    """Format how a reward differs from the run's recorded rewards."""
    from atomrl.cli.rollouts import format_full
    from atomrl.tools.rankings import disagreements, rankings

    changes = rankings(rows, before, after)
    none = sum(value is None for value in after)
    lines = [f"== {name}: mean {mean(after)}, run's reward {mean(before)}"]
    if none:
        why = f"; the first: {failure}" if failure else ""
        lines.append(f"no value for {none} of {len(rows)} completions{why}")
    if changes.pairs:
        lines += [
            f"pairs of a group: {changes.pairs}; {changes.turned} reversed, "
            f"{changes.parted} no longer equal, {changes.joined} now equal",
            f"groups: {changes.groups}; {changes.gained} gain a signal, {changes.lost} lose it, "
            f"{changes.other_best} have another best completion",
        ]
    first = disagreements(rows, before, after)
    lines.append(f"completions with another rank in their group: {len(first)}")
    for place in first[:show]:
        lines.append(f"\n{format_full(rows[place])}\n{name}: {after[place]}")
    return "\n".join(lines)


def hack_rewards(
    rewards: Rewards, rows: Sequence[dict[str, Any]], names: Sequence[str], before: Values,
    scored: dict[str, list[float | None]],
) -> str:  # fmt: skip
    """Format the mean rewards of completions that solve nothing, and of the run's completions in spoiled forms."""
    from atomrl.tools.rankings import degenerate_completions, perturbed_completions

    lines = [f"{'mean reward':<44}" + "".join(f"{name[-18:]:>20}" for name in names)]
    lines.append(
        f"{'the run (its own reward: ' + mean(before) + ')':<44}"
        + "".join(f"{mean(scored[n]) + '  ':>20}" for n in names)
    )
    spoiled = rows[-SPOILED:]
    tried = [(title, texts, 0) for title, texts in degenerate_completions(rows).items()]
    tried += [(title, texts, len(rows) - len(spoiled)) for title, texts in perturbed_completions(spoiled)]
    for title, texts, first in tried:
        values, _ = score(rewards, texts, names)
        marks = [
            mean(values[name]) + (" !" if beats_run(values[name], scored[name][first:]) else "  ") for name in names
        ]
        lines.append(f"  {title:<42}" + "".join(f"{mark:>20}" for mark in marks))
    lines.append("! at least the run's mean")
    return "\n".join(lines)


def beats_run(hack: Values, run: Values) -> bool:
    """Return True if the mean reward of a hack is at least the run's, and above the run's minimum and 0."""
    one, other = ([value for value in side if value is not None] for side in (hack, run))
    if not one or not other:
        return False
    mine, theirs = sum(one) / len(one), sum(other) / len(other)
    return mine >= theirs and mine > min(*other, 0.0)  # equal minimum rewards are not a success


def mean(values: Values) -> str:
    """Format the mean of the values that are not None; `-` if there are none."""
    numbers = [value for value in values if value is not None]
    return f"{sum(numbers) / len(numbers):.4f}" if numbers else "-"
