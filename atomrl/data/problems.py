"""The error of this package, and how long lists of problems are shown."""

from collections.abc import Sequence

SHOWN = 20


class DataError(ValueError):
    """A mistake in the data or in how it is named; the message says where and what to do."""


class DataNotHere(DataError):
    """A data file, or a data set of the hub that cannot be downloaded, is not on this machine."""


def problem_list(problems: Sequence[str], shown: int = SHOWN) -> str:
    """The first problems, one an indented line, and how many more there are.

    Example:
        >>> print(problem_list(["a.jsonl:1: empty prompt", "a.jsonl:7: empty prompt"], shown=1))
          a.jsonl:1: empty prompt
          ... and 1 more
    """
    lines = [f"  {problem}" for problem in problems[:shown]]
    if len(problems) > shown:
        lines.append(f"  ... and {len(problems) - shown} more")
    return "\n".join(lines)
