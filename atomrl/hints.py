"""What an unknown name may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is most like `name`, if one is like it at all.

    Args:
        cutoff: how alike they have to be, from 0 to 1.
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], what: str = "there are", cutoff: float = 0.6) -> str:
    """A hint at the nearest name, or at all of them after `what`.

    Example:
        >>> did_you_mean("trian", ["train", "eval"]), did_you_mean("zzz", ["train", "eval"], "valid are")
        ("did you mean 'train'?", 'valid are train, eval')
    """
    known = list(known)
    near = nearest(name, known, cutoff)
    return f"did you mean {near!r}?" if near else f"{what} {', '.join(known)}"
