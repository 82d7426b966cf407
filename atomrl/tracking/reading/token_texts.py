"""Decode token ids with the tokenizer of a run's newest checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any


def token_texts(run: Path, ids: Sequence[int]) -> tuple[list[str] | None, str | None]:
    """Decode each token; returns (texts, None), or (None, reason) without a tokenizer."""
    path = _tokenizer_file(run)
    if path is None:
        return None, "the run has no checkpoint with a tokenizer.json yet"
    try:
        return _token_texts(path, path.stat().st_mtime_ns, tuple(ids)), None
    except Exception as error:  # the tokenizers library raises plain Exceptions
        return None, f"tokenizer.json cannot be read: {error}"


def _tokenizer_file(run: Path) -> Path | None:
    """Return the tokenizer.json of the newest checkpoint that has one, or None. Links out of the run are ignored."""
    for folder in sorted((run / "checkpoints").glob("step_*[0-9]"), reverse=True):
        path = folder / "tokenizer.json"
        if path.is_file() and path.resolve().is_relative_to(run.resolve()):
            return path
    return None


@lru_cache(maxsize=2)
def _tokenizer(path: Path, modified: int) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


@lru_cache(maxsize=64)
def _token_texts(path: Path, modified: int, ids: tuple[int, ...]) -> list[str]:
    """Return the text that each token adds to the decoded text. A character of several tokens goes to the last."""
    tokenizer = _tokenizer(path, modified)
    texts, start, before = list[str](), 0, ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
        if text.endswith("�") and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(before) :] if text.startswith(before) else text)
        # The text of the next token may depend on this one (a space before a word), but not on earlier ones.
        start = end - 1
        before = tokenizer.decode([ids[start]], skip_special_tokens=False)
    return texts
