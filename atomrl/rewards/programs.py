"""The reward `code`: the share of tests that the completion's program passes in a sandbox.

The file has three parts: extract the program from the completion, parse the data set's tests, run them. The reward runs
in worker processes and starts a fresh sandbox for every program.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import re
import time
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from atomrl.rewards.errors import NoScore, RewardError
from atomrl.sandbox import Limits, Sandbox, SandboxError, check, run
from atomrl.sandbox.running import Verdict, judge

# --------------------------------------------------------------------------------------------------------------------
# Extract the program from a completion: choose among its code blocks, and add missing imports.

_FENCE = re.compile(r"(?P<indent>[ \t>]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^\s`{]*)[^`]*")
_PYTHON = ("", "python", "py", "python3", "python2", "py3", "python-repl", "ipython", "sage", "starlark")
_CONTEXT = {  # names that LeetCode imports for a solution
    **dict.fromkeys(typing.__all__, "typing"),
    **dict.fromkeys(("deque", "defaultdict", "Counter", "OrderedDict", "namedtuple", "ChainMap"), "collections"),
    **dict.fromkeys(("heappush", "heappop", "heapify", "nlargest", "nsmallest", "heapreplace", "heappushpop"), "heapq"),
    **dict.fromkeys(("bisect_left", "bisect_right", "insort"), "bisect"),
    **dict.fromkeys(("lru_cache", "cache", "reduce", "cmp_to_key"), "functools"),
    **dict.fromkeys(("accumulate", "permutations", "combinations", "product", "groupby", "zip_longest"), "itertools"),
}
_MODULES = ("math", "heapq", "bisect", "itertools", "collections", "functools", "re", "string", "sys", "typing")


class _Block(NamedTuple):
    source: str
    names: frozenset[str]
    """Names that are defined at the top level."""
    unknown: frozenset[str]
    """Names that are used, and are neither defined in the block nor built in."""
    reads: bool
    """It reads stdin."""
    acts: bool
    """It has calls, or statements other than assignments such as `n = 5`."""


def blocks_of(text: str) -> list[tuple[str, str]]:
    """Return (language, source) of each complete fenced block, without the indentation of its fence.

    Example:
        >>> blocks_of("1. So:" + chr(10) + "   ```python" + chr(10) + "   print(1)" + chr(10) + "   ```")
        [('python', 'print(1)\\n')]
    """
    blocks: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.split("\n"):  # splitlines() would cut a string of the program at U+2028
        mark = _FENCE.fullmatch(line.rstrip("\r"))
        if opened is None:
            opened, lines = mark, []
        elif mark and mark["fence"].startswith(opened["fence"]) and _indent(mark) < _indent(opened) + 4:
            if mark["language"]:  # the block before was never closed
                opened, lines = mark, []
                continue
            blocks.append((opened["language"].lower(), "".join(lines)))
            opened = None
        else:
            indent = opened["indent"]
            shared = next((size for size in range(len(indent), 0, -1) if line.startswith(indent[:size])), 0)
            lines.append(line[shared:] + "\n")
    return blocks


def _indent(fence: re.Match[str]) -> int:
    return len(fence["indent"].expandtabs(4))


def last_block(text: str, wanted: Collection[str] = ()) -> str | None:
    """Return the program in a completion, or None where there is no complete block.

    It is the last block of Python that is neither an output nor an example of input. Where tests call `wanted`, it is
    the last one that defines one of these names, so that an example of a call is not taken. Where it uses names of
    earlier blocks, these are put in front, unless one of them reads the input itself: then that one is the program.
    Missing imports of `typing` are added, and in a `class Solution` those that LeetCode adds.

    Example:
        >>> fence = chr(10) + "```" + chr(10)
        >>> last_block("```python" + chr(10) + "print(int(input()) + 1)" + fence + "Output:" + fence + "2" + fence)
        'print(int(input()) + 1)\\n'
    """
    blocks = blocks_of(text)
    if not blocks:
        return None
    read = [_read(source) for language, source in blocks if language in _PYTHON]
    parts = [block for block in read if block is not None]
    if not parts:
        return blocks[-1][1]
    chosen = len(parts) - 1
    if wanted:
        chosen = next((at for at in range(chosen, -1, -1) if parts[at].names & set(wanted)), chosen)
    else:
        while (
            chosen
            and not parts[chosen].reads
            and any(
                block.acts and (not parts[chosen].acts or (block.reads and block.names & parts[chosen].unknown))
                for block in parts[:chosen]
            )
        ):
            chosen -= 1
    return with_imports("".join(block.source for block in _needed(parts[: chosen + 1])))


def _needed(parts: Sequence[_Block]) -> list[_Block]:
    """The last block, after the blocks that define the names which it uses (the latest definition of each)."""
    needed, unknown = [parts[-1]], set(parts[-1].unknown)
    for block in reversed(parts[:-1]):
        if block.names & unknown:
            needed.insert(0, block)
            unknown = (unknown - block.names) | block.unknown
    return needed


def _read(source: str) -> _Block | None:
    """Analyse a block; None where it is no Python, or literals alone."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls = any(isinstance(node, ast.Call | ast.Await) for node in ast.walk(tree))
    if not calls and all(isinstance(node, ast.Expr) for node in tree.body):
        return None  # 2 or [1, 2]: an output
    own, used = _names(tree)
    top = {name.name for name in tree.body if isinstance(name, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            top |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "solution":
            top |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names} - {"*"}
    reads = bool({"input", "stdin"} & used)
    acts = calls or not all(isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign) for node in tree.body)
    return _Block(source, frozenset(top), frozenset(used - own - set(dir(builtins))), reads, acts)


def _names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return (names that are defined anywhere, names and attributes that are used)."""
    own, used = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else own).add(node.id)
        elif isinstance(node, ast.Attribute) and node.attr == "stdin":
            used.add("stdin")
            own.add("stdin")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.alias):
            own.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            own.add(node.name)
    return own, used


def with_imports(source: str) -> str:
    """Add missing imports of `typing` to a source; to a `class Solution` all that LeetCode adds."""
    block = _read(source)
    if block is None or not block.unknown or re.search(r"^\s*from\s+\S+\s+import\s+\*", source, re.MULTILINE):
        return source
    leetcode = "Solution" in block.names
    lines = [f"from {_CONTEXT[name]} import {name}" for name in sorted(block.unknown)
             if name in _CONTEXT and (leetcode or _CONTEXT[name] == "typing")]  # fmt: skip
    lines += [f"import {name}" for name in _MODULES if leetcode and name in block.unknown]
    if not lines:
        return source
    tree = ast.parse(source)
    future = [
        node.end_lineno or 0 for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    kept = source.split("\n")
    at = max(future, default=0)
    return "\n".join([*kept[:at], *lines, *kept[at:]])


# --------------------------------------------------------------------------------------------------------------------
# Parse the tests of a problem, in the formats that data sets use.

_STDIN = ("stdin_stdout", "stdin", "")
_TOLERANCE = 1e-6
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
        raise ValueError(f"these are not tests of a program (docs/guides/rewards.md#code): {str(tests)[:200]!r}")
    if not cases:
        raise ValueError("there are no tests")
    return cases


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


def same_output(output: str, expected: str) -> bool:
    """Return True if two outputs have the same words on the same lines. White space is ignored; a number with a decimal
    point may differ by 1e-6.

    Example:
        >>> same_output("1  2\\n0.3333333\\n", "1 2\\n0.333333333"), same_output("1\\n2", "1 2")
        (True, False)
    """
    mine, theirs = ([line.split() for line in text.strip().splitlines()] for text in (output, expected))
    if [len(line) for line in mine] != [len(line) for line in theirs]:
        return False
    words = zip((word for line in mine for word in line), (word for line in theirs for word in line), strict=True)
    return all(one == other or _near(one, other) for one, other in words)


_NUMERAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def _near(output: str, expected: str) -> bool:
    if "." not in expected or max(len(output), len(expected)) > 40:
        return False
    if not (_NUMERAL.fullmatch(output) and _NUMERAL.fullmatch(expected)):  # float() takes 2_0.0 for 20
        return False
    return math.isclose(float(output), float(expected), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def code(
    prompts: list[Any],
    completions: list[str],
    ground_truth: list[Any],
    test_column: str = "ground_truth",
    all_or_nothing: bool = False,
    case_s: float = 4.0,
    total_s: float = 8.0,
    memory_mb: int = 512,
    sandbox: Sandbox = "bubblewrap",
    **columns: Any,
) -> list[float | NoScore]:
    """Return the share of tests that the completion's program (`last_block`) passes; 0.0 without a program.

    Outputs are compared in this process. Assertions are evaluated in a process that the program cannot reach
    (`atomrl.sandbox.running.judge`). If a test passes the program a function or an object of a class, which is not
    possible there, the completion gets no score.

    Args:
        test_column: the column with the tests, in any format of `cases_of`.
        all_or_nothing: return 1.0 if all tests pass, else 0.0.
        case_s: CPU seconds per test.
        total_s: wall-clock seconds for all tests of a completion. After them the remaining tests have failed if a test
            timed out; otherwise there is no score, and `total_s` should be larger. `timeout_s` must be larger still.
        memory_mb: memory of the program.
        sandbox: `none` runs programs with your permissions and without any protection.

    Raises:
        RewardError: the sandbox is not available.
    """
    check_sandbox({"sandbox": sandbox})
    limits = Limits(cpu_s=math.ceil(case_s), wall_s=2 * case_s + 1, memory_mb=memory_mb)
    rows = {**columns, "ground_truth": ground_truth}
    if test_column not in rows:
        raise ValueError(f"test_column: there is no column {test_column!r}; columns: {', '.join(rows)}")
    scores: list[float | NoScore] = []
    for index, completion in enumerate(completions):
        row = {name: column[index] for name, column in rows.items()}
        cases = cases_of(row[test_column], row)
        program = last_block(completion, called_by(cases))
        if program is None:
            scores.append(0.0)
        else:
            verdicts = _run(program, cases, str(row.get("entry_point") or ""), limits, total_s, all_or_nothing, sandbox)
            scores.append(_score(verdicts, len(cases), all_or_nothing, total_s))
    return scores


def check_sandbox(args: Mapping[str, Any]) -> None:
    """Check that the sandbox in the reward's args is available.

    Raises:
        RewardError: it is not.
    """
    try:
        check(args.get("sandbox", "bubblewrap"))
    except SandboxError as error:
        raise RewardError(f"reward 'code': {error}") from error


def _run(
    program: str, cases: Sequence[Case], entry: str, limits: Limits, total_s: float, stop: bool, sandbox: Sandbox
) -> list[Verdict]:
    """Run the tests until `total_s` is over: those of stdin and stdout first, then those that call functions.

    With `stop`, tests of stdin and stdout end at the first that does not pass.
    """
    end = time.monotonic() + total_s
    verdicts: list[Verdict] = []
    for case in [case for case in cases if case.source is None]:
        left = end - time.monotonic()
        if left > 0 and not (stop and any(one.kind != "passed" for one in verdicts)):
            short = Limits(**{**vars(limits), "wall_s": min(limits.wall_s, left)})
            result = run(program, stdin=case.stdin, limits=short, sandbox=sandbox)
            if result.ended == "timeout" and left < limits.wall_s / 2:
                break  # `total_s` is over, and this test had too little time to be called slow
            right = result.ended == "exit" and same_output(result.stdout, case.stdout)
            verdicts.append(Verdict("timeout" if result.ended == "timeout" else "passed" if right else "failed"))
    sources = [case.source for case in cases if case.source is not None]
    left = end - time.monotonic()
    if sources and left > 0:
        together = Limits(**{**vars(limits), "cpu_s": math.ceil(max(limits.cpu_s, total_s))})
        verdicts += judge(program, sources, entries=[entry], limits=together, total_s=left, sandbox=sandbox)
    return verdicts


def _score(verdicts: Sequence[Verdict], cases: int, all_or_nothing: bool, total_s: float) -> float | NoScore:
    kinds = [verdict.kind for verdict in verdicts]
    if "unserved" in kinds:
        number = kinds.index("unserved")
        return NoScore("invalid", f"test {number + 1}: {verdicts[number].message}")
    if all_or_nothing and any(kind != "passed" for kind in kinds):
        return 0.0
    if len(kinds) < cases and "timeout" not in kinds:
        more = "raise total_s and timeout_s"
        return NoScore("timeout", f"{cases} tests took over {total_s:g} s, though none was slow ({more})")
    return kinds.count("passed") / cases
