"""Text from files and other programs, made safe to print: a terminal would execute control sequences in it."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

CONTROL = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|(?<!^)\r(?!\n)"
)
"""Control characters but newline and tab, marks that change the direction of text, and halves of surrogate pairs, which
cannot be written. A carriage return may begin a text, as in a progress bar, or end a line."""
CURSOR_UP = re.compile(r"(?:\x1b\[A)+")
"""What tqdm writes, alone, between the bars of several downloads."""


def printable(text: str) -> str:
    r"""Replace control characters by their escapes, as JSON writes them: JSON keeps its value.

    Example:
        >>> printable("a\x1b]0;title\x07\tb\n")
        'a\\u001b]0;title\\u0007\tb\n'
    """
    return CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class PrintableStream:
    """Text stream that writes `printable` text to another one.

    Attributes:
        terminal: the other stream, for a program that draws on the terminal and cleans its texts itself.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def terminal(self) -> TextIO:
        return self._stream

    def write(self, text: str) -> int:
        """Write a text, and return its length."""
        self._stream.write(text if CURSOR_UP.fullmatch(text) else printable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def printable_output() -> Iterator[None]:
    """Make all that is printed to stdout and stderr printable."""
    out, err = (cast(TextIO, PrintableStream(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield
