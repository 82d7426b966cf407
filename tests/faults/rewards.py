"""A reward that a random model earns by degrees, and that takes long enough to be killed in."""

import time


def letter_share(prompts, completions, seconds=0.0, **columns):
    """The share of letters up to m."""
    time.sleep(seconds)
    return [sum(c in "abcdefghijklm" for c in text) / max(1, len(text)) for text in completions]
