"""Search for better values of a config's keys. Trials are runs; bad ones end half way; the best run on fresh seeds.

SPACE is YAML, a key with dots and its range or its choices:

    train.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}
    rollout.completions_per_prompt: {low: 4, high: 16, step: 4}
    algorithm.kl.coefficient: [0.0, 0.05, 0.1]

atomrl tune configs/quickstart.yaml --space space.yaml --runs 20 --seeds 3 --budget 2h
"""

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from atomrl.cli.config_arguments import add_config_arguments, config_from, join_overrides
from atomrl.cli.training import terminated_like_interrupted

if TYPE_CHECKING:
    from atomrl.config.run import Kind

OPTIONS = ("--space", "--runs", "--seeds", "--budget", "--metric", "--window", "--out")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def prepare(arguments: list[str]) -> list[str]:
    """`key=value`, with this command's own options left."""
    return join_overrides(arguments, OPTIONS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add = parser.add_argument
    add("--space", type=Path, required=True, metavar="FILE", help="keys with their ranges or choices")
    add("--runs", type=int, default=20, help="trials (20)")
    add("--seeds", type=int, default=3, help="fresh seeds for the best three and the config as it is (3)")
    add("--budget", metavar="TIME", help="90m, 2h: begin no trial that would leave no time for the fresh seeds")
    by_kind = "the mean score, pairs in order, or the loss"
    add("--metric", metavar="M", help=f"of metrics.jsonl, the larger the better, --metric=-M the smaller ({by_kind})")
    add("--window", type=int, default=10, help="steps at the end that its mean is taken over (10)")
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="the study (default: OUTPUT_DIR/tune-NAME); one that is there goes on",
    )


@terminated_like_interrupted()
def run(arguments: argparse.Namespace) -> int:
    from atomrl.runs import prepare_run
    from atomrl.tuning import Settings, tune
    from atomrl.tuning.space import read_space

    config = config_from(arguments)
    if min(arguments.runs, arguments.seeds, arguments.window) < 1:
        raise ValueError("--runs, --seeds and --window are at least 1")
    space = read_space(arguments.space, config)
    config = prepare_run(config).config  # checked, with its number of steps
    folder = arguments.out or Path(config.output_dir) / f"tune-{config.run_name}"
    settings = Settings(
        folder=folder.resolve(), runs=arguments.runs, seeds=arguments.seeds, budget_s=seconds(arguments.budget),
        metric=arguments.metric or usual_metric(config.kind), window=arguments.window,
        command=[sys.executable, "-P", "-m", "atomrl.cli.main", config.kind, arguments.config, *arguments.overrides],
    )  # fmt: skip
    tune(config, space, settings, say=lambda line: print(line, flush=True))
    print(f"{folder}: result.json, best.yaml and the runs")
    return 0


def usual_metric(kind: "Kind") -> str:
    """What a run is judged by where nothing is said."""
    losses = {"sft": "-sft/nll_per_token", "pretrain": "-train/loss"}
    return "critic/score/mean" if kind == "train" else losses.get(kind, "rewards/accuracies")


def seconds(text: str | None) -> float:
    """`2h` in seconds; no text is no limit.

    Example:
        >>> seconds("90m"), seconds("1.5h"), seconds(None)
        (5400.0, 5400.0, inf)

    Raises:
        ValueError: it is no time.
    """
    if text is None:
        return float("inf")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if not found:
        raise ValueError(f"--budget {text}: write a time as in 90m or 2h")
    return float(found[1]) * UNITS[found[2]]
