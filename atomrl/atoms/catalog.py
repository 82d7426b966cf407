"""The atoms with their documentation, parsed from their source."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from atomrl.atoms import Source


@dataclass(frozen=True)
class Atom:
    """A public function of `atomrl.atoms`, parsed from its source."""

    name: str
    module: str
    signature: str
    docstring: str

    @property
    def summary(self) -> str:
        return self.docstring.partition("\n")[0]


def read_atoms() -> list[Atom]:
    """Read all atoms, sorted by module. Parses the source: that needs no torch, and shows the names of shapes."""
    sources = {path.stem: path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py")}
    shapes = dict(re.findall(r"^(\w+) = (\w+\[.*\])$", sources["masks"], re.MULTILINE))
    atoms = []
    for module, source in sorted(sources.items()):
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and (reference := parsed_source(node)):
                lines = source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
                signature = (
                    re.sub(r",? \)", ")", " ".join(map(str.strip, lines))).removeprefix("def ").removesuffix(":")
                )
                signature = re.sub(r"\w+", lambda name: shapes.get(name[0], name[0]), signature)
                signature = re.sub(r"(?<=[(,]) ?(?=\w+: )", "\n    ", signature)  # one parameter a line
                docstring = reference.insert(ast.get_docstring(node) or "")
                atoms.append(Atom(node.name, f"atomrl.atoms.{module}", signature, docstring))
    return atoms


def parsed_source(node: ast.FunctionDef) -> Source | None:
    r"""Return the equation and the paper of an atom from its parsed code, which needs no torch; None for others.

    Example:
        >>> parsed_source(ast.parse('@atom("y = x^2")\ndef square(x):\n    "Square."').body[0])
        Source(text='y = x^2', latex='', paper='')
    """
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "atom":
            values = [ast.literal_eval(value) for value in call.args]
            return Source(*values, **{str(item.arg): ast.literal_eval(item.value) for item in call.keywords})
    return None
