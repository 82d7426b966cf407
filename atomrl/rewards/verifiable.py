"""Rewards that compare an answer with a ground truth: `exact_match`, `gsm8k`, `countdown`, `reasoning_gym` and
`search_r1_em`. (`strict_math` and `correctness_reward` are in `rewards.answers`.)"""

import ast
import functools
import json
import re
import string
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from atomrl.rewards.answers import (
    MAX_CHARS,
    MAX_NFC_CHARS,
    MULTIPLES,
    NUMERAL,
    answers_equal,
    as_written,
    ascii_digits,
    evaluate_arithmetic,
    fold,
    is_tame_formula,
    parse_number,
    require_truths,
    truth_text,
)
from atomrl.rewards.errors import require
from atomrl.rewards.format import (
    is_heading,
    last_boxed,
    marked_answer,
    marked_lines,
    split_strict,
    tagged_answer,
)


def exact_match(
    prompts: list[Any], completions: list[str], ground_truth: list[Any], format_score: float = 0.0, **columns: Any
) -> list[float]:
    """Return 1.0 if the answer (`rewards.format.extract_answer`) is exactly the ground truth.

    Only surrounding white space is ignored. A ground truth of 42.0, as pandas may store integers, also accepts 42. A
    wrong answer scores `format_score` if it is marked (by `<answer>`, `####` or `\\boxed{}`), else 0.0.

    Example:
        >>> texts = ["The answer is <answer>B</answer>", "<answer>C</answer>", "b"]
        >>> exact_match([""] * 3, texts, ["B"] * 3, format_score=0.1)
        [1.0, 0.1, 0.0]
    """
    require_truths(ground_truth)
    scores = []
    for completion, truth in zip(completions, ground_truth, strict=True):
        marked = marked_answer(completion)
        right = (completion.strip() if marked is None else marked) in (str(truth).strip(), truth_text(truth).strip())
        scores.append(1.0 if right else format_score * (marked is not None))
    return scores


_MULTIPLE = (
    rf"(?:\s*(?:{'|'.join(filter(str.isascii, MULTIPLES))})\b|"
    rf"\s*[{''.join(name for name in MULTIPLES if not name.isascii())}](?![0-9克米瓦]))"
)
# A number with its sign, currency and multiple. 10-3 ends with 3, not -3. No index, power or name such as x2 matches.
_TOKEN = re.compile(
    r"(?:(?<![0-9A-Za-z_)\]}])(?P<sign>-)|(?P<word>\b(?:negative|(?<![0-9)] )minus)\s|(?:[负負]|零下|マイナス)\s?))?"
    r"(?:[$€£¥₹](?P<minus>-)?)?"
    r"(?<![A-Za-z0-9^])(?<![A-Za-z0-9)\]}]_)(?<![0-9][.,])(?<![\^_]\{)"
    rf"(?P<number>{NUMERAL})(?P<multiple>{_MULTIPLE}?)"
)
_FUNCTION = r"\\(?:times|cdot|div|pm|mp|leq?|geq?|lt|gt|neq?|over|ln|log)(?![A-Za-z])"
_UNIT = r"(?:text|mathrm|mbox|textrm|rm|operatorname)\s*\{\s*(?:[^\W\d_]{2}|[mgshlL]\s*\})"  # behind a slash
# Text before a number that makes it a part of something else: 3 x 18, x < 18, a root, a date.
_BEFORE = re.compile(
    rf"(?:[√∛±∓×÷≤≥≠/<]|[\w)\]}}%][*+·]|[ \t][+·]\s+|[\w)\]}}$][ \t]+\*[ \t]+|--|-\s*\(|[0-9]{{4}}-[0-9]+-|\bnot\b|"
    rf"sqrt|(?:^|[^\w<>/=\"'-])[\w)\]}}$]+\s*>|{_FUNCTION}|\\sqrt\[[0-9]+\]|\\(?:sin|cos|tan)|\\[dtc]?frac\s*\{{[^{{}}]*\}}?)"
    r"[\s({$]*$"
)
_BEHIND = (
    rf"[\s)}}$]*(?:\^(?!\s*\{{?\s*\\circ)|[×÷√π±≤≥≠⁰¹²³⁴-⁹₀-₉]|\+\s*[\w(\\]|\*(?=[\w(\\])|\s\*\s|"
    rf"/\s*(?:[0-9(]|\\(?!{_UNIT}))|[<>](?:\s|-?[0-9])|x(?=\s*[0-9])|[xyz](?![A-Za-z])|-\s*(?:[0-9(]|[xyz]\b)|{_FUNCTION}|\\(?:sqrt|pi)|(?:sqrt|pi)\b|{_MULTIPLE}|"
    r"(?:,|;|:|to|or|and|through|\\text\s*\{\s*(?:or|and|to)\s*\})?\s*[$€£-]?[0-9]|"
    r"and (?:a|one) (?:half|third|quarter))|"
    r"(?![gmhslLpcdFCWVJNA](?![A-Za-z0-9])|m[23])[A-Za-z](?![A-Za-z])|h[0-9]|_\{?[0-9A-Za-z]|"
    rf"(?<=/)\s*(?:\(|\\(?!{_UNIT}))"
)
_PART = re.compile(_BEHIND)
_LEAD = re.compile(
    r"[\s*_:=$(]*(?:(?:so|thus|therefore|hence|and),?\s+)?(?:(?:the|my|our)\s+)?(?:(?:final|correct)\s+)?"
    r"(?:(?:answer|result|solution|total)\b\s*)?(?:is\b|was\b|[:=*_\s$(])*",
    re.IGNORECASE,
)
_OPERATOR = re.compile(rf"[\s)]*=|{_BEHIND}")
_ASIDE = re.compile(r"(?<=[\w%$]) \([^()\n]{0,200}\)[.!\s]*$")
_GAP = re.compile(r"[ $*(=]*")
_NAMED = re.compile(r"\s*[A-Za-z_]\w*\s*=[\s$(]*")


def gsm8k(prompts: list[Any], completions: list[str], ground_truth: list[Any], **columns: Any) -> list[float]:
    """Return 1.0 if the final number of the completion equals the ground truth, else 0.0.

    The final number is the one after the last `####` that is not a heading (GSM8K's format); of a calculation, the one
    after `=`. Without a mark it is the only number in the last box. Without a box it is the last number of the text,
    ignoring a final remark in parentheses. Numbers are parsed as by `rewards.answers.parse_number`, with words such as
    `million`, and in the digits of any script. Anything that is not a single number (a time, an expression, `1,2`,
    `17 or 18`, `x > 18`, a root, a date) is wrong. The ground truth is a number, or a GSM8K solution that ends with
    `#### 18`.

    Raises:
        TypeError, ValueError: a ground truth is not a number.

    Example:
        >>> gsm8k([""] * 3, ["9 + 9 = 18\\n#### 18", "She makes $18.00 a day.", "18 or 19"], ["18", "#### 18", 18])
        [1.0, 1.0, 0.0]
    """
    pairs = zip(completions, map(number_truth, ground_truth), strict=True)
    return [float(final_number(completion) == wanted) for completion, wanted in pairs]


def number_truth(truth: Any) -> Fraction:
    """Parse a ground truth for `gsm8k`.

    Raises:
        TypeError, ValueError: it is not a number.

    Example:
        >>> number_truth("9 + 9 = 18" + chr(10) + "#### 18")
        Fraction(18, 1)
    """
    wanted = parse_number(ascii_digits(truth_text(truth)).rpartition("####")[2].strip().removesuffix("."))
    if wanted is None:
        raise ValueError(f"ground_truth is not a number: {truth!r:.200}")
    return wanted


def final_number(completion: str) -> Fraction | None:
    """Return the final number of a completion as defined by `gsm8k`, or None.

    Example:
        >>> final_number("#### Step 1: add" + chr(10) + "2 + 3 = 5, so there are 5 apples.")
        Fraction(5, 1)
    """
    completion = ascii_digits(completion)
    for line, more in marked_lines(completion):
        line = re.sub(r"^-\s+", "-", as_written(line).replace("**", ""))
        lead = _LEAD.match(line)
        start = _NAMED.match(line) or lead
        assert start is not None and lead is not None
        if not line:
            return None
        if _TOKEN.match(line, start.end()) or _TOKEN.match(line, start.end() - 1):
            if not (more and is_heading(line) and not lead[0].strip(" *_")):
                return _leading(line, start.end())
        elif not more and (match := _TOKEN.search(line)):
            return _value(match)
    boxed = last_boxed(completion)
    text = as_written(boxed or "").rpartition("=")[2]
    numbers = [*_TOKEN.finditer(text)]
    if len(numbers) > 1:
        return None  # 3 or 18
    if not numbers:
        text = as_written(completion).replace("**", "")
        numbers = [*_TOKEN.finditer(text)]
        if aside := _ASIDE.search(text):
            numbers = [number for number in numbers if number.end() <= aside.start()] or numbers
    return _value(numbers[-1]) if numbers else None


def _leading(line: str, at: int) -> Fraction | None:
    """Return the number at position `at` of a line; of a calculation, the result after `=`; None for an expression."""
    first = None
    while match := _TOKEN.match(line, at) or (_TOKEN.match(line, at - 1) if at else None):
        if not (operator := _OPERATOR.match(line, match.end())):
            return _value(match)
        if operator[0].endswith("=") and first is None:
            first = match  # the result comes first: 18 = 9 + 9
        equals = line.find("=", operator.end() - 1)
        if equals < 0:
            break
        at = _GAP.match(line, equals + 1).end()  # type: ignore[union-attr]
    return _value(first) if first else None


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the value of a matched number, or None if it is part of an expression, a range or a date."""
    before = match.string[max(0, match.start() - 40) : match.start()]
    value = parse_number(match["number"].rstrip(".,/:' "))
    if value is None or _BEFORE.search(before) or _PART.match(match.string, match.end()):
        return None
    value *= Fraction(10) ** MULTIPLES.get(match["multiple"].strip(), 0)
    return -value if match["sign"] or match["word"] or match["minus"] else value


# --------------------------------------------------------------------------------------------------------------------
# Tasks with many correct answers.


def countdown(
    prompts: list[Any], completions: list[str], ground_truth: list[Any], numbers: list[list[int]], **columns: Any
) -> list[float]:
    """Return 1.0 for an expression that uses each of `numbers` once and equals the target, in `strict_math`'s format.

    The answer may end with `= target`. The expression is evaluated exactly and never executed.

    Example:
        >>> completion = "<think>25 is a start</think><answer>(25 - 3) * 7 = 154</answer>"
        >>> countdown([""], [completion], ["154"], numbers=[[3, 7, 25]])
        [1.0]
    """
    rows = zip(completions, ground_truth, numbers, strict=True)
    return [float(_solves(completion, str(target), row)) for completion, target, row in rows]


def _solves(completion: str, target: str, numbers: list[int]) -> bool:
    wanted = read_target(target, numbers)
    parts = split_strict(completion)
    if parts is None:
        return False
    expression, equals, claimed = parts[1].partition("=")
    result = evaluate_arithmetic(expression)
    if result is None or (equals and parse_number(claimed) != wanted):
        return False
    return result[0] == wanted and sorted(result[1]) == sorted(numbers)


def read_target(target: Any, numbers: Any) -> Fraction:
    """Parse the target of `countdown`.

    Raises:
        ValueError: it is not a number, or there are no numbers to combine.

    Example:
        >>> read_target("154", [3, 7, 25])
        Fraction(154, 1)
    """
    wanted = parse_number(str(target))
    if wanted is None or numbers is None or not len(numbers):
        raise ValueError(f"needs a number as ground_truth and a list of numbers, not {target!r} and {numbers!r}")
    return wanted


def reasoning_gym(
    prompts: list[Any], completions: list[str], reasoning_gym: list[dict[str, Any]], **columns: Any
) -> list[float]:
    """Score the last `<answer>` block with the task's own `score_answer`; 0.0 without one.

    Values are between 0 and 1; many tasks give partial credit for the right format. An answer on which the task's
    scorer raises an exception scores 0.0. Nine tasks would execute the answer as Python: for those it must be a
    literal, an arithmetic expression or a safe formula (`is_tame_formula`), else it scores 0.0.

    Args:
        reasoning_gym: the column of this name that the generator `reasoning_gym:NAME` writes.
    """
    return [_task_score(completion, task) for completion, task in zip(completions, reasoning_gym, strict=True)]


def _task_score(completion: str, task: dict[str, Any]) -> float:
    answer = tagged_answer(completion)
    score_answer = _scorer(task["name"], json.dumps(task["args"], sort_keys=True))
    metadata = task["metadata"]
    if task["name"] in ("arc_agi", "rearc"):  # their scorers compare boards, which are tuples, with ==
        metadata = _tuples(metadata)
    entry = {"answer": task["answer"], "metadata": metadata}
    if answer is None or not _safe_to_score(task["name"], answer, entry):
        return 0.0
    try:
        return float(score_answer(answer, entry))
    except Exception:  # the scorers do not handle every text
        return 0.0


@functools.lru_cache(maxsize=64)
def _scorer(name: str, args: str) -> Callable[[str, dict[str, Any]], float]:
    warm_up()
    from reasoning_gym.factory import create_dataset

    score: Callable[[str, dict[str, Any]], float]
    score = create_dataset(name, seed=0, size=500, **json.loads(args)).score_answer
    return score


def warm_up() -> None:
    """Import the package, which takes some seconds, before the first time limit starts."""
    require("reasoning_gym", "reasoning_gym", "tasks")
    import reasoning_gym.factory  # noqa: F401


LITERAL_TASKS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
ARITHMETIC_TASKS = ("countdown", "puzzle24")
FORMULA_TASKS = ("intermediate_integration", "polynomial_multiplication", "simple_integration")


def _safe_to_score(name: str, answer: str, entry: dict[str, Any]) -> bool:
    """Return True if an answer may be passed to the package's scorer. Those of the tasks listed above execute it."""
    if name in LITERAL_TASKS:
        is_solution = answer == entry["answer"] or answer in entry["metadata"].get("valid_answers", ())
        return is_solution or is_literal(answer)
    if name in ARITHMETIC_TASKS:
        return evaluate_arithmetic(answer) is not None
    return name not in FORMULA_TASKS or is_tame_formula(answer)


_LITERAL = re.compile(r"[0-9A-Za-z\s\[\](){},:'\"+.-]*")
_NO_LITERAL = re.compile(r"[0-9A-Za-z\])}'\"]\s*[(\[]|\.\s*[A-Za-z]")


def is_literal(text: str) -> bool:
    """Return True for a Python literal. Texts with a call, an attribute or an operator never reach Python's parser."""
    if len(text) > 10 * MAX_CHARS or not _LITERAL.fullmatch(text) or _NO_LITERAL.search(text):
        return False
    try:
        ast.literal_eval(text)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


# --------------------------------------------------------------------------------------------------------------------
# The reward of Search-R1: exact match with one of several correct answers, ignoring case, punctuation and articles.

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
OPENED, CLOSED = "<answer>", "</answer>"


def search_r1_em(prompts: list[Any], completions: list[str], ground_truth: list[Any], **columns: Any) -> list[float]:
    """Return 1.0 if the model's last `<answer>` is one of the correct answers, else 0.0.

    As in SQuAD's exact match, case, punctuation, articles and extra white space are ignored. A ground truth that is a
    number is compared as a number, because 4.2 and 42 are equal without punctuation. The ground truth is a text, or a
    list of texts that are all correct (`golden_answers`). Only the model's own tokens are scored, not the prompt and
    the environment's replies.

    Source: arXiv:2503.09516, section 3.4. Its code scores the whole row with prompt and replies. A model without an
    answer then gets the answer in the prompt's example, or that in the message about an invalid action.

    Raises:
        TypeError: a ground truth is neither text nor a number, nor a list of them.
        ValueError: one is empty.

    Example:
        >>> texts = ["<answer> the Beatles! </answer>", "The Beatles", "<answer>Queen</answer>"]
        >>> search_r1_em([""] * 3, texts, [["Beatles", "Fab Four"]] * 3)
        [1.0, 0.0, 0.0]
    """
    scores = []
    for completion, truth in zip(completions, ground_truth, strict=True):
        right, given = map(ascii_digits, right_answers(truth)), last_answer(completion)
        scores.append(float(given is not None and any(_equal(ascii_digits(given), text) for text in right)))
    return scores


def _equal(given: str, right: str) -> bool:
    if parse_number(right) is not None:
        return answers_equal(ARTICLES.sub(" ", fold(given).lower()).strip(" \n\t.!?,;:\"'()*"), right)
    if normalised(given) != normalised(right):
        return False
    (numbers, units), (wanted, others) = _marks(given), _marks(right)
    return numbers == wanted and (units == others or not (units and others))


def _marks(text: str) -> tuple[list[str], set[str]]:
    """Return (numbers and signs, units). They are not punctuation: 1.5 is not 15, -5 not 5, C++ not C, $5 not €5."""
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", fold(text[:MAX_NFC_CHARS]))
    return re.findall(r"(?<![\w.])-(?=[0-9])|[0-9]+|(?<=\w)[+#]+(?!\w)", text), set(text) & set("$€£¥₹%°")


def normalised(text: str) -> str:
    """Normalise a text for comparison. A text that has only articles keeps them.

    Example:
        >>> normalised(" The  U.S. Open, an Event"), normalised("A"), normalised("the «Don’t»")
        ('us open event', 'a', 'dont')
    """
    if len(text) <= MAX_NFC_CHARS:
        text = unicodedata.normalize("NFC", text)
    text = fold(text).lower()
    marks = {
        ord(mark): None for mark in set(text) if mark in string.punctuation or unicodedata.category(mark)[0] == "P"
    }
    text = text.translate(marks)
    return " ".join(ARTICLES.sub(" ", text).split()) or " ".join(text.split())


def last_answer(text: str) -> str | None:
    """Return the text of the last answer, or None. Each `<answer>` is paired with the next `</answer>`.

    Example:
        >>> last_answer("<answer>Rome</answer> no: <answer>Paris</answer> <answer>")
        'Paris'
    """
    answer, start = None, text.find(OPENED)
    while start >= 0 and (end := text.find(CLOSED, start)) >= 0:
        answer = text[start + len(OPENED) : end]
        start = text.find(OPENED, end)
    return answer


def right_answers(truth: Any) -> list[str]:
    """Return the correct answers in a ground truth, as texts.

    Raises:
        TypeError: it is neither text nor a number, nor a list of them.
        ValueError: one has nothing but punctuation.

    Example:
        >>> right_answers(["Fab Four", 42.0])
        ['Fab Four', '42']
    """
    truths = truth.tolist() if hasattr(truth, "tolist") else truth  # an array, as pandas reads a list from Parquet
    texts = truths if isinstance(truths, list | tuple) else [truths]
    if not texts or not all(isinstance(text, str | int | float) for text in texts):
        field = "; name the field in it, such as reward_model.ground_truth.target" if isinstance(truth, dict) else ""
        raise TypeError(f"ground_truth must be text, or a list of correct answers, not {truth!r:.100}{field}")
    answers = [truth_text(text) for text in texts]
    if isinstance(truths, str) and re.fullmatch(r"\s*\[\s*[\"'].*[\"']\s*\]\s*", truths, re.DOTALL):
        raise ValueError(f"ground_truth is a list written as text: {truth!r:.100}")
    if empty := next((text for text in answers if not normalised(text)), None):
        raise ValueError(f"ground_truth has only punctuation: {empty!r:.100}")
    return answers
