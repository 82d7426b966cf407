"""Read the keys of another library's config from a YAML file or a shell script, without a shell."""

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError, read_yaml
from atomrl.config.loading import scalar

# --------------------------------------------------------------------------------------------------------------------
# Shell scripts: the words of their commands, with the script's own variables expanded.

_EXPRESSION = r"(?:[^()]|\([^()]*\))*"
_BRACED = r"(?:[^{}]|\$\{[^{}]*\})*"
_TOKEN = re.compile(
    r"'[^']*'"
    r'|"(?:\\.|[^"\\])*"'
    r"|\\."
    r"|(?<!\S)\#.*"
    rf"|\$\(\({_EXPRESSION}\)\)"
    rf"|\$\{{{_BRACED}\}}"
    r"|\$(?:[A-Za-z_]\w*|[@*\d])",
    re.DOTALL,
)
_END = re.compile(rf"{_TOKEN.pattern}|\$\({_EXPRESSION}\)|`[^`]*`|(?P<end>;;?|&&|\|\|?|(?<![<>&])&(?![&>]))", re.DOTALL)
_VARIABLE = re.compile(
    rf"\$\(\((?P<sum>{_EXPRESSION})\)\)|\$\{{(?P<braced>{_BRACED})\}}|\$(?P<plain>[A-Za-z_]\w*|[@*\d])"
)
_INSIDE = re.compile(
    r"(?P<name>\w*)(?:\[[@*]\])?(?:(?P<default>:?[-=])|:(?P<start>\s*-?\d+)(?::(?P<count>\d+))?$|(?P<trim>##?|%%?))?(?P<rest>.*)",
    re.DOTALL,
)
"""The forms of `${...}`: default, substring, removed prefix or suffix."""
_ASSIGNMENT = re.compile(
    r"(?:export\s+|local\s+|readonly\s+|declare\s+(?:-\w+\s+)*)?(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=(?P<value>.*)",
    re.DOTALL,
)
_ARRAY = re.compile(r"(?:export\s+|declare\s+(?:-\w+\s+)*)?[A-Za-z_]\w*\+?=\(")
_DOCUMENT = re.compile(
    r"^[ \t]*read\b[^\n]*?(?P<name>[A-Za-z_]\w*)[ \t]*<<-?[ \t]*['\"]?(?P<end>\w+)['\"]?[ \t]*\n"
    r"(?P<body>.*?)\n\s*(?P=end)[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
_SUBSTITUTION = re.compile(rf"'[^']*'|\$\((?!\()(?P<command>{_EXPRESSION})\)|`(?P<old>[^`]*)`", re.DOTALL)
_SUM = re.compile(rf"\$\(\({_EXPRESSION}\)\)")
_KEPT = re.compile("\x01(\\d+)\x01")
"""A command substitution whose output is not known, within a word."""
_OPENS, _CLOSES = {"if", "for", "while", "until", "case"}, {"fi", "done", "esac"}
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@dataclass
class Script:
    """The commands of a script."""

    commands: list[list[str]] = field(default_factory=list)
    """The words of each command."""
    notes: list[str] = field(default_factory=list)
    """Notes on values that only a shell would know."""


def read_script(text: str, source: str) -> Script:
    """Parse the commands of a shell script.

    Expands variables that the script sets, `${NAME:-default}`, integer arithmetic, and commands that only need the
    script's path: `$(dirname "$0")`, `$(cd .. && pwd)`. Variables of the environment and other command substitutions
    stay as written, each within one word, with a note. The text of `bash -c` is read too.

    Args:
        source: the script's path.

    Raises:
        ConfigError: an unclosed quote.

    Example:
        >>> read_script('N=${N:-4}\\ntrain a.n=$((N * 2)) \\\\\\n  b="$N x"  # why', "s.sh").commands
        [['train', 'a.n=8', 'b=4 x']]
    """
    reading = _Reading(Path(source).resolve())
    for line in _lines(_without_documents(text, reading.variables), source):
        try:
            for part in _parts(line):
                reading.line(part)
        except ValueError as error:  # quotes in the value of a variable
            raise ConfigError(f"{source}: {line!r} cannot be parsed as shell: {error}") from None
    return Script(reading.commands, [reading.restored(note) for note in dict.fromkeys(reading.notes)])


def _without_documents(text: str, variables: dict[str, str]) -> str:
    """Remove here-documents (`read -r -d '' NAME <<EOF ... EOF`) from the text, and set their variables."""

    def read(match: re.Match[str]) -> str:
        variables[match["name"]] = re.sub(r"\\?\n", " ", match["body"]).strip()
        return ""

    return _DOCUMENT.sub(read, text.replace("\r\n", "\n"))


def _lines(text: str, source: str) -> Iterator[str]:
    """Yield logical lines: those continued in a quote, an array or after a backslash are joined."""
    rest, begun, number = text.replace("\r\n", "\n").split("\n"), "", 0
    for index, line in enumerate(rest, 1):
        if not begun and line.lstrip().startswith("#"):  # a backslash does not continue a comment
            continue
        number = number or index
        begun += line
        if begun.endswith("\\") and not begun.endswith("\\\\"):
            begun = f"{begun[:-1]} "
            continue
        try:
            words = shlex.split(_TOKEN.sub(_without_comment, begun))
        except ValueError:  # a quote is open
            begun += "\n"
            continue
        if _ARRAY.match(begun.strip()) and ")" not in "".join(words[-1:]):
            begun = _TOKEN.sub(_without_comment, begun) + " "
            continue
        yield begun.strip()
        begun, number = "", 0
    if begun.strip():
        raise ConfigError(f"{source}:{number}: unclosed quote or bracket of an array")


def _parts(line: str) -> Iterator[str]:
    """Split a line at `;`, `&&`, `||`, `|` and `&`, and after `then`, `else` and `do`.

    Example:
        >>> list(_parts('if [ "$a" ]; then b="1;2"; else c=3; fi && d 2>&1'))
        ['if [ "$a" ]', 'then', 'b="1;2"', 'else', 'c=3', 'fi', 'd 2>&1']
    """
    if _ARRAY.match(line) or "<<" in line:  # separators in an array or here-document are text
        yield line
        return
    ends = [(match.start(), match.end()) for match in _END.finditer(line) if match["end"]]
    for start, end in zip([0, *(end for _, end in ends)], [*(start for start, _ in ends), len(line)], strict=True):
        part = line[start:end].strip()
        while word := re.match(r"(then|else|do)\s+", part):
            yield word[1]
            part = part[word.end() :]
        if part:
            yield part


def _without_comment(match: re.Match[str]) -> str:
    return "" if match.group().startswith("#") else match.group()


class _Reading:
    """Interprets the lines of a script; holds its variables and commands."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.variables: dict[str, str] = {"HOME": os.path.expanduser("~"), "0": str(place)}
        self.kept: list[str] = []
        """Command substitutions that stay as written."""
        self.commands: list[list[str]] = []
        self.notes: list[str] = []
        self.depth = 0

    def line(self, line: str) -> None:
        line = _TOKEN.sub(_without_comment, line).strip()
        first = line.split(maxsplit=1)[0].rstrip(";") if line else ""
        self.depth += (first in _OPENS) - (first in _CLOSES)
        if not line or first in _OPENS | _CLOSES | {"then", "else", "elif", "do", "}", "{"}:
            return
        line = _SUBSTITUTION.sub(self._substituted, line.replace("${BASH_SOURCE[0]}", "$0"))
        assigned = _ASSIGNMENT.fullmatch(line)
        if assigned and self._is_one_word(assigned["value"]):
            self._assign(assigned["name"], assigned["value"], bool(assigned["more"]))
            return
        words = [self.restored(word) for word in shlex.split(self.expanded(line))]
        self.commands.append([word for word in words if word not in ("\\", "&")])
        for shell, option, text in zip(words, words[1:], words[2:], strict=False):
            if re.search(r"(^|/)(ba)?sh$", shell) and re.fullmatch(r"-l?c", option):
                self.commands += read_script(text, str(self.place)).commands

    def restored(self, word: str) -> str:
        """Return a word with its command substitutions as written."""
        return _KEPT.sub(lambda match: self.kept[int(match[1])], word)

    def _substituted(self, match: re.Match[str]) -> str:
        """Return the output of a command that only needs the script's path; a mark for any other."""
        command = match["command"] if match["command"] is not None else match["old"]
        if command is None:  # single quotes
            return match.group()
        inner = _SUBSTITUTION.sub(self._substituted, command)
        try:
            words = shlex.split(self.expanded(inner.replace("&&", " && ").replace(";", " && ")))
        except ValueError:
            words = []
        if not _KEPT.search(inner) and (output := self._output([word for word in words if word != "--"])) is not None:
            return shlex.quote(output)
        self.kept.append(self.restored(match.group()))
        return f"\x01{len(self.kept) - 1}\x01"

    def _output(self, words: list[str]) -> str | None:
        match words:
            case ["dirname", path]:
                return os.path.dirname(path) or "."
            case ["basename", path]:
                return os.path.basename(path)
            case ["realpath", path] | ["readlink", "-f", path] | ["cd", path, "&&", "pwd"] if "$" not in path:
                return os.path.normpath(self._started() / path)
            case ["pwd"]:
                return str(self._started())
        return None

    def _started(self) -> Path:
        """Return the folder in which the script is started: its repository's root if it lies in one, else its own."""
        roots = ("pyproject.toml", "setup.py", ".git")
        root = next((one for one in self.place.parents if any((one / name).exists() for name in roots)), None)
        folder = root or self.place.parent
        self.notes.append(f"the script is read as started in {folder}")
        return folder

    def _is_one_word(self, value: str) -> bool:
        return value.startswith("(") or len(shlex.split(_SUM.sub("0", value))) <= 1

    def _assign(self, name: str, value: str, more: bool) -> None:
        array = value.startswith("(")
        if array:
            value = self.expanded(value.strip().removeprefix("(").removesuffix(")").replace("\n", " "))
        else:
            value = " ".join(shlex.split(self.expanded(value)))
        value = re.sub(r"\\\s*\n", " ", value)
        if self.depth and name in self.variables and self.variables[name] != value:
            self.notes.append(f"{name} is set under a condition: the last value, {value!r}, was used")
        self.variables[name] = self.variables.get(name, "") + (" " if array else "") * more + value if more else value

    def expanded(self, text: str) -> str:
        """Expand the variables of a line, except in single quotes."""

        def put(match: re.Match[str]) -> str:
            token = match.group()
            if token.startswith("'") or token.startswith("\\"):
                return token
            if token.startswith('"'):
                inner = token[1:-1]
                if re.fullmatch(r"\$\{\w+\[[@*]\]\}", inner):  # the words of an array
                    return self.value(inner)
                return '"' + _VARIABLE.sub(lambda v: self.value(v.group()).replace('"', '\\"'), inner) + '"'
            return self.value(token)

        return _TOKEN.sub(put, text)

    def value(self, reference: str) -> str:
        """Expand `$NAME`, `${NAME:-default}` or `$((sum))`; a reference that the script does not set stays as it is."""
        match = _VARIABLE.fullmatch(reference)
        if match is None:
            return reference
        if match["sum"] is not None:
            return self._sum(match["sum"], reference)
        inside = match["braced"] if match["braced"] is not None else match["plain"]
        if inside in ("@", "*"):  # the script's arguments
            return ""
        return self._braced(_INSIDE.fullmatch(inside), reference)

    def _braced(self, inside: re.Match[str] | None, reference: str) -> str:
        if inside is not None and inside["name"] in self.variables:
            value, rest = self.variables[inside["name"]], self.expanded(inside["rest"])
            if inside["trim"]:
                return _trimmed(value, inside["trim"], rest)
            if inside["start"]:
                start, count = int(inside["start"]), inside["count"]
                return value[start:] if count is None else value[start:][: int(count)]
            if value == "" and (inside["default"] or "").startswith(":"):
                return rest.strip("\"'") if inside["default"] == ":-" else rest
            if inside["default"] or not rest:
                return value
        elif inside is not None and inside["default"]:
            default = inside["rest"].strip("\"'")
            self.notes.append(f"{inside['name']} is an environment variable: its default {default!r} was used")
            if inside["default"].endswith("="):
                self.variables[inside["name"]] = self.expanded(default)
            if len(inside["rest"]) > 1 and inside["rest"][0] == inside["rest"][-1] == '"':  # quotes within are text
                return _VARIABLE.sub(lambda match: self.value(match.group()), inside["rest"][1:-1])
            return self.expanded(default)
        self.notes.append(f"{reference} is not set in the script; copied as written")
        return reference

    def _sum(self, expression: str, reference: str) -> str:
        text = _VARIABLE.sub(lambda match: self.value(match.group()), expression)
        text = re.sub(r"[A-Za-z_]\w*", lambda match: self.variables.get(match.group(), match.group()), text)
        try:
            return str(_computed(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
            self.notes.append(f"{reference} is not integer arithmetic on values that the script sets")
            return reference


def _trimmed(value: str, mark: str, pattern: str) -> str:
    """Expand `${NAME#pattern}` (remove a prefix) and `${NAME%pattern}` (a suffix); `##` and `%%` remove the longest.

    Example:
        >>> _trimmed("org/sub/name.sh", "##", "*/"), _trimmed("org/sub/name.sh", "%", ".*")
        ('name.sh', 'org/sub/name')
    """
    cuts = range(len(value) + 1)
    if mark[0] == "#":
        fits = [cut for cut in cuts if fnmatchcase(value[:cut], pattern)] or [0]
        return value[(max if mark == "##" else min)(fits) :]
    fits = [cut for cut in cuts if fnmatchcase(value[cut:], pattern)] or [len(value)]
    return value[: (min if mark == "%%" else max)(fits)]


def _computed(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = _computed(node.left), _computed(node.right)
        if isinstance(node.op, ast.Pow) and not 0 <= right <= 64:
            raise ValueError("a power that is too large")
        return int(_OPERATORS[type(node.op)](left, right))
    raise ValueError(ast.dump(node))


# --------------------------------------------------------------------------------------------------------------------
# Keys of a file: Hydra's `key=value`, or flags.

_REFERENCE = r"\$\{([A-Za-z_][\w.]*)\}"
Settings = dict[str, Any]
"""Dotted key -> value, as given by a file."""


def read_hydra(path: Path, named: Sequence[str] = ()) -> tuple[Settings, list[str], str]:
    """Read a Hydra config: a YAML file, or the `key=value` words of the script's command that has the most of them.

    Args:
        named: names of `--config-name` that are the library's own configs, so that they are not read.

    Returns:
        The keys, notes on what the file alone does not say, and the program of the command, "" for a YAML file.

    Raises:
        ConfigError: it cannot be read, has no such words, or the config of `--config-name` is not there.
    """
    if path.suffix in (".yaml", ".yml"):
        settings = _resolved(flat(read_yaml(path)))
        notes = [f"{key}={value} was copied as written" for key, value in settings.items() if "${" in str(value)]
        return settings, notes, ""
    script = read_script(text_of(path), str(path))
    commands = [(settings, words) for words in script.commands if (settings := dict(_hydra_words(words)))]
    if not commands:
        raise ConfigError(f"{path}: no command with key=value in it{_elsewhere(script)}")
    settings, command = max(commands, key=lambda one: len(one[0]))
    base = _base(path, command, named)
    return _resolved(base | settings), [*script.notes, *_left_out(path, len(commands))], program_of(command)


def program_of(command: Sequence[str]) -> str:
    """Return the module or file that a command starts: the word after `-m`, else the first `.py`; "" if it has none."""
    after = [word for before, word in pairwise(command) if before == "-m"]
    files = [word for word in command if word.endswith(".py") and "=" not in word]
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
    places = [parent / inside for parent in path.resolve().parents] + [Path(folder)]
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
            yield key[1], _value(word[key.end() :])


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
        if start is not None and command[start + 1 : start + 2] == ["vllm-serve"]:  # an inference server, not training
            continue
        if pattern is not None and not re.search(pattern, " ".join(command)):
            continue
        if start is not None and (settings := dict(flag_words(command[start + 1 :]))):
            commands.append((settings, dict(flag_words(command[:start])), command[start:]))
    if not commands:
        raise ConfigError(f"{path}: no command with --flags of {called}{_elsewhere(script)}")
    flags, launcher, words = max(reversed(commands), key=lambda one: len(one[0]))
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
            values.append(_value(word))
            continue
        if flag:
            yield flag, True if not values else values[0] if len(values) == 1 else values
        flag, equals, value = word[2:].partition("=")
        values = [_value(value)] if equals else []


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


def _value(text: str) -> Any:
    return scalar(text)


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
