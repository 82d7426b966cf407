"""Find secrets in a config and replace them, so that they are never written, sent to a tracker or shown.

A config should name secrets by environment variables (`headers_env`, `api_key_env`, `${NAME}` in `tools`). A literal
secret is recognised by its key, its form, or its position in a URL or a command, and replaced by `MASK` in
everything that is derived from the config.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from atomrl.common.errors import ConfigError
from atomrl.common.redaction import secret_variables

MASK = "[secret-left-out]"
_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*)\}")
_WORDS = r"(?:hf|gh[pousr]|npm|r8|gsk|ntn|lin_api)_[A-Za-z0-9]{16,}"
"""Tokens with a known prefix and no further `_`: `hf_checkpoint_1000` and `r8_alpha16_lr1e-4` are ordinary names."""
_DASHED = r"(?:sk-|github_pat_|glpat-|xox[abeprs]-|pypi-|nvapi-|pk-lf-|tvly-)(?=[\w-]*\d)[\w-]{16,}"
_MIXED = r"(?=[\w.~+/=-]*(?:\d|[a-z][A-Z]))"
"""Contains a digit or an inner capital, as words do not: a text may be about Bearer tokens, or Basic arithmetic."""
_FORM = re.compile(
    rf"\b(?:{_WORDS}|{_DASHED})|\bAKIA[0-9A-Z]{{16}}\b|\bAIza[\w-]{{30,}}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]*)?"
    rf"|(?<=Bearer ){_MIXED}[\w.~+/=-]{{6,}}|(?<=Basic ){_MIXED}[\w+/=]{{8,}}"
)
_KEYS = r"(?:api|access|secret|private|signing)[_-]?keys?|secrets?|pass(?:words?|wd|phrase)?|"
_KEYS += r"credentials?|auth(?:orization)?"
_NAMED = re.compile(rf"(?i)(?:^|[^a-z]|(?<=[a-z])(?-i:(?=[A-Z])))(?:{_KEYS}|cookie)$")
_TOKEN = re.compile(r"(?i)(?:^|[^a-z]|(?<=[a-z])(?-i:(?=T)))tokens?$")
"""Keys that may also be about a tokenizer's tokens; their value is a secret only if it is `_OPAQUE`."""
_OPAQUE = re.compile(r"(?=.*\d)[\w.~+/=-]{8,}")
_OF_VARIABLES = re.compile(r".*(?:headers|key|token|secret|password)_env")
"""Keys whose values name environment variables (`gym_env` does not)."""
_ENDS = "key|token|secret|password|passwd|pwd|auth|authorization|credentials?|pat"
"""Last words of options, headers and query parameters that have secrets."""
_VARIABLE = re.compile(
    r"(?i).*(?:key|token|secret|pass|pwd|cred|auth|cookie|session|private|dsn|jwt|bearer|webhook|(?:^|_)(?:pat|pw|sid)(?:_|$))"
)
"""Environment variables of a command that hold secrets; wider than `_NAMED`, as servers get their secrets there."""
_PLAIN = re.compile(r"(?i:|true|false|yes|no|on|off|none|null|auto)|\d{1,5}|\d+\.\d+|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
"""Values that are not secrets, such as numbers and names of environment variables."""
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_RANDOM = re.compile(rf"(?<![\w-])(?:(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9_-]{{24,}}|{_UUID})(?![\w-])")
_USER = re.compile(r"(?<=://)(?!git@)[^/@\s]+(?=@)")
_QUERY = re.compile(rf"(?i)([?&;][\w.-]*(?:{_ENDS}|sig|signature|code)=)([^&;#\s]+)")
_OPTION = re.compile(rf"(?i)((?:^|\s)-{{0,2}}[\w-]*(?:{_ENDS})[\"']?\s*[=:]\s*)(.+)")
_FLAG = re.compile(rf"(?i)--?[\w-]*(?:{_ENDS})")


def mask_secrets(tree: Any, key: str = "") -> Any:
    """Replace each secret in a config's tree, or in a part of it, by `MASK`.

    Args:
        key: key of the part.

    Example:
        >>> mask_secrets({"env": {"BRAVE_API_KEY": "abc"}, "mcp": ["npx", "--token=abc", "${HOME}/x"]})["mcp"]
        ['npx', '--token=[secret-left-out]', '${HOME}/x']
        >>> mask_secrets({"api_key": "abc", "api_key_env": "MY_KEY", "url": "https://me:pw@host/x?api_key=abc"})["url"]
        'https://[secret-left-out]@host/x?api_key=[secret-left-out]'
    """
    if isinstance(tree, str):
        return MASK if _is_named(key, tree) else _redact_text(tree)
    if isinstance(tree, list | tuple):
        return [mask_secrets(item, key) for item in tree]
    if not isinstance(tree, Mapping):
        return tree
    result: dict[Any, Any] = {}
    for name, value in tree.items():
        if "mcp" in tree and name in ("mcp", "env") and value:
            result[name] = _redact_server(value)
        elif _OF_VARIABLES.fullmatch(str(name)) and isinstance(value, Mapping):
            result[name] = {header: _redact_variable(variable) for header, variable in value.items()}
        elif _OF_VARIABLES.fullmatch(str(name)):
            result[name] = _redact_variable(value)
        else:  # values below a key of secrets are secrets too, as in `headers: {Authorization: ...}`
            result[name] = mask_secrets(
                value, key if _is_named(key, "x" * 8) and not isinstance(value, Mapping) else str(name)
            )
    return result


def secrets_of(tree: Any, masked: Any) -> Iterator[str]:
    """Yield the secrets that `mask_secrets` has replaced, so that they can be hidden in other texts.

    Args:
        tree: the tree with its secrets.
        masked: `mask_secrets(tree)`.
    """
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from secrets_of(value, masked[name])
    elif isinstance(tree, list | tuple):
        for one, other in zip(tree, masked, strict=True):
            yield from secrets_of(one, other)
    elif isinstance(tree, str) and tree != masked:
        before, *_, after = masked.split(MASK)
        secret = tree[len(before) : len(tree) - len(after)]
        yield from {secret, secret.rpartition(" ")[2], secret.rpartition(":")[2]}  # without Bearer, without the user


def check_unmasked(tree: Any, where: str = "") -> None:
    """Check that no secret was left out of a tree, as from the `config.yaml` of a run's folder.

    Raises:
        ValueError: names the key of the first secret that was left out.
    """
    if isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for name, value in items:
            check_unmasked(value, f"{where}.{name}" if where else str(name))
    elif isinstance(tree, str) and MASK in tree:
        raise ValueError(
            f"{where}: is a secret, which is not written into a run's folder. Use the config that has it (with "
            "--resume, too), or name an environment variable in it: ${NAME} in tools, headers_env and api_key_env of "
            "rewards; your own code can read os.environ"
        )


def refuse_secrets(config_text: str) -> None:
    """Check that a config contains no secret of the environment: it is written to the run's folder and sent to
    trackers.

    Raises:
        ConfigError: it does, for example because a shell expanded `$API_KEY` in an override.
    """
    for name, value in secret_variables().items():
        if value in config_text:
            raise ConfigError(
                f"the config contains the value of the environment variable {name}, and is written to the run's "
                "folder. Remove it, and read the variable in the code that needs it"
            )


def expand_variables(text: str) -> str:
    """Replace `${NAME}` in a text by the value of the environment variable.

    Raises:
        ValueError: a variable is not set.

    Example:
        >>> os.environ["PLACE"] = "here"
        >>> expand_variables("http://${PLACE}/x?y=$z")
        'http://here/x?y=$z'
    """
    for name in _REFERENCE.findall(text):
        if name not in os.environ:
            raise ValueError(f"the environment variable {name} is not set (tools: ${{{name}}})")
    return _REFERENCE.sub(lambda match: os.environ[match[1]], text)


def is_variable(text: str) -> bool:
    """Return True if a text can be the name of an environment variable, and is not a secret itself.

    Example:
        >>> is_variable("JUDGE_API_KEY"), is_variable("Bearer abc"), is_variable("hf_abcdefghijkl1234")
        (True, False, False)
    """
    return re.fullmatch(r"[A-Za-z_]\w*", text) is not None and _redact_text(text) == text


def _redact_variable(name: Any) -> Any:
    """Replace the value of a key such as `api_key_env`, unless it is the name of a variable."""
    return name if not isinstance(name, str) or is_variable(name) else MASK


def _is_named(key: str, value: str) -> bool:
    """Return True if a value is a secret by its key."""
    if _REFERENCE.fullmatch(value) or _PLAIN.fullmatch(value):
        return False
    return bool(_NAMED.search(key)) or bool(_TOKEN.search(key) and _OPAQUE.fullmatch(value))


def _redact_value(match: re.Match[str]) -> str:
    """Replace the value (group 2) of an option or a query parameter, unless it is plain or a `${NAME}`."""
    value = match[2].strip("\"'")
    return match[0] if _REFERENCE.search(value) or _PLAIN.fullmatch(value) else match[1] + MASK


def _redact_text(text: str) -> str:
    """Replace secrets in a text that are recognised by their form, or by their position in a URL."""
    text = _USER.sub(lambda match: match[0] if _REFERENCE.search(match[0]) else MASK, text)
    return _FORM.sub(MASK, _QUERY.sub(_redact_value, text))


def _redact_server(server: Any) -> Any:
    """Replace secrets in the command, the URL or the environment of an MCP server."""
    if isinstance(server, Mapping):
        secret = {name: _VARIABLE.match(name) and not _PLAIN.fullmatch(str(value)) for name, value in server.items()}
        return {
            name: MASK if secret[name] and not _REFERENCE.search(str(value)) else _redact_word(value)
            for name, value in server.items()
        }
    if isinstance(server, str):
        return _redact_word(server)
    words = [_redact_word(word) for word in server]
    for index, word in enumerate(server[1:], start=1):  # `--token VALUE` as two words
        after_flag = isinstance(server[index - 1], str) and _FLAG.fullmatch(server[index - 1])
        if after_flag and isinstance(word, str) and not word.startswith("-") and not _REFERENCE.search(word):
            words[index] = MASK
    return words


def _redact_word(word: Any) -> Any:
    """Replace secrets in a word of a command, where long random strings count as secrets too."""
    if not isinstance(word, str):
        return word
    return _RANDOM.sub(MASK, _redact_text(_OPTION.sub(_redact_value, word)))
