"""Train: `prepare_run` checks a config of any kind of run, `PreparedRun.execute` trains it with `loop.fit`.

    PreparedRun  checked: config, data, rewards      prepare_run(config)
    OpenRun      with its folder and its trainer     PreparedRun.execute(options)
    Training     with engine and source of groups    PreparedRun.open(run, stack)

A dry run and a run make the same checks: config, data, tokenizer, rewards and the shapes of the models, before weights
are loaded and before a folder is made. Start reading at `loop.py`.
"""

from collections.abc import Callable, Mapping

from atomrl.config import ConfigError, RunConfig
from atomrl.protocols import RewardFunction
from atomrl.trainer.auto import chosen_here
from atomrl.trainer.base import Options as Options
from atomrl.trainer.base import PreparedRun
from atomrl.trainer.build import given_to_rank
from atomrl.trainer.checks.config import (
    check_adapters,
    check_best,
    check_fresh_tokenizer,
    check_policy,
    check_ranks,
    check_savers,
    check_secrets,
    check_unused,
)
from atomrl.trainer.offline import PreferenceRun, RewardModelRun, SupervisedRun
from atomrl.trainer.pretrain import PretrainRun
from atomrl.trainer.restart import run_to_end as run_to_end
from atomrl.trainer.rl import RLRun

KINDS: dict[str, tuple[Callable[[RunConfig], PreparedRun], str]] = {
    "rl": (
        RLRun,
        "an algorithm.name that is trained on rollouts (grpo, the default, online_dpo, ...), and no section sft or "
        "pretrain",
    ),
    "sft": (SupervisedRun, "the section sft (may be empty: `sft: {}`)"),
    "preference": (PreferenceRun, "an algorithm.name that is trained on given preferences (dpo, kto, ...)"),
    "reward-model": (RewardModelRun, "algorithm.name=reward_model"),
    "pretrain": (PretrainRun, "the section pretrain (such as `pretrain: {gpt: {}}`)"),
}
"""Kind of run -> its class, and the part of the config that selects it."""


def check_rl(config: RunConfig) -> None:
    """Raise ConfigError unless the config is for RL, whose runs sample rollouts."""
    if config.kind != "rl":
        raise ConfigError(
            f"this config is for {config.kind}, which samples no rollouts: it has {KINDS[config.kind][1]}; a config "
            f"for RL has {KINDS['rl'][1]}"
        )


def prepare_run(config: RunConfig, local_rewards: Mapping[str, RewardFunction] | None = None) -> PreparedRun:
    """Check a config and return its run.

    Args:
        config: of any kind of run.
        local_rewards: reward functions that exist only in this process, by their names in the config. RL only.

    Raises:
        ConfigError, DataError, ValueError: what is wrong, where, and what to do.
    """
    if local_rewards:
        check_rl(config)
    check_secrets(config)
    check_unused(config)
    check_policy(config)
    check_adapters(config)
    run = RLRun(config, local_rewards) if local_rewards else KINDS[config.kind][0](config)
    check_fresh_tokenizer(config, run.tokenizer)
    check_best(run.config)
    check_ranks(config, run.algorithm)  # before `check_savers`, whose remedy would not help here
    check_savers(config)
    run.given = given_to_rank(config)
    run.config = chosen_here(run.config, run.algorithm, run.ranks)
    return run
