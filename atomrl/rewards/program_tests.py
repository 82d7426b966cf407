"""Parse the tests of a problem, in the formats that data sets use."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_STDIN = ("stdin_stdout", "stdin", "")
_CALL = """\
import json as _json
import solution as _solution

def _plain(value):
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value

def _same(one, other):
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return one == other or (one != one and other != other)

_args, _wanted = _json.loads({args!r}), _json.loads({wanted!r})
_owner = _solution if hasattr(_solution, {name!r}) else _solution.Solution()
_found = _plain(getattr(_owner, {name!r})(*_args))
assert _same(_found, _wanted)
"""
"""Test of a function call as in APPS (`fn_name`): tuples equal lists, NaN equals NaN, and True is not 1."""


class Case(NamedTuple):
    """One test: stdin and expected stdout of a program, or the source of a test that calls functions."""

    stdin: str = ""
    stdout: str = ""
    source: str | None = None


def cases_of(tests: Any, row: Mapping[str, Any]) -> list[Case]:
    """Parse the tests of a problem.

    Args:
        tests: `{"inputs": [...], "outputs": [...]}`, with `fn_name` for function calls instead of programs (APPS, TACO,
            verl); a list of `{"input": ..., "output": ...}`, with `type` or `testtype` (PrimeIntellect, LiveCodeBench);
            a list of assertions (MBPP); a source with assertions, functions `test_*`, or `check(candidate)`
            (HumanEval); or any of these as JSON.
        row: the other columns, of which `entry_point`, `fn_name`, `test_imports` and `test_setup_code` are read.

    APPS wraps the result of a call in a list: `[[3], [5]]` means the outputs 3 and 5. This is assumed if every output
    of a problem is a list of one element (not a text): `[[0, 1], [1]]` are two lists.

    Raises:
        ValueError: the format is none of these, or there are no tests.

    Example:
        >>> cases_of('{"inputs": ["1 2"], "outputs": ["3"]}', {})
        [Case(stdin='1 2', stdout='3', source=None)]
        >>> [case.source for case in cases_of(["assert f(1) == 2"], {"test_imports": ["import math"]})]
        ['import math\\nassert f(1) == 2']
    """
    if isinstance(tests, str):
        tests = _parsed(tests)
    before = [*(row.get("test_imports") or []), row.get("test_setup_code") or ""]
    setup = "".join(f"{line}\n" for line in before if line)
    if isinstance(tests, str):
        cases = [Case(source=setup + source) for source in _sources(tests, row.get("entry_point"))]
    elif isinstance(tests, Mapping) and {"inputs", "outputs"} <= {*tests}:
        cases = _paired(tests, tests.get("fn_name") or row.get("fn_name"))
    elif isinstance(tests, list) and all(isinstance(item, str) for item in tests):
        for item in tests:
            _require_test(item)
        cases = [Case(source=setup + item) for item in tests]
    elif isinstance(tests, list) and all(isinstance(one, Mapping) and {"input", "output"} <= {*one} for one in tests):
        cases = [_case(item["input"], item["output"], _function_of(item, row)) for item in tests]
    else:
        raise ValueError(f"these are not tests of a program (docs/guides/rewards.md#code): {str(tests)[:200]!r}")
    if not cases:
        raise ValueError("there are no tests")
    return cases


def _paired(tests: Mapping[str, Any], function: str | None) -> list[Case]:
    """Return a test for each of `inputs` and `outputs`, of a program or of calls of a function (APPS)."""
    if isinstance(tests["inputs"], str) or isinstance(tests["outputs"], str):
        raise ValueError(f"inputs and outputs must be lists: {str(tests)[:200]!r}")
    if len(tests["inputs"]) != len(tests["outputs"]):
        raise ValueError(f"there are {len(tests['inputs'])} inputs and {len(tests['outputs'])} outputs")
    outputs = list(tests["outputs"])
    if function and all(isinstance(one, list) and len(one) == 1 for one in outputs):
        outputs = [one[0] for one in outputs]
    return [_case(given, wanted, function) for given, wanted in zip(tests["inputs"], outputs, strict=True)]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _function_of(item: Mapping[str, Any], row: Mapping[str, Any]) -> str | None:
    """Return the name of the function that a test calls, or None if it tests a program."""
    if (item.get("type") or item.get("testtype") or "") in _STDIN and not item.get("fn_name"):
        return None
    name = item.get("fn_name") or (item.get("metadata") or {}).get("func_name") or row.get("fn_name")
    if not name:
        raise ValueError(f"a test that calls a function does not name it (fn_name): {str(item)[:200]!r}")
    return str(name)


def _case(given: Any, wanted: Any, name: str | None) -> Case:
    if name is None:
        return Case(stdin=_text(given), stdout=_text(wanted))
    if isinstance(given, str):  # one argument per line
        given = [_parsed(line) for line in given.splitlines() if line.strip()]
    if not isinstance(given, list | tuple):
        raise ValueError(f"the input of {name} must be a list of its arguments: {given!r:.200}")
    wanted = _parsed(wanted) if isinstance(wanted, str) else wanted
    return Case(source=_CALL.format(args=json.dumps(given), wanted=json.dumps(wanted), name=name))


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _require_test(source: str) -> None:
    """Check that a source can fail as a test.

    Raises:
        ValueError: it is not Python, or a comparison without `assert`, which every program would pass.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"a test is not Python: {error}: {source[:200]!r}") from error
    if all(isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call) for node in tree.body):
        raise ValueError(f"a test asserts nothing: {source[:200]!r}")


def _sources(source: str, entry: str | None) -> list[str]:
    """Split a source into tests: one per top-level assertion, with the statements before it, and one per function."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"the tests are neither JSON nor Python: {error}: {source[:200]!r}") from error
    before: list[ast.stmt] = []
    tests: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assert):
            tests.append(ast.unparse(ast.Module([*before, node], [])))
        else:
            before.append(node)
    functions = [node.name for node in before if isinstance(node, ast.FunctionDef)]
    calls = [f"{name}()" for name in functions if name.startswith("test_")]
    if "check" in functions and entry:
        calls.append(f"check({entry})")
    setup = ast.unparse(ast.Module(before, []))
    return tests + [f"{setup}\n{call}" for call in calls]


def called_by(cases: Sequence[Case]) -> frozenset[str]:
    """Return the names that tests use and do not define: functions of the program, and built-ins.

    Example:
        >>> sorted(called_by([Case(source="x = f(1)" + chr(10) + "assert x == two")]))
        ['f', 'two']
    """
    names = set[str]()
    for source in {case.source for case in cases if case.source is not None}:
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except SyntaxError:
            continue
        own = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        names |= {node.id for node in nodes if isinstance(node, ast.Name)} - own
        names |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and node.attr == "Solution"}
        names |= {str(node.args[1].value) for node in nodes if isinstance(node, ast.Call) and len(node.args) > 1
                  and isinstance(node.args[1], ast.Constant) and isinstance(node.args[0], ast.Name)
                  and node.args[0].id == "_solution"}  # fmt: skip
    return frozenset(names) - {"_json", "_solution", "_plain", "_same"}
