"""Calls in a Python file, whose arguments are read and never run."""

import ast
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from atomrl.config import ConfigError
from atomrl.importers.sources import Given, text_of

_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class Name(str):
    """What stands in a Python file where no literal does."""


def read_calls(
    path: Path, callables: Collection[str], decisive: Collection[str], may_be_unread: Collection[str]
) -> tuple[dict[str, Given], list[str]]:
    """The arguments of some calls in a Python file: literals, sums of numbers, and names that are given one once.

    Args:
        decisive: of the callables those of which nothing may be lost, as their arguments say what is trained; what is
            set on their result later counts as well.
        may_be_unread: arguments of these that may.

    Returns:
        For each callable that is called its keywords, a call's place 0, 1, ... among them for arguments without a
        keyword; and what could not be read. A name, or a list with names in it, is `Name`.

    Raises:
        ConfigError: it is no Python, or what may not be lost cannot be read; with the line.
    """
    try:
        module = ast.parse(text_of(path), str(path))
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: not valid Python: {error.msg}") from None
    names = _literal_names(module)
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call) and _called(node) in callables]
    found: dict[str, Given] = {}
    notes: list[str] = []
    for node in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        called = _called(node)
        if called == "load_dataset" and called in found:
            called = f"{called} {node.lineno}"
        if called in found:
            notes.append(f"{path.name}:{node.lineno}: {called} is called again; the first call was taken")
            continue
        found[called] = {}
        for name, value in [*_arguments(node, names), *(_set_later(module, node, path) if called in decisive else ())]:
            try:
                found[called][name] = _literal(value, names)
            except (ValueError, ArithmeticError, TypeError):
                text = ast.unparse(value)
                part = isinstance(value, ast.Subscript) and called not in decisive  # as `dataset["train"]`
                if part or isinstance(value, ast.Name) or (isinstance(value, ast.List) and value.elts):
                    found[called][name] = Name(text)
                elif isinstance(value, ast.Call) and _called(value) in callables:  # which is read by itself
                    continue
                elif called in decisive and name not in may_be_unread:
                    raise ConfigError(
                        f"{path}:{value.lineno}: {called}({name}={text}) is only known when it runs; write its value"
                    ) from None
                else:
                    notes.append(
                        f"{path.name}:{value.lineno}: {called}({name}={text}) is no literal, so it was not read"
                    )
    return found, notes


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


def _arguments(node: ast.Call, names: Mapping[str, ast.expr]) -> Iterator[tuple[str, ast.expr]]:
    yield from ((str(place), value) for place, value in enumerate(node.args))
    for keyword in node.keywords:
        given = names.get(keyword.value.id) if isinstance(keyword.value, ast.Name) else keyword.value
        if keyword.arg is not None:
            yield keyword.arg, keyword.value
        elif isinstance(given, ast.Dict) and all(isinstance(key, ast.Constant) for key in given.keys):
            keys = [str(ast.literal_eval(key)) for key in given.keys if key is not None]
            yield from zip(keys, given.values, strict=True)
        else:
            yield "**", ast.Starred(keyword.value, lineno=keyword.value.lineno)


def _set_later(module: ast.Module, call: ast.Call, path: Path) -> Iterator[tuple[str, ast.expr]]:
    """What a file sets on the result of a call, in the statements after it.

    Raises:
        ConfigError: it may be set, or not: within a condition, a loop, another function.
    """
    body, owner = next(
        ((body, _target(statement)) for body in _bodies(module) for statement in body if _value(statement) is call),
        ([], None),
    )
    if owner is None:
        return
    for node in ast.walk(module):
        changed: ast.stmt | ast.expr | None = None
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            own = [target for target in targets if isinstance(target, ast.Attribute) and _is(target.value, owner)]
            if own and len(targets) == 1 and isinstance(node, ast.Assign) and node in body:
                yield own[0].attr, node.value
            elif own:
                changed = node
        elif isinstance(node, ast.Call) and _called(node) in ("setattr", "replace"):
            changed = node if node.args and _is(node.args[0], owner) else None
        if changed is not None:
            said = ast.unparse(changed).splitlines()[0]
            raise ConfigError(
                f"{path}:{changed.lineno}: {said}: known only when it runs; write the value into the call"
            )


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _bodies(module: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(module):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(body := getattr(node, name, None), list):
                yield body


def _value(statement: ast.stmt) -> ast.expr | None:
    return statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None


def _target(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.expr = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    else:
        return None
    return target.id if isinstance(target, ast.Name) else None


def _literal_names(module: ast.Module) -> dict[str, ast.expr]:
    """Names that are given something once, and what."""
    nodes = [*ast.walk(module)]
    given = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    given.update(node.arg for node in nodes if isinstance(node, ast.arg))
    found: dict[str, ast.expr] = {}
    for node in nodes:
        if isinstance(node, ast.stmt) and (name := _target(node)) and (value := _value(node)) and given[name] == 1:
            found[name] = value
    return found


def _literal(node: ast.expr, names: Mapping[str, ast.expr], within: frozenset[str] = frozenset()) -> Any:
    """
    Raises:
        ValueError: it is none.
    """
    if isinstance(node, ast.Name) and node.id in names and node.id not in within:
        return _literal(names[node.id], names, within | {node.id})
    if isinstance(node, ast.List):
        return [_literal(item, names, within) for item in node.elts]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = (_literal(side, names, within) for side in (node.left, node.right))
        if not all(isinstance(side, int | float) for side in (left, right)):
            raise ValueError("no sum of numbers")
        return _OPERATORS[type(node.op)](left, right)
    return ast.literal_eval(node)
