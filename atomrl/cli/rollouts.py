"""Look at the completions of a run, or write them to a file.

atomrl rollouts runs/quickstart                                  # the newest step: a line for each
atomrl rollouts runs/quickstart --step 30 --sort reward --limit 5 --full
atomrl rollouts runs/quickstart --steps 10-40 --max-reward 0 --text "easy"
atomrl rollouts runs/quickstart --prompt 0:chain:train:17157     # one group: rewards, advantages and texts
atomrl rollouts runs/quickstart --split eval --out eval.parquet  # .parquet, .jsonl or .csv
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomrl.files import check_writable, write_jsonl
from atomrl.hints import said_as

if TYPE_CHECKING:
    from atomrl.reading import Run

WIDTH = 76
"""Characters of a completion in a line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the folder of a run")
    add("--step", type=int, help="of one step (the newest)")
    add("--steps", metavar="FIRST-LAST", help="of these; with --out all, unless given")
    add("--split", choices=("train", "eval"), default="train")
    add("--prompt", metavar="ID", help="the group of one prompt, in full")
    add("--text", help="in prompt, ground truth or completion")
    add("--min-reward", type=float)
    add("--max-reward", type=float)
    add("--finish", metavar="REASON", help="stop, length, ...")
    add("--mixed", action="store_true", help="only of groups with different rewards")
    add("--sort", choices=("step", "reward", "advantage", "length"), default="step")
    add("--descending", action="store_true")
    add("--limit", type=int, default=20, help="completions to show (20)")
    add("--full", action="store_true", help="show them in full")
    add("--out", type=Path, metavar="FILE", help="write them to a .parquet, .jsonl or .csv file instead")


def run(arguments: argparse.Namespace) -> int:
    from atomrl.reading import load_run

    if arguments.limit < 1:
        raise ValueError(f"--limit {arguments.limit}: show at least one")
    loaded = load_run(arguments.run)
    numbers = chosen(loaded, arguments)
    if arguments.out is not None:
        count = write(loaded.rollouts.rows(numbers), arguments.out)
        print(f"{arguments.out}: {count:,} completions")
        return 0
    shown = numbers[: arguments.limit]
    if not numbers:
        print("no completion is as these options say")
    for number, row in zip(shown, loaded.rollouts.rows(shown), strict=True):
        print(in_full(row) if arguments.full or arguments.prompt else in_a_line(row, loaded, number))
    if len(shown) < len(numbers):
        print(f"... and {len(numbers) - len(shown):,} more (--limit N)")
    return 0


def chosen(run: Run, arguments: argparse.Namespace) -> Sequence[int]:
    """The numbers of the rollouts that the command line asks for.

    Raises:
        ValueError: there are none at all, or none of these steps or of this prompt; or a step is no number.
    """
    from atomrl.reading.rollouts import SPLITS, RolloutFilter

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
        asked = f"step {low}" if low == high else f"steps {low} to {high}"
        has = f"steps {of_split.min()} to {of_split.max()}"
        raise ValueError(f"{run.path} has no rollouts of {arguments.split} of {asked}; it has some of {has}")
    wanted = RolloutFilter(
        first_step=first, last_step=last, split=arguments.split, text=arguments.text, mixed=arguments.mixed or None,
        min_reward=arguments.min_reward, max_reward=arguments.max_reward, finish_reason=arguments.finish,
    )  # fmt: skip
    found = index.select(wanted, arguments.sort, arguments.descending)
    if arguments.prompt is not None:
        prompts = index.words("prompt_id")
        if arguments.prompt not in prompts:
            raise ValueError(f"--prompt {arguments.prompt}: no prompt of the run has this id; others are in each line")
        found = found[[prompts[number] == arguments.prompt for number in found]]
    return [int(number) for number in found]


def in_a_line(row: dict[str, Any], run: Run, number: int) -> str:
    """Step, prompt, reward, advantage, tokens and the beginning of a completion."""
    if not row:
        return "(its file has changed)"
    text = str(row.get("completion", "")).replace("\n", " ")
    advantage = row.get("advantage")
    return printable(
        f"{row.get('step'):>6} {row.get('prompt_id')} #{row.get('completion_index')}  r {row.get('reward')}"
        f"  A {'-' if advantage is None else f'{advantage:+.3f}'}  {row.get('completion_tokens')} tok"
        f" {row.get('finish_reason')}  {text[:WIDTH]}{'...' if len(text) > WIDTH else ''}"
    )


def in_full(row: dict[str, Any]) -> str:
    """All of a completion that a person reads; of an episode, who wrote what."""
    from atomrl.tracking.console import by_turn

    numbers = {
        key: row.get(key) for key in ("reward", "reward_parts", "advantage", "completion_tokens", "finish_reason")
    }
    head = f"--- step {row.get('step')}, prompt {row.get('prompt_id')}, completion {row.get('completion_index')}"
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        prompt = "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt if isinstance(turn, dict))
    episode = row.get("episode")
    completion = row.get("completion") if episode is None else by_turn(episode, whole=True).plain
    texts = [f"{prompt}", "->", f"{completion}", f"ground truth: {row.get('ground_truth')}"]
    return printable("\n".join([head, *texts, ", ".join(f"{key} {value}" for key, value in numbers.items())]))


def printable(text: str) -> str:
    """A text that a terminal shows and does not obey: control characters, but for line ends and tabs, as codes."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def write(rows: Sequence[dict[str, Any]], out: Path) -> int:
    """Rows to a file, by its suffix."""
    check_writable(out)
    kept = [row for row in rows if row]
    if out.suffix == ".jsonl":
        return write_jsonl(kept, out)
    if out.suffix not in (".parquet", ".csv"):
        raise ValueError(f"--out {out}: name a file that ends in .parquet, .jsonl or .csv")
    names = list(dict.fromkeys(name for row in kept for name in row))
    # A column of one type: what is a list or an object in some rows is JSON in all.
    nested = {
        name for name in names if name != "token_ids" and any(isinstance(row.get(name), list | dict) for row in kept)
    }
    nested |= {"token_ids"} if out.suffix == ".csv" else set()
    table = {name: [_cell(row.get(name), name in nested) for row in kept] for name in names}
    if out.suffix == ".csv":
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows(zip(*table.values(), strict=True))
    else:
        with said_as(ValueError, "a .parquet file needs: pip install 'atomrl[parquet]'", ImportError):
            import pyarrow
            import pyarrow.parquet
        table |= {
            name: [None if v is None else str(v) for v in table[name]] for name in names if name == "ground_truth"
        }
        pyarrow.parquet.write_table(pyarrow.table(table), out)
    return len(kept)


def _cell(value: Any, nested: bool) -> Any:
    return (
        json.dumps(value, ensure_ascii=False) if nested and value is not None and not isinstance(value, str) else value
    )
