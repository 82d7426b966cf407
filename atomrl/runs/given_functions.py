"""Functions that a script hands over, as a config names them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atomrl.config import ConfigError, RunConfig, build_config
from atomrl.functions import name_of, plain_name
from atomrl.objective import PolicyObjective
from atomrl.objective.choice import imported


def check_functions(reward: Any, advantage: Any, rewards: Any, callbacks: Any) -> None:
    """That each of a script's functions is one, before anything is loaded.

    Raises:
        ConfigError: one is not.
    """
    for name, given in (("reward", reward), ("advantage", advantage)):
        if given is not None and not isinstance(given, str) and not callable(given):
            raise ConfigError(f"{name}={given!r}: give a function, or a path of one as in './my_file.py:f'")
    if rewards is not None and not (isinstance(rewards, Mapping) and all(map(callable, rewards.values()))):
        raise ConfigError(f"rewards={rewards!r}: give a dict of functions by the names that reward.functions has")
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise ConfigError(f"callbacks={callbacks!r}: give a list of functions f(step, metrics)")


def with_functions(
    config: RunConfig, reward: Callable[..., Any] | str | None, advantage: Callable[..., Any] | str | None
) -> tuple[RunConfig, dict[str, Callable[..., Any]]]:
    """A config with a reward and an advantage of one's own, each a function or what a config calls one by.

    Returns:
        The config, and rewards of this process by the name that it has for them.

    Raises:
        ConfigError: this kind of run has none; the advantage does not take the inputs.
    """
    tree = config.to_tree(secrets=True)
    by_name: dict[str, Callable[..., Any]] = {}
    if reward is None and advantage is None:
        return config, by_name
    if config.kind != "rl":
        raise ConfigError(f"a {config.kind} run has no rewards and no advantages of rollouts")
    if advantage is not None:
        if not isinstance(config.algorithm, PolicyObjective):
            raise ConfigError(f"algorithm.name={config.algorithm.name} has no advantage")
        imported.cache_clear()  # another function may have had the name before
        tree["algorithm"]["advantage"] = {
            "type": "custom",
            "function": advantage if isinstance(advantage, str) else name_of(advantage),
        }
    if reward is not None:
        name = reward if isinstance(reward, str) else plain_name(reward)
        if not isinstance(reward, str):
            by_name[name] = reward
        tree["reward"] |= {"functions": [{"function": name}], "by_data_source": {}}
    return build_config(tree), by_name
