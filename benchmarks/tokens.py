"""Cost of token records: the same run with and without them, in turns, and the size of their files.

    python benchmarks/tokens.py configs/quickstart.yaml                     (its model must be there: make quickstart)
    python benchmarks/tokens.py CONFIG --steps 20 --repeat 5 --tokens 2 0.999999

For each setting of `tracking.tokens` it prints the median step and how much slower that is than without records, run by
run beside each other, since a machine's speed drifts; and the bytes of a file for each token in it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from atomrl.tracking.reading import Run, load_run

BAR = 2.0
"""Percent of a step that records may take."""


def train(config: str, folder: Path, name: str, steps: int, tokens: float, more: list[str]) -> Run:
    command = [
        sys.executable, "-m", "atomrl.cli.main", "train", config, f"output_dir={folder}", f"run_name={name}",
        f"train.steps={steps}", f"tracking.tokens={tokens}", "tracking.log_completions=0", "eval.before=false",
        "eval.after=false", "eval.every_steps=0", "checkpoint.every_steps=0", *more,
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return load_run(folder / name)


def step_seconds(run: Run) -> float:
    """The median step; the first one warms up."""
    return statistics.median(run.metrics["timing_s/step"][1:])


def bytes_per_token(run: Run, step: int) -> tuple[int, float]:
    """Return the number of recorded tokens of a step, and bytes per token on disk."""
    table = run.tokens(step)
    if table is None:
        return 0, 0.0
    count = len(table.tokens["tokens"])
    return count, (run.path / "rollouts" / f"step_{step:06d}" / "tokens.safetensors").stat().st_size / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("more", nargs="*", metavar="key=value", help="of the config")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tokens", type=float, nargs="+", default=[2, 0.999999], help="settings of tracking.tokens")
    arguments = parser.parse_args()
    slower: dict[float, list[float]] = {tokens: [] for tokens in arguments.tokens}
    sizes: dict[float, tuple[int, float]] = {}
    without: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        for turn in range(arguments.repeat):
            given = arguments.config, Path(place)
            without.append(step_seconds(train(*given, f"none-{turn}", arguments.steps, 0, arguments.more)))
            for tokens in arguments.tokens:
                run = train(*given, f"{tokens:g}-{turn}", arguments.steps, tokens, arguments.more)
                slower[tokens].append(100 * (step_seconds(run) / without[-1] - 1))
                sizes[tokens] = bytes_per_token(run, arguments.steps)
    print(f"a step without records: {statistics.median(without):.3f} s")
    for tokens, found in slower.items():
        count, size = sizes[tokens]
        mark = "" if statistics.median(found) <= BAR else f"   over {BAR:g}%"
        spread = f"{min(found):+.1f} to {max(found):+.1f}"
        print(
            f"tracking.tokens={tokens:<9g} {statistics.median(found):+.1f}% ({spread}); {count} tokens of the last "
            f"step, {size:.0f} bytes each{mark}"
        )


if __name__ == "__main__":
    main()
