"""The section `environment`: what answers the model."""

from typing import Any

from pydantic import Field

from atomrl.config.base import Section


class EnvironmentConfig(Section):
    """What answers the model, turn by turn (docs/environments.md).

    `rollout.max_completion_tokens` bounds all that comes after the prompt, replies included.
    """

    function: str
    """A built-in name, or a dotted path to a generator function, an async function, or a class with reset and step."""
    args: dict[str, Any] = {}
    stop: tuple[str, ...] = ()
    """Strings that end a turn of the model, beside `rollout.stop`."""
    max_turns: int = Field(8, ge=1)
    """Turns of the model; the environment may end the episode before."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Of the model in one turn; null: what is left of the episode."""
    max_reply_tokens: int = Field(512, ge=1)
    """Of the environment at once; what is beyond is cut."""
    timeout_s: float = Field(30.0, gt=0)
    """For one answer of the environment."""
    workers: int = Field(2, ge=1)
    """Processes that episodes run in, many at once in each."""
