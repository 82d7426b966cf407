"""The environment `verl`: tools and interactions that are classes of verl's protocols, named in its YAML files."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import threading
from collections.abc import Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from atomrl.common.errors import ConfigError, reraise_as
from atomrl.common.functions import find_function
from atomrl.common.outages import ServiceFault
from atomrl.common.yaml_files import read_yaml
from atomrl.environments.tool_calls import Form, Schema, find_calls, find_form
from atomrl.environments.tools import Tool, answer_calls
from atomrl.types import Problem, Reply

Side = Literal["left", "middle", "right"]
Items = Sequence[Mapping[str, Any]]
FILES = {"tools": "tools", "interactions": "interaction"}
"""Argument of `verl` -> the list in its YAML file."""


def verl(
    problem: Problem,
    *,
    tools: str | Items = (),
    interactions: str | Items = (),
    max_parallel_calls: int = 1,
    max_tool_response_length: int = 256,
    tool_response_truncate_side: Side = "middle",
    timeout_s: float = 60.0,
    schemas: Sequence[Schema] = (),
    form: Form = "",
) -> Generator[Reply | list[Reply] | None, str, None]:
    """Play an episode as verl's `tool_agent` does. Tool calls are answered with messages of the role `tool`, turns
    without a call with the interaction's message of the role `user`; without an interaction they end the episode.

    The row's `extra_info.tools_kwargs.NAME.create_kwargs` is passed to the tool's `create`, and
    `extra_info.interaction_kwargs` to the interaction whose name it has. The outcome is None: as in verl, the rewards
    of tools and interactions are not part of the reward, which a reward function gives.

    Args:
        tools: path of a `tool_config_path` of verl, or its items.
        interactions: path of an `interaction_config_path` of verl, or its items.
        max_parallel_calls: calls of a turn that are made; further ones are ignored.
        max_tool_response_length: characters of a tool's text.
        tool_response_truncate_side: the side from which characters of a longer text are left out.
        timeout_s: time limit of a tool call.
        schemas: of the tools, as shown in the prompt (set before the run).
        form: call format of the model (set before the run).

    Raises:
        ServiceFault: a tool returns a video.
    """
    made = _made(json.dumps([items_of(tools, "tools"), items_of(interactions, "interaction")], default=str))
    data = AgentData(_messages(problem), _own(problem, "tools_kwargs"), _own(problem, "interaction_kwargs"))
    data.image_data = _pictures(problem)
    shorten = functools.partial(_shorten, most=max_tool_response_length, side=tool_response_truncate_side)
    by_name = {
        name: Tool(functools.partial(_call, made, tool, data, shorten), timeout_s) for name, tool in made.tools.items()
    }
    interaction = made.interactions[data.interaction_kwargs["name"]] if made.interactions else None
    if interaction is not None:
        made.run(interaction.start_interaction(data.request_id, **data.interaction_kwargs))
    try:
        text = yield None
        while True:
            data.assistant_turns += 1
            data.messages.append({"role": "assistant", "content": text})
            calls = [call for call in find_calls(text, form, schemas) if not call.problem] if schemas else []
            if calls:
                replies = answer_calls(calls[:max_parallel_calls], by_name)
            elif interaction is not None:
                heard = made.run(
                    interaction.generate_response(data.request_id, data.messages, **data.interaction_kwargs)
                )
                ended, said, score = heard[:3]
                if score is not None:
                    data.turn_scores.append(score)
                if ended:
                    return
                replies = [Reply(text=str(said), role="user", label="interaction")]
            else:
                return
            data.user_turns += 1
            data.messages += [{"role": reply.role, "content": reply.text} for reply in replies]
            text = yield replies
    finally:
        if interaction is not None:
            _finalize(made, interaction, data.request_id)


@dataclass
class AgentData:
    """The state of an episode, which tools get as `agent_data`."""

    messages: list[dict[str, Any]]
    tools_kwargs: dict[str, Any]
    interaction_kwargs: dict[str, Any]
    request_id: str = field(default_factory=lambda: uuid4().hex)
    image_data: list[Any] = field(default_factory=list)
    """Pictures of the prompt, opened with Pillow, and those of the tools."""
    tool_rewards: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    user_turns: int = 0
    assistant_turns: int = 0
    extra_fields: dict[str, Any] = field(default_factory=dict)


def items_of(given: str | Items, key: str) -> list[dict[str, Any]]:
    """Return the items of a YAML file of verl's, or items as they are.

    Args:
        key: the file's list, `tools` or `interaction`.

    Raises:
        ValueError: the file cannot be read, has no such list, or an item has no `class_name`, is not of the type
            `native`, or has a name twice.
    """
    if isinstance(given, str):
        with reraise_as(ValueError, given, ConfigError):
            items = read_yaml(Path(given).expanduser()).get(key)
        if not isinstance(items, list) or not items:
            raise ValueError(f"{given}: it has no list {key!r}")
    else:
        items = list(given)
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get("class_name"), str):
            raise ValueError(f"{key}: an item has no class_name: {item!r:.200}")
        kind = (item.get("config") or {}).get("type", "native")
        if key == "tools" and kind != "native":
            raise ValueError(
                f"{item['class_name']}: type {kind!r} is not supported; an MCP server is an item of the section tools "
                "(docs/guides/tool_calling.md)"
            )
    return items


def find_class(name: str) -> Any:
    """Import a class that a YAML file of verl's names.

    Raises:
        ValueError: it cannot be imported.
    """
    try:
        return find_function(name)
    except ValueError as error:
        if "No module named 'verl" not in str(error):
            raise
        how = "pip install verl, of the version that the file was written for"
        raise ValueError(f"{name!r} needs verl, which is not installed: {how}") from error


def schemas_of(items: Items) -> list[dict[str, Any]]:
    """Return the JSON schemas of tools, as verl shows them: from the file, or from the tool if the file has none.

    Raises:
        ValueError: a class cannot be imported or made, a schema is not valid, or two tools have the same name.
    """
    schemas = []
    for item in items:
        kind, schema = find_class(item["class_name"]), _schema(item)
        if schema is None:
            with reraise_as(ValueError, item["class_name"], Exception):  # the user's own code
                schema = kind(config=dict(item.get("config") or {}), tool_schema=None).tool_schema
        schemas.append(schema.model_dump(exclude_unset=True, exclude_none=True))
    names = [schema["function"]["name"] for schema in schemas]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two tools have the name {min(twice)!r}")
    return schemas


def check(tools: str | Items = (), interactions: str | Items = (), **_: object) -> None:
    """Check the `args` of `verl`: files and classes. No object is made of a class, unless its schema is needed.

    Raises:
        ValueError: a file or class cannot be used, or there is neither a tool nor an interaction.
    """
    items, talks = items_of(tools, "tools"), items_of(interactions, "interaction")
    if not items and not talks:
        raise ValueError("tools: give a tool_config_path or an interaction_config_path of verl")
    schemas_of(items)
    for item in talks:
        find_class(item["class_name"])
    names = [interaction_name(item) for item in talks]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two interactions have the name {min(twice)!r}")


def complete(args: Mapping[str, Any], tokenizer: Any, template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `args` of `verl` with the items of its files, the schemas of the tools, and the model's call format.

    Raises:
        ValueError: a file or class cannot be used, or the chat template does not support tools.
    """
    items = {name: items_of(args.get(name, ()), key) for name, key in FILES.items()}
    schemas = schemas_of(items["tools"])
    form = {"form": find_form(tokenizer, schemas, template_kwargs)} if schemas else {}
    return {**args, **items, "schemas": schemas, **form}


def roles(args: Mapping[str, Any]) -> list[str]:
    """Return the roles of the replies with these `args`."""
    return ["tool"] * bool(args.get("tools")) + ["user"] * bool(args.get("interactions"))


def check_row(problem: Problem, args: Mapping[str, Any]) -> None:
    """Check that an episode can begin with a row.

    Raises:
        ValueError: its `agent_name` is another agent's, it selects among the tools, or names no interaction.
    """
    agent = problem.columns.get("agent_name")
    if agent not in (None, "tool_agent"):
        raise ValueError(f"agent_name={agent!r}: only 'tool_agent' is played: remove such rows, or the column")
    if _own(problem, "tool_selection"):
        raise ValueError("extra_info.tool_selection: all tools are shown in each prompt: remove the field")
    if items := items_of(args.get("interactions", ()), "interaction"):
        names, name = [interaction_name(item) for item in items], _own(problem, "interaction_kwargs").get("name")
        if name not in names:
            raise ValueError(
                f"extra_info.interaction_kwargs.name={name!r} is none of the interactions: {', '.join(names)}"
            )


def interaction_name(item: Mapping[str, Any]) -> str:
    """Return the name by which rows select an interaction: the item's, else its class's without `Interaction`.

    Example:
        >>> interaction_name({"class_name": "my_talks.QuizInteraction"})
        'quiz'
    """
    if item.get("name") is not None:
        return str(item["name"])
    own = str(item["class_name"]).rpartition(".")[2]
    return (own.removesuffix("Interaction") or own).lower()


# --------------------------------------------------------------------------------------------------------------------
# Objects of the classes: one of each for all episodes of a process, on one event loop, as in verl's workers.


@dataclass(frozen=True)
class _Made:
    """Tools and interactions by name, and the event loop that their methods run on."""

    loop: asyncio.AbstractEventLoop
    tools: dict[str, Any] = field(default_factory=dict)
    interactions: dict[str, Any] = field(default_factory=dict)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()


_all: dict[str, _Made] = {}
_lock = threading.Lock()


def _made(items: str) -> _Made:
    """Return the objects of items of both files, which are made at the first call.

    Args:
        items: of the tools and of the interactions, as JSON.
    """
    with _lock:
        if items not in _all:
            made = _Made(asyncio.new_event_loop())
            threading.Thread(target=made.loop.run_forever, name="verl", daemon=True).start()
            made.run(_fill(made, *json.loads(items)))
            _all[items] = made
        return _all[items]


async def _fill(made: _Made, tools: Items, interactions: Items) -> None:
    for item in tools:
        tool = find_class(item["class_name"])(config=dict(item.get("config") or {}), tool_schema=_schema(item))
        made.tools[tool.name] = tool
    for item in interactions:
        name = interaction_name(item)
        config = {**(item.get("config") or {}), "name": name}
        made.interactions[name] = find_class(item["class_name"])(config=config)


async def _call(made: _Made, tool: Any, data: AgentData, shorten: Any, /, **parameters: Any) -> Reply:
    """Make a call on the tools' loop; a cancelled one is cancelled there too."""
    coroutine = _answer(tool, data, shorten, parameters)
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, made.loop))


async def _answer(tool: Any, data: AgentData, shorten: Any, parameters: Mapping[str, Any]) -> Reply:
    kwargs = (data.tools_kwargs.get(tool.name) or {}).get("create_kwargs") or {}
    created = await tool.create(create_kwargs=kwargs)
    instance = created[0] if isinstance(created, tuple) else created
    try:
        response, reward, *_ = await tool.execute(instance, dict(parameters), agent_data=data)
    finally:
        await tool.release(instance)
    if reward is not None:
        data.tool_rewards.append(reward)
    if getattr(response, "video", None):
        raise ServiceFault(f"the tool {tool.name} returned a video, and only text and pictures can be replies")
    images = [image for image in getattr(response, "image", None) or () if image is not None]
    data.image_data += images
    text = response if isinstance(response, str) else response.text
    return Reply(text=shorten(text or ""), role="tool", label=tool.name, images=images)


def _finalize(made: _Made, interaction: Any, request_id: str) -> None:
    """End an interaction if its method takes the episode's id; that of verl's base class does not, and does nothing."""
    method = getattr(interaction, "finalize_interaction", None)
    signature = inspect.signature(method)  # type: ignore[arg-type]
    try:
        signature.bind(request_id)
    except TypeError:
        return
    made.run(method(request_id))  # type: ignore[misc]


def _shorten(text: str, most: int, side: Side) -> str:
    """Leave out characters of a text over a limit, with verl's mark in their place.

    Example:
        >>> _shorten("abcdef", 4, "middle"), _shorten("abcdef", 4, "left"), _shorten("abcd", 4, "left")
        ('ab...(truncated)...ef', '(truncated)...cdef', 'abcd')
    """
    if len(text) <= most:
        return text
    if side == "left":
        return f"(truncated)...{text[len(text) - most :]}"
    if side == "right":
        return f"{text[:most]}...(truncated)"
    half = most // 2
    return f"{text[:half]}...(truncated)...{text[len(text) - half :]}"


# --------------------------------------------------------------------------------------------------------------------
# Schemas: objects of verl's class where it is installed, since tools may read any of its members.


class _Function(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class ToolSchema(BaseModel):
    """A tool's schema with the members of verl's `OpenAIFunctionToolSchema` that its tools read: `function.name`,
    `model_dump`."""

    type: str
    function: _Function


def _schema(item: Mapping[str, Any]) -> Any:
    """Return the schema of an item; None if it has none."""
    if (given := item.get("tool_schema")) is None:
        return None
    kind: Any = ToolSchema
    if find_spec("verl") is not None:
        kind = find_class("verl.tools.schemas.OpenAIFunctionToolSchema")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, ("tool_schema", *first["loc"])))
        raise ValueError(f"{item['class_name']}: {place}: {first['msg']}") from error


# --------------------------------------------------------------------------------------------------------------------
# Rows.


def _own(problem: Problem, name: str) -> dict[str, Any]:
    """Return a field of the row's `extra_info`; empty if it has none."""
    extra = problem.columns.get("extra_info")
    return (extra.get(name) if isinstance(extra, Mapping) else None) or {}


def _messages(problem: Problem) -> list[dict[str, Any]]:
    if isinstance(problem.prompt, str):
        return [{"role": "user", "content": problem.prompt}]
    return [dict(message) for message in problem.prompt]


def _pictures(problem: Problem) -> list[Any]:
    if not problem.images:
        return []
    from PIL import Image

    return [Image.open(image.path) for image in problem.images]
