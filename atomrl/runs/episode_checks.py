"""What has to be true of an environment and its tools, found before weights are loaded."""

import inspect
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from atomrl.config import ConfigError, RunConfig
from atomrl.environments.playing import EpisodeError, find_environment
from atomrl.environments.python import python
from atomrl.environments.table import ENVIRONMENTS
from atomrl.environments.tool_calls import find_form
from atomrl.environments.tools import check_rows, find_schemas, gives_reward, has_objects
from atomrl.functions import subscripts
from atomrl.hints import nearest, said_as
from atomrl.rollout.replies import ReplyTokens
from atomrl.runs.build import tool_schemas
from atomrl.sandbox.tools import limits_of
from atomrl.types import Sample

log = logging.getLogger(__name__)


def with_tools(config: RunConfig, tokenizer: Any) -> RunConfig:
    """The config with all that the environment `tools` has to know: the tools' schemas, and how the model calls them.

    Servers are connected to, and left again.

    Raises:
        ConfigError: a tool cannot be used, an MCP server does not answer, the chat template has no place for tools, or
            there are none.
    """
    if not config.tools:
        if config.environment is not None and config.environment.function == "tools":
            raise ConfigError("environment.function=tools: there are none; name them in the section tools")
        return config
    assert config.environment is not None, "which the section tools stands for"
    if config.data.chat_template == "none":
        raise ConfigError("tools: data.chat_template=none leaves them out of the prompt")
    if any(tool.mcp for tool in config.tools) and find_spec("mcp") is None:
        raise ConfigError("tools: mcp is not installed: pip install 'atomrl[mcp]'")
    over = [tool for tool in config.tools if tool.function and tool.timeout_s >= config.environment.timeout_s]
    if over:
        log.warning(
            "tools: %s: timeout_s=%g is not below environment.timeout_s=%g, which ends the whole episode first",
            over[0].function, over[0].timeout_s, config.environment.timeout_s,
        )  # fmt: skip
    tools = [tool.model_dump(mode="json") for tool in config.tools]
    with said_as(ConfigError, "tools", ValueError, OSError):
        schemas = find_schemas(tools)
        form = find_form(tokenizer, schemas, config.data.chat_template_kwargs)
    changes = {"args": {"tools": tools, "schemas": schemas, "form": form}, "opening": has_objects(tools)}
    return config.model_copy(update={"environment": config.environment.model_copy(update=changes)})


def check_outcome(config: RunConfig) -> None:
    """That something gives a reward, where the outcome of the environment would be the only one.

    Raises:
        ConfigError: nothing does.
    """
    settings = config.environment
    if settings is None or [item.function for item in config.reward.functions] != ["environment"]:
        return
    if config.tools and not gives_reward(settings.args["tools"]):
        raise ConfigError(
            "reward.functions: only a class with get_reward gives one, and functions give no reward; name a reward"
        )
    known = ENVIRONMENTS.get(settings.function)
    if known and known.scored_by:
        raise ConfigError(
            f"reward.functions: {settings.function} leaves the answer to a reward; name one, as {known.scored_by}"
        )


def check_columns(config: RunConfig, samples: Sequence[Sample]) -> None:
    """Check that the data have the columns that the environment reads: of an own one `sample.columns["name"]` in its
    source, of tools that are classes the parameters of `reset`.

    Raises:
        ConfigError: a column is absent.
    """
    if (settings := config.environment) is None:
        return
    function = find_environment(settings.function, settings.args)
    given = next(iter(inspect.signature(function).parameters), "")
    if inspect.isclass(function):
        function = function.reset  # type: ignore[attr-defined]
        given = [*inspect.signature(function).parameters, "", ""][1]
    wanted = subscripts(function, f"{given}.columns")
    for columns in dict.fromkeys(tuple(sample.columns) for sample in samples):
        place = next(sample.sample_id for sample in samples if tuple(sample.columns) == columns)
        if config.tools:
            with said_as(ConfigError, f"tools: {place}", ValueError):
                check_rows(settings.args["tools"], columns)
        if missing := [name for name in wanted if name not in columns]:
            near = nearest(missing[0], columns)
            raise ConfigError(
                f"environment.function={settings.function}: it reads {given}.columns[{missing[0]!r}], and {place} has "
                f"the columns {', '.join(map(repr, columns)) or 'none'}: "
                + (f"did you mean {near!r}?" if near else "name the column as the data do, or add it to them")
            )


def check_environment(config: RunConfig, tokenizer: Any) -> None:
    """That the environment can be called, and that the chat template has a place for what it says.

    As whom it speaks tells its argument `role`; of one without, nothing is known before it speaks.

    Raises:
        ConfigError: it cannot, or it has none.
    """
    if (settings := config.environment) is None:
        return
    try:
        function = find_environment(settings.function, settings.args)
    except EpisodeError as error:
        raise ConfigError(f"environment.{error}") from error
    parameters = inspect.signature(function).parameters
    if function is python:
        wall_s = limits_of(settings.args.get("timeout_s", parameters["timeout_s"].default), 1).wall_s
        if wall_s >= settings.timeout_s:
            log.warning(
                "environment.args.timeout_s: by the clock a program may take twice as long, %g s, which is not below "
                "environment.timeout_s=%g, which ends the whole episode first", wall_s, settings.timeout_s,
            )  # fmt: skip
    role = settings.args.get("role", parameters["role"].default) if "role" in parameters else ""
    role = "tool" if config.tools else role
    known = ENVIRONMENTS.get(settings.function)
    if role and known and known.begins and not settings.opening:
        raise ConfigError(
            f"environment.opening: {settings.function} begins, so its first words belong to the prompt: set it to "
            "true, or environment.args.role to '' where there is no chat template"
        )
    with said_as(ConfigError, "environment", ValueError):
        if settings.opening and config.data.chat_template == "none":
            raise ValueError("opening: data.chat_template=none has no messages; remove one of the two")
        replies = ReplyTokens(tokenizer, tool_schemas(config), config.data.chat_template_kwargs)
        for warning in replies.check(role or "user", settings.opening) if role or settings.opening else ():
            log.warning("environment: %s", warning)
