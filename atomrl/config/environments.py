"""The sections `environment` and `tools`: what answers the model."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from atomrl.config.base import Section
from atomrl.secrets import is_variable


class EnvironmentConfig(Section):
    """What answers the model, turn by turn (docs/guides/environments.md).

    `rollout.max_completion_tokens` bounds all that comes after the prompt, replies included; with `when_full` all of it
    that the model sees at once.
    """

    function: str
    """A built-in name, or a dotted path to a generator function, an async function, or a class with reset and step."""
    args: dict[str, Any] = {}
    opening: bool = False
    """The environment begins: what it says first is the end of the prompt's last message."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a turn of the model, beside `rollout.stop`."""
    max_turns: int = Field(8, ge=1)
    """Turns of the model; the environment may end the episode before."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Of the model in one turn; null: what is left of the episode."""
    when_full: Literal["end", "drop_oldest"] = "end"
    """What happens where another turn has no room: the episode ends, or the model goes on without its oldest turns."""
    max_reply_tokens: int = Field(512, ge=1)
    """Of the environment at once; what is beyond is cut."""
    timeout_s: float = Field(30.0, gt=0)
    """For one answer of the environment."""
    wait_s: float = Field(600.0, ge=0)
    """How long a service that it asks is waited for while that is away, before the run ends."""
    workers: int = Field(2, ge=1)
    """Processes that episodes run in, many at once in each."""


class ToolConfig(Section):
    """What the model may call (docs/guides/tool_calling.md)."""

    function: str | None = None
    """A dotted path to a function with type hints and a docstring, or to a class whose methods are such."""
    args: dict[str, Any] = {}
    """Arguments that the config gives and the model does not see; of a class, those that it is made with."""
    mcp: str | tuple[str, ...] | None = None
    """All tools of an MCP server: the command that starts it, or its address. `${NAME}` is an environment variable of
    the run's, in `env` too: so a secret is named and not written down."""
    env: dict[str, str] = {}
    """Environment variables of a command; it has but a few others."""
    headers_env: dict[str, str] = {}
    """HTTP headers for an address, by the environment variables that have their values."""
    timeout_s: float = Field(20.0, gt=0)
    """For one call, and for finding an MCP server. `environment.timeout_s` is for all calls of a turn."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, tree: Any) -> Any:
        return {"function": tree} if isinstance(tree, str) else tree

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.function is None) == (not self.mcp):
            raise ValueError("a tool is a function or an MCP server: give function or mcp")
        if isinstance(self.mcp, str) and not self.mcp.startswith(("http://", "https://")):
            raise ValueError("mcp is a command as a list of words, or an address with http://")
        if wrong := [header for header, name in self.headers_env.items() if not is_variable(name)]:
            raise ValueError(f"headers_env.{wrong[0]} names the environment variable that has the value, as in MY_KEY")
        if self.args and self.mcp:
            raise ValueError("args are a function's; an MCP server takes what is in its command or its address")
        return self
