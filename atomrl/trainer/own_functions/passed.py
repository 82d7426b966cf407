"""Functions passed from a Python script."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atomrl.common.functions import name_of, plain_name
from atomrl.config import ConfigError, RunConfig, load_config
from atomrl.objectives import PolicyObjective
from atomrl.objectives.choice import imported


def check_functions(reward: Any, advantage: Any, rewards: Any, callbacks: Any) -> None:
    """Check the types of the functions that a script passes to `atomrl.train`.

    Raises:
        ConfigError: one is neither callable nor, where allowed, a name.
    """
    for name, function in (("reward", reward), ("advantage", advantage)):
        if function is not None and not isinstance(function, str) and not callable(function):
            raise ConfigError(f"{name}={function!r}: must be a function or its path, as in './my_file.py:f'")
    if rewards is not None and not (isinstance(rewards, Mapping) and all(map(callable, rewards.values()))):
        raise ConfigError(f"rewards={rewards!r}: must be a dict of functions by their names in reward.functions")
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise ConfigError(f"callbacks={callbacks!r}: must be a list of functions f(step, metrics)")


def with_functions(
    config: RunConfig, reward: Callable[..., Any] | str | None, advantage: Callable[..., Any] | str | None
) -> tuple[RunConfig, dict[str, Callable[..., Any]]]:
    """Set the reward and the advantage of a config to functions, given as objects or by name.

    Returns:
        The config, and its rewards that exist only in this process: name in the config -> function.

    Raises:
        ConfigError: this kind of run has no rewards or advantages, or the advantage has the wrong signature.
    """
    tree = config.to_tree(secrets=True)
    by_name: dict[str, Callable[..., Any]] = {}
    if reward is None and advantage is None:
        return config, by_name
    if config.kind != "rl":
        raise ConfigError(f"a {config.kind} run has no rewards or advantages")
    if advantage is not None:
        if not isinstance(config.algorithm, PolicyObjective):
            raise ConfigError(f"algorithm.name={config.algorithm.name} has no advantage")
        imported.cache_clear()  # another function may have had this name before
        tree["algorithm"]["advantage"] = {
            "type": "custom",
            "function": advantage if isinstance(advantage, str) else name_of(advantage),
        }
    if reward is not None:
        name = reward if isinstance(reward, str) else plain_name(reward)
        if not isinstance(reward, str):
            by_name[name] = reward
        tree["reward"] |= {"functions": [{"function": name}], "by_data_source": {}}
    return load_config(tree), by_name
