"""The rules that keep the code readable: imports one way, no cycles, light imports."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "atomrl"
FILES = sorted(PACKAGE.rglob("*.py"))


def layers_of(page: str) -> list[set[str]]:
    """The list of docs/development/design.md: left to right, what stands in braces on one level."""
    (listed,) = re.findall(r"(?m)(?:^ {4}.*->.*\n?)+", page.partition("## Layers")[2])
    return [set(re.findall(r"\w+", level)) for level in listed.split("->")]


# Left to right; a module imports only from layers to its left, and from its own package.
LAYERS = layers_of((ROOT / "docs" / "development" / "design.md").read_text(encoding="utf-8"))
LAYER = {name: level for level, names in enumerate(LAYERS) for name in names}
OPTIONAL = {"peft", "wandb", "matplotlib", "tensorboard", "reasoning_gym", "pyarrow", "vllm", "ray", "sglang", "httpx"}
OPTIONAL |= {"bitsandbytes", "megatron", "optuna", "mlflow", "sqlalchemy", "trackio", "shtab"}
OPTIONAL |= {"scipy", "bm25s", "faiss", "uvicorn", "Stemmer", "pyseccomp"}
OPTIONAL |= {"datasets", "starlette", "orjson", "playwright"}
OPTIONAL |= {"mcp", "httpx2", "gymnasium", "textarena", "textworld", "skyrl_gym", "openenv"}
IMPORTED_LAST = {"tools/ui/routes.py"}
"""Made of an optional package, and imported in a function by what needs it."""


def unit(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_units(path: Path) -> set[str]:
    units = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write `from atomrl...`: a relative import hides the layer"
            names = [node.module or ""]
            if node.module == "atomrl":
                names = [f"atomrl.{alias.name}" for alias in node.names]
        units |= {name.split(".")[1] for name in names if name.startswith("atomrl.")}
    return units


def layer_faults(path: Path, name: str, imports: set[str]) -> list[str]:
    faults = []
    for other in imports - {name, "__version__"}:
        if other not in LAYER or name not in LAYER:
            faults.append(
                f"{path.relative_to(ROOT)} ({name}) imports {other}: give both a layer in docs/development/design.md"
            )
        elif LAYER[other] >= LAYER[name]:
            faults.append(
                f"{path.relative_to(ROOT)} ({name}) imports {other}, which is not to its left in "
                f"docs/development/design.md: move what is shared to the left, or hand it over as an argument"
            )
    return faults


def test_every_module_has_a_layer():
    units = {unit(path) for path in FILES} - {"__init__", "__main__"}
    assert units == set(LAYER), f"mend the list of layers in docs/development/design.md: {units ^ set(LAYER)}"


def test_imports_point_one_way():
    faults = []
    for path in FILES:
        if unit(path) not in {"__init__", "__main__"}:
            faults += layer_faults(path, unit(path), imported_units(path))
    assert not faults, "\n".join(faults)


def test_the_layer_check_can_fail():
    assert layer_faults(PACKAGE / "atoms" / "kl.py", "atoms", {"loop"})
    assert layer_faults(PACKAGE / "data" / "rows.py", "data", {"rewards"})
    assert "give both a layer" in layer_faults(PACKAGE / "data" / "rows.py", "data", {"nowhere"})[0]


LATE_IMPORTS = {
    ("atomrl.models.lora", "atomrl.models.loading"): "a folder of adapters names the base model that it loads",
    ("atomrl.models.lora", "atomrl.models.scalar"): "and may have the head of a reward model",
    ("atomrl.tools.ui.server", "atomrl.tools.ui.routes"): "made of an optional package",
    ("atomrl.tracking.reading.run", "atomrl.tracking.reading.plots"): "`Run.plot` is a shortcut to its figure",
}
"""Imports inside functions that close a cycle (importer, imported), each with its reason. No others may."""


@cache
def import_graph() -> dict[str, set[str]]:
    """Return the modules that each module of the package imports anywhere, also inside functions."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= {name if name in paths else str(node.module) for name in names}
        graph[module] = imported & paths.keys() - {module}
    return graph


def cycle_of(graph: dict[str, set[str]], without: Iterable[tuple[str, str]] = ()) -> list[str]:
    """Return the modules of one cycle of imports, in order; empty if there is none."""
    try:
        TopologicalSorter(
            {name: {other for other in imported if (name, other) not in without} for name, imported in graph.items()}
        ).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_cycle_of_imports():
    """An import inside a function hides a cycle from Python, not from the reader."""
    cycle = cycle_of(import_graph(), without=LATE_IMPORTS)
    assert not cycle, f"move what two of these share into a module that imports neither: {' -> '.join(cycle)}"


@pytest.mark.parametrize("late", LATE_IMPORTS, ids="->".join)
def test_each_late_import_of_the_list_closes_a_cycle(late):
    assert cycle_of(import_graph(), without=LATE_IMPORTS.keys() - {late}), (
        "take it off LATE_IMPORTS: it closes no cycle any more"
    )


def test_the_package_and_its_examples_import_nothing_from_tests():
    faults = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(r"\b(?:from|import) (?:tests|benchmarks)\b", line)
    ]
    assert not faults, "an installed package has neither tests nor benchmarks; move it into atomrl:\n" + "\n".join(
        faults
    )


def test_optional_packages_are_imported_only_where_used():
    faults = []
    for path in FILES:
        if path.relative_to(PACKAGE).as_posix() in IMPORTED_LAST:
            continue
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            faults += [f"{path.relative_to(ROOT)}:{node.lineno}: {n}" for n in names if n.split(".")[0] in OPTIONAL]
    assert not faults, "import these in the function that uses them; not everybody has them:\n" + "\n".join(faults)


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


ENGINE_HOOKS = {"_advance", "_make_rule"}
"""Methods that a subclass implements, with an underscore because callers of an engine use others."""
PATCHES = {"setattr", "getattr", "delattr", "patch", "object"}


def private_names(tree: ast.Module) -> set[str]:
    """Return the names with one underscore that a module defines: functions, classes, variables and attributes."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in names if re.match("_[a-zA-Z]", name)}


def private_uses(tree: ast.Module, private: set[str]) -> set[tuple[int, str]]:
    """Return line and name of each private name of the package that a module reads, imports or patches."""
    uses: set[tuple[int, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            uses.add((node.lineno, node.attr))
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("atomrl"):
            uses |= {(node.lineno, alias.name) for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in PATCHES:
            texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            uses |= {(node.lineno, text.rpartition(".")[2]) for text in texts}
    of_the_package = private - private_names(tree)
    return {(line, name) for line, name in uses if name in of_the_package}


def test_tests_use_public_names():
    private = set[str]().union(*(private_names(ast.parse(path.read_text())) for path in FILES)) - ENGINE_HOOKS
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, name in sorted(private_uses(ast.parse(path.read_text()), private))
    ]
    assert not faults, "prove it through public behaviour, or make the name public:\n" + "\n".join(faults)


@pytest.mark.parametrize("line", ["module._x", "monkeypatch.setattr(module, '_x', 1)", "patch('atomrl.module._x')",
                                  "from atomrl.module import _x"])  # fmt: skip
def test_the_check_of_names_can_fail(line):
    assert private_uses(ast.parse(line), {"_x"}) == {(1, "_x")}


def test_the_package_holds_no_documentation():
    inside = [str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.is_symlink() or path.name == "docs"]
    assert not inside, f"move out of the package; here it would be part of the wheel: {inside}"


def test_importing_the_package_is_light():
    loaded = loaded_by("import atomrl")
    heavy = loaded & (OPTIONAL | {"transformers"})
    assert not heavy, f"import these in the function that uses them, not with `atomrl`: {heavy}"


def test_help_needs_no_torch():
    code = "import sys\ntry:\n    from atomrl.cli.main import main; main(['--help'])\nexcept SystemExit:\n    pass"
    code += "\nassert not {'torch', 'transformers'} & set(sys.modules), 'torch was imported'"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, f"`python -X importtime -m atomrl --help` shows who imports it:\n{result.stderr}"
