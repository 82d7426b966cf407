"""From a config to a finished run: one course, and what each kind of run does on it.

A dry run and a run prepare alike (`prepare_run`): config, data, tokenizer, rewards and the models' shapes are checked
before weights are loaded and before a folder is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from atomrl.config import ConfigError, RunConfig
from atomrl.protocols import RewardFunction
from atomrl.runs.base import Run
from atomrl.runs.given_data import PreferenceRun, RewardModelRun, SupervisedRun
from atomrl.runs.pretrain import PretrainRun
from atomrl.runs.rl import RLRun

KINDS: dict[str, tuple[Callable[[RunConfig], Run], str]] = {
    "train": (RLRun, "its algorithm is trained on rollouts, and it has no section sft or pretrain"),
    "sft": (SupervisedRun, "it has the section sft"),
    "dpo": (PreferenceRun, "its algorithm is trained on given preferences"),
    "reward-model": (RewardModelRun, "its algorithm.name is reward_model"),
    "pretrain": (PretrainRun, "it has the section pretrain"),
}
"""Kind of run, which is the name of its command -> its class, and how a config comes to be one."""


def check_command(config: RunConfig, command: str) -> None:
    """Raise ConfigError where a config belongs to another command."""
    if config.kind != command:
        raise ConfigError(
            f"this config is for `atomrl {config.kind}` and not for `atomrl {command}`: {KINDS[config.kind][1]}"
        )


def prepare_run(config: RunConfig, local_rewards: Mapping[str, RewardFunction] | None = None) -> Run:
    """The run of a config, checked.

    Args:
        config: of any kind of run.
        local_rewards: functions that exist in this process alone, by the name that the config has for them; in
            reinforcement learning.

    Raises:
        ConfigError, DataError, ValueError: what is wrong, where, and what to do.
    """
    if not local_rewards:
        return KINDS[config.kind][0](config)
    check_command(config, "train")
    return RLRun(config, local_rewards)
