"""Checks of the environment and its tools."""

import inspect
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Any

from atomrl.common.errors import nearest, reraise_as
from atomrl.common.functions import find_function, subscripts
from atomrl.config import ConfigError, EnvironmentConfig, RunConfig
from atomrl.engines.episodes import ReplyTokens
from atomrl.environments.builtin import ENVIRONMENTS, BuiltIn, python
from atomrl.environments.tool_calls import find_form
from atomrl.environments.tools import check_rows, find_schemas, gives_reward, has_objects
from atomrl.environments.worker import EpisodeError, find_environment
from atomrl.sandbox.running import limits_of
from atomrl.trainer.build import tool_schemas
from atomrl.types import Problem

log = logging.getLogger(__name__)


def with_tools(config: RunConfig, tokenizer: Any) -> RunConfig:
    """Complete the arguments of an environment with tools: the tools' schemas, and the model's format of tool calls.

    Connects to MCP servers to read the schemas, and disconnects again.

    Raises:
        ConfigError: no tools are given, a tool cannot be used, an MCP server does not answer, or the chat template does
            not support tools.
    """
    if not config.tools:
        if config.environment is not None and config.environment.function == "tools":
            raise ConfigError("environment.function=tools: no tools; add the section tools")
        return _completed(config, config.environment, tokenizer)
    assert config.environment is not None, "a config with tools has the environment `tools`"
    if config.data.chat_template == "none":
        raise ConfigError("tools: cannot be added to prompts with data.chat_template=none")
    if any(tool.mcp for tool in config.tools) and find_spec("mcp") is None:
        raise ConfigError("tools: mcp is not installed: pip install 'atomrl[mcp]'")
    over = [tool for tool in config.tools if tool.function and tool.timeout_s >= config.environment.timeout_s]
    if over:
        log.warning(
            "tools: %s: timeout_s=%g is not below environment.timeout_s=%g, which ends the whole episode first",
            over[0].function, over[0].timeout_s, config.environment.timeout_s,
        )  # fmt: skip
    tools = [tool.model_dump(mode="json") for tool in config.tools]
    with reraise_as(ConfigError, "tools", ValueError, OSError):
        schemas = find_schemas(tools)
        form = find_form(tokenizer, schemas, config.data.chat_template_kwargs)
    changes = {"args": {"tools": tools, "schemas": schemas, "form": form}, "opening": has_objects(tools)}
    return config.model_copy(update={"environment": config.environment.model_copy(update=changes)})


def _completed(config: RunConfig, environment: EnvironmentConfig | None, tokenizer: Any) -> RunConfig:
    if environment is None or not (complete := _built_in(environment).complete):
        return config
    if config.data.chat_template == "none":
        raise ConfigError(
            f"environment.function={environment.function}: replies are messages, but data.chat_template is none"
        )
    with reraise_as(ConfigError, "environment.args", ValueError):
        args = find_function(complete)(environment.args, tokenizer, config.data.chat_template_kwargs)
    return config.model_copy(update={"environment": environment.model_copy(update={"args": args})})


def _built_in(environment: EnvironmentConfig) -> BuiltIn:
    """Return the description of an environment; that of a user's own has its path alone."""
    return ENVIRONMENTS.get(environment.function, BuiltIn(environment.function))


def check_environment(config: RunConfig, tokenizer: Any) -> None:
    """Check that the environment can be called, and that the chat template supports its replies.

    The role of the replies is the environment's argument `role`. An environment without it is not checked for that.

    Raises:
        ConfigError: it cannot be called, or the template does not support the role.
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
                "environment.args.timeout_s: a program may need twice this in wall-clock time, %g s, which is not "
                "below environment.timeout_s=%g, which ends the whole episode first", wall_s, settings.timeout_s,
            )  # fmt: skip
    role = settings.args.get("role", parameters["role"].default) if "role" in parameters else ""
    roles = ["tool"] if config.tools else [role] if role else []
    builtin = _built_in(settings)
    if builtin.roles:
        roles = find_function(builtin.roles)(settings.args)
    if role and builtin.begins and not settings.opening:
        raise ConfigError(
            f"environment.opening: {settings.function} sends the first message, which belongs to the prompt: set it to "
            "true, or without a chat template environment.args.role to ''"
        )
    with reraise_as(ConfigError, "environment", ValueError):
        if settings.opening and config.data.chat_template == "none":
            raise ValueError("opening: needs messages, but data.chat_template is none; remove one of the two")
        replies = ReplyTokens(tokenizer, tool_schemas(config), config.data.chat_template_kwargs)
        for one in roles or ["user"] * settings.opening:
            for warning in replies.check(one, settings.opening):
                log.warning("environment: %s", warning)


def check_outcome(config: RunConfig) -> None:
    """Check that the environment gives a reward if the config has no other.

    Raises:
        ConfigError: it gives none.
    """
    settings = config.environment
    if settings is None or [item.function for item in config.reward.functions] != ["environment"]:
        return
    if config.tools and not gives_reward(settings.args["tools"]):
        raise ConfigError(
            "reward.functions: tools only give a reward if they are a class with get_reward; set a reward"
        )
    if scorer := _built_in(settings).scored_by:
        raise ConfigError(
            f"reward.functions: {settings.function} does not score the answer; set a reward (e.g. {scorer})"
        )


def check_columns(config: RunConfig, *splits: Sequence[Problem]) -> None:
    """Check that the data have the columns that the environment reads.

    Those are `problem.columns["name"]` in the source of a user's own environment, and the parameters of `reset` of
    tools that are classes.

    Raises:
        ConfigError: a column is missing.
    """
    if (settings := config.environment) is None:
        return
    function = find_environment(settings.function, settings.args)
    parameter = next(iter(inspect.signature(function).parameters), "")
    if inspect.isclass(function):
        function = function.reset  # type: ignore[attr-defined]
        parameter = [*inspect.signature(function).parameters, "", ""][1]  # after self
    reads = subscripts(function, f"{parameter}.columns")
    places: dict[tuple[str, ...], str] = {}
    check_row = find_function(path) if (path := _built_in(settings).check_row) else None
    for problem in chain(*splits):
        places.setdefault(tuple(problem.columns), problem.problem_id)
        if check_row is not None:
            with reraise_as(ConfigError, problem.problem_id, ValueError):
                check_row(problem, settings.args)
    for columns, place in places.items():
        if config.tools:
            with reraise_as(ConfigError, f"tools: {place}", ValueError):
                check_rows(settings.args["tools"], columns)
        if missing := [name for name in reads if name not in columns]:
            near = nearest(missing[0], columns)
            raise ConfigError(
                f"environment.function={settings.function}: it reads {parameter}.columns[{missing[0]!r}]; {place} has "
                f"the columns {', '.join(map(repr, columns)) or 'none'}: "
                + (f"did you mean {near!r}?" if near else "use a name in the data, or add the column")
            )
