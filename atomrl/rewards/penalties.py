"""Penalties: rewards that are never positive."""

from __future__ import annotations

from typing import Any


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
