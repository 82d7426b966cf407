"""Try rewards on completions that are there already, before any training.

atomrl reward boxed completions.jsonl --out scored.jsonl
atomrl reward gsm8k,my_rewards.mine runs/NAME/rollouts/step_000010/train.jsonl --out scored.jsonl
atomrl reward exact_match completions.jsonl --out scored.jsonl format_score=0.1
atomrl reward http completions.jsonl --out scored.jsonl url=http://127.0.0.1:8000/score

A line of the file has `prompt`, `completion`, `ground_truth` (where the reward needs one) and any other columns. Each
comes out with `reward` (the sum), `reward_parts`, and `reward_failures` where a reward gave no usable value. With two
rewards or more the summary says where they differ.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.files import check_writable, write_jsonl

if TYPE_CHECKING:
    from atomrl.rewards.compute import Rewards
    from atomrl.types import Trajectory

SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME[,NAME]", help="built-in rewards, or dotted paths to functions")
    parser.add_argument("file", metavar="FILE", type=Path, help="JSONL with prompt, completion, ground_truth")
    parser.add_argument("arguments", nargs="*", metavar="key=value", help="arguments of the reward")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSONL file to write")
    parser.add_argument("--timeout-s", type=float, default=10.0, help="for one completion (default 10)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")


def run(arguments: argparse.Namespace) -> int:
    names = arguments.name.split(",")
    rewards = build(names, arguments)
    if arguments.out.resolve() == arguments.file.resolve():
        raise ValueError(f"--out {arguments.out} is the file that is read; name another")
    rows = read(arguments.file)
    check_writable(arguments.out)
    started = time.perf_counter()
    try:
        scored = rewards([trajectory for _, trajectory in rows])
    finally:
        rewards.close()
    seconds = time.perf_counter() - started
    write_jsonl([with_rewards(row, one) for (row, _), one in zip(rows, scored, strict=True)], arguments.out)
    print(summary(scored, rewards.seconds, seconds))
    if totals := rewards.totals():
        print("\n" + "\n".join(f"{name}: {value:g}" for name, value in totals.items()))
    print(f"\n{arguments.out}")
    return 0


def build(names: Sequence[str], arguments: argparse.Namespace) -> Rewards:
    """The rewards of the command line; the arguments are passed to the only one.

    Raises:
        ValueError: an unknown reward or argument.
    """
    from atomrl.config import build_config, parse_overrides
    from atomrl.rewards.compute import build_rewards
    from atomrl.rewards.table import LOADING

    args = parse_overrides(arguments.arguments)
    if args and len(names) > 1:
        raise ValueError("key=value arguments are for a single reward; with several, score one at a time")
    items = [{"function": name, "args": args, "timeout_s": arguments.timeout_s} for name in names]
    tree = {"run_name": "reward", "model": {"path": "-"}, "data": {"train": "-"}}
    config = build_config({**tree, "reward": {"functions": items, "workers": arguments.workers}}, "atomrl reward")
    device = "cpu"
    if set(names) & set(LOADING):
        from atomrl.runs.build import device_name

        device = device_name()
    return build_rewards(config.reward, patience=None, device=device)


def read(file: Path) -> list[tuple[dict[str, Any], Trajectory]]:
    """Every line as a row, and as the only completion of its prompt.

    Raises:
        DataError: lines that are no row with a prompt and a completion, each with its place.
    """
    from atomrl.data.files import read_rows
    from atomrl.data.problems import DataError, problem_list

    rows, problems = [], []
    for raw in read_rows(file):
        if raw.row is None:
            problems.append(f"{raw.place}: {raw.problem}")
        elif not isinstance(raw.row.get("completion"), str):
            problems.append(f"{raw.place}: 'completion' must be text")
        elif not isinstance(raw.row.get("prompt"), (str, list)):
            problems.append(f"{raw.place}: 'prompt' must be text or messages")
        else:
            rows.append((raw.row, to_trajectory(raw.place, raw.row)))
    if problems:
        raise DataError(f"{file}: {len(problems)} lines cannot be scored:\n" + problem_list(problems))
    if not rows:
        raise DataError(f"{file} holds no row")
    return rows


def to_trajectory(place: str, row: dict[str, Any]) -> Trajectory:
    """A row as the only completion of its prompt."""
    from atomrl.chat_template import thought_opening
    from atomrl.types import Sample, Segment, Trajectory

    own = ("prompt", "completion", "opening", "ground_truth", "data_source", "completion_tokens", "token_ids", "reward",
           "reward_parts", "reward_failures")  # fmt: skip
    tokens = row.get("token_ids") or [0] * int(row.get("completion_tokens") or 0)  # only their number is used
    sample = Sample(
        sample_id=place,
        prompt=row["prompt"] if isinstance(row["prompt"], str) else tuple(row["prompt"]),
        ground_truth=row.get("ground_truth"),
        data_source=row.get("data_source", "default"),
        columns={name: value for name, value in row.items() if name not in own},
    )
    segments = Segment(origin="prompt", token_ids=()), Segment(origin="model", token_ids=tuple(tokens))
    begun = thought_opening(sample.prompt) if isinstance(sample.prompt, str) else ""
    return Trajectory(
        prompt_id=place, index=0, sample=sample, segments=segments, text=row["completion"], finish_reason="stop",
        opening=row.get("opening", begun),
    )  # fmt: skip


def with_rewards(row: dict[str, Any], scored: Trajectory) -> dict[str, Any]:
    """A row with what it earned."""
    failures = {failure.reward: f"{failure.kind}: {failure.message}" for failure in scored.reward_failures}
    kept = {key: value for key, value in row.items() if key != "reward_failures"}
    found = {**kept, "reward": scored.reward, "reward_parts": dict(scored.reward_parts)}
    return found | ({"reward_failures": failures} if failures else {})


def summary(scored: Sequence[Trajectory], row_seconds: Sequence[float], seconds: float) -> str:
    """Distribution, failures and time; of two rewards, where they differ."""
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
        lines += [f"    {place}: {failure.kind}: {failure.message}" for place, failure in own[:SHOWN]]
    for name in names[1:]:
        differ = [place for place, a, b in zip(places, parts[names[0]], parts[name], strict=True) if a != b]
        shown = f": {', '.join(differ[:SHOWN])}" + (", ..." if len(differ) > SHOWN else "") if differ else ""
        lines += ["", f"{names[0]} and {name} differ on {len(differ)} of {len(places)}{shown}"]
    return "\n".join(lines)


def distribution(values: Sequence[float]) -> list[str]:
    """How often each value came; of more than ten different ones, ten ranges of equal width."""
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
