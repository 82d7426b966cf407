"""The reward of Search-R1: the answer is one of the right ones, whatever its case, punctuation and articles."""

import re
import string
from typing import Any

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
OPENED, CLOSED = "<answer>", "</answer>"


def search_r1_em(prompts: list[Any], completions: list[str], ground_truth: list[Any], **columns: Any) -> list[float]:
    """1.0 where the last `<answer>` of what the model wrote is one of the right answers, else 0.0.

    Compared in lower case, without punctuation, articles and surplus white space, as in SQuAD's exact match. The truth
    is a text, or a list of texts that are all right (`golden_answers`). A completion holds the model's words alone, so
    that an answer in the prompt, or in what an environment said, counts for nothing.

    Source: arXiv:2503.09516, section 3.4. Its code scores the whole row, prompt and replies with it: a model that gives
    no answer has there the answer of the prompt's example, and after an invalid action that of the sentence about it.

    Raises:
        TypeError: a truth is neither text nor number, nor a list of them.

    Example:
        >>> texts = ["<answer> the Beatles! </answer>", "The Beatles", "<answer>Queen</answer>"]
        >>> search_r1_em([""] * 3, texts, [["Beatles", "Fab Four"]] * 3)
        [1.0, 0.0, 0.0]
    """
    scores = []
    for completion, truth in zip(completions, ground_truth, strict=True):
        right = {normalised(text) for text in _texts(truth)}
        given = last_answer(completion)
        scores.append(float(given is not None and normalised(given) in right))
    return scores


def normalised(text: str) -> str:
    """A text for comparison.

    Example:
        >>> normalised(" The  U.S. Open, an Event")
        'us open event'
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


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


def _texts(truth: Any) -> list[str]:
    texts = truth if isinstance(truth, list | tuple) else [truth]
    if not texts or not all(isinstance(text, str | int | float) for text in texts):
        raise TypeError(f"ground_truth must be text, or a list of right answers, not {truth!r:.100}")
    return [str(text) for text in texts]
