"""Copy reward functions of a script, with their dependencies, to a file; and find out which rows a script trains on."""

import ast
import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atomrl.tools.importers.python_script import PythonScript, Unknown, free_names
from atomrl.tools.importers.sources import hub_source

UNAVAILABLE = {
    "completion_ids": "tokens are not passed; completion_tokens has their number",
    "trainer_state": "there is no trainer state; the step is not passed either",
    "log_extra": "use a reward with weight 0 to log it",
    "log_metric": "use a reward with weight 0 to log it",
    "environments": "environments have another interface here (docs/guides/environments.md)",
}
"""Arguments that TRL passes to a reward function and AtomRL does not -> the alternative."""
AS_IN_SCRIPT = '''def as_in_script(function):
    """Call a reward with what the script's rows have: MEANING."""

    def called(prompts, completions, **columns):
BODY
        return function(prompts=prompts, completions=completions, **columns)

    return called'''


class CopiedFunctions:
    """Reward functions of a script, and the imports, constants, functions and classes that they use.

    Args:
        script: the script.
        file_name: name of the file that they are written to; a config names them `./file_name:function`.
    """

    def __init__(self, script: PythonScript, file_name: str) -> None:
        self.script, self.file_name = script, file_name
        self.names: list[str] = []
        """Names of the copied reward functions."""
        self.to_do: list[str] = []
        """Names and arguments that are missing in the copy, with their lines."""
        self._statements: dict[tuple[int, int], str] = {}
        self._imports: dict[str, None] = {}
        self._made: list[str] = []
        self._seen: set[int] = set()

    def add(self, node: ast.expr) -> str:
        """Copy the function that an expression evaluates to: a name, a lambda, `partial(f, n=1)`, `Reward(0.5)`.

        Returns:
            Its name in the file.
        """
        if isinstance(node, ast.Name):
            self._copy_name(node)
            name = node.id
        else:
            name = self._new_name(node)
            self._copy_needs(node)
            self._made.append(f"{name} = {self._source(node)}")
        if name not in self.names:
            self.names.append(name)
        return name

    def text(self, conversational: str | None = None, renamed: Mapping[str, str] | None = None) -> str:
        """Return the text of the file.

        Args:
            conversational: the system prompt ("" for none), if the script turns text prompts into messages.
            renamed: column name in the script -> column name in the data.
        """
        head = [
            f'"""Rewards of {self.script.path.name}, copied by atomrl import; read them before they are run."""',
            "from __future__ import annotations",
            "\n".join(self._imports),
        ]
        body = [text for _, text in sorted(self._statements.items())] + self._made
        if conversational is not None or renamed:
            body.append(_adapter(conversational, renamed or {}))
            body.append("\n".join(f"{name} = as_in_script({name})" for name in self.names))
        return "\n\n".join(part for part in head if part) + "\n\n\n" + "\n\n\n".join(body) + "\n"

    def _new_name(self, node: ast.expr) -> str:
        called = self.script.called(node) if isinstance(node, ast.Call) else ""
        inner = node.args[0] if isinstance(node, ast.Call) and called == "partial" and node.args else None
        called = self.script.called(inner) if inner is not None else called
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", called).lower() or "reward"
        reserved = {*self.names, *(called,)}
        names = [name, *(f"{name}_{number}" for number in range(2, 100))]
        return next(
            one for one in names if one not in reserved and self.script.lookup(one, self.script.module.body[-1]) is None
        )

    def _copy_name(self, name: ast.Name) -> None:
        binding = self.script.lookup(name.id, name)
        if binding is None:
            self.to_do.append(
                f"{self.script.place(name)}: {name.id} is not defined in the script; define it in the copy"
            )
            return
        # Each statement is copied once; an import line once per name.
        statement = binding.statement
        if id(statement) in self._seen and not isinstance(statement, ast.Import | ast.ImportFrom):
            return
        self._seen.add(id(statement))
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self._imports[_import_of(statement, name.id)] = None
            return
        # The value is only known when the script runs.
        if isinstance(statement, ast.arg) or (
            binding.value is None
            and not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign)
        ):
            where = (
                "an argument of a function" if isinstance(statement, ast.arg) else "set under a condition or in a loop"
            )
            self.to_do.append(
                f"{self.script.place(name)}: {name.id}, which the rewards read, is {where}: write its value "
                "into the copy"
            )
            return
        if isinstance(binding.value, ast.Call):
            self.script.notes.append(
                f"{self.script.place(statement)}: `{self._source(statement).splitlines()[0]}` was copied with the "
                "rewards; it runs when a run loads them, in each of their processes"
            )
        # What it reads is copied before it. The position keeps the order of the script.
        self._copy_needs(statement)
        self._statements[(getattr(statement, "lineno", 0), getattr(statement, "col_offset", 0))] = self._source(
            statement
        )
        functions = [statement, *(statement.body if isinstance(statement, ast.ClassDef) else ())]
        for function in functions:
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and (
                function is statement or function.name == "__call__"
            ):
                self._check_arguments(function)

    def _copy_needs(self, node: ast.AST) -> None:
        for place in free_names(node).values():
            self._copy_name(place)

    def _source(self, node: ast.AST) -> str:
        """Return the dedented source of a node, with its decorators."""
        lines = self.script.text.splitlines()
        decorators = getattr(node, "decorator_list", None) or []
        first = min([getattr(node, "lineno", 1), *(one.lineno for one in decorators)])
        if isinstance(node, ast.stmt):
            return textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))
        source = ast.get_source_segment(self.script.text, node) or ast.unparse(node)
        try:
            ast.parse(f"made = {source}")
        except SyntaxError:  # it spans lines, and the enclosing brackets are not part of it
            return ast.unparse(node)
        return source

    def _check_arguments(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        own = function.args
        positional = [*own.posonlyargs, *own.args]
        without_default = [*positional[: len(positional) - len(own.defaults)]]
        without_default += [one for one, value in zip(own.kwonlyargs, own.kw_defaults, strict=True) if value is None]
        for one in without_default:
            if one.arg in UNAVAILABLE:
                self.to_do.append(
                    f"{self.script.place(one)}: {function.name} takes {one.arg}, which rewards do not receive here: "
                    f"{UNAVAILABLE[one.arg]}"
                )
        if own.kwarg is None and {"completions", "prompts"} & {one.arg for one in positional}:
            self.to_do.append(
                f"{self.script.place(function)}: {function.name} does not accept **kwargs; add it, because every "
                "column is passed"
            )


def _adapter(conversational: str | None, renamed: Mapping[str, str]) -> str:
    """Return the source of a decorator that passes messages, and columns by the script's names, to a reward."""
    lines, meaning = [], []
    if conversational is not None:
        system = f'{{"role": "system", "content": {conversational!r}}}, ' if conversational else ""
        lines += [
            f'prompts = [[{system}{{"role": "user", "content": text}}] for text in prompts]',
            'completions = [[{"role": "assistant", "content": text}] for text in completions]',
        ]
        meaning.append("messages")
    if renamed:
        pairs = ", ".join(f"{new!r}: columns[{old!r}]" for new, old in renamed.items())
        lines.append(f"columns |= {{{pairs}}}")
        meaning.append("columns by its names")
    body = "\n".join(f"        {line}" for line in lines)
    return AS_IN_SCRIPT.replace("MEANING", " and ".join(meaning)).replace("BODY", body)


def _import_of(statement: ast.Import | ast.ImportFrom, name: str) -> str:
    """Reduce an import statement to one name."""
    alias = next(one for one in statement.names if (one.asname or one.name.partition(".")[0]) == name)
    imported = alias.name + (f" as {alias.asname}" if alias.asname else "")
    if isinstance(statement, ast.Import):
        return f"import {imported}"
    return f"from {'.' * statement.level}{statement.module or ''} import {imported}"


# --------------------------------------------------------------------------------------------------------------------
# The rows that a script trains on: which data sets it loads, and how it transforms them.

FILES = ("json", "csv", "parquet", "arrow", "text")
"""File formats of `load_dataset`."""
LOADS = {"from_json": 0, "from_csv": 0, "from_parquet": 0, "load_from_disk": 0}
WITHOUT_EFFECT = {
    "shuffle": "rows come in an order of their own seed",
    "remove_columns": "all columns are kept",
    "select_columns": "all columns are kept",
    "flatten_indices": "",
    "with_format": "",
    "set_format": "",
    "to_iterable_dataset": "",
    "cast": "",
    "cast_column": "",
}
"""Methods of a data set that do not affect the rows -> note for the report."""


@dataclass
class Rows:
    """Rows that a script trains or evaluates on, as far as its source code says."""

    sources: list[str] = field(default_factory=list)
    """Files and data sets of the hub; empty if unknown."""
    size: int | None = None
    """Number of first rows, if the script selects some."""
    fields: dict[str, str] = field(default_factory=dict)
    """Column in the script -> column of the source."""
    system: str | None = None
    """System prompt that the script adds."""
    conversational: bool = False
    """True if the script turns text prompts into messages."""
    literal: list[dict[str, Any]] | None = None
    """Rows that the script contains itself."""
    to_do: list[str] = field(default_factory=list)
    """Steps that are left to the user, with their lines."""
    ignored: list[str] = field(default_factory=list)
    """Calls without effect here, with their lines."""
    split: str | None = None
    _loads: list[dict[str, Any]] = field(default_factory=list)

    def of_split(self, split: str) -> "Rows":
        """Select a split of data loaded without one (`dataset["train"]`)."""
        self.split = split
        return self


def rows_of(script: PythonScript, node: ast.expr) -> Rows:
    """Return the rows that an expression evaluates to; nothing is loaded.

    Translates selections of the first rows, renamed columns, and prompts made of one column; other transformations are
    reported with their line.
    """
    rows = _rows(script, node, 0)
    for load in rows._loads:
        split = load.get("split") or rows.split or "train"
        if load["path"] in FILES and load.get("data_files") is not None:
            files = load["data_files"]
            files = files.get(split, next(iter(files.values()))) if isinstance(files, dict) else files
            rows.sources += files if isinstance(files, list) else [files]
        else:
            rows.sources.append(hub_source(load["path"], load.get("name"), split, load.get("revision")))
    return rows


def _rows(script: PythonScript, node: ast.expr, depth: int) -> Rows:
    if depth > 40:
        return _unknown(script, node)
    resolved = script.resolved(node)
    if isinstance(resolved, ast.Subscript):
        rows = _rows(script, resolved.value, depth + 1)
        try:
            split = script.value(resolved.slice)
        except Unknown:
            split = None
        if isinstance(split, str):
            return rows.of_split(split)
        rows.to_do.append(f"{script.place(resolved)}: {_short(resolved)}: the rows are known only when the script runs")
        return rows
    if isinstance(resolved, ast.List | ast.Call) and (literal := _literal_rows(script, resolved)) is not None:
        return Rows(literal=literal)
    if not isinstance(resolved, ast.Call):
        return _unknown(script, node)
    called = script.called(resolved)
    if called == "load_dataset":
        return _loaded(script, resolved)
    if called in LOADS and resolved.args:
        try:
            return Rows(sources=[str(script.value(resolved.args[0]))])
        except Unknown:
            return _unknown(script, node)
    if called in ("concatenate_datasets", "interleave_datasets") and resolved.args:
        return _joined(script, resolved, depth)
    if isinstance(resolved.func, ast.Attribute) and not _is_module(script, resolved.func.value):
        return _changed(script, resolved, _rows(script, resolved.func.value, depth + 1))
    if (returned := script.returned(resolved)) is not None:
        return _rows(script, returned, depth + 1)
    return _unknown(script, node)


def _unknown(script: PythonScript, node: ast.expr) -> Rows:
    reason = f"{script.place(node)}: the rows {_short(node)} are made when the script runs"
    return Rows(to_do=[f"{reason}: write them to a file there (rows.to_json('train.jsonl')) and set data.train to it"])


def _loaded(script: PythonScript, call: ast.Call) -> Rows:
    arguments: dict[str, Any] = {}
    rows = Rows()
    for name, value in script.arguments(call, ["path", "name", "data_dir", "data_files", "split"]).items():
        try:
            arguments[name] = script.value(value)
        except Unknown as reason:
            if name in ("path", "data_files"):
                return _unknown(script, call)
            rows.to_do.append(f"{script.place(call)}: load_dataset({name}={ast.unparse(value)}): {reason} is not known")
    for name in arguments.keys() & {"data_dir"}:
        rows.to_do.append(
            f"{script.place(call)}: load_dataset({name}={arguments[name]!r}): set data.train to the files"
        )
    if not isinstance(arguments.get("path"), str):
        return _unknown(script, call)
    rows._loads = [arguments]
    return rows


def _joined(script: PythonScript, call: ast.Call, depth: int) -> Rows:
    parts = script.resolved(call.args[0])
    if not isinstance(parts, ast.List | ast.Tuple):
        return _unknown(script, call)
    each = [rows_of(script, part) for part in parts.elts]
    rows = Rows(sources=[source for one in each for source in one.sources])
    rows.to_do = [line for one in each for line in one.to_do]
    rows.ignored = [line for one in each for line in one.ignored]
    if any(one.size or one.fields or one.literal for one in each):
        rows.to_do.append(
            f"{script.place(call)}: the joined data sets are changed one by one; here all rows must have the same "
            "fields: write them to a file"
        )
    if script.called(call) == "interleave_datasets":
        rows.to_do.append(
            f"{script.place(call)}: interleave_datasets mixes with probabilities; here all rows of each are used"
        )
    return rows


def _changed(script: PythonScript, call: ast.Call, rows: Rows) -> Rows:
    method, place = script.called(call), f"{script.place(call)}: {_short(call)}"
    if method in WITHOUT_EFFECT:
        rows.ignored.append(f"{script.place(call)}: .{method}(...) ({WITHOUT_EFFECT[method] or 'changes no row'})")
        return rows
    try:
        if method in ("select", "take") and (size := _first(script, call)) is not None:
            rows.size = size if rows.size is None else min(size, rows.size)
            if any(".shuffle" in line for line in rows.ignored):
                rows.to_do.append(f"{place}: the rows are shuffled first, so the first {size} are other rows")
            return rows
        if method == "rename_column":
            arguments = script.arguments(call, ["original_column_name", "new_column_name"])
            rows.fields[script.value(arguments["new_column_name"])] = script.value(arguments["original_column_name"])
            return rows
        if method == "rename_columns":
            renamed = script.value(script.arguments(call, ["column_mapping"])["column_mapping"])
            rows.fields |= {new: old for old, new in renamed.items()}
            return rows
    except (Unknown, KeyError):
        pass
    if method == "map" and call.args and _mapped(script, call.args[0], rows):
        return rows
    if method == "train_test_split":
        rows.to_do.append(
            f"{place}: rows are split at random: write both parts to files and set data.train and data.eval to them"
        )
        return rows
    what = {"map": "changes the rows", "filter": "removes rows", "select": "selects rows"}
    rows.to_do.append(
        f"{place}: {what.get(method, 'changes the rows')}, which is not translated: set the columns "
        "(data.prompt_field, data.answer_field), or write the rows to a file there (rows.to_json('train.jsonl')) and "
        "use it"
    )
    return rows


def _first(script: PythonScript, call: ast.Call) -> int | None:
    """Return n of `select(range(n))` and `take(n)`."""
    if not call.args:
        return None
    argument = script.resolved(call.args[0])
    if isinstance(argument, ast.Call) and script.called(argument) == "range":
        ends = [script.value(one) for one in argument.args]
        return ends[-1] if len(ends) == 1 or (len(ends) == 2 and ends[0] == 0) else None
    count = script.value(argument) if script.called(call) == "take" else None
    return count if isinstance(count, int) else None


def _mapped(script: PythonScript, function_node: ast.expr, rows: Rows) -> bool:
    """Translate a `map` function that only renames columns or makes messages of one. Returns False if it does more."""
    function, columns = _row_function(script, function_node)
    if function is None or columns is None:
        return False
    fields, system, conversational = {}, rows.system, rows.conversational
    for name, value in columns.items():
        if name == "prompt" and isinstance(value, ast.List | ast.Name) and not _column(value, function):
            messages = _messages(script, value, function)
            if messages is None:
                return False
            system, fields["prompt"], conversational = messages[0], messages[1], True
        elif (column := _column(value, function)) is not None:
            fields[name] = column
        else:
            return False
    rows.fields |= {new: rows.fields.get(old, old) for new, old in fields.items()}
    rows.system, rows.conversational = system, conversational
    return True


def _row_function(script: PythonScript, argument: ast.expr) -> tuple[str | None, dict[str, ast.expr] | None]:
    """Return the parameter of a `map` function, and the columns that it returns."""
    if isinstance(argument, ast.Name):
        binding = script.lookup(argument.id, argument)
        node = binding.statement if binding is not None else None
        node = binding.value if isinstance(node, ast.Assign) and binding is not None else node
    else:
        node = argument
    if not isinstance(node, ast.FunctionDef | ast.Lambda) or len(node.args.args) != 1:
        return None, None
    parameter, columns = node.args.args[0].arg, {}
    body = [ast.Return(node.body)] if isinstance(node, ast.Lambda) else node.body
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):  # its docstring
            continue
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            if (column := _column(statement.targets[0], parameter)) is None:
                return None, None
            columns[column] = statement.value
        elif isinstance(statement, ast.Return) and isinstance(statement.value, ast.Dict):
            for key, value in zip(statement.value.keys, statement.value.values, strict=True):
                if key is None and isinstance(value, ast.Name) and value.id == parameter:  # `{**row, ...}`
                    continue
                if not isinstance(key, ast.Constant):
                    return None, None
                columns[str(key.value)] = value
        elif not (isinstance(statement, ast.Return) and _names(statement.value, parameter)):
            return None, None
    return parameter, columns


def _names(node: ast.expr | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _column(node: ast.expr, row: str) -> str | None:
    """Return the column name in an expression `row["name"]`; None for any other expression."""
    if isinstance(node, ast.Subscript) and _names(node.value, row) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return None


def _messages(script: PythonScript, node: ast.expr, row: str) -> tuple[str | None, str] | None:
    """Return system prompt and column of a prompt of messages: `[{"role": "user", "content": row["question"]}]`."""
    messages = script.resolved(node)
    system, column = None, None
    for message in messages.elts if isinstance(messages, ast.List) else ():
        if not isinstance(message, ast.Dict) or column is not None:
            return None
        parts = {key.value: value for key, value in zip(message.keys, message.values, strict=True)
                 if isinstance(key, ast.Constant)}  # fmt: skip
        role, content = parts.get("role"), parts.get("content")
        if not isinstance(role, ast.Constant) or content is None:
            return None
        if role.value == "user" and (column := _column(content, row)) is not None:
            continue
        try:
            if role.value != "system":
                return None
            system = script.value(content)
        except Unknown:
            return None
    return None if column is None else (system, column)


def _literal_rows(script: PythonScript, node: ast.expr) -> list[dict[str, Any]] | None:
    """Return the rows of `Dataset.from_list([...])` or `from_dict({...})` with literal values."""
    literal = node
    if isinstance(node, ast.Call):
        if script.called(node) not in ("from_list", "from_dict") or not node.args:
            return None
        literal = node.args[0]
    try:
        value = script.value(literal)
        if isinstance(value, dict):
            value = [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
        json.dumps(value)
    except (Unknown, TypeError, ValueError):
        return None
    return value if value and all(isinstance(row, dict) for row in value) else None


def _is_module(script: PythonScript, node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Name)
        and node.id in script.imports()
        and script.lookup(node.id, node) is not None
        and (
            script.lookup(node.id, node).value is None  # type: ignore[union-attr]
        )
    )


def _short(node: ast.expr) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 70 else f"{text[:67]}..."
