"""Errors that help: what an unknown name may have been meant to be, and what went wrong in the user's terms."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

MOST_LISTED = 100


@contextmanager
def said_as(kind: type[Exception], message: str, *caught: type[Exception]) -> Iterator[None]:
    """Within it, errors become ones of another kind that begin with a message.

    Args:
        caught: the kinds of errors that do.

    Example:
        >>> with said_as(ValueError, "config of model a/b", KeyError, OSError):
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
    """The known name that is most like `name`, if one is like it at all.

    Args:
        cutoff: how alike they have to be, from 0 to 1.
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], what: str = "there are", cutoff: float = 0.6) -> str:
    """A hint at the nearest name, or at all of them after `what`; at none where they are too many to read.

    Example:
        >>> did_you_mean("trian", ["train", "eval"]), did_you_mean("zzz", ["train", "eval"], "valid are")
        ("did you mean 'train'?", 'valid are train, eval')
    """
    known = list(known)
    near = nearest(name, known, cutoff)
    if near is None and len(known) > MOST_LISTED:
        return f"none of the {len(known)} known names is like it"
    return f"did you mean {near!r}?" if near else f"{what} {', '.join(known)}"
