"""`make check` runs the tests of what was changed: `tests/X` for `atomrl/X`."""

import pytest

from tools import changed_tests

PACKAGES = sorted(each.parent.name for each in (changed_tests.ROOT / "atomrl").glob("*/__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_has_its_folder_of_tests(package):
    folder = changed_tests.ROOT / "tests" / package
    assert list(folder.glob("test_*.py")), f"put the tests of atomrl/{package} into tests/{package}"


def test_no_test_stands_outside_a_folder():
    loose = sorted(each.name for each in (changed_tests.ROOT / "tests").glob("test_*.py"))
    assert not loose, f"move them to the folder of the package that they test: {loose}"


def test_what_the_tool_names_is_there():
    named = [
        *changed_tests.ALSO,
        *changed_tests.ALWAYS,
        *(test for also in changed_tests.ALSO.values() for test in also),
    ]
    gone = sorted({each for each in named if not (changed_tests.ROOT / each).exists()})
    assert not gone, f"write where they are now into tools/changed_tests.py: {gone}"


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("atomrl/rewards/format.py", {"tests/rewards", "atomrl/rewards/format.py"}),
        ("atomrl/tools/ui/static/run.js", {"tests/tools/ui"}),
        ("atomrl/trainer/report/metrics.py", {"tests/trainer", "atomrl/trainer/report/metrics.py"}),
        ("atomrl/algorithms/new.py", {"tests/algorithms", "tests/objectives"}),
        ("atomrl/types.py", {"tests", "atomrl/types.py"}),
        ("docs/guides/data.md", {"tests/docs", *changed_tests.PAGES}),
        ("tests/data/test_files.py", {"tests/data/test_files.py"}),
        ("tests/data/test_gone.py", set()),
        ("tests/trainer/scripted.py", {"tests/trainer"}),
        ("LICENSE", set()),
    ],
)
def test_a_changed_file_selects_its_tests(file, tests):
    assert set(changed_tests.chosen([file])) - set(changed_tests.ALWAYS) == tests


def test_rules_and_names_on_pages_are_checked_whatever_was_changed():
    assert set(changed_tests.chosen([])) == set(changed_tests.ALWAYS)
