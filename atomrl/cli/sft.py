"""Train a model on demonstrations: rows with `prompt` and `completion`, or a task's own.

atomrl sft configs/sft.yaml
atomrl sft configs/sft.yaml --resume
"""

from __future__ import annotations

import argparse

from atomrl.cli.door import add_config_arguments, add_resume_arguments, config_from, join_overrides
from atomrl.cli.running import run_to_the_end

prepare = join_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_resume_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    config = config_from(arguments)
    from atomrl.assembly.supervised import sft

    return run_to_the_end("sft", config, arguments, sft)
