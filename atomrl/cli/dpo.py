"""Train a model on preferences: rows with `prompt`, `chosen` and `rejected` (docs/preferences.md), or a task's own.

atomrl dpo configs/algorithms/dpo.yaml
atomrl dpo configs/algorithms/kto.yaml data.train=labelled.jsonl data.eval=null
atomrl dpo configs/algorithms/dpo.yaml --resume
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
    from atomrl.assembly.dpo import preferences

    return run_to_the_end("dpo", config, arguments, preferences)
