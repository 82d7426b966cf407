"""`atomrl tune`: search for better values of config keys."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from atomrl.cli.arguments import add_config, check_config, sigterm_as_interrupt
from atomrl.cli.main import Run

if TYPE_CHECKING:
    from atomrl.config.run import Kind


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_tune(parser: argparse.ArgumentParser) -> Run:
    """Search for better values of a config's keys.

    Trials are runs; bad ones stop half way; the best are repeated with fresh seeds. The space is a YAML file that maps
    dotted keys to a range or to choices:

        train.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}
        rollout.completions_per_prompt: {low: 4, high: 16, step: 4}
        algorithm.kl.coefficient: [0.0, 0.05, 0.1]

    atomrl tune configs/quickstart.yaml --space space.yaml --runs 20 --seeds 3 --budget 2h
    atomrl tune configs/quickstart.yaml --space space.yaml --metric critic/score/mean --out runs/study
    """
    add_config(parser)
    add = parser.add_argument
    add("--space", type=Path, required=True, metavar="FILE", help="ranges or choices of keys")
    add("--runs", type=int, default=20, help="trials (20)")
    add("--seeds", type=int, default=3, help="fresh seeds for the best three and the original config (3)")
    add("--budget", metavar="TIME", help="90m, 2h: start no trial that would leave no time for the fresh seeds")
    by_kind = "mean score, accuracy of pairs, or loss"
    add("--metric", metavar="M", help=f"key of metrics.jsonl to maximize; --metric=-M minimizes ({by_kind})")
    add("--window", type=int, default=10, help="average the metric over this many last steps (10)")
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="the study (default: OUTPUT_DIR/tune-NAME); an existing one is continued",
    )
    return tune


@sigterm_as_interrupt()
def tune(arguments: argparse.Namespace) -> int:
    check_config(arguments)
    from atomrl.config import load_config
    from atomrl.tools.search_space import read_space
    from atomrl.tools.tuning import Settings
    from atomrl.tools.tuning import tune as search
    from atomrl.trainer import prepare_run

    config = load_config(arguments.config, arguments.overrides)
    if min(arguments.runs, arguments.seeds, arguments.window) < 1:
        raise ValueError("--runs, --seeds and --window must be at least 1")
    space = read_space(arguments.space, config)
    config = prepare_run(config).config  # checked, with its number of steps
    folder = arguments.out or Path(config.output_dir) / f"tune-{config.run_name}"
    settings = Settings(
        folder=folder.resolve(), runs=arguments.runs, seeds=arguments.seeds, budget_s=seconds(arguments.budget),
        metric=arguments.metric or default_metric(config.kind), window=arguments.window,
        command=[sys.executable, "-P", "-m", "atomrl.cli.main", "train", arguments.config, *arguments.overrides],
    )  # fmt: skip
    search(config, space, settings, log=lambda line: print(line, flush=True))
    print(f"{folder}: result.json, best.yaml and the runs")
    return 0


def default_metric(kind: Kind) -> str:
    """Return the default metric of a kind of run; `-` in front means that smaller is better."""
    losses = {"sft": "-sft/nll_per_token", "pretrain": "-train/loss"}
    return "critic/score/mean" if kind == "rl" else losses.get(kind, "rewards/accuracies")


def seconds(text: str | None) -> float:
    """Parse a time such as `2h` into seconds; None: no limit.

    Example:
        >>> seconds("90m"), seconds("1.5h"), seconds(None)
        (5400.0, 5400.0, inf)

    Raises:
        ValueError: it is not a time.
    """
    if text is None:
        return float("inf")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if not match:
        raise ValueError(f"--budget {text}: write a time as in 90m or 2h")
    return float(match[1]) * UNITS[match[2]]
