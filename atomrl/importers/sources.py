"""Keys and values of another library's config, from a YAML file or a shell script."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError, read_yaml
from atomrl.config.files import scalar
from atomrl.importers.shell import read_script

_REFERENCE = r"\$\{([A-Za-z_][\w.]*)\}"
Given = dict[str, Any]
"""The keys with dots that a file gives, and its values."""


def read_hydra(path: Path) -> tuple[Given, list[str]]:
    """A YAML file, or the `key=value` words of a script's command that has most of them.

    Returns:
        The keys, and what could not be read from the file alone.

    Raises:
        ConfigError: it cannot be read, or has no such words.
    """
    if path.suffix in (".yaml", ".yml"):
        given = _resolved(flat(read_yaml(path)))
        return given, [f"{key}={value} stays as it is written" for key, value in given.items() if "${" in str(value)]
    script = read_script(text_of(path), str(path))
    commands = [(given, words) for words in script.commands if (given := dict(_hydra_words(words)))]
    if not commands:
        raise ConfigError(f"{path}: there is no command with key=value in it")
    given, command = max(commands, key=lambda one: len(one[0]))
    bases = re.findall(r"--config-name[= ](\S+)", " ".join(command))
    notes = [
        f"--config-name={name} may have other defaults; they were not read" for name in bases if name != "ppo_trainer"
    ]
    return _resolved(given), [*script.notes, *notes, *_left_out(path, len(commands))]


def _hydra_words(command: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for word in command:
        key = re.match(r"[+~]*([A-Za-z_]\w*(?:\.\w+)+)=", word)
        if key:
            yield key[1], _value(word[key.end() :])


def _resolved(given: Given) -> Given:
    """The values with `${key}`, which is the value of another key; one that is not given stays as it is written."""

    def value(of: Any, within: frozenset[str]) -> Any:
        if isinstance(of, list):
            return [value(item, within) for item in of]
        if not isinstance(of, str):
            return of
        known = [key for key in re.findall(_REFERENCE, of) if key in given and key not in within]
        if known and re.fullmatch(_REFERENCE, of):
            return value(given[known[0]], within | {known[0]})
        for key in known:
            of = of.replace(f"${{{key}}}", str(value(given[key], within | {key})))
        return of

    return {key: value(item, frozenset([key])) for key, item in given.items()}


def read_flags(
    path: Path, program: str, called: str, wanted: str | None = None
) -> tuple[Given, list[str], Mapping[str, Any], str]:
    """The `--flag value` words of a script's command, or a YAML file of flags.

    Args:
        program: a regular expression for the word that the library's command has, after which its flags come.
        called: what the library's commands are called, for messages.
        wanted: of several commands, a regular expression for those that count.

    Returns:
        The flags, what could not be read from the file alone, the flags before `program` (of a launcher), and the word
        that is the program.
    """
    if path.suffix in (".yaml", ".yml"):
        tree = read_yaml(path)
        return {key: scalar(value) if isinstance(value, str) else value for key, value in tree.items()}, [], {}, ""
    script = read_script(text_of(path), str(path))
    found: list[tuple[Given, Mapping[str, Any], str]] = []
    for command in script.commands:
        start = next((i for i, word in enumerate(command) if re.search(program, word)), None)
        if start is not None and command[start + 1 : start + 2] == ["vllm-serve"]:  # an engine beside the run
            continue
        if wanted is not None and not re.search(wanted, " ".join(command)):
            continue
        if start is not None and (given := dict(flag_words(command[start + 1 :]))):
            found.append((given, dict(flag_words(command[:start])), command[start]))
    if not found:
        raise ConfigError(f"{path}: there is no command with --flags of {called}")
    flags, launcher, word = max(reversed(found), key=lambda one: len(one[0]))
    return flags, [*script.notes, *_left_out(path, len(found))], launcher, word


def _left_out(path: Path, commands: int) -> list[str]:
    return [f"{path.name} has {commands} such commands; the one with most keys was taken"] if commands > 1 else []


def flag_words(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """`--flag value` words as pairs; a flag without one is True, one with several has a list.

    Example:
        >>> dict(flag_words("--lr 1e-6 --bf16 --names a b".split()))
        {'lr': 1e-06, 'bf16': True, 'names': ['a', 'b']}
    """
    flag: str | None = None
    values: list[Any] = []
    for word in [*words, "--"]:
        if re.match(r"-[A-Za-z]", word):  # `-m`, which belongs to no flag before it
            word = "--"
        if not word.startswith("--"):
            values.append(_value(word))
            continue
        if flag:
            yield flag, True if not values else values[0] if len(values) == 1 else values
        flag, equals, value = word[2:].partition("=")
        values = [_value(value)] if equals else []


def flat(tree: Mapping[str, Any], prefix: str = "") -> Given:
    """A nested dict by keys with dots.

    Example:
        >>> flat({"a": {"b": 1, "c": {}}})
        {'a.b': 1, 'a.c': {}}
    """
    found: Given = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = scalar(value) if isinstance(value, str) else value
    return found


def text_of(path: Path) -> str:
    """A file's text.

    Raises:
        ConfigError: there is none, or it is no text (a pickle, which can run code when it is opened).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "is no text" if isinstance(error, UnicodeDecodeError) else "cannot be read"
        hint = "; training_args.bin is a pickle, which can run code when opened: give the script or the YAML file"
        raise ConfigError(f"{path} {reason}{hint if path.suffix in ('.bin', '.pt', '.pkl') else ''}") from None
    return text


def _value(text: str) -> Any:
    return scalar(text)


def hub_source(name: str, config: Any = None, split: Any = None, revision: Any = None) -> str:
    """Name a data set of the Hugging Face hub as `data.train` does; a path stays as it is.

    Example:
        >>> hub_source("openai/gsm8k", "main", "train"), hub_source("trl-lib/tldr", split="train"), hub_source("./rows")
        ('openai/gsm8k:main:train', 'trl-lib/tldr::train', './rows')
    """
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        return name
    parts = f":{config or ''}" * bool(config or split) + f":{split}" * bool(split)
    return f"{name}{parts}" + f"@{revision}" * bool(revision)
