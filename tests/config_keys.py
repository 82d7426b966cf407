"""The config keys that a text names."""

import re


def config_keys(text: str) -> set[str]:
    """Return words of a text that look like config keys, except in link targets."""
    text = re.sub(r"\]\([^)]*\)", "]", text)
    sections = r"(?:model|data|rollout|reward|algorithm|train|eval|checkpoint|tracking)"
    return set(re.findall(rf"(?<![\w/.-]){sections}\.[a-z_]+(?:\.[a-z_]+)*(?![\w/])", text))
