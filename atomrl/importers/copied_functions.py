"""Functions of a script as a file of their own: copied with what they need, and not run."""

import ast
import re
import textwrap
from collections.abc import Mapping

from atomrl.importers.python_script import PythonScript, free_names

NOT_GIVEN = {
    "completion_ids": "tokens are not given; completion_tokens has their number",
    "trainer_state": "there is no trainer's state; the step is not given either",
    "log_extra": "what it logs beside a reward is a reward of weight 0 here",
    "log_metric": "what it logs beside a reward is a reward of weight 0 here",
    "environments": "an environment is a function of another form here (docs/guides/environments.md)",
}
"""Arguments that TRL gives a reward function and rewards here do not get -> what there is instead."""
AS_IN_SCRIPT = '''def as_in_script(function):
    """Call a reward with what the script's rows have: MEANING."""

    def called(prompts, completions, **columns):
BODY
        return function(prompts=prompts, completions=completions, **columns)

    return called'''


class CopiedFunctions:
    """Rewards of a script, and the imports, constants, functions and classes that they use.

    Args:
        script: where they are.
        file_name: of the file that they go to, which is named in a config as `./file_name:function`.
    """

    def __init__(self, script: PythonScript, file_name: str) -> None:
        self.script, self.file_name = script, file_name
        self.names: list[str] = []
        """The functions that were asked for."""
        self.to_do: list[str] = []
        """Names and arguments that the copy lacks, with their lines."""
        self._statements: dict[tuple[int, int], str] = {}
        self._imports: dict[str, None] = {}
        self._made: list[str] = []
        self._seen: set[int] = set()

    def add(self, node: ast.expr) -> str:
        """Copy a function by the expression that names or makes it: a name, a lambda, `partial(f, n=1)`, `Reward(0.5)`.

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
        """The file.

        Args:
            conversational: the system prompt ("": none) where the script makes messages of rows whose prompt is text.
            renamed: columns by the script's names -> their names in the data.
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
        taken = {*self.names, *(called,)}
        names = [name, *(f"{name}_{number}" for number in range(2, 100))]
        return next(
            one for one in names if one not in taken and self.script.lookup(one, self.script.module.body[-1]) is None
        )

    def _copy_name(self, name: ast.Name) -> None:
        binding = self.script.lookup(name.id, name)
        if binding is None:
            self.to_do.append(
                f"{self.script.place(name)}: {name.id} is not defined in the script; define it in the copy"
            )
            return
        statement = binding.statement
        if id(statement) in self._seen and not isinstance(statement, ast.Import | ast.ImportFrom):
            return
        self._seen.add(id(statement))
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self._imports[_import_of(statement, name.id)] = None
            return
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
        """The text of a node, moved to the left, with its decorators."""
        lines = self.script.text.splitlines()
        decorators = getattr(node, "decorator_list", None) or []
        first = min([getattr(node, "lineno", 1), *(one.lineno for one in decorators)])
        if isinstance(node, ast.stmt):
            return textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))
        source = ast.get_source_segment(self.script.text, node) or ast.unparse(node)
        try:
            ast.parse(f"made = {source}")
        except SyntaxError:  # over several lines, which brackets around it held together
            return ast.unparse(node)
        return source

    def _check_arguments(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        own = function.args
        given = [*own.posonlyargs, *own.args]
        without_default = [*given[: len(given) - len(own.defaults)]]
        without_default += [one for one, value in zip(own.kwonlyargs, own.kw_defaults, strict=True) if value is None]
        for one in without_default:
            if one.arg in NOT_GIVEN:
                self.to_do.append(
                    f"{self.script.place(one)}: {function.name} takes {one.arg}, which rewards here do not get: "
                    f"{NOT_GIVEN[one.arg]}"
                )
        if own.kwarg is None and {"completions", "prompts"} & {one.arg for one in given}:
            self.to_do.append(
                f"{self.script.place(function)}: {function.name} takes no **kwargs; add it, since every column is given"
            )


def _adapter(conversational: str | None, renamed: Mapping[str, str]) -> str:
    """A function that gives a reward messages, and columns by the script's names."""
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
    """The statement with the one name that is needed."""
    alias = next(one for one in statement.names if (one.asname or one.name.partition(".")[0]) == name)
    said = alias.name + (f" as {alias.asname}" if alias.asname else "")
    if isinstance(statement, ast.Import):
        return f"import {said}"
    return f"from {'.' * statement.level}{statement.module or ''} import {said}"
