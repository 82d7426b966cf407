"""Read the commands of a shell script, with the script's own variables expanded and its conditions decided, without a
shell.
"""

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from atomrl.config import ConfigError

_EXPRESSION, _BRACED = r"[^()]*", r"[^{}]*"
for _ in range(4):  # brackets within brackets
    _EXPRESSION = rf"(?:[^()]|\({_EXPRESSION}\))*"
    _BRACED = rf"(?:[^{{}}]|\$\{{{_BRACED}\}})*"
_TOKEN = re.compile(
    r"'[^']*'"
    rf'|"(?:\\.|\$\{{{_BRACED}\}}|[^"\\])*"'
    r"|\\."
    r"|(?<!\S)\#.*"
    rf"|\$\(\({_EXPRESSION}\)\)"
    rf"|\$\{{{_BRACED}\}}"
    r"|\$(?:[A-Za-z_]\w*|[@*\d])",
    re.DOTALL,
)
_ARRAY_VALUE = rf"(?<=[\w+]=)\((?:{_TOKEN.pattern}|\$\({_EXPRESSION}\)|[^()])*\)"
_END = re.compile(
    rf"{_TOKEN.pattern}|{_ARRAY_VALUE}|\$\({_EXPRESSION}\)|`[^`]*`"
    r"|(?P<end>;;?|&&|\|\|?|(?<![<>&])&(?![&>]))",
    re.DOTALL,
)
_VARIABLE = re.compile(
    rf"\$\(\((?P<sum>{_EXPRESSION})\)\)|\$\{{(?P<braced>{_BRACED})\}}|\$(?P<plain>[A-Za-z_]\w*|[@*\d])"
)
_INSIDE = re.compile(
    r"(?P<name>\w*)(?:\[[@*]\])?(?:(?P<default>:?[-=+])|:(?P<start>\s*-?\d+)(?::(?P<count>\d+))?$|(?P<trim>##?|%%?))?(?P<rest>.*)",
    re.DOTALL,
)
"""The forms of `${...}`: default, substring, removed prefix or suffix."""
_ASSIGNMENT = re.compile(
    r"(?:export\s+|local\s+|readonly\s+|declare\s+(?:-\w+\s+)*)?(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=(?P<value>.*)",
    re.DOTALL,
)
_ARRAY = re.compile(r"(?:^|\s|\))[A-Za-z_]\w*\+?=(?=\()")
_DOCUMENT = re.compile(
    r"^[ \t]*read\b[^\n]*?(?P<name>[A-Za-z_]\w*)[ \t]*<<-?[ \t]*['\"]?(?P<end>\w+)['\"]?[ \t]*\n"
    r"(?P<body>.*?)\n\s*(?P=end)[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
_SUBSTITUTION = re.compile(rf"'[^']*'|\$\((?!\()(?P<command>{_EXPRESSION})\)|`(?P<old>[^`]*)`", re.DOTALL)
_SUM = re.compile(rf"\$\(\({_EXPRESSION}\)\)")
_KEPT = re.compile("\x01(\\d+)\x01")
"""A command substitution whose output is not known, within a word."""
REFERENCE = re.compile(r"\$\{?(\w+)(?:\[[@*]\])?\}?")
"""A variable, or all words of an array, that was not expanded."""
MOST_CHARACTERS = 60_000
"""Characters of a script, with the values of its variables: the time to read one grows with their square."""
LONGEST_PATH = 4096
"""Characters of a value from which `${NAME##pattern}` removes a part."""
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARISONS = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
    "-le": operator.le, ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip


@dataclass
class Script:
    """The commands of a script."""

    commands: list[list[str]] = field(default_factory=list)
    """The words of each command."""
    notes: list[str] = field(default_factory=list)
    """Notes on values that only a shell would know."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Variables whose value depends on a condition that only a shell knows -> that condition."""
    exported: dict[str, str] = field(default_factory=dict)
    """Variables that scripts which it starts have too."""


def read_script(
    text: str, source: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Script:
    """Parse the commands of a shell script.

    Expands variables that the script sets, `${NAME:-default}`, integer arithmetic, and commands that only need the
    script's path: `$(dirname "$0")`, `$(cd .. && pwd)`. Variables of the environment stay as written, with a note, and
    so do other command substitutions, each within one word. The text of `bash -c` is read too, and so is a script that
    `source` names, if it is there.

    `if`, `case`, `while`, `&&` and `||` are decided where they compare such values; a variable that the script does not
    set is empty there. Where only a shell knows (`[ -f FILE ]`), a variable that is set there has no value, and so has
    that of a `for`.

    Args:
        source: the script's path.
        arguments: words after the script's name, which it has as `$1`, `$@` and so on.
        environment: variables that are set when it is started.

    Raises:
        ConfigError: an unclosed quote.

    Example:
        >>> read_script('N=${N:-4}\\ntrain a.n=$((N * 2)) \\\\\\n  b="$N x"  # why', "s.sh").commands
        [['train', 'a.n=8', 'b=4 x']]
        >>> read_script('A=x; if [ "$A" = x ]; then N=1; else N=2; fi; train n=$N', "s.sh").commands
        [['train', 'n=1']]
    """
    reading = _Reading(Path(source).resolve(), arguments, environment or {})
    reading.read(text, source)
    if reading.defaults:
        values = ", ".join(f"{name}={value}" for name, value in reading.defaults.items())
        reading.notes.append(f"environment variables are read as not set, so these are the script's defaults: {values}")
    exported = {name: value for name in sorted(reading.exported) if (value := reading.variables.get(name)) is not None}
    notes = [reading.restored(note) for note in dict.fromkeys(reading.notes)]
    return Script(reading.commands, notes, reading.unknown, exported)


def _without_documents(text: str, variables: dict[str, str]) -> str:
    """Remove here-documents (`read -r -d '' NAME <<EOF ... EOF`) from the text, and set their variables."""

    def read(match: re.Match[str]) -> str:
        variables[match["name"]] = re.sub(r"\\?\n", " ", match["body"]).strip()
        return ""

    return _DOCUMENT.sub(read, text.replace("\r\n", "\n"))


def _lines(text: str, source: str) -> Iterator[str]:
    """Yield logical lines: those continued in a quote, an array or after a backslash are joined."""
    rest, begun, number = text.replace("\r\n", "\n").split("\n"), "", 0
    array, depth, quoted = "", 0, False  # the lines before of an open array, its open brackets; a quote is open
    for index, line in enumerate(rest, 1):
        if not begun and line.lstrip().startswith("#"):  # a backslash does not continue a comment
            continue
        number = number or index
        begun += line
        if begun.endswith("\\") and not begun.endswith("\\\\"):
            begun = f"{begun[:-1]} "
            continue
        quoted = quoted and not re.search("['\"]", line)
        try:
            quoted or shlex.split(_uncommented(begun))
        except ValueError:
            quoted = True
        if quoted:
            begun += "\n"
            continue
        start = None if depth else _ARRAY.search(begun)
        if depth or start is not None:
            depth += _open_brackets(begun if start is None else begun[start.end() :])
            if depth > 0:
                array, begun = f"{array}{_uncommented(begun)} ", ""
                continue
        yield f"{array}{begun}".strip()
        array, begun, depth, number = "", "", 0, 0
    begun = f"{array}{begun}".strip()
    if begun and rest[-1].endswith("\\"):  # it ends the file, as in a line that was cut
        yield begun
    elif begun:
        raise ConfigError(f"{source}:{number}: unclosed quote or bracket of an array")


def _open_brackets(text: str) -> int:
    """Return how many brackets are opened in a text and not closed."""
    plain = re.sub(rf"\$\({_EXPRESSION}\)", "", _TOKEN.sub("", text))
    return plain.count("(") - plain.count(")")


def _parts(line: str) -> Iterator[tuple[str, str]]:
    """Split a line at `;`, `;;`, `&&`, `||`, `|` and `&`, and after `then`, `else` and `do`.

    Example:
        >>> list(_parts('if [ "$a" ]; then b="1;2"; fi && d 2>&1'))
        [('if [ "$a" ]', ';'), ('then', ';'), ('b="1;2"', ';'), ('fi', '&&'), ('d 2>&1', '')]
    """
    if "<<" in line:  # separators in a here-document are text
        yield line, ""
        return
    ends = [(match.start(), match.end(), match["end"]) for match in _END.finditer(line) if match["end"]]
    starts = [0, *(end for _, end, _ in ends)]
    for start, (stop, _, end) in zip(starts, [*ends, (len(line), 0, "")], strict=True):
        part = line[start:stop].strip()
        while word := re.match(r"(then|else|do)\s+", part):
            yield word[1], ";"
            part = part[word.end() :]
        if part or end == ";;":
            yield part, end


def _uncommented(text: str) -> str:
    """Remove the comments of a line."""
    return _TOKEN.sub(lambda match: "" if match.group().startswith("#") else match.group(), text)


def _both(one: bool | None, other: bool | None) -> bool | None:
    """Return whether both are true; None: only a shell knows."""
    return False if one is False or other is False else None if one is None or other is None else True


def _not(one: bool | None) -> bool | None:
    return None if one is None else not one


@dataclass
class _Block:
    """An `if`, `case` or loop that is open."""

    kind: str
    condition: str
    runs: bool | None = True
    """Whether the current branch runs; None: only a shell knows."""
    taken: bool | None = False
    """Whether a branch before it has run."""
    subject: str | None = None
    """The value that `case` compares; None: only a shell knows."""
    pattern: str | None = None
    """The pattern of `case` that is being read."""

    def branch(self, holds: bool | None) -> None:
        """Begin a branch whose condition has this value."""
        self.runs = _both(_not(self.taken), holds)
        self.taken = True if self.taken or self.runs else None if None in (self.taken, self.runs) else False


class _Reading:
    """Interprets the parts of a script's lines; holds its variables and commands."""

    def __init__(self, place: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.place, self.arguments = place, arguments
        self.size = 0
        """Characters of the texts that were read and of the values that were put into them."""
        self.variables: dict[str, str] = {"HOME": os.path.expanduser("~"), **environment, "0": str(place)}
        self.variables |= {str(number): word for number, word in enumerate(arguments, start=1)}
        self.exported = set(environment)
        self.sourced: list[Path] = []
        """Scripts that are being read by `source`, the innermost last."""
        self.unknown: dict[str, str] = {}
        self.kept: list[str] = []
        """Command substitutions that stay as written."""
        self.commands: list[list[str]] = []
        self.notes: list[str] = []
        self.defaults: dict[str, str] = {}
        """Variables that the script does not set, with their default in it."""
        self.blocks: list[_Block] = []
        self.condition: list[tuple[str, str]] | None = None
        """The parts of a condition that is being read."""
        self.chain: tuple[bool | None, str] = (True, ";")
        """Result of the parts before in a list with `&&` and `||`, and the separator after them."""

    def read(self, text: str, source: str) -> None:
        """Read a text.

        Raises:
            ConfigError: an unclosed quote, or the text or the values of its variables are too long.
        """
        self._count(text)
        for line in _lines(_without_documents(text, self.variables), source):
            try:
                for part, end in _parts(line):
                    self.part(part, end)
            except ConfigError:
                raise
            except ValueError as error:  # quotes in the value of a variable
                raise ConfigError(f"{source}: {line!r} cannot be parsed as shell: {error}") from None

    def _count(self, text: str) -> str:
        """Return a text that is read or put into one, and count its characters: a value can double in each line."""
        self.size += len(text)
        if self.size > MOST_CHARACTERS:
            raise ConfigError(
                f"{self.place}: with its variables and the scripts that it reads it has over {MOST_CHARACTERS:,} "
                "characters: write the command that starts the training into a script of its own"
            )
        return text

    def _source(self, name: str, arguments: Sequence[str]) -> bool:
        """Read another script in place of `source NAME ARGUMENTS`; False if it is not there."""
        places = [folder / name for folder in (*self.place.parents, *(one.parent for one in self.sourced))]
        file = next((place for place in places if place.suffix == ".sh" and place.is_file()), None)
        if file is None or file in (self.place, *self.sourced):
            return False
        before, own = {key: value for key, value in self.variables.items() if key.isdigit()}, self.arguments
        self.sourced.append(file)
        self.notes.append(f"{name} is read where the script reads it")
        self.arguments = arguments or own  # without arguments it sees the script's
        self.variables |= {str(number): word for number, word in enumerate(arguments, start=1)}
        self.read(file.read_text(encoding="utf-8", errors="replace"), str(file))
        self.sourced.pop()
        self.arguments = own
        self.variables = {key: value for key, value in self.variables.items() if not key.isdigit()} | before
        return True

    def _runs(self, blocks: Sequence[_Block]) -> bool | None:
        """Return whether a line within these blocks runs; None: only a shell knows."""
        state: bool | None = True
        for block in blocks:
            state = _both(state, block.runs)
        return state

    def part(self, text: str, end: str) -> None:
        """Read a part of a line, and the separator after it."""
        text = _uncommented(text).strip()
        word, _, rest = text.partition(" ")
        if self.condition is not None:
            if word in ("then", "do"):
                self._decide()
            else:
                self.condition.append((text, end))
        elif word in ("if", "while", "until", "for", "select"):
            self.blocks.append(_Block(word, text))
            self.condition = [(rest, end)]
            if word in ("for", "select") and self._runs(self.blocks[:-1]) is not False:
                self._forget(rest.partition(" ")[0], text)
        elif word == "elif":
            self.condition = [(rest, end)]
        elif word == "case":
            self._case(text, end)
        elif self.blocks and self.blocks[-1].pattern is not None and word != "esac":
            self._pattern(text, end)
        else:
            self._command(word, text, end)

    def _command(self, word: str, text: str, end: str) -> None:
        if word == "else" and self.blocks:
            self.blocks[-1].branch(True)
        elif word in ("fi", "done", "esac"):
            self.blocks[-1:] = []
        elif text and word not in ("then", "do", "{", "}"):
            result, before = self.chain
            holds = self._runs(self.blocks)
            if before in ("&&", "||"):
                holds = _both(holds, result if before == "&&" else _not(result))
            done: bool | None = True
            if holds is not False:
                done = self._test(text) if text.startswith(("[ ", "[[ ", "((")) else self._line(text, holds, end)
            self.chain = (result if holds is False else None if holds is None else done), end
        if end == ";;" and self.blocks and self.blocks[-1].kind == "case":
            self.blocks[-1].pattern = ""
        if end not in ("&&", "||"):
            self.chain = True, ";"

    def _decide(self) -> None:
        block, parts = self.blocks[-1], self.condition or []
        self.condition = None
        if block.kind in ("for", "select", "until") or self._runs(self.blocks[:-1]) is False:
            holds = None
        else:
            holds = self._series([one for part in parts for one in self._tokens(*part)])
        if block.kind == "while" and holds:  # the number of passes is not known
            holds = None
        block.branch(holds)

    def _tokens(self, text: str, end: str) -> Iterator[str]:
        while match := re.match(r"([!{])\s+", text):
            yield match[1]
            text = text[match.end() :]
        if text:
            yield text
        if end:
            yield end if end in ("&&", "||") else ";"

    def _series(self, tokens: list[str]) -> bool | None:
        """Evaluate tests that `&&`, `||` and `;` join, up to a closing `}`."""

        def one() -> bool | None:
            token = tokens.pop(0)
            if token == "!":
                return _not(one())
            return self._series(tokens) if token == "{" else self._test(token)

        value = one() if tokens else None
        while tokens and (join := tokens.pop(0)) != "}":
            if tokens and tokens[0] == "}":
                continue
            if not tokens:
                break
            right = one()
            value = (
                _both(value, right)
                if join == "&&"
                else _not(_both(_not(value), _not(right)))
                if join == "||"
                else right
            )
        return value

    def _test(self, text: str) -> bool | None:
        """Evaluate `[ a = b ]`, `[[ a == b ]]`, `(( a > b ))`, `true` and `false`; None: only a shell knows."""
        bracket, count = text.startswith("[") or text.endswith("]"), str(len(self.arguments))
        inner = re.sub(r"^(\[\[?|\(\()|(\]\]?|\)\))$", "", text.replace("$#", count).replace("${#@}", count)).strip()
        if text.startswith("(("):
            inner = re.sub(r"(<=|>=|==|!=|<|>)", r" \1 ", inner)
            inner = re.sub(r"(?<![\w$])[A-Za-z_]\w*", r"${\g<0>}", inner)
        inner = _SUBSTITUTION.sub(self._substituted, inner)
        said = len(self.notes)
        expanded = shlex.split(self.expanded(inner))
        self.notes[said:] = [note for note in self.notes[said:] if not note.endswith("copied as written")]
        words = [self._word_of_test(word) for word in expanded]
        if None in words:
            return None
        match words:
            case ["true" | ":"] if not bracket:
                return True
            case ["false"] if not bracket:
                return False
            case ["!", *rest] if bracket:
                return _not(self._test(f"[ {shlex.join(str(word) for word in rest)} ]"))
            case ["-z" | "-n" as kind, value]:
                return (value == "") == (kind == "-z")
            case ["-z" | "-n" as kind]:  # the word is empty and not quoted
                return kind == "-z"
            case [str(value)] if bracket:
                return value != ""
            case [str(left), "=" | "==" | "!=" as kind, str(right)]:
                return fnmatchcase(left, right) == (kind != "!=")
            case [str(left), str(kind), str(right)] if kind in _COMPARISONS:
                return self._compared(left, kind, right)
        return None

    def _compared(self, left: str, kind: str, right: str) -> bool | None:
        try:
            return bool(_COMPARISONS[kind](int(left), int(right)))
        except ValueError:
            return None

    def _word_of_test(self, word: str) -> str | None:
        """Return a word of a test, with variables that the script does not set empty; None: only a shell knows it."""
        names = REFERENCE.findall(word)
        if _KEPT.search(word) or any(name in self.unknown for name in names):
            return None
        plain = REFERENCE.sub("", word)
        self.notes += [
            "the script is read as started without arguments"
            if name.isdigit()
            else f"{name} is not set in the script: it is empty in a condition"
            for name in names
        ]
        return None if "$" in plain else plain

    def _case(self, text: str, end: str) -> None:
        match = re.match(r"case\s+(.*?)\s+in\b\s*(.*)", text, re.DOTALL)
        if match is None:
            raise ValueError(f"case without in: {text}")
        block = _Block("case", f"case {match[1]}", runs=False, pattern="")
        if self._runs(self.blocks) is not False:
            subject = self.expanded(_SUBSTITUTION.sub(self._substituted, match[1]))
            block.subject = self._word_of_test(" ".join(shlex.split(subject)))
        self.blocks.append(block)
        if match[2]:
            self._pattern(match[2], end)

    def _pattern(self, text: str, end: str) -> None:
        block = self.blocks[-1]
        block.pattern = f"{block.pattern}{text}"
        match = re.match(r"\(?\s*([^)]*?)\s*\)\s*(.*)", block.pattern, re.DOTALL)
        if match is None:
            block.pattern += end
            return
        patterns = [pattern.strip().strip("\"'") for pattern in match[1].split("|")]
        subject = block.subject
        holds = None if subject is None else any(fnmatchcase(subject, pattern) for pattern in patterns)
        block.branch(True if patterns == ["*"] else holds)
        block.pattern = None
        self.part(match[2], end)

    def _line(self, line: str, holds: bool | None, end: str) -> bool | None:
        """Read a command or assignment, and return its result: that of a command is known only to the shell."""
        if line.startswith("export "):
            self.exported |= set(re.findall(r"(?<=\s)([A-Za-z_]\w*)(?=[=\s]|$)", line))
        self.variables["BASH_SOURCE"] = str([self.place, *self.sourced][-1])
        line = _SUBSTITUTION.sub(self._substituted, line.replace("${BASH_SOURCE[0]}", "$BASH_SOURCE"))
        assigned = _ASSIGNMENT.fullmatch(line)
        if assigned and self._is_one_word(assigned["value"]):
            self._assign(assigned["name"], assigned["value"], bool(assigned["more"]), holds)
            return True
        expanded = shlex.split(self.expanded(line).removesuffix("\\"))
        several = [_ASSIGNMENT.fullmatch(word) for word in expanded[expanded[:1] == ["export"] :]]
        if several and all(several):  # A=1 B=2
            for one in filter(None, several):
                self._assign(one["name"], shlex.quote(one["value"]), bool(one["more"]), holds)
            return True
        words = [self.restored(word) for word in expanded]
        if words in (["true"], ["false"]):
            return words == ["true"]
        if words[0] in ("source", ".") and len(words) > 1 and holds and self._source(words[1], words[2:]):
            return True
        self.commands.append([word for word in words if word not in ("\\", "&")])
        for shell, option, text in zip(words, words[1:], words[2:], strict=False):
            if re.search(r"(^|/)(ba)?sh$", shell) and re.fullmatch(r"-l?c", option):
                self.commands += read_script(text, str(self.place)).commands
        return None if end == "||" else True

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
            quiet = re.sub(r"\s(?:[12&]?>\s*/dev/null|2>&1)(?!\S)", "", f" {inner}")
            words = shlex.split(self.expanded(quiet.replace("&&", " && ").replace(";", " && ")))
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
            case ["python" | "python3", "-c", "import torch_npu", "&&", "echo", _, "||", "echo", other]:
                self.notes.append("the script is read as on a machine without NPUs")
                return other
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

    def _assign(self, name: str, value: str, more: bool, holds: bool | None) -> None:
        if holds is None or (more and name in self.unknown):
            condition = next((block.condition for block in self.blocks if block.runs is None), "a command before it")
            self._forget(name, condition)
            return
        array = value.startswith("(")
        if array:
            value = self.expanded(value.strip().removeprefix("(").removesuffix(")").replace("\n", " "))
        else:
            value = " ".join(shlex.split(self.expanded(value)))
        value = re.sub(r"\\\s*\n", " ", value)
        self.unknown.pop(name, None)
        self.variables[name] = self.variables.get(name, "") + (" " if array else "") * more + value if more else value

    def _forget(self, name: str, condition: str) -> None:
        """Record that only a shell knows the value of a variable."""
        self.unknown.setdefault(name, condition)
        self.variables.pop(name, None)

    def expanded(self, text: str) -> str:
        """Expand the variables of a line, except in single quotes."""

        def put(match: re.Match[str]) -> str:
            token = match.group()
            if token.startswith("'") or token.startswith("\\"):
                return token
            if token.startswith('"'):
                inner = token[1:-1]
                if inner in ("$@", "${@}"):
                    return shlex.join(self.arguments)
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
        if inside in ("@", "*"):  # without quotes: a word with spaces is several
            return shlex.join(" ".join(self.arguments).split())
        if inside == "PWD":
            return str(self._started())
        return self._count(self._braced(_INSIDE.fullmatch(inside), reference))

    def _braced(self, inside: re.Match[str] | None, reference: str) -> str:
        if inside is not None and inside["name"] in self.unknown:
            condition = self.unknown[inside["name"]]
            self.notes.append(f"{inside['name']} is set under a condition that only the shell knows ({condition})")
            return reference
        if inside is not None and inside["name"] in self.variables:
            value, rest = self.variables[inside["name"]], self.expanded(inside["rest"])
            if inside["trim"] and len(value) <= LONGEST_PATH:
                return _trimmed(value, inside["trim"], rest)
            if inside["start"]:
                start, count = int(inside["start"]), inside["count"]
                return value[start:] if count is None else value[start:][: int(count)]
            if (inside["default"] or "").endswith("+"):
                return rest.strip("\"'") if value or inside["default"] == "+" else ""
            if value == "" and (inside["default"] or "").startswith(":"):
                return rest.strip("\"'") if inside["default"] == ":-" else rest
            if inside["default"] or not rest:
                return value
        elif inside is not None and (inside["default"] or "").endswith("+"):
            self.defaults[inside["name"]] = ""
            return ""
        elif inside is not None and inside["default"]:
            default = inside["rest"].strip("\"'")
            self.defaults[inside["name"]] = default
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
