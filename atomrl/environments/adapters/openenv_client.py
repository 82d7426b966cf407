"""Environments behind an OpenEnv server."""

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from typing import Any

from atomrl.environments.adapters import seed_of
from atomrl.episodes import Reply, Role
from atomrl.types import Sample


def play(
    sample: Sample, *, url: str, action: str, observation: str = "", role: Role = "user", timeout_s: float = 20.0
) -> Generator[Reply, str, float]:
    """An episode of the server at `url`. Its rewards are those of the turns, and the last one the outcome.

    Args:
        action: the field of its action that is what the model wrote.
        observation: the field of its observations that the model sees; the empty one is all of them, as JSON.
        timeout_s: for an answer.
    """
    from openenv.core import GenericEnvClient

    def shown(seen: Mapping[str, Any]) -> str:
        return str(seen[observation]) if observation else json.dumps(seen)

    def answered(ask: Callable[..., Any], *args: Any, **named: Any) -> Any:
        try:
            return ask(*args, **named)
        except TimeoutError as error:  # `outages.is_away` takes one for somebody's own clock
            raise ConnectionError(f"{url} has not answered within {timeout_s:g} s") from error

    client: Any = GenericEnvClient(base_url=url, connect_timeout_s=timeout_s, message_timeout_s=timeout_s).sync()
    with ExitStack() as stack:
        answered(stack.enter_context, client)
        found, reward = answered(client.reset, seed=seed_of(sample)), None
        while not found.done:
            text = yield Reply(text=shown(found.observation), role=role, reward=reward)
            found = answered(client.step, {action: text})
            reward = float(found.reward or 0.0)
        return reward or 0.0
