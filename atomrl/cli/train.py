"""Train a model with reinforcement learning.

atomrl train configs/quickstart.yaml
atomrl train configs/quickstart.yaml run_name=second train.steps=50 rollout.temperature=0.8
atomrl train configs/quickstart.yaml --dry-run
atomrl train configs/quickstart.yaml --resume
"""

from __future__ import annotations

import argparse

from atomrl.cli.door import add_config_arguments, add_resume_arguments, config_from, join_overrides
from atomrl.cli.running import run_to_the_end

prepare = join_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_resume_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check config and data, print the batch arithmetic and a memory estimate; loads no weights",
    )


def run(arguments: argparse.Namespace) -> int:
    config = config_from(arguments)
    if arguments.dry_run:
        from atomrl.cli.dry_run import dry_run

        dry_run(config)
        return 0
    from atomrl.assembly import train
    from atomrl.cli.dry_run import batch_arithmetic

    return run_to_the_end("train", config, arguments, train, header=batch_arithmetic(config))
