"""unsloth's helpers of rewards that run functions which a model wrote: `execute_with_time_limit`,
`check_python_modules`, `create_locked_down_function`."""

import __future__

import ast
import ctypes
import functools
import sys
import threading
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any

from atomrl.config import ConfigError

LEEWAY_S = 0.05
"""Seconds over the limit after which a call of C code, which is not interrupted, was too long."""


def execute_with_time_limit(seconds: float, *, backend: str = "signal", **_: Any) -> Callable[[Any], Any]:
    """Return a decorator of functions: a call that takes longer raises TimeoutError.

    The error is raised between two steps of Python, so it does not interrupt a call of C code, such as `time.sleep`.
    The result of a function that catches it is returned, as in unsloth; while it runs on, it is raised every second.

    Args:
        backend: `signal` or `auto`: the function runs in this thread.

    Raises:
        ValueError: the limit is not above 0.
        ConfigError: `backend="process"`.

    Example:
        >>> @execute_with_time_limit(0.1)
        ... def forever():
        ...     while True: pass
        >>> forever()
        Traceback (most recent call last):
            ...
        TimeoutError: no result after 0.1 s
    """
    if seconds <= 0:
        raise ValueError("seconds must be above 0")
    if backend == "process":
        raise ConfigError("execute_with_time_limit(backend='process'): only 'signal' and 'auto' are here")

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            watch, begun, called, over = _Watch(seconds), time.monotonic(), False, False
            result: Any = None
            error: BaseException | None = None
            while not watch.ended:
                try:
                    if not called:
                        called = True
                        result = function(*args, **kwargs)
                    watch.end()
                except _Over:
                    over = True
                except BaseException as raised:  # also Ctrl-C
                    error = raised
            late = not watch.raised and time.monotonic() - begun > seconds + LEEWAY_S
            if over or late:
                raise TimeoutError(f"no result after {seconds:g} s") from None
            if error is not None:
                raise error
            return result

        return limited

    return decorator


class _Over(TimeoutError):
    """Raised in the code of a function whose time is over."""


class _Watch:
    """Raises `_Over` in this thread after some seconds, and every second from then on, until its `end`."""

    def __init__(self, seconds: float) -> None:
        self._thread, self._lock, self._ended = threading.get_ident(), threading.Lock(), threading.Event()
        self.raised = False
        threading.Thread(target=self._run, args=(seconds,), daemon=True).start()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def _run(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            with self._lock:
                if not self.ended:
                    self.raised = True
                    self._set(ctypes.py_object(_Over))
            seconds = 1.0

    def end(self) -> None:
        """Raise no more."""
        with self._lock:
            self._set(None)
            self._ended.set()

    def _set(self, error: Any) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), error)


def check_python_modules(code: str) -> tuple[bool, dict[str, Any]]:
    """Return whether a program imports modules of Python alone, and what it imports.

    Returns:
        False for a program that is no Python or imports others; and a dict with `stdlib` and `non_stdlib` (sorted
        names of modules), `relative_imports` (their number), and `error` if it is no Python.

    Example:
        >>> check_python_modules("import math, numpy")
        (False, {'stdlib': ['math'], 'non_stdlib': ['numpy'], 'relative_imports': 0})
    """
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except SyntaxError as error:
        return False, {"error": f"SyntaxError: {error}", "stdlib": [], "non_stdlib": [], "relative_imports": 0}
    members = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {(node.module or "").split(".")[0] for node in members if not node.level}
    known = {name.lower() for name in sys.stdlib_module_names}
    others = sorted(name for name in names if name.lower() not in known)
    found = {"stdlib": sorted(names - {*others}), "non_stdlib": others}
    return not others, {**found, "relative_imports": sum(bool(node.level) for node in members)}


def create_locked_down_function(function: str) -> Any:
    """Return the function that a program defines, without global variables and, as in unsloth, without defaults.

    This is no sandbox: its code runs in this process, and may import what it likes.

    Raises:
        RuntimeError: the program is not one function, or an argument's default is not a constant.

    Example:
        >>> create_locked_down_function("def double(x): return 2 * x")(3)
        6
    """
    try:
        tree = ast.parse(function)
    except (SyntaxError, ValueError) as error:
        raise RuntimeError(f"SyntaxError: {error}") from error
    body = tree.body[1:] if tree.body and ast.get_docstring(tree) is not None else tree.body
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef | ast.AsyncFunctionDef):
        raise RuntimeError("the program must be one function")
    arguments = body[0].args
    for default in [*arguments.defaults, *filter(None, arguments.kw_defaults)]:
        if any(not isinstance(node, ast.Constant | ast.Tuple | ast.Load) for node in ast.walk(default)):
            raise RuntimeError("defaults of arguments must be constants")
    made: dict[str, Any] = {}
    try:
        exec(compile(tree, "<function>", "exec", __future__.annotations.compiler_flag, True), made)
    except Exception as error:
        raise RuntimeError(f"the function cannot be defined: {error}") from error
    if not isinstance(defined := made[body[0].name], FunctionType):
        raise RuntimeError("its decorator makes something else of the function")
    return FunctionType(defined.__code__, {})
