"""Resolve `trl` and `unsloth` to AtomRL's modules: a finder on `sys.meta_path`, in a process and all that it starts.

`atomrl run` sets `VARIABLE`; every process that imports `atomrl` with it (workers of rewards, ranks) installs the
finder too, and every other Python process that starts with `PROCESSES` on its path.
"""

import ast
import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "ATOMRL_RUN"
SOURCES = {"trl": "atomrl.trl", "unsloth": "atomrl.trl.unsloth"}
"""Package -> the module with its names."""
PROCESSES = str(Path(__file__).parent / "trl" / "processes")
"""Folder with the module that Python imports when it starts."""


def absent(package: str, name: str, reason: str) -> Exception:
    """Return the error for a name of `package` (TRL, unsloth) that AtomRL's module with its names lacks."""
    text = f"AtomRL has no {name} of {package}{reason}"
    if name[0].isupper():
        return ImportError(text, name=package.lower())
    return AttributeError(text)  # inspection asks for such names (pytest), and takes no other error for an answer


class _Served(ModuleType):
    """A module of `trl` or `unsloth`, whose names are those of one module of AtomRL."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        package = self.__name__.partition(".")[0]
        try:
            return getattr(importlib.import_module(SOURCES[package]), name)
        except (AttributeError, ImportError) as error:
            if not _is_used(name):
                return None
            # of `from trl import name`, Python would make an empty submodule, as the finder knows them all
            raise ImportError(str(error), name=package) from None


def _is_used(name: str) -> bool:
    """Return whether a name that a script imports occurs in its code; True for any other that asks for it."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    try:
        tree = ast.parse(Path(frame.f_code.co_filename).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return True
    imported = [
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == name
    ]
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return not imported or not used.isdisjoint(imported)


class _Package(Distribution):
    """The package `trl` for `importlib.metadata.version`, in the version that `trl.__version__` has."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: trl\nVersion: {importlib.import_module(SOURCES['trl']).__version__}\n"

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


class Finder(MetaPathFinder, Loader):
    """Finds `trl`, `unsloth` and their submodules. A submodule has the names of the whole package."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return the spec of a module of these packages; None for any other, and for a class."""
        package = fullname.partition(".")[0]
        if package not in SOURCES or not re.fullmatch(r"[a-z0-9_.]+", fullname):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """Return the package `trl` where it is asked for."""
        return [_Package()] if context.name == "trl" else []

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module that looks its names up."""
        return _Served(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Set the version, which scripts compare."""
        if module.__name__ == "trl":
            module.__version__ = importlib.import_module(SOURCES["trl"]).__version__  # type: ignore[attr-defined]


def install() -> None:
    """Redirect imports of this process, and of those that it starts."""
    os.environ[VARIABLE] = "1"
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if PROCESSES not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([PROCESSES, *paths])
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
