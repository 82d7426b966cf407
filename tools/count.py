"""Print the size of a Python package in one row: files, code, docstrings, comments, code a file, functions.

python tools/count.py            # atomrl
python tools/count.py FOLDER
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def line_sets(source: str, tree: ast.Module) -> tuple[set[int], set[int], set[int]]:
    """Return the numbers of the lines of code, of docstrings, and of comments alone; blank lines are in none.

    A docstring is any string that is a statement, also below a field or a constant.
    """
    lines = source.splitlines()
    docs = {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return code - docs, {number for number in docs if lines[number - 1].strip()}, comments - code


def row(folder: Path) -> str:
    """Count all .py files below a folder."""
    files = sorted(folder.rglob("*.py"))
    code = docs = comments = functions = 0
    for file in files:
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        sizes = [len(numbers) for numbers in line_sets(source, tree)]
        code, docs, comments = code + sizes[0], docs + sizes[1], comments + sizes[2]
        functions += sum(isinstance(node, FUNCTION) for node in ast.walk(tree))
    if not code:
        raise SystemExit(f"error: {folder} has no Python code")
    return (
        f"{folder.name}: {len(files)} .py files, {code:,} lines of code, {docs:,} of docstrings, {comments:,} of "
        f"comments; {code / len(files):.0f} lines of code a file, {1000 * functions / code:.0f} functions per 1,000"
    )


if __name__ == "__main__":
    print(row(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "atomrl"))
