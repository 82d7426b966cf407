"""`atomrl rollouts`: show the completions of a run, or write them to a file."""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.cli.main import Run as Command
from atomrl.common.errors import reraise_as
from atomrl.common.files import check_writable, write_jsonl

if TYPE_CHECKING:
    from atomrl.tracking.reading import Run

WIDTH = 76
"""Characters of a completion that a line shows."""


def add_rollouts(parser: argparse.ArgumentParser) -> Command:
    """Show the completions of a run, or write them to a file.

    atomrl rollouts runs/quickstart                                  # the newest step: a line for each
    atomrl rollouts runs/quickstart --step 30 --sort reward --limit 5 --full
    atomrl rollouts runs/quickstart --steps 10-40 --max-reward 0 --text "easy"
    atomrl rollouts runs/quickstart --prompt 0:chain:train:17157     # one group: rewards, advantages and texts
    atomrl rollouts runs/quickstart --split eval --out eval.parquet  # .parquet, .jsonl or .csv
    """
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the folder of a run")
    add("--step", type=int, help="completions of one step (the newest)")
    add("--steps", metavar="FIRST-LAST", help="completions of these steps; default with --out: all")
    add("--split", choices=("train", "eval"), default="train")
    add("--prompt", metavar="ID", help="the group of one prompt, in full")
    add("--text", help="text in prompt, ground truth or completion")
    add("--min-reward", type=float)
    add("--max-reward", type=float)
    add("--finish", metavar="REASON", help="stop, length, ...")
    add("--mixed", action="store_true", help="only groups with different rewards")
    add("--sort", choices=("step", "reward", "advantage", "length"), default="step")
    add("--descending", action="store_true")
    add("--limit", type=int, default=20, help="completions to show (20)")
    add("--full", action="store_true", help="show them in full")
    add("--out", type=Path, metavar="FILE", help="write them to a .parquet, .jsonl or .csv file instead")
    return show_rollouts


def show_rollouts(arguments: argparse.Namespace) -> int:
    """Print the selected completions, or write them to a file."""
    from atomrl.tracking.reading import load_run

    if arguments.limit < 1:
        raise ValueError(f"--limit {arguments.limit}: must be at least 1")
    loaded = load_run(arguments.run)
    numbers = select_rollouts(loaded, arguments)
    if arguments.out is not None:
        count = write(loaded.rollouts.rows(numbers), arguments.out)
        print(f"{arguments.out}: {count:,} completions")
        return 0
    listed = numbers[: arguments.limit]
    if not numbers:
        print("no completion matches these options")
    for row in loaded.rollouts.rows(listed):
        print(format_full(row) if arguments.full or arguments.prompt else format_line(row))
    if len(listed) < len(numbers):
        print(f"... and {len(numbers) - len(listed):,} more (--limit N)")
    return 0


def select_rollouts(run: Run, arguments: argparse.Namespace) -> Sequence[int]:
    """Return the indices of the rollouts that match the options.

    Raises:
        ValueError: the run has no rollouts, or none of the steps or the prompt; or `--steps` is invalid.
    """
    from atomrl.tracking.reading.rollouts import SPLITS, RolloutFilter

    index = run.rollouts
    of_split = index.steps[index.splits == SPLITS.index(arguments.split)]
    if not len(of_split):
        raise ValueError(f"{run.path} has no rollouts of {arguments.split} (tracking.save_rollouts keeps them)")
    first = last = arguments.step
    if arguments.steps is not None:
        try:
            first, last = (int(part) for part in arguments.steps.split("-"))
        except ValueError:
            raise ValueError(f"--steps {arguments.steps}: write FIRST-LAST, as in 10-40") from None
    elif first is None and arguments.out is None and arguments.prompt is None:
        first = last = int(of_split.max())
    low, high = (first, last) if first is not None and last is not None else (0, int(of_split.max()))
    if not ((of_split >= low) & (of_split <= high)).any():
        requested = f"step {low}" if low == high else f"steps {low} to {high}"
        has = f"steps {of_split.min()} to {of_split.max()}"
        raise ValueError(f"{run.path} has no rollouts of {arguments.split} of {requested}; it has {has}")
    conditions = RolloutFilter(
        first_step=first, last_step=last, split=arguments.split, text=arguments.text, mixed=arguments.mixed or None,
        min_reward=arguments.min_reward, max_reward=arguments.max_reward, finish_reason=arguments.finish,
    )  # fmt: skip
    numbers = index.select(conditions, arguments.sort, arguments.descending)
    if arguments.prompt is not None:
        prompts = index.words("prompt_id")
        if arguments.prompt not in prompts:
            raise ValueError(f"--prompt {arguments.prompt}: no prompt of the run has this id; each line shows one")
        numbers = numbers[[prompts[number] == arguments.prompt for number in numbers]]
    return [int(number) for number in numbers]


def format_line(row: dict[str, Any]) -> str:
    """Format step, prompt, reward, advantage, length and the beginning of a completion in one line."""
    from atomrl.common.terminal import printable
    from atomrl.tracking.reading.metrics import as_float

    if not row:
        return "(its file has changed)"
    text = str(row.get("completion", "")).replace("\n", " ")
    advantage = as_float(row.get("advantage"))
    return printable(
        f"{row.get('step')!s:>6} {row.get('prompt_id')} #{row.get('completion_index')}  r {row.get('reward')}"
        f"  A {'-' if math.isnan(advantage) else f'{advantage:+.3f}'}  {row.get('completion_tokens')} tok"
        f" {row.get('finish_reason')}  {text[:WIDTH]}{'...' if len(text) > WIDTH else ''}"
    )


def format_full(row: dict[str, Any]) -> str:
    """Format prompt, completion (of an episode, turn by turn), ground truth and rewards in full."""
    from atomrl.common.terminal import printable
    from atomrl.tracking.console import by_turn
    from atomrl.tracking.reading.token_records import IMAGES

    numbers = {
        key: row.get(key) for key in ("reward", "reward_parts", "advantage", "completion_tokens", "finish_reason")
    }
    head = f"--- step {row.get('step')}, prompt {row.get('prompt_id')}, completion {row.get('completion_index')}"
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        prompt = "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt if isinstance(turn, dict))
    episode = row.get("episode")
    pictures = [f"picture: {IMAGES}/{name}" for name in images] if isinstance(images := row.get("images"), list) else []
    try:
        completion = row.get("completion") if episode is None else by_turn(episode, whole=True).plain
    except (AttributeError, KeyError, TypeError, ValueError):  # of another program or version
        completion = f"{episode}"
    texts = [f"{prompt}", *pictures, "->", f"{completion}", f"ground truth: {row.get('ground_truth')}"]
    return printable("\n".join([head, *texts, ", ".join(f"{key} {value}" for key, value in numbers.items())]))


def write(rows: Sequence[dict[str, Any]], out: Path) -> int:
    """Write rows to a file in the format of its suffix, and return their number."""
    check_writable(out)
    rows = [row for row in rows if row]
    if out.suffix == ".jsonl":
        return write_jsonl(rows, out)
    if out.suffix not in (".parquet", ".csv"):
        raise ValueError(f"--out {out}: the file name must end in .parquet, .jsonl or .csv")
    names = list(dict.fromkeys(name for row in rows for name in row))
    # Each column needs one type: if some of its values are lists or objects, all are written as JSON.
    nested = {
        name for name in names if name != "token_ids" and any(isinstance(row.get(name), list | dict) for row in rows)
    }
    nested |= {"token_ids"} if out.suffix == ".csv" else set()
    table = {name: [_cell(row.get(name), name in nested) for row in rows] for name in names}
    if out.suffix == ".csv":
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows(zip(*table.values(), strict=True))
    else:
        with reraise_as(ValueError, "a .parquet file needs: pip install 'atomrl[parquet]'", ImportError):
            import pyarrow
            import pyarrow.parquet
        table |= {
            name: [None if v is None else str(v) for v in table[name]] for name in names if name == "ground_truth"
        }
        pyarrow.parquet.write_table(pyarrow.table(table), out)
    return len(rows)


def _cell(value: Any, nested: bool) -> Any:
    return (
        json.dumps(value, ensure_ascii=False) if nested and value is not None and not isinstance(value, str) else value
    )
