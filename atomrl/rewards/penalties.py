"""Rewards that are never positive: what a completion costs."""

from typing import Any


def length_penalty(
    prompts: list[Any],
    completions: list[str],
    completion_tokens: list[int],
    free_tokens: int = 512,
    max_tokens: int = 1024,
    **columns: Any,
) -> list[float]:
    """0 up to `free_tokens`, then falling linearly to -1 at `max_tokens` and beyond.

        r = -min(1, max(0, (tokens - free_tokens) / (max_tokens - free_tokens)))

    Args:
        completion_tokens: tokens of each completion; every reward is given this column.

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


def repetition_penalty(
    prompts: list[Any], completions: list[str], ngram_size: int = 3, max_penalty: float = -1.0, **columns: Any
) -> list[float]:
    """The share of n-grams that are repetitions, times `max_penalty`; 0 for fewer than `ngram_size` words.

        r = max_penalty * (1 - distinct n-grams / n-grams)

    Paper: arXiv:2502.03373, appendix C.2; as in open-r1: words in lower case, split at white space. A text without
    spaces (Chinese, Japanese) is one word, and so is never penalised.

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
