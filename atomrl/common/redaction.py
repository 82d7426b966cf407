"""Redact secrets in any text: an error message, a command, a log line.

The values of environment variables whose names say that they are secret, those of a run's config (`register_secrets`),
and what looks like a secret.
"""

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SECRET_WORDS = r"token|secret|password|passwd|credential|api[_-]?key"
"""Words in the names of variables and options that have secrets, as a pattern."""
MIN_SECRET = 8
"""Minimum length of a secret; shorter values of variables with such names are flags and numbers."""
_registered: set[str] = set()
_SECRET_NAME = re.compile(rf"(?i)(?:{SECRET_WORDS}|[_-]key)s?(?:$|_)")
_SECRET = re.compile(
    rf"(?i)([\w.-]*(?:{SECRET_WORDS})['\"]?(?:\s*[=:]\s*|\s+))([^\s,}}]+)"  # a value after a name like api_key
    r"|(?<=://)[^/@\s]+(?=@)"  # credentials in a URL
    r"|\b(?:hf_|sk-|gh[pousr]_|glpat-|xox[abpr]-)[\w-]{16,}|\bAKIA[0-9A-Z]{16}\b"  # a token with a known prefix
)


def register_secrets(secrets: Iterable[str]) -> None:
    """Register secrets of a config, so that `without_secrets` removes them too."""
    _registered.update(value for value in secrets if len(value) >= MIN_SECRET)


def without_secrets(text: str) -> str:
    """Redact the values of environment variables that contain secrets, and the secrets of the config.

    Apply it before a text is cut: the rest of a secret would not be recognised.

    Example:
        >>> os.environ["JUDGE_API_KEY"] = "abcd-1234"
        >>> without_secrets("401 for key abcd-1234")
        '401 for key [redacted]'
        >>> del os.environ["JUDGE_API_KEY"]
    """
    for value in sorted([*secret_variables().values(), *_registered], key=len, reverse=True):
        text = text.replace(value, "[redacted]")
    return text


def redacted(value: Any) -> Any:
    """Return a tree without the secrets in its texts, as trackers and the terminal get it: others may read these.

    Example:
        >>> os.environ["JUDGE_API_KEY"] = "abcd-1234"
        >>> redacted([{"completion": "the key is abcd-1234", "reward": 1.0}])
        [{'completion': 'the key is [redacted]', 'reward': 1.0}]
        >>> del os.environ["JUDGE_API_KEY"]
    """
    if isinstance(value, Mapping):
        return {key: redacted(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(item) for item in value]
    return without_secrets(value) if isinstance(value, str) else value


def secret_variables() -> dict[str, str]:
    """Return the environment variables whose names say that they contain secrets."""
    return {name: value for name, value in os.environ.items() if len(value) >= MIN_SECRET and _SECRET_NAME.search(name)}


def redact_command(arguments: Sequence[str]) -> str:
    """Join a command line, with values redacted that look like secrets.

    Example:
        >>> redact_command(["atomrl", "train", "c.yaml", "x.api_key=abc", "https://me:pw@host/x"])
        'atomrl train c.yaml x.api_key=[redacted] https://[redacted]@host/x'
        >>> redact_command(["atomrl", "train", "rollout.stop_token_ids=[2]", "--hub", "hf_abcdefghijklmnopqrst"])
        "atomrl train 'rollout.stop_token_ids=[2]' --hub [redacted]"
    """
    return without_secret_values(shlex.join(arguments))


def without_secret_values(text: str) -> str:
    """Redact values in a text that look like secrets."""
    return _SECRET.sub(lambda match: (match.group(1) or "") + "[redacted]", without_secrets(text))
