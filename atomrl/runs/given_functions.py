"""Functions that a script hands over, as a config names them."""

from collections.abc import Callable
from typing import Any

from atomrl.config import ConfigError, RunConfig, build_config
from atomrl.functions import name_of, plain_name
from atomrl.objective import PolicyObjective
from atomrl.objective.choice import imported


def with_functions(
    config: RunConfig, reward: Callable[..., Any] | None, advantage: Callable[..., Any] | None
) -> tuple[RunConfig, dict[str, Callable[..., Any]]]:
    """A config with a reward and an advantage of one's own.

    Returns:
        The config, and rewards of this process by the name that it has for them.

    Raises:
        ConfigError: this kind of run has none; the advantage does not take the inputs.
    """
    tree = config.to_tree()
    by_name: dict[str, Callable[..., Any]] = {}
    if (reward or advantage) and config.kind != "train":
        raise ConfigError(f"a {config.kind} run has no rewards and no advantages of rollouts")
    if advantage is not None:
        if not isinstance(config.algorithm, PolicyObjective):
            raise ConfigError(f"algorithm.name={config.algorithm.name} has no advantage")
        imported.cache_clear()  # another function may have had the name before
        tree["algorithm"]["advantage"] = {"type": "custom", "function": name_of(advantage)}
    if reward is not None:
        name = plain_name(reward)
        by_name[name] = reward
        tree["reward"] |= {"functions": [{"function": name}], "by_data_source": {}}
    return (build_config(tree) if reward or advantage else config), by_name
