"""List the atoms, or show one of them: its signature with shapes, equation, paper and example.

atomrl atoms
atomrl atoms k3_kl
"""

from __future__ import annotations

import argparse
import ast
import difflib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Atom:
    """One public function of `atomrl.atoms`, as its source says."""

    name: str
    module: str
    signature: str
    docstring: str

    @property
    def summary(self) -> str:
        return self.docstring.partition("\n")[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="the atom to show")


def run(arguments: argparse.Namespace) -> int:
    atoms = read_atoms()
    print(describe(find(atoms, arguments.name)) if arguments.name else listing(atoms))
    return 0


def read_atoms() -> list[Atom]:
    """All atoms by module. The source is parsed, not imported: that takes no torch and shows the names of shapes."""
    import atomrl.atoms

    found = []
    for path in sorted(Path(atomrl.atoms.__path__[0]).glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                signature = f"{node.name}(\n    {_parameters(node)}\n) -> {_annotation(node.returns)}"
                found.append(Atom(node.name, f"atomrl.atoms.{path.stem}", signature, ast.get_docstring(node) or ""))
    return found


def find(atoms: list[Atom], name: str) -> Atom:
    """The atom of that name (with or without its module).

    Raises:
        ValueError: there is none; the message has those that are most like it.
    """
    leaf = name.rpartition(".")[2]
    for atom in atoms:
        if atom.name == leaf:
            return atom
    names = [atom.name for atom in atoms]
    near = difflib.get_close_matches(leaf, names, n=3, cutoff=0.4) or [item for item in names if leaf in item][:3]
    raise ValueError(f"no atom {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else "; see atomrl atoms"))


def listing(atoms: list[Atom]) -> str:
    """Name and first line of each, under its module."""
    width = max((len(atom.name) for atom in atoms), default=0)
    lines: list[str] = []
    module = ""
    for atom in atoms:
        if atom.module != module:
            module = atom.module
            lines += ["", module] if lines else [module]
        lines.append(f"  {atom.name:<{width}}  {atom.summary}")
    return "\n".join(lines)


def describe(atom: Atom) -> str:
    """Signature and documentation of one."""
    return f"{atom.module}\n\n{atom.signature}\n\n{atom.docstring}"


def _parameters(node: ast.FunctionDef) -> str:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    texts = [_parameter(item, default) for item, default in zip(positional, defaults, strict=True)]
    if arguments.kwonlyargs:
        texts.append(f"*{_parameter(arguments.vararg, None)}" if arguments.vararg else "*")
        pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        texts += [_parameter(item, default) for item, default in pairs]
    return ",\n    ".join(texts)


def _parameter(item: ast.arg, default: ast.expr | None) -> str:
    return f"{item.arg}: {_annotation(item.annotation)}" + (f" = {ast.unparse(default)}" if default else "")


def _annotation(node: ast.expr | None) -> str:
    return ast.unparse(node).replace("'", '"') if node is not None else "Any"
