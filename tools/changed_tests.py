"""Print the tests of what has changed since `main`, committed or not: `make check` runs them.

    python tools/changed_tests.py               what git says has changed
    python tools/changed_tests.py FILE ...      as if these files had

The tests of `atomrl/X` stand in `tests/X`; a changed module's doctests are run, too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
ALWAYS = ("tests/architecture", "tests/docs/test_examples.py", "tests/docs/test_facts.py", "tests/docs/test_names.py")
PAGES = ("tests/algorithms/test_pages.py", "tests/algorithms/test_preference_pages.py")
ALSO = {
    "atomrl/algorithms": ("tests/objectives",),
    "atomrl/atoms": ("tests/parity", "tests/objectives", *PAGES),
    "atomrl/objectives": ("tests/algorithms",),
    "atomrl/backends": ("tests/conformance/test_backends.py", "tests/conformance/test_backend_models.py"),
    "atomrl/engines": ("tests/conformance/test_engines.py",),
    "atomrl/environments": ("tests/engines/test_episodes.py",),
    "atomrl/weight_sync": ("tests/conformance/test_engines.py",),
    "atomrl/config": ("tests/docs", "tests/tools/ui/test_drafts.py"),
    "configs": ("tests/config/test_shipped_configs.py", *PAGES),
    "docs": ("tests/docs", *PAGES),
    "examples": ("tests/docs", "tests/objectives/test_new_objectives.py"),
    "benchmarks": ("tests/benchmarks",),
    "tools": ("tests/project",),
    "CHANGELOG.md": ("tests/project",),
    "Makefile": ("tests/project",),
}
"""Tests beside those of the mirrored folder, by the beginning of a path."""


def changed_files() -> list[str]:
    """Return the files that differ from where this branch left `main`, and those that git does not know yet."""

    def git(*arguments: str) -> list[str]:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        ).stdout.split()

    known = git("for-each-ref", "--format=%(refname:short)", "refs/remotes/origin/main", "refs/heads/main")
    base = git("merge-base", "HEAD", sorted(known)[-1])[0] if known else "HEAD"
    return git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")


def tests_of(file: str) -> set[str]:
    """Return the files or folders of tests that a change of `file`, a path from the root, should run."""
    path = PurePosixPath(file)
    tests = {test for start, also in ALSO.items() if path.is_relative_to(start) for test in also}
    if path.parts[0] == "tests":
        return {file} if path.name.startswith("test_") else {str(path.parent)}
    if path.parts[0] != "atomrl":
        return tests
    package = path.parent if len(path.parts) > 2 else path
    mirrored = [str(PurePosixPath("tests", *folder.parts[1:])) for folder in (package, *package.parents)]
    doctests = {file} if path.suffix == ".py" else set()
    return tests | doctests | {next(test for test in mirrored if (ROOT / test).is_dir())}


def chosen(files: list[str]) -> list[str]:
    """Return the tests of all the files, without those that stand in a folder which is run whole, or are gone."""
    tests = {test for test in (*ALWAYS, *(test for file in files for test in tests_of(file))) if (ROOT / test).exists()}
    whole = {PurePosixPath(test) for test in tests}
    return sorted(test for test in tests if not whole.intersection(PurePosixPath(test).parents))


if __name__ == "__main__":
    print(*chosen(sys.argv[1:] or changed_files()))
