"""Extract the program from a completion: choose among its code blocks, and add missing imports."""

from __future__ import annotations

import ast
import builtins
import re
import typing
from collections.abc import Collection, Sequence
from typing import NamedTuple

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
