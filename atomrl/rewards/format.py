"""The form of a completion: `<think>reasoning</think><answer>answer</answer>`, and where its answer is."""

import re

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def split_strict(text: str) -> tuple[str, str] | None:
    """(reasoning, answer) of a completion in exactly the strict form, else None.

    The form: one think block, then one answer block, nothing outside them but white space, each of the four tags
    exactly once, and neither block blank (an empty think block is the cheapest way around reasoning). Tags are
    matched by case, without attributes or inner spaces. Both parts come back stripped.

    Example:
        >>> split_strict("<think>2+2 is 4</think> <answer>4</answer>")
        ('2+2 is 4', '4')
        >>> split_strict("So: <think>2+2 is 4</think><answer>4</answer>") is None
        True
    """
    text = text.strip()
    if not (text.startswith("<think>") and text.endswith("</answer>")) or any(text.count(tag) != 1 for tag in TAGS):
        return None
    reasoning, _, rest = text.removeprefix("<think>").partition("</think>")
    between, opened, answer = rest.removesuffix("</answer>").partition("<answer>")
    if not opened or between.strip() or not reasoning.strip() or not answer.strip():
        return None
    return reasoning.strip(), answer.strip()


def has_strict_format(text: str) -> bool:
    """Whether a completion has exactly the form of `split_strict`."""
    return split_strict(text) is not None


def reasoning_text(text: str) -> str:
    """What stands in the think block, stripped; a block that was not closed runs to the end; "" without one.

    Example:
        >>> reasoning_text("<think> 2+2 is 4 </think><answer>4</answer>")
        '2+2 is 4'
    """
    return text.partition("<think>")[2].partition("</think>")[0].strip()


def extract_answer(text: str) -> str:
    r"""The answer of a completion in any of the usual forms.

    In this order: the last `<answer>...</answer>`, the rest of the line after the last `####`, the last complete
    `\boxed{...}`, the whole text; stripped.

    Example:
        >>> extract_answer("so 9 + 9 = 18\n#### 18")
        '18'
        >>> extract_answer(r"thus \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    marked = marked_answer(text)
    return text.strip() if marked is None else marked


def marked_answer(text: str) -> str | None:
    """The answer that a completion marks as such, in the order of `extract_answer`, or None.

    Example:
        >>> marked_answer("#### 18"), marked_answer("18")
        ('18', None)
    """
    tagged = tagged_answer(text)
    if tagged is not None:
        return tagged
    _, marked, tail = text.rpartition("####")
    if marked:
        return tail.strip().split("\n", 1)[0].strip()
    boxed = last_boxed(text)
    return None if boxed is None else boxed.strip()


def tagged_answer(text: str) -> str | None:
    """What stands in the last complete `<answer>` block, stripped, or None.

    Example:
        >>> tagged_answer("<answer>17</answer> no: <answer>18</answer>")
        '18'
    """
    head, closed, _ = text.rpartition("</answer>")
    _, opened, answer = head.rpartition("<answer>")
    return answer.strip() if closed and opened else None


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` whose braces close, or None."""
    last: tuple[int, int] | None = None
    opened: list[int | None] = []  # one entry per open brace: where a box begins, None for any other
    for match in re.finditer(r"\\boxed\s*\{|[{}]", text):
        if match[0] != "}":
            opened.append(match.end() if len(match[0]) > 1 else None)
        elif opened and (start := opened.pop()) is not None:
            last = max(last or (0, 0), (start, match.start()))
    return None if last is None else text[slice(*last)]
