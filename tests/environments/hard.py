"""Environments that are hard on their worker."""


def patient(sample, *, turns=2):
    """Says how long the text was."""
    text = yield None
    for _ in range(turns):
        text = yield str(len(text))
    return 1.0
