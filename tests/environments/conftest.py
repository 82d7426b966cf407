"""Fixtures that the tests of engines and of environments share."""

from tests.episodes import folder, played, tokenizer

__all__ = ["folder", "played", "tokenizer"]
