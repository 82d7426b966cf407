"""Train a reward model on pairs of completions, of which one is better: rows with `prompt`, `chosen`, `rejected`.

atomrl reward-model configs/rlhf/reward_model.yaml
atomrl reward-model configs/rlhf/reward_model.yaml model.path=MODEL data.train=pairs.jsonl algorithm.centring=0.01
atomrl reward-model configs/rlhf/reward_model.yaml --resume
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
    from atomrl.assembly.reward_model import train_reward_model

    return run_to_the_end("reward-model", config, arguments, train_reward_model)
