"""A user's own function by its name, as a config names rewards and custom choices: of a module, or of a file."""

import ast
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
from types import ModuleType
from typing import Any

from atomrl.common.errors import did_you_mean, nearest

GIVEN = "_given_"
"""The module that stands for functions which were handed over and have no name that leads to them."""
OF_FILE = "_file_"
"""What the modules of files are called by in `sys.modules`, before a hash of the path."""


_searched: list[str] = []
_looking = False


@contextmanager
def only_looking() -> Iterator[None]:
    """Within it nobody's code is run, as configs of others are read: `find_function` refuses, a config is valid without
    the functions that it names, and no folder is searched for modules.

    Example:
        >>> with only_looking():
        ...     find_function("math:sqrt")
        Traceback (most recent call last):
        ...
        ValueError: 'math:sqrt' is not imported, as its config is only looked at
    """
    global _looking
    before, _looking = _looking, True
    try:
        yield
    finally:
        _looking = before


def may_import() -> bool:
    """Whether the functions that a config names may be imported: not within `only_looking`."""
    return not _looking


def find_function(path: str) -> Callable[..., Any]:
    """A function or class by its path: `my_module.f`, `my_module:f`, or `./my_file.py:f`.

    What is not installed is looked for in the working directory and in the folders of `search_in`.

    Raises:
        ValueError: the path names no function, the module cannot be imported, or has no such function; or it
            is `only_looking`.

    Example:
        >>> find_function("math:sqrt") is find_function("math.sqrt")
        True
    """
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    if path.endswith(".py"):
        raise ValueError(f"{path!r} names a file and no function; write {path}:my_function")
    if not module_name:
        raise ValueError(f"{path!r} names no module; write my_module:my_function")
    if _looking:
        raise ValueError(f"{path!r} is not imported, as its config is only looked at")
    search_in(os.getcwd())
    try:
        module = _load_file(module_name) if module_name.endswith(".py") else _load_module(module_name)
    except Exception as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            hint = f"; a file of yours is named by its path: ./{module_name.replace('.', '/')}.py:{name}"
        raise ValueError(f"{path!r}: module {module_name!r} cannot be imported: {error!r}{hint}") from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None or not callable(function):
        mine = {key: value for key, value in vars(module).items() if callable(value)}
        own = [key for key, value in mine.items() if getattr(value, "__module__", None) == module.__name__]
        hint = f"; {did_you_mean(name, own)}" if nearest(name, own) or 0 < len(own) < 9 else ""
        raise ValueError(f"{path!r}: module {module_name!r} has no function {name!r}{hint}")
    return function


def name_of(function: Callable[..., Any], called: str | None = None) -> str:
    """A name by which `find_function` finds a function in this process: of its module, where it is at the top of one
    that can be imported; else (of a script, a lambda, a closure) one that it is given here, and that means nothing in
    another process.

    Args:
        called: the name to give; None: the function's own.

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
    held = sys.modules.setdefault(GIVEN, ModuleType(GIVEN))
    setattr(held, name, function)
    return f"{GIVEN}:{name}"


def plain_name(function: Callable[..., Any]) -> str:
    """What a function is called, in letters that any name may have.

    Example:
        >>> plain_name(lambda x: x), plain_name(sorted)
        ('lambda', 'sorted')
    """
    own = getattr(function, "__name__", type(function).__name__)
    return re.sub(r"\W+", "_", own).strip("_") or "function"


def search_in(folder: str | Path) -> None:
    """Look for users' modules and files in a folder too: last, so that nothing there hides an installed module."""
    if _looking:
        return
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    if str(folder) not in _searched:
        _searched.append(str(folder))


def searched() -> list[str]:
    """The folders given to `search_in` so far, as what is started elsewhere has to be told."""
    return list(_searched)


def _load_module(name: str) -> ModuleType:
    """A module by its dotted name. A user's file that is called like one of Python's own (`test.py`) is meant."""
    if name in (*sys.stdlib_module_names, "test"):
        own = _find_file(f"{name}.py")
        if own is not None:
            return _load_file(str(own))
    return importlib.import_module(name)


def _find_file(path: str) -> Path | None:
    """A user's file, from the working directory or any folder where modules are looked for but Python's own."""
    python = Path(sysconfig.get_path("stdlib"))
    folders = [Path(), *(Path(folder) for folder in sys.path if not Path(folder).is_relative_to(python))]
    return next((found for folder in folders if (found := folder / path).is_file()), None)


def _load_file(path: str) -> ModuleType:
    """The module of a file, under a name of its own, so that it hides no other."""
    file = _find_file(os.path.expanduser(path))
    if file is None:
        raise FileNotFoundError(f"there is no file {path} in {' or '.join(dict.fromkeys([os.getcwd(), *_searched]))}")
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


_PERHAPS = (ast.If, ast.IfExp, ast.BoolOp, ast.Try, ast.Match, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
"""Nodes whose insides may never run."""


def subscripts(function: Callable[..., Any], mapping: str) -> list[str]:
    """The keys that a function reads of a mapping whenever it runs, by its source: `mapping["key"]`, outside of
    conditions and `try`, where it does not also ask for the key with `in` or `get`. Nothing is run.

    Args:
        mapping: as the source has it: `columns`, `sample.columns`.
    """
    called = function if inspect.isroutine(function) else getattr(type(function), "__call__", function)  # noqa: B004
    try:
        (defined,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(called)))).body
    except (OSError, TypeError, ValueError, SyntaxError):  # it has no source by itself
        return []
    nodes = list(ast.walk(defined))
    compared = [
        one.left for one in nodes if isinstance(one, ast.Compare) and isinstance(one.ops[0], ast.In | ast.NotIn)
    ]
    got = [
        one.args[0] for one in nodes if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.args
    ]
    asked = {one.value for one in [*compared, *got] if isinstance(one, ast.Constant)}
    perhaps = {
        id(inner) for one in nodes if isinstance(one, _PERHAPS) and one is not defined for inner in ast.walk(one)
    }
    return [
        one.slice.value
        for one in nodes
        if isinstance(one, ast.Subscript) and isinstance(one.slice, ast.Constant) and isinstance(one.slice.value, str)
        and id(one) not in perhaps and one.slice.value not in asked and ast.unparse(one.value) == mapping
    ]  # fmt: skip
