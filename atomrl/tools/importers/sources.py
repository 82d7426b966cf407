"""Read the keys of another library's config from a YAML file, or from the words of a shell script's command."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError, read_yaml
from atomrl.config.overrides import scalar
from atomrl.tools.importers.shell import REFERENCE, Script, read_script

_REFERENCE = r"\$\{([A-Za-z_][\w.]*)\}"
Settings = dict[str, Any]
"""Dotted key -> value, as given by a file."""


def read_hydra(path: Path, named: Sequence[str] = ()) -> tuple[Settings, list[str], str]:
    """Read a Hydra config: a YAML file, or the `key=value` words of the script's command that has the most of them.

    If that command starts another script, and this is there, its command is read with the words as its arguments.

    Args:
        named: names of `--config-name` that are the library's own configs, so that they are not read.

    Returns:
        The keys, notes on what the file alone does not say, and the program of the command, "" for a YAML file.

    Raises:
        ConfigError: it cannot be read, has no such words, or the config of `--config-name` is not there.
    """
    if path.suffix in (".yaml", ".yml"):
        return _resolved(flat(read_yaml(path))), [], ""
    settings, notes, command = _command(path, (), {})
    return _resolved(_base(path, command, named) | settings), notes, program_of(command)


def _command(
    path: Path, arguments: Sequence[str], environment: Mapping[str, str], depth: int = 0
) -> tuple[Settings, list[str], list[str]]:
    """Return the `key=value` words of a script's command that has the most of them, notes, and the command."""
    script = read_script(text_of(path), str(path), arguments, environment)
    commands = [(settings, words) for words in script.commands if (settings := dict(_hydra_words(words)))]
    if not commands:
        raise ConfigError(f"{path}: no command with key=value in it{_elsewhere(script)}")
    settings, command = max(commands, key=lambda one: len(one[0]))
    _refuse_unknown(path, command, script)
    notes = [*script.notes, *_left_out(path, len(commands))]
    program = program_of(command)
    inner = _started(path, program)
    if inner is None or depth == MOST_SCRIPTS:
        return settings, notes, command
    place = command.index(program)
    given = dict(word.partition("=")[::2] for word in command[:place] if re.match(r"[A-Za-z_]\w*=", word))
    settings, more, started = _command(inner, command[place + 1 :], script.exported | given, depth + 1)
    return settings, [f"{path.name} starts {program}, which is read with its arguments", *notes, *more], started


MOST_SCRIPTS = 5
"""Scripts that start one another."""


def _started(path: Path, program: str) -> Path | None:
    """Return the shell script that a program is; None if it is none, or not there."""
    return next((one for one in places_of(path, program) if program.endswith(".sh") and one.is_file()), None)


def scripts_of(path: Path) -> list[Path]:
    """Return a file and, for a shell script, the scripts that it starts and that are there."""
    found = [path]
    for one in found:
        commands = read_script(text_of(one), str(one)).commands if one.suffix == ".sh" else []
        inner = [_started(one, program_of(words)) for words in commands]
        found += [script for script in inner if script is not None and script not in found][:MOST_SCRIPTS]
        if len(found) > MOST_SCRIPTS:
            break
    return found


def places_of(path: Path, name: str) -> list[Path]:
    """Return where a file may be that a script names: beside it, or in a folder above."""
    return [parent / name for parent in path.resolve().parents]


def program_of(command: Sequence[str]) -> str:
    """Return what a command starts: the module after `-m`, else the first `.py` or `.sh`; "" if it has none."""
    after = [word for before, word in pairwise(command) if before == "-m"]
    files = [word for word in command if word.endswith((".py", ".sh")) and "=" not in word]
    return (after or files or [""])[0]


def _base(path: Path, command: Sequence[str], named: Sequence[str]) -> Settings:
    """Return the keys of the config of `--config-name`; empty for the library's own configs."""
    flags = {option: value for word, after in pairwise([*command, ""]) for option, value in _option(word, after)}
    name = flags.get("config-name", "").removesuffix(".yaml")
    if name in ("", *named):
        return {}
    folder = flags.get("config-path", "")
    own = path.resolve().parent
    inside = Path(folder).relative_to(own) if folder and Path(folder).is_relative_to(own) else Path(folder)
    places = [*places_of(path, str(inside)), Path(folder)]
    if not folder:  # Hydra's folder beside the program
        places += places_of(path, "config")
    config = next((place / f"{name}.yaml" for place in places if (place / f"{name}.yaml").is_file()), None)
    if config is None:
        raise ConfigError(
            f"{path}: --config-name={name} is not there (--config-path={folder or 'not set'}), and it sets what is "
            "trained: put it where the script finds it"
        )
    tree = read_yaml(config)
    parts = [part for part in tree.get("defaults") or [] if part not in ("_self_", *named)]
    if parts:
        raise ConfigError(f"{config}: defaults: {parts} are configs of their own, which are not read: write their keys")
    return flat({key: value for key, value in tree.items() if key not in ("defaults", "hydra")})


def _option(word: str, after: str) -> Iterator[tuple[str, str]]:
    """Yield (option, value) of `--config-name=X`, `--config-name X` and so on."""
    if option := re.fullmatch(r"--(config-name|config-path|config-dir)(?:=(.*))?", word):
        yield option[1].replace("dir", "path"), after if option[2] is None else option[2]


def _refuse_unknown(path: Path, command: Sequence[str], script: Script) -> None:
    """Refuse a command with words that are set under a condition that only a shell knows: they can hold any key."""
    for word in command:
        if (name := REFERENCE.fullmatch(word)) and name[1] in script.unknown:
            raise ConfigError(
                f"{path}: {word} is a part of the command, and is set under a condition that only the shell knows "
                f"({script.unknown[name[1]]}): write its words into the command"
            )


def _elsewhere(script: Script) -> str:
    """Name the script that another one reads, for an error."""
    read = [words[1] for words in script.commands if words[0] in ("source", ".") and len(words) > 1]
    return f"; it reads {read[-1]}: import that one" if read else ""


def _hydra_words(command: Sequence[str]) -> Iterator[tuple[str, Any]]:
    program = program_of(command)
    start = command.index(program) if program else len(command)
    for place, word in enumerate(command):
        dotted = r"(?:\.\w+)*" if place > start else r"(?:\.\w+)+"  # before it, NAME=value sets the environment
        key = re.match(rf"[+~]*([A-Za-z_]\w*{dotted})=", word)
        if key and not word.startswith("--"):
            yield key[1], scalar(word[key.end() :])


def _resolved(settings: Settings) -> Settings:
    """Resolve the references `${key}` to other keys; unknown ones stay as written."""

    def value(of: Any, within: frozenset[str]) -> Any:
        if isinstance(of, list):
            return [value(item, within) for item in of]
        if not isinstance(of, str):
            return of
        references = [key for key in re.findall(_REFERENCE, of) if key in settings and key not in within]
        if references and re.fullmatch(_REFERENCE, of):
            return value(settings[references[0]], within | {references[0]})
        for key in references:
            of = of.replace(f"${{{key}}}", str(value(settings[key], within | {key})))
        return of

    return {key: value(item, frozenset([key])) for key, item in settings.items()}


def read_flags(
    path: Path, program: str, called: str, pattern: str | None = None
) -> tuple[Settings, list[str], Mapping[str, Any], list[str]]:
    """Read `--flag value` words from a script's command.

    Args:
        program: regular expression of the word after which the library's flags follow.
        called: name of the library's commands, for messages.
        pattern: regular expression that a command has to match.

    Returns:
        The flags, notes on what the file alone does not say, the launcher's flags before `program`, and the words from
        the one that matched `program`.
    """
    script = read_script(text_of(path), str(path))
    commands: list[tuple[Settings, Mapping[str, Any], list[str]]] = []
    for command in script.commands:
        start = next((i for i, word in enumerate(command) if re.search(program, word)), None)
        if command[:1] == ["echo"]:
            continue
        if start is not None and command[start + 1 : start + 2] == ["vllm-serve"]:  # an inference server, not training
            continue
        if pattern is not None and not re.search(pattern, " ".join(command)):
            continue
        if start is not None and (settings := dict(flag_words(command[start + 1 :]))):
            commands.append((settings, dict(flag_words(command[:start])), command[start:]))
    if not commands:
        raise ConfigError(f"{path}: no command with --flags of {called}{_elsewhere(script)}")
    flags, launcher, words = max(reversed(commands), key=lambda one: len(one[0]))
    _refuse_unknown(path, words, script)
    return flags, [*script.notes, *_left_out(path, len(commands))], launcher, words


def _left_out(path: Path, commands: int) -> list[str]:
    return [f"{path.name} has {commands} such commands; the one with the most keys was used"] if commands > 1 else []


def flat_yaml(path: Path) -> Settings:
    """Read a YAML file of flags; texts are parsed as scalars."""
    return {key: scalar(value) if isinstance(value, str) else value for key, value in read_yaml(path).items()}


def flag_words(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (flag, value) of `--flag value` words; True for a flag without a value, a list for one with several.

    Example:
        >>> dict(flag_words("--lr 1e-6 --bf16 --names a b".split()))
        {'lr': 1e-06, 'bf16': True, 'names': ['a', 'b']}
    """
    flag: str | None = None
    values: list[Any] = []
    for word in [*words, "--"]:
        if re.match(r"-[A-Za-z]", word):  # a short option such as `-m` ends the flag before it
            word = "--"
        if not word.startswith("--"):
            values.append(scalar(word))
            continue
        if flag:
            yield flag, True if not values else values[0] if len(values) == 1 else values
        flag, equals, value = word[2:].partition("=")
        values = [scalar(value)] if equals else []


def flat(tree: Mapping[str, Any], prefix: str = "") -> Settings:
    """Flatten a nested dict to dotted keys; texts are parsed as scalars.

    Example:
        >>> flat({"a": {"b": 1, "c": {}}})
        {'a.b': 1, 'a.c': {}}
    """
    flattened: Settings = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flattened |= flat(value, f"{prefix}{key}.")
        else:
            flattened[f"{prefix}{key}"] = scalar(value) if isinstance(value, str) else value
    return flattened


def text_of(path: Path) -> str:
    """Read a text file.

    Raises:
        ConfigError: it cannot be read, or is not text (a pickle, for example, which can run code when opened).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not text" if isinstance(error, UnicodeDecodeError) else "cannot be read"
        hint = "; training_args.bin is a pickle, which can run code when opened: give the script or the YAML file"
        raise ConfigError(f"{path} {reason}{hint if path.suffix in ('.bin', '.pt', '.pkl') else ''}") from None
    return text


def hub_source(name: str, config: Any = None, split: Any = None, revision: Any = None) -> str:
    """Return the `data.train` syntax of a data set of the Hugging Face hub; a path is unchanged.

    Example:
        >>> hub_source("openai/gsm8k", "main", "train"), hub_source("trl-lib/tldr", split="train"), hub_source("./rows")
        ('openai/gsm8k:main:train', 'trl-lib/tldr::train', './rows')
    """
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        return name
    parts = f":{config or ''}" * bool(config or split) + f":{split}" * bool(split)
    return f"{name}{parts}" + f"@{revision}" * bool(revision)
