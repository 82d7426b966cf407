"""Import users' functions by name, as configs name them: `my_module.f`, `my_module:f` or `./my_file.py:f`."""

import ast
import dis
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from atomrl.common.errors import did_you_mean, nearest

UNNAMED = "_given_"
"""Name of the module that holds functions without an importable name (lambdas, closures, functions of a script)."""
OF_FILE = "_file_"
"""Prefix in `sys.modules` of modules that were loaded from files; a hash of the path follows."""


_searched: list[str] = []
_added: list[str] = []
"""Users' folders at the end of `sys.path`, in its order: `_searched` without those that Python searched before."""
_looking = False
_CONDITIONAL = (ast.If, ast.IfExp, ast.BoolOp, ast.Try, ast.Match, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
"""Nodes whose children may not be executed."""


@contextmanager
def imports_forbidden() -> Iterator[None]:
    """Forbid running users' code within the block, to read configs of others.

    `find_function` raises, configs are valid without the functions that they name, and `search_in` has no effect.

    Example:
        >>> with imports_forbidden():
        ...     find_function("math:sqrt")
        Traceback (most recent call last):
        ...
        ValueError: 'math:sqrt' is not imported, because its config is only viewed
    """
    global _looking
    before, _looking = _looking, True
    try:
        yield
    finally:
        _looking = before


def may_import() -> bool:
    """Return True if functions that a config names may be imported, which they may not within `imports_forbidden`."""
    return not _looking


def find_function(path: str) -> Callable[..., Any]:
    """Import a function or class by its path: `my_module.f`, `my_module:f`, or `./my_file.py:f`.

    Modules that are not installed, and files, are searched in the working directory and in the folders of `search_in`.

    Raises:
        ValueError: the path names no function, the module cannot be imported or has no such function, or the call is
            within `imports_forbidden`.

    Example:
        >>> find_function("math:sqrt") is find_function("math.sqrt")
        True
    """
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    if path.endswith(".py"):
        raise ValueError(f"{path!r} names a file but no function; write {path}:my_function")
    if not module_name:
        raise ValueError(f"{path!r} names no module; write my_module:my_function")
    if _looking:
        raise ValueError(f"{path!r} is not imported, because its config is only viewed")
    search_in(os.getcwd())
    try:
        module = _load_file(module_name) if module_name.endswith(".py") else _load_module(module_name)
    except Exception as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            hint = f"; name a file by its path: ./{module_name.replace('.', '/')}.py:{name}"
        raise ValueError(f"{path!r}: module {module_name!r} cannot be imported: {error!r}{hint}") from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None or not callable(function):
        callables = {key: value for key, value in vars(module).items() if callable(value)}
        own = [key for key, value in callables.items() if getattr(value, "__module__", None) == module.__name__]
        hint = f"; {did_you_mean(name, own)}" if nearest(name, own) or 0 < len(own) < 9 else ""
        raise ValueError(f"{path!r}: module {module_name!r} has no function {name!r}{hint}")
    return function


def name_of(function: Callable[..., Any], called: str | None = None) -> str:
    """Return a path by which `find_function` finds a function in this process.

    A function at the top level of an importable module has its own path. Others (of a script, lambdas, closures) are
    registered under a path that is valid only in this process.

    Args:
        called: name to register under; None: the function's own.

    Example:
        >>> from math import sqrt
        >>> name_of(sqrt), find_function(name_of(lambda x: x + 1, "more"))(2)
        ('math:sqrt', 3)
    """
    module, own = getattr(function, "__module__", None), str(getattr(function, "__qualname__", ""))
    loaded = sys.modules.get(str(module))
    if loaded is not None and module != "__main__" and getattr(loaded, own, None) is function:
        return f"{loaded.__file__ if str(module).startswith(OF_FILE) else module}:{own}"
    name = called or plain_name(function)
    held = sys.modules.setdefault(UNNAMED, ModuleType(UNNAMED))
    setattr(held, name, function)
    return f"{UNNAMED}:{name}"


def plain_name(function: Callable[..., Any]) -> str:
    """Return a function's name as a valid identifier.

    Example:
        >>> plain_name(lambda x: x), plain_name(sorted)
        ('lambda', 'sorted')
    """
    own = getattr(function, "__name__", type(function).__name__)
    return re.sub(r"\W+", "_", own).strip("_") or "function"


def search_in(folder: str | Path) -> None:
    """Add a folder to those in which users' modules and files are searched.

    They are searched after installed modules, so that they hide none, and the one that was added last is the first of
    them: of two configs read in one process, each with a `mine.py` beside it, each finds its own. Worker processes
    inherit the order in `sys.path`. No effect within `imports_forbidden`.
    """
    if _looking:
        return
    name = str(folder)
    if name in _added or name not in sys.path:
        _added[:] = [name, *(other for other in _added if other != name)]
        sys.path[:] = [*(other for other in sys.path if other not in _added), *_added]
    if name not in _searched:
        _searched.append(name)


def searched() -> list[str]:
    """Return the folders passed to `search_in` so far, the last one last, for processes that are started elsewhere."""
    return [*(folder for folder in _searched if folder not in _added), *reversed(_added)]


def _load_module(name: str) -> ModuleType:
    """Import a module by its dotted name. A user's file takes precedence over a standard module (`test`)."""
    if name in (*sys.stdlib_module_names, "test"):
        own = _find_file(f"{name}.py")
        if own is not None:
            return _load_file(str(own))
    return importlib.import_module(name)


def _find_file(path: str) -> Path | None:
    """Find a user's file in the working directory or on `sys.path`, except the standard library."""
    python = Path(sysconfig.get_path("stdlib"))
    folders = [Path(), *(Path(folder) for folder in sys.path if not Path(folder).is_relative_to(python))]
    return next((file for folder in folders if (file := folder / path).is_file()), None)


def _load_file(path: str) -> ModuleType:
    """Import a file as a module, under a unique name, so that it hides no other module."""
    file = _find_file(os.path.expanduser(path))
    if file is None:
        raise FileNotFoundError(f"no file {path} in {' or '.join(dict.fromkeys([os.getcwd(), *_searched]))}")
    name = OF_FILE + hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file.resolve())
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def subscripts(function: Callable[..., Any], mapping: str) -> list[str]:
    """Find, in a function's source, the keys of a mapping that it always reads. Nothing is executed.

    A key counts if it is read as `mapping["key"]` outside of conditions and `try`, and the function does not also check
    it with `in` or `get`.

    Args:
        mapping: the mapping's expression in the source: `columns`, `problem.columns`.

    Returns:
        The keys; empty if the source is not available.
    """
    called = function if inspect.isroutine(function) else getattr(type(function), "__call__", function)  # noqa: B004
    try:
        (defined,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(called)))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return []
    nodes = list(ast.walk(defined))
    # Keys that the function checks: `"key" in mapping`, `mapping.get("key")`.
    compared = [
        node.left for node in nodes if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn)
    ]
    arguments = [
        node.args[0]
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
    ]
    checked = {node.value for node in [*compared, *arguments] if isinstance(node, ast.Constant)}
    conditional = {
        id(child)
        for node in nodes
        if isinstance(node, _CONDITIONAL) and node is not defined
        for child in ast.walk(node)
    }
    return [
        node.slice.value
        for node in nodes
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
        and id(node) not in conditional and node.slice.value not in checked and ast.unparse(node.value) == mapping
    ]  # fmt: skip


def names_in(function: Callable[..., Any]) -> set[str]:
    """Return the names of variables and attributes that a function uses, and its text constants that could be names,
    with those of the functions defined in it; for a class those of its `__call__`. Nothing is executed. Empty for
    functions in C.

    Example:
        >>> sorted(names_in(lambda text, truth, **columns: text == columns["answer"]))
        ['answer', 'columns', 'text']
    """
    owner = function if inspect.isclass(function) else type(function)
    called = function if inspect.isroutine(function) else getattr(owner, "__call__", function)  # noqa: B004
    code = getattr(inspect.unwrap(called), "__code__", None)
    return _names_in(code) if isinstance(code, CodeType) else set()


def _names_in(code: CodeType) -> set[str]:
    used = [step.argval for step in dis.get_instructions(code)]
    names = {name for value in used for name in (value if isinstance(value, tuple) else (value,))}
    inner = [value for value in code.co_consts if isinstance(value, CodeType)]
    return {name for name in names if isinstance(name, str) and name.isidentifier()}.union(*map(_names_in, inner))
