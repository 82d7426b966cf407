"""tools/path.py finds every function that its list names."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    return importlib.import_module("path")


def test_the_path_from_a_row_to_a_gradient_exists(tool, capsys):
    tool.main()
    *parts, total = capsys.readouterr().out.splitlines()
    assert len(parts) == len(tool.PATH) and total.startswith("in all")


def test_lines_are_those_of_code_alone(tool):
    assert tool.measure(["atoms/advantages.py::per_token"]) == (1, 1, 2)


def test_a_function_that_is_gone_is_named(tool):
    with pytest.raises(LookupError, match=r"main\.py::absent.*away\.py::main"):
        tool.measure(["cli/main.py::main", "cli/main.py::absent", "cli/away.py::main"])
