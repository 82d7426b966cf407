"""Print the part of CHANGELOG.md on a release.

python tools/release_notes.py v0.1.0

Raises an error if the tag is not the version of the package, or the changelog does not have it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(tag: str, changelog: str, version: str) -> str:
    """Return the section of a version.

    Raises:
        SystemExit: the tag is not that of the version, or the version has no section.
    """
    if tag != f"v{version}":
        raise SystemExit(
            f"the tag is {tag}, and atomrl.__version__ is {version}: tag v{version}, or change the version"
        )
    section = re.search(rf"(?ms)^## {re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)", changelog)
    if section is None or not section[1].strip():
        raise SystemExit(f"CHANGELOG.md has no section {version}")
    return section[1].strip()


def version_of(source: str) -> str:
    """Return the version that the source of the package states."""
    return re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)[0]


if __name__ == "__main__":
    version = version_of((ROOT / "atomrl" / "__init__.py").read_text(encoding="utf-8"))
    print(notes(sys.argv[1], (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version))
