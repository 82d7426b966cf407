"""Error messages with suggestions."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from atomrl.common.redaction import without_secrets

MAX_LISTED = 100


class ConfigError(ValueError):
    """An invalid config. The message names the key, what is wrong and what to do."""


@contextmanager
def reraise_as(kind: type[Exception], message: str, *caught: type[Exception]) -> Iterator[None]:
    """Re-raise errors of the block as another type, with a message in front.

    Args:
        kind: type of the raised error.
        message: beginning of its message.
        caught: types of the errors that are re-raised.

    Example:
        >>> with reraise_as(ValueError, "config of model a/b", KeyError, OSError):
        ...     raise OSError("no such file")
        Traceback (most recent call last):
        ...
        ValueError: config of model a/b: no such file
    """
    try:
        yield
    except caught as error:
        raise kind(f"{message}: {error}") from error


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to `name`; None if none is similar.

    Args:
        cutoff: minimum similarity, from 0 to 1.
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], what: str = "valid:", cutoff: float = 0.6) -> str:
    """Suggest the nearest known name; if none is similar, list all of them after `what`, unless there are too many.

    Example:
        >>> did_you_mean("trian", ["train", "eval"]), did_you_mean("zzz", ["train", "eval"], "valid:")
        ("did you mean 'train'?", 'valid: train, eval')
    """
    known = list(known)
    near = nearest(name, known, cutoff)
    if near is None and len(known) > MAX_LISTED:
        return f"none of the {len(known)} valid names is similar"
    return f"did you mean {near!r}?" if near else f"{what} {', '.join(known)}"


def describe_error(error: BaseException, place: bool = False) -> str:
    """Format the type and message of an exception, even if its `__str__` raises, with known secrets redacted.

    Args:
        place: append the file and line that raised it.

    Example:
        >>> describe_error(ValueError("no number"))
        'ValueError: no number'
    """
    try:
        text = str(error)
    except Exception as another:
        text = f"(its __str__ raises {type(another).__name__})"
    frames = traceback.extract_tb(error.__traceback__) if place else []
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return replace_surrogates(f"{type(error).__name__}: {without_secrets(text)[:300]}{where}")


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which neither tokenizers nor files accept, and join pairs of them to one character.

    Example:
        >>> replace_surrogates("a\\ud800b") == "a\\ufffdb", replace_surrogates("\\ud83d\\ude42") == "\\U0001f642"
        (True, True)
    """
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
