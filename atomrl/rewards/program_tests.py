"""The tests of a programming problem, in the layouts that data sets have them in."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_STDIN = ("stdin_stdout", "stdin", "")
_TOLERANCE = 1e-6
_CALL = """\
import json as _json
import solution as _solution

def _plain(value):
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value

_args, _wanted = _json.loads({args!r}), _json.loads({wanted!r})
_owner = _solution if hasattr(_solution, {name!r}) else _solution.Solution()
_found = _plain(getattr(_owner, {name!r})(*_args))
assert _found == _wanted
"""
"""A call as the `fn_name` of APPS means it: tuples are lists."""


class Case(NamedTuple):
    """One test: what a program reads and has to write, or a source that calls functions."""

    stdin: str = ""
    stdout: str = ""
    source: str | None = None


def cases_of(tests: Any, row: Mapping[str, Any]) -> list[Case]:
    """The tests of a problem.

    Args:
        tests: `{"inputs": [...], "outputs": [...]}`, with `fn_name` for calls in place of programs (APPS, TACO, verl);
            a list of `{"input": ..., "output": ...}`, with `type` or `testtype` (PrimeIntellect, LiveCodeBench); a list
            of assertions (MBPP); a source with assertions, functions `test_*`, or `check(candidate)` (HumanEval); or
            any of these as JSON.
        row: the other columns, of which `entry_point`, `fn_name`, `test_imports` and `test_setup_code` are read.

    APPS puts what a call returns into a list: `[[3], [5]]` are the outputs 3 and 5. That is so where each output of a
    problem, given as `outputs` and not as text, is a list of one element, and nowhere else: `[[0, 1], [1]]` are
    two lists.

    Raises:
        ValueError: they are none of these, or there are none.

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
        name = tests.get("fn_name") or row.get("fn_name")
        if isinstance(tests["inputs"], str) or isinstance(tests["outputs"], str):
            raise ValueError(f"inputs and outputs must be lists: {str(tests)[:200]!r}")
        if len(tests["inputs"]) != len(tests["outputs"]):
            raise ValueError(f"there are {len(tests['inputs'])} inputs and {len(tests['outputs'])} outputs")
        outputs = list(tests["outputs"])
        if name and all(isinstance(one, list) and len(one) == 1 for one in outputs):
            outputs = [one[0] for one in outputs]
        cases = [_case(given, wanted, name) for given, wanted in zip(tests["inputs"], outputs, strict=True)]
    elif isinstance(tests, list) and all(isinstance(item, str) for item in tests):
        for item in tests:
            _require_test(item)
        cases = [Case(source=setup + item) for item in tests]
    elif isinstance(tests, list) and all(isinstance(one, Mapping) and {"input", "output"} <= {*one} for one in tests):
        cases = [_case(item["input"], item["output"], _function_of(item, row)) for item in tests]
    else:
        raise ValueError(f"these are no tests of a program (docs/guides/rewards.md#code): {str(tests)[:200]!r}")
    if not cases:
        raise ValueError("there are no tests")
    return cases


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _function_of(item: Mapping[str, Any], row: Mapping[str, Any]) -> str | None:
    """What a case calls; None: it is a program's."""
    if (item.get("type") or item.get("testtype") or "") in _STDIN and not item.get("fn_name"):
        return None
    name = item.get("fn_name") or (item.get("metadata") or {}).get("func_name") or row.get("fn_name")
    if not name:
        raise ValueError(f"a test that calls a function does not name it (fn_name): {str(item)[:200]!r}")
    return str(name)


def _case(given: Any, wanted: Any, name: str | None) -> Case:
    if name is None:
        return Case(stdin=_text(given), stdout=_text(wanted))
    if isinstance(given, str):  # an argument on each line
        given = [_parsed(line) for line in given.splitlines() if line.strip()]
    if not isinstance(given, list | tuple):
        raise ValueError(f"what {name} is called with must be a list of its arguments: {given!r:.200}")
    wanted = _parsed(wanted) if isinstance(wanted, str) else wanted
    return Case(source=_CALL.format(args=json.dumps(given), wanted=json.dumps(wanted), name=name))


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _require_test(source: str) -> None:
    """
    Raises:
        ValueError: it is no Python, or a comparison without `assert`, which every program would pass.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"a test is no Python: {error}: {source[:200]!r}") from error
    if all(isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call) for node in tree.body):
        raise ValueError(f"a test asserts nothing: {source[:200]!r}")


def _sources(source: str, entry: str | None) -> list[str]:
    """A test for each assertion at the top, with what stands before it, and for each function that is one."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"the tests are neither JSON nor Python: {error}: {source[:200]!r}") from error
    before: list[ast.stmt] = []
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assert):
            found.append(ast.unparse(ast.Module([*before, node], [])))
        else:
            before.append(node)
    functions = [node.name for node in before if isinstance(node, ast.FunctionDef)]
    calls = [f"{name}()" for name in functions if name.startswith("test_")]
    if "check" in functions and entry:
        calls.append(f"check({entry})")
    setup = ast.unparse(ast.Module(before, []))
    return found + [f"{setup}\n{call}" for call in calls]


def called_by(cases: Sequence[Case]) -> frozenset[str]:
    """The names that tests use and do not define: of the program, or Python's.

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
    return frozenset(names) - {"_json", "_solution", "_plain"}


def same_output(found: str, wanted: str) -> bool:
    """Whether a program wrote what it should: the same words on the same lines, whatever white space is around them;
    a word with a decimal point may differ by a millionth.

    Example:
        >>> same_output("1  2\\n0.3333333\\n", "1 2\\n0.333333333"), same_output("1\\n2", "1 2")
        (True, False)
    """
    mine, theirs = ([line.split() for line in text.strip().splitlines()] for text in (found, wanted))
    if [len(line) for line in mine] != [len(line) for line in theirs]:
        return False
    words = zip((word for line in mine for word in line), (word for line in theirs for word in line), strict=True)
    return all(one == other or _near(one, other) for one, other in words)


_NUMERAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def _near(found: str, wanted: str) -> bool:
    if "." not in wanted or max(len(found), len(wanted)) > 40:
        return False
    if not (_NUMERAL.fullmatch(found) and _NUMERAL.fullmatch(wanted)):  # float() takes 2_0.0 for 20
        return False
    return math.isclose(float(found), float(wanted), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
