"""The reward of Search-R1: exact match with one of several correct answers, ignoring case, punctuation and articles."""

import re
import string
import unicodedata
from typing import Any

from atomrl.rewards.answers import MAX_NFC_CHARS, answers_equal, ascii_digits, fold, parse_number, truth_text

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
