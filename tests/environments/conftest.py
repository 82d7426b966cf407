"""Fixtures that the tests of engines and of environments share."""

from tests.episodes import folder, played, tokenizer

__all__ = ["folder", "played", "tokenizer"]

collect_ignore = ["pixels.py", "screens.py"]
"""Games for tests, which import packages that may be absent; pytest would import them for their doctests."""
