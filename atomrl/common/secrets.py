"""Secrets that a config holds: they are used, and never written down, sent to a tracker or shown.

A config names secrets by environment variables (`headers_env`, `api_key_env`, `${NAME}` in `tools`). Where it holds one
itself, it is known by its key, by its form, or by its place in an address or a command, and `LEFT_OUT` stands for it in
whatever is made of the config.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

LEFT_OUT = "[secret-left-out]"
_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*)\}")
_WORDS = r"(?:hf|gh[pousr]|npm|r8|gsk|ntn|lin_api)_[A-Za-z0-9]{16,}"
"""Without a `_` further on: `hf_checkpoint_1000` and `r8_alpha16_lr1e-4` are names of one's own."""
_DASHED = r"(?:sk-|github_pat_|glpat-|xox[abeprs]-|pypi-|nvapi-|pk-lf-|tvly-)(?=[\w-]*\d)[\w-]{16,}"
_MIXED = r"(?=[\w.~+/=-]*(?:\d|[a-z][A-Z]))"
"""As no word is: a text may speak of Bearer tokens, and of Basic arithmetic."""
_FORM = re.compile(
    rf"\b(?:{_WORDS}|{_DASHED})|\bAKIA[0-9A-Z]{{16}}\b|\bAIza[\w-]{{30,}}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]*)?"
    rf"|(?<=Bearer ){_MIXED}[\w.~+/=-]{{6,}}|(?<=Basic ){_MIXED}[\w+/=]{{8,}}"
)
_KEYS = r"(?:api|access|secret|private|signing)[_-]?keys?|secrets?|pass(?:words?|wd|phrase)?|"
_KEYS += r"credentials?|auth(?:orization)?"
_NAMED = re.compile(rf"(?i)(?:^|[^a-z]|(?<=[a-z])(?-i:(?=[A-Z])))(?:{_KEYS}|cookie)$")
_TOKEN = re.compile(r"(?i)(?:^|[^a-z]|(?<=[a-z])(?-i:(?=T)))tokens?$")
"""The words of a tokenizer are called so too: a secret's are `_OPAQUE`."""
_OPAQUE = re.compile(r"(?=.*\d)[\w.~+/=-]{8,}")
_OF_VARIABLES = re.compile(r".*(?:headers|key|token|secret|password)_env")
"""Keys whose values name environment variables; `gym_env` has another sense."""
_ENDS = "key|token|secret|password|passwd|pwd|auth|authorization|credentials?|pat"
"""Of the names of options, headers and parts of a query."""
_VARIABLE = re.compile(
    r"(?i).*(?:key|token|secret|pass|pwd|cred|auth|cookie|session|private|dsn|jwt|bearer|webhook|(?:^|_)(?:pat|pw|sid)(?:_|$))"
)
"""In the environment of a command, which is where a server's secrets are given."""
_PLAIN = re.compile(r"(?i:|true|false|yes|no|on|off|none|null|auto)|\d{1,5}|\d+\.\d+|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
"""Values that are no secret, the name of a variable among them."""
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_RANDOM = re.compile(rf"(?<![\w-])(?:(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9_-]{{24,}}|{_UUID})(?![\w-])")
_USER = re.compile(r"(?<=://)(?!git@)[^/@\s]+(?=@)")
_QUERY = re.compile(rf"(?i)([?&;][\w.-]*(?:{_ENDS}|sig|signature|code)=)([^&;#\s]+)")
_OPTION = re.compile(rf"(?i)((?:^|\s)-{{0,2}}[\w-]*(?:{_ENDS})[\"']?\s*[=:]\s*)(.+)")
_FLAG = re.compile(rf"(?i)--?[\w-]*(?:{_ENDS})")


def left_out(tree: Any, key: str = "") -> Any:
    """A config's tree, or a part of it, with `LEFT_OUT` in the place of each secret.

    Args:
        key: of a part, what it is called.

    Example:
        >>> left_out({"env": {"BRAVE_API_KEY": "abc", "LEVEL": "3"}, "mcp": ["npx", "--token=abc", "${HOME}/x"]})["mcp"]
        ['npx', '--token=[secret-left-out]', '${HOME}/x']
        >>> left_out({"api_key": "abc", "api_key_env": "MY_KEY", "url": "https://me:pw@host/x?api_key=abc"})["url"]
        'https://[secret-left-out]@host/x?api_key=[secret-left-out]'
    """
    if isinstance(tree, str):
        return LEFT_OUT if _is_named(key, tree) else _in_text(tree)
    if isinstance(tree, list | tuple):
        return [left_out(item, key) for item in tree]
    if not isinstance(tree, Mapping):
        return tree
    made: dict[Any, Any] = {}
    for name, value in tree.items():
        if "mcp" in tree and name in ("mcp", "env") and value:
            made[name] = _of_server(value)
        elif _OF_VARIABLES.fullmatch(str(name)) and isinstance(value, Mapping):
            made[name] = {one: _of_variable(variable) for one, variable in value.items()}
        elif _OF_VARIABLES.fullmatch(str(name)):
            made[name] = _of_variable(value)
        else:  # what is below a name that tells of secrets is one too, as with `headers: {Authorization: ...}`
            made[name] = left_out(
                value, key if _is_named(key, "x" * 8) and not isinstance(value, Mapping) else str(name)
            )
    return made


def secrets_of(tree: Any, shown: Any) -> Iterator[str]:
    """The texts of a tree that `left_out` has changed, whole or in part; so what to hide in other texts."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from secrets_of(value, shown[name])
    elif isinstance(tree, list | tuple):
        for one, other in zip(tree, shown, strict=True):
            yield from secrets_of(one, other)
    elif isinstance(tree, str) and tree != shown:
        before, *_, after = shown.split(LEFT_OUT)
        secret = tree[len(before) : len(tree) - len(after)]
        yield from {secret, secret.rpartition(" ")[2], secret.rpartition(":")[2]}  # without Bearer, without the user


def check_whole(tree: Any, where: str = "") -> None:
    """
    Raises:
        ValueError: a secret was left out of it, as of the `config.yaml` of a run's folder.
    """
    if isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for name, value in items:
            check_whole(value, f"{where}.{name}" if where else str(name))
    elif isinstance(tree, str) and LEFT_OUT in tree:
        raise ValueError(
            f"{where}: is a secret, which a run does not write into its folder. Take the config that has it (with "
            "--resume, too), or name an environment variable in that: ${NAME} in tools, headers_env and api_key_env of "
            "rewards; code of your own can read os.environ"
        )


def resolved(text: str) -> str:
    """A text with the values of the environment variables that it names.

    Raises:
        ValueError: one is not set.

    Example:
        >>> os.environ["PLACE"] = "here"
        >>> resolved("http://${PLACE}/x?y=$z")
        'http://here/x?y=$z'
    """
    for name in _REFERENCE.findall(text):
        if name not in os.environ:
            raise ValueError(f"the environment variable {name} is not set (tools: ${{{name}}})")
    return _REFERENCE.sub(lambda match: os.environ[match[1]], text)


def is_variable(text: str) -> bool:
    """Whether a text may name an environment variable, and is not the secret itself.

    Example:
        >>> is_variable("JUDGE_API_KEY"), is_variable("Bearer abc"), is_variable("hf_abcdefghijkl1234")
        (True, False, False)
    """
    return re.fullmatch(r"[A-Za-z_]\w*", text) is not None and _in_text(text) == text


def _of_variable(name: Any) -> Any:
    return name if not isinstance(name, str) or is_variable(name) else LEFT_OUT


def _is_named(key: str, value: str) -> bool:
    """Whether a value is a secret by its key."""
    if _REFERENCE.fullmatch(value) or _PLAIN.fullmatch(value):
        return False
    return bool(_NAMED.search(key)) or bool(_TOKEN.search(key) and _OPAQUE.fullmatch(value))


def _kept(match: re.Match[str]) -> str:
    """What an option or a query has before its value, and `LEFT_OUT`; a reference stays."""
    value = match[2].strip("\"'")
    return match[0] if _REFERENCE.search(value) or _PLAIN.fullmatch(value) else match[1] + LEFT_OUT


def _in_text(text: str) -> str:
    """A text without what is a secret by its form, and by its place in an address."""
    text = _USER.sub(lambda match: match[0] if _REFERENCE.search(match[0]) else LEFT_OUT, text)
    return _FORM.sub(LEFT_OUT, _QUERY.sub(_kept, text))


def _of_server(given: Any) -> Any:
    """The command, the address or the environment of a tools' server."""
    if isinstance(given, Mapping):
        secret = {name: _VARIABLE.match(name) and not _PLAIN.fullmatch(str(value)) for name, value in given.items()}
        return {
            name: LEFT_OUT if secret[name] and not _REFERENCE.search(str(value)) else _of_word(value)
            for name, value in given.items()
        }
    if isinstance(given, str):
        return _of_word(given)
    words = [_of_word(word) for word in given]
    for place, word in enumerate(given[1:], start=1):
        named = isinstance(given[place - 1], str) and _FLAG.fullmatch(given[place - 1])
        if named and isinstance(word, str) and not word.startswith("-") and not _REFERENCE.search(word):
            words[place] = LEFT_OUT
    return words


def _of_word(word: Any) -> Any:
    if not isinstance(word, str):
        return word
    return _RANDOM.sub(LEFT_OUT, _in_text(_OPTION.sub(_kept, word)))
