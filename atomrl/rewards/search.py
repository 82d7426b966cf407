"""The reward of Search-R1: the answer is one of the right ones, whatever its case, punctuation and articles."""

import re
import string
import unicodedata
from typing import Any

from atomrl.rewards.answers import MAX_NFC_CHARS, answers_equal, fold, parse_number, truth_text

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
OPENED, CLOSED = "<answer>", "</answer>"


def search_r1_em(prompts: list[Any], completions: list[str], ground_truth: list[Any], **columns: Any) -> list[float]:
    """1.0 where the last `<answer>` of what the model wrote is one of the right answers, else 0.0.

    Compared in lower case, without punctuation, articles and surplus white space, as in SQuAD's exact match; a truth
    that is a number is compared as one, since 4.2 and 42 are the same without punctuation. The truth is a text, or a
    list of texts that are all right (`golden_answers`). A completion holds the model's words alone, so that an answer
    in the prompt, or in what an environment said, counts for nothing.

    Source: arXiv:2503.09516, section 3.4. Its code scores the whole row, prompt and replies with it: a model that gives
    no answer has there the answer of the prompt's example, and after an invalid action that of the sentence about it.

    Raises:
        TypeError: a truth is neither text nor number, nor a list of them.
        ValueError: one is empty.

    Example:
        >>> texts = ["<answer> the Beatles! </answer>", "The Beatles", "<answer>Queen</answer>"]
        >>> search_r1_em([""] * 3, texts, [["Beatles", "Fab Four"]] * 3)
        [1.0, 0.0, 0.0]
    """
    scores = []
    for completion, truth in zip(completions, ground_truth, strict=True):
        right, given = right_answers(truth), last_answer(completion)
        scores.append(float(given is not None and any(_equal(given, text) for text in right)))
    return scores


def _equal(given: str, right: str) -> bool:
    if parse_number(right) is not None:
        return answers_equal(ARTICLES.sub(" ", fold(given).lower()).strip(" \n\t.!?,;:\"'()*"), right)
    if normalised(given) != normalised(right):
        return False
    (numbers, units), (wanted, others) = _marks(given), _marks(right)
    return numbers == wanted and (units == others or not (units and others))


def _marks(text: str) -> tuple[list[str], set[str]]:
    """What must not go with the punctuation: 1.5 is not 15, -5 not 5, C++ not C, $5 not €5."""
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", fold(text[:MAX_NFC_CHARS]))
    return re.findall(r"(?<![\w.])-(?=[0-9])|[0-9]+|(?<=\w)[+#]+(?!\w)", text), set(text) & set("$€£¥₹%°")


def normalised(text: str) -> str:
    """A text for comparison; one of articles alone keeps them.

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
    """What stands between the tags of the last answer, each `<answer>` with the next `</answer>`; or None.

    Example:
        >>> last_answer("<answer>Rome</answer> no: <answer>Paris</answer> <answer>")
        'Paris'
    """
    found, start = None, text.find(OPENED)
    while start >= 0 and (end := text.find(CLOSED, start)) >= 0:
        found = text[start + len(OPENED) : end]
        start = text.find(OPENED, end)
    return found


def right_answers(truth: Any) -> list[str]:
    """The texts of a truth, each of which is right.

    Raises:
        TypeError: it is neither text nor number, nor a list of them.
        ValueError: one has nothing that could be compared.

    Example:
        >>> right_answers(["Fab Four", 42.0])
        ['Fab Four', '42']
    """
    truths = truth.tolist() if hasattr(truth, "tolist") else truth  # an array, as pandas reads a list from Parquet
    texts = truths if isinstance(truths, list | tuple) else [truths]
    if not texts or not all(isinstance(text, str | int | float) for text in texts):
        raise TypeError(f"ground_truth must be text, or a list of right answers, not {truth!r:.100}")
    found = [truth_text(text) for text in texts]
    if isinstance(truths, str) and re.fullmatch(r"\s*\[\s*[\"'].*[\"']\s*\]\s*", truths, re.DOTALL):
        raise ValueError(f"ground_truth is a list that is written as text: {truth!r:.100}")
    if empty := next((text for text in found if not normalised(text)), None):
        raise ValueError(f"ground_truth has nothing but punctuation: {empty!r:.100}")
    return found
