"""From text to the words that BM25 counts."""

from __future__ import annotations

import re
from typing import Any

from atomrl.hints import did_you_mean, said_as
from atomrl.retrieval.corpus import RetrievalError

WORD = re.compile(r"\b(?!(?<=['’])s\b)\w+")
"""A run of letters and digits; the s of a possessive is none."""
LANGUAGES = {
    "danish": "danish", "dutch": "dutch", "english": "porter", "french": "french", "german": "german",
    "italian": "italian", "norwegian": "norwegian", "portuguese": "portuguese", "russian": "russian",
    "spanish": "spanish", "swedish": "swedish", "turkish": "turkish",
}  # fmt: skip
"""Language -> its stemmer. Of English Porter's own, as in Lucene's analyzer, by which Search-R1's BM25 reads."""


class Words:
    """Splits a text into words in lower case, drops stop words, and cuts what is left to its stem.

    Args:
        language: of `LANGUAGES`; or `none`, with neither stop words nor stems.

    Raises:
        RetrievalError: the language is unknown, or a package is missing.

    Example:
        >>> Words("none")("The dog's 2 bones")
        ['the', 'dog', '2', 'bones']
    """

    def __init__(self, language: str) -> None:
        self._stop: frozenset[str] = frozenset()
        self._stem: Any = None
        if language == "none":
            return
        if language not in LANGUAGES:
            raise RetrievalError(f"unknown language {language!r}; {did_you_mean(language, [*LANGUAGES, 'none'])}")
        with said_as(RetrievalError, "BM25 needs bm25s and PyStemmer: pip install 'atomrl[retriever]'", ImportError):
            import Stemmer
            from bm25s import stopwords
        suffix = {"english": "EN"}.get(language, language.upper())
        self._stop = frozenset(getattr(stopwords, f"STOPWORDS_{suffix}"))
        self._stem = Stemmer.Stemmer(LANGUAGES[language])

    def __call__(self, text: str) -> list[str]:
        """The words of a text, in order."""
        return [stem for word in self.split(text) if (stem := self.stem(word))]

    def split(self, text: str) -> list[str]:
        """The words as they stand there, in lower case."""
        return WORD.findall(text.lower())

    def stem(self, word: str) -> str:
        """What a word is counted as; empty for a stop word."""
        if word in self._stop:
            return ""
        return str(self._stem.stemWord(word)) if self._stem else word
