"""Draw completions into a rollout pool, which `atomrl train` with rollout.source=pool trains on (docs/rollout_pool.md).

The config is that of the training: engine, data, rewards. Weights are those of model.path, and newer ones as soon as
the run of the config publishes them. Several of these commands may run at once.

atomrl rollout configs/quickstart.yaml run_name=pooled --groups 640
atomrl train configs/quickstart.yaml run_name=pooled rollout.source=pool train.steps=10 pool.max_staleness=10
"""

import argparse
import json
import sys

from atomrl.cli.config_arguments import add_config_arguments, config_from, join_overrides
from atomrl.cli.training import terminated_like_interrupted

OPTIONS = ("--groups",)


def prepare(arguments: list[str]) -> list[str]:
    return join_overrides(arguments, options=OPTIONS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--groups", type=int, metavar="N", help="draw N prompts' groups and end; else until Ctrl-C")


@terminated_like_interrupted()
def run(arguments: argparse.Namespace) -> int:
    """Fill the pool.

    Returns:
        0, also after Ctrl-C, which lets the batch under way be written.
    """
    if arguments.groups is not None and arguments.groups < 1:
        raise ValueError("--groups: takes a number of at least 1")
    config = config_from(arguments)
    from atomrl.runs import check_command
    from atomrl.runs.hangs import hang_watch
    from atomrl.runs.rl import RLRun
    from atomrl.runs.rollouts import fill

    check_command(config, "train")
    run = RLRun(config)
    with hang_watch(config):
        filled = fill(run, arguments.groups, said=lambda line: print(line, file=sys.stderr))
    print(json.dumps(filled, indent=2))
    return 0
