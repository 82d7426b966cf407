"""An episode from the environment's side: how each kind of environment is found, made and played."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, get_type_hints

from atomrl.environments.table import ENVIRONMENTS
from atomrl.episodes import Reply
from atomrl.functions import find_function
from atomrl.hints import did_you_mean, said_as
from atomrl.secrets import left_out
from atomrl.types import Sample

Said = Reply | str | Sequence[Reply] | None
"""What an environment says at once. Several replies are messages of the tool role, as many as calls were made."""
Say = Callable[[Said], str]
"""Says something to the model and waits for what it writes; None is nothing, before its first turn. It raises `Cut`
where there is no room for the answer, and `Closed` where nobody waits for it."""


class EpisodeError(ValueError):
    """An environment cannot be used at all: it is unknown, or does not take what it would be given."""


class Misplayed(ValueError):
    """An environment said or returned what it cannot."""


class Cut(Exception):
    """There is no further turn: the limit on turns or on tokens is reached. An environment may catch it to return an
    outcome; otherwise it is 0."""


class Closed(BaseException):
    """The episode is given up."""


def find_environment(name: str, args: Mapping[str, Any]) -> Callable[..., Any]:
    """A built-in environment, or a user's own by its path, its signature checked.

    Args:
        name: of the table, `my_module.f`, or `./my_file.py:f`.
        args: what it is called with beside the sample (and `seed`, where it takes one).

    Raises:
        EpisodeError: there is none, it does not take its `args`, or it cannot be played on this machine.

    Example:
        >>> find_environment("search_r1", {"topk": 3}).__name__
        'search_r1'
    """
    known = ENVIRONMENTS.get(name)
    if "." not in name and ":" not in name and known is None:
        hint = did_you_mean(name, ENVIRONMENTS, "built in are")
        raise EpisodeError(f"function: unknown environment {name!r}; {hint} (your own is ./my_file.py:f)")
    if known and known.package and find_spec(name) is None:
        raise EpisodeError(f"function: {name} is not installed: pip install {known.package}")
    try:
        function = find_function(known.path if known else name)
    except ValueError as error:
        raise EpisodeError(f"function: {error}") from error
    if not _is_coroutine(function) and not inspect.isgeneratorfunction(function) and not _is_class(function):
        raise EpisodeError(
            f"function: {name!r} is no environment: a generator function f(sample, ...) that yields "
            "replies, an async function f(sample, say, ...), or a class with reset(sample) and step(text)"
        )
    positional = [] if _is_class(function) else [None] * (2 if _is_coroutine(function) else 1)
    signature = inspect.signature(function)
    try:
        signature.bind(*positional, **args, **_seed(signature.parameters, args, 0))
    except TypeError as error:
        raise EpisodeError(f"args: {name!r} takes {signature}: {error}") from error
    if known:
        _check_types(function, args)
    if known and known.check:
        with said_as(EpisodeError, f"function: {name!r}", RuntimeError), said_as(EpisodeError, "args", ValueError):
            find_function(known.check)(**args)
    return function


def _check_types(function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """That `args` are what the type hints say.

    Raises:
        EpisodeError: one is not.
    """
    from pydantic import TypeAdapter, ValidationError

    hints = get_type_hints(function)
    for name, value in args.items():
        try:
            TypeAdapter(hints.get(name, Any)).validate_python(value, strict=True)
        except ValidationError as error:
            raise EpisodeError(
                f"args.{name}: {error.errors(include_url=False)[0]['msg']}, not {left_out(value, name)!r}"
            ) from error


def _is_class(function: Callable[..., Any]) -> bool:
    return inspect.isclass(function) and all(callable(getattr(function, part, None)) for part in ("reset", "step"))


def _is_coroutine(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function)


def _seed(parameters: Mapping[str, Any], args: Mapping[str, Any], seed: int) -> dict[str, int]:
    return {"seed": seed} if "seed" in parameters and "seed" not in args else {}


def play(function: Callable[..., Any], sample: Sample, args: Mapping[str, Any], seed: int, say: Say) -> float | None:
    """Play an episode to its end; its outcome.

    Raises:
        Closed: it was given up.
        Misplayed: its outcome is no finite number.
        Exception: whatever the environment raises.
    """
    given = dict(args) | _seed(inspect.signature(function).parameters, args, seed)
    try:
        if _is_class(function):
            outcome = _step(function(**given), sample, say)
        elif _is_coroutine(function):
            outcome = asyncio.run(function(sample, _waiting(say), **given))
        else:
            outcome = _drive(function(sample, **given), say)
    except Cut:
        return 0.0
    if outcome is None:
        return None
    if (number := _number(outcome)) is None:
        raise Misplayed(f"it returned {outcome!r:.100}; an environment returns a finite number, or None")
    return number


def _drive(episode: Generator[Any, str, Any], say: Say) -> Any:
    """A generator: it yields what is said, and is sent what the model wrote."""
    try:
        said = next(episode)
        while True:
            try:
                text = say(said)
            except Cut as cut:
                episode.throw(cut)
                raise  # it went on as if nothing had happened
            said = episode.send(text)
    except StopIteration as end:
        return end.value
    finally:
        episode.close()


def _step(environment: Any, sample: Sample, say: Say) -> Any:
    """A class: `step` returns a reply, or the outcome."""
    try:
        text = say(environment.reset(sample))
        while isinstance(said := environment.step(text), Reply | str | list):
            text = say(said)
        return said
    finally:
        if callable(close := getattr(environment, "close", None)):
            close()


def _waiting(say: Say) -> Callable[..., Any]:
    async def wait(said: Said = None) -> str:
        return await asyncio.to_thread(say, said)

    return wait


def as_replies(said: Any) -> list[Reply]:
    """What an environment said; nothing where it said None.

    Raises:
        Misplayed: it is no reply, no text, no list of replies of the tool role and not None, or a reward is no finite
            number.
    """
    if said is None:
        return []
    replies = said if isinstance(said, list | tuple) and said else [said]
    found = [Reply(text=reply) if isinstance(reply, str) else reply for reply in replies]
    for reply in found:
        if not isinstance(reply, Reply):
            raise Misplayed(f"it said {said!r:.100}; an environment says a Reply, text, or (at first) None")
        if not isinstance(reply.text, str) or reply.role not in ("", "tool", "user"):
            raise Misplayed(f"a Reply has a text and the role '', 'tool' or 'user', not {reply!r:.200}")
        if not isinstance(reply.label, str):
            raise Misplayed(f"the label of a Reply is a text, not {reply.label!r:.100}")
        if len(found) > 1 and reply.role != "tool":
            raise Misplayed(f"several replies at once have the role 'tool', not {reply.role!r}")
        if reply.reward is not None and _number(reply.reward) is None:
            raise Misplayed(f"the reward of a Reply is a finite number, not {reply.reward!r}")
    return [
        replace(
            reply,
            text=plain(reply.text),
            label=plain(reply.label),
            reward=_number(reply.reward),
        )
        for reply in found
    ]


def _number(value: Any) -> float | None:
    """As a float; None where it is no finite number."""
    try:
        number = math.nan if value is None or isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def described(error: BaseException) -> str:
    """An exception in words, also of one that has none: `str` of it is its author's."""
    try:
        text = str(error)
    except Exception as another:
        text = f"(its words raise {type(another).__name__})"
    return plain(f"{type(error).__name__}: {text[:300]}")


def plain(text: str) -> str:
    """With halves of characters replaced, which no tokenizer and no file takes; two that belong together are one.

    Example:
        >>> plain("a\\ud800b") == "a\\ufffdb", plain("\\ud83d\\ude42") == "\\U0001f642"
        (True, True)
    """
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
