"""From a config to a finished run: one course, and what each kind of run does on it.

A dry run and a run prepare alike (`prepare_run`): config, data, tokenizer, rewards and the models' shapes are checked
before weights are loaded and before a folder is made.
"""

from collections.abc import Callable, Mapping

from atomrl.config import ConfigError, RunConfig
from atomrl.protocols import RewardFunction
from atomrl.trainer.base import PreparedRun
from atomrl.trainer.base import run_to_end as run_to_end
from atomrl.trainer.checks import (
    check_adapters,
    check_best,
    check_fresh_tokenizer,
    check_policy,
    check_ranks,
    check_savers,
    check_unused,
)
from atomrl.trainer.offline import PreferenceRun, PretrainRun, RewardModelRun, SupervisedRun
from atomrl.trainer.planning import chosen_here
from atomrl.trainer.rl import RLRun

KINDS: dict[str, tuple[Callable[[RunConfig], PreparedRun], str]] = {
    "rl": (
        RLRun,
        "an algorithm.name that is trained on rollouts (grpo, the default, online_dpo, ...), and no section sft or "
        "pretrain",
    ),
    "sft": (SupervisedRun, "the section sft (an empty one will do: `sft: {}`)"),
    "preference": (PreferenceRun, "an algorithm.name that is trained on given preferences (dpo, kto, ...)"),
    "reward-model": (RewardModelRun, "algorithm.name=reward_model"),
    "pretrain": (PretrainRun, "the section pretrain (`pretrain: {gpt: {}}` will do)"),
}
"""Kind of run -> its class, and what a config for it has."""


def check_rl(config: RunConfig) -> None:
    """Raise ConfigError where a config's run draws no rollouts."""
    if config.kind != "rl":
        raise ConfigError(
            f"this config is one of {config.kind}, which draws no rollouts: it has {KINDS[config.kind][1]}; one that "
            f"draws them has {KINDS['rl'][1]}"
        )


def prepare_run(config: RunConfig, local_rewards: Mapping[str, RewardFunction] | None = None) -> PreparedRun:
    """The run of a config, checked.

    Args:
        config: of any kind of run.
        local_rewards: functions that exist in this process alone, by the name that the config has for them; in
            reinforcement learning.

    Raises:
        ConfigError, DataError, ValueError: what is wrong, where, and what to do.
    """
    if local_rewards:
        check_rl(config)
    check_unused(config)
    check_policy(config)
    check_adapters(config)
    run = RLRun(config, local_rewards) if local_rewards else KINDS[config.kind][0](config)
    check_fresh_tokenizer(config, run.tokenizer)
    check_best(run.config)
    check_ranks(config, run.algorithm)  # first: it says what no package that is missing would mend
    check_savers(config)
    run.config = chosen_here(run.config, run.algorithm, run.ranks)
    return run
