"""List the atoms, or show one of them: its signature with shapes, equation, paper and example.

atomrl atoms
atomrl atoms k3_kl
"""

import argparse
import ast
import difflib
import itertools
import re
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

    sources = {path.stem: path.read_text(encoding="utf-8") for path in Path(atomrl.atoms.__path__[0]).glob("*.py")}
    shapes = dict(re.findall(r"^(\w+) = (\w+\[.*\])$", sources["shapes"], re.MULTILINE))
    found = []
    for module, source in sorted(sources.items()):
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                lines = source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
                signature = (
                    re.sub(r",? \)", ")", " ".join(map(str.strip, lines))).removeprefix("def ").removesuffix(":")
                )
                signature = re.sub(r"\w+", lambda name: shapes.get(name[0], name[0]), signature)
                signature = re.sub(r"(?<=[(,]) ?(?=\w+: )", "\n    ", signature)  # one parameter a line
                found.append(Atom(node.name, f"atomrl.atoms.{module}", signature, ast.get_docstring(node) or ""))
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
    for module, found in itertools.groupby(atoms, key=lambda atom: atom.module):
        lines += ["", module, *(f"  {atom.name:<{width}}  {atom.summary}" for atom in found)]
    return "\n".join(lines[1:])


def describe(atom: Atom) -> str:
    """Signature and documentation of one."""
    return f"{atom.module}\n\n{atom.signature}\n\n{atom.docstring}"
