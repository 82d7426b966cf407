"""Extract the answer from a completion: an `<answer>` block, a line after `####`, a box."""

from __future__ import annotations

import re
from collections.abc import Iterator

_MARK = re.compile(r"(?<!#)####(?!#)")
_TITLE = re.compile(r"^[*_ ]*(?:final )?answer[*_: ]*(?=\n)", re.IGNORECASE)
_HEADING = re.compile(
    r"[*_\s]*(?:[0-9]{1,2}[.):]\s+[*_]*[^\W\d]|(?:step|part|case|method|approach|problem|question|phase|section|example|"
    r"(?:final\s+)?(?:answer|solution|conclusion|explanation|verification|check|summary|calculation)s?)\b)",
    re.IGNORECASE,
)
_BRACES = r"\{(?:[^{}]|\{[^{}]{0,100}\}){0,100}\}"
_BOX = re.compile(
    r"\\\\|\\[{}]|\\(?:boxed|fbox|framebox)\s*(?:\{|(?P<bare>[-+−]?(?:\\[dtc]?frac\s*[0-9]{2}|[0-9][0-9.,/]*|"
    rf"\\[A-Za-z]+(?:\s?{_BRACES}){{0,2}}|[A-Za-z](?![A-Za-z]))))|[{{}}]"
)


def extract_answer(text: str) -> str:
    r"""Extract the answer of a completion in any of the usual formats, stripped.

    In this order: the last `<answer>...</answer>`; a complete box after the last `####`, or the rest of its line unless
    it is a heading; the last complete box (`last_boxed`); the whole text.

    Example:
        >>> extract_answer("so 9 + 9 = 18\n#### 18")
        '18'
        >>> extract_answer(r"thus \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    marked = marked_answer(text)
    return text.strip() if marked is None else marked


def marked_answer(text: str) -> str | None:
    """Return the answer that a completion marks as such, in the order of `extract_answer`, or None.

    Example:
        >>> marked_answer("#### 18"), marked_answer("18")
        ('18', None)
    """
    tagged = tagged_answer(text)
    if tagged is not None:
        return tagged
    boxed = last_boxed(text[text.rfind("####") + 1 :])  # without a mark this is the whole text
    if boxed is None:
        line = next((line for line, more in marked_lines(text) if not (more and is_heading(line))), None)
        if line is not None:
            return line
        boxed = last_boxed(text)
    return None if boxed is None else boxed.strip()


def marked_lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield (rest of the line after a `####`, True if more lines of text follow), from the last mark to the first.

    If the line has only `Answer:` after the mark, the next line with text is used.

    Example:
        >>> list(marked_lines("#### 1. Add" + chr(10) + "2+3=5" + chr(10) + "#### 5"))
        [('5', False), ('1. Add', True)]
    """
    more = False
    for part in reversed(_MARK.split(text)[1:]):
        line, _, rest = _TITLE.sub("", part.strip()).strip().partition("\n")
        more = more or bool(rest.strip())
        yield line.strip(), more
        more = True


def is_heading(line: str) -> bool:
    """Return True for a line such as `Step 2: add` or `2. Add`, which is a Markdown heading and not an answer.

    Example:
        >>> is_heading("Step 2: add"), is_heading("2. Add"), is_heading("18 dollars")
        (True, True, False)
    """
    return _HEADING.match(line) is not None


def tagged_answer(text: str) -> str | None:
    """Return the text of the last complete `<answer>` block, stripped, or None.

    Example:
        >>> tagged_answer("<answer>17</answer> no: <answer>18</answer>")
        '18'
    """
    head, closed, _ = text.rpartition("</answer>")
    _, opened, answer = head.rpartition("<answer>")
    return answer.strip() if closed and opened else None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` or `\fbox{...}`, or of a box without braces, or None.

    Example:
        >>> last_boxed(r"\boxed{1}, no: \boxed{\left\{1, 2\right.}"), last_boxed(r"so $\boxed 42$.")
        ('\\left\\{1, 2\\right.', '42')
    """
    last: tuple[int, int] | None = None
    opened: list[int | None] = []  # one entry per open brace: where a box begins, None for any other
    for match in _BOX.finditer(text):
        span: tuple[int, int] | None = None
        if match["bare"] is not None:
            span = match.start("bare"), match.start("bare") + len(match["bare"].rstrip(".,"))
        elif match[0] == "{" or (match[0].endswith("{") and len(match[0]) > 2):
            opened.append(match.end() if len(match[0]) > 1 else None)
        elif match[0] == "}" and opened and (start := opened.pop()) is not None:
            span = start, match.start()
        last = last if span is None else max(last or (0, 0), span)
    return None if last is None else text[slice(*last)]
