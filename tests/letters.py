"""A reward in a module that imports nothing, so that a worker process has it at once."""


def letter_reward(prompts, completions, **columns):
    """Pays for the share of letters up to m."""
    return [sum(c in "abcdefghijklm" for c in text) / max(1, len(text)) for text in completions]
