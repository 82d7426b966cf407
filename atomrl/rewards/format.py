"""Extract the answer from a completion, and rewards for its format, length and repetition.

The strict format is `<think>reasoning</think><answer>answer</answer>`. Rewards that compare the answer with a ground
truth are in `answers` and `verifiable`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from atomrl.rewards.errors import NoScore
from atomrl.types import Trajectory

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def split_strict(text: str) -> tuple[str, str] | None:
    """Return (reasoning, answer), both stripped, of a completion in exactly the strict format, else None.

    The format is one think block, then one answer block, and only white space outside of them. Each of the four tags
    occurs exactly once, case-sensitive, without attributes or inner spaces. Neither block may be blank: an empty think
    block is the cheapest way to skip the reasoning.

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
    """Return True if a completion has exactly the format of `split_strict`."""
    return split_strict(text) is not None


def strict_format(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """Return 1.0 for the format that `strict_math` requires, with any answer, else 0.0.

    Example:
        >>> strict_format([""] * 2, ["<think>9+9</think><answer>19</answer>", "<answer>18</answer>"])
        [1.0, 0.0]
    """
    return [float(has_strict_format(completion)) for completion in completions]


def reasoning_text(text: str) -> str:
    """Return the text of the think block, stripped. An unclosed block extends to the end; "" if there is none.

    Example:
        >>> reasoning_text("<think> 2+2 is 4 </think><answer>4</answer>")
        '2+2 is 4'
    """
    return text.partition("<think>")[2].partition("</think>")[0].strip()


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


_MARK = re.compile(r"(?<!#)####(?!#)")
_TITLE = re.compile(r"^[*_ ]*(?:final )?answer[*_: ]*(?=\n)", re.IGNORECASE)
_HEADING = re.compile(
    r"[*_\s]*(?:[0-9]{1,2}[.):]\s+[*_]*[^\W\d]|(?:step|part|case|method|approach|problem|question|phase|section|example|"
    r"(?:final\s+)?(?:answer|solution|conclusion|explanation|verification|check|summary|calculation)s?)\b)",
    re.IGNORECASE,
)


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


_BRACES = r"\{(?:[^{}]|\{[^{}]{0,100}\}){0,100}\}"
_BOX = re.compile(
    r"\\\\|\\[{}]|\\(?:boxed|fbox|framebox)\s*(?:\{|(?P<bare>[-+−]?(?:\\[dtc]?frac\s*[0-9]{2}|[0-9][0-9.,/]*|"
    rf"\\[A-Za-z]+(?:\s?{_BRACES}){{0,2}}|[A-Za-z](?![A-Za-z]))))|[{{}}]"
)


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


# --------------------------------------------------------------------------------------------------------------------
# Penalties: rewards that are never positive.


def length_penalty(
    prompts: list[Any],
    completions: list[str],
    completion_tokens: list[int],
    free_tokens: int = 512,
    max_tokens: int = 1024,
    **columns: Any,
) -> list[float]:
    """Penalize length: 0 up to `free_tokens`, then linearly down to -1 at `max_tokens` and beyond.

        r = -min(1, max(0, (tokens - free_tokens) / (max_tokens - free_tokens)))

    Args:
        completion_tokens: number of tokens of each completion; passed to every reward.
        free_tokens: length up to which there is no penalty.
        max_tokens: length from which the penalty is -1.

    Raises:
        ValueError: `max_tokens` is not above `free_tokens`.

    Example:
        >>> length_penalty([""] * 3, [""] * 3, [100, 150, 900], free_tokens=100, max_tokens=200)
        [0.0, -0.5, -1.0]
    """
    if not 0 <= free_tokens < max_tokens:
        raise ValueError(f"length_penalty needs 0 <= free_tokens < max_tokens, not {free_tokens} and {max_tokens}")
    span = max_tokens - free_tokens
    return [0.0 - min(1.0, max(0, tokens - free_tokens) / span) for tokens in completion_tokens]


def missing_eos_penalty(
    prompts: list[Any], completions: list[str], completion_ids: list[list[int]], eos_token_id: int, **columns: Any
) -> list[float]:
    """Return -1 for a completion without the end-of-sequence token, else 0.

    Args:
        completion_ids: tokens of each completion; passed to rewards that ask for them.
        eos_token_id: the end-of-sequence token.

    Example:
        >>> missing_eos_penalty([""] * 2, ["a", "b"], [[5, 2], [5, 6]], eos_token_id=2)
        [0.0, -1.0]
    """
    return [0.0 if eos_token_id in ids else -1.0 for ids in completion_ids]


def repetition_penalty(
    prompts: list[Any], completions: list[str], ngram_size: int = 3, max_penalty: float = -1.0, **columns: Any
) -> list[float]:
    """Penalize repetition: the share of repeated n-grams, times `max_penalty`; 0 for fewer than `ngram_size` words.

        r = max_penalty * (1 - distinct n-grams / n-grams)

    Paper: arXiv:2502.03373, appendix C.2. Words are lower-cased and split at white space, as in open-r1. A text
    without spaces (Chinese, Japanese) is one word and is never penalized.

    Raises:
        ValueError: `ngram_size` is below 1 or `max_penalty` above 0.

    Example:
        >>> repetition_penalty([""] * 2, ["no no no no no", "each word once"])
        [-0.6666666666666666, 0.0]
    """
    if ngram_size < 1 or max_penalty > 0:
        raise ValueError(f"repetition_penalty needs {ngram_size=} >= 1 and {max_penalty=} <= 0")
    scores = []
    for completion in completions:
        words = completion.lower().split()
        total = len(words) - ngram_size + 1
        distinct = len(set(zip(*(words[start:] for start in range(ngram_size)), strict=False)))
        scores.append(max_penalty * (total - distinct) / total + 0.0 if total > 0 else 0.0)  # and no -0.0
    return scores


# --------------------------------------------------------------------------------------------------------------------
# The rewards for format of the well-known GRPO tutorials on GSM8K, with their `<think>` and `<answer>` blocks. Their
# fourth reward is `answers.correctness_reward`.
#
# They differ from the tutorials in two points, where those give 0 to correct completions: the reasoning may have
# several lines, and the text may end with `</answer>`.

_MARKS = ("<think>\n", "</think>\n", "<answer>\n", "</answer>\n")


def digit_reward(prompts: list[Any], completions: list[str], *unused: Any, **columns: Any) -> list[float]:
    """Return 0.5 if the last `<answer>` block is digits only (no sign, point or comma), else 0.0.

    Example:
        >>> digit_reward([""] * 2, ["<answer>18</answer>", "<answer>$18</answer>"])
        [0.5, 0.0]
    """
    texts = [tagged_answer(completion) or "" for completion in completions]
    return [0.5 * (text.isascii() and text.isdigit()) for text in texts]


def hard_format_reward(prompts: list[Any], completions: list[str], *unused: Any, **columns: Any) -> list[float]:
    r"""Return 0.5 for exactly `<think>\n...\n</think>\n<answer>\n...\n</answer>`, else 0.0.

    Each tag occurs once. A newline at the end is optional.

    Example:
        >>> hard_format_reward([""] * 2, ["<think>\n9+9\n</think>\n<answer>\n18\n</answer>", "<answer>18</answer>"])
        [0.5, 0.0]
    """
    return [0.5 * _has_form(completion.removesuffix("\n")) for completion in completions]


def _has_form(text: str) -> bool:
    _, opened, answer = text.removeprefix("<think>\n").partition("\n</think>\n<answer>\n")
    outer = text.startswith("<think>\n") and answer.endswith("\n</answer>")
    return bool(opened) and outer and all(text.count(tag) == 1 for tag in TAGS)


def mark_reward(prompts: list[Any], completions: list[str], *unused: Any, **columns: Any) -> list[float]:
    r"""Return 0.125 for each of the four tags that occurs exactly once, at the end of its line: partial credit for the
    format of `hard_format_reward`.

    Example:
        >>> mark_reward([""] * 2, ["<think>\n9+9\n</think>\n<answer>\n18\n</answer>", "<think>\n<answer>18"])
        [0.5, 0.125]
    """
    return [0.125 * sum((text + "\n").count(mark) == 1 for mark in _MARKS) for text in completions]


# --------------------------------------------------------------------------------------------------------------------
# The reward of an environment.


class EnvironmentOutcome:
    """The reward `environment`: the outcome that the environment returned at the end of the episode, or None.

    Example:
        >>> EnvironmentOutcome()([])
        []
    """

    concurrent = True

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | NoScore | None]:
        """Return the outcome of each episode."""
        return [
            NoScore("invalid", "there is no episode: the run has no section environment")
            if item.episode is None
            else item.episode.outcome
            for item in trajectories
        ]
