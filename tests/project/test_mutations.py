"""The mutations of tools/mutations.py are where they say, so that none of them is left out unseen."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("mutations")


def test_each_mutation_has_one_place_and_tests(tool):
    assert len({one.name for one in tool.MUTATIONS}) == len(tool.MUTATIONS) >= 20
    for one in tool.MUTATIONS:
        assert tool.place_of(one).is_file() and one.old != one.new
        gone = [test for test in one.tests if not (ROOT / test).exists()]
        assert not gone, f"{one.name!r} in tools/mutations.py names tests that have moved: {gone}"


def test_a_mutation_is_made_and_taken_back(tool, tmp_path):
    (tmp_path / "atomrl").mkdir()
    file = tmp_path / "atomrl" / "a.py"
    file.write_text("x = 1\n")
    with tool.applied(tool.Mutation("sum", "x = 1", "x = 2", ()), tmp_path):
        assert file.read_text() == "x = 2\n"
    assert file.read_text() == "x = 1\n"
    file.write_text("x = 1\nx = 1\n")
    with pytest.raises(LookupError, match="stand once"), tool.applied(tool.Mutation("sum", "x = 1", "", ()), tmp_path):
        pass
